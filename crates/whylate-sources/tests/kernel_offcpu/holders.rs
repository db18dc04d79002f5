// SPDX-License-Identifier: MIT OR Apache-2.0
//! The holders for which waiting threads wait, where lock owners are known.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::NamedTempFile;
use whylate_model::holders::{Chain, End, Lock};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::sleepers::Sleepers;
use crate::support::machine::lock::share_machine;

#[test]
fn waiter_names_lock_holder() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let sleepers = Sleepers::start_with("held", 1, Some(NamedTempFile::new_in(&directory)?))?;
    for backend in ["sample", "trace"] {
        check_chains(&sleepers, backend).with_context(|| format!("backend {backend}"))?;
    }
    Ok(())
}

/// A process that takes a file lock and ends, having left the open file to a shell; and a process that waits for the lock.
const LEAVES_LOCK: &str = "exec 9>\"$0\"; flock 9; echo ready; read line";

#[test]
fn waiter_for_file_lock_names_holder_and_file() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    for (name, leaves) in [("taken", false), ("left", true)] {
        let path = fs::canonicalize(directory.path())?.join(name);
        let mut holder = if leaves { Command::new("sh") } else { Command::new("flock") };
        match leaves {
            true => holder.args(["-c", LEAVES_LOCK]).arg(&path),
            false => holder.arg(&path).args(["sh", "-c", "echo ready; read line"]),
        };
        let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut ready = String::new();
        BufReader::new(holder.stdout.take().context("it has an output")?).read_line(&mut ready)?;
        let mut waiter = Command::new("flock").arg(&path).arg("true").spawn()?;
        let options = OffcpuOptions {
            threads: Threads::of_process(waiter.id()),
            by_thread: true,
            holders: true,
            ..OffcpuOptions::default()
        };
        let mut source = options.attach(&Session::of_one())?;
        let mut chain = None;
        for _ in 0..MAX_SNAPSHOTS {
            std::thread::sleep(Duration::from_millis(20));
            chain = source.snapshot()?.stacks.into_iter().find_map(|stack| stack.waits_for);
            if chain.is_some() {
                break;
            }
        }
        let (who, file) =
            (format!("{}:{}", if leaves { "sh" } else { "flock" }, holder.id()), path.display().to_string());
        // Its end of the pipe is closed, and the lock is released.
        drop(holder.stdin.take());
        holder.wait()?;
        waiter.wait()?;
        let chain = chain.context("no holder is named")?;
        let link = &chain.links[0];
        ensure!((chain.links.len(), chain.end) == (1, End::Free) && link.lock == Lock::FileLock, "{chain:?}");
        ensure!(link.holder.who == who && link.file.as_ref() == Some(&file), "{chain:?}, not {who} and {file}");
    }
    Ok(())
}

/// The work item that closing an inotify descriptor flushes.
const FLUSHED: &str = "fsnotify_mark_destroy_workfn";
const MAX_SNAPSHOTS: u32 = 1_000;

#[test]
fn flush_waiter_names_worker() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    if !fs::exists("/proc/sys/fs/inotify")? {
        println!("skipped: this kernel has no inotify");
        return Ok(());
    }
    let sleepers = Sleepers::start("flushing", 1)?;
    let options = OffcpuOptions {
        threads: Threads::of_process(sleepers.pid()),
        by_thread: true,
        holders: true,
        user_stacks: false,
        ..OffcpuOptions::default()
    };
    let mut source = options.attach(&Session::of_one())?;
    for number in 1..=MAX_SNAPSHOTS {
        std::thread::sleep(Duration::from_millis(3));
        let snapshot = source.snapshot()?;
        let Some(stack) = snapshot.stacks.iter().find(|stack| stack.waits_for.is_some()) else { continue };
        let in_flush = stack.kernel.iter().any(|frame| frame.contains("flush_work"));
        let links = stack.waits_for.as_ref().map(|chain| chain.links.as_slice()).unwrap_or_default();
        println!("after {number} snapshots: {links:?}");
        let link = links.first().context("a chain has links")?;
        // It may briefly wait for a lock that other threads of the kernel's fsnotify use too.
        if link.lock == Lock::WorkItem {
            ensure!(in_flush, "{stack:?}");
            ensure!(link.holder.who.starts_with("kworker/"), "{link:?}");
            ensure!(link.holder.handler.as_deref() == Some(FLUSHED), "{link:?}");
            return Ok(());
        }
    }
    anyhow::bail!("not seen in {MAX_SNAPSHOTS} snapshots")
}

