// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of the account of the CPUs, compared with other tools that record every switch under the same loads.

mod cost;
pub mod loads;
pub mod paced;
mod report;
pub mod slowdown;
mod subjects;

use std::fs;

use anyhow::{Result, bail};

use self::loads::Load;
use self::subjects::Tools;
use crate::{machine, results, whylate};

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[("perf", "no perf to compare with")]) {
        return Ok(true);
    }
    if std::thread::available_parallelism().map_or(0, usize::from) <= loads::LOAD_CPU {
        println!("skipped: needs a second CPU, for the tools");
        return Ok(true);
    }
    fail_if_counted_always()?;
    let tools = Tools::find(whylate::build("bench-occupancy")?)?;
    let load_before = machine::load_average();
    let pinned = [Load::pipe(), Load::paced()?];
    let costs = cost::measure(&tools, &pinned, arguments.rounds)?;
    let loads = pinned.into_iter().chain([Load::messaging()]).collect::<Vec<_>>();
    let slowdowns = slowdown::measure(&tools, &loads, arguments.rounds)?;

    let command = format!("occupancy --rounds {}", slowdowns.len());
    let heading = results::heading("Who has each CPU", "bench-occupancy", &command);
    let heading = format!("{heading}- the same at the beginning: {load_before}\n");
    let text = report::markdown(&tools, &loads, &slowdowns, &costs, heading);
    arguments.publish("occupancy", &text)?;
    Ok(report::within_limits(&slowdowns, &costs))
}

/// With `kernel.bpf_stats_enabled`, each run of a program costs two more clock readings.
fn fail_if_counted_always() -> Result<()> {
    let setting = fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").unwrap_or_default();
    if setting.trim() == "1" {
        bail!("kernel.bpf_stats_enabled slows every BPF program: set it to 0 and try again");
    }
    Ok(())
}
