// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whom threads wait for that still wait, where who has the locks is known.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::NamedTempFile;
use whylate_model::holders::{Chain, End, Lock};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::kernel::turn::turn_to_measure;
use crate::sleepers::Sleepers;

#[test]
fn a_thread_waits_for_whoever_has_the_lock() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let sleepers = Sleepers::start_with("held", 1, Some(NamedTempFile::new_in(&folder)?))?;
    for backend in ["sample", "trace"] {
        look(&sleepers, backend).with_context(|| format!("backend {backend}"))?;
    }
    Ok(())
}

/// What closing a file with watches flushes.
const FLUSHED: &str = "fsnotify_mark_destroy_workfn";
const LOOKS: u32 = 1_000;

#[test]
fn who_flushes_a_work_item_waits_for_its_worker() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    if !fs::exists("/proc/sys/fs/inotify")? {
        println!("skipped: this kernel has no inotify");
        return Ok(());
    }
    let sleepers = Sleepers::start("flushing", 1)?;
    let options = OffcpuOptions {
        threads: Threads::of(sleepers.pid()),
        by_thread: true,
        holders: true,
        user_stacks: false,
        ..OffcpuOptions::default()
    };
    let mut source = options.attach(&Session::of_one())?;
    for look in 1..=LOOKS {
        std::thread::sleep(Duration::from_millis(3));
        let snapshot = source.snapshot()?;
        let Some(stack) = snapshot.stacks.iter().find(|stack| stack.waits_for.is_some()) else { continue };
        let in_flush = stack.kernel.iter().any(|frame| frame.contains("flush_work"));
        let links = stack.waits_for.as_ref().map(|chain| chain.links.as_slice()).unwrap_or_default();
        println!("after {look} looks: {links:?}");
        let link = links.first().context("a chain has links")?;
        // For a moment it may also wait for a lock, of which others of the kernel's file system have need too.
        if link.lock == Lock::WorkItem {
            ensure!(in_flush, "{stack:?}");
            ensure!(link.holder.who.starts_with("kworker/"), "{link:?}");
            ensure!(link.holder.handler.as_deref() == Some(FLUSHED), "{link:?}");
            return Ok(());
        }
    }
    anyhow::bail!("not seen in {LOOKS} looks")
}

fn look(sleepers: &Sleepers, backend: &str) -> Result<()> {
    let options = OffcpuOptions {
        backend: Some(backend.to_owned()),
        threads: Threads::of(sleepers.pid()),
        by_thread: true,
        holders: true,
        ..OffcpuOptions::default()
    };
    let mut source = options.attach(&Session::of_one())?;
    let tells =
        |what: &str| source.weaker().is_none_or(|told| !told.contains(&format!("does not tell who holds its {what}")));
    let tells_mutexes = tells("mutexes");
    let tells_rwsems = tells_mutexes && tells("semaphores");
    std::thread::sleep(Duration::from_millis(100));
    let snapshot = source.snapshot()?;
    ensure!(snapshot.lost.values().sum::<u64>() == 0, "lost: {:?}", snapshot.lost);
    let chains: HashMap<&str, Option<&Chain>> = snapshot
        .stacks
        .iter()
        .filter(|stack| !stack.age.is_empty())
        .map(|stack| (stack.labels["thread"].as_str(), stack.waits_for.as_ref()))
        .collect();
    // What a thread waits for, and its holders in order.
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
    for waits_for_none in ["pi holder", "holder", "file holder", "folder holder"] {
        ensure!(links(waits_for_none)?.is_empty(), "{waits_for_none}: {:?}", links(waits_for_none)?);
    }
    let is_real_time = fs::read_to_string("/sys/kernel/realtime").is_ok_and(|told| told.trim() == "1");
    let kind = |lock: Lock| if is_real_time { Lock::RtMutex } else { lock };
    let one = |is_told: bool, lock: Lock, by: &str| -> Result<Vec<_>> {
        is_told.then(|| held(lock, by)).into_iter().collect()
    };
    let pipe = one(tells_mutexes, kind(Lock::Mutex), "holder")?;
    ensure!(links("pipe waiter")? == pipe, "pipe waiter: {:?}", links("pipe waiter")?);
    let file = one(tells_rwsems, kind(Lock::Rwsem), "file holder")?;
    ensure!(links("file waiter")? == file, "file waiter: {:?}", links("file waiter")?);
    // Some file systems let nobody in while they read a folder. With PREEMPT_RT nobody knows who reads.
    let folders =
        [Lock::RwsemReaders, Lock::Rwsem].map(|lock| one(tells_rwsems && !is_real_time, lock, "folder holder"));
    let told = links("folder waiter")?;
    println!("the folder's lock: {told:?}");
    for folder in folders {
        if folder? == told {
            return Ok(());
        }
    }
    anyhow::bail!("folder waiter: {told:?}")
}
