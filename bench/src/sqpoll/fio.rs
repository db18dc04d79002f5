// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of `whylate sqpoll sweep` from its own load, beside the same from fio's.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{Check, Part};
use crate::figures::median;
use crate::{kernel, whylate};

/// Those of the reference.
const DEPTHS: [u32; 5] = [1, 4, 8, 16, 64];
const DEPTHS_WORD: &str = "1,4,8,16,64";
/// Runs of each; each tells the utilisation of all depths.
const ROUNDS: usize = 3;
const RUNTIME: &str = "2s";
const FILE_BYTES: usize = 256 << 20;
/// In points.
const LIMIT: f64 = 3.0;

/// Utilisation in percent and IOPS, by depth.
type Run = [(f64, f64); DEPTHS.len()];

pub fn measure() -> Result<Part> {
    if Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        let text = "### Beside fio\n\nNot measured here: no fio.\n".to_owned();
        return Ok(Part { checks: Vec::new(), text });
    }
    let program = whylate::build("bench-sqpoll")?;
    // On a disk rather than in memory: requests are direct I/O.
    let mut file = tempfile::NamedTempFile::new_in("/var/tmp")?;
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&[0x5a; 1 << 20])?;
    }
    file.as_file().sync_all()?;
    let (mut own, mut fio): (Vec<Run>, Vec<Run>) = (Vec::new(), Vec::new());
    for number in 1..=ROUNDS {
        eprintln!("round {number} of {ROUNDS}: beside fio");
        // They take turns at being first.
        for turn in 0..2 {
            match (turn + number) % 2 {
                0 => own.push(sweep(&program, file.path(), &[])?),
                _ => fio.push(sweep(&program, file.path(), &["--fio"])?),
            }
        }
    }
    let middle = |runs: &[Run], depth: usize, of: fn(&(f64, f64)) -> f64| {
        median(&runs.iter().map(|run| of(&run[depth])).collect::<Vec<_>>())
    };
    let mut text = format!(
        "### Beside fio\n\n`whylate sqpoll sweep --filename FILE --runtime {RUNTIME}` with its own load and with `--fio` (direct reads of 128k with \
         sqthread_poll=1), medians of {ROUNDS} runs in turn.\n\n\
         | iodepth | utilisation, own load | with fio | idle, own load | with fio | IOPS, own load | with fio |\n|--:|--:|--:|--:|--:|--:|--:|\n"
    );
    let mut largest = 0.0_f64;
    for (depth, in_flight) in DEPTHS.into_iter().enumerate() {
        let [ours, theirs] = [&own, &fio].map(|runs| middle(runs, depth, |run| run.0));
        let [our_iops, their_iops] = [&own, &fio].map(|runs| middle(runs, depth, |run| run.1));
        largest = largest.max((ours - theirs).abs());
        text += &format!(
            "| {in_flight} | {ours:.1} % | {theirs:.1} % | {:.1} % | {:.1} % | {our_iops:.0} | {their_iops:.0} |\n",
            100.0 - ours,
            100.0 - theirs
        );
    }
    let what = "utilisation of our own load and of fio's, largest difference of a depth".to_owned();
    Ok(Part { checks: vec![Check { what, value: largest, limit: LIMIT, unit: "points" }], text })
}

fn sweep(program: &Path, file: &Path, more: &[&str]) -> Result<Run> {
    let mut command = Command::new(program);
    command
        .args(["sqpoll", "sweep", "--json", "--runtime", RUNTIME, "--iodepth", DEPTHS_WORD, "--filename"])
        .arg(file)
        .args(more);
    let output = kernel::die_with_parent(command.stdin(Stdio::null())).output().context("cannot start whylate")?;
    ensure!(output.status.success(), "the sweep failed: {}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> =
        String::from_utf8(output.stdout)?.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(lines.len() == DEPTHS.len(), "the sweep printed {} lines", lines.len());
    let mut run = Run::default();
    for (told, line) in run.iter_mut().zip(&lines) {
        let utilisation = line["values"]["utilisation"].as_f64().context("a line has no utilisation")?;
        let requests = line["requests"].as_f64().context("a line has no requests")?;
        *told = (utilisation * 100.0, requests * 1e9 / line["duration_ns"].as_f64().context("a line has no duration")?);
    }
    Ok(run)
}
