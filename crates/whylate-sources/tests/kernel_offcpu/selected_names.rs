// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads selected by the name of their process, or by their own.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use whylate_sources::Threads;
use whylate_sources::offcpu::OffcpuOptions;

use crate::sampled;
use crate::sleepers::{EVIL_NAME, Sleepers};
use crate::support::machine::lock::share_machine;

#[test]
fn process_name_selects_all_its_threads() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let sleepers = Sleepers::start("evil", 1)?;
    let name = fs::read_to_string(format!("/proc/{}/comm", sleepers.pid()))?.trim_end().to_owned();
    ensure!(name != EVIL_NAME, "the process has the name of its thread");
    for backend in ["sample", "trace", "proc"] {
        let threads_of = |process: Option<&str>, thread: Option<&str>| -> Result<BTreeSet<String>> {
            let options = OffcpuOptions {
                backend: Some(backend.to_owned()),
                threads: Threads {
                    process_name: process.map(str::to_owned),
                    name: thread.map(str::to_owned),
                    ..Threads::of_process(sleepers.pid())
                },
                by_thread: true,
                ..OffcpuOptions::default()
            };
            let snapshot = sampled(&options, Duration::from_millis(250))?;
            Ok(snapshot.stacks.iter().map(|stack| stack.labels["tid"].clone()).collect())
        };
        let all = sleepers.threads()?;
        ensure!(threads_of(Some(&name), None)? == all, "{backend}: not all threads of the process are there");
        ensure!(threads_of(Some(&name), Some(EVIL_NAME))?.len() == 1, "{backend}: both names choose another thread");
        // For the rest, `trace` shares the program of `sample`.
        if backend == "trace" {
            continue;
        }
        // The kernel keeps 15 bytes of a name.
        ensure!(threads_of(Some(&format!("{name:-<15} and more")), None)?.is_empty() == (name.len() < 15), "{backend}");
        ensure!(threads_of(Some(EVIL_NAME), None)?.is_empty(), "{backend}: a thread's name has chosen a process");
        ensure!(threads_of(None, Some(EVIL_NAME))?.len() == 1, "{backend}: not one thread has the name");
    }
    Ok(())
}
