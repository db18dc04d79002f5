// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine on which a figure is measured, and the build of whylate on it.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
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

/// Builds whylate with the profile of this program, and returns its path, which is beside this program's.
pub fn build_whylate() -> Result<PathBuf> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "whylate"]);
    if cfg!(not(debug_assertions)) {
        cargo.arg("--release");
    }
    if !cargo.status().context("cannot run cargo")?.success() {
        bail!("cannot build whylate");
    }
    let ours = env::current_exe().context("the path of this program is unknown")?;
    Ok(ours.with_file_name("whylate"))
}

/// Returns the first and the last CPU that this process may use, which must differ.
pub fn two_cpus() -> Result<(usize, usize)> {
    let allowed = sched_getaffinity(None).context("the usable CPUs are unknown")?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    cpus.next().zip(cpus.next_back()).context("this needs two CPUs")
}

/// Pins the calling thread, and those that it starts, to one CPU.
pub fn pin_to(cpu: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// Returns a line of Markdown per fact about the machine.
pub fn describe() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let facts = [
        ("kernel", rustix::system::uname().release().to_string_lossy().into_owned()),
        ("CPU", format!("{} ({cpus} usable)", cpu_model())),
        ("clang", version("clang")),
        ("bpftrace", version("bpftrace")),
        ("load average at the end (1, 5, 15 min)", load_average()),
    ];
    facts.map(|(what, fact)| format!("- {what}: {fact}\n")).concat()
}

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
