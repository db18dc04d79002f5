// SPDX-License-Identifier: MIT OR Apache-2.0
//! A lock that is passed from holder to holder while a client waits for the last one.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{burn, cpu_ns, cpus, report_round, rounds, tid, until_asleep};
use crate::support::machine::cpus::pin_to;

/// CPU time of each holder with the lock.
const HOLDS_NS: [u64; 4] = [3_000_000, 6_000_000, 9_000_000, 12_000_000];

pub fn play() -> Result<()> {
    let (here, there) = cpus()?;
    let lock = Mutex::new(());
    let (mut read, write) = std::io::pipe()?;
    let ended = AtomicUsize::new(0);
    let (report, reported) = channel::<(u32, u64)>();
    let (enlist, enlisted) = channel::<u32>();
    thread::scope(|scope| {
        let mut turns: Vec<Sender<()>> = Vec::new();
        let mut holders = Vec::new();
        for (number, ns) in HOLDS_NS.into_iter().enumerate() {
            let (turn, its_turn) = channel::<()>();
            turns.push(turn);
            let (lock, ended, report, enlist) = (&lock, &ended, report.clone(), enlist.clone());
            let mut write = write.try_clone()?;
            let hold = move || -> Result<()> {
                pin_to(there)?;
                enlist.send(tid())?;
                for () in its_turn {
                    let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
                    let before_ns = cpu_ns();
                    burn(ns);
                    report.send((tid(), cpu_ns() - before_ns))?;
                    let is_last = ended.fetch_add(1, Ordering::SeqCst) + 1 == HOLDS_NS.len();
                    drop(held);
                    if is_last {
                        write.write_all(&[0])?;
                    }
                }
                Ok(())
            };
            holders.push(thread::Builder::new().name(format!("holder {number}")).spawn_scoped(scope, hold)?);
        }
        let tids: Vec<u32> = holders.iter().map_while(|_| enlisted.recv().ok()).collect();
        let (begin, begins) = channel::<u32>();
        let (started, has_started) = channel::<()>();
        let (lock, ended) = (&lock, &ended);
        let first = move || -> Result<()> {
            pin_to(here)?;
            for client in begins {
                let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
                for turn in &turns {
                    turn.send(())?;
                }
                started.send(())?;
                // In the queue of the lock.
                thread::sleep(Duration::from_millis(2));
                for tid in tids.iter().copied().chain([client]) {
                    until_asleep(std::process::id(), tid);
                }
                drop(held);
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            pin_to(here)?;
            for _ in 0..rounds() {
                ended.store(0, Ordering::SeqCst);
                begin.send(tid())?;
                has_started.recv()?;
                let began_ns = monotonic_ns();
                read.read_exact(&mut [0])?;
                let ended_ns = monotonic_ns();
                let mut numbers = Vec::new();
                for _ in HOLDS_NS {
                    let (holder, ns) = reported.recv().context("a holder has ended")?;
                    numbers.extend([u64::from(holder), ns]);
                }
                report_round("handoff", tid(), began_ns, ended_ns, &numbers);
                thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        };
        let first = thread::Builder::new().name("first".to_owned()).spawn_scoped(scope, first)?;
        let client = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, client)?;
        client.join().expect("waiting does not panic")?;
        first.join().expect("beginning does not panic")?;
        holders.into_iter().try_for_each(|holder| holder.join().expect("holding does not panic"))
    })
}
