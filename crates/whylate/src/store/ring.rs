// SPDX-License-Identifier: MIT OR Apache-2.0
//! The flight recorder: the last minutes in memory, written to a file when something was late.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use whylate_model::recording::{Header, Index};
use whylate_sources::kernel::clock;

use super::destination::{Store, Trigger};
use super::directory::DirectoryStore;

/// Maximum memory for frames, whatever time span they are to cover.
const MAX_BYTES: usize = 64 << 20;
/// Maximum time span that a file has after its trigger, in multiples of `after_ns`, however often it is triggered
/// again.
const MAX_AFTER: u64 = 10;
const HOUR_NS: u64 = 3_600_000_000_000;

/// Condition for writing a file, and the span that it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct When {
    /// Time that the file covers before the trigger.
    pub before_ns: u64,
    /// Time that the file covers after the trigger.
    pub after_ns: u64,
    /// Minimum latency of a late event that triggers a file. `None` for signals only.
    pub late_from_ns: Option<u64>,
    /// Maximum number of files per hour, without those that were requested.
    pub files_an_hour: u32,
}

/// Keeps frames in memory and writes them to a file when triggered.
#[derive(Debug)]
pub struct RingStore {
    when: When,
    directory: DirectoryStore,
    header: Header,
    frames: VecDeque<(Index, Vec<u8>)>,
    kept_bytes: usize,
    current: Vec<u8>,
    is_triggered: bool,
    /// Whether a file was requested, which the maximum does not limit.
    is_requested: bool,
    /// End of the current file, on CLOCK_MONOTONIC.
    writes_until_ns: Option<u64>,
    /// Start time of the latest file.
    began_ns: u64,
    /// Start times of the files of the last hour that were not requested.
    started_ns: VecDeque<u64>,
    /// Whether it was said that there were too many files, since the last one.
    has_said_limit: bool,
    /// Reason why something was not written, until `take_problem`.
    problem: Option<String>,
}

impl RingStore {
    pub fn new(when: When, directory: DirectoryStore) -> Self {
        RingStore {
            when,
            directory,
            header: Header::default(),
            frames: VecDeque::new(),
            kept_bytes: 0,
            current: Vec::new(),
            is_triggered: false,
            is_requested: false,
            began_ns: 0,
            has_said_limit: false,
            writes_until_ns: None,
            started_ns: VecDeque::new(),
            problem: None,
        }
    }

    /// Returns whether another file may be started now.
    fn may_start_file(&mut self, now_ns: u64) -> bool {
        while self.started_ns.front().is_some_and(|&started_ns| now_ns.saturating_sub(started_ns) >= HOUR_NS) {
            self.started_ns.pop_front();
        }
        self.started_ns.len() < self.when.files_an_hour as usize
    }

    fn push_frame(&mut self, index: Index, bytes: Vec<u8>) {
        self.kept_bytes += bytes.len();
        self.frames.push_back((index, bytes));
        let oldest_ns = index.last_unix_ns.saturating_sub(self.when.before_ns);
        let is_too_much = |ring: &Self| ring.kept_bytes > MAX_BYTES && ring.frames.len() > 1;
        while is_too_much(self) || self.frames.front().is_some_and(|(of, _)| of.last_unix_ns < oldest_ns) {
            let Some((_, bytes)) = self.frames.pop_front() else { break };
            self.kept_bytes -= bytes.len();
        }
    }

    fn write_frame(&mut self, index: &Index, bytes: &[u8]) -> io::Result<()> {
        self.directory.begin_frame(&self.header)?;
        self.directory.write(bytes)?;
        self.directory.end_frame(index)
    }

