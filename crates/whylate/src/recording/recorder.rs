// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread that makes frames of lines and hands them to a store.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rustix::io::Errno;
use whylate_model::late::SLEEPER;
use whylate_model::recording::{Clock, Frame, Gap, Header, Index, Line};
use whylate_model::{LateEvent, Snapshot};
use whylate_sources::clock;

use super::store::Store;
use super::{about, frames};

/// A frame is no longer than that: what a power cut costs.
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
/// No more late events and stacks wait for a disk or a screen.
pub const MOST_QUEUED: usize = 100_000;
/// While nothing can be written, no more lines of other kinds are kept.
const MOST_KEPT: usize = 1_000;

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
    /// Late events and stacks that wait for the disk.
    queued: AtomicUsize,
}

/// Late events of one source until its next snapshot, in the order in which they came.
#[derive(Debug, Default)]
pub struct Gathered {
    late: Vec<LateEvent>,
    beyond_limit: u64,
    /// Waits for somebody who sleeps, which may be by design.
    for_sleepers: u64,
}

/// A look does not count what waits for somebody who sleeps.
fn is_late(event: &LateEvent) -> bool {
    !event.labels.contains_key(SLEEPER)
}

/// How much of the lines is of a size that nobody knows before.
pub fn weight(lines: &[Line]) -> usize {
    let of_line = |line: &Line| if let Line::Snapshot(of) = line { of.late.len() + of.stacks.len() } else { 0 };
    lines.iter().map(of_line).sum()
}

fn snapshots(lines: &[Line]) -> u64 {
    lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).count() as u64
}

impl Gathered {
    /// Adds one.
    pub fn add(&mut self, event: &LateEvent) {
        self.for_sleepers += u64::from(!is_late(event));
        if self.late.len() < LATE_EVENTS {
            self.late.push(LateEvent { evidence: None, ..event.clone() });
        } else {
            self.beyond_limit += 1;
        }
    }

    /// How many are late, with those that are only counted.
    pub fn count(&self) -> u64 {
        (self.late.len() as u64 + self.beyond_limit).saturating_sub(self.for_sleepers)
    }

    /// The lines of a snapshot with them.
    pub fn lines(&mut self, snapshot: Snapshot) -> Vec<Line> {
        let end_ns = snapshot.start_unix_ns.saturating_add(snapshot.duration_ns);
        let late = std::mem::take(&mut self.late);
        self.for_sleepers = 0;
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
    /// Snapshots that the disk was too slow for.
    missed: u64,
    missed_since_ns: u64,
    /// What else was told meanwhile: what was lost, and late events beyond the limit.
    held: Tick,
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
            held: Vec::new(),
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
        let (count, begins_ns) = (snapshots(&lines), begin_unix_ns(&lines));
        lines.splice(..0, self.held.drain(..));
        let gap = self.gap(begins_ns);
        let gaps = gap.iter().len();
        lines.extend(gap);
        let Some(sender) = &self.sender else { return };
        let weight = weight(&lines);
        let has_room = self.told.queued.load(Ordering::Relaxed) < MOST_QUEUED;
        self.told.queued.fetch_add(weight, Ordering::Relaxed);
        let sent = if has_room { sender.try_send(lines) } else { Err(TrySendError::Full(lines)) };
        match sent {
            Ok(()) => self.missed = 0,
            Err(TrySendError::Full(mut lines) | TrySendError::Disconnected(mut lines)) => {
                lines.truncate(lines.len() - gaps);
                lines.retain(|line| !matches!(line, Line::Snapshot(_)));
                lines.truncate(MOST_KEPT);
                self.held = lines;
                self.told.queued.fetch_sub(weight, Ordering::Relaxed);
                if self.missed == 0 {
                    self.missed_since_ns = begins_ns;
                }
                self.missed += count;
            }
        }
    }

