// SPDX-License-Identifier: MIT OR Apache-2.0
//! The flight recorder: the last minutes in memory, and a file of them when something was late.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use whylate_model::recording::{Header, Index};
use whylate_sources::clock;

use super::folder::FolderStore;
use super::store::Store;

/// What is kept takes no more memory, however long it is to be.
const MOST_BYTES: usize = 64 << 20;
/// A file has no more of what follows than that many times what it was asked for, however often something is late.
const MOST_AFTER: u64 = 10;
const HOUR_NS: u64 = 3_600_000_000_000;

/// When a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct When {
    /// How much of the past it has.
    pub before_ns: u64,
    /// How much of what follows.
    pub after_ns: u64,
    /// From which latency on a late event is a reason; `None` for a signal alone.
    pub late_from_ns: Option<u64>,
    /// No more files in an hour.
    pub files_an_hour: u32,
}

/// Keeps frames, and writes them when there is a reason to.
#[derive(Debug)]
pub struct RingStore {
    when: When,
    folder: FolderStore,
    header: Header,
    frames: VecDeque<(Index, Vec<u8>)>,
    kept_bytes: usize,
    current: Vec<u8>,
    has_reason: bool,
    /// A file is written until then, on CLOCK_MONOTONIC.
    writes_until_ns: Option<u64>,
    /// When the files of the last hour were begun.
    begun_ns: VecDeque<u64>,
    /// Why something was not written, until that is told.
    problem: Option<String>,
}

impl RingStore {
    pub fn new(when: When, folder: FolderStore) -> Self {
        RingStore {
            when,
            folder,
            header: Header::default(),
            frames: VecDeque::new(),
            kept_bytes: 0,
            current: Vec::new(),
            has_reason: false,
            writes_until_ns: None,
            begun_ns: VecDeque::new(),
            problem: None,
        }
    }

    /// Whether another file may be begun now.
    fn may_begin(&mut self, now_ns: u64) -> bool {
        while self.begun_ns.front().is_some_and(|&begun_ns| now_ns.saturating_sub(begun_ns) >= HOUR_NS) {
            self.begun_ns.pop_front();
        }
        self.begun_ns.len() < self.when.files_an_hour as usize
    }

    fn keep(&mut self, index: Index, bytes: Vec<u8>) {
        self.kept_bytes += bytes.len();
        self.frames.push_back((index, bytes));
        let oldest_ns = index.last_unix_ns.saturating_sub(self.when.before_ns);
        let is_too_much = |ring: &Self| ring.kept_bytes > MOST_BYTES && ring.frames.len() > 1;
        while is_too_much(self) || self.frames.front().is_some_and(|(of, _)| of.last_unix_ns < oldest_ns) {
            let Some((_, bytes)) = self.frames.pop_front() else { break };
            self.kept_bytes -= bytes.len();
        }
    }

    fn put(&mut self, index: &Index, bytes: &[u8]) -> io::Result<()> {
        self.folder.begin_frame(&self.header)?;
        self.folder.write(bytes)?;
        self.folder.end_frame(index)
    }

