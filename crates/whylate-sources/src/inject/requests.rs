// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads of a file on a disk, timed by the waiting thread, while other threads keep the disk busy with writes. The file
//! can be a disk of its own, and a cgroup can throttle the reads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use whylate_model::units::format_ns;

use super::limit::Limit;
use super::{Timestamp, loop_device};
use crate::AttachError;
use crate::block::disk_of;
use crate::kernel::clock::monotonic_ns;

/// Name of the writing threads, at most 15 bytes.
pub const HOG: &str = "whylate-hog";
/// Maximum number of writing threads.
pub const MAX_HOGS: u32 = 64;
/// Maximum number of reads.
pub const MAX_READS: u64 = 10_000;
/// Maximum duration of a run.
const MAX_TOTAL_NS: u64 = 60_000_000_000;

/// Poll period of a stop request.
const POLL: Duration = Duration::from_millis(20);
/// Time limit for the writing threads to start.
const START_TIMEOUT_NS: u64 = 2_000_000_000;

/// Alignment of direct I/O's memory and offsets, in bytes.
const ALIGNED: usize = 4096;
/// Size of each read.
const READ_BYTES: usize = ALIGNED;
/// Size of each write: large, so that it takes a disk long.
const WRITE_BYTES: usize = 512 << 10;
/// Number of blocks of the file that are read; writes go to blocks beyond these.
const READ_BLOCKS: u64 = 1024;
/// Number of write slots of each writing thread.
const WRITES: u64 = 2;

/// Buffer of a read.
#[repr(align(4096))]
struct Block([u8; READ_BYTES]);

/// Buffer of a write. Zeroes might never get to a disk.
#[repr(align(4096))]
struct Large([u8; WRITE_BYTES]);

/// The load to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Directory of the file, which has no name and disappears with the process.
    pub folder: PathBuf,
    /// Number of blocks to read, one after another.
    pub reads: u64,
    /// Minimum interval from the start of one read to the start of the next.
    pub every: Duration,
    /// Number of threads that write concurrently.
    pub hogs: u32,
    /// Back a loop device by the file, and read and write the device.
    pub is_loop: bool,
    /// Limit of reads per second, set by a cgroup that the reader enters.
    pub reads_a_second: Option<u32>,
}

impl Plan {
    /// Checks the limits.
    ///
    /// # Errors
    /// Fails if the plan is empty, or would overload the machine.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.reads == 0 || self.reads > MAX_READS {
            bail!("ask for 1 to {MAX_READS} reads");
        }
        if self.hogs > MAX_HOGS {
            bail!("ask for {MAX_HOGS} writing threads at most");
        }
        let longest = format_ns(MAX_TOTAL_NS);
        if u128::from(self.reads) * self.every.as_nanos() > u128::from(MAX_TOTAL_NS) {
            bail!("that would take longer than {longest}: ask for fewer reads or a shorter interval");
        }
        if self.reads_a_second.is_some_and(|limit| self.reads > u64::from(limit) * (MAX_TOTAL_NS / 1_000_000_000)) {
            bail!("that would take longer than {longest}: ask for fewer reads or a higher limit");
        }
        Ok(())
    }
}

/// A read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Start of the system call.
    pub start: Timestamp,
    /// Duration of the system call by `CLOCK_MONOTONIC`: the request, the system call, and waiting for a CPU.
    pub took_ns: u64,
    /// Run-queue wait of the reader in the meantime; 0 if the kernel does not show it.
    pub queued_ns: u64,
}

/// Run-queue wait of a thread so far, from its `schedstat` file.
struct RunQueueWait(Option<File>);

impl RunQueueWait {
    fn of_this_thread() -> Self {
        RunQueueWait(File::open("/proc/thread-self/schedstat").ok())
    }

    fn ns(&self) -> u64 {
        let mut text = [0; 64];
        let length = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = std::str::from_utf8(&text[..length]).unwrap_or_default();
        // Time on a CPU, time runnable without one, number of run slices.
        text.split_whitespace().nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(0)
    }
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name in /dev of the disk that holds the file, or of the loop device.
    pub disk: String,
    /// Path of the cgroup that throttles the reads.
    pub cgroup: Option<String>,
    /// TID of the reader in this PID namespace.
    pub tid: u32,
    /// Each read, in order.
    pub made: Vec<Read>,
    /// Number of concurrent writes.
    pub writes: u64,
    /// Whether all reads were made.
    pub complete: bool,
}

/// Returns the size of the file in bytes, with the parts of `hogs` writing threads.
const fn bytes_of(hogs: u32) -> u64 {
    READ_BLOCKS * READ_BYTES as u64 + hogs as u64 * WRITES * WRITE_BYTES as u64
}

/// Threads that write until dropped.
struct Hogs {
    stop: Arc<AtomicBool>,
    writes: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<io::Result<()>>>,
}

impl Hogs {
    fn start(file: &File, hogs: u32) -> io::Result<Hogs> {
        let mut all = Hogs { stop: Arc::default(), writes: Arc::default(), threads: Vec::new() };
        for hog in 0..hogs {
            let (file, stop, writes) = (file.try_clone()?, Arc::clone(&all.stop), Arc::clone(&all.writes));
            let own = bytes_of(hog);
            let write = move || {
                let block = Box::new(Large([0x5a; WRITE_BYTES]));
                for number in (0..WRITES).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    file.write_all_at(&block.0, own + number * WRITE_BYTES as u64)?;
                    writes.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            };
            all.threads.push(thread::Builder::new().name(HOG.to_owned()).spawn(write)?);
        }
        Ok(all)
    }

