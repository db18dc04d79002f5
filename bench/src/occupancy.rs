// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the account of who has each CPU costs, beside other tools that watch every switch under the same loads.

mod cost;
pub mod loads;
pub mod paced;
mod report;
pub mod slowdown;
mod subjects;

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use rustix::process::geteuid;

use self::loads::Load;
use self::subjects::Tools;
use crate::{machine, results, whylate};

/// Returns whether every figure is within its limit.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if let Some(reason) = lack_of_machine() {
        println!("skipped: {reason}");
        return Ok(true);
    }
    fail_if_counted_always()?;
    let tools = Tools::find(whylate::build("bench-occupancy")?)?;
    let load_before = machine::load_average();
    let pinned = [Load::pipe(), Load::paced()?];
    let costs = cost::measure(&tools, &pinned, arguments.rounds)?;
    let loads = pinned.into_iter().chain([Load::messaging()]).collect::<Vec<_>>();
    let slowdowns = slowdown::measure(&tools, &loads, arguments.rounds)?;

    let machine = format!("{}- the same at the beginning: {load_before}\n", machine::describe());
    let text = report::markdown(&tools, &loads, &slowdowns, &costs, &machine);
    arguments.publish("occupancy", &text)?;
    Ok(report::within_limits(&slowdowns, &costs))
}

/// Why nothing can be measured here at all.
fn lack_of_machine() -> Option<&'static str> {
    if !geteuid().is_root() {
        return Some("needs root");
    }
    if std::thread::available_parallelism().map_or(0, usize::from) <= loads::LOAD_CPU {
        return Some("needs a second CPU, for the tools");
    }
    if Command::new("perf").arg("version").stdout(Stdio::null()).status().is_err() {
        return Some("no perf to compare with");
    }
    None
}

/// With `kernel.bpf_stats_enabled`, each run of a program takes two clock reads more.
fn fail_if_counted_always() -> Result<()> {
    let setting = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
    if setting.trim() == "1" {
        bail!("kernel.bpf_stats_enabled slows every BPF program: set it to 0 and try again");
    }
    Ok(())
}
