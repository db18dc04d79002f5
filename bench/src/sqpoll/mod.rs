// SPDX-License-Identifier: MIT OR Apache-2.0
//! How right `whylate sqpoll` is, and what it costs those it looks at, beside the kernel's own fdinfo and beside fio.

pub mod crowd;
mod duty;
mod fio;
mod stall;

use anyhow::{Result, bail};
use rustix::process::geteuid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::figures::word;
use crate::{machine, results};

/// A figure with its limit, and where it is judged by what was measured beside it, that.
pub struct Check {
    pub what: String,
    pub value: f64,
    pub limit: f64,
    pub unit: &'static str,
}

/// What one part has measured.
pub struct Part {
    pub checks: Vec<Check>,
    pub text: String,
}

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return Ok(true);
    }
    if cfg!(debug_assertions) {
        bail!("only a release build tells anything: run `make bench-sqpoll`");
    }
    let parts =
        [duty::measure()?, stall::measure(arguments.rounds)?, crowd::measure(arguments.rounds)?, fio::measure()?];
    arguments.publish("sqpoll", &markdown(&parts, arguments.rounds))?;
    Ok(parts.iter().flat_map(|part| &part.checks).all(|check| check.value <= check.limit))
}

fn markdown(parts: &[Part], rounds: u32) -> String {
    let mut text = format!(
        "## `whylate sqpoll`\n\nCommand: `make bench-sqpoll` (`cargo run --release -p whylate-bench -- sqpoll --rounds {rounds}`)\n\n{}\n",
        machine::describe()
    );
    text += "| figure | measured | limit | result |\n|---|--:|--:|---|\n";
    for Check { what, value, limit, unit } in parts.iter().flat_map(|part| &part.checks) {
        text += &format!("| {what} | {value:.2} {unit} | {limit:.2} {unit} | {} |\n", word(*value, *limit));
    }
    for part in parts {
        text += "\n";
        text += &part.text;
    }
    text
}

/// The first CPU that this process may use, and the last one, which are two.
fn places() -> Result<(u32, u32)> {
    let usable = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(|cpu| cpu as u32);
    match (cpus.next(), cpus.next_back()) {
        (Some(first), Some(last)) => Ok((first, last)),
        _ => bail!("this needs two CPUs"),
    }
}

fn stay_on(cpu: u32) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu as usize);
    Ok(sched_setaffinity(None, &only)?)
}

fn stay_on_any() -> Result<()> {
    let mut any = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| any.set(cpu));
    Ok(sched_setaffinity(None, &any)?)
}
