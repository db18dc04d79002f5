// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate inject irqs-off`, `preempt-off`, `softirq` and `hog`, and of `block` beside its source.

#[path = "../../whylate-sources/tests/support/oracles/bpf_programs.rs"]
mod bpf_programs;
mod running;
// Not every test program uses everything.
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use whylate_model::{CauseKind, LateEvent, Snapshot};
use whylate_sources::block::{BlockOptions, By};
use whylate_sources::{AttachError, Measuring, Session, Source as _};

use lock::{hooks, lock_machine, lock_machine_to_inject};
use running::{Running, whylate};

const KINDS: [&str; 4] = ["irqs-off", "preempt-off", "softirq", "hog"];

/// Whether this kernel supports the injection, by evidence other than the program under test.
fn is_possible(kind: &str) -> bool {
    match kind {
        "irqs-off" => hooks::can_call(&["bpf_local_irq_save"]),
        "preempt-off" => hooks::can_call(&["bpf_preempt_disable"]),
        "softirq" => {
            hooks::can_call(&[]) && !fs::read_to_string("/sys/kernel/realtime").is_ok_and(|is| is.trim() == "1")
        }
        _ => Command::new("chrt").args(["--fifo", "1", "true"]).status().is_ok_and(|status| status.success()),
    }
}

/// Returns true and prints why if the kernel does not support it.
fn is_skipped(kind: &str) -> Result<bool> {
    let output = whylate(&["inject", kind, "--for", "1us", "--times", "1"]).output()?;
    let is_skipped = output.status.code() == Some(3) && !is_possible(kind);
    if is_skipped {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(is_skipped)
}

#[test]
fn json_lists_every_disturbance() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    for (kind, in_json) in KINDS.into_iter().zip(["irqs_off", "preempt_off", "softirq", "hog"]) {
        if is_skipped(kind)? {
            continue;
        }
        let output =
            whylate(&["inject", kind, "--for", "2ms", "--times", "3", "--every", "20ms", "--json"]).output()?;
        let stderr = String::from_utf8(output.stderr)?;
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        println!("{json}");
        assert_eq!((&json["kind"], &json["complete"]), (&in_json.into(), &true.into()));
        assert_eq!((&json["wanted_ns"], &json["times"]), (&2_000_000.into(), &3.into()));
        let disturbances = json["disturbances"].as_array().context("no list")?;
        assert_eq!(disturbances.len(), 3);
        for one in disturbances {
            assert!(one["ns"].as_u64().is_some_and(|ns| ns >= 2_000_000) && one["cpu"] == json["cpu"], "{one}");
            assert!(one["start"].is_string() && one["start_monotonic_ns"].is_u64(), "{one}");
            assert_eq!(one["on_cpu_ns"].is_u64(), kind == "hog", "{one}");
        }
    }
    Ok(())
}

#[test]
fn ctrl_c_ends_it_and_prints_progress() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    for kind in KINDS {
        if is_skipped(kind)? {
            continue;
        }
        let mut whylate = Running::start(&["inject", kind, "--times", "5000"])?;
        let mut stdout = BufReader::new(whylate.stdout()?);
        // Each disturbance is printed when it is over.
        let mut written = String::new();
        stdout.read_line(&mut written)?;
        whylate.signal(Signal::INT)?;
        stdout.read_to_string(&mut written)?;
        let (status, stderr) = whylate.end()?;
        println!("{written}");
        assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
        let made = written.lines().filter(|line| line.starts_with('#')).count();
        assert!((1..5000).contains(&made));
        assert!(
            written.lines().last().is_some_and(|line| line.contains(&format!(", {made} of 5000 times"))),
            "{written}"
        );
    }
    Ok(())
}