    fn put_all(&mut self) -> io::Result<()> {
        if !self.folder.has_room()? {
            return Err(Errno::NOSPC.into());
        }
        if let Some((index, _)) = self.frames.front() {
            self.header.start_unix_ns = index.first_unix_ns;
        }
        while let Some((index, bytes)) = self.frames.pop_front() {
            self.kept_bytes -= bytes.len();
            if let Err(error) = self.put(&index, &bytes) {
                self.folder.give_up_frame();
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
        self.keep(*index, bytes);
        let now_ns = clock::monotonic_ns();
        if std::mem::take(&mut self.has_reason) {
            let until_ns = now_ns.saturating_add(self.when.after_ns);
            let may_begin = self.may_begin(now_ns);
            match &mut self.writes_until_ns {
                Some(writes_until_ns) => {
                    let begun_ns = self.begun_ns.back().copied().unwrap_or(now_ns);
                    let most_ns = begun_ns.saturating_add(self.when.after_ns.saturating_mul(MOST_AFTER));
                    *writes_until_ns = until_ns.min(most_ns);
                }
                None if may_begin => {
                    self.begun_ns.push_back(now_ns);
                    self.writes_until_ns = Some(until_ns);
                }
                None => {
                    let most = self.when.files_an_hour;
                    self.problem =
                        Some(format!("no file was written: there were {most} in an hour (--files-per-hour)"));
                }
            }
        }
        if let Some(until_ns) = self.writes_until_ns {
            // Memory keeps what the disk does not take, and it is tried again with the next frame.
            let written = self.put_all();
            let is_over = now_ns >= until_ns && written.is_ok();
            if let Err(error) = written.and_then(|()| if is_over { self.folder.end_file() } else { Ok(()) }) {
                self.problem = Some(format!("cannot write what is kept in memory: {error}"));
            }
            if is_over {
                self.writes_until_ns = None;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.folder.finish()
    }

    fn give_up_frame(&mut self) {
        // What was kept is written with the next frame that can be.
        self.current.clear();
    }

    fn noticed(&mut self, latency_ns: Option<u64>) {
        self.has_reason |= match latency_ns {
            Some(latency_ns) => self.when.late_from_ns.is_some_and(|from_ns| latency_ns >= from_ns),
            None => true,
        };
    }

    fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    fn wants_end(&self) -> bool {
        self.has_reason && self.writes_until_ns.is_none()
    }

    fn bytes(&self) -> u64 {
        self.folder.bytes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.folder.files()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use whylate_model::recording::{Frame, Reader};

    use super::*;
    use crate::recording::folder::Retention;

    const SECOND_NS: u64 = 1_000_000_000;

    fn put(ring: &mut RingStore, second: u64) {
        let line = format!(
            "{{\"line\":\"gap\",\"start\":\"1970-01-01T00:00:{second:02}Z\",\"duration_ns\":0,\"reason\":\"x\"}}\n"
        );
        let mut frame = Frame::new().expect("memory");
        frame.add(line.as_bytes(), Some((second * SECOND_NS, second * SECOND_NS))).expect("memory");
        let (bytes, index) = frame.finish().expect("memory");
        let header = Header { recording: 1, schema: 1, ..Header::default() };
        ring.begin_frame(&header).expect("begun");
        ring.write(&bytes).expect("written");
        ring.end_frame(&index).expect("ended");
    }

    fn frames_of(path: &PathBuf) -> usize {
        let mut reader = Reader::new(File::open(path).expect("there")).expect("a recording");
        let mut lines = 0;
        while reader.next_line().expect("it is read").is_some() {
            lines += 1;
        }
        // Without those that tell the clocks and the end.
        lines - 2
    }

    #[test]
    fn the_last_seconds_are_written_when_something_was_late() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = FolderStore::open(folder.path(), Retention::default()).expect("made");
        let late_from_ns = Some(100);
        let when = When { before_ns: 10 * SECOND_NS, after_ns: 0, late_from_ns, files_an_hour: 2 };
        let mut ring = RingStore::new(when, store);
        (0..30).for_each(|second| put(&mut ring, second));
        ring.noticed(Some(99));
        assert!(!ring.wants_end() && ring.files().is_empty());
        ring.noticed(Some(100));
        assert!(ring.wants_end());
        put(&mut ring, 30);
        assert_eq!(ring.files().len(), 1);
        assert_eq!(frames_of(&ring.files()[0]), 11, "of the seconds 20 to 30");
        // What one file has is in no other one, and there are no more files than allowed.
        put(&mut ring, 31);
        ring.noticed(None);
        put(&mut ring, 32);
        assert_eq!((ring.files().len(), frames_of(&ring.files()[1])), (2, 2));
        ring.noticed(None);
        put(&mut ring, 33);
        assert_eq!(ring.files().len(), 2);
        assert!(ring.take_problem().is_some_and(|told| told.contains("2 in an hour")));
    }
}
