// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject`: causes known delays.

mod block;
mod disturbance;
mod sqpoll;
mod work;

use clap::{Args, Subcommand};
use whylate_sources::inject::disturbance::Kind;

use crate::engine::watch::stop_at_signal;

/// Inject delays of known length, to check whylate or another tool
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # interrupts off for 10 ms, 5 times
    whylate inject irqs-off --cpu 1
    # 10,000 work items at once
    whylate inject work --items 10000")]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Work(work::Arguments),
    /// Turn the interrupts of one CPU off for a known time.
    ///
    /// A BPF program does it (`bpf_local_irq_save`, Linux 6.14 and later), in a thread named whylate-irqsoff.
    /// For this time, the CPU takes no interrupt and runs nothing else: no timer fires there, and no thread is woken.
    /// Another CPU that needs an answer from this one, to flush a TLB for instance, waits as well.
    ///
    /// Only one CPU is disturbed at a time (a second `whylate inject` is refused), so that the other CPUs can go on.
    #[command(after_help = "\
examples:
    # 5 times 10 ms, one every 200 ms, on the current CPU
    whylate inject irqs-off
    # 100 shorter ones, on CPU 1
    whylate inject irqs-off --for 500us --times 100 --cpu 1
    # as JSON, for a script
    whylate inject irqs-off --json")]
    IrqsOff(disturbance::Common),
    /// Turn preemption off on one CPU for a known time.
    ///
    /// A BPF program does it (`bpf_preempt_disable`, Linux 6.10 and later), in a thread named whylate-preempt.
    /// Interrupts are still served, but no other thread is switched in, however urgent. In a non-preemptible kernel,
    /// all kernel code behaves like this anyway.
    ///
    /// Only one CPU is disturbed at a time (a second `whylate inject` is refused), so that the other CPUs can go on.
    #[command(after_help = "\
examples:
    # 5 times 10 ms, one every 200 ms, on the current CPU
    whylate inject preempt-off
    # while `whylate irqsoff --preempt` runs in another terminal
    whylate inject preempt-off --for 2ms --times 100 --cpu 1
    # as JSON, for a script
    whylate inject preempt-off --json")]
    PreemptOff(disturbance::Common),
    /// Keep one CPU in a softirq for a known time.
    ///
    /// The softirq is HRTIMER, with the callback of a BPF timer (Linux 5.15 and later); with PREEMPT_RT it runs in the
    /// CPU's ktimers thread. Interrupts are still served; threads and other softirqs on that CPU wait.
    ///
    /// Only one CPU is disturbed at a time (a second `whylate inject` is refused), so that the other CPUs can go on.
    #[command(after_help = "\
examples:
    # 5 times 10 ms, one every 200 ms, on the current CPU
    whylate inject softirq
    # 100 shorter ones, on CPU 1
    whylate inject softirq --for 2ms --times 100 --cpu 1
    # as JSON, for a script
    whylate inject softirq --json")]
    Softirq(disturbance::Common),
    Hog(disturbance::HogArguments),
    Sqpoll(sqpoll::Arguments),
    Block(block::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (stop, _) = stop_at_signal()?;
    match &arguments.what {
        What::Work(arguments) => work::run(arguments, &stop),
        What::IrqsOff(arguments) => disturbance::run(arguments, Kind::IrqsOff, &stop),
        What::PreemptOff(arguments) => disturbance::run(arguments, Kind::PreemptOff, &stop),
        What::Softirq(arguments) => disturbance::run(arguments, Kind::Softirq, &stop),
        What::Hog(arguments) => disturbance::hog(arguments, &stop),
        What::Sqpoll(arguments) => sqpoll::run(arguments, &stop),
        What::Block(arguments) => block::run(arguments, &stop),
    }
}
