// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel tests share. Not every test program uses all of it.
#![allow(dead_code)]

pub mod disturb;
pub mod late;
pub mod mixed;
pub mod oracle;
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
