// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate irqsoff`.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::process::Output;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use whylate_model::Snapshot;
use whylate_sources::irqsoff::DEFAULT_PERIODS_NS;

use chance::in_rounds;
use lock::{lock_machine, share_machine};
use running::{Running, whylate};

fn irqsoff(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(&[&["irqsoff"], arguments].concat()).output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the standard output of a run that succeeds.
fn shown(arguments: &[&str]) -> Result<String> {
    let output = irqsoff(arguments)?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(text(&output.stdout))
}

fn snapshots(json: &str) -> Result<Vec<Snapshot>> {
    json.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

#[test]
fn rejects_invalid_arguments_with_usage_status() -> Result<()> {
    let _lock = lock_machine();
    for arguments in [
        &["--preempt", "--timers"][..],
        &["--preempt", "--timer-test", "1ms"],
        &["0"][..],
        &["1", "0"],
        &["abc"],
        &["--period", "1us"],
        &["--period", "garbage"],
        &["--slower", "-1ms"],
        &["--why", "0"],
        &["--worst", "0"],
        &["-c", "1-"],
        &["-c", "4294967296"],
        &["--min", "\u{7f}\u{1b}[2J"],
        &["--timers", "--why", "1ms"],
        &["--timer-test", "0"],
        &["--backend", "nonsense", "1", "1"],
        &["--nonsense"],
    ] {
        let output = irqsoff(arguments)?;
        ensure!(output.status.code() == Some(2), "{arguments:?}: {output:?}");
        ensure!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }
    Ok(())
}

#[test]
fn missing_cpu_is_a_usage_error() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let output = irqsoff(&["-c", "60000", "-d", "1s"])?;
    let stderr = text(&output.stderr);
    ensure!(output.status.code() == Some(2), "{output:?}");
    ensure!(stderr.starts_with("whylate: CPU 60000 is not online: choose from 0"), "{stderr:?}");
    Ok(())
}

#[test]
fn json_has_a_line_per_interval_with_named_culprits() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let asked = ["--json", "1", "2", "--min", "20us", "--slower", "20us", "--period", "1ms"];
    let all = snapshots(&shown(&asked)?)?;
    ensure!(all.len() == 2, "{} lines", all.len());
    for snapshot in &all {
        ensure!(snapshot.source == "irqsoff" && snapshot.backend == "ticks", "{snapshot:?}");
        for series in snapshot.series.iter().filter(|series| !series.labels.is_empty()) {
            let length = series.histograms.get("length").context("a culprit without lengths")?;
            ensure!(
                series.labels.contains_key("kind") && !length.is_empty() && length.min_ns() >= 20_000,
                "{series:?}"
            );
            ensure!((series.values["period_ns"] - 1e6).abs() < 0.5, "{series:?}");
            let share = length.sum_ns() as f64 / (snapshot.duration_ns as f64 * cpus()? as f64);
            ensure!((series.values["share"] - share).abs() < 1e-6, "{series:?}, not {share}");
        }
        for event in &snapshot.late {
            ensure!(event.causes.iter().map(|cause| cause.ns).sum::<u64>() == event.latency_ns, "{event:?}");
            ensure!(event.at_most_ns.is_some_and(|ns| ns >= event.latency_ns + 1_000_000), "{event:?}");
            ensure!(event.evidence.is_none(), "{event:?}");
        }
    }
    let worst = snapshots(&shown(&["--json", "-d", "2s", "--min", "5us", "--worst", "3"])?)?;
    ensure!(worst[0].late.len() <= 3, "{} worst", worst[0].late.len());
    Ok(())
}

/// Reported heartbeat period and measured cost of one heartbeat, both in nanoseconds, and the message.
fn heartbeats(arguments: &[&str]) -> Result<(f64, Option<f64>, Vec<String>)> {
    let output = irqsoff(&[&["--backend", "ticks", "--json", "-v", "-d", "200ms"], arguments].concat())?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    let all = snapshots(&text(&output.stdout))?;
    let series = all[0].series.iter().find(|series| series.labels.is_empty()).context("no series of heartbeats")?;
    let remarks = text(&output.stderr).lines().filter(|line| line.starts_with(DEAR)).map(str::to_owned).collect();
    Ok((series.values["period_ns"], series.values.get("interrupt_ns").copied(), remarks))
}

/// Start of the message about a longer period.
const DEAR: &str = "whylate: a timer interrupt costs ";

