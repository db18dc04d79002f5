// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` in a PID namespace, as in a container: its own threads by the namespace's PIDs, and others as outside.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "running/quota.rs"]
mod quota;

use std::collections::BTreeSet;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use whylate_model::overview::Overview;
use whylate_model::selftest::{Selftest, Verdict};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::inject::work::{MAX_ITEMS, Plan, run};

use lock::{lock_machine, plan};
use quota::Quota;

/// A background process of a shell that always wants the first CPU, and yields to others that do.
const HOG: &str = "nice -n 19 taskset -c 0 sh -c 'while :; do :; done' & ";

/// Returns the output of a script in a PID namespace with its own /proc; `None` with a printed reason if there is none.
/// PID 1 is the shell, and `$W` is whylate.
fn inside(script: &str) -> Result<Option<Output>> {
    inside_with(&["-pf", "--mount-proc", "--kill-child"], script)
}

/// Runs the script in the given namespaces.
fn inside_with(namespaces: &[&str], script: &str) -> Result<Option<Output>> {
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(namespaces).args(["sh", "-c", script]);
        command.env("W", env!("CARGO_BIN_EXE_whylate")).stdin(Stdio::null()).output()
    };
    let possible = unshare("true");
    if !possible.as_ref().is_ok_and(|output| output.status.success()) {
        println!("skipped: no namespace of process ids (unshare): {possible:?}");
        return Ok(None);
    }
    Ok(Some(unshare(script)?))
}

/// A process outside that always wants the first CPU; killed on drop.
struct Outsider(Child);

impl Outsider {
    fn start() -> Result<Self> {
        let script = "printf outsider >/proc/$$/comm; while :; do :; done";
        Ok(Outsider(Command::new("taskset").args(["-c", "0", "sh", "-c", script]).spawn()?))
    }
}

impl Drop for Outsider {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// No PID of the host appears: PIDs in a new namespace are small, and the test's own is not.
fn ensure_small(events: &[LateEvent]) -> Result<()> {
    let names = events.iter().flat_map(|event| {
        let labels = ["woken_by", "task"].into_iter().filter_map(|name| event.labels.get(name).cloned());
        let causes = event.causes.iter().filter(|cause| cause.kind == whylate_model::CauseKind::Thread);
        labels.chain(causes.map(|cause| cause.who.to_string()))
    });
    for name in names {
        let number = name.rsplit_once(':').map_or("", |(_, number)| number);
        ensure!(
            number == "outside" || number.parse::<u32>().is_ok_and(|number| number < 100),
            "{name} is no number here"
        );
    }
    Ok(())
}

fn snapshot_of(output: &Output) -> Result<Snapshot> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(stderr.contains("in a PID namespace"), "it does not say whose numbers it tells: {stderr}");
    let last = output.stdout.split(|&byte| byte == b'\n').rfind(|line| !line.is_empty());
    let snapshot: Snapshot = serde_json::from_slice(last.with_context(|| format!("no snapshot: {stderr}"))?)?;
    ensure!(snapshot.pid_namespace.is_some(), "the snapshot does not tell whose numbers it has");
    Ok(snapshot)
}

#[test]
fn finds_process_by_namespace_pid_and_waker_outside() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _outsider = Outsider::start()?;
    let script = format!("{HOG} $W offcpu -p $! --why 1ms -d 2s --json");
    let Some(output) = inside(&script)? else { return Ok(()) };
    let snapshot = snapshot_of(&output)?;
    ensure!(snapshot.backend == "sample", "{} measures", snapshot.backend);
    println!("{} stacks, {} waits, lost {:?}", snapshot.stacks.len(), snapshot.late.len(), snapshot.lost);
    ensure!(!snapshot.stacks.is_empty() && !snapshot.late.is_empty(), "the process was not found");
    // The shell is PID 1.
    ensure!(snapshot.stacks.iter().all(|stack| stack.labels["pid"] == "2"), "{:?}", snapshot.stacks);
    ensure!(snapshot.late.iter().all(|event| event.labels["pid"] == "2"), "{:?}", snapshot.late);
    let mut causes = snapshot.late.iter().flat_map(|event| &event.causes);
    ensure!(causes.any(|cause| cause.who == "outsider:outside"), "{:?}", snapshot.late);
    ensure_small(&snapshot.late)
}

#[test]
fn victims_are_threads_of_the_namespace_only() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _outsider = Outsider::start()?;
    let Some(output) = inside(&format!("{HOG} exec $W offcpu --why 1ms -d 2s --json"))? else { return Ok(()) };
    let snapshot = snapshot_of(&output)?;
    let waits: Vec<&str> = snapshot.late.iter().map(|event| &*event.subject).collect();
    ensure!(waits.contains(&"sh:2"), "{waits:?}");
    // PID 1 itself is no victim, and no thread outside is.
    ensure!(snapshot.late.iter().all(|event| event.labels["pid"] == "2"), "{waits:?}");
    ensure!(snapshot.stacks.iter().all(|stack| stack.labels["pid"] == "2"), "{:?}", snapshot.stacks);
    ensure_small(&snapshot.late)
}

#[test]
fn each_source_names_culprit_outside() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _outsider = Outsider::start()?;
    // Queues an item per millisecond during the whole run, to workers that compete with the outsider for the first CPU.
    let items = Plan { at_once: 1, cpu: Some(0), ..plan(MAX_ITEMS) };
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let injection = scope.spawn(|| run(&items, &has_ended));
        let result = culprits_outside(&|| injection.is_finished());
        has_ended.store(true, Ordering::Relaxed);
        let injected = injection.join().map_err(|_| anyhow!("the injection failed"))?;
        println!("injected {injected:?}");
        result
    })
}

