// SPDX-License-Identifier: MIT OR Apache-2.0
//! Extensions of output files. Each has the same meaning in every command.

use std::path::Path;

use anyhow::anyhow;
use whylate_model::units::printable;

use crate::cli::UsageError;
use crate::say::quoted;

use self::Extension::{Csv, Folded, Html, Json, Parquet, Perfetto, Pprof, Recording, Speedscope, Svg, Trace};

/// Extension of an output file, which sets its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    Recording,
    Svg,
    Folded,
    Pprof,
    Speedscope,
    Trace,
    Json,
    Html,
    Perfetto,
    Parquet,
    Csv,
}

/// All extensions, with their texts and meanings. A longer one precedes its end.
pub const EXTENSIONS: [(Extension, &str, &str); 11] = [
    (Recording, ".whylate", "a recording, for `whylate replay`"),
    (Svg, ".svg", "a flame graph"),
    (Folded, ".folded", "folded stacks: one per line, with its time in microseconds (imported stacks: its count)"),
    (Pprof, ".pb.gz", "a profile for `go tool pprof`"),
    (Speedscope, ".speedscope.json", "a profile for speedscope"),
    (Trace, ".trace.json", "a trace for Perfetto or chrome://tracing"),
    (Json, ".json", "the object that `--json` prints"),
    (Html, ".html", "a report"),
    (Perfetto, ".perfetto-trace", "a trace for Perfetto, with all of a recording"),
    (Parquet, ".parquet/", "a directory of Parquet tables"),
    (Csv, ".csv/", "a directory of CSV tables"),
];

impl Extension {
    /// Returns the extension with its period.
    pub fn text(self) -> &'static str {
        EXTENSIONS.iter().find(|(extension, ..)| *extension == self).map_or("", |(_, text, _)| text)
    }

    /// Returns the extension of a file. The slash of a directory may be missing.
    pub fn from_path(path: &Path) -> Option<Self> {
        let name = path.to_string_lossy();
        let name = name.trim_end_matches('/');
        let known = EXTENSIONS.iter().find(|(_, text, _)| name.ends_with(text.trim_end_matches('/')));
        known.map(|(extension, ..)| *extension)
    }
}

/// Says on standard error that a file was written, and how to open it.
pub fn report_written(path: &Path) {
    let name = quoted(&printable(&path.to_string_lossy()));
    let how = match Extension::from_path(path) {
        Some(Svg | Html) => " (open it in a browser)".to_owned(),
        Some(Pprof) => format!(" (open it with: go tool pprof {name})"),
        Some(Speedscope) => " (open it at https://www.speedscope.app)".to_owned(),
        Some(Trace | Perfetto) => " (open it at https://ui.perfetto.dev)".to_owned(),
        Some(Recording) => format!(" (open it with: whylate replay {name})"),
        Some(Folded | Json | Parquet | Csv) | None => String::new(),
    };
    say!("whylate: wrote {name}{how}");
}

/// Returns the format of an output file, of those that the command can write.
///
/// # Errors
/// Fails if the command cannot write a file with this extension.
pub fn chosen<T: Copy>(path: &Path, forms: &[(Extension, T)]) -> anyhow::Result<T> {
    let extension = Extension::from_path(path);
    if let Some((_, form)) = forms.iter().find(|(known, _)| Some(*known) == extension) {
        return Ok(*form);
    }
    let name = printable(&path.to_string_lossy());
    let known: Vec<&str> = forms.iter().map(|(known, _)| known.text()).collect();
    let list = match known.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => known.concat(),
    };
    Err(UsageError(anyhow!("cannot write {name}: its name must end in {list}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_has_the_format_of_its_extension() {
        for (name, extension) in [
            ("a/b.svg", Some(Svg)),
            ("x.speedscope.json", Some(Speedscope)),
            ("x.trace.json", Some(Trace)),
            ("trace.json", Some(Json)),
            ("x.pb.gz", Some(Pprof)),
            ("web1.csv/", Some(Csv)),
            ("web1.csv", Some(Csv)),
            ("x.png", None),
            ("svg", None),
        ] {
            assert_eq!(Extension::from_path(Path::new(name)), extension, "{name}");
        }
        for (extension, text, _) in EXTENSIONS {
            assert_eq!(Extension::from_path(Path::new(&format!("x{text}"))), Some(extension), "{text}");
        }
    }

    #[test]
    fn refusal_lists_what_the_command_writes() {
        let refused = |name: &str, forms: &[(Extension, ())]| {
            chosen(Path::new(name), forms).expect_err("no such format").to_string()
        };
        let forms = [(Svg, ()), (Folded, ()), (Recording, ())];
        let list = "its name must end in .svg, .folded or .whylate";
        assert_eq!(refused("x.png", &forms), format!("cannot write x.png: {list}"));
        assert_eq!(refused("x.html", &forms), format!("cannot write x.html: {list}"));
        assert_eq!(refused("x", &forms[..1]), "cannot write x: its name must end in .svg");
    }
}