#[test]
fn uses_requested_heartbeat_period() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    for (asked, period_ns) in [("1ms", 1e6), ("3ms", 3e6), ("500us", 5e5)] {
        let (told_ns, interrupt_ns, remarks) = heartbeats(&["--period", asked])?;
        ensure!((told_ns - period_ns).abs() < 0.5, "{told_ns} ns");
        ensure!(interrupt_ns.is_none() && remarks.is_empty(), "nothing was chosen: {interrupt_ns:?}, {remarks:?}");
    }
    Ok(())
}

#[test]
fn chosen_period_depends_on_heartbeat_cost() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (told_ns, interrupt_ns, remarks) = heartbeats(&[])?;
    println!("{told_ns} ns for {interrupt_ns:?} ns each: {remarks:?}");
    let choices = DEFAULT_PERIODS_NS.map(|ns| ns as f64);
    let place =
        choices.iter().position(|choice| (choice - told_ns).abs() < 0.5).context("it is none of the choices")?;
    let is_affordable = |period_ns: f64| interrupt_ns.is_none_or(|ns| ns <= period_ns * 0.006);
    ensure!(is_affordable(told_ns) || place + 1 == choices.len(), "{interrupt_ns:?} ns each {told_ns} ns is dear");
    ensure!(place == 0 || !is_affordable(choices[place - 1]), "a shorter one would do");
    let expected = match (place, interrupt_ns) {
        (1.., Some(ns)) => {
            let (us, ms) = (ns / 1e3, told_ns / 1e6);
            vec![format!(
                "{DEAR}{us:.1} us here, so heartbeats come every {ms} ms (irqsoff --period 1ms for finer bounds)"
            )]
        }
        _ => Vec::new(),
    };
    ensure!(remarks == expected, "{remarks:?}, not {expected:?}");
    Ok(())
}

fn cpus() -> Result<usize> {
    Ok(whylate_sources::kernel::cpus::online()?.len())
}

#[test]
fn causes_from_cpu_account_add_up() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let all = snapshots(&shown(&["--json", "-d", "2s", "--min", "15us", "--why", "15us"])?)?;
    for event in all.iter().flat_map(|snapshot| &snapshot.late) {
        ensure!(!event.causes.is_empty(), "{event:?}");
        ensure!(event.causes.iter().map(|cause| cause.ns).sum::<u64>() == event.latency_ns, "{event:?}");
    }
    Ok(())
}

#[test]
fn lists_timers_by_function_and_cpu() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let all = snapshots(&shown(&["--timers", "--json", "-d", "2s"])?)?;
    let snapshot = all.first().context("no snapshot")?;
    ensure!(snapshot.backend == "timers" && !snapshot.series.is_empty(), "{snapshot:?}");
    for series in &snapshot.series {
        let labels: Vec<&str> = series.labels.keys().map(String::as_str).collect();
        ensure!(labels == ["callback", "cpu", "mode"], "{labels:?}");
        ensure!(["latency", "runtime"].iter().all(|name| series.histograms.contains_key(*name)), "{series:?}");
    }
    let text = shown(&["--timers", "-d", "1s"])?;
    ensure!(text.contains("CALLBACK") && text.contains("OVERRUNS") && !text.contains('\u{1b}'), "{text}");
    Ok(())
}

#[test]
fn timer_test_counts_ticks() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(ensure_counts_ticks)
}

fn ensure_counts_ticks() -> Result<()> {
    let all = snapshots(&shown(&["--timer-test", "10ms", "--json", "-d", "2s", "-c", "0"])?)?;
    let snapshot = all.first().context("no snapshot")?;
    let series = snapshot.series.iter().find(|series| series.labels.get("cpu").is_some_and(|cpu| cpu == "0"));
    let series = series.context("CPU 0 is missing")?;
    let ticks = series.histograms["lateness"].count() + series.values["overruns"] as u64;
    let (due, unseen) = (snapshot.duration_ns / 10_000_000, snapshot.lost["unseen"]);
    ensure!(ticks.abs_diff(due) <= 2 + unseen, "{ticks} of {due} ticks, {unseen} unseen");
    Ok(())
}

#[test]
fn signal_prints_results_so_far() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let mut running = Running::start(&["irqsoff", "0.2"])?;
    let mut out = running.stdout()?;
    // The first result.
    std::io::Read::read_exact(&mut out, &mut [0])?;
    running.signal(Signal::INT)?;
    let (status, stderr) = running.end()?;
    // Only -v shows why a better backend is not used, and what this one cannot see.
    let is_quiet = stderr.lines().all(|line| line.contains("left out"));
    ensure!(status.success() && is_quiet, "{status}, {stderr}");
    Ok(())
}
