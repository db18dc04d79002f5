// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file that holds the figures of the last run of each benchmark.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

const HEADING: &str = "# Benchmark results\n\nEach section is written by the command it names.\n";

/// Rewrites one section of the file, and leaves the others.
pub fn write(path: &Path, section: &str, text: &str) -> io::Result<()> {
    let old = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => HEADING.to_owned(),
        other => other?,
    };
    fs::write(path, replace(&old, section, text))
}

/// The section lies between `<!-- name -->` and `<!-- /name -->`; one that is not there yet comes last.
fn replace(old: &str, section: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- {section} -->"), format!("<!-- /{section} -->"));
    let new = format!("{begin}\n{text}{end}");
    let found = old
        .split_once(&begin)
        .and_then(|(before, rest)| rest.split_once(&end).map(|(_, after)| format!("{before}{new}{after}")));
    found.unwrap_or_else(|| format!("{old}\n{new}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_section_changes() {
        let old = "a\n<!-- x -->\n1\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n";
        assert_eq!(replace(old, "x", "3\n"), "a\n<!-- x -->\n3\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n");
        assert_eq!(replace("a\n", "x", "3\n"), "a\n\n<!-- x -->\n3\n<!-- /x -->\n");
    }
}
