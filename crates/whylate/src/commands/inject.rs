// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject`.

mod disturbance;
mod sqpoll;
mod work;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::{Args, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Make known delays, to compare with what is measured
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Work(work::Arguments),
    IrqsOff(disturbance::IrqsOffArguments),
    PreemptOff(disturbance::PreemptOffArguments),
    Softirq(disturbance::SoftirqArguments),
    Hog(disturbance::HogArguments),
    Sqpoll(sqpoll::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The first signal finds the flag unset, and sets it. The second one ends the program at once.
        let seen = Arc::clone(&stop);
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, seen)
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot watch for signals")?;
    }
    match &arguments.what {
        What::Work(arguments) => work::run(arguments, &stop),
        What::IrqsOff(arguments) => disturbance::irqs_off(arguments, &stop),
        What::PreemptOff(arguments) => disturbance::preempt_off(arguments, &stop),
        What::Softirq(arguments) => disturbance::softirq(arguments, &stop),
        What::Hog(arguments) => disturbance::hog(arguments, &stop),
        What::Sqpoll(arguments) => sqpoll::run(arguments, &stop),
    }
}