    /// What the disk was too slow for until then.
    fn gap(&self, until_ns: u64) -> Option<Line> {
        let (start_unix_ns, reason, count) = (self.missed_since_ns, "overload".to_owned(), self.missed);
        let duration_ns = until_ns.saturating_sub(start_unix_ns);
        (count > 0).then_some(Line::Gap(Gap { start_unix_ns, duration_ns, reason, count }))
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
        self.stop()?;
        let files = self.told.files.lock().map(|files| files.clone()).unwrap_or_default();
        self.take_problem().map_or(Ok(files), |problem| Err(anyhow!(problem)))
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        let gap = self.gap(clock::unix_ns());
        let last: Tick = self.held.drain(..).chain(gap).collect();
        if let Some(sender) = self.sender.take().filter(|_| !last.is_empty()) {
            // The disk has the time that it needs now.
            let _ = sender.send(last);
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => bail!("what writes the recording has failed: its end is missing"),
            _ => Ok(()),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Whoever wants to know calls `finish`.
        let _ = self.stop();
    }
}

/// When what these lines tell of began.
fn begin_unix_ns(lines: &[Line]) -> u64 {
    let begins = lines.iter().filter_map(Line::span_unix_ns).map(|(first_ns, _)| first_ns);
    begins.min().unwrap_or_else(clock::unix_ns)
}

/// Why nothing is written.
struct Pause {
    since_ns: Option<u64>,
    retry_at: Instant,
    reason: &'static str,
    missed: u64,
    /// What is recorded all the same: what was missing before, and what was lost.
    kept: Tick,
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
                Ok(tick) => {
                    self.told.queued.fetch_sub(weight(&tick), Ordering::Relaxed);
                    self.tick(tick);
                }
                Err(RecvTimeoutError::Timeout) => self.end_frame(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tell();
        }
        let left = self.try_again(None);
        if !left.is_empty() {
            self.add(&left);
        }
        self.end_frame();
        if self.pause.is_none()
            && let Err(error) = self.store.finish()
        {
            self.halt(&error);
        }
        self.tell();
    }

    fn tell(&mut self) {
        if let (Some(told), Ok(mut problem)) = (self.store.take_problem(), self.told.problem.lock()) {
            *problem = Some(told);
        }
        self.told.bytes.store(self.store.bytes(), Ordering::Relaxed);
        if let Ok(mut files) = self.told.files.lock() {
            *files = self.store.files();
        }
    }

    fn tick(&mut self, mut lines: Tick) {
        if self.told.is_asked.swap(false, Ordering::Relaxed) {
            self.store.noticed(None);
        }
        let begins_ns = begin_unix_ns(&lines);
        lines.splice(..0, self.try_again(Some(begins_ns)));
        if self.pause.is_none() && !self.store.has_room().unwrap_or(true) {
            self.halt(&Errno::NOSPC.into());
        }
        if let Some(pause) = &mut self.pause {
            pause.missed += snapshots(&lines);
            pause.since_ns.get_or_insert(begins_ns);
            if pause.kept.len() < MOST_KEPT {
                pause.kept.extend(lines.into_iter().filter(|line| !matches!(line, Line::Snapshot(_))));
            }
            return;
        }
        self.look_at_clocks(&mut lines);
        self.add(&lines);
        let is_full = self.open.as_ref().is_some_and(|open| {
            open.ticks >= frames::TICKS || open.bytes.len() >= frames::BYTES || open.began.elapsed() >= FRAME
        });
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
        let late = events.flatten().filter(|event| is_late(event));
        late.for_each(|event| self.store.noticed(Some(event.latency_ns)));
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
        frames::add(frame, lines)?;
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
                true => {
                    "recording is paused: the disk is full, or has less free space than --min-free (free some space)"
                        .to_owned()
                }
                false => format!("recording is paused: {error}"),
            });
        }
        let retry_at = Instant::now() + self.retry;
        match &mut self.pause {
            Some(pause) => pause.retry_at = retry_at,
            None => self.pause = Some(Pause { since_ns: None, retry_at, reason, missed: 0, kept: Vec::new() }),
        }
    }

    /// Writes again where that works by now. Returns what is to be told of the gap, which what follows ends; `None` for
    /// the end of the recording.
    fn try_again(&mut self, until_ns: Option<u64>) -> Tick {
        let Some(pause) = self.pause.as_ref() else { return Vec::new() };
        let is_due = until_ns.is_none() || Instant::now() >= pause.retry_at;
        if !is_due || !self.store.has_room().unwrap_or(true) {
            return Vec::new();
        }
        if let Err(error) = self.write_out() {
            self.halt(&error);
            return Vec::new();
        }
        let Some(Pause { since_ns, reason, missed, kept, .. }) = self.pause.take() else { return Vec::new() };
        if let Ok(mut problem) = self.told.problem.lock() {
            *problem = None;
        }
        let until_ns = until_ns.unwrap_or_else(clock::unix_ns);
        let start_unix_ns = since_ns.unwrap_or(until_ns);
        let duration_ns = until_ns.saturating_sub(start_unix_ns);
        let gap = Line::Gap(Gap { start_unix_ns, duration_ns, reason: reason.to_owned(), count: missed });
        kept.into_iter().chain((missed > 0).then_some(gap)).collect()
    }
}

#[cfg(test)]
mod tests;
