// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much slower two processes wake each other while a tool records where threads wait.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::child::{Tool, wait_until};
use crate::figures::median_of;
use crate::occupancy::loads::{Load, TOOLS_CPU};
use crate::occupancy::slowdown::{Sample, of_round};
use crate::programs;

/// offcputime is last.
pub const SUBJECTS: [&str; 4] = [
    "`whylate offcpu --backend sample`",
    "`whylate offcpu --backend trace`",
    "`whylate offcpu --backend trace --wakers`",
    "`offcputime` (libbpf-tools)",
];
/// Time until its programs are surely attached, and after its end until the kernel has patched its code back.
const SETTLE: Duration = Duration::from_millis(500);

/// Samples by round and subject.
pub struct Slowdowns(Vec<Vec<Sample>>);

pub fn measure(whylate: &Path, rounds: u32) -> Result<Slowdowns> {
    let load = Load::pipe();
    load.run()?;
    let samples = (0..rounds as usize).map(|round| {
        eprintln!("slowdown: round {} of {rounds}", round + 1);
        of_round(&load, &SUBJECTS, round, |which| {
            let tool = start(whylate, which)?;
            let watched = load.run()?;
            tool.end()?;
            thread::sleep(SETTLE);
            Ok(watched)
        })
    });
    Ok(Slowdowns(samples.collect::<Result<_>>()?))
}

fn start(whylate: &Path, which: usize) -> Result<Tool> {
    let whylate = whylate.to_string_lossy();
    let command: &[&str] = match which {
        0 => &[&whylate, "offcpu", "--backend", "sample"],
        1 => &[&whylate, "offcpu", "--backend", "trace"],
        // Takes the waker's stack in addition to the wakee's; offcputime has nothing like it.
        2 => &[&whylate, "offcpu", "--backend", "trace", "--wakers"],
        _ => &["offcputime"],
    };
    let tool = Tool::start_on(TOOLS_CPU, command)?;
    wait_until("it has no programs", || Ok(!programs::of_process(tool.pid())?.is_empty()))?;
    thread::sleep(SETTLE);
    Ok(tool)
}

impl Slowdowns {
    /// Returns the slowdown in CPU time, which leaves out other threads.
    pub fn percent(&self, which: usize) -> f64 {
        100.0 * median_of(&self.0, |round| round[which].cpu_slowdown())
    }

    pub fn added_ns(&self, which: usize) -> f64 {
        median_of(&self.0, |round| round[which].added_ns_per_switch())
    }

    pub fn markdown(&self) -> String {
        let noise = median_of(&self.0.concat(), |sample| 100.0 * sample.noise());
        let mut text = format!(
            "\n### Slowdown of `{}`\n\nEach watched run is compared with those before and after it that nobody watches, which differ from \
             each other by {noise:.1} %. Tools are on another CPU. Medians of all rounds.\n\n\
             | subject | slowdown, elapsed | slowdown, CPU time | added CPU ns a switch |\n|---|--:|--:|--:|\n",
            Load::pipe().name
        );
        for (which, name) in SUBJECTS.iter().enumerate() {
            let elapsed = median_of(&self.0, |round| 100.0 * round[which].slowdown());
            text +=
                &format!("| {name} | {elapsed:.1} % | {:.1} % | {:.0} |\n", self.percent(which), self.added_ns(which));
        }
        text
    }
}
