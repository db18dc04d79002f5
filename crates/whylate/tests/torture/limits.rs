// SPDX-License-Identifier: MIT OR Apache-2.0
//! With scarce resources whylate says what is missing, or goes on.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::beside::short_lived_thread;
use crate::exercise::{Exercise, part, wait_until_it_measures};
use crate::lock::lock_machine;
use crate::{COMMANDS, put_back};

/// 64 MB in kilobytes: below what the program needs with its libraries and what it reads of the kernel.
const SMALL_ADDRESS_SPACE: &str = "-v 65536";
const LEFT_BYTES: u64 = 64 << 20;

#[test]
fn scarce_resources_are_reported() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Exercise::skipped("limits", "no source measures here") };
    let mut exercise = Exercise::begin("limits")?;
    for command in part(&COMMANDS, 1) {
        // In parallel: most of the time is waiting.
        let start = |limit: &&str| -> Result<_> {
            let mut limited = Command::new("sh");
            limited.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_whylate")]);
            exercise.start_as(limited.args(*command).stdout(Stdio::piped()).stderr(Stdio::piped()))
        };
        let limits = ["-n 64", "-l 64", SMALL_ADDRESS_SPACE];
        let children = limits.iter().map(start).collect::<Result<Vec<_>>>()?;
        for (limit, child) in limits.iter().zip(children) {
            exercise.finish(child, &format!("ulimit {limit}, {command:?}"))?;
        }
    }
    put_back(&mut exercise)?;
    exercise.note("ulimit -n 64, -l 64, -v 65536".to_owned());
    exercise.end()
}

/// Once it measures, it may map 64 MB more; short-lived threads give it much to keep.
#[test]
fn low_address_space_is_survived_or_reported() -> Result<()> {
    const NAME: &str = "64 MB left";
    let Some(_lock) = lock_machine() else { return Exercise::skipped(NAME, "no source measures here") };
    let mut exercise = Exercise::begin(NAME)?;
    let (mut went_on, mut said_so) = (0, 0);
    for command in part(&COMMANDS, 1) {
        let words: Vec<&str> = command.iter().map(|&word| if word == "1s" { "3s" } else { word }).collect();
        let child = exercise.start(&words)?;
        wait_until_it_measures(child.id());
        let what = format!("{words:?} with 64 MB of address space left");
        let Some(mapped_bytes) = mapped_bytes(child.id()) else {
            exercise.wrong(&format!("{what}: it has ended before"));
            exercise.finish(child, &what)?;
            continue;
        };
        let most = Some(mapped_bytes + LEFT_BYTES);
        let pid = Pid::from_child(&child);
        prlimit(Some(pid), Resource::As, Rlimit { current: most, maximum: most })?;
        let stop = AtomicBool::new(false);
        let output = thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    short_lived_thread();
                }
            });
            let output = exercise.finish(child, &what);
            stop.store(true, Ordering::Relaxed);
            output
        })?;
        match output {
            Some(output) if output.status.success() => went_on += 1,
            Some(output) => {
                println!("{what}: {}", String::from_utf8_lossy(&output.stderr).trim_end());
                said_so += 1;
            }
            None => {}
        }
    }
    put_back(&mut exercise)?;
    exercise.note(format!("RLIMIT_AS while it measures: {went_on} went on, {said_so} said so"));
    exercise.end()
}

/// Returns `None` after the process exited.
fn mapped_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    Some(size.trim().trim_end_matches(" kB").parse::<u64>().context("no size").ok()? << 10)
}
