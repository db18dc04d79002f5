// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel tests share. Not every test program uses all of it.
#![allow(dead_code)]

use std::fs;
use std::time::{Duration, Instant};

pub mod disturb;
pub mod functions;
pub mod late;
pub mod mixed;
pub mod oracle;
pub mod paced;
pub mod ping_pong;
pub mod programs;
pub mod session;
pub mod trace;
pub mod turn;
pub mod urgent;

/// Runs a comparison of times up to five times: a machine that is busy may disturb one run, but not what is true of all of them.
pub fn undisturbed(mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    for _ in 0..5 {
        outcome = once();
        match &outcome {
            Ok(()) => break,
            Err(error) => println!("another try: {error:#}"),
        }
    }
    outcome
}

/// Does what compares times of one CPU, again where it fails and the hypervisor has taken a part of the CPUs meanwhile, by the kernel's own
/// count: what was made to last for so long then did not have a CPU for all of it. Whoever is wrong on a machine that is left alone fails.
pub fn unless_stolen(mut once: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    for _ in 0..4 {
        let (began, before) = (Instant::now(), stolen());
        let outcome = once();
        let (stolen, elapsed) = (stolen().saturating_sub(before), began.elapsed());
        match outcome {
            Err(error) if stolen * 100 > elapsed => {
                println!("another try: the hypervisor took {stolen:?} of {elapsed:?}: {error:#}");
            }
            outcome => return outcome,
        }
    }
    once()
}

/// What the hypervisor has taken from all CPUs (proc_stat(5)).
fn stolen() -> Duration {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks =
        text.lines().next().and_then(|line| line.split_whitespace().nth(8)).and_then(|ticks| ticks.parse().ok());
    Duration::from_millis(10).saturating_mul(ticks.unwrap_or(0))
}

/// Whether an emulator runs this kernel. The machine below may then stop a CPU for milliseconds between any two
/// instructions, and so between two records of one event: what is compared of many times is the typical one, not the worst.
pub fn is_emulated() -> bool {
    std::env::var_os("WHYLATE_EMULATED").is_some()
}

/// So many, or fewer where everything takes a hundred times as long.
pub fn amount(of: u64) -> u64 {
    if is_emulated() { of / 5 } else { of }
}

/// Of many differences, the one that has to be small.
pub fn judged(mut differences_ns: Vec<u64>) -> u64 {
    differences_ns.sort_unstable();
    let place = if is_emulated() { differences_ns.len() / 2 } else { differences_ns.len().saturating_sub(1) };
    differences_ns.get(place).copied().unwrap_or(0)
}
