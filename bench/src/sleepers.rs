// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process with threads that sleep at a known depth, in a known number of call sites, and wake together on request.

use std::ffi::c_void;
use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use rustix::thread::futex;

use crate::child::Workload;
use crate::kernel;

/// Has threads sleep, and wakes them for each line of standard input.
#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long)]
    threads: u32,
    /// How many functions deep, of the process's own.
    #[arg(long)]
    descents: u32,
    /// In how many places.
    #[arg(long)]
    places: u32,
}

/// Time for the last thread to block after it has counted itself.
const SETTLE: Duration = Duration::from_millis(100);
/// Little of it is ever used, and untouched pages take no memory.
const STACK_BYTES: usize = 32 << 10;

/// Futex: threads sleep as long as it has the value that they saw.
static WORD: AtomicU32 = AtomicU32::new(0);
static READY: AtomicU32 = AtomicU32::new(0);

pub fn run(arguments: &Arguments) -> Result<()> {
    let (descents, places) = (arguments.descents, arguments.places);
    for number in 0..arguments.threads {
        let path = (number % places) << BITS | descents;
        kernel::begin_thread(begin, path as usize, STACK_BYTES)
            .with_context(|| format!("cannot start thread {number}"))?;
    }
    report_when_asleep(arguments.threads)?;
    for line in io::stdin().lines() {
        line?;
        READY.store(0, SeqCst);
        WORD.fetch_add(1, SeqCst);
        futex::wake(&WORD, futex::Flags::PRIVATE, i32::MAX as u32)?;
        report_when_asleep(arguments.threads)?;
    }
    Ok(())
}

/// Starts the process; each repetition wakes all threads, and waits until they sleep again.
pub fn start(threads: u32, descents: u32, places: u32) -> Result<Workload> {
    Workload::start(&format!("sleepers --threads {threads} --descents {descents} --places {places}"))
}

/// Bits of a path's encoding that hold its length.
const BITS: u32 = 8;

extern "C" fn begin(path: *mut c_void) -> *mut c_void {
    let path = path as usize as u32;
    descend(path >> BITS, path & ((1 << BITS) - 1));
    black_box(std::ptr::null_mut())
}

fn report_when_asleep(threads: u32) -> Result<()> {
    while READY.load(SeqCst) < threads {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(SETTLE);
    Workload::report_ready()
}

/// Descends by one bit of `place` per step, so that each place has its own stack.
fn descend(place: u32, descents: u32) {
    match (descents, place & 1) {
        (0, _) => sleep(),
        (_, 0) => left(place >> 1, descents - 1),
        _ => right(place >> 1, descents - 1),
    }
}

#[inline(never)]
fn left(place: u32, descents: u32) {
    descend(place, descents);
    black_box(1);
}

#[inline(never)]
fn right(place: u32, descents: u32) {
    descend(place, descents);
    black_box(2);
}

#[inline(never)]
fn sleep() {
    loop {
        let seen = WORD.load(SeqCst);
        READY.fetch_add(1, SeqCst);
        while WORD.load(SeqCst) == seen {
            // Returns at once if the word changed before the thread slept.
            let _ = futex::wait(&WORD, futex::Flags::PRIVATE, seen, None);
        }
    }
}
