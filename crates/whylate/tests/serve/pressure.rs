// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pressure has a flight recorder keep a file, which says why and names who caused it. Runs as root.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use whylate_model::Snapshot;

use crate::client::Served;
use crate::live::{TIMEOUT, recordings};
use crate::lock::lock_machine;
use crate::memory_limit::MemoryLimit;
use crate::running::{Running, copied, whylate};

const OPTIONS: [&str; 8] = ["--every", "500ms", "--sources", "offcpu,block", "--ring", "1m", "--after", "1s"];

fn has_pressure() -> bool {
    let has = Path::new("/proc/pressure/cpu").exists();
    if !has {
        println!("skipped: this kernel keeps no account of pressure");
    }
    has
}

/// Returns what a replay prints: the result, and its messages.
fn replayed(file: &Path, arguments: &[&str]) -> Result<(String, String)> {
    let output = whylate(&["replay"]).arg(file).args(arguments).output()?;
    let [shown, said] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    ensure!(output.status.success(), "{said}");
    Ok((shown, said))
}

/// Waits until a recording is written, and returns its path.
fn kept(flights: &Path) -> Result<PathBuf> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(file) = recordings(flights).into_iter().min() {
            return Ok(file);
        }
        ensure!(Instant::now() < deadline, "no file is kept");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn cpu_hog_is_named_in_file_kept_for_pressure() -> Result<()> {
    let Some(_lock) = lock_machine().filter(|_| has_pressure()) else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let flights = directory.path().join("flights");
    let into = format!("{}/", flights.display());
    let pressure = ["serve", "--why", "5ms", "--record", &into, "--on-pressure", "cpu.some>25%/2s"];
    let mut served = Served::start(&[&pressure[..], &OPTIONS].concat())?;
    let programs = copied("/bin/sh", "cpuhog")?;
    let hog = programs.path().join("cpuhog");
    // So many that they wait for one another for longer than the limit.
    let hogs = 6 * thread::available_parallelism()?.get();
    let hogs: Vec<Running> = (0..hogs)
        .map(|_| Running::of(Command::new(&hog).args(["-c", "while :; do :; done"])))
        .collect::<Result<_>>()?;
    let file = kept(&flights)?;
    drop(hogs);
    served.stop()?;
    let (shown, said) = replayed(&file, &[])?;
    ensure!(said.contains("kept because of cpu.some ") && said.contains("% over "), "{said}");
    ensure!(shown.contains("cpuhog"), "{shown}");
    Ok(())
}

#[test]
fn memory_hog_is_named_in_file_kept_for_pressure() -> Result<()> {
    let Some(_lock) = lock_machine().filter(|_| has_pressure()) else { return Ok(()) };
    let Some(limit) = MemoryLimit::make("hog", 32 << 20)? else { return Ok(()) };
    // On a disk: memory of tmpfs cannot be reclaimed.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let (flights, large) = (directory.path().join("flights"), directory.path().join("large"));
    // The cgroup pays for the pages of the file.
    let make = format!("{}; head -c 96M /dev/zero >{1} && sync {1}", limit.enter(), large.display());
    ensure!(Command::new("sh").args(["-c", &make]).status()?.success());
    let into = format!("{}/", flights.display());
    let pressure = ["record", "-o", &into, "--on-pressure", "memory.some>5%/2s"];
    let mut recorder = Running::start(&[&pressure[..], &OPTIONS].concat())?;
    recorder.wait_until_it_catches(Signal::USR1)?;
    recorder.wait_until_it_measures()?;
    let programs = copied("/bin/cat", "memoryhog")?;
    let program = programs.path().join("memoryhog");
    let files = vec![large.display().to_string(); 200].join(" ");
    let hog = format!("{}; exec {} {files} >/dev/null", limit.enter(), program.display());
    let hogs: Vec<Running> =
        (0..4).map(|_| Running::of(Command::new("sh").args(["-c", &hog]))).collect::<Result<_>>()?;
    let file = kept(&flights)?;
    drop(hogs);
    recorder.signal(Signal::INT)?;
    let (status, said) = recorder.end()?;
    ensure!(status.success(), "{said}");
    let (_, said) = replayed(&file, &[])?;
    ensure!(said.contains("kept because of memory.some ") && said.contains("% over "), "{said}");
    let (shown, _) = replayed(&file, &["offcpu", "--json"])?;
    let most = most_in_uninterruptible_sleep(&shown)?;
    ensure!(most.as_deref() == Some("memoryhog"), "{most:?}");
    Ok(())
}

/// Returns the process that waited longest for disks and memory.
fn most_in_uninterruptible_sleep(snapshots: &str) -> Result<Option<String>> {
    let mut waited = BTreeMap::<String, u64>::new();
    for line in snapshots.lines() {
        let snapshot: Snapshot = serde_json::from_str(line)?;
        for stack in snapshot.stacks.into_iter().filter(|stack| stack.state == "D") {
            *waited.entry(stack.labels.get("process").cloned().unwrap_or_default()).or_default() += stack.weight_ns;
        }
    }
    Ok(waited.into_iter().max_by_key(|(_, ns)| *ns).map(|(process, _)| process))
}
