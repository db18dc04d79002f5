// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission threads in a PID namespace, seen from inside and from outside.

mod support;

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use whylate_model::Series;
use whylate_model::sqpoll::is_thread;
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{AttachError, Attached as _, Session, Threads};

/// Set for a test's parts that run in a namespace.
const INSIDE: &str = "WHYLATE_TEST_INSIDE";
const INTERVAL: Duration = Duration::from_millis(500);

/// Runs a test of this program in a PID namespace with a /proc of its own. Returns `None`, and prints why, if
/// impossible.
fn inside(test: &str) -> Result<Option<Child>> {
    let possible = Command::new("unshare").args(["-pf", "--mount-proc", "true"]).output();
    if !possible.as_ref().is_ok_and(|output| output.status.success()) {
        println!("skipped: no namespace of process ids (unshare): {possible:?}");
        return Ok(None);
    }
    let mut command = Command::new("unshare");
    command.args(["-pf", "--mount-proc", "--kill-child"]).arg(env::current_exe()?);
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
    Ok(Some(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
}

fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

fn options(backend: &str, pid: Option<u32>) -> SqpollOptions {
    SqpollOptions {
        backend: Some(backend.to_owned()),
        threads: Threads { process: pid, ..Threads::default() },
        ..SqpollOptions::default()
    }
}

fn plan() -> Plan {
    Plan { duty: 0.2, ..Plan::default() }
}

fn numbers(series: &Series) -> Result<(u32, u32)> {
    Ok((series.labels["pid"].parse()?, series.labels["tid"].parse()?))
}

/// Returns PID, TID and number of rings of each reported thread.
fn measured_threads(options: &SqpollOptions) -> Result<Vec<(u32, u32, u64)>> {
    let mut source = patching(|| options.start(&Session::of_one()))?;
    thread::sleep(INTERVAL);
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    // Busy rings have nothing to do with PIDs.
    let lost = snapshot.lost.iter().filter(|(reason, _)| *reason != "busy_rings").map(|(_, count)| count).sum::<u64>();
    ensure!(lost == 0, "{options:?} has lost something: {:?}", snapshot.lost);
    let threads = snapshot.series.iter().filter(|series| is_thread(series));
    threads
        .map(|series| {
            let (pid, tid) = numbers(series)?;
            let rings = series.values.get("rings").copied().unwrap_or(0.0) as u64;
            println!("{options:?}: {:?}: {:?}", series.labels, series.values);
            Ok((pid, tid, rings))
        })
        .collect()
}

#[test]
fn ids_are_those_of_the_observers_namespace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // A thread outside of the namespace.
    let _outside = Load::start(&plan())?;
    let Some(mut child) = inside("ids_inside_a_namespace")? else { return Ok(()) };
    drop(child.stdin.take());
    let mut text = String::new();
    child.stdout.take().context("it has an output")?.read_to_string(&mut text)?;
    println!("{text}");
    ensure!(child.wait()?.success() && text.contains("1 passed"), "it failed in the namespace");
    Ok(())
}

/// The part of the test above that runs in a namespace.
#[test]
fn ids_inside_a_namespace() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let load = Load::start(&plan())?;
    let own = std::process::id();
    // The first or second process of the namespace.
    ensure!(own < 10, "process {own} is in no namespace of its own");
    let expected = (own, load.tid(), 1);
    let sampled = |pid| SqpollOptions { sampled: true, ..options("bpf", pid) };
    for pid in [None, Some(own)] {
        for options in [options("bpf", pid), sampled(pid)] {
            let found = measured_threads(&options)?;
            ensure!(found == [expected], "{options:?}: {found:?} instead of {expected:?}");
        }
        // A ring with a contended lock is not shown.
        let found = measured_threads(&options("fdinfo", pid))?;
        ensure!(found.len() == 1 && (found[0].0, found[0].1) == (own, load.tid()), "{found:?}");
    }
    let nonexistent = measured_threads(&options("bpf", Some(own + 1000)))?;
    ensure!(nonexistent.is_empty(), "there is no such process: {nonexistent:?}");
    drop(load);
    causes_have_namespace_tids(own)?;
    let precise = SqpollOptions { precise: true, ..options("bpf", None) };
    match precise.start(&Session::of_one()).map(|_| ()) {
        Err(AttachError::Unsupported(reason)) if reason.contains("namespace") => Ok(()),
        other => bail!("threads outside may keep --precise from ending: {other:?}"),
    }
}