fn check_chains(sleepers: &Sleepers, backend: &str) -> Result<()> {
    let options = OffcpuOptions {
        backend: Some(backend.to_owned()),
        threads: Threads::of_process(sleepers.pid()),
        by_thread: true,
        holders: true,
        ..OffcpuOptions::default()
    };
    let mut source = options.attach(&Session::of_one())?;
    let knows = |what: &str| {
        source
            .limitations()
            .is_none_or(|limitation| !limitation.contains(&format!("does not record who holds its {what}")))
    };
    let knows_mutexes = knows("mutexes");
    let knows_rwsems = knows_mutexes && knows("semaphores");
    std::thread::sleep(Duration::from_millis(100));
    let snapshot = source.snapshot()?;
    ensure!(snapshot.lost.values().sum::<u64>() == 0, "lost: {:?}", snapshot.lost);
    let chains: HashMap<&str, Option<&Chain>> = snapshot
        .stacks
        .iter()
        .filter(|stack| !stack.age.is_empty())
        .map(|stack| (stack.labels["thread"].as_str(), stack.waits_for.as_ref()))
        .collect();
    // Returns the locks and holders of a waiter's chain, in order.
    let links = |waiter: &str| -> Result<Vec<(Lock, String)>> {
        let Some(chain) = chains.get(waiter).context("a thread is missing")? else { return Ok(Vec::new()) };
        ensure!(chain.end == End::Free, "{waiter}: {chain:?}");
        Ok(chain.links.iter().map(|link| (link.lock, link.holder.who.clone())).collect())
    };
    let held =
        |lock: Lock, by: &str| -> Result<(Lock, String)> { Ok((lock, format!("{by}:{}", sleepers.thread(by)?))) };
    let (first, second) = (held(Lock::PiFutex, "pi holder")?, held(Lock::PiFutex, "pi middle")?);
    ensure!(links("pi middle")? == [first.clone()], "pi middle: {:?}", links("pi middle")?);
    ensure!(links("pi waiter")? == [second, first], "pi waiter: {:?}", links("pi waiter")?);
    for waits_for_none in ["pi holder", "holder", "file holder", "dir holder"] {
        ensure!(links(waits_for_none)?.is_empty(), "{waits_for_none}: {:?}", links(waits_for_none)?);
    }
    let is_real_time = fs::read_to_string("/sys/kernel/realtime").is_ok_and(|flag| flag.trim() == "1");
    let kind = |lock: Lock| if is_real_time { Lock::RtMutex } else { lock };
    let one = |is_known: bool, lock: Lock, by: &str| -> Result<Vec<_>> {
        is_known.then(|| held(lock, by)).into_iter().collect()
    };
    let pipe = one(knows_mutexes, kind(Lock::Mutex), "holder")?;
    ensure!(links("pipe waiter")? == pipe, "pipe waiter: {:?}", links("pipe waiter")?);
    let file = one(knows_rwsems, kind(Lock::Rwsem), "file holder")?;
    ensure!(links("file waiter")? == file, "file waiter: {:?}", links("file waiter")?);
    // Some file systems take the lock exclusively to read a directory. With PREEMPT_RT, readers are unknown.
    let expected = [Lock::RwsemReaders, Lock::Rwsem].map(|lock| one(knows_rwsems && !is_real_time, lock, "dir holder"));
    let found = links("dir waiter")?;
    println!("the directory's lock: {found:?}");
    for expected in expected {
        if expected? == found {
            return Ok(());
        }
    }
    anyhow::bail!("dir waiter: {found:?}")
}
