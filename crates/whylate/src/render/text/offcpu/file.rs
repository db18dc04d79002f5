// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes profiles in the format of the file's extension.

use std::io::{self, Write};
use std::path::Path;

use whylate_model::Snapshot;
use whylate_model::folded::{Root, lines, waiting};

use super::{pprof, speedscope, svg, write_lines};
use crate::render::json::write_line;

/// Format of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A flame graph.
    Svg,
    /// Folded stacks, one per line.
    Folded,
    /// For `go tool pprof`.
    Pprof,
    /// The snapshot.
    Json,
    Speedscope,
}

impl Form {
    /// Chooses the format by the file's extension.
    ///
    /// # Errors
    /// Fails if the extension is unknown.
    pub fn from_path(path: &Path) -> anyhow::Result<Self> {
        let name = path.to_string_lossy();
        let forms = [
            (".svg", Form::Svg),
            (".folded", Form::Folded),
            (".pb.gz", Form::Pprof),
            (".speedscope.json", Form::Speedscope),
            (".json", Form::Json),
        ];
        forms.into_iter().find(|(end, _)| name.ends_with(end)).map(|(_, form)| form).ok_or_else(|| {
            anyhow::anyhow!("write to a file that ends in .svg, .folded, .pb.gz, .json or .speedscope.json, not {name}")
        })
    }

    /// Chooses the format for explained waits by the file's extension.
    ///
    /// # Errors
    /// Fails if the format cannot hold explained waits.
    pub fn from_path_explained(path: &Path) -> anyhow::Result<Self> {
        match Form::from_path(path) {
            Ok(form @ (Form::Svg | Form::Folded | Form::Json)) => Ok(form),
            _ => Err(anyhow::anyhow!(
                "with --why, write to a file that ends in .svg, .folded or .json, not {}",
                path.to_string_lossy()
            )),
        }
    }
}

/// Writes a snapshot in a format.
///
/// # Errors
/// Fails if the writer does.
pub fn write(out: &mut dyn Write, form: Form, snapshot: &Snapshot, root: Root, hide_idle: bool) -> io::Result<()> {
    match form {
        Form::Svg => svg::write(out, snapshot, root, hide_idle)?,
        Form::Folded => write_lines(out, &lines(waiting(snapshot, hide_idle), root))?,
        Form::Pprof => pprof::write(out, snapshot, hide_idle)?,
        Form::Speedscope => speedscope::write(out, snapshot, root, hide_idle)?,
        Form::Json => write_line(out, snapshot)?,
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extension_selects_format() {
        let form = |name: &str| Form::from_path(Path::new(name)).ok();
        assert_eq!(form("a/b.svg"), Some(Form::Svg));
        assert_eq!(form("x.speedscope.json"), Some(Form::Speedscope));
        assert_eq!(form("x.json"), Some(Form::Json));
        assert_eq!(form("x.pb.gz"), Some(Form::Pprof));
        assert_eq!(form("x.folded"), Some(Form::Folded));
        assert_eq!(form("x.png"), None);
        let explained = ["x.svg", "x.folded", "x.json", "x.pb.gz", "x.speedscope.json", "x.png"]
            .map(|name| Form::from_path_explained(Path::new(name)).is_ok());
        assert_eq!(explained, [true, true, true, false, false, false]);
    }
}
