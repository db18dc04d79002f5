// SPDX-License-Identifier: MIT OR Apache-2.0
//! A lock that is passed to a waiter on a CPU that another thread occupies, and stolen by that thread.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{PAUSE, burn, cpu_ns, cpus, report_round, rounds, tid, until_asleep};
use crate::support::machine::real_time::become_fifo_on;

/// CPU time of the first holder.
pub const HOLDS_NS: u64 = 6_000_000;
/// What the thief does with the lock: it computes, sleeps, and computes.
const KEEPS_NS: u64 = 2_000_000;
const SLEEPS: Duration = Duration::from_millis(8);
const COMPUTES_NS: u64 = 3_000_000;
/// Above all other threads; and the thief above the rest.
const ORDINARY: i32 = 5;
const HIGHER: i32 = 10;

/// What the thief has done by its clocks, in nanoseconds.
struct Theft {
    thief: u32,
    kept_ns: u64,
    slept_ns: u64,
    computed_ns: u64,
}

pub fn play() -> Result<()> {
    let (here, there) = cpus()?;
    let lock = Mutex::new(());
    let held = || lock.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut read, mut write) = std::io::pipe()?;
    let waiter_tid = AtomicU32::new(0);
    let (lurking, is_lurking) = channel::<()>();
    let (ask, asked) = channel::<u32>();
    let (enter, entered) = channel::<()>();
    let (lurk, lurks) = channel::<()>();
    let (held_for, holds) = channel::<(u32, u64)>();
    let (stolen, thefts) = channel::<Theft>();
    thread::scope(|scope| {
        let (lock, held, waiter_tid) = (&lock, &held, &waiter_tid);
        let holder = move || -> Result<()> {
            become_fifo_on(there, ORDINARY)?;
            for client in asked {
                let guard = held();
                let before_ns = cpu_ns();
                waiter_tid.store(0, Ordering::SeqCst);
                enter.send(())?;
                while waiter_tid.load(Ordering::SeqCst) == 0 {
                    thread::yield_now();
                }
                // It is on its way into the queue of the lock.
                thread::sleep(Duration::from_millis(2));
                for tid in [waiter_tid.load(Ordering::SeqCst), client] {
                    until_asleep(std::process::id(), tid);
                }
                burn(HOLDS_NS);
                lurk.send(())?;
                is_lurking.recv()?;
                drop(guard);
                held_for.send((tid(), cpu_ns() - before_ns))?;
            }
            Ok(())
        };
        let waiter = move || -> Result<()> {
            become_fifo_on(here, ORDINARY)?;
            for () in entered {
                waiter_tid.store(tid(), Ordering::SeqCst);
                drop(held());
                write.write_all(&[0])?;
            }
            Ok(())
        };
        let thief = move || -> Result<()> {
            become_fifo_on(here, HIGHER)?;
            for () in lurks {
                lurking.send(())?;
                let guard = loop {
                    match lock.try_lock() {
                        Ok(guard) => break guard,
                        Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                        Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
                    }
                };
                let had_ns = monotonic_ns();
                burn(KEEPS_NS);
                let sleeps_ns = monotonic_ns();
                thread::sleep(SLEEPS);
                let woken_ns = monotonic_ns();
                burn(COMPUTES_NS);
                let ended_ns = monotonic_ns();
                drop(guard);
                stolen.send(Theft {
                    thief: tid(),
                    kept_ns: sleeps_ns - had_ns,
                    slept_ns: woken_ns - sleeps_ns,
                    computed_ns: ended_ns - woken_ns,
                })?;
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            become_fifo_on(here, ORDINARY)?;
            for _ in 0..rounds() {
                ask.send(tid())?;
                let began_ns = monotonic_ns();
                read.read_exact(&mut [0])?;
                let ended_ns = monotonic_ns();
                let (holder, held_ns) = holds.recv()?;
                let Theft { thief, kept_ns, slept_ns, computed_ns } = thefts.recv()?;
                let numbers = [holder.into(), held_ns, thief.into(), kept_ns, slept_ns, computed_ns];
                report_round("stolen", tid(), began_ns, ended_ns, &numbers);
                thread::sleep(PAUSE);
            }
            Ok(())
        };
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let threads = [
            named("holder").spawn_scoped(scope, holder)?,
            named("waiter").spawn_scoped(scope, waiter)?,
            named("thief").spawn_scoped(scope, thief)?,
            named("client").spawn_scoped(scope, client)?,
        ];
        threads.into_iter().try_for_each(|thread| thread.join().expect("playing does not panic"))
    })
}
