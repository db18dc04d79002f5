// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread that makes frames of lines and hands them to a store.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use rustix::io::Errno;
use whylate_model::recording::{Clock, Frame, Gap, Header, Index, Line};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::clock;

use super::about;
use super::store::Store;
use crate::output::json::write_line;

/// A frame has at most so many ticks, and is no longer than that: what a power cut costs.
const TICKS: u32 = 16;
const FRAME: Duration = Duration::from_secs(10);
/// How many ticks wait for the disk; of others the number alone is recorded.
const QUEUED: usize = 64;
/// How often a disk that was full or failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// How often clocks are recorded where none was set.
const CLOCK_EVERY_NS: u64 = 60_000_000_000;
/// Clocks that drift apart by more were set, or the machine was suspended.
const STEP_NS: u64 = 100_000_000;
/// Late events of one snapshot that are recorded; of others the number is.
const LATE_EVENTS: usize = 10_000;

/// What was seen at one moment.
type Tick = Vec<Line>;

/// What the thread tells.
#[derive(Debug, Default)]
struct Told {
    bytes: AtomicU64,
    files: Mutex<Vec<PathBuf>>,
    /// Why nothing is written now.
    problem: Mutex<Option<String>>,
    /// Somebody asks for a file.
    is_asked: AtomicBool,
}

/// Late events of one source until its next snapshot, in the order in which they came.
#[derive(Debug, Default)]
pub struct Gathered {
    late: Vec<LateEvent>,
    beyond_limit: u64,
}

impl Gathered {
    /// Adds one.
    pub fn add(&mut self, event: &LateEvent) {
        if self.late.len() < LATE_EVENTS {
            self.late.push(LateEvent { evidence: None, ..event.clone() });
        } else {
            self.beyond_limit += 1;
        }
    }

    /// How many there are, with those that are only counted.
    pub fn count(&self) -> u64 {
        self.late.len() as u64 + self.beyond_limit
    }

    /// The lines of a snapshot with them.
    pub fn lines(&mut self, snapshot: Snapshot) -> Vec<Line> {
        let end_ns = snapshot.start_unix_ns.saturating_add(snapshot.duration_ns);
        let late = std::mem::take(&mut self.late);
        let mut lines = vec![Line::Snapshot(Box::new(Snapshot { late, ..snapshot }))];
        let count = std::mem::take(&mut self.beyond_limit);
        if count > 0 {
            let reason = "late_events".to_owned();
            lines.push(Line::Gap(Gap { start_unix_ns: end_ns, duration_ns: 0, reason, count }));
        }
        lines
    }
}

/// Records what it is handed. Dropping it ends the recording.
#[derive(Debug)]
pub struct Recorder {
    sender: Option<SyncSender<Tick>>,
    thread: Option<JoinHandle<()>>,
    told: Arc<Told>,
    /// Ticks that the disk was too slow for.
    missed: u64,
    missed_since_ns: u64,
    gathered: Gathered,
}

impl Recorder {
    /// Starts the thread, which writes the header.
    ///
    /// # Errors
    /// When the store cannot be written to.
    pub fn start(mut store: Box<dyn Store>, header: Header) -> anyhow::Result<Self> {
        let (sender, receiver) = sync_channel(QUEUED);
        let told = Arc::new(Told::default());
        // Whoever cannot write at all is told before anything is measured.
        store.begin_frame(&header).context("cannot write the recording")?;
        store.give_up_frame();
        let mut writer = Writer::new(store, header, Arc::clone(&told));
        let thread = thread::Builder::new().name("whylate-record".to_owned()).spawn(move || writer.run(&receiver))?;
        Ok(Recorder {
            sender: Some(sender),
            thread: Some(thread),
            told,
            missed: 0,
            missed_since_ns: 0,
            gathered: Gathered::default(),
        })
    }

    /// A late event that belongs to the next snapshot.
    pub fn late(&mut self, event: &LateEvent) {
        self.gathered.add(event);
    }

    /// A snapshot, with the late events since the previous one in the order in which they came.
    pub fn snapshot(&mut self, snapshot: &Snapshot) {
        let lines = self.gathered.lines(snapshot.clone());
        self.tick(lines);
    }

