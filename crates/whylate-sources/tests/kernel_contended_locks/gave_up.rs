// SPDX-License-Identifier: MIT OR Apache-2.0
//! A waiter for a memory map behind one that is killed: the latter gives up, and wakes the former, but never held the lock.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Actor, HELD, Memory, MemoryReader, PAGE, Truth, map, new_truth, wait_until_blocked};

const ROUNDS: usize = 5;
/// Time for which the holder cannot run: a waiter would spin as long as it does.
const PREEMPTED: Duration = Duration::from_millis(30);

/// Lets the thread run only on this CPU, with this real-time priority; 0: none.
fn pin(cpu: usize, priority: i32) {
    // SAFETY: both structures are initialized, and outlive the calls.
    unsafe {
        let mut cpus: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut cpus);
        libc::sched_setaffinity(0, size_of_val(&cpus), &cpus);
        if priority > 0 {
            let parameters = libc::sched_param { sched_priority: priority };
            libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters);
        }
    }
}

/// Returns the last CPU on which this process may run, if it may run on others too.
fn spare_cpu() -> Option<usize> {
    // SAFETY: the structure is initialized, and outlives the calls.
    unsafe {
        let mut cpus: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&cpus), &mut cpus);
        let mut allowed = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &cpus));
        let first = allowed.next();
        allowed.next_back().filter(|_| first.is_some())
    }
}

/// Lets a thread wait for the memory map behind a reader that is killed.
pub(super) fn waiters(memory: &Arc<Memory>, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("map changer")?, Actor::start("map remover")?);
    let preempter = Actor::start("preempter")?;
    let spare = spare_cpu();
    for _ in 0..ROUNDS {
        let page = map(PAGE)?;
        let mut reader = MemoryReader::start()?;
        let of_reader = format!("/proc/{}/stat", reader.answered_by);
        let theirs = Arc::clone(memory);
        holder.begin(move || {
            if let Some(cpu) = spare {
                pin(cpu, 0);
            }
            theirs.change();
        })?;
        thread::sleep(Duration::from_millis(2));
        preempter.begin(move || {
            let Some(cpu) = spare else { return };
            pin(cpu, 1);
            let began = Instant::now();
            while began.elapsed() < PREEMPTED {
                std::hint::spin_loop();
            }
        })?;
        reader.ask()?;
        // On a busy machine, the holder may be done before.
        let mut is_queued = wait_until_blocked(&of_reader, HELD).is_ok();
        waiter.begin(move || {
            // SAFETY: the mapping is ours, and no other code uses it.
            unsafe { libc::munmap(page as *mut libc::c_void, PAGE) };
        })?;
        is_queued &= wait_until_blocked(&format!("/proc/self/task/{}/stat", waiter.tid), HELD).is_ok();
        thread::sleep(HELD / 10);
        reader.process.kill()?;
        reader.process.wait()?;
        let span = waiter.end()?;
        holder.end()?;
        preempter.end()?;
        println!("\nqueued behind a reader that was killed: {is_queued}");
        truths.push(new_truth("gave up", &waiter, "memory_lock", Path::new(""), &holder.label(), span));
    }
    Ok(())
}
