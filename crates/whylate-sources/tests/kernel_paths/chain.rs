// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client at a condition variable, with a server that computes, writes to the disk, and is kept off its CPU.

use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::channel;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{burn, cpu_ns, cpus, report_round, rounds, tid};
use crate::support::machine::cpus::pin_to;
use crate::support::machine::real_time::become_fifo_on;

const COMPUTES_NS: u64 = 8_000_000;
const KEPT_NS: u64 = 12_000_000;
const PRIORITY: i32 = 10;

/// The value under the condition variable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Idle,
    Servers,
    Clients,
    Over,
}

#[derive(Debug)]
struct Served {
    server: u32,
    bully: u32,
    /// CPU time of computing, of writing, and of the rest.
    cpu_ns: u64,
    /// Time of writing by the clock, and its CPU time.
    wrote_ns: u64,
    write_cpu_ns: u64,
    kept_ns: u64,
}

pub fn play() -> Result<()> {
    let (here, there) = cpus()?;
    let (turn, changed) = (Mutex::new(Turn::Idle), Condvar::new());
    let wait_until = |wanted: &[Turn]| {
        let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |turn: &mut Turn| !wanted.contains(turn);
        changed.wait_while(turn, waits).unwrap_or_else(PoisonError::into_inner)
    };
    let is_now = |next| {
        *turn.lock().unwrap_or_else(PoisonError::into_inner) = next;
        changed.notify_all();
    };
    let (disturb, disturbed) = channel::<()>();
    let (spun, spans) = channel::<(u32, u64)>();
    let (report, reported) = channel::<Served>();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
    thread::scope(|scope| {
        let (wait_until, is_now) = (&wait_until, &is_now);
        let bully = move || -> Result<()> {
            become_fifo_on(there, PRIORITY)?;
            for () in disturbed {
                let began_ns = monotonic_ns();
                while monotonic_ns() < began_ns + KEPT_NS {
                    std::hint::spin_loop();
                }
                let _ = spun.send((tid(), monotonic_ns() - began_ns));
            }
            Ok(())
        };
        let server = move || -> Result<()> {
            pin_to(there)?;
            while *wait_until(&[Turn::Servers, Turn::Over]) == Turn::Servers {
                let began_ns = cpu_ns();
                burn(COMPUTES_NS);
                let (call_ns, call_cpu_ns) = (monotonic_ns(), cpu_ns());
                file.write_all_at(&[1; 4096], 0)?;
                file.sync_data()?;
                let (wrote_ns, write_cpu_ns) = (monotonic_ns() - call_ns, cpu_ns() - call_cpu_ns);
                disturb.send(())?;
                let (bully, kept_ns) = spans.recv()?;
                let cpu_ns = cpu_ns() - began_ns;
                is_now(Turn::Clients);
                report.send(Served { server: tid(), bully, cpu_ns, wrote_ns, write_cpu_ns, kept_ns })?;
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            pin_to(here)?;
            for _ in 0..rounds() {
                let began_ns = monotonic_ns();
                is_now(Turn::Servers);
                *wait_until(&[Turn::Clients]) = Turn::Idle;
                let ended_ns = monotonic_ns();
                let Served { server, bully, cpu_ns, wrote_ns, write_cpu_ns, kept_ns } = reported.recv()?;
                let numbers = [server.into(), bully.into(), cpu_ns, wrote_ns, write_cpu_ns, kept_ns];
                report_round("chain", tid(), began_ns, ended_ns, &numbers);
                thread::sleep(Duration::from_millis(20));
            }
            is_now(Turn::Over);
            Ok(())
        };
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let bully = named("bully").spawn_scoped(scope, bully)?;
        let server = named("server").spawn_scoped(scope, server)?;
        let client = named("client").spawn_scoped(scope, client)?;
        client.join().expect("waiting does not panic")?;
        server.join().expect("serving does not panic")?;
        bully.join().expect("spinning does not panic")
    })
}
