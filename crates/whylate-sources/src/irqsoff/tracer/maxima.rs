// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the tracer's maxima one after another: a thread reads the trace of each and resets it.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use whylate_model::ftrace::LatencyTrace;

use crate::kernel::clock;
use crate::kernel::tracefs::instance::Instance;

/// Maximum number of reads of a trace that does not match the maximum.
const ATTEMPTS: u32 = 8;
/// Additional wait before each further attempt.
const STEP: Duration = Duration::from_millis(1);
/// Bytes read from a trace at a time.
const CHUNK: usize = 64 << 10;
/// Maximum number of queued maxima: three minutes' worth.
const MAX_QUEUED: usize = 100_000;

/// The longest section between two resets.
#[derive(Clone, Debug)]
pub(super) struct Maximum {
    pub trace: LatencyTrace,
    /// Time at which the maximum was read (CLOCK_MONOTONIC), some milliseconds after the section's end.
    pub at_ns: u64,
}

/// State shared between the thread and the reader of the maxima.
#[derive(Debug, Default)]
struct Shared {
    found: Mutex<Vec<Maximum>>,
    lost: AtomicU64,
    is_over: AtomicBool,
    failure: Mutex<Option<anyhow::Error>>,
}

impl Shared {
    fn push(&self, maximum: Maximum) {
        // The CPU was offline with interrupts off, which delayed nothing.
        if maximum.trace.is_cpu_coming_online() {
            return;
        }
        let mut found = locked(&self.found);
        if found.len() < MAX_QUEUED {
            found.push(maximum);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Polls for maxima. Ends the thread, then the tracer, when dropped.
#[derive(Debug)]
pub(super) struct Maxima {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Dropped last: the instance cannot be removed while the thread has its files open.
    _instance: Instance,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Maxima {
    /// Starts to poll for sections longer than `floor_ns`.
    pub(super) fn start(instance: Instance, floor_ns: u64, every: Duration) -> Result<Self> {
        let mut files = Files::open(&instance, floor_ns)?;
        files.reset()?;
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let watch = move || {
            while !theirs.is_over.load(Ordering::Relaxed) {
                if let Err(error) = files.poll(&theirs) {
                    *locked(&theirs.failure) = Some(error);
                    return;
                }
                thread::park_timeout(every);
            }
        };
        let thread =
            thread::Builder::new().name("whylate-maxima".to_owned()).spawn(watch).context("cannot start a thread")?;
        Ok(Maxima { shared, thread: Some(thread), _instance: instance })
    }

    pub(super) fn take(&self) -> Result<Vec<Maximum>> {
        if let Some(failure) = locked(&self.shared.failure).take() {
            return Err(failure);
        }
        Ok(std::mem::take(&mut *locked(&self.shared.found)))
    }

    pub(super) fn is_empty(&self) -> bool {
        locked(&self.shared.found).is_empty()
    }

    /// Returns the maxima without a trace since the last call.
    pub(super) fn take_lost(&self) -> u64 {
        self.shared.lost.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Maxima {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

struct Files {
    maximum: File,
    trace: PathBuf,
    /// Shown by the tracer if no section was longer.
    floor_us: u64,
    /// The last trace that was reported; a reset does not remove it.
    last_trace: Vec<u8>,
}

impl Files {
    fn open(instance: &Instance, floor_ns: u64) -> Result<Self> {
        let path = instance.path("tracing_max_latency");
        let maximum = OpenOptions::new().read(true).write(true).open(&path);
        let maximum = maximum.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Files { maximum, trace: instance.path("trace"), floor_us: floor_ns / 1_000, last_trace: Vec::new() })
    }

    /// Returns the longest section since the last reset, in microseconds.
    fn maximum_us(&self) -> Result<u64> {
        let mut bytes = [0; 32];
        let length = self.maximum.read_at(&mut bytes, 0).context("cannot read tracing_max_latency")?;
        let text = String::from_utf8_lossy(&bytes[..length]);
        text.trim().parse().map_err(|_| anyhow!("tracing_max_latency is no number: {}", text.trim()))
    }

    fn reset(&mut self) -> Result<()> {
        let floor = self.floor_us.to_string();
        self.maximum.write_at(floor.as_bytes(), 0).context("cannot write to tracing_max_latency").map(|_| ())
    }

    /// Reads the trace in large chunks: for each read the kernel iterates from the start.
    fn read_trace(&self) -> std::io::Result<Vec<u8>> {
        let mut trace = File::open(&self.trace)?;
        let (mut text, mut length) = (vec![0; CHUNK], 0);
        loop {
            let read = trace.read(&mut text[length..])?;
            length += read;
            if read == 0 {
                text.truncate(length);
                return Ok(text);
            }
            text.resize(length + CHUNK, 0);
        }
    }

    /// Takes the maximum, if there is a new one, and longer ones that come while it is read.
    fn poll(&mut self, shared: &Shared) -> Result<()> {
        if self.maximum_us()? <= self.floor_us {
            return Ok(());
        }
        let (mut reported_us, mut attempt) = (0, 0);
        while attempt < ATTEMPTS {
            // The kernel sets the length before it updates the trace, and may be preempted by a hypervisor in between.
            thread::sleep(attempt * STEP);
            let text = self.read_trace().with_context(|| format!("cannot read {}", self.trace.display()))?;
            let at_ns = clock::monotonic_ns();
            // A trace that the kernel changed during the read is inconsistent.
            let trace = LatencyTrace::parse(&String::from_utf8_lossy(&text)).filter(LatencyTrace::is_whole);
            attempt += 1;
            let maximum_us = self.maximum_us()?;
            // An identical trace is a new one if its length matches the new maximum.
            let trace = trace.filter(|trace| text != self.last_trace || trace.latency_ns / 1_000 == maximum_us);
            if let Some(trace) = trace.filter(|trace| trace.latency_ns / 1_000 > reported_us) {
                reported_us = trace.latency_ns / 1_000;
                // Each longer one gets as many attempts; they come to an end.
                attempt = 0;
                shared.push(Maximum { trace, at_ns });
                self.last_trace = text;
            }
            if self.maximum_us()? == reported_us {
                return self.reset();
            }
        }
        // The kernel could not swap its buffers.
        shared.lost.fetch_add(1, Ordering::Relaxed);
        self.reset()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TRACE: &str = include_str!("../../../../whylate-model/tests/ftrace/irqsoff-6.12.txt");

    #[test]
    fn stale_trace_is_not_reported_twice_and_hides_no_shorter_one() -> Result<()> {
        let directory = tempfile::tempdir()?;
        let (maximum_path, trace_path) = (directory.path().join("maximum"), directory.path().join("trace"));
        let latency_us = LatencyTrace::parse(TRACE).context("it can be read")?.latency_ns / 1_000;
        fs::write(&maximum_path, latency_us.to_string())?;
        fs::write(&trace_path, TRACE)?;
        let maximum = OpenOptions::new().read(true).write(true).open(&maximum_path)?;
        let mut files = Files { maximum, trace: trace_path.clone(), floor_us: 0, last_trace: Vec::new() };
        let shared = Shared::default();
        files.poll(&shared)?;
        assert_eq!(locked(&shared.found).len(), 1);

        // The kernel has set the length of the next section, but not updated the trace.
        fs::write(&maximum_path, (latency_us - 1).to_string())?;
        files.poll(&shared)?;
        assert_eq!((locked(&shared.found).len(), shared.lost.load(Ordering::Relaxed)), (1, 1));

        let next = TRACE.replace(&format!("latency: {latency_us} us"), &format!("latency: {} us", latency_us - 1));
        assert_ne!(next, TRACE);
        fs::write(&maximum_path, (latency_us - 1).to_string())?;
        fs::write(&trace_path, next)?;
        files.poll(&shared)?;
        let found: Vec<u64> = locked(&shared.found).iter().map(|found| found.trace.latency_ns / 1_000).collect();
        assert_eq!((found, shared.lost.load(Ordering::Relaxed)), (vec![latency_us, latency_us - 1], 1));
        Ok(())
    }
}
