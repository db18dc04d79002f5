// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accuracy of `whylate sqpoll`, and its cost for the measured rings, compared with the kernel's fdinfo and with fio.

pub mod crowd;
mod duty;
mod fio;
mod stall;

use anyhow::{Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::figures::{self, Check};
use crate::{machine, results};

pub struct Part {
    pub checks: Vec<Check>,
    pub text: String,
}

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[]) {
        return Ok(true);
    }
    if cfg!(debug_assertions) {
        bail!("only a release build tells anything: run `make bench-sqpoll`");
    }
    let parts =
        [duty::measure()?, stall::measure(arguments.rounds)?, crowd::measure(arguments.rounds)?, fio::measure()?];
    arguments.publish("sqpoll", &markdown(&parts, arguments.rounds))?;
    Ok(parts.iter().flat_map(|part| &part.checks).all(Check::is_within))
}

fn markdown(parts: &[Part], rounds: u32) -> String {
    let mut text = results::heading("`whylate sqpoll`", "bench-sqpoll", &format!("sqpoll --rounds {rounds}"));
    text += &figures::table(parts.iter().flat_map(|part| &part.checks), [2, 2]);
    for part in parts {
        text += "\n";
        text += &part.text;
    }
    text
}

/// Returns the first and the last CPU that this process may use, which must differ.
fn cpus() -> Result<(u32, u32)> {
    match machine::usable_cpus()?[..] {
        [first, .., last] => Ok((first as u32, last as u32)),
        _ => bail!("this needs two CPUs"),
    }
}

fn unpin() -> Result<()> {
    let mut any = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| any.set(cpu));
    Ok(sched_setaffinity(None, &any)?)
}
