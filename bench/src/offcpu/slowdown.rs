// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much slower two processes wake each other while somebody asks where threads wait.

use std::fmt::Write as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::child::{PATIENCE, POLL, Tool};
use crate::figures::median;
use crate::occupancy::loads::{Load, TOOLS_CPU};
use crate::occupancy::slowdown::Sample;
use crate::programs;

/// The peer is last.
pub const SUBJECTS: [&str; 4] = [
    "`whylate offcpu --backend sample`",
    "`whylate offcpu --backend trace`",
    "`whylate offcpu --backend trace --wakers`",
    "`offcputime` (libbpf-tools)",
];
/// Until its programs are surely attached, and after its end until the kernel has put its code back.
const SETTLE: Duration = Duration::from_millis(500);

/// By subject, of each round.
pub struct Slowdowns([Vec<Sample>; SUBJECTS.len()]);

/// Each watched run lies between two that nobody watches; subjects take turns at being first.
pub fn measure(whylate: &Path, rounds: u32) -> Result<Slowdowns> {
    let load = Load::pipe();
    let mut samples: [Vec<Sample>; SUBJECTS.len()] = Default::default();
    load.run()?;
    for round in 0..rounds as usize {
        eprintln!("slowdown: round {} of {rounds}", round + 1);
        let mut before = load.run()?;
        for turn in 0..SUBJECTS.len() {
            let which = (round + turn) % SUBJECTS.len();
            let tool = start(whylate, which).with_context(|| format!("cannot measure {}", SUBJECTS[which]))?;
            let watched = load.run()?;
            tool.end()?;
            thread::sleep(SETTLE);
            let after = load.run()?;
            samples[which].push(Sample { before, watched, after: after.clone() });
            before = after;
        }
    }
    Ok(Slowdowns(samples))
}

fn start(whylate: &Path, which: usize) -> Result<Tool> {
    let cpu = TOOLS_CPU.to_string();
    let whylate = whylate.to_string_lossy();
    let command: &[&str] = match which {
        0 => &[&whylate, "offcpu", "--backend", "sample"],
        1 => &[&whylate, "offcpu", "--backend", "trace"],
        // A stack of whoever wakes, in addition to those of whoever is woken; offcputime has nothing like it.
        2 => &[&whylate, "offcpu", "--backend", "trace", "--wakers"],
        _ => &["offcputime"],
    };
    let tool = Tool::start("taskset".as_ref(), &[&["-c", &cpu], command].concat())?;
    let deadline = Instant::now() + PATIENCE;
    while programs::of_process(tool.pid())?.is_empty() {
        if Instant::now() > deadline {
            bail!("it has no programs");
        }
        thread::sleep(POLL);
    }
    thread::sleep(SETTLE);
    Ok(tool)
}

impl Slowdowns {
    /// By the time on CPUs, which leaves out that of other threads there.
    pub fn percent(&self, which: usize) -> f64 {
        100.0 * median(&self.0[which].iter().map(Sample::cpu_slowdown).collect::<Vec<_>>())
    }

    pub fn added_ns(&self, which: usize) -> f64 {
        median(&self.0[which].iter().map(Sample::added_ns_per_switch).collect::<Vec<_>>())
    }

    pub fn markdown(&self) -> String {
        let all = self.0.iter().flatten();
        let noise = median(&all.map(|sample| 100.0 * sample.noise()).collect::<Vec<_>>());
        let mut text = format!(
            "\n### Slowdown of `{}`\n\nEach watched run is compared with those before and after it that nobody watches, which differ from \
             each other by {noise:.1} %. Tools are on another CPU. Medians of all rounds.\n\n\
             | subject | slowdown, elapsed | slowdown, CPU time | added CPU ns a switch |\n|---|--:|--:|--:|\n",
            Load::pipe().name
        );
        for (which, name) in SUBJECTS.iter().enumerate() {
            let elapsed = median(&self.0[which].iter().map(|sample| 100.0 * sample.slowdown()).collect::<Vec<_>>());
            // A `String` takes everything.
            let _ = writeln!(
                text,
                "| {name} | {elapsed:.1} % | {:.1} % | {:.0} |",
                self.percent(which),
                self.added_ns(which)
            );
        }
        text
    }
}
