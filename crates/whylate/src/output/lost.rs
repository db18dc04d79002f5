// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--help-lost`: a line for each reason in `lost`.

use std::io::{self, Write};

use whylate_model::lost::{of_source, sources};

/// Explains the reasons of one source, or of all of them.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut dyn Write, source: Option<&str>) -> io::Result<()> {
    writeln!(out, "Lost events could not be counted, for one of these reasons:")?;
    for source in sources().iter().filter(|name| source.is_none_or(|source| source == **name)) {
        writeln!(out, "\n{source}:")?;
        let width = of_source(source).map(|reason| reason.name.len()).max().unwrap_or(0);
        for reason in of_source(source) {
            writeln!(out, "  {:width$}  {}", reason.name, reason.meaning)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(source: Option<&str>) -> String {
        let mut out = Vec::new();
        write(&mut out, source).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn each_reason_of_a_source_has_a_line() {
        insta::assert_snapshot!(printed(Some("sqpoll")));
        let all = printed(None);
        assert!(sources().iter().all(|source| all.contains(&format!("\n{source}:\n"))), "{all}");
    }
}
