// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks that a walk may take for one that it has met before.

use std::time::Duration;

use anyhow::{Result, ensure};
use whylate_sources::Threads;
use whylate_sources::offcpu::OffcpuOptions;

use super::kernel::turn::turn_to_measure;
use super::sleepers::Sleepers;
use super::sleepers::shaped::{NAME, SHARE_OF_LONG};
use super::{is_at, sampled};

#[test]
fn stacks_of_the_same_shape_are_told_apart_in_walks() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let sleepers = Sleepers::start("shaped", 1)?;
    let options = OffcpuOptions {
        threads: Threads::of(sleepers.pid()),
        by_thread: true,
        rate_hz: 99,
        backend: Some("sample".to_owned()),
        ..OffcpuOptions::default()
    };
    let snapshot = sampled(&options, Duration::from_secs(3))?;
    let threads = sleepers.threads()?;
    let mut told = 0;
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
            // One of the process's first.
            continue;
        }
        told += 1;
        let share = long as f64 / (long + short) as f64;
        println!("thread {tid}: in the longer sleep for {share} of the time");
        // By chance it is 0.03 off, and an emulated CPU is late for both.
        ensure!((share - SHARE_OF_LONG).abs() < 0.2, "thread {tid} is in the longer sleep for {share} of the time");
    }
    ensure!(told == 4, "{told} threads are told");
    Ok(())
}

fn is_of(stack: &whylate_model::Stack, tid: &str) -> bool {
    stack.labels.get("tid").is_some_and(|of| of == tid)
        && stack.labels.get("thread").map(String::as_bytes) == Some(NAME.to_bytes())
}
