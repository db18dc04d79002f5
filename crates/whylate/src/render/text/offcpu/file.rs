// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes profiles in the format of the file's extension.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context as _;
use whylate_model::Snapshot;
use whylate_model::folded::{Root, lines, waiting};
use whylate_model::units::printable;

use super::{pprof, speedscope, svg, write_lines};
use crate::files;
use crate::json::write_line;
use crate::render::extension::{Extension, chosen};

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

/// Formats of a profile.
pub const FORMS: [(Extension, Form); 5] = [
    (Extension::Svg, Form::Svg),
    (Extension::Folded, Form::Folded),
    (Extension::Pprof, Form::Pprof),
    (Extension::Speedscope, Form::Speedscope),
    (Extension::Json, Form::Json),
];
/// Formats that can hold explained waits.
pub const EXPLAINED: [(Extension, Form); 3] =
    [(Extension::Svg, Form::Svg), (Extension::Folded, Form::Folded), (Extension::Json, Form::Json)];

/// Draws folded lines, or writes them as they are.
///
/// # Errors
/// Fails if the file cannot be written, or has another extension.
pub fn write_folded(path: &Path, title: &str, unit: &str, lines: &[String]) -> anyhow::Result<()> {
    let is_graph = chosen(path, &[(Extension::Svg, true), (Extension::Folded, false)])?;
    let cannot = || format!("cannot write {}", printable(&path.to_string_lossy()));
    let written = files::write(path, |out| match is_graph {
        true => svg::write_lines(out, title, unit, lines),
        false => write_lines(out, lines),
    });
    written.with_context(cannot)
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