/// Checks that threads on the CPU during waits have TIDs of the namespace too.
fn causes_have_namespace_tids(own: u32) -> Result<()> {
    let Some(test_cpus) = TestCpus::find() else { return Ok(()) };
    let plan = Plan { sq_cpu: Some(test_cpus.disturbed), app_cpu: Some(test_cpus.tool), ..plan() };
    let load = Load::start(&plan)?;
    let mut source = patching(|| {
        SqpollOptions { explain_over_ns: Some(1_000_000), ..options("bpf", Some(own)) }.start(&Session::of_one())
    })?;
    let hog = thread::spawn(move || -> Result<u32> {
        pin_to(test_cpus.disturbed)?;
        // Other threads may be busy there as well, and only the main causes are named.
        rustix::process::setpriority_process(None, -15)?;
        let began = std::time::Instant::now();
        while began.elapsed() < 2 * INTERVAL {
            std::hint::spin_loop();
        }
        Ok(rustix::thread::gettid().as_raw_nonzero().get() as u32)
    });
    let hog_tid = hog.join().expect("it only spins")?;
    let snapshot = source.snapshot()?;
    let mut late = Vec::new();
    source.drain_late(Duration::ZERO, &mut |event| late.push(event))?;
    patching(|| drop(source));
    let by: Vec<&String> = snapshot.series.iter().filter_map(|series| series.labels.get("by")).collect();
    println!("{} waits, behind {by:?}, of which the test is thread {hog_tid}", late.len());
    ensure!(!late.is_empty(), "the thread shares its CPU with another one, and never waits");
    let (pid, tid) = (own.to_string(), load.tid().to_string());
    for event in &late {
        ensure!((&event.labels["pid"], &event.labels["tid"]) == (&pid, &tid), "{:?}", event.labels);
    }
    ensure!(by.iter().any(|who| who.ends_with(&format!(":{hog_tid}"))), "the test is not among {by:?}");
    Ok(())
}

#[test]
fn namespaced_threads_have_outer_ids_outside() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(mut child) = inside("a_load_in_a_namespace")? else { return Ok(()) };
    let mut lines = BufReader::new(child.stdout.take().context("it has an output")?).lines();
    let inner = lines.find_map(|line| line.ok()?.split_once("inner tid ")?.1.parse::<u32>().ok());
    let inner = inner.context("it started no load")?;
    let own = std::process::id();
    for backend in ["bpf", "fdinfo"] {
        let found = measured_threads(&options(backend, None))?;
        let of_child = found.iter().copied().find(|&(pid, tid, _)| is_known_as(pid, tid, inner));
        let (pid, tid, rings) = of_child.with_context(|| format!("{backend}: none of {found:?} is {inner} inside"))?;
        ensure!(pid != own, "{found:?}");
        ensure!(backend == "fdinfo" || rings == 1, "{found:?}");
        let of_one = measured_threads(&options(backend, Some(pid)))?;
        ensure!(of_one.iter().map(|&(pid, tid, _)| (pid, tid)).eq([(pid, tid)]), "{backend}: {of_one:?}");
    }
    drop(child.stdin.take());
    ensure!(child.wait()?.success(), "the load failed");
    Ok(())
}

/// Returns whether the thread with these IDs here has the TID `inner` in its own namespace.
fn is_known_as(pid: u32, tid: u32, inner: u32) -> bool {
    let status = fs::read_to_string(Path::new("/proc").join(format!("{pid}/task/{tid}/status"))).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let numbers: Vec<u32> = numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    numbers == [tid, inner]
}

/// The part of the test above that runs in a namespace.
#[test]
fn a_load_in_a_namespace() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let load = Load::start(&plan())?;
    println!("inner tid {}", load.tid());
    // Until the other test is done, or has ended.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
