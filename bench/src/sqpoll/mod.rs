// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accuracy of `whylate sqpoll`, and its cost for the measured rings, compared with the kernel's fdinfo and with fio.

pub mod crowd;
mod duty;
mod fio;
mod stall;

use anyhow::Result;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::machine;
use crate::results::{Arguments, Section};

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.prepare("bench-sqpoll", &[])? else { return Ok(true) };
    let rounds = arguments.rounds;
    let (duty, stall, crowd) = (duty::measure()?, stall::measure(rounds)?, crowd::measure(rounds)?);
    let fio = fio::measure(&program)?;
    let section =
        Section::new(arguments, "sqpoll", "`whylate sqpoll`", "bench-sqpoll", &format!("sqpoll --rounds {rounds}"));
    fio::report(crowd::report(stall::report(duty.report(section), &stall), &crowd), fio.as_deref()).publish()
}

/// Returns the CPU of the application and that of the submission thread.
fn cpus() -> Result<(u32, u32)> {
    let (first, last) = machine::two_cpus()?;
    Ok((first as u32, last as u32))
}

fn unpin() -> Result<()> {
    let mut any = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| any.set(cpu));
    Ok(sched_setaffinity(None, &any)?)
}
