// SPDX-License-Identifier: MIT OR Apache-2.0
//! The run time of each subject's BPF programs per work item, as the kernel counts it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::inject;
use crate::child::{POLL, Running, TIMEOUT, Tool};
use crate::floor;
use crate::programs::{self, Counts};

/// Items per load.
pub const ITEMS: u64 = 50_000;
/// How many of them wait at once.
pub const LOADS: [u64; 2] = [100, 1000];
/// Maximum number of tries until the kernel has the memory for a load, and the pause between them.
const LOAD_TRIES: u32 = 20;
const LOAD_PAUSE: Duration = Duration::from_millis(100);

/// The usual one-liner.
pub const ONE_LINER: &str = "tracepoint:workqueue:workqueue_queue_work { @start[args->work] = nsecs; } \
     tracepoint:workqueue:workqueue_execute_start /@start[args->work]/ \
     { @usecs = hist((nsecs - @start[args->work]) / 1000); delete(@start[args->work]); }";

/// A tool that watches work items.
pub struct Subject {
    pub name: &'static str,
    pub what: &'static str,
    tool: Option<(&'static str, &'static [&'static str])>,
    /// BPF programs that it runs for each item.
    programs: usize,
    /// Limit relative to bpftrace's cost.
    pub limit: Option<f64>,
}

/// The index of the subject to compare with.
pub const BPFTRACE: usize = 1;

pub const SUBJECTS: [Subject; 4] = [
    Subject { name: "floor", what: "an empty `tp_btf` pair", tool: None, programs: 2, limit: None },
    Subject {
        name: "bpftrace",
        what: "hash map by work pointer, `hist`",
        tool: Some(("bpftrace", &["-e", ONE_LINER])),
        programs: 2,
        limit: None,
    },
    Subject { name: "`whylate wq`", what: "latency", tool: Some(("whylate", &["wq"])), programs: 2, limit: Some(0.6) },
    Subject {
        name: "`whylate wq --table`",
        what: "all phases and runtime",
        tool: Some(("whylate", &["wq", "--table"])),
        programs: 4,
        limit: Some(1.2),
    },
];

/// One subject under one load.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Names and mean run times in nanoseconds.
    pub programs: Vec<(String, f64)>,
    pub items_per_second: f64,
    /// Events that its programs were not run for.
    pub missed: u64,
}

impl Sample {
    /// Returns the sum of the mean run times: each program runs once per item.
    pub fn cost_ns(&self) -> f64 {
        self.programs.iter().map(|(_, mean_ns)| mean_ns).sum()
    }
}

/// Samples by load and subject, in the order of `LOADS` and `SUBJECTS`.
pub type Round = Vec<Vec<Sample>>;

/// Measures all rounds. Within one, each subject runs alone, and each round starts with another.
pub fn measure(whylate: &Path, rounds: u32) -> Result<Vec<Round>> {
    let mut timed = Vec::new();
    for round in 0..=rounds as usize {
        eprintln!("round {round} of {rounds}{}", if round == 0 { " (not timed)" } else { "" });
        let mut samples = vec![None; SUBJECTS.len()];
        for turn in 0..SUBJECTS.len() {
            let which = (round + turn) % SUBJECTS.len();
            let subject = &SUBJECTS[which];
            let under_loads = subject.measure(whylate).with_context(|| format!("cannot measure {}", subject.name))?;
            samples[which] = Some(under_loads);
        }
        if round > 0 {
            timed.push(by_load(samples));
        }
    }
    Ok(timed)
}

/// Transposes from subject and load to load and subject.
fn by_load(samples: Vec<Option<Vec<Sample>>>) -> Round {
    let mut round: Round = vec![Vec::new(); LOADS.len()];
    for under_loads in samples.into_iter().flatten() {
        for (load, sample) in round.iter_mut().zip(under_loads) {
            load.push(sample);
        }
    }
    round
}

impl Subject {
    /// Attaches it afresh and runs each load.
    fn measure(&self, whylate: &Path) -> Result<Vec<Sample>> {
        let running = self.start(whylate)?;
        self.wait_until_attached(&running, whylate)?;
        let samples = LOADS.iter().map(|&at_once| self.sample(&running, whylate, at_once)).collect();
        running.end()?;
        samples
    }

    fn start(&self, whylate: &Path) -> Result<Running> {
        let Some((program, arguments)) = self.tool else {
            return Ok(Running::Ours { _links: floor::attach().context("cannot attach the empty pair")? });
        };
        let program = if program == "whylate" { whylate } else { Path::new(program) };
        let mut tool = Tool::start(program, arguments)?;
        tool.first_output()?;
        Ok(Running::Theirs(tool))
    }

    /// Waits until each program has run: only that shows that it is attached.
    fn wait_until_attached(&self, running: &Running, whylate: &Path) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            inject(whylate, 100, 100)?;
            let programs = running.programs()?;
            if programs.len() == self.programs && programs.values().all(|counts| counts.runs > 0) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("of {} programs these are there: {programs:?}", self.programs);
            }
            thread::sleep(POLL);
        }
    }

    /// Runs a load until it has as many items at once as requested: another number would be another load.
    fn sample(&self, running: &Running, whylate: &Path, at_once: u64) -> Result<Sample> {
        for _ in 0..LOAD_TRIES {
            let before = running.programs()?;
            let load = inject(whylate, ITEMS, at_once)?;
            let counts = programs::difference(&before, &running.programs()?);
            if load.at_once == at_once {
                return sample_of(&counts, load.items_per_second);
            }
            thread::sleep(LOAD_PAUSE);
        }
        bail!("the kernel has no memory for {at_once} work items at once: try again later")
    }
}

fn sample_of(counts: &[Counts], items_per_second: f64) -> Result<Sample> {
    if let Some(idle) = counts.iter().find(|counts| counts.runs + counts.missed < ITEMS) {
        bail!("its program {} ran {} times for {ITEMS} items", idle.name, idle.runs);
    }
    Ok(Sample {
        programs: counts.iter().map(|counts| (counts.name.clone(), counts.mean_ns())).collect(),
        items_per_second,
        missed: counts.iter().map(|counts| counts.missed).sum(),
    })
}
