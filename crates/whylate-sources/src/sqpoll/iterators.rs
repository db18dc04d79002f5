// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the BPF iterators: all submission threads, and the rings of their processes.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use libbpf_rs::{Iter, MapCore as _, MapFlags};

use super::programs::Programs;
use super::skel::types::{record_kind, ring_record, sq_thread, thread_record};
use crate::kernel::attach::{self, PlainData};

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for thread_record {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl PlainData for ring_record {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl PlainData for sq_thread {}

/// Records that the iterators wrote.
#[derive(Default)]
pub(super) struct Records {
    pub threads: Vec<thread_record>,
    /// Rings, each once.
    pub rings: Vec<ring_record>,
    /// Threads that have exited, each returned once.
    pub ended: Vec<sq_thread>,
    /// Number of threads that exited unseen.
    pub unseen: u64,
    /// Number of processes with rings that could not be read.
    pub unread: u64,
}

/// Reads all threads, or those of one process.
pub(super) fn read_all(programs: &Programs, pid: Option<u32>) -> anyhow::Result<Records> {
    let mut records = Records::default();
    let mut bytes = Vec::new();
    let mut threads = Iter::new(&programs.threads).context("cannot look at all threads")?;
    threads.read_to_end(&mut bytes).context("cannot look at all threads")?;
    records.take(&bytes)?;
    // Exits are detected for all processes; the rest is filtered.
    records.find_ended(programs)?;
    records.threads.retain(|record| pid.is_none_or(|pid| record.thread.own_tgid == pid));
    records.ended.retain(|thread| pid.is_none_or(|pid| thread.own_tgid == pid));
    let processes: BTreeSet<u32> = records.threads.iter().map(|record| record.thread.own_tgid).collect();
    for process in processes {
        match attach::iterate_over_process(programs.skeleton.progs.look_at_rings.as_fd(), process) {
            Ok(bytes) => records.take(&bytes)?,
            // The process has exited and has no rings.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) => records.unread += 1,
        }
    }
    let mut known = BTreeSet::new();
    // Prefer a descriptor to a registered ring, and the first of several.
    records.rings.sort_by_key(|ring| (ring.is_registered, ring.tgid, ring.fd));
    records.rings.retain(|ring| known.insert((ring.ring, ring.inode)));
    Ok(records)
}

impl Records {
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        while let Some(kind) = bytes.first_chunk::<4>() {
            let kind = record_kind(u32::from_ne_bytes(*kind));
            let size = match kind {
                record_kind::RECORD_THREAD => {
                    self.threads.extend(attach::read_plain::<thread_record>(bytes));
                    size_of::<thread_record>()
                }
                record_kind::RECORD_RING => {
                    self.rings.extend(attach::read_plain::<ring_record>(bytes));
                    size_of::<ring_record>()
                }
                _ => 0,
            };
            ensure!(size > 0 && size <= bytes.len(), "an iterator wrote a record that makes no sense");
            bytes = &bytes[size..];
        }
        Ok(())
    }

    fn find_ended(&mut self, programs: &Programs) -> anyhow::Result<()> {
        let map = &programs.skeleton.maps.sq_thread_by_identity;
        let present: BTreeSet<(u32, u64)> =
            self.threads.iter().map(|record| (record.thread.tid, record.thread.born_ns)).collect();
        for key in map.keys().collect::<Vec<_>>() {
            let Some(thread) =
                map.lookup(&key, MapFlags::ANY)?.and_then(|bytes| attach::read_plain::<sq_thread>(&bytes))
            else {
                continue;
            };
            let is_own = thread.own_tid != 0;
            // A thread of another PID namespace is in no read.
            if thread.ended_ns == 0 && (!is_own || present.contains(&(thread.tid, thread.born_ns)) || is_there(&thread))
            {
                continue;
            }
            if !is_own {
                // Not reported here.
            } else if thread.ended_ns > 0 {
                self.ended.push(thread);
            } else {
                self.unseen += 1;
            }
            map.delete(&key).context("cannot forget a thread that has ended")?;
        }
        self.threads.retain(|record| record.thread.ended_ns == 0 && record.thread.own_tid != 0);
        Ok(())
    }
}

/// Tests whether the thread exists: it may have started after the iterator passed.
fn is_there(thread: &sq_thread) -> bool {
    std::path::Path::new(&format!("/proc/{}/task/{}", thread.own_tgid, thread.own_tid)).exists()
}
