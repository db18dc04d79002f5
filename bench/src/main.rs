// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of whylate against common tools. Each one measures both in the same run: subjects under a load, by a
//! driver (`drivers.rs`), with figures and their limits in a table (`table.rs`).

mod block;
mod child;
mod drivers;
mod irqsoff;
mod kernel;
mod loads;
mod machine;
mod occupancy;
mod offcpu;
mod programs;
mod recordings;
mod results;
mod run;
mod serve;
mod sqpoll;
mod subject;
mod table;
mod timerlat;
mod timerlat_why;
mod vm;
mod why;
mod workloads;
mod wq;

use std::process::ExitCode;

use clap::Parser;

/// Declares the subcommands, and the function that runs each.
macro_rules! benchmarks {
    ($($(#[$about:meta])* $name:ident($arguments:ty) => $run:path,)*) => {
        /// Benchmarks of whylate. Exit status: 0 every figure is within its limit, or it was skipped; 1 a limit is
        /// missed; 2 an error.
        #[derive(Debug, Parser)]
        #[command(name = "whylate-bench")]
        enum Benchmark {
            $($(#[$about])* $name($arguments),)*
        }

        /// Returns whether every figure is within its limit.
        fn run() -> anyhow::Result<bool> {
            match Benchmark::parse() {
                $(Benchmark::$name(arguments) => $run(&arguments),)*
            }
        }
    };
}

benchmarks! {
    /// The cost of one work item, the time to the first output, and the memory of `whylate wq`.
    Wq(results::Arguments) => wq::run,
    /// The cost of one I/O request, and the loss of requests per second.
    Block(block::Arguments) => block::run,
    /// The slowdown of loads by the CPU account, and the time that BPF programs take for an event.
    Occupancy(results::Arguments) => occupancy::run,
    /// The latency of threads by `whylate timerlat` and by cyclictest, and the cost of an activation with each.
    Timerlat(results::Arguments) => timerlat::run,
    /// The latency of timers and threads by `whylate timerlat` and by `rtla timerlat`, in a virtual machine.
    TimerlatVm(results::Arguments) => timerlat::run_in_vm,
    /// The causes that `whylate timerlat` and `rtla timerlat` name for known delays, in a virtual machine.
    TimerlatWhy(timerlat_why::Arguments) => timerlat_why::run,
    /// The slowdown of a scheduler benchmark by `whylate irqsoff` and by bpftrace scripts.
    Irqsoff(results::Arguments) => irqsoff::run,
    /// The accuracy of `whylate sqpoll` on known loads, its cost for a ring, and its difference from fio's load.
    Sqpoll(results::Arguments) => sqpoll::run,
    /// The accuracy of `whylate sqpoll --precise` on loads that the kernel's function tracer records, in a virtual
    /// machine.
    SqpollVm(results::Arguments) => sqpoll::run_in_vm,
    /// The accuracy of each backend of `whylate irqsoff` on delays of known length, in a virtual machine.
    IrqsoffVm(results::Arguments) => irqsoff::run_in_vm,
    /// The slowdown by `whylate irqsoff`, the kernel's tracer and a bpftrace script on the same events, in a virtual
    /// machine.
    IrqsoffVmCost(results::Arguments) => irqsoff::run_cost_in_vm,
    /// The cost of sampling sleeping threads and of naming them, and of tracing each switch, compared with offcputime.
    Offcpu(offcpu::Arguments) => offcpu::run,
    /// The cost of `whylate` without a command, compared with perf sched record and offcputime.
    Why(why::Arguments) => why::run,
    /// The cost of `whylate run` for a command, and of following a late wait to its waker.
    Run(run::Arguments) => run::run,
    /// The disk space, CPU time and memory of `whylate record`.
    Record(recordings::Arguments) => recordings::run_record,
    /// The time and memory of `whylate report` for a recording of a day.
    Report(recordings::ReportArguments) => recordings::run_report,
    /// The CPU time and memory of `whylate top`, and its time to first figures.
    Top(recordings::Arguments) => recordings::run_top,
    /// The CPU time and memory of `whylate serve`, of a scrape, and beside clients that are stuck.
    Serve(serve::Arguments) => serve::run,
    #[command(hide = true)]
    Crowd(workloads::Crowd) => workloads::be_crowd,
    #[command(hide = true)]
    Sleepers(workloads::Sleepers) => workloads::be_sleepers,
    #[command(hide = true)]
    Paced(workloads::Paced) => workloads::take_turns,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("whylate-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
#[path = "../unit/main.rs"]
mod tests;
