// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that another thread wakes from known functions at known times, and that measure their waits themselves.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{FILE, sleep_regularly, spawn};

/// Nanoseconds that the thread at the pipe waited for a wakeup from each function, as written to the file.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    pub for_long: u64,
    pub shortly: u64,
}

impl Waited {
    pub fn read(file: &File) -> Result<Self> {
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 0)?;
        let [for_long, shortly] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index])));
        Ok(Waited { for_long, shortly })
    }
}

pub fn start() -> Result<()> {
    let file = File::options().write(true).open(std::env::var(FILE)?)?;
    file.write_all_at(&[0; 16], 0)?;
    let mut ends = [0; 2];
    // SAFETY: an array of two for the two ends.
    ensure!(unsafe { libc::pipe(ends.as_mut_ptr()) } == 0, "no pipe");
    let [read, write] = ends;
    spawn("at the pipe".to_owned(), move || wait_at_pipe(read, &file))?;
    let shared = Arc::new((Mutex::new(0_u64), Condvar::new()));
    let there = Arc::clone(&shared);
    spawn("at the lock".to_owned(), move || wait_at_condition(&there))?;
    spawn("at the timer".to_owned(), sleep_regularly)?;
    spawn("the waker".to_owned(), move || wake_regularly(write, &shared))
}

/// Wakes the threads from one function after 7 ms and from another after 3 ms, of each 10 ms.
fn wake_regularly(pipe: i32, condition: &(Mutex<u64>, Condvar)) {
    let mut due = Instant::now();
    loop {
        due += Duration::from_millis(7);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        wake_after_long(pipe, condition);
        due += Duration::from_millis(3);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        wake_soon(pipe, condition);
    }
}

#[inline(never)]
fn wake_after_long(pipe: i32, condition: &(Mutex<u64>, Condvar)) {
    wake(pipe, b'l', condition);
    black_box(1);
}

#[inline(never)]
fn wake_soon(pipe: i32, condition: &(Mutex<u64>, Condvar)) {
    wake(pipe, b's', condition);
    black_box(2);
}

#[inline(always)]
fn wake(pipe: i32, what: u8, condition: &(Mutex<u64>, Condvar)) {
    // SAFETY: one byte is there.
    unsafe { libc::write(pipe, (&raw const what).cast(), 1) };
    if let Ok(mut turn) = condition.0.lock() {
        *turn += 1;
    }
    condition.1.notify_one();
}

fn wait_at_pipe(pipe: i32, file: &File) {
    let mut waited_ns = [0_u64; 2];
    let mut began = Instant::now();
    loop {
        let mut what = 0_u8;
        // SAFETY: one byte has room there.
        unsafe { libc::read(pipe, (&raw mut what).cast(), 1) };
        let now = Instant::now();
        waited_ns[usize::from(what == b's')] += (now - began).as_nanos() as u64;
        began = now;
        let bytes: Vec<u8> = waited_ns.iter().flat_map(|ns| ns.to_ne_bytes()).collect();
        // A reader notices a missing update.
        let _ = file.write_all_at(&bytes, 0);
    }
}

fn wait_at_condition(condition: &(Mutex<u64>, Condvar)) {
    let mut seen = 0;
    loop {
        if let Ok(turn) = condition.0.lock()
            && let Ok(turn) = condition.1.wait_while(turn, |turn| *turn == seen)
        {
            seen = *turn;
        }
    }
}
