// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads blktrace events from the kernel's `blk` tracer: records as in blktrace's own files (linux/blktrace_api.h), but
//! without its buffers in debugfs, which a locked-down kernel does not open.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use whylate_sources::kernel::tracefs;

use crate::support::machine::real_time::patching;

/// Buffer size per CPU in KiB: room for some ten thousand requests.
const KIB_OF_CPU: &str = "16384";
/// Bytes of a record without the payload that follows.
const LENGTH: usize = 48;
const MAGIC: u32 = 0x6561_7400;
const READS: u32 = 1 << 16;
const WRITES: u32 = 1 << 17;

/// A request, with the timestamps of its events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traced {
    /// TID of the thread that submitted its first bio.
    pub tid: u32,
    pub sector: u64,
    pub writes: bool,
    pub queued_ns: u64,
    pub issued_ns: u64,
    pub completed_ns: u64,
    /// TID of the thread on the CPU at the completion, which an interrupt mostly reports.
    pub interrupted: u32,
}

/// The tracer, running on one disk. The kernel has only one instance, so dropping this restores its settings.
pub struct BlkTracer {
    tracefs: PathBuf,
    enable: PathBuf,
    buffer_kib: String,
}

impl BlkTracer {
    pub fn start(disk: &str) -> Result<Option<BlkTracer>> {
        let tracefs = tracefs::find()?.to_owned();
        let enable = Path::new("/sys/block").join(disk).join("trace/enable");
        let tracers = fs::read_to_string(tracefs.join("available_tracers"))?;
        if !enable.exists() || !tracers.split_whitespace().any(|tracer| tracer == "blk") {
            println!("skipped: this kernel has no tracer of disks");
            return Ok(None);
        }
        if fs::read_to_string(tracefs.join("current_tracer"))?.trim() != "nop" {
            println!("skipped: somebody else uses the kernel's one tracer");
            return Ok(None);
        }
        // `1408`, or `7 (expanded: 1408)` if the trace was not used since boot.
        let size = fs::read_to_string(tracefs.join("buffer_size_kb"))?;
        let size = size.split(|letter: char| !letter.is_ascii_digit()).rfind(|word| !word.is_empty());
        let buffer_kib = size.context("the trace has no size")?.to_owned();
        let tracer = BlkTracer { tracefs, enable, buffer_kib };
        patching(|| {
            tracer.set("buffer_size_kb", KIB_OF_CPU)?;
            tracer.set("trace_clock", "mono")?;
            tracer.set("current_tracer", "blk")?;
            tracer.set("options/bin", "1")?;
            tracer.set("options/context-info", "0")?;
            fs::write(&tracer.enable, "1").context("the disk cannot be traced")
        })?;
        Ok(Some(tracer))
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        fs::write(self.tracefs.join(file), value).with_context(|| format!("cannot write {file}"))
    }

    /// Returns all requests that were both submitted and completed since the start. Fails if events were lost.
    pub fn end(self) -> Result<Vec<Traced>> {
        patching(|| fs::write(&self.enable, "0"))?;
        for cpu in fs::read_dir(self.tracefs.join("per_cpu"))? {
            let stats = fs::read_to_string(cpu?.path().join("stats"))?;
            let lost = stats.lines().filter(|line| line.contains("overrun") || line.starts_with("dropped"));
            ensure!(lost.clone().all(|line| line.ends_with(": 0")), "the trace is not whole: {stats}");
        }
        let mut pipe = OpenOptions::new();
        let mut pipe = pipe.read(true).custom_flags(libc::O_NONBLOCK).open(self.tracefs.join("trace_pipe"))?;
        let (mut bytes, mut page) = (Vec::new(), [0; 4096]);
        loop {
            match pipe.read(&mut page) {
                Ok(0) => break,
                Ok(count) => bytes.extend_from_slice(&page[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        requests(&bytes)
    }
}

impl Drop for BlkTracer {
    fn drop(&mut self) {
        patching(|| {
            let _ = fs::write(&self.enable, "0");
            for (file, value) in [
                ("options/context-info", "1"),
                ("options/bin", "0"),
                ("current_tracer", "nop"),
                ("trace_clock", "local"),
                ("buffer_size_kb", &*self.buffer_kib),
            ] {
                let _ = self.set(file, value);
            }
        });
    }
}

/// Pairs the events of each request by sector and direction: only one is in flight at a time.
fn requests(mut bytes: &[u8]) -> Result<Vec<Traced>> {
    let mut open: HashMap<(u64, bool), Traced> = HashMap::new();
    let mut all = Vec::new();
    while let Some((event, rest)) = bytes.split_at_checked(LENGTH) {
        let word = |at: usize| u32::from_ne_bytes([event[at], event[at + 1], event[at + 2], event[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | (u64::from(word(at + 4)) << 32);
        let (magic, at_ns, sector, action, tid) = (word(0), long(8), long(16), word(28), word(32));
        ensure!(magic & !0xff == MAGIC, "{magic:x} begins no event");
        let follows = usize::from(u16::from_ne_bytes([event[46], event[47]]));
        bytes = rest.get(follows..).context("the last event is not whole")?;
        let writes = action & WRITES != 0;
        if !writes && action & READS == 0 {
            continue;
        }
        let key = (sector, writes);
        match action & 0xff {
            // Q: a bio was queued.
            1 => {
                let queued = Traced { tid, sector, writes, queued_ns: at_ns, ..Traced::default() };
                open.insert(key, queued);
            }
            // M: back merge into another request.
            2 => {
                open.remove(&key);
            }
            // F: front merge into another request.
            3 => {
                open.remove(&key);
                let after = sector + u64::from(word(24)) / 512;
                if let Some(request) = open.remove(&(after, writes)) {
                    open.insert(key, Traced { sector, ..request });
                }
            }
            // D: issued to the device, possibly again after a requeue.
            7 => {
                open.entry(key).and_modify(|request| request.issued_ns = at_ns);
            }
            // C: completed. Requests queued before the trace began are left out.
            8 => {
                all.extend(open.remove(&key).map(|request| Traced { completed_ns: at_ns, interrupted: tid, ..request }))
            }
            _ => {}
        }
    }
    Ok(all)
}