    fn write_frames(&mut self) -> io::Result<()> {
        if !self.directory.has_room()? {
            return Err(Errno::NOSPC.into());
        }
        if let Some((index, _)) = self.frames.front() {
            self.header.start_unix_ns = index.first_unix_ns;
        }
        while let Some((index, bytes)) = self.frames.pop_front() {
            self.kept_bytes -= bytes.len();
            if let Err(error) = self.write_frame(&index, &bytes) {
                self.directory.discard_frame();
                self.kept_bytes += bytes.len();
                self.frames.push_front((index, bytes));
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Store for RingStore {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        self.header = header.clone();
        self.current.clear();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.current.extend_from_slice(bytes);
        Ok(())
    }

    fn end_frame(&mut self, index: &Index) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.current);
        self.push_frame(*index, bytes);
        let now_ns = clock::monotonic_ns();
        if std::mem::take(&mut self.is_triggered) {
            let until_ns = now_ns.saturating_add(self.when.after_ns);
            let is_requested = std::mem::take(&mut self.is_requested);
            let may_start_file = self.may_start_file(now_ns);
            match &mut self.writes_until_ns {
                Some(writes_until_ns) => {
                    let max_ns = self.began_ns.saturating_add(self.when.after_ns.saturating_mul(MAX_AFTER));
                    *writes_until_ns = until_ns.min(max_ns);
                }
                None if is_requested || may_start_file => {
                    if !is_requested {
                        self.started_ns.push_back(now_ns);
                        self.has_said_limit = false;
                    }
                    (self.began_ns, self.writes_until_ns) = (now_ns, Some(until_ns));
                }
                // It is said once.
                None if self.has_said_limit => {}
                None => {
                    let max = self.when.files_an_hour;
                    let problem = "no file is written until one is older than an hour: there were";
                    self.problem = Some(format!("{problem} {max} (--files-per-hour); requests are still granted"));
                    self.has_said_limit = true;
                }
            }
        }
        if let Some(until_ns) = self.writes_until_ns {
            // Frames that the disk does not take stay in memory and are retried with the next frame.
            let written = self.write_frames();
            let is_over = now_ns >= until_ns && written.is_ok();
            if let Err(error) = written.and_then(|()| if is_over { self.directory.end_file() } else { Ok(()) }) {
                self.problem = Some(format!("cannot write what is kept in memory: {error}"));
            }
            if is_over {
                self.writes_until_ns = None;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.directory.finish()
    }

    fn discard_frame(&mut self) {
        // The kept frames are written with the next frame that succeeds.
        self.current.clear();
    }

    fn trigger(&mut self, by: Trigger) -> bool {
        let is_stated = match by {
            Trigger::Late(latency_ns) => {
                !self.is_triggered && self.when.late_from_ns.is_some_and(|from_ns| latency_ns >= from_ns)
            }
            Trigger::Pressure | Trigger::Request => true,
        };
        self.is_triggered |= is_stated;
        self.is_requested |= by == Trigger::Request;
        let may_start = || self.is_requested || self.writes_until_ns.is_some();
        is_stated && (may_start() || self.may_start_file(clock::monotonic_ns()))
    }

    fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    fn wants_end(&self) -> bool {
        self.is_triggered && self.writes_until_ns.is_none()
    }

    fn bytes(&self) -> u64 {
        self.directory.bytes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.directory.files()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use whylate_model::recording::{Frame, Reader};

    use super::*;
    use crate::store::directory::Retention;

    const SECOND_NS: u64 = 1_000_000_000;

    fn write_frame(ring: &mut RingStore, second: u64) {
        let line = format!(
            "{{\"line\":\"gap\",\"start\":\"1970-01-01T00:00:{second:02}Z\",\"duration_ns\":0,\"reason\":\"x\"}}\n"
        );
        let mut frame = Frame::new().expect("memory");
        frame.add(line.as_bytes(), Some((second * SECOND_NS, second * SECOND_NS))).expect("memory");
        let (bytes, index) = frame.finish().expect("memory");
        let header = Header { recording: 1, schema: 1, ..Header::default() };
        ring.begin_frame(&header).expect("started");
        ring.write(&bytes).expect("written");
        ring.end_frame(&index).expect("ended");
    }

    fn frames_of(path: &PathBuf) -> usize {
        let mut reader = Reader::new(File::open(path).expect("there")).expect("a recording");
        let mut lines = 0;
        while reader.next_line().expect("it is read").is_some() {
            lines += 1;
        }
        // Without the lines of the clocks and of the end.
        lines - 2
    }

    #[test]
    fn late_event_writes_the_last_seconds() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = DirectoryStore::open(directory.path(), Retention::default()).expect("made");
        let late_from_ns = Some(100);
        let when = When { before_ns: 10 * SECOND_NS, after_ns: 0, late_from_ns, files_an_hour: 2 };
        let mut ring = RingStore::new(when, store);
        (0..30).for_each(|second| write_frame(&mut ring, second));
        let late = Trigger::Late;
        assert!(!ring.trigger(late(99)) && !ring.wants_end() && ring.files().is_empty());
        assert!(ring.trigger(late(100)) && ring.wants_end());
        let is_stated = !ring.trigger(late(100)) && ring.trigger(Trigger::Pressure);
        assert!(is_stated, "the first late event and each time of pressure are stated");
        write_frame(&mut ring, 30);
        assert_eq!(ring.files().len(), 1);
        assert_eq!(frames_of(&ring.files()[0]), 11, "of the seconds 20 to 30");
        // Files do not overlap, and their number per hour is limited.
        write_frame(&mut ring, 31);
        ring.trigger(Trigger::Pressure);
        write_frame(&mut ring, 32);
        assert_eq!((ring.files().len(), frames_of(&ring.files()[1])), (2, 2));
        assert!(!ring.trigger(Trigger::Pressure));
        write_frame(&mut ring, 33);
        assert_eq!(ring.files().len(), 2);
        assert!(ring.take_problem().is_some_and(|problem| problem.contains("there were 2 (--files-per-hour)")));
        ring.trigger(Trigger::Pressure);
        write_frame(&mut ring, 34);
        assert_eq!((ring.files().len(), ring.take_problem()), (2, None), "it is said once");
        assert!(ring.trigger(Trigger::Request), "a request is always granted");
        write_frame(&mut ring, 35);
        assert_eq!(ring.files().len(), 3);
    }
}