    /// Everything of one moment.
    pub fn tick(&mut self, mut lines: Tick) {
        let now_ns = clock::unix_ns();
        if self.missed > 0 {
            let (start_unix_ns, reason) = (self.missed_since_ns, "overload".to_owned());
            let duration_ns = now_ns.saturating_sub(start_unix_ns);
            lines.insert(0, Line::Gap(Gap { start_unix_ns, duration_ns, reason, count: self.missed }));
        }
        let Some(sender) = &self.sender else { return };
        match sender.try_send(lines) {
            Ok(()) => self.missed = 0,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                if self.missed == 0 {
                    self.missed_since_ns = now_ns;
                }
                self.missed += 1;
            }
        }
    }

    /// Asks for a file of what is kept in memory.
    pub fn ask(&self) {
        self.told.is_asked.store(true, Ordering::Relaxed);
    }

    /// How many bytes were written.
    pub fn bytes(&self) -> u64 {
        self.told.bytes.load(Ordering::Relaxed)
    }

    /// Why nothing is written now, once.
    pub fn take_problem(&self) -> Option<String> {
        self.told.problem.lock().ok()?.take()
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// When something could not be written that nobody was told of.
    pub fn end(self) -> anyhow::Result<()> {
        self.finish().map(|_| ())
    }

    /// The same, and tells which files there are.
    ///
    /// # Errors
    /// As above.
    pub fn finish(mut self) -> anyhow::Result<Vec<PathBuf>> {
        self.stop();
        let files = self.told.files.lock().map(|files| files.clone()).unwrap_or_default();
        self.take_problem().map_or(Ok(files), |problem| Err(anyhow!(problem)))
    }

    fn stop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // What it had to say is told.
            let _ = thread.join();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why nothing is written.
struct Pause {
    since_ns: u64,
    retry_at: Instant,
    reason: &'static str,
    missed: u64,
}

/// A frame. Its bytes stay in memory until all are written: where that fails, all are written later.
struct Open {
    /// `None` once it is complete.
    frame: Option<Frame>,
    index: Index,
    bytes: Vec<u8>,
    ticks: u32,
    began: Instant,
    has_begun: bool,
    written: usize,
}

struct Writer {
    store: Box<dyn Store>,
    header: Header,
    told: Arc<Told>,
    open: Option<Open>,
    pause: Option<Pause>,
    clock: Clock,
    /// What time it is.
    now: fn() -> Clock,
    /// How long nothing is tried after a failure.
    retry: Duration,
}

impl Writer {
    fn new(store: Box<dyn Store>, header: Header, told: Arc<Told>) -> Self {
        Writer { store, header, told, open: None, pause: None, clock: about::now(), now: about::now, retry: RETRY }
    }

    fn run(&mut self, ticks: &Receiver<Tick>) {
        loop {
            // A frame that is complete waits for the next moment.
            let open = self.open.as_ref().filter(|open| open.frame.is_some());
            let left = open.map_or(FRAME, |open| FRAME.saturating_sub(open.began.elapsed()));
            match ticks.recv_timeout(left) {
                Ok(tick) => self.tick(tick),
                Err(RecvTimeoutError::Timeout) => self.end_frame(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tell();
        }
        self.try_again(true);
        self.end_frame();
        if self.pause.is_none()
            && let Err(error) = self.store.finish()
        {
            self.halt(&error);
        }
        self.tell();
    }

    fn tell(&self) {
        self.told.bytes.store(self.store.bytes(), Ordering::Relaxed);
        if let Ok(mut files) = self.told.files.lock() {
            *files = self.store.files();
        }
    }

    fn tick(&mut self, mut lines: Tick) {
        if self.told.is_asked.swap(false, Ordering::Relaxed) {
            self.store.noticed(None);
        }
        if let Some(gap) = self.try_again(false) {
            lines.insert(0, gap);
        }
        if self.pause.is_none() && !self.store.has_room().unwrap_or(true) {
            self.halt(&Errno::NOSPC.into());
        }
        if let Some(pause) = &mut self.pause {
            pause.missed += 1;
            return;
        }
        self.look_at_clocks(&mut lines);
        self.add(&lines);
        let is_full = self.open.as_ref().is_some_and(|open| open.ticks >= TICKS || open.began.elapsed() >= FRAME);
        if is_full || self.store.wants_end() {
            self.end_frame();
        }
    }

    /// Says when clocks were set and when the machine was suspended.
    fn look_at_clocks(&mut self, lines: &mut Tick) {
        let (was, now) = (self.clock, (self.now)());
        let awake_ns = now.monotonic_ns.saturating_sub(was.monotonic_ns);
        let all_ns = now.boottime_ns.saturating_sub(was.boottime_ns);
        let asleep_ns = all_ns.saturating_sub(awake_ns);
        let gap = |reason: &str, duration_ns| {
            let start_unix_ns = now.at_unix_ns.saturating_sub(duration_ns);
            Line::Gap(Gap { start_unix_ns, duration_ns, reason: reason.to_owned(), count: 0 })
        };
        let is_set = now.at_unix_ns.abs_diff(was.at_unix_ns.saturating_add(all_ns)) >= STEP_NS;
        if asleep_ns >= STEP_NS {
            lines.insert(0, gap("suspended", asleep_ns));
        }
        if is_set {
            lines.insert(0, gap("clock_set", 0));
        }
        if asleep_ns >= STEP_NS || is_set || awake_ns >= CLOCK_EVERY_NS {
            lines.insert(0, Line::Clock(now));
            self.clock = now;
        }
    }

    /// Adds the lines of one moment, and makes them readable.
    fn add(&mut self, lines: &[Line]) {
        let events = lines.iter().filter_map(|line| match line {
            Line::Snapshot(snapshot) => Some(&snapshot.late),
            _ => None,
        });
        events.flatten().for_each(|event| self.store.noticed(Some(event.latency_ns)));
        let added = self.put_into_frame(lines).and_then(|()| self.write_out());
        if let Err(error) = added {
            self.halt(&error);
        }
    }

    fn put_into_frame(&mut self, lines: &[Line]) -> io::Result<()> {
        // One that could not be written makes way for no other one.
        if self.open.as_ref().is_some_and(|open| open.frame.is_none()) {
            self.write_out()?;
        }
        let open = match &mut self.open {
            Some(open) => open,
            None => self.open.insert(Open {
                frame: Some(Frame::new()?),
                index: Index::default(),
                bytes: Vec::new(),
                ticks: 0,
                began: Instant::now(),
                has_begun: false,
                written: 0,
            }),
        };
        let Some(frame) = &mut open.frame else { return Ok(()) };
        for line in lines {
            let mut text = Vec::new();
            write_line(&mut text, line)?;
            frame.add(&text, line.span_unix_ns())?;
        }
        open.bytes.extend(frame.flush()?);
        open.ticks += 1;
        Ok(())
    }

    fn end_frame(&mut self) {
        let Some(open) = &mut self.open else { return };
        let finished = open.frame.take().map(Frame::finish).transpose();
        let ended = finished.map(|finished| {
            if let Some((rest, index)) = finished {
                open.bytes.extend(rest);
                open.index = index;
            }
        });
        if self.pause.is_none()
            && let Err(error) = ended.and_then(|()| self.write_out())
        {
            self.halt(&error);
        }
    }

    /// Writes what has not been written of the frame.
    fn write_out(&mut self) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        if !open.has_begun {
            self.store.begin_frame(&self.header)?;
            (open.has_begun, open.written) = (true, 0);
        }
        self.store.write(&open.bytes[open.written..])?;
        open.written = open.bytes.len();
        if open.frame.is_none() {
            self.store.end_frame(&open.index)?;
            self.open = None;
        }
        Ok(())
    }

    /// Stops writing for a while. What is measured meanwhile is counted as a gap.
    fn halt(&mut self, error: &io::Error) {
        self.store.give_up_frame();
        if let Some(open) = &mut self.open {
            open.has_begun = false;
        }
        let is_full = matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT));
        let reason = if is_full { "disk_full" } else { "write_failed" };
        if self.pause.is_none()
            && let Ok(mut problem) = self.told.problem.lock()
        {
            *problem = Some(match is_full {
                true => "recording is paused: there is no room left (free some space)".to_owned(),
                false => format!("recording is paused: {error}"),
            });
        }
        let retry_at = Instant::now() + self.retry;
        match &mut self.pause {
            Some(pause) => pause.retry_at = retry_at,
            None => self.pause = Some(Pause { since_ns: clock::unix_ns(), retry_at, reason, missed: 0 }),
        }
    }

    /// Writes again where that works by now, and tells of the gap.
    fn try_again(&mut self, is_last: bool) -> Option<Line> {
        let pause = self.pause.as_ref()?;
        if (!is_last && Instant::now() < pause.retry_at) || !self.store.has_room().unwrap_or(true) {
            return None;
        }
        if let Err(error) = self.write_out() {
            self.halt(&error);
            return None;
        }
        let Pause { since_ns, reason, missed, .. } = self.pause.take()?;
        if let Ok(mut problem) = self.told.problem.lock() {
            *problem = None;
        }
        let duration_ns = clock::unix_ns().saturating_sub(since_ns);
        let gap = Gap { start_unix_ns: since_ns, duration_ns, reason: reason.to_owned(), count: missed };
        let gap = Line::Gap(gap);
        if is_last {
            self.add(&[gap]);
            return None;
        }
        Some(gap)
    }
}

#[cfg(test)]
mod tests;
