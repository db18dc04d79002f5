// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the perf map of one process, part by part.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::code::CompiledCode;
use crate::kernel::clock;
use crate::kernel::first_thread;
use crate::kernel::proc;
use crate::offcpu::remote_files::RemoteFiles;

/// The bytes that one turn reads.
const PART_BYTES: u64 = 1 << 20;
/// The bytes of a file that are read at most, at its end.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The memory that the names of one process may take, some 100,000 functions.
const MAX_BYTES: usize = 8 << 20;
/// The last bytes that were read, by which a rewritten file differs from an appended one.
const TAIL_BYTES: usize = 64;
/// The interval between copies of a file on a file system that may not answer.
const COPY_AGAIN: Duration = Duration::from_secs(10);

/// Identifies a process among all that use its PID in turn.
pub(super) struct Identity {
    pub(super) user: u32,
    /// The start time in clock ticks since boot.
    started: u64,
    /// The PID in its own PID namespace, which is in the name of its perf map.
    own_pid: String,
}

impl Identity {
    pub(super) fn read(tgid: u32) -> Option<Self> {
        let started = started(tgid)?;
        let status = proc::text(format!("/proc/{tgid}/status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let user = field("Uid:")?.split_whitespace().next()?.parse().ok()?;
        let own_pid = field("NSpid:")?.split_whitespace().last()?.to_owned();
        Some(Identity { user, started, own_pid })
    }
}

/// Reads the start time in clock ticks since boot, field 22 of proc_pid_stat(5). The comm before it may contain
/// parentheses.
fn started(tgid: u32) -> Option<u64> {
    let stat = proc::text(format!("/proc/{tgid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The outcome of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) has_changed: bool,
    pub(super) has_more: bool,
    /// Lines were skipped, or names dropped.
    pub(super) has_lost: bool,
}

#[derive(Default)]
pub(super) struct List {
    code: CompiledCode,
    /// The open file, until it is read to its end.
    file: Option<File>,
    /// Device and inode of the file.
    inode: (u64, u64),
    /// Length and mtime of the file when it was last read to its end.
    seen: Option<(u64, i64, i64)>,
    read_to: u64,
    /// The last [`TAIL_BYTES`] that were read.
    tail: Vec<u8>,
    /// Whether the rest of a line is to be skipped.
    is_within_line: bool,
    not_before: Option<Instant>,
}

impl List {
    pub(super) fn code(&self) -> Arc<CompiledCode> {
        Arc::new(self.code.clone())
    }

    pub(super) fn bytes(&self) -> usize {
        self.code.bytes()
    }

    pub(super) fn drop_older(&mut self) {
        self.code.drop_older();
    }

    /// Reads the file again, and keeps the names that are there.
    pub(super) fn reset(&mut self) {
        (self.seen, self.read_to, self.is_within_line) = (None, 0, false);
        self.tail.clear();
    }

    /// Reads the next part of the file.
    pub(super) fn read(&mut self, tgid: u32, process: &Identity, files: &mut RemoteFiles) -> Turn {
        if self.file.is_none() && self.not_before.is_some_and(|not_before| Instant::now() < not_before) {
            return Turn::default();
        }
        let turn = self.read_part(tgid, process, files).unwrap_or_default();
        if !turn.has_more {
            self.file = None;
        }
        turn
    }

    fn read_part(&mut self, tgid: u32, process: &Identity, files: &mut RemoteFiles) -> io::Result<Turn> {
        let file = match self.file.take() {
            Some(file) => file,
            None => {
                let shown = first_thread::shown_as(tgid);
                let file = files.open_temporary(shown, &format!("perf-{}.map", process.own_pid))?;
                // The PID may have been reused.
                if started(tgid) != Some(process.started) {
                    return Ok(Turn::default());
                }
                file
            }
        };
        let about = file.metadata()?;
        if !about.is_file() || !is_by(&about, process) {
            return Ok(Turn::default());
        }
        let now = (about.len(), about.mtime(), about.mtime_nsec());
        let inode = (about.dev(), about.ino());
        if self.seen == Some(now) && self.inode == inode {
            return Ok(Turn::default());
        }
        let mut turn = Turn::default();
        if self.inode != inode || about.len() < self.read_to || self.is_rewritten(&file, now) {
            turn.has_changed = self.read_to > 0;
            *self = List { inode, ..List::default() };
        }
        if about.nlink() == 0 {
            self.not_before = Some(Instant::now() + COPY_AGAIN);
        }
        if about.len() - self.read_to > MAX_FILE_BYTES {
            (self.read_to, self.is_within_line) = (about.len() - MAX_FILE_BYTES, true);
            turn.has_lost = true;
        }
        let mut part = vec![0; PART_BYTES.min(about.len() - self.read_to) as usize];
        let read = file.read_at(&mut part, self.read_to)?;
        // A short read ends at the end of the file.
        let is_at_end = self.read_to + read as u64 >= about.len() || read < part.len();
        part.truncate(read);
        let taken = self.take(&part, is_at_end);
        turn.has_changed |= taken > 0 || is_at_end && !part.is_empty();
        self.read_to += taken as u64;
        if taken > 0 {
            self.tail = part[taken.saturating_sub(TAIL_BYTES)..taken].to_vec();
        }
        while self.code.bytes() > MAX_BYTES {
            self.code.drop_older();
            turn.has_lost = true;
        }
        if is_at_end {
            self.seen = Some(now);
        } else {
            (turn.has_more, self.file) = (true, Some(file));
        }
        Ok(turn)
    }

    /// Adds the lines of a part. Returns the bytes that need not be read again: the last line may be incomplete.
    fn take(&mut self, part: &[u8], is_at_end: bool) -> usize {
        let end_of_lines = part.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
        let begin = match part.iter().position(|&byte| byte == b'\n') {
            Some(at) if self.is_within_line => at + 1,
            None if self.is_within_line => return part.len(),
            _ => 0,
        };
        match end_of_lines {
            Some(end) => {
                self.is_within_line = false;
                self.code.add(&part[begin..if is_at_end { part.len() } else { end }]);
                end
            }
            None => {
                self.code.add(part);
                // The name in a line that is longer than a part is cut.
                self.is_within_line = !is_at_end && part.len() as u64 == PART_BYTES;
                if self.is_within_line { part.len() } else { 0 }
            }
        }
    }

    /// Returns whether the file was rewritten since it was last read.
    fn is_rewritten(&self, file: &File, (length, ..): (u64, i64, i64)) -> bool {
        let mut tail = vec![0; self.tail.len()];
        let tail_at = self.read_to.saturating_sub(tail.len() as u64);
        // A newer mtime without a new length is an overwrite.
        self.seen.is_some_and(|(seen_length, ..)| seen_length == length)
            || file.read_exact_at(&mut tail, tail_at).is_err()
            || tail != self.tail
    }
}

/// Whether the process may have written the file. A file of another user is ignored, and so is a file that an earlier
/// process with the same PID left behind.
fn is_by(about: &Metadata, process: &Identity) -> bool {
    // Start times are rounded, and NTP slews the clock.
    const ROUNDED_S: i64 = 2;
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let started_s = clock::boot_unix_ns() / 1_000_000_000 + process.started / ticks;
    let is_left = about.mtime() + ROUNDED_S < started_s as i64;
    (about.uid() == process.user || about.uid() == 0) && !is_left
}

#[cfg(test)]
mod tests;
