// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel locks for which threads waited 10 to 20 ms: each wait has the lock and the thread that held it, and never a wrong one.

#[allow(unsafe_code)]
#[path = "kernel_contended_locks/kinds.rs"]
mod kinds;
mod support;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _, stdin};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context as _, Result, ensure};
use support::machine::lock::share_machine;
use whylate_model::object::Object;
use whylate_model::path::{Path, PathBuilder, PathSegment, Query, walk};
use whylate_sources::kernel::clock;
use whylate_sources::paths::{Recorded, Recorder};

use self::kinds::Truth;

/// Environment variable of the process that contends for `all` kinds, or reads the memory of the process with this PID.
const CONTENDS: &str = "WHYLATE_TEST_CONTENDS";
const POLL: Duration = Duration::from_millis(20);
const MAX_TIME: Duration = Duration::from_secs(120);
/// Minimum time of a wait that must have its lock.
const LONG_NS: u64 = 1_000_000;

/// Contends for locks, and prints who waited for what.
#[test]
fn contending_process() -> Result<()> {
    match env::var(CONTENDS).as_deref() {
        Ok("all") => {}
        Ok(pid) => return kinds::read_memory(pid),
        Err(_) => return Ok(()),
    }
    let mut line = String::new();
    stdin().read_line(&mut line)?;
    for truth in kinds::contend()? {
        println!("\ntruth\t{truth}");
    }
    Ok(())
}

/// Records the process. Returns what it printed, each wait with the path of that time; and the number of waits of the machine
/// whose locks were not kept.
fn recorded() -> Result<(Vec<(Truth, Path)>, u64)> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["--exact", "contending_process", "--nocapture"]).env(CONTENDS, "all");
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (mut input, output) = (process.stdin.take().context("an input")?, process.stdout.take().context("an output")?);
    let mut recorder = Recorder::start()?;
    ensure!(recorder.limitation().is_none(), "{:?}", recorder.limitation());
    recorder.span_begins(clock::monotonic_ns());
    writeln!(input)?;
    let began = Instant::now();
    let lines = thread::scope(|scope| -> Result<Vec<String>> {
        let reader = scope.spawn(move || BufReader::new(output).lines().map_while(Result::ok).collect::<Vec<_>>());
        while !reader.is_finished() {
            ensure!(began.elapsed() < MAX_TIME, "the process has not ended its waits in {MAX_TIME:?}");
            thread::sleep(POLL);
            recorder.take_in();
        }
        Ok(reader.join().expect("no panic"))
    })?;
    recorder.span_ends();
    process.wait()?;
    let Recorded { mut past, lost, mut names, .. } = recorder.finish(clock::monotonic_ns());
    let lost = *lost.get("lock_waits_unread").context("a count of lost locks")?;
    lines.iter().filter(|line| line.starts_with("queued")).for_each(|line| println!("{line}"));
    let truths: Vec<Truth> = lines.iter().filter_map(|line| Truth::parse(line.strip_prefix("truth\t")?)).collect();
    let asked = |&Truth { waiter: tid, from_ns, to_ns, .. }: &Truth| Query {
        tid,
        from_ns,
        to_ns,
        is_wait: false,
        is_command: false,
    };
    let asked: Vec<Query> = truths.iter().map(asked).collect();
    let mut found: Vec<PathBuilder> = asked.iter().map(|_| PathBuilder::default()).collect();
    walk(&mut past, &asked, &(), &mut |number, finding| found[number].add(finding));
    let paths = found.into_iter().map(|found| found.finish(&mut names));
    Ok((truths.into_iter().zip(paths).collect(), lost))
}

/// Renders a path on one line.
fn shown(path: &Path) -> String {
    let of = |segment: &PathSegment| {
        let PathSegment { ns, depth, who, via, waiter, object, .. } = segment;
        let object = object.as_ref().map(ToString::to_string);
        format!("{depth}: {ns} ns {:?} by {who}, {waiter:?} in {via:?} for {object:?}", segment.kind)
    };
    path.segments.iter().map(of).collect::<Vec<_>>().join("; ")
}

/// Returns the time of waits of the thread that have ended.
fn blocked_ns(path: &Path) -> u64 {
    let has_ended = |segment: &&PathSegment| segment.depth > 0 && segment.who != "not over yet";
    path.segments.iter().filter(has_ended).map(|segment| segment.ns).sum()
}

/// Returns the locks of the kernel for which the thread itself waited.
fn locks_of(path: &Path) -> Vec<&Object> {
    let outer = path.segments.iter().filter(|segment| segment.depth == 1);
    let mut locks: Vec<&Object> = outer.filter_map(|segment| segment.object.as_deref()).collect();
    locks.retain(|object| object.is_kernel_lock());
    locks.dedup();
    locks
}

/// Waits of one kind, by what the paths say of them.
#[derive(Debug, Default)]
struct Counts {
    right: u32,
    /// The lock is right, and no thread is named as holder.
    without_holder: u32,
    /// The thread did not block for long.
    too_short: u32,
    /// The lock is missing, and others were lost in the meantime.
    missing: u32,
}

#[test]
fn waits_for_kernel_locks_have_lock_and_holder() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let (mut wrong, mut missing, mut counts) = (Vec::new(), Vec::new(), BTreeMap::<String, Counts>::new());
    let (waits, lost) = recorded()?;
    for (truth, path) in waits {
        let locks = locks_of(&path);
        let counts = counts.entry(truth.what.clone()).or_default();
        if locks.iter().any(|object| truth.is_wrong(object)) {
            wrong.push(format!("{truth}: {locks:?}, {}", shown(&path)));
        } else if locks.iter().any(|object| truth.is_true(object)) {
            counts.right += 1;
        } else if locks.iter().any(|object| truth.is_without_holder(object)) {
            counts.without_holder += 1;
            println!("without a holder: {truth}");
        } else if path.is_folded || blocked_ns(&path) < LONG_NS {
            // On a busy machine most of the time may have been for a CPU, in many parts of which equal ones are summed.
            counts.too_short += 1;
            println!("too short to judge: {truth}");
        } else {
            counts.missing += 1;
            missing.push(format!("{truth}: {}", shown(&path)));
        }
    }
    println!("{counts:?}, {lost} lost");
    ensure!(wrong.is_empty(), "wrong: {wrong:#?}");
    // Other threads of the machine may have lost theirs.
    ensure!(missing.len() as u64 <= lost, "missing, with {lost} lost: {missing:#?}");
    ensure!(counts.len() == kinds::KINDS, "some kinds have no waits: {counts:?}");
    // With PREEMPT_RT, threads spin as long as the owner of a lock runs.
    let spins = |what: &str| kinds::HOLDERS_RUN.contains(&what) && fs::exists("/sys/kernel/realtime").unwrap_or(false);
    // The holder of the few waits behind a waiter that gave up may be done before the waiters queue.
    let is_too_little = |what: &str, of: &Counts| {
        !spins(what) && what != "gave up" && (of.without_holder * 4 > of.right || of.too_short + of.missing > of.right)
    };
    let too_little: Vec<_> = counts.iter().filter(|(what, of)| is_too_little(what, of)).collect();
    ensure!(too_little.is_empty(), "too many waits are not judged: {too_little:?}");
    Ok(())
}
