// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine on which a figure is measured.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::geteuid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Prints why nothing can be measured here, if so: without root, or without one of these tools, each with the reason to
/// print.
pub fn is_skipped(tools: &[(&str, &str)]) -> bool {
    let lack = tools.iter().find(|(tool, _)| !has(tool)).map(|&(_, reason)| reason);
    let reason = if geteuid().is_root() { lack } else { Some("needs root") };
    reason.inspect(|reason| println!("skipped: {reason}")).is_some()
}

pub fn has(tool: &str) -> bool {
    let mut probe = Command::new(tool);
    probe.arg("--help").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Returns the CPUs that this process may use.
pub fn usable_cpus() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot tell which CPUs there are")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect())
}

/// Pins the calling thread, and those that it starts, to one CPU.
pub fn pin_to(cpu: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// Returns a line of Markdown per fact about the machine.
pub fn describe() -> String {
    let mut text = String::new();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    for (what, fact) in [
        ("kernel", rustix::system::uname().release().to_string_lossy().into_owned()),
        ("CPU", format!("{} ({cpus} usable)", cpu_model())),
        ("clang", version("clang")),
        ("bpftrace", version("bpftrace")),
        ("load average at the end (1, 5, 15 min)", load_average()),
    ] {
        text += &format!("- {what}: {fact}\n");
    }
    text
}

/// Returns the load average of 1, 5 and 15 minutes.
pub fn load_average() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split_once(':'));
    model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.trim().to_owned())
}

/// Returns the first line of `tool --version`.
fn version(tool: &str) -> String {
    let output = Command::new(tool).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or("not installed").to_owned()
}