#[test]
fn work_injection_ends_with_success_on_ctrl_c() -> Result<()> {
    let mut whylate = Running::start(&["inject", "work", "--delay", "1h"])?;
    // Signals are caught before the BPF program is loaded.
    while whylate.is_alive()? {
        if bpf_programs::held_by(whylate.pid()).is_ok_and(|held| !held.is_empty()) {
            whylate.signal(Signal::INT)?;
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let (status, stderr) = whylate.end()?;
    if status.code() == Some(3) && !hooks::can_call(&["bpf_wq_init", "bpf_wq_start"]) {
        println!("skipped: {}", stderr.trim_end());
        return Ok(());
    }
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    Ok(())
}

#[test]
fn leaves_no_bpf_program_when_killed() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    for kind in ["irqs-off", "softirq"] {
        if is_skipped(kind)? {
            continue;
        }
        let mut whylate = Running::start(&["inject", kind, "--for", "50ms", "--every", "100ms", "--times", "1000"])?;
        BufReader::new(whylate.stdout()?).read_line(&mut String::new())?;
        let held = bpf_programs::held_by(whylate.pid())?;
        assert!(!held.is_empty());
        whylate.signal(Signal::KILL)?;
        let (status, _) = whylate.end()?;
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        bpf_programs::ensure_gone(&held)?;
    }
    Ok(())
}

#[test]
fn closed_pipe_ends_it_with_success() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let mut whylate = Running::start(&["inject", "hog", "--policy", "normal", "--times", "5000"])?;
    BufReader::new(whylate.stdout()?).read_line(&mut String::new())?;
    let (status, stderr) = whylate.end()?;
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    Ok(())
}

/// Output of `inject block`: its reads and its last line.
struct Injected {
    reads: Vec<Value>,
    end: Value,
}

/// Returns a field as the source's labels have it.
fn text(of: &Value, name: &str) -> String {
    of[name].as_str().map_or_else(|| of[name].to_string(), str::to_owned)
}

/// Runs `inject block` while the source measures and collects late events as they come; `None` with a printed reason if
/// that is not possible here.
fn inject_block(arguments: &[&str], source: &mut Measuring) -> Result<Option<(Injected, Vec<LateEvent>, Snapshot)>> {
    let mut events = Vec::new();
    let mut whylate = Running::start(&[&["inject", "block", "--json"][..], arguments].concat())?;
    let mut stdout = whylate.stdout()?;
    while whylate.is_alive()? {
        source.drain_late(Duration::from_millis(20), &mut |event| events.push(event))?;
    }
    source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    let snapshot = source.snapshot()?;
    let mut written = String::new();
    stdout.read_to_string(&mut written)?;
    let (status, stderr) = whylate.end()?;
    if status.code() == Some(3) {
        println!("skipped: {}", stderr.trim_end());
        return Ok(None);
    }
    ensure!((status.code(), stderr.as_str()) == (Some(0), ""), "{status}: {stderr}");
    let mut reads = written.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let end = reads.pop().context("it tells nothing")?;
    events.retain(|event| event.labels["device"] == text(&end, "disk") && event.labels["operation"] == "read");
    Ok(Some((Injected { reads, end }, events, snapshot)))
}

/// Counts requests that were lost: without a seen start or end, or late but not reported.
fn lost(snapshot: &Snapshot) -> u64 {
    let reasons = ["reused", "unmatched", "nested", "late_events", "over_budget"];
    reasons.iter().filter_map(|&reason| snapshot.lost.get(reason)).sum()
}

/// Returns how many of its reads were counted, and their total time.
fn counted(snapshot: &Snapshot, injected: &Injected) -> (u64, u128) {
    let of_it = snapshot.series.iter().filter(|series| {
        let labels = &series.labels;
        labels["device"] == text(&injected.end, "disk")
            && labels["operation"] == "read"
            && labels["pid"] == text(&injected.end, "pid")
    });
    let latencies = of_it.filter_map(|series| series.histograms.get("latency"));
    latencies.fold((0, 0), |(count, ns), of| (count + of.count(), ns + of.sum_ns()))
}

fn took_ns(read: &Value) -> u64 {
    read["took_ns"].as_u64().unwrap_or(0)
}

