// SPDX-License-Identifier: MIT OR Apache-2.0
//! A submission thread that gets a fixed number of requests each period, whether the earlier ones are done or not: its
//! work depends on it alone.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use io_uring::{IoUring, opcode, types};

use crate::support::machine::cpus::pin_to;

/// Read non-blocking, so that the submission thread carries out the request at once instead of passing it to a worker.
const RANDOM: &str = "/dev/urandom";
const READ_BYTES: usize = 4 << 10;
const ENTRIES: u32 = 4096;
/// Longer than any pause, so that the submission thread never sleeps.
const IDLE_MS: u32 = 5_000;
/// Pause between the no-op request and the reads.
const NOTHING: Duration = Duration::from_millis(1);
const TIMEOUT: Duration = Duration::from_secs(5);

/// Submits requests until it is dropped.
pub struct Paced {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
    tid: u32,
}

impl Paced {
    /// Submits a no-op request and `requests` reads each period, from one CPU to a submission thread on another.
    pub fn start(requests: u64, period: Duration, app_cpu: u32, sq_cpu: u32) -> Result<Paced> {
        // An earlier submission thread may be about to end.
        wait_for_threads(0)?;
        let mut ring: IoUring = IoUring::builder().setup_sqpoll(IDLE_MS).setup_sqpoll_cpu(sq_cpu).build(ENTRIES)?;
        let tid = wait_for_threads(1)?;
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = thread::Builder::new().name("test-app".to_owned()).spawn(move || {
            pin_to(app_cpu)?;
            submit(&mut ring, requests, period, &is_over)
        })?;
        Ok(Paced { over, thread: Some(thread), tid })
    }

    /// Returns the TID of the submission thread.
    pub fn tid(&self) -> u32 {
        self.tid
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let outcome = thread.join().expect("submitting does not panic");
            outcome.expect("the kernel takes requests");
        }
        // Freeing BPF programs waits for the end of this thread.
        wait_for_threads(0).expect("the thread ends with its ring");
    }
}

fn submit(ring: &mut IoUring, requests: u64, period: Duration, over: &AtomicBool) -> Result<()> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(RANDOM)?;
    let mut buffer = vec![0_u8; READ_BYTES];
    let read = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), READ_BYTES as u32).build();
    let mut outstanding = 0;
    let mut next = Instant::now();
    while !over.load(Ordering::Relaxed) || outstanding > 0 {
        for completion in ring.completion() {
            ensure!(completion.result() >= 0, "a request failed: {}", completion.result());
            outstanding -= 1;
        }
        let is_over = over.load(Ordering::Relaxed);
        if !is_over {
            // By itself, to show how long a call without work takes. SAFETY: the request has no buffer.
            unsafe { ring.submission().push(&opcode::Nop::new().build()) }.context("the ring is full")?;
            outstanding += 1;
            ring.submit()?;
            thread::sleep(NOTHING);
        }
        // No room for more if the submission thread is behind.
        let room = if is_over { 0 } else { (2 * requests).min(u64::from(ENTRIES / 2)).saturating_sub(outstanding) };
        for _ in 0..requests.min(room) {
            // SAFETY: the file and the buffer live until no request is outstanding, and no code reads the buffer.
            unsafe { ring.submission().push(&read) }.context("the ring is full")?;
            outstanding += 1;
        }
        ring.submit()?;
        next = (next + period).max(Instant::now());
        let pause = if is_over { Duration::from_millis(1) } else { next.saturating_duration_since(Instant::now()) };
        thread::sleep(pause);
    }
    Ok(())
}

/// Waits until this process has `count` submission threads, and returns the TID of the first, or 0.
fn wait_for_threads(count: usize) -> Result<u32> {
    let began = Instant::now();
    while began.elapsed() < TIMEOUT {
        let tids: Vec<u32> = fs::read_dir("/proc/self/task")?
            .flatten()
            .filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("iou-sqp-")))
            .filter_map(|task| task.file_name().to_str()?.parse().ok())
            .collect();
        if tids.len() == count {
            return Ok(tids.first().copied().unwrap_or(0));
        }
        thread::sleep(Duration::from_millis(1));
    }
    bail!("this process does not come to have {count} submission threads")
}
