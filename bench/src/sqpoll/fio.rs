// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares `whylate sqpoll sweep` with its own load to the same with fio's load.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{Part, cpus, unpin};
use crate::figures::{Check, median, median_of};
use crate::{kernel, machine, whylate};

/// Depths of the reference.
const DEPTHS: [u32; 5] = [1, 4, 8, 16, 64];
/// Runs of each depth by each load, alternately: a shared disk's performance differs from second to second.
const ROUNDS: usize = 21;
const RUNTIME: &str = "1s";
const FILE_BYTES: usize = 256 << 20;
/// In percentage points.
const LIMIT: f64 = 3.0;

/// Figures of one depth: utilization in percent, share of time without a CPU in percent, and IOPS.
#[derive(Clone, Copy, Default)]
struct Run {
    utilisation: f64,
    starved: f64,
    iops: f64,
}

pub fn measure() -> Result<Part> {
    if !machine::has("fio") {
        let text = "### Beside fio\n\nNot measured here: no fio.\n".to_owned();
        return Ok(Part { checks: Vec::new(), text });
    }
    let program = whylate::build("bench-sqpoll")?;
    // On a disk, not in memory: requests are direct I/O.
    let mut file = tempfile::NamedTempFile::new_in("/var/tmp")?;
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&[0x5a; 1 << 20])?;
    }
    file.as_file().sync_all()?;
    let (app_cpu, sq_cpu) = cpus()?;
    // fio inherits the affinity.
    machine::pin_to(app_cpu as usize)?;
    let outcome = both(&program, file.path(), sq_cpu);
    unpin()?;
    let [own, fio] = outcome?;
    let mut text = format!(
        "### Beside fio\n\n`whylate sqpoll sweep --filename FILE --runtime {RUNTIME} --sq-cpu {sq_cpu}` with its own load and with `--fio` (direct reads of 128k \
         with sqthread_poll=1), the application on CPU {app_cpu}. Medians of {ROUNDS} runs of each depth, by turns; the \
         difference is the median of those of two runs in a row. Where a disk takes so many pieces at once, as a virtual one of 256 does, from 8 requests \
         on it matters where their pages happen to be in memory, which is up to chance.\n\n\
         | iodepth | utilisation, own load | with fio | difference | idle, own load | with fio | starved, own load | with fio | IOPS, own load | with fio |\n\
         |--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    );
    let mut largest = 0.0_f64;
    for (depth, (own, fio)) in DEPTHS.into_iter().zip(own.iter().zip(&fio)) {
        let both = |of: fn(&Run) -> f64| [median_of(own, of), median_of(fio, of)];
        let [ours, theirs] = both(|run| run.utilisation);
        let [our_starved, their_starved] = both(|run| run.starved);
        let [our_iops, their_iops] = both(|run| run.iops);
        // Of consecutive runs, so that the disk's performance is equal for both.
        let apart: Vec<f64> = own.iter().zip(fio).map(|(own, fio)| own.utilisation - fio.utilisation).collect();
        let apart = median(&apart);
        largest = largest.max(apart.abs());
        text += &format!(
            "| {depth} | {ours:.1} % | {theirs:.1} % | {apart:+.1} points | {:.1} % | {:.1} % | {our_starved:.1} % | {their_starved:.1} % | {our_iops:.0} | {their_iops:.0} |\n",
            100.0 - ours,
            100.0 - theirs
        );
    }
    let what = "utilisation of our own load and of fio's, largest difference of a depth";
    Ok(Part { checks: vec![Check::new(what, largest, "points", LIMIT)], text })
}

/// Returns the figures of all runs, by load and depth.
fn both(program: &Path, file: &Path, sq_cpu: u32) -> Result<[Vec<Vec<Run>>; 2]> {
    let mut runs = [vec![Vec::new(); DEPTHS.len()], vec![Vec::new(); DEPTHS.len()]];
    for number in 1..=ROUNDS {
        eprintln!("round {number} of {ROUNDS}: beside fio");
        for (index, depth) in DEPTHS.into_iter().enumerate() {
            // They take turns at being first.
            for turn in 0..2 {
                let load = (turn + number) % 2;
                let more: &[&str] = if load == 0 { &[] } else { &["--fio"] };
                runs[load][index].push(sweep(program, file, depth, sq_cpu, more)?);
            }
        }
    }
    Ok(runs)
}

fn sweep(program: &Path, file: &Path, depth: u32, sq_cpu: u32, more: &[&str]) -> Result<Run> {
    let mut command = Command::new(program);
    command
        .args(["sqpoll", "sweep", "--json", "--runtime", RUNTIME, "--iodepth", &depth.to_string()])
        .args(["--sq-cpu", &sq_cpu.to_string(), "--filename"])
        .arg(file)
        .args(more);
    let output = kernel::die_with_parent(command.stdin(Stdio::null())).output().context("cannot start whylate")?;
    ensure!(output.status.success(), "the sweep failed: {}", String::from_utf8_lossy(&output.stderr));
    let line: Value = serde_json::from_slice(&output.stdout).context("the sweep printed another number of lines")?;
    let share = |name: &str| line["values"][name].as_f64().with_context(|| format!("a line has no {name}"));
    let requests = line["requests"].as_f64().context("a line has no requests")?;
    Ok(Run {
        utilisation: share("utilisation")? * 100.0,
        starved: share("starved")? * 100.0,
        iops: requests * 1e9 / line["duration_ns"].as_f64().context("a line has no duration")?,
    })
}
