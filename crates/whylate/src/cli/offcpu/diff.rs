// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu --diff`: compares two profiles.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use whylate_model::Snapshot;
use whylate_model::folded::{Root, lines, waiting};
use whylate_model::import::{DEEPEST, Imported, Names, Order};
use whylate_model::text;

use crate::cli::existing;
use crate::render::extension::report_written;
use crate::render::text::fit::{Fit, terminal_columns};
use crate::render::text::offcpu::diff::Difference;
use crate::render::text::offcpu::file;

pub fn run(before: &Path, after: &Path, output: Option<&Path>) -> anyhow::Result<()> {
    let difference = Difference::between(&read(before)?, &read(after)?);
    if let Some(path) = output {
        let title = "Off-CPU: red waits more than before, blue less";
        file::write_folded(path, title, "millionths of all time", &difference.lines())?;
        report_written(path);
    }
    let mut out = Fit::stdout(true);
    difference.table().write(&mut out, terminal_columns())?;
    Ok(out.flush()?)
}

/// Reads folded lines, or the last snapshot of a JSON file as folded lines.
fn read(path: &Path) -> anyhow::Result<Vec<String>> {
    let cannot = || format!("cannot read {}", path.display());
    let text = text::read(existing(File::open(path)).with_context(cannot)?).with_context(cannot)?;
    if text.trim_start().starts_with('{') {
        let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let snapshot: Snapshot = serde_json::from_str(last).with_context(cannot)?;
        return Ok(lines(waiting(&snapshot, false), Root::Process));
    }
    let read = Imported::read(&text, Names::Process).with_context(cannot)?;
    if read.too_long > 0 {
        let name = path.display();
        say!("whylate: skipped {} stacks of {name} of more than {DEEPEST} frames or 1 MiB", read.too_long);
    }
    Ok(read.lines(Order::RootFirst))
}
