// SPDX-License-Identifier: MIT OR Apache-2.0
//! More late events than may be explained.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Attached, Measuring, Session, Source as _, Threads};

use crate::support::machine::cpus::TestCpus;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::{Unjudged, in_rounds};
use crate::support::workloads::ping_pong;

const FLOODS: &str = "WHYLATE_FLOODS";
const COUNTED: &str = "switches: ";
const FOR: Duration = Duration::from_secs(1);
/// Explained events per second and CPU at the maximum cost of an event (`EXPLAIN_STEPS / EXPLAIN_EVENT_STEPS`): an
/// event without any interval costs that much.
const MAX_PER_SECOND: u64 = 250_000 / 64;

/// Starts a process with threads that switch to each other on one CPU once its input ends: each wait for that CPU
/// counts as late.
fn start(test_cpus: TestCpus) -> Result<(Child, Measuring<dyn Attached>)> {
    let process = Command::new(std::env::current_exe()?)
        .args(["--exact", "flood::flooding_process", "--nocapture", "--test-threads=1"])
        .env(FLOODS, test_cpus.disturbed.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let threads = Threads::of_process(process.id());
    let options = OffcpuOptions { threads, explain_over_ns: Some(1), ..OffcpuOptions::default() };
    Ok((process, options.attach(&Session::of_one())?))
}

/// Waits for the process, and returns how often its threads switched.
fn switches_of(process: Child) -> Result<u64> {
    let output = String::from_utf8(process.wait_with_output()?.stdout)?;
    let switches = output.lines().find_map(|line| Some(line.split_once(COUNTED)?.1.parse::<u64>()));
    Ok(switches.context("the process has ended early")??)
}

fn flood(test_cpus: TestCpus) -> Result<()> {
    let (mut process, mut source) = start(test_cpus)?;
    // It begins when its input ends.
    drop(process.stdin.take());
    let (mut explained, mut explained_ns) = (0, 0);
    while process.try_wait()?.is_none() {
        source.drain_late(Duration::from_millis(20), &mut |event| {
            explained += 1;
            explained_ns += event.latency_ns;
        })?;
    }
    source.drain_late(Duration::ZERO, &mut |_| explained += 1)?;
    let snapshot = source.snapshot()?;
    let switches = switches_of(process)?;
    let over = snapshot.unexplained;
    println!("{switches} waits, {explained} explained ({explained_ns} ns), {over:?}, lost: {:?}", snapshot.lost);
    let most = MAX_PER_SECOND * (FOR.as_secs() + 2);
    ensure!(switches > 4 * most, Unjudged(format!("the machine is too slow for a flood: {switches}")));
    ensure!(explained > 0 && explained <= most, "{explained} were explained");
    ensure!(snapshot.lost["over_budget"] > 0 && over.events >= snapshot.lost["over_budget"], "{snapshot:?}");
    ensure!(over.total_ns >= over.events, "each waited for a nanosecond at least: {over:?}");
    // The process has other waits too, and a thread need not wait for the thread that it woke.
    let all = explained + over.events;
    ensure!(all.abs_diff(switches) * 20 < switches, "{all} of {switches} waits were late");
    Ok(())
}

#[test]
fn late_events_beyond_budget_count_without_causes() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    if crate::is_emulated() {
        println!("skipped: an emulated CPU is too slow for a flood");
        return Ok(());
    }
    in_rounds(|| flood(test_cpus))
}

/// Without a reader: the ring buffer is full before the budget is used up.
fn flood_unread(test_cpus: TestCpus) -> Result<()> {
    let (mut process, mut source) = start(test_cpus)?;
    drop(process.stdin.take());
    let switches = switches_of(process)?;
    let snapshot = source.snapshot()?;
    let mut explained = 0;
    source.drain_late(Duration::ZERO, &mut |_| explained += 1)?;
    let over = snapshot.unexplained;
    println!("{switches} waits, {explained} explained, {over:?}, lost: {:?}", snapshot.lost);
    let at_once = MAX_PER_SECOND;
    ensure!(explained > 0 && explained < at_once, "{explained} have room, and {at_once} may be explained at once");
    ensure!(switches > 4 * MAX_PER_SECOND, Unjudged(format!("the machine is too slow for a flood: {switches}")));
    // The account was not walked for a wait without room in the ring buffer.
    ensure!(snapshot.lost["over_budget"] == 0, "the budget was used for what had no room: {:?}", snapshot.lost);
    ensure!(snapshot.lost["late_events"] == over.events, "{snapshot:?}");
    let all = explained + over.events;
    ensure!(all.abs_diff(switches) * 20 < switches, "{all} of {switches} waits were late");
    Ok(())
}

#[test]
fn late_events_without_room_cost_no_budget() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    if crate::is_emulated() {
        println!("skipped: an emulated CPU is too slow for a flood");
        return Ok(());
    }
    in_rounds(|| flood_unread(test_cpus))
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn flooding_process() -> Result<()> {
    let Ok(cpu) = std::env::var(FLOODS) else { return Ok(()) };
    std::io::stdin().read_line(&mut String::new())?;
    println!("{COUNTED}{}", ping_pong::play(cpu.parse()?, FOR)?.switches);
    Ok(())
}
