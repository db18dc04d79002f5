// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading the iterators: all submission threads, and the rings of their processes.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use libbpf_rs::{Iter, MapCore as _, MapFlags};

use super::programs::Programs;
use super::skel::types::{record_kind, ring_record, sq_thread, thread_record};
use crate::attach::{self, PlainData};

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for thread_record {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl PlainData for ring_record {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl PlainData for sq_thread {}

/// What the iterators wrote.
#[derive(Default)]
pub(super) struct Records {
    pub threads: Vec<thread_record>,
    /// Each ring once.
    pub rings: Vec<ring_record>,
    /// Threads that are gone, each told once.
    pub ended: Vec<sq_thread>,
    /// Threads that are gone without having been seen ending.
    pub unseen: u64,
    /// Processes whose rings could not be looked at.
    pub unread: u64,
}

/// Looks at all threads, or at those of one process.
pub(super) fn look(programs: &Programs, pid: Option<u32>) -> anyhow::Result<Records> {
    let mut records = Records::default();
    let mut bytes = Vec::new();
    let mut threads = Iter::new(&programs.threads).context("cannot look at all threads")?;
    threads.read_to_end(&mut bytes).context("cannot look at all threads")?;
    records.take(&bytes)?;
    // Which of them are there counts for all processes; the rest is of those that are asked for.
    records.find_ended(programs)?;
    records.threads.retain(|record| pid.is_none_or(|pid| record.thread.own_tgid == pid));
    records.ended.retain(|thread| pid.is_none_or(|pid| thread.own_tgid == pid));
    let processes: BTreeSet<u32> = records.threads.iter().map(|record| record.thread.own_tgid).collect();
    for process in processes {
        match attach::iterate_over_process(programs.skeleton.progs.look_at_rings.as_fd(), process) {
            Ok(bytes) => records.take(&bytes)?,
            // One that is gone meanwhile has no rings.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(_) => records.unread += 1,
        }
    }
    let mut known = BTreeSet::new();
    // A descriptor rather than a registered ring, and of several the first.
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
        let there: BTreeSet<(u32, u64)> =
            self.threads.iter().map(|record| (record.thread.tid, record.thread.born_ns)).collect();
        for key in map.keys().collect::<Vec<_>>() {
            let Some(thread) =
                map.lookup(&key, MapFlags::ANY)?.and_then(|bytes| attach::read_plain::<sq_thread>(&bytes))
            else {
                continue;
            };
            let is_own = thread.own_tid != 0;
            // One of another namespace is in no look.
            if thread.ended_ns == 0 && (!is_own || there.contains(&(thread.tid, thread.born_ns)) || is_there(&thread)) {
                continue;
            }
            if !is_own {
                // Nobody asks for it.
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

/// It may have come after the iterator went by.
fn is_there(thread: &sq_thread) -> bool {
    std::path::Path::new(&format!("/proc/{}/task/{}", thread.own_tgid, thread.own_tid)).exists()
}
