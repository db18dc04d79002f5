// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of waits that have ended, of threads of another process: each kind of object is found in some round, and never the
//! object of another wait, even if descriptors are reused.

#[allow(unsafe_code)]
#[path = "kernel_objects_over/kinds.rs"]
mod kinds;
#[path = "kernel_objects_over/reused.rs"]
mod reused;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context as _, Result, ensure};
use support::machine::lock::share_machine;
use support::oracles::chance::is_emulated;
use whylate_model::path::budget::{Budget, budget};
use whylate_model::path::{PathSegment, Query, ThreadRecords};
use whylate_sources::kernel::clock;
use whylate_sources::paths::{Program, Recorded, Recorder};

/// Environment variable of the waiting process: names what it waits for.
const WAITS: &str = "WHYLATE_TEST_WAITS";
const POLL: Duration = Duration::from_millis(20);
const MAX_TIME: Duration = Duration::from_secs(120);
/// No further round starts after this time.
const MAX_TIME_OF_ROUNDS: Duration = Duration::from_secs(20);
/// Minimum number of objects that are compared where descriptors are reused.
const MIN_OBJECTS: u64 = 50;
/// Share of time in which threads wait for a CPU (PSI) above which the machine is busy.
const MAX_CPU_PRESSURE_PERCENT: f64 = 10.0;

/// Waits as the variable says, and prints what it waited for.
#[test]
fn waiting_process() -> Result<()> {
    let Ok(what) = env::var(WAITS) else { return Ok(()) };
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    let truths = if what == "kinds" { kinds::wait()? } else { reused::wait(what.parse()?)? };
    for truth in truths {
        println!("\n{truth}");
    }
    println!("\nend");
    // The threads stay until they have been listed.
    stdin().read_line(&mut line)?;
    Ok(())
}

/// A process that waits.
struct Waiting {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Waiting {
    fn start(what: &str) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["--exact", "waiting_process", "--nocapture"]).env(WAITS, what);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(process.stdout.take().context("it has an output")?);
        Ok(Waiting { input: process.stdin.take(), process, output })
    }

    fn go(&mut self) -> Result<()> {
        Ok(writeln!(self.input.as_mut().context("it has an input")?)?)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

/// Records a process that waits. Returns what it printed, and the time budget of its threads.
fn recorded(what: &str) -> Result<(Vec<String>, Budget)> {
    let mut waiting = Waiting::start(what)?;
    let mut recorder = Recorder::start()?;
    let from_ns = clock::monotonic_ns();
    recorder.span_begins(from_ns);
    waiting.go()?;
    let output = &mut waiting.output;
    let began = Instant::now();
    let truths = thread::scope(|scope| -> Result<Vec<String>> {
        let reader = scope.spawn(move || {
            let lines = output.lines().map_while(Result::ok).filter(|line| !line.is_empty());
            lines.take_while(|line| line != "end").collect::<Vec<_>>()
        });
        while !reader.is_finished() {
            ensure!(began.elapsed() < MAX_TIME, "the process has not ended its waits in {MAX_TIME:?}");
            thread::sleep(POLL);
            recorder.take_in();
        }
        Ok(reader.join().expect("no panic"))
    })?;
    recorder.span_ends();
    let threads = Program::Process(waiting.process.id()).threads()?;
    let to_ns = clock::monotonic_ns();
    drop(waiting);
    let Recorded { mut past, lost, mut names, .. } = recorder.finish(to_ns);
    println!("lost: {lost:?}");
    let asked = |&tid: &u32| Query { tid, from_ns, to_ns, is_wait: false, is_command: false };
    let asked: Vec<Query> = threads.keys().map(asked).collect();
    Ok((truths, budget(&mut past, &asked, &BTreeMap::new(), &(), &mut names, &ThreadRecords::default())))
}

/// Returns the segments with objects.
fn named(budget: &Budget) -> impl Iterator<Item = &PathSegment> {
    budget.waits.iter().flat_map(|waits| &waits.path).filter(|segment| segment.depth == 1 && segment.object.is_some())
}

/// Says that too little was seen on a busy machine; fails on another one.
fn too_little(what: &str) -> Result<()> {
    let some = fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let share = some.split_whitespace().find_map(|word| word.strip_prefix("avg60=")?.parse::<f64>().ok());
    ensure!(is_emulated() || share.is_none_or(|percent| percent > MAX_CPU_PRESSURE_PERCENT), "{what}");
    println!("inconclusive: the machine is busy ({some:?}): {what}");
    Ok(())
}

#[test]
fn waits_that_are_over_name_object_and_peer() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let (began, mut seen) = (Instant::now(), BTreeSet::new());
    loop {
        let (truths, budget) = recorded("kinds")?;
        seen.extend(kinds::check(&truths, &budget)?);
        let others = kinds::others(&seen);
        if others.is_empty() {
            return Ok(());
        }
        if began.elapsed() > MAX_TIME_OF_ROUNDS {
            return too_little(&format!("not right in any round: {others:?}"));
        }
    }
}

#[test]
fn reused_descriptors_have_no_wrong_names() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let seconds = if env::var_os("WHYLATE_THOROUGH").is_some() { 60 } else { 3 };
    let (began, mut seen) = (Instant::now(), 0);
    loop {
        let (_, budget) = recorded(&seconds.to_string())?;
        seen += reused::check(&budget)?;
        if seen >= MIN_OBJECTS {
            return Ok(());
        }
        if began.elapsed() > MAX_TIME_OF_ROUNDS {
            return too_little(&format!("only {seen} objects"));
        }
    }
}
