// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program's interface: exit statuses, output streams, and how it ends.

#[path = "../../whylate-sources/tests/support/oracles/bpf_programs.rs"]
mod bpf_programs;
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use whylate_model::Snapshot;
use whylate_sources::inject::sqpoll::{Load, Plan as LoadPlan};
use whylate_sources::inject::work::{HANDLER, Plan, run};
use whylate_sources::kernel::restore::Restore;

use lock::{lock_machine, lock_machine_to_inject, plan, share_machine};
use running::{Running, whylate};

/// Allows nothing on standard error: notes on the chosen backend need -v.
fn assert_silent(stderr: &str) {
    assert_eq!(stderr, "");
}

fn output_of(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(arguments).output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn advises_how_to_start_a_submission_thread() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    // The test has no submission thread, whatever else runs on the machine.
    let pid = std::process::id().to_string();
    for backend in ["bpf", "fdinfo"] {
        let output = output_of(&["sqpoll", "-p", &pid, "--backend", backend])?;
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(output.stdout.is_empty());
        assert!(
            stderr.contains("has no io_uring submission thread now") && stderr.contains("IORING_SETUP_SQPOLL"),
            "{stderr}"
        );
    }
    Ok(())
}

#[test]
fn lists_submission_threads_as_json() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let load = Load::start(&LoadPlan::default())?;
    let pid = std::process::id().to_string();
    let output = output_of(&["sqpoll", "-p", &pid, "--json", "1", "2"])?;
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let lines: Vec<Snapshot> = text(&output.stdout).lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert_eq!(lines.len(), 2);
    for snapshot in lines {
        assert_eq!((snapshot.source.as_str(), snapshot.backend.as_str()), ("sqpoll", "bpf"));
        let series = snapshot.series.iter().find(|series| series.labels.get("tid") == Some(&load.tid().to_string()));
        let series = series.context("the thread has a series")?;
        let sum: f64 = ["working", "spinning", "sleeping", "starved"].iter().map(|name| series.values[*name]).sum();
        assert!((sum - 1.0).abs() < 1e-9 && series.values["utilisation"] <= 1.0, "{series:?}");
    }
    Ok(())
}

#[test]
fn rejects_unknown_backend() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let output = output_of(&["wq", "--backend", "nonsense", "1", "1"])?;
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("no backend is named nonsense") && stderr.lines().count() == 1, "{stderr}");
    Ok(())
}

#[test]
fn closed_pipe_ends_it_with_success() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let began = Instant::now();
    let mut whylate = Running::start(&["wq", "1", "3"])?;
    let mut lines = BufReader::new(whylate.stdout()?).lines();
    let first = lines.next().context("no first line")??;
    println!("first line after {:?}", began.elapsed());
    assert_eq!(first, "Printing histogram");
    lines.next().context("no second line")??;
    drop(lines);
    let (status, stderr) = whylate.end()?;
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert_silent(&stderr);
    Ok(())
}

#[test]
fn names_unknown_handler_at_the_end() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let output = output_of(&["wq", "-w", "no_such_handler", "-d", "1s"])?;
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("whylate: no work item of no_such_handler was seen"), "{stderr}");
    assert!(!text(&output.stdout).contains("Tracing"));
    Ok(())
}

#[test]
fn ctrl_c_prints_results_so_far() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let mut whylate = Running::start(&["wq", "-w", HANDLER, "--slower", "1h", "600"])?;
    let mut stdout = BufReader::new(whylate.stdout()?);
    // The heading of late items is printed once it measures.
    stdout.read_line(&mut String::new())?;
    run(&plan(1_000), &AtomicBool::new(false))?;
    whylate.signal(Signal::INT)?;
    let mut rest = String::new();
    stdout.read_to_string(&mut rest)?;
    let (status, stderr) = whylate.end()?;
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert_silent(&stderr);
    assert!(rest.contains("usecs") && rest.contains("|*"), "{rest}");
    Ok(())
}

