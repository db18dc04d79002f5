// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two real-time threads that switch to each other on one CPU as fast as they can, in bursts.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use whylate_sources::kernel::clock::monotonic_ns;

use crate::support::machine::real_time::become_fifo_on;

/// Length and period of bursts: other threads need their share.
const BURST: Duration = Duration::from_millis(6);
const EVERY: Duration = Duration::from_millis(10);
const PRIORITY: i32 = 30;
pub const THREADS: [&str; 2] = ["test-ping", "test-pong"];

/// What the two threads did.
pub struct Played {
    /// Context switches between the two, by their own count.
    pub switches: u64,
    /// Span of each burst on CLOCK_MONOTONIC.
    pub bursts: Vec<std::ops::Range<u64>>,
}

pub fn play(cpu: u32, time: Duration) -> Result<Played> {
    let (ping_reader, ping_writer) = io::pipe()?;
    let (pong_reader, pong_writer) = io::pipe()?;
    thread::scope(|scope| {
        let pong = thread::Builder::new().name(THREADS[1].to_owned());
        let pong = pong.spawn_scoped(scope, move || answer(cpu, ping_reader, pong_writer))?;
        let ping = thread::Builder::new().name(THREADS[0].to_owned());
        let ping = ping.spawn_scoped(scope, move || ask(cpu, time, pong_reader, ping_writer))?;
        let played = ping.join().expect("playing does not panic");
        pong.join().expect("playing does not panic")?;
        played
    })
}

fn ask(cpu: u32, time: Duration, mut from: PipeReader, mut to: PipeWriter) -> Result<Played> {
    become_fifo_on(cpu, PRIORITY)?;
    let began = Instant::now();
    let mut played = Played { switches: 0, bursts: Vec::new() };
    while began.elapsed() < time {
        let burst = Instant::now();
        let start_ns = monotonic_ns();
        while burst.elapsed() < BURST {
            to.write_all(&[1])?;
            from.read_exact(&mut [0])?;
            played.switches += 2;
        }
        played.bursts.push(start_ns..monotonic_ns());
        thread::sleep(EVERY.saturating_sub(burst.elapsed()));
    }
    Ok(played)
}

fn answer(cpu: u32, mut from: PipeReader, mut to: PipeWriter) -> Result<()> {
    become_fifo_on(cpu, PRIORITY)?;
    while from.read(&mut [0])? == 1 {
        // The other one may have ended.
        let _ = to.write_all(&[1]);
    }
    Ok(())
}
