// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of whylate against common tools. Each one measures both in the same run: subjects under a load, by a
//! driver (`drivers.rs`), with figures and their limits in a table (`table.rs`).

mod block;
mod child;
mod drivers;
mod floor;
mod irqsoff;
mod irqsoff_vm;
mod irqsoff_vm_cost;
mod kernel;
mod loads;
mod machine;
mod occupancy;
mod offcpu;
mod paced;
mod programs;
mod recordings;
mod results;
mod run;
mod sleepers;
mod sqpoll;
mod sqpoll_vm;
mod subject;
mod table;
mod timerlat;
mod timerlat_vm;
mod timerlat_why;
mod vm;
mod why;
mod wq;

use std::process::ExitCode;

use clap::Parser;

/// Benchmarks of whylate. Exit status: 0 every figure is within its limit, or it was skipped; 1 a limit is missed; 2
/// an error.
#[derive(Debug, Parser)]
#[command(name = "whylate-bench")]
enum Benchmark {
    /// The cost of one work item, the time to the first output, and the memory of `whylate wq`.
    Wq(results::Arguments),
    /// The cost of one I/O request, and the loss of requests per second.
    Block(block::Arguments),
    /// The slowdown of loads by the CPU account, and the time that BPF programs take for an event.
    Occupancy(results::Arguments),
    /// The latency of threads by `whylate timerlat` and by cyclictest, and the cost of an activation with each.
    Timerlat(results::Arguments),
    /// The latency of timers and threads by `whylate timerlat` and by `rtla timerlat`, in a virtual machine.
    TimerlatVm(results::Arguments),
    /// The causes that `whylate timerlat` and `rtla timerlat` name for known delays, in a virtual machine.
    TimerlatWhy(timerlat_why::Arguments),
    /// The slowdown of a scheduler benchmark by `whylate irqsoff` and by bpftrace scripts.
    Irqsoff(results::Arguments),
    /// The accuracy of `whylate sqpoll` on known loads, its cost for a ring, and its difference from fio's load.
    Sqpoll(results::Arguments),
    /// The accuracy of `whylate sqpoll --precise` on loads that the kernel's function tracer records, in a virtual
    /// machine.
    SqpollVm(results::Arguments),
    /// The accuracy of each backend of `whylate irqsoff` on delays of known length, in a virtual machine.
    IrqsoffVm(results::Arguments),
    /// The slowdown by `whylate irqsoff`, the kernel's tracer and a bpftrace script on the same events, in a virtual
    /// machine.
    IrqsoffVmCost(results::Arguments),
    /// The cost of sampling sleeping threads and of naming them, and of tracing each switch, compared with offcputime.
    Offcpu(offcpu::Arguments),
    /// The cost of `whylate` without a command, compared with perf sched record and offcputime.
    Why(why::Arguments),
    /// The cost of `whylate run` for a command, and of following a late wait to its waker.
    Run(run::Arguments),
    /// The disk space, CPU time and memory of `whylate record`.
    Record(recordings::Arguments),
    /// The time and memory of `whylate report` for a recording of a day.
    Report(recordings::ReportArguments),
    /// The CPU time and memory of `whylate top`, and its time to first figures.
    Top(recordings::Arguments),
    #[command(hide = true)]
    Crowd(sqpoll::crowd::Arguments),
    #[command(hide = true)]
    Sleepers(sleepers::Arguments),
    #[command(hide = true)]
    Paced(paced::Arguments),
}

fn main() -> ExitCode {
    // True if every figure is within its limit.
    let outcome = match Benchmark::parse() {
        Benchmark::Wq(arguments) => wq::run(&arguments),
        Benchmark::Block(arguments) => block::run(&arguments),
        Benchmark::Occupancy(arguments) => occupancy::run(&arguments),
        Benchmark::Timerlat(arguments) => timerlat::run(&arguments),
        Benchmark::TimerlatVm(arguments) => timerlat_vm::run(&arguments),
        Benchmark::TimerlatWhy(arguments) => timerlat_why::run(&arguments),
        Benchmark::Irqsoff(arguments) => irqsoff::run(&arguments),
        Benchmark::Sqpoll(arguments) => sqpoll::run(&arguments),
        Benchmark::SqpollVm(arguments) => sqpoll_vm::run(&arguments),
        Benchmark::IrqsoffVm(arguments) => irqsoff_vm::run(&arguments),
        Benchmark::IrqsoffVmCost(arguments) => irqsoff_vm_cost::run(&arguments),
        Benchmark::Offcpu(arguments) => offcpu::run(&arguments),
        Benchmark::Why(arguments) => why::run(&arguments),
        Benchmark::Run(arguments) => run::run(&arguments),
        Benchmark::Record(arguments) => recordings::run_record(&arguments),
        Benchmark::Report(arguments) => recordings::run_report(&arguments),
        Benchmark::Top(arguments) => recordings::run_top(&arguments),
        Benchmark::Crowd(arguments) => sqpoll::crowd::run(&arguments).map(|()| true),
        Benchmark::Sleepers(arguments) => sleepers::run(&arguments).map(|()| true),
        Benchmark::Paced(arguments) => paced::run(&arguments).map(|()| true),
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
