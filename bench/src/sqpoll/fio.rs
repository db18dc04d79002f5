// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares `whylate sqpoll sweep` with its own load and with fio's load.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::{cpus, unpin};
use crate::drivers::{Rounds, in_rounds};
use crate::results::Section;
use crate::table::{Figure, Show, max, median};
use crate::{child, machine};

/// Depths of the reference.
const DEPTHS: [u32; 5] = [1, 4, 8, 16, 64];
/// Runs of each depth by each load, alternately: a shared disk's performance differs from second to second.
const ROUNDS: u32 = 21;
const RUNTIME: &str = "1s";
const FILE_BYTES: usize = 256 << 20;
/// In percentage points.
const LIMIT: f64 = 3.0;

/// Figures of one depth: utilization in percent, share of time without a CPU in percent, and IOPS.
#[derive(Clone, Copy)]
pub struct Run {
    utilisation: f64,
    starved: f64,
    iops: f64,
}

/// Returns the runs of both loads, by depth; `None` without fio.
pub fn measure(program: &Path) -> Result<Option<Vec<Rounds<Run>>>> {
    if !machine::has("fio") {
        return Ok(None);
    }
    // On a disk, not in memory: requests are direct I/O.
    let mut file = tempfile::NamedTempFile::new_in("/var/tmp")?;
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&[0x5a; 1 << 20])?;
    }
    file.as_file().sync_all()?;
    let (app_cpu, sq_cpu) = cpus()?;
    // fio inherits the affinity.
    machine::pin_to(app_cpu as usize)?;
    let of_depth = |depth: &u32| {
        let loads = [&[][..], &["--fio"]];
        in_rounds(&format!("beside fio, depth {depth}"), (ROUNDS, false), &["our own load", "fio"], |which| {
            sweep(program, file.path(), *depth, sq_cpu, loads[which])
        })
    };
    let runs = DEPTHS.iter().map(of_depth).collect::<Result<_>>();
    unpin()?;
    runs.map(Some)
}

pub fn report<'a>(section: Section<'a>, runs: Option<&[Rounds<Run>]>) -> Section<'a> {
    let section = section.text("### Beside fio");
    let Some(runs) = runs else { return section.text("Not measured here: no fio.") };
    // Of consecutive runs, so that the disk's performance is equal for both.
    let apart = |runs: &Rounds<Run>| {
        median(&runs.0.iter().map(|round| round[0].utilisation - round[1].utilisation).collect::<Vec<_>>())
    };
    let largest = max(&runs.iter().map(|runs| apart(runs).abs()).collect::<Vec<_>>());
    let what = "utilisation of our own load and of fio's, largest difference of a depth";
    let rows = DEPTHS.iter().zip(runs).map(|(depth, runs)| {
        let both = |digits, unit, figure: fn(&Run) -> f64| {
            [0, 1].map(|which| Show::Median(digits).cell(&runs.values(which, figure), unit)).join(" | ")
        };
        let utilisation = both(1, " %", |run| run.utilisation);
        let idle = both(1, " %", |run| 100.0 - run.utilisation);
        let (starved, iops) = (both(1, " %", |run| run.starved), both(0, "", |run| run.iops));
        format!("{depth} | {utilisation} | {:+.1} points | {idle} | {starved} | {iops}", apart(runs))
    });
    section
        .figures([Figure::new(what, largest, 2).unit("points").at_most(LIMIT)])
        .text(&format!(
            "`whylate sqpoll sweep --filename FILE --runtime {RUNTIME}` with its own load and with `--fio` (direct reads of 128k \
             with sqthread_poll=1), the application on the first CPU and the submission thread on the last one. Medians of {ROUNDS} runs of each \
             depth, by turns; the difference is the median of those of two runs in a row. Where a disk takes that many pieces at once, as a virtual \
             one of 256 does, from 8 requests on it matters where their pages happen to be in memory, which is up to chance."
        ))
        .lines(
            "iodepth | >utilisation, own load | >with fio | >difference | >idle, own load | >with fio | >starved, own load | >with fio | >IOPS, own load | >with fio",
            rows,
        )
}

fn sweep(program: &Path, file: &Path, depth: u32, sq_cpu: u32, more: &[&str]) -> Result<Run> {
    let options = format!("sqpoll sweep --json --runtime {RUNTIME} --iodepth {depth} --sq-cpu {sq_cpu} --filename");
    let line = child::json(Command::new(program).args(options.split(' ')).arg(file).args(more))?;
    let share = |name: &str| line["values"][name].as_f64().with_context(|| format!("a line has no {name}"));
    let requests = line["requests"].as_f64().context("a line has no requests")?;
    Ok(Run {
        utilisation: share("utilisation")? * 100.0,
        starved: share("starved")? * 100.0,
        iops: requests * 1e9 / line["duration_ns"].as_f64().context("a line has no duration")?,
    })
}
