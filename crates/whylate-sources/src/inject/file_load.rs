// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load of reads or writes of one file through a ring with a submission thread, with a given queue depth.
//!
//! Reproduces fio's load with `sqthread_poll=1`, so that the thread's load is the same: the file is registered, each
//! completion is answered by a request before the next is reaped, and the application polls without a pause.
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

use crate::kernel::clock::monotonic_ns;

/// Alignment of direct I/O's memory and offsets, in bytes.
const ALIGNED: usize = 4096;
/// Index of the file among those registered with the ring.
const FILE: types::Fixed = types::Fixed(0);
/// Maximum number of requests in flight.
pub const MAX_DEPTH: u32 = 4096;

/// Byte that is written; zeroes might never get to a disk.
const FILLED_WITH: u8 = 0x5a;

/// Number of latencies that are added to the histogram at a time, as that is cheaper.
const AT_ONCE: usize = 1 << 16;

/// The load to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The file or block device.
    pub path: PathBuf,
    /// Write to the file instead of reading it.
    pub writes: bool,
    /// Size of each request in bytes; a multiple of 4,096.
    pub block_bytes: u32,
    /// Number of requests in flight.
    pub depth: u32,
    /// Duration of the run.
    pub runtime: Duration,
    /// `sq_thread_idle`.
    pub idle_ms: u32,
    /// The CPU of the submission thread.
    pub sq_cpu: Option<u32>,
    /// Have the submission thread poll the device (`IORING_SETUP_IOPOLL`).
    pub iopoll: bool,
}

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Duration of the run, in nanoseconds.
    pub duration_ns: u64,
    /// Number of completed requests.
    pub requests: u64,
    /// Time from the submission of each request until its completion was reaped.
    pub latency: Histogram,
}

/// Returns why a file must not be written to, if so: existing data may be valuable.
pub fn refusal_to_write(path: &Path) -> Option<String> {
    let kind = match std::fs::metadata(path) {
        Err(_) => return None,
        Ok(metadata) if metadata.file_type().is_block_device() => "is a block device",
        Ok(_) => "is there already",
    };
    Some(format!("{} {kind}, and writing destroys what is in it", path.display()))
}

/// Submits requests sequentially from the start of the file to its end, and from the start again.
///
/// # Errors
/// Fails if the file cannot be used so, or a request fails.
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
    // A request may complete before its entry in the ring is free: the thread frees all entries that it took together.
    let ring: IoUring = builder.build(2 * plan.depth.next_power_of_two())?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    // Written sequentially before the first request: pages faulted in one by one by requests are scattered, and a
    // request for scattered pages is more work for the thread.
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
    // Unlike metadata, lseek(2) knows the end of a block device.
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
            // One at a time; its entry in the ring is free at once.
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
            true => opcode::Write::new(FILE, buffer, block as u32).offset(offset).build(),
            false => opcode::Read::new(FILE, buffer, block as u32).offset(offset).build(),
        };
        submitted_ns[slot] = monotonic_ns();
        // SAFETY: each slot has its own memory, which lives until no request is in flight, and one request at a time.
        unsafe { self.ring.submission().push(&request.user_data(slot as u64)) }
            .map_err(|_| io::Error::other("the ring is full"))?;
        // A system call only if the thread sleeps.
        self.ring.submit()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_to_write_existing_file() -> io::Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        assert!(refusal_to_write(file.path()).is_some_and(|reason| reason.contains("is there already")));
        assert_eq!(refusal_to_write(Path::new("/no/such/file")), None);
        Ok(())
    }
}
