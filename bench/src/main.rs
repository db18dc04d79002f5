// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of whylate against common tools. Each one measures both in the same run.

mod block;
mod child;
mod figures;
mod floor;
mod hours;
mod irqsoff;
mod irqsoff_vm;
mod irqsoff_vm_cost;
mod kernel;
mod machine;
mod occupancy;
mod offcpu;
mod programs;
mod record;
mod report;
mod results;
mod run;
mod sqpoll;
mod sqpoll_vm;
mod timerlat;
mod timerlat_vm;
mod timerlat_why;
mod top;
mod user_time;
mod vm;
mod why;
mod whylate;
mod wq;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of whylate. Exit status: 0 every figure is within its limit, or it was skipped; 1 a limit is missed; 2
/// an error.
#[derive(Debug, Parser)]
#[command(name = "whylate-bench")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The cost of one work item, the time to the first output, and the memory of `whylate wq`.
    Wq(results::Arguments),
    /// The cost of one I/O request, and how many fewer there are.
    Block(block::Arguments),
    /// How much slower loads get, and the time that BPF programs take for an event.
    Occupancy(results::Arguments),
    /// How late threads are by `whylate timerlat` and by cyclictest, and what an activation costs with each.
    Timerlat(results::Arguments),
    /// How late timers and threads are by `whylate timerlat` and by `rtla timerlat`, in a virtual machine.
    TimerlatVm(results::Arguments),
    /// Whom `whylate timerlat` and `rtla timerlat` blame for delays of known cause, in a virtual machine.
    TimerlatWhy(timerlat_why::Arguments),
    /// How much longer a scheduler benchmark takes while `whylate irqsoff` or a bpftrace script watches.
    Irqsoff(results::Arguments),
    /// How right `whylate sqpoll` is about loads that are known, what it costs a ring, and how it agrees with fio's.
    Sqpoll(results::Arguments),
    /// How right `whylate sqpoll --precise` is about loads that the kernel's function tracer records, in a virtual
    /// machine.
    SqpollVm(results::Arguments),
    #[command(hide = true)]
    Crowd(sqpoll::crowd::Arguments),
    /// What each backend of `whylate irqsoff` tells of delays of known length, in a virtual machine.
    IrqsoffVm(results::Arguments),
    /// How much longer it takes in a virtual machine, beside the kernel's tracer and a bpftrace script on the same
    /// events.
    IrqsoffVmCost(results::Arguments),
    /// What sampling sleeping threads costs, how fast it is named, and what tracing every switch costs beside
    /// offcputime.
    Offcpu(offcpu::Arguments),
    /// What `whylate` without a command costs, beside perf sched record and offcputime.
    Why(why::Arguments),
    /// What `whylate run` costs a command, and following a late wait to who ended it.
    Run(run::Arguments),
    /// What `whylate record` takes of a disk, of the CPUs and of memory.
    Record(record::Arguments),
    /// What `whylate report` takes for a recording of a day.
    Report(report::Arguments),
    /// What `whylate top` takes of the CPUs and of memory, and how soon it shows figures.
    Top(record::Arguments),
    #[command(hide = true)]
    Sleepers(offcpu::sleepers::Arguments),
    #[command(hide = true)]
    Paced(occupancy::paced::Arguments),
}

fn main() -> ExitCode {
    // True if every figure is within its limit.
    let outcome = match Arguments::parse().what {
        What::Wq(arguments) => wq::run(&arguments),
        What::Block(arguments) => block::run(&arguments),
        What::Occupancy(arguments) => occupancy::run(&arguments),
        What::Timerlat(arguments) => timerlat::run(&arguments),
        What::TimerlatVm(arguments) => timerlat_vm::run(&arguments),
        What::TimerlatWhy(arguments) => timerlat_why::run(&arguments),
        What::Irqsoff(arguments) => irqsoff::run(&arguments),
        What::Sqpoll(arguments) => sqpoll::run(&arguments),
        What::SqpollVm(arguments) => sqpoll_vm::run(&arguments),
        What::Crowd(arguments) => sqpoll::crowd::be(&arguments).map(|()| true),
        What::IrqsoffVm(arguments) => irqsoff_vm::run(&arguments),
        What::IrqsoffVmCost(arguments) => irqsoff_vm_cost::run(&arguments),
        What::Why(arguments) => why::run(&arguments),
        What::Run(arguments) => run::run(&arguments),
        What::Record(arguments) => record::run(&arguments),
        What::Report(arguments) => report::run(&arguments),
        What::Top(arguments) => top::run(&arguments),
        What::Offcpu(arguments) => offcpu::run(&arguments),
        What::Sleepers(arguments) => offcpu::sleepers::run(&arguments).map(|()| true),
        What::Paced(arguments) => occupancy::paced::run(&arguments).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("whylate-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