/// Returns the read that made the request. The clocks of two CPUs may differ a little.
fn read_with<'a>(event: &LateEvent, injected: &'a Injected) -> Option<&'a Value> {
    const APART_NS: u64 = 1_000;
    let is_it = |read: &&Value| {
        let start_ns = read["start_monotonic_ns"].as_u64().unwrap_or(0);
        let submitted_ns = event.at_ns - event.latency_ns;
        submitted_ns + APART_NS >= start_ns && event.at_ns <= start_ns + took_ns(read) + APART_NS
    };
    injected.reads.iter().find(is_it)
}

/// Cgroups of `inject block`, in any hierarchy that can limit disks.
fn cgroups() -> Vec<PathBuf> {
    let entries = ["/sys/fs/cgroup", "/sys/fs/cgroup/blkio", "/sys/fs/cgroup/unified"].map(fs::read_dir);
    let paths = entries.into_iter().flatten().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.to_string_lossy().contains("/whylate-inject-")).collect()
}

/// Backing files without a name that loop devices use.
fn loop_devices() -> Vec<String> {
    let disks = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let files = disks.filter_map(|disk| fs::read_to_string(disk.path().join("loop/backing_file")).ok());
    files.filter(|file| file.contains("/#") && file.trim_end().ends_with(" (deleted)")).collect()
}

fn ensure_nothing_is_left() -> Result<()> {
    // udev may still have a new device open.
    let deadline = Instant::now() + Duration::from_secs(5);
    while !loop_devices().is_empty() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    ensure!(cgroups().is_empty() && loop_devices().is_empty(), "left: {:?} {:?}", cgroups(), loop_devices());
    Ok(())
}

#[test]
fn throttled_reads_name_their_limit() -> Result<()> {
    const MS_NS: u64 = 1_000_000;
    const READS: usize = 40;
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let options = BlockOptions {
        by: By::Process,
        phases: true,
        explain_over_ns: Some(20 * MS_NS),
        backend: Some("fexit".to_owned()),
        ..BlockOptions::default()
    };
    let (mut source, is_seen) = match options.attach(&Session::of_one()) {
        Ok(source) => (source, true),
        Err(AttachError::Unsupported(reason)) => {
            println!("skipped: {reason}");
            (BlockOptions { backend: None, ..options }.attach(&Session::of_one())?, false)
        }
        Err(error) => return Err(error.into()),
    };
    let arguments = ["--loop", "--limit", "20", "--reads", "40", "--every", "1ms"];
    let Some((injected, events, snapshot)) = inject_block(&arguments, &mut source)? else { return Ok(()) };
    drop(source);
    ensure_nothing_is_left()?;
    let cgroup = text(&injected.end, "cgroup");
    let long = injected.reads.iter().filter(|read| took_ns(read) >= 20 * MS_NS).count();
    let own_ns: u64 = injected.reads.iter().map(took_ns).sum();
    println!("{} reads took {own_ns} ns, {long} of them long; {} told late", injected.reads.len(), events.len());
    let start_ns = |read: &Value| read["start_monotonic_ns"].as_u64().unwrap_or(0);
    let [first, .., last] = &injected.reads[..] else { bail!("{} reads", injected.reads.len()) };
    let all_ns = start_ns(last) + took_ns(last) - start_ns(first);
    // The kernel admits the requests of a slice of 100 ms at once: two.
    ensure!(injected.reads.len() == READS && long >= READS / 3, "{long} are held back");
    ensure!(all_ns >= (READS as u64 - 4) * 50 * MS_NS, "they took {all_ns} ns");
    if !is_seen {
        return Ok(());
    }
    let (count, ns) = counted(&snapshot, &injected);
    println!("{count} are counted with {ns} of {own_ns} ns; lost {:?}", snapshot.lost);
    let lost = lost(&snapshot);
    ensure!(
        count <= READS as u64 && count + lost >= READS as u64 && ns <= u128::from(own_ns),
        "{count} took {ns} of {own_ns} ns"
    );
    // A request may take less than a read that is barely long enough.
    ensure!(events.len() <= long && (events.len() + 1) as u64 + lost >= long as u64, "{} of {long}", events.len());
    let mut right = 0;
    for event in &events {
        let read = read_with(event, &injected).with_context(|| format!("no read is {event:?}"))?;
        ensure!(event.phases.iter().map(|(_, ns)| ns).sum::<u64>() == event.latency_ns, "{:?}", event.phases);
        ensure!(event.latency_ns <= took_ns(read), "{} of {} ns", event.latency_ns, took_ns(read));
        let phase = |name| event.phases.iter().find(|(phase, _)| phase == name).map_or(0, |&(_, ns)| ns);
        let first = event.causes.first().context("it has no cause")?;
        let is_limit = first.kind == CauseKind::Throttled && first.who.to_string().ends_with(&format!(" of {cgroup}"));
        // Other users of the disk below may delay the device itself.
        right += usize::from(is_limit && phase("throttled") * 10 >= (event.latency_ns - phase("device")) * 9);
    }
    ensure!(right * 100 >= events.len() * 95, "{right} of {} name {cgroup}: {:?}", events.len(), events.first());
    Ok(())
}

