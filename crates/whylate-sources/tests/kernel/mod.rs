// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the kernel tests share. Not every test program uses all of it.
#![allow(dead_code)]

pub mod late;
pub mod mixed;
pub mod oracle;
pub mod programs;
pub mod session;
pub mod trace;
pub mod turn;

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
