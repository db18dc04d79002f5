// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU time of one snapshot on a machine with many processes and open descriptors.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session};

use crate::child::Workload;
use crate::kernel;
use crate::results::Section;
use crate::table::{Figure, Show, column, max};

const PROCESSES: u32 = 5_000;
const DESCRIPTORS: u32 = 100_000;
/// Limit of one snapshot, in milliseconds.
const LIMIT_MS: f64 = 100.0;
/// Descriptors that this process needs for other purposes.
const SPARE: u32 = 1_000;
/// Pause between two snapshots.
const PAUSE: Duration = Duration::from_millis(50);
const BACKENDS: [&str; 2] = ["bpf", "fdinfo"];

/// Idle processes, until the standard input is closed.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[arg(long)]
    processes: u32,
    /// Of each process.
    #[arg(long)]
    descriptors: u32,
}

/// Runs as the crowd.
pub fn run(arguments: &Arguments) -> Result<()> {
    let _descriptors = descriptors(arguments.descriptors)?;
    for _ in 0..arguments.processes {
        kernel::fork_sleeper().context("cannot start a process")?;
    }
    Workload::report_ready()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// CPU times of snapshots by backend, in milliseconds, and the descriptors of the process with the ring.
pub struct Crowd {
    cpu_ms: [Vec<f64>; BACKENDS.len()],
    own: u32,
}

/// The process with the ring has as many of the descriptors as it may, and the crowd has the others.
pub fn measure(rounds: u32) -> Result<Crowd> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let own = limit.maximum.map_or(DESCRIPTORS, |most| u32::try_from(most).unwrap_or(u32::MAX).saturating_sub(SPARE));
    let own = own.min(DESCRIPTORS);
    let each = (DESCRIPTORS - own).div_ceil(PROCESSES);
    let _crowd = Workload::start(&format!("crowd --processes {PROCESSES} --descriptors {each}"))?;
    let _descriptors = descriptors(own)?;
    let _load = Load::start(&Plan { duty: 0.05, ..Plan::default() })?;
    let mut crowd = Crowd { cpu_ms: Default::default(), own };
    for (backend, cpu_ms) in BACKENDS.into_iter().zip(&mut crowd.cpu_ms) {
        eprintln!("{rounds} snapshots of {PROCESSES} processes by {backend}");
        let options = SqpollOptions { backend: Some(backend.to_owned()), ..SqpollOptions::default() };
        let mut source = options.start(&Session::of_one())?;
        for _ in 0..rounds {
            thread::sleep(PAUSE);
            let before = kernel::usage_of_this_thread()?;
            let snapshot = source.snapshot()?;
            cpu_ms.push((kernel::usage_of_this_thread()?.cpu - before.cpu).as_secs_f64() * 1e3);
            ensure!(!snapshot.series.is_empty(), "the thread was not seen");
        }
    }
    Ok(crowd)
}

fn descriptors(count: u32) -> Result<Vec<OwnedFd>> {
    let null = File::open("/dev/null")?;
    let made = (0..count).map(|_| Ok(null.try_clone()?.into())).collect::<std::io::Result<_>>();
    made.with_context(|| format!("cannot have {count} descriptors"))
}

pub fn report<'a>(section: Section<'a>, crowd: &Crowd) -> Section<'a> {
    let (Crowd { cpu_ms, own }, rounds) = (crowd, crowd.cpu_ms[0].len());
    let what = "CPU time of one snapshot by bpf, the largest";
    let columns =
        [column("median ms", Show::Median(1), "", |ms: &f64| *ms), column("max ms", Show::Max(1), "", |ms| *ms)];
    section
        .figures([Figure::new(what, max(&cpu_ms[0]), 2).unit("ms").at_most(LIMIT_MS)])
        .text("### A machine with many processes")
        .text(&format!(
            "{PROCESSES} processes and {DESCRIPTORS} descriptors, {own} of them of the process with the ring; CPU time of the \
             thread that takes a snapshot, which runs the iterators too. {rounds} snapshots."
        ))
        .grid("backend", &columns, BACKENDS.iter().zip(cpu_ms).map(|(name, ms)| ((*name).to_owned(), ms.iter().collect())))
}
