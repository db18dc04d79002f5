// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks that a walk may mistake for one that it has seen before.

use std::time::Duration;

use anyhow::{Result, ensure};
use whylate_sources::Threads;
use whylate_sources::offcpu::OffcpuOptions;

use super::sleepers::Sleepers;
use super::sleepers::alternating_stacks::{NAME, SHARE_OF_LONG};
use super::support::machine::lock::share_machine;
use super::{is_at, sampled};

#[test]
fn sampling_distinguishes_stacks_of_equal_shape() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let sleepers = Sleepers::start("shaped", 1)?;
    let options = OffcpuOptions {
        threads: Threads::of_process(sleepers.pid()),
        by_thread: true,
        rate_hz: 99,
        backend: Some("sample".to_owned()),
        ..OffcpuOptions::default()
    };
    let snapshot = sampled(&options, Duration::from_secs(3))?;
    let threads = sleepers.threads()?;
    let mut checked = 0;
    for tid in threads {
        let of_thread = |stack: &&_| is_of(stack, &tid);
        let ns_in = |function: &str| -> u64 {
            snapshot
                .stacks
                .iter()
                .filter(of_thread)
                .filter(|stack| is_at(stack, function))
                .map(|stack| stack.weight_ns)
                .sum()
        };
        let (long, short) = (ns_in("nap_for_long"), ns_in("nap_shortly"));
        if long + short == 0 {
            // One of the test harness's threads.
            continue;
        }
        checked += 1;
        let share = long as f64 / (long + short) as f64;
        println!("thread {tid}: in the longer sleep for {share} of the time");
        // The standard deviation is 0.03, and an emulated CPU is late for both.
        ensure!((share - SHARE_OF_LONG).abs() < 0.2, "thread {tid} is in the longer sleep for {share} of the time");
    }
    ensure!(checked == 4, "{checked} threads are checked");
    Ok(())
}

fn is_of(stack: &whylate_model::Stack, tid: &str) -> bool {
    stack.labels.get("tid").is_some_and(|of| of == tid)
        && stack.labels.get("thread").map(String::as_bytes) == Some(NAME.to_bytes())
}