#[test]
fn counts_reads_on_loop_device() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let options = BlockOptions { by: By::Process, late_over_ns: Some(1), ..BlockOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
    let arguments = ["--loop", "--reads", "200", "--every", "2ms", "--hogs", "1"];
    let Some((injected, events, snapshot)) = inject_block(&arguments, &mut source)? else { return Ok(()) };
    drop(source);
    ensure_nothing_is_left()?;
    let own_ns: u64 = injected.reads.iter().map(took_ns).sum();
    let (count, ns) = counted(&snapshot, &injected);
    println!("{count} reads of {} took {ns} of {own_ns} ns; lost {:?}", injected.end["disk"], snapshot.lost);
    ensure!(injected.end["disk"].as_str().is_some_and(|disk| disk.starts_with("loop")), "{}", injected.end);
    ensure!(injected.end["writes"].as_u64().is_some_and(|writes| writes > 0), "{}", injected.end);
    let lost = lost(&snapshot);
    ensure!(count <= 200 && count + lost >= 200 && injected.reads.len() == 200, "{count} of {}", injected.reads.len());
    ensure!(ns <= u128::from(own_ns), "{ns} of {own_ns} ns");
    let pid = text(&injected.end, "pid");
    let own: Vec<_> = events.iter().filter(|event| event.labels["submitter_pid"] == pid).collect();
    ensure!(own.len() as u64 + lost >= 200, "{} are told", own.len());
    for event in own {
        let read = read_with(event, &injected).with_context(|| format!("no read is {event:?}"))?;
        ensure!(event.latency_ns <= took_ns(read), "{} of {} ns", event.latency_ns, took_ns(read));
    }
    Ok(())
}

#[test]
fn leaves_no_disk_when_killed_and_next_run_removes_cgroup() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let control = "/sys/fs/cgroup/cgroup.subtree_control";
    let before = fs::read_to_string(control).ok();
    let mut running = Running::start(&["inject", "block", "--loop", "--limit", "20", "--reads", "1000"])?;
    // The reader is in its cgroup.
    let reads = || cgroups().iter().any(|path| fs::read(path.join("cgroup.procs")).is_ok_and(|all| !all.is_empty()));
    let deadline = Instant::now() + Duration::from_secs(60);
    while running.is_alive()? && !reads() {
        ensure!(Instant::now() < deadline, "it makes no cgroup");
        thread::sleep(Duration::from_millis(1));
    }
    running.signal(Signal::KILL)?;
    let (status, stderr) = running.end()?;
    match (status.signal(), status.code()) {
        (Some(_), _) => {}
        (_, Some(3)) => {
            println!("skipped: {}", stderr.trim_end());
            return Ok(());
        }
        _ => bail!("{status}: {stderr}"),
    }
    ensure!(cgroups().len() == 1, "{:?}", cgroups());
    let output = whylate(&["inject", "block", "--reads", "1"]).output()?;
    let stderr = String::from_utf8(output.stderr)?;
    ensure!(stderr.contains("an earlier whylate was killed") && stderr.contains("1 cgroups"), "{stderr}");
    ensure_nothing_is_left()?;
    ensure!(fs::read_to_string(control).ok() == before, "{before:?} is another one");
    Ok(())
}