    /// Waits until all threads write, or one has failed.
    fn wait_until_writing(&self, stop: &AtomicBool) {
        let until_ns = monotonic_ns() + START_TIMEOUT_NS;
        while self.writes.load(Ordering::Relaxed) < 2 * self.threads.len() as u64
            && !self.threads.iter().any(thread::JoinHandle::is_finished)
            && !stop.load(Ordering::Relaxed)
            && monotonic_ns() < until_ns
        {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the threads. Returns the number of writes, or the error of a thread.
    fn end(mut self) -> io::Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| io::Error::other("a writing thread failed"))??;
        }
        Ok(self.writes.load(Ordering::Relaxed))
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Sleeps until `due_ns` on `CLOCK_MONOTONIC`. Returns false if stopped before.
fn sleep_until(due_ns: u64, stop: &AtomicBool) -> bool {
    while !stop.load(Ordering::Relaxed) {
        match due_ns.checked_sub(monotonic_ns()) {
            None | Some(0) => return true,
            Some(left_ns) => thread::sleep(POLL.min(Duration::from_nanos(left_ns))),
        }
    }
    false
}

/// Finds a directory on a disk among the usual ones.
pub fn folder_on_disk() -> Option<PathBuf> {
    ["/var/tmp", "/tmp", "."].map(PathBuf::from).into_iter().find(|directory| open(directory).is_ok_and(|_| true))
}

/// Creates an unnamed file for direct I/O. Returns it with its disk.
fn open(directory: &Path) -> anyhow::Result<(File, String)> {
    let flags = libc::O_TMPFILE | libc::O_DIRECT | libc::O_CLOEXEC;
    let file = OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(directory);
    let file = file.with_context(|| {
        format!("cannot make an unnamed file for direct I/O in {} (try another --folder)", directory.display())
    })?;
    let disk = disk_of(&file)
        .with_context(|| format!("{} is not on a single local disk (try another --folder)", directory.display()))?;
    Ok((file, disk))
}

/// Reads and writes concurrently, until done or `stop` is set.
///
/// # Errors
/// Fails if the plan is invalid, the directory is on no disk, the machine or the caller's privileges do not allow a
/// loop device or a limit, or a request fails.
pub fn run(plan: &Plan, stop: &AtomicBool) -> Result<Report, AttachError> {
    plan.check()?;
    let (file, disk) = open(&plan.folder).map_err(|error| AttachError::Unsupported(format!("{error:#}")))?;
    let failed = |error: io::Error| anyhow!(error).context("cannot read or write the file");
    let (file, disk) = if plan.is_loop {
        // A disk does not grow by writes behind its end.
        file.set_len(bytes_of(plan.hogs)).map_err(failed)?;
        loop_device::over(&file)?
    } else {
        (file, disk)
    };
    let large = Box::new(Large([0x5a; WRITE_BYTES]));
    for number in 0..READ_BLOCKS * READ_BYTES as u64 / WRITE_BYTES as u64 {
        file.write_all_at(&large.0, number * WRITE_BYTES as u64).map_err(failed)?;
    }
    let mut block = Box::new(Block([0; READ_BYTES]));
    let hogs = Hogs::start(&file, plan.hogs).context("cannot start a writing thread")?;
    hogs.wait_until_writing(stop);
    // With cgroup v1 the writing threads stay outside; a limit of reads does not apply to them anyway.
    let limit = plan.reads_a_second.map(|reads| Limit::enter(&disk, reads)).transpose()?;
    let mut made = Vec::new();
    let waited = RunQueueWait::of_this_thread();
    let until_ns = monotonic_ns() + MAX_TOTAL_NS;
    for number in 0..plan.reads {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let queued_ns = waited.ns();
        let began_ns = monotonic_ns();
        // Offsets far apart are not merged.
        let at = number * 769 % READ_BLOCKS * READ_BYTES as u64;
        file.read_exact_at(&mut block.0, at).map_err(failed)?;
        let took_ns = monotonic_ns() - began_ns;
        let queued_ns = (waited.ns().saturating_sub(queued_ns)).min(took_ns);
        made.push(Read { start: Timestamp::at(began_ns), took_ns, queued_ns });
        let due_ns = began_ns + plan.every.as_nanos() as u64;
        if number + 1 == plan.reads || monotonic_ns() >= until_ns || !sleep_until(due_ns.min(until_ns), stop) {
            break;
        }
    }
    let cgroup = limit.map(|limit| limit.path.clone());
    let writes = hogs.end().map_err(failed)?;
    let tid = rustix::thread::gettid().as_raw_pid() as u32;
    Ok(Report { disk, cgroup, tid, complete: made.len() as u64 == plan.reads, made, writes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_plans_out_of_limits() {
        let plan = Plan {
            folder: "/".into(),
            reads: 100,
            every: Duration::from_millis(10),
            hogs: 8,
            reads_a_second: Some(2),
            ..Plan::default()
        };
        assert!(plan.check().is_ok());
        assert!(Plan { reads: 0, ..plan.clone() }.check().is_err());
        assert!(Plan { hogs: MAX_HOGS + 1, ..plan.clone() }.check().is_err());
        assert!(Plan { reads_a_second: Some(1), ..plan.clone() }.check().is_err());
        assert!(Plan { every: Duration::from_secs(1), ..plan }.check().is_err());
    }
}
