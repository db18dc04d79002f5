// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a figure was measured.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

/// One line of Markdown per fact.
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
        // A `String` takes everything.
        let _ = writeln!(text, "- {what}: {fact}");
    }
    text
}

/// Of 1, 5 and 15 minutes.
pub fn load_average() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split_once(':'));
    model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.trim().to_owned())
}

/// The first line of `tool --version`.
fn version(tool: &str) -> String {
    let output = Command::new(tool).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or("not installed").to_owned()
}