#[test]
fn second_ctrl_c_ends_it_while_output_is_blocked() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let mut whylate = Running::start(&["wq", "--slower", "1ns"])?;
    let mut stdout = BufReader::new(whylate.stdout()?);
    stdout.read_line(&mut String::new())?;
    while !whylate.is_stuck_writing()? {
        run(&plan(1_000), &AtomicBool::new(false))?;
    }
    whylate.signal(Signal::INT)?;
    whylate.wait_until_delivered(Signal::INT)?;
    whylate.signal(Signal::INT)?;
    let (status, stderr) = whylate.end()?;
    println!("{status}");
    assert!(status.code() == Some(130) || status.signal() == Some(Signal::INT.as_raw()), "{status}: {stderr}");
    assert_silent(&stderr);
    Ok(())
}

#[test]
fn leaves_no_bpf_program_when_killed() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let mut whylate = Running::start(&["wq", "--table", "--slower", "1s", "--stack"])?;
    let mut stdout = BufReader::new(whylate.stdout()?);
    stdout.read_line(&mut String::new())?;
    let held = bpf_programs::held_by(whylate.pid())?;
    assert!(held.len() >= 4, "{held:?}");
    whylate.signal(Signal::KILL)?;
    let (status, _) = whylate.end()?;
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    bpf_programs::ensure_gone(&held)
}

#[test]
fn json_has_one_snapshot_per_line() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let mut whylate = Running::start(&["wq", "--json", "1", "2", "--slower", "10s"])?;
    let lines: Vec<String> = BufReader::new(whylate.stdout()?).lines().collect::<Result<_, _>>()?;
    let (status, stderr) = whylate.end()?;
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert_silent(&stderr);
    assert_eq!(lines.len(), 2);
    let mut measured_ns = 0;
    for line in &lines {
        let snapshot: Snapshot = serde_json::from_str(line)?;
        assert_eq!((snapshot.schema, snapshot.source.as_str()), (1, "wq"));
        measured_ns += snapshot.duration_ns;
        let value: serde_json::Value = serde_json::from_str(line)?;
        for field in ["schema", "source", "backend", "host", "start", "duration_ns", "series", "lost", "probe"] {
            assert!(value.get(field).is_some(), "{field} is missing");
        }
        assert!(value["lost"]["unmatched"].is_u64() && value["probe"]["runs"].is_u64());
        let start = value["start"].as_str().context("start is a text")?;
        assert!(start.ends_with('Z') && start.contains('T'), "{start}");
        for series in value["series"].as_array().context("series is a list")? {
            assert!(series["labels"]["handler"].is_string() && series["labels"]["workqueue"].is_string(), "{series}");
            let latency = &series["histograms"]["latency"];
            for field in ["count", "min_ns", "mean_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"] {
                assert!(latency[field].is_u64(), "{field} is missing: {series}");
            }
            let buckets = latency["buckets"].as_array().context("buckets is a list")?;
            let sum: u64 = buckets.iter().filter_map(|bucket| bucket[1].as_u64()).sum();
            assert_eq!(Some(sum), latency["count"].as_u64());
        }
    }
    // A late first line shortens the second span.
    assert!(measured_ns >= 1_900_000_000, "{measured_ns}");
    Ok(())
}

