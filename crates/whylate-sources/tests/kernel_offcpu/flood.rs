// SPDX-License-Identifier: MIT OR Apache-2.0
//! More late events than may be explained.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::kernel::chance::in_rounds;
use crate::kernel::late::Places;
use crate::kernel::ping_pong;
use crate::kernel::turn::turn_to_measure;

const FLOODS: &str = "WHYLATE_FLOODS";
const COUNTED: &str = "switches: ";
const FOR: Duration = Duration::from_secs(1);
/// As many a second and CPU as have no interval behind them (`EXPLAIN_STEPS / EXPLAIN_EVENT_STEPS`), which none is.
const MOST_PER_SECOND: u64 = 250_000 / 64;

/// A process whose threads hand one CPU to each other: each wait for it counts as late.
fn flood(places: Places) -> Result<()> {
    let mut process = Command::new(std::env::current_exe()?)
        .args(["--exact", "flood::flooding_process", "--nocapture", "--test-threads=1"])
        .env(FLOODS, places.disturbed.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let threads = Threads::of(process.id());
    let options = OffcpuOptions { threads, explain_over_ns: Some(1), ..OffcpuOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
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
    let output = String::from_utf8(process.wait_with_output()?.stdout)?;
    let told = output.lines().find_map(|line| Some(line.split_once(COUNTED)?.1.parse::<u64>()));
    let switches = told.context("the process has ended early")??;
    let over = snapshot.unexplained;
    println!("{switches} waits, {explained} explained ({explained_ns} ns), {over:?}, lost: {:?}", snapshot.lost);
    let most = MOST_PER_SECOND * (FOR.as_secs() + 2);
    ensure!(switches > 4 * most, "the machine is too slow for a flood: {switches}");
    ensure!(explained > 0 && explained <= most, "{explained} were explained");
    ensure!(snapshot.lost["over_budget"] > 0 && over.events >= snapshot.lost["over_budget"], "{snapshot:?}");
    ensure!(over.total_ns >= over.events, "each waited for a nanosecond at least: {over:?}");
    // The process has other waits too, and a thread need not wait for whom it woke.
    let all = explained + over.events;
    ensure!(all.abs_diff(switches) * 20 < switches, "{all} of {switches} waits were late");
    Ok(())
}

#[test]
fn late_events_beyond_the_budget_count_and_have_no_causes() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    if crate::is_emulated() {
        println!("skipped: an emulated CPU is too slow for a flood");
        return Ok(());
    }
    in_rounds(|| flood(places))
}

/// Not a test by itself: the process.
#[test]
fn flooding_process() -> Result<()> {
    let Ok(cpu) = std::env::var(FLOODS) else { return Ok(()) };
    std::io::stdin().read_line(&mut String::new())?;
    println!("{COUNTED}{}", ping_pong::play(cpu.parse()?, FOR)?.switches);
    Ok(())
}
