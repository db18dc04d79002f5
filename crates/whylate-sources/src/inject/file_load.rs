// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load of reads or writes of one file through a ring with a submission thread, with so many requests in flight.
//!
//! It does as fio does with `sqthread_poll=1`, so that a thread is as busy with it: the file is registered, each
//! completion is answered by a request before another is looked at, and the application watches without a pause.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use whylate_model::Histogram;

use crate::clock::monotonic_ns;

/// What direct I/O wants its memory and its offsets to be multiples of.
const ALIGNED: usize = 4096;
/// The number of the file among those that are registered with the ring.
const THE_FILE: types::Fixed = types::Fixed(0);
/// The most requests in flight.
pub const MAX_DEPTH: u32 = 4096;

/// What is written; zeroes might never get to a disk.
const FILLED_WITH: u8 = 0x5a;

/// Latencies that are counted together, as that is cheaper.
const AT_ONCE: usize = 1 << 16;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The file or block device.
    pub path: PathBuf,
    /// Write to it, and not read from it.
    pub writes: bool,
    /// Each request; a multiple of 4,096.
    pub block_bytes: u32,
    /// How many requests are in flight.
    pub depth: u32,
    /// For how long.
    pub runtime: Duration,
    /// `sq_thread_idle`.
    pub idle_ms: u32,
    /// The CPU of the submission thread.
    pub sq_cpu: Option<u32>,
    /// Have the submission thread poll the device (`IORING_SETUP_IOPOLL`).
    pub iopoll: bool,
}

/// What was done.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How long it took.
    pub duration_ns: u64,
    /// Requests carried out.
    pub requests: u64,
    /// From the submission of each to when its completion was seen.
    pub latency: Histogram,
}

/// Why a file is not to be written to, if it is not: what is there already may be dear to somebody.
pub fn refusal_to_write(path: &Path) -> Option<String> {
    let kind = match std::fs::metadata(path) {
        Err(_) => return None,
        Ok(metadata) if metadata.file_type().is_block_device() => "is a block device",
        Ok(_) => "is there already",
    };
    Some(format!("{} {kind}, and writing destroys what is in it", path.display()))
}

/// Submits requests one after another from the start of the file to its end, and from the start again.
///
/// # Errors
/// When the file cannot be used in this way, or a request fails.
pub fn run(plan: &Plan, stop: &AtomicBool, started: impl FnOnce() -> io::Result<()>) -> io::Result<Report> {
    let block = plan.block_bytes as usize;
    if block == 0 || !block.is_multiple_of(ALIGNED) || !(1..=MAX_DEPTH).contains(&plan.depth) {
        return Err(io::Error::other("a block is a multiple of 4096 bytes, and from 1 to 4096 requests are in flight"));
    }
    let flags = libc::O_DIRECT | libc::O_CLOEXEC;
    let file = OpenOptions::new().read(true).write(plan.writes).custom_flags(flags).open(&plan.path)?;
    let blocks = size_of_file(&file)? / block as u64;
    if blocks == 0 {
        return Err(io::Error::other("the file is smaller than one block"));
    }
    let mut builder = IoUring::builder();
    builder.setup_sqpoll(plan.idle_ms);
    if let Some(cpu) = plan.sq_cpu {
        builder.setup_sqpoll_cpu(cpu);
    }
    if plan.iopoll {
        builder.setup_iopoll();
    }
    // A request may be done before its place in the ring is free: the thread frees those that it took at once together.
    let ring: IoUring = builder.build(2 * plan.depth.next_power_of_two())?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    // Written to from one end to the other before the first request: pages that come one by one, when a request needs
    // them, lie apart, and a request for pages that lie apart is more work for the thread.
    let memory = vec![FILLED_WITH; block * plan.depth as usize + ALIGNED];
    let mut flight = Flight { plan, ring, memory, blocks, next: 0 };
    started()?;
    let outcome = flight.fly(stop);
    if outcome.is_err() {
        // A request may be in flight still, and the kernel writes to its memory when it is done.
        std::mem::forget(std::mem::take(&mut flight.memory));
    }
    outcome
}

fn size_of_file(file: &File) -> io::Result<u64> {
    use std::io::Seek as _;
    // Unlike its metadata, the end of a block device is known to lseek(2).
    (&mut &*file).seek(io::SeekFrom::End(0))
}

struct Flight<'a> {
    plan: &'a Plan,
    ring: IoUring,
    memory: Vec<u8>,
    blocks: u64,
    next: u64,
}

impl Flight<'_> {
    fn fly(&mut self, stop: &AtomicBool) -> io::Result<Report> {
        let depth = self.plan.depth as usize;
        let began = Instant::now();
        let mut report = Report::default();
        let mut submitted_ns = vec![0; depth];
        let mut latencies_ns: Vec<u64> = Vec::new();
        let mut in_flight = 0;
        let mut failed = None;
        for slot in 0..depth {
            self.submit(slot, &mut submitted_ns)?;
            in_flight += 1;
        }
        while in_flight > 0 {
            // One at a time; its place in the ring is free at once.
            let Some(done) = self.ring.completion().next() else { continue };
            in_flight -= 1;
            let slot = done.user_data() as usize;
            if done.result() < 0 {
                failed = Some(io::Error::from_raw_os_error(-done.result()));
                continue;
            }
            report.requests += 1;
            latencies_ns.push(monotonic_ns().saturating_sub(submitted_ns[slot]));
            if latencies_ns.len() >= AT_ONCE {
                report.latency.merge(&latencies_ns.drain(..).collect());
            }
            if failed.is_none() && !stop.load(Ordering::Relaxed) && began.elapsed() < self.plan.runtime {
                self.submit(slot, &mut submitted_ns)?;
                in_flight += 1;
            }
        }
        report.latency.merge(&latencies_ns.drain(..).collect());
        report.duration_ns = began.elapsed().as_nanos() as u64;
        failed.map_or(Ok(report), Err)
    }

    fn submit(&mut self, slot: usize, submitted_ns: &mut [u64]) -> io::Result<()> {
        let block = self.plan.block_bytes as usize;
        let start = self.memory.as_ptr().align_offset(ALIGNED) + slot * block;
        let buffer = self.memory[start..start + block].as_mut_ptr();
        let offset = self.next * block as u64;
        self.next = (self.next + 1) % self.blocks;
        let request = match self.plan.writes {
            true => opcode::Write::new(THE_FILE, buffer, block as u32).offset(offset).build(),
            false => opcode::Read::new(THE_FILE, buffer, block as u32).offset(offset).build(),
        };
        submitted_ns[slot] = monotonic_ns();
        // SAFETY: each slot has its own memory, which lives until no request is in flight, and one request at a time.
        unsafe { self.ring.submission().push(&request.user_data(slot as u64)) }
            .map_err(|_| io::Error::other("the ring is full"))?;
        // A system call only where the thread sleeps.
        self.ring.submit()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_not_written_to() -> io::Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        assert!(refusal_to_write(file.path()).is_some_and(|reason| reason.contains("is there already")));
        assert_eq!(refusal_to_write(Path::new("/no/such/file")), None);
        Ok(())
    }
}