fn culprits_outside(has_no_items: &dyn Fn() -> bool) -> Result<()> {
    for (command, culprit) in [
        ("timerlat hist --why 1us", "outsider:outside"),
        ("irqsoff --min 1us --why 1us --period 1ms", "outsider:outside"),
        // Its items also wait for their workers to run.
        ("wq --why 1us", ":outside"),
    ] {
        let Some(output) = inside(&format!("exec $W {command} -d 500ms --json"))? else { return Ok(()) };
        let snapshot = snapshot_of(&output)?;
        println!("{command}: {} late events, lost {:?}", snapshot.late.len(), snapshot.lost);
        ensure_small(&snapshot.late)?;
        let numbers = ["worker_pid", "queued_by_pid"];
        let numbers = snapshot.late.iter().flat_map(|event| numbers.iter().filter_map(|name| event.labels.get(*name)));
        for number in numbers {
            ensure!(number == "outside" || number.parse::<u32>()? < 100, "{command}: {number} is no number here");
        }
        if command.starts_with("wq") && has_no_items() {
            println!("skipped: no work items are injected here, so nobody may wait");
            continue;
        }
        let causes: BTreeSet<String> =
            snapshot.late.iter().flat_map(|event| &event.causes).map(|cause| cause.who.to_string()).collect();
        ensure!(causes.iter().any(|who| who.ends_with(culprit)), "{command}: {culprit} is missing: {causes:?}");
    }
    Ok(())
}

#[test]
fn overview_shows_no_host_pids() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _outsider = Outsider::start()?;
    let Some(output) = inside(&format!("{HOG} exec $W -d 2s --json"))? else { return Ok(()) };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let look: Overview = serde_json::from_slice(&output.stdout).with_context(|| format!("no look: {stderr}"))?;
    ensure!(look.pid_namespace.is_some() && stderr.contains("in a PID namespace"), "{stderr}");
    ensure!(look.culprits.iter().any(|culprit| culprit.who == "outsider:outside"), "{look:?}");
    let events: Vec<LateEvent> = look.worst.iter().map(|sighting| sighting.event.clone()).collect();
    ensure_small(&events)
}

/// As in a container with a limit: a fifth of a CPU.
#[test]
fn selftest_passes_in_namespace_with_quota() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let quota = Quota::make("selftest")?;
    if let Some(file) = quota.as_ref().and_then(Quota::of_real_time) {
        // Leaves CPU time to others.
        std::fs::write(file, "900000")?;
    }
    let enter = quota.as_ref().map_or_else(|| ":".to_owned(), Quota::enter);
    // Other programs may have real-time threads. The whole selftest takes a minute: `make trial` runs it.
    let sources = if std::env::var_os("WHYLATE_TRIAL").is_some() { "" } else { "--sources wq,offcpu" };
    let Some(output) = inside(&format!("{enter}; exec $W selftest --json --force {sources}"))? else { return Ok(()) };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let result: Selftest = serde_json::from_slice(&output.stdout).with_context(|| format!("no result: {stderr}"))?;
    for check in &result.checks {
        println!("{check:?}");
        if check.verdict == Verdict::Skip {
            println!("skipped: {}: {}", check.source, check.reason);
        }
    }
    ensure!(result.failed == 0 && output.status.code() == Some(0), "{} failed: {stderr}", result.failed);
    ensure!(
        stderr.matches("in a PID namespace").count() == 1,
        "it says more than once whose numbers it tells: {stderr}"
    );
    Ok(())
}

#[test]
fn ignores_proc_of_another_namespace() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let others = ["-pf", "--kill-child"];
    let Some(output) = inside_with(&others, &format!("{HOG} exec $W offcpu -d 1s --json"))? else { return Ok(()) };
    let snapshot = snapshot_of(&output)?;
    ensure!(snapshot.backend == "sample", "{} measures: {:?}", snapshot.backend, snapshot.lost);
    ensure!(snapshot.stacks.iter().all(|stack| stack.labels["pid"] == "2"), "{:?}", snapshot.stacks);
    let without = ["-m"];
    for (namespaces, script, message) in [
        (&others[..], "exec $W offcpu -d 1s --backend proc", "/proc belongs to another PID namespace"),
        (&others, "sleep 9 & exec $W -p $! -d 1s", "/proc belongs to another PID namespace"),
        (&without, "umount -l /proc && exec $W offcpu -d 1s --backend proc", "/proc is not mounted"),
    ] {
        let Some(output) = inside_with(namespaces, script)? else { return Ok(()) };
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().next_back().unwrap_or_default();
        ensure!(!output.status.success() && output.stdout.is_empty(), "{script}: {}: {stderr}", output.status);
        ensure!(last.contains(message) && !last.contains("run as root"), "{script}: {stderr}");
    }
    Ok(())
}

#[test]
fn rejects_host_pid() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let outsider = Outsider::start()?;
    for source in ["offcpu", "sqpoll"] {
        let Some(output) = inside(&format!("exec $W {source} -p {} -d 1s", outsider.0.id()))? else { return Ok(()) };
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(2) && output.stdout.is_empty(), "{source}: {}: {stderr}", output.status);
        ensure!(stderr.contains("give its PID in this PID namespace"), "{source}: {stderr}");
    }
    Ok(())
}
