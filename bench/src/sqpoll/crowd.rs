// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU time of one snapshot on a machine with many processes and open descriptors.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use whylate_sources::inject::sqpoll::{Load, Plan};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session};

use super::Part;
use crate::figures::{Check, Spread};
use crate::kernel;

const PROCESSES: u32 = 5_000;
const DESCRIPTORS: u32 = 100_000;
/// Limit of one snapshot, in milliseconds.
const LIMIT_MS: f64 = 100.0;
/// Descriptors that this process needs for other purposes.
const SPARE: u32 = 1_000;
/// Pause between two snapshots.
const PAUSE: Duration = Duration::from_millis(50);

/// So many processes that do nothing, until somebody closes the standard input.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[arg(long)]
    processes: u32,
    /// Of each process.
    #[arg(long)]
    descriptors: u32,
}

/// Runs as the crowd.
pub fn be(arguments: &Arguments) -> Result<()> {
    let _descriptors = descriptors(arguments.descriptors)?;
    for _ in 0..arguments.processes {
        kernel::fork_sleeper().context("cannot start a process")?;
    }
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The process with the ring has as many of the descriptors as it may, and the crowd has the others.
pub fn measure(rounds: u32) -> Result<Part> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    let own = limit.maximum.map_or(DESCRIPTORS, |most| u32::try_from(most).unwrap_or(u32::MAX).saturating_sub(SPARE));
    let own = own.min(DESCRIPTORS);
    let each = (DESCRIPTORS - own).div_ceil(PROCESSES);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["crowd", "--processes", &PROCESSES.to_string(), "--descriptors", &each.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut crowd = kernel::die_with_parent(&mut command).spawn().context("cannot start a crowd")?;
    let outcome = among(&mut crowd, own, rounds);
    // Its processes end with it.
    let _ = crowd.kill();
    let _ = crowd.wait();
    outcome
}

fn descriptors(count: u32) -> Result<Vec<OwnedFd>> {
    let null = File::open("/dev/null")?;
    let made = (0..count).map(|_| Ok(null.try_clone()?.into())).collect::<std::io::Result<_>>();
    made.context("cannot have so many descriptors")
}

fn among(crowd: &mut Child, own: u32, rounds: u32) -> Result<Part> {
    let mut said = [0; 6];
    crowd
        .stdout
        .as_mut()
        .context("the crowd has no output")?
        .read_exact(&mut said)
        .context("the crowd is not there")?;
    let descriptors = descriptors(own)?;
    let _load = Load::start(&Plan { duty: 0.05, ..Plan::default() })?;
    let mut cpu_ms = Vec::new();
    for backend in ["bpf", "fdinfo"] {
        eprintln!("{rounds} looks at {PROCESSES} processes by {backend}");
        let mut source =
            SqpollOptions { backend: Some(backend.to_owned()), ..SqpollOptions::default() }.start(&Session::of_one())?;
        let mut snapshots_ms = Vec::new();
        for _ in 0..rounds {
            std::thread::sleep(PAUSE);
            let before = kernel::usage_of_this_thread()?;
            let snapshot = source.snapshot()?;
            snapshots_ms.push((kernel::usage_of_this_thread()?.cpu - before.cpu).as_secs_f64() * 1e3);
            ensure!(!snapshot.series.is_empty(), "the thread was not seen");
        }
        cpu_ms.push(Spread::from_values(&snapshots_ms));
    }
    drop(descriptors);
    let [(bpf, bpf_max), (fdinfo, fdinfo_max)] = [0, 1].map(|which: usize| (cpu_ms[which].median, cpu_ms[which].max));
    let checks = vec![Check::new("CPU time of one look by bpf, the largest", bpf_max, "ms", LIMIT_MS)];
    let text = format!(
        "### A machine with many processes\n\n{PROCESSES} processes and {DESCRIPTORS} descriptors, {own} of them of the process whose ring is looked at; CPU time of the \
         thread that looks, which runs the iterators too. {rounds} looks.\n\n| backend | median ms | max ms |\n|---|--:|--:|\n\
         | bpf | {bpf:.1} | {bpf_max:.1} |\n| fdinfo | {fdinfo:.1} | {fdinfo_max:.1} |\n"
    );
    Ok(Part { checks, text })
}