/// Injects at least `items` items while a reader slowly takes the output.
fn read_slowly(arguments: &[&str], items: u64) -> Result<(u64, String)> {
    let mut whylate = Running::start(arguments)?;
    let mut stdout = whylate.stdout()?;
    // All BPF programs are loaded: it measures, or is about to.
    while bpf_programs::held_by(whylate.pid())?.len() < 4 {
        ensure!(whylate.is_alive()?, "it ended");
        thread::sleep(Duration::from_millis(5));
    }
    let injection = thread::spawn(move || run(&Plan { at_once: 4_000, ..plan(items) }, &AtomicBool::new(false)));
    let mut some = [0; 4096];
    let mut peak_kb = 0;
    while !injection.is_finished() {
        peak_kb = peak_kb.max(whylate.allocated_kb()?);
        if arguments.contains(&"--json") {
            thread::sleep(Duration::from_millis(20));
        } else {
            ensure!(stdout.read(&mut some)? > 0, "it ended");
            thread::sleep(Duration::from_millis(5));
        }
    }
    let report = injection.join().map_err(|_| anyhow::anyhow!("the injection failed"))??;
    assert!(report.complete);
    whylate.signal(Signal::INT)?;
    // It writes what it holds once a reader takes it, and then exits.
    let mut rest = Vec::new();
    loop {
        let bytes = stdout.read(&mut some)?;
        if bytes == 0 {
            break;
        }
        rest.extend_from_slice(&some[..bytes]);
        peak_kb = peak_kb.max(whylate.allocated_kb().unwrap_or(0));
    }
    let (status, stderr) = whylate.end()?;
    assert_eq!(status.code(), Some(0), "{stderr}");
    assert_silent(&stderr);
    Ok((peak_kb, text(&rest)))
}

#[test]
fn slow_reader_does_not_grow_memory() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let (peak_kb, rest) = read_slowly(&["wq", "--slower", "1ns"], 100_000)?;
    println!("text: {peak_kb} KB at most; it ends with {:?}", rest.lines().last());
    // Unread, the lines would take 12 MB.
    assert!(peak_kb < 8 * 1024, "{peak_kb} KB");
    let (peak_kb, _) = read_slowly(&["wq", "--slower", "1ns", "--json"], 100_000)?;
    println!("json: {peak_kb} KB at most");
    Ok(())
}

/// Objects of a measurement outside are no leftovers, whatever PIDs a namespace assigns.
#[test]
fn other_pid_namespace_keeps_objects_of_running_measurements() -> Result<()> {
    let Ok(tracefs) = whylate_sources::kernel::tracefs::find() else {
        println!("skipped: tracefs is not mounted");
        return Ok(());
    };
    let Ok(living) = whylate_sources::kernel::tracefs::instance::Instance::new(&tracefs, "") else {
        println!("skipped: this user may make no tracing instance");
        return Ok(());
    };
    let output = std::process::Command::new("unshare")
        .args(["-pf", "--mount-proc", env!("CARGO_BIN_EXE_whylate"), "doctor"])
        .output()?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(living.path("trace_pipe").exists(), "the instance was removed");
    ensure!(!String::from_utf8_lossy(&output.stderr).contains("killed"), "it took it for one that was left");
    Ok(())
}

/// Settings that a running measurement will restore itself are left alone.
#[test]
fn other_pid_namespace_keeps_settings_of_running_measurements() -> Result<()> {
    let Ok(tracefs) = whylate_sources::kernel::tracefs::find() else {
        println!("skipped: tracefs is not mounted");
        return Ok(());
    };
    let Ok(own) = whylate_sources::kernel::tracefs::instance::Instance::new(&tracefs, "") else {
        println!("skipped: this user may make no tracing instance");
        return Ok(());
    };
    // A setting of a tracing instance of its own.
    let setting = own.path("tracing_on");
    let mut living = Restore::default();
    living.set(&setting, "0")?;
    let entry = format!("\t{}\t1\t0\n", setting.display());
    let is_on_record = || -> Result<bool> {
        let records = std::fs::read_dir("/run/whylate")?.flatten().map(|entry| entry.path());
        Ok(records.filter_map(|record| std::fs::read_to_string(record).ok()).any(|text| text.contains(&entry)))
    };
    ensure!(is_on_record()?, "it is not on record");
    let output =
        Command::new("unshare").args(["-pf", "--mount-proc", env!("CARGO_BIN_EXE_whylate"), "doctor"]).output()?;
    ensure!(output.status.code() == Some(0), "{}", text(&output.stderr));
    ensure!(Restore::read(&setting)? == "0", "the setting was put back");
    ensure!(is_on_record()?, "the record was removed");
    drop(living);
    ensure!(Restore::read(&setting)? == "1" && !is_on_record()?, "it is not put back at the end");
    Ok(())
}
