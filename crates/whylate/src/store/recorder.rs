// SPDX-License-Identifier: MIT OR Apache-2.0
//! The thread that packs lines into frames and writes them to a store.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rustix::io::Errno;
use whylate_model::LateEvent;
use whylate_model::late::LateKind;
use whylate_model::recording::{Clock, Frame, Gap, Header, Index, Kept, Line};
use whylate_model::units::{format_ns, printable};
use whylate_sources::kernel::clock;

use super::destination::{Store, Trigger};
use super::{about, frames};
use crate::say::quoted;
use crate::store::late_buffer::{Keep, LateBuffer};

/// Maximum duration of a frame, which a power failure can lose.
const MAX_FRAME: Duration = Duration::from_secs(10);
/// Maximum number of ticks that wait for the disk. Beyond it only the number of snapshots is recorded.
const QUEUED_TICKS: usize = 64;
/// Retry interval after the disk was full or a write failed.
const RETRY: Duration = Duration::from_secs(5);
/// Interval between clock readings while no clock is set.
const CLOCK_EVERY_NS: u64 = 60_000_000_000;
/// A larger drift between two clocks means that one was set or that the machine was suspended.
const STEP_NS: u64 = 100_000_000;
/// Maximum number of late events and stacks that wait for a disk or a screen.
pub const MAX_QUEUED: usize = 100_000;
/// Kind of a reason to write a file: pressure, not a request.
pub const PRESSURE: &str = "pressure";
/// Maximum number of requests for a file that one tick states.
const MAX_REQUESTS: usize = 16;
/// Maximum number of other lines that are held while nothing can be written.
const MAX_HELD: usize = 1_000;

/// Lines of one tick.
type Tick = Vec<Line>;

/// State that the writer thread shares with the recorder.
#[derive(Debug, Default)]
struct Status {
    bytes: AtomicU64,
    files: Mutex<Vec<PathBuf>>,
    /// Reason why nothing is written now.
    problem: Mutex<Option<String>>,
    /// Why a file was requested, since the last tick.
    requests: Mutex<Vec<Kept>>,
    /// Late events and stacks that wait for the disk.
    queued: AtomicUsize,
}

/// Returns whether the overview counts the event. It does not count waits for a sleeping thread.
pub fn is_late(event: &LateEvent) -> bool {
    event.kind != LateKind::TimerWait
}

/// Returns the number of late events and stacks in the lines: the part of unbounded size.
pub fn weight(lines: &[Line]) -> usize {
    let of_line = |line: &Line| if let Line::Snapshot(of) = line { of.late.len() + of.stacks.len() } else { 0 };
    lines.iter().map(of_line).sum()
}

fn snapshots(lines: &[Line]) -> u64 {
    lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).count() as u64
}

/// Records lines on its own thread. Dropping the recorder ends the recording.
#[derive(Debug)]
pub struct Recorder {
    sender: Option<SyncSender<Tick>>,
    thread: Option<JoinHandle<()>>,
    status: Arc<Status>,
    /// Snapshots that were dropped because the disk was too slow.
    missed: u64,
    missed_since_ns: u64,
    /// Other lines to record with the next tick, such as gaps.
    held: Tick,
    /// Late events since the last tick, by source.
    late: BTreeMap<&'static str, LateBuffer>,
}

impl Recorder {
    /// Begins the recording and starts its thread.
    ///
    /// # Errors
    /// Fails if the store cannot be written to.
    pub fn start(mut store: Box<dyn Store>, header: Header) -> anyhow::Result<Self> {
        let (sender, receiver) = sync_channel(QUEUED_TICKS);
        let status = Arc::new(Status::default());
        // Fails before anything is measured if nothing can be written.
        store.begin_frame(&header).context("cannot write the recording")?;
        store.discard_frame();
        let mut writer = Writer::new(store, header, Arc::clone(&status));
        let thread = thread::Builder::new().name("whylate-record".to_owned()).spawn(move || writer.run(&receiver))?;
        Ok(Recorder {
            sender: Some(sender),
            thread: Some(thread),
            status,
            missed: 0,
            missed_since_ns: 0,
            held: Vec::new(),
            late: BTreeMap::new(),
        })
    }

    /// Adds a late event to the next snapshot of a source.
    pub fn late(&mut self, source: &'static str, event: LateEvent) {
        let buffer = self.late.entry(source).or_insert_with(|| LateBuffer::new(Keep::All));
        buffer.add(LateEvent { evidence: None, ..event });
    }

    /// Records the lines of one tick, with the late events since the previous one, in order of arrival.
    pub fn tick(&mut self, mut lines: Tick) {
        for line in &mut lines {
            if let Line::Snapshot(snapshot) = line
                && let Some(buffer) = self.late.get_mut(snapshot.source.as_str())
            {
                buffer.move_into(snapshot);
            }
        }
        let (count, start_ns) = (snapshots(&lines), start_unix_ns_of(&lines));
        lines.splice(..0, self.held.drain(..));
        let gap = self.gap(start_ns);
        let gaps = gap.iter().len();
        lines.extend(gap);
        let Some(sender) = &self.sender else { return };
        let weight = weight(&lines);
        let has_room = self.status.queued.load(Ordering::Relaxed) < MAX_QUEUED;
        self.status.queued.fetch_add(weight, Ordering::Relaxed);
        let sent = if has_room { sender.try_send(lines) } else { Err(TrySendError::Full(lines)) };
        match sent {
            Ok(()) => self.missed = 0,
            Err(TrySendError::Full(mut lines) | TrySendError::Disconnected(mut lines)) => {
                lines.truncate(lines.len() - gaps);
                lines.retain(|line| !matches!(line, Line::Snapshot(_)));
                lines.truncate(MAX_HELD);
                self.held = lines;
                self.status.queued.fetch_sub(weight, Ordering::Relaxed);
                if self.missed == 0 {
                    self.missed_since_ns = start_ns;
                }
                self.missed += count;
            }
        }
    }

    /// Returns the gap of the snapshots dropped until then because the disk was too slow.
    fn gap(&self, until_ns: u64) -> Option<Line> {
        let (start_unix_ns, reason, count) = (self.missed_since_ns, "overload".to_owned(), self.missed);
        let duration_ns = until_ns.saturating_sub(start_unix_ns);
        (count > 0).then_some(Line::Gap(Gap { start_unix_ns, duration_ns, reason, count }))
    }

    /// Requests a file of the frames kept in memory, which states the reason.
    pub fn request_file(&self, reason: Kept) {
        if let Ok(mut requests) = self.status.requests.lock()
            && requests.len() < MAX_REQUESTS
        {
            requests.push(reason);
        }
    }

    /// Bytes written.
    pub fn bytes(&self) -> u64 {
        self.status.bytes.load(Ordering::Relaxed)
    }

    /// Takes the reason why nothing is written now.
    pub fn take_problem(&self) -> Option<String> {
        self.status.problem.lock().ok()?.take()
    }

    /// Ends the recording, and says where it is if it is one file.
    ///
    /// # Errors
    /// Fails if something could not be written and no `take_problem` has returned the reason.
    pub fn end(self) -> anyhow::Result<()> {
        if let [file] = &self.finish()?[..] {
            say_recorded(file);
        }
        Ok(())
    }

    /// Ends the recording and returns the paths of its files.
    ///
    /// # Errors
    /// Fails as `end` does.
    pub fn finish(mut self) -> anyhow::Result<Vec<PathBuf>> {
        self.stop()?;
        let files = self.status.files.lock().map(|files| files.clone()).unwrap_or_default();
        self.take_problem().map_or(Ok(files), |problem| Err(anyhow!(problem)))
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        let gap = self.gap(clock::unix_ns());
        let last: Tick = self.held.drain(..).chain(gap).collect();
        if let Some(sender) = self.sender.take().filter(|_| !last.is_empty()) {
            // Waits as long as the disk needs.
            let _ = sender.send(last);
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => bail!("what writes the recording has failed: its end is missing"),
            _ => Ok(()),
        }
    }
}

/// Says on standard error where a recording is, and how to open it.
pub fn say_recorded(file: &Path) {
    let file = quoted(&printable(&file.to_string_lossy()));
    say!("whylate: recorded to {file} (open it with: whylate replay {file})");
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // `finish` returns errors.
        let _ = self.stop();
    }
}

/// Returns the earliest start of the lines.
fn start_unix_ns_of(lines: &[Line]) -> u64 {
    let begins = lines.iter().filter_map(Line::span_unix_ns).map(|(first_ns, _)| first_ns);
    begins.min().unwrap_or_else(clock::unix_ns)
}

/// A pause in writing.
struct Pause {
    since_ns: Option<u64>,
    retry_at: Instant,
    reason: &'static str,
    missed: u64,
    /// Lines other than snapshots, to record after the pause.
    held: Tick,
}

/// A frame. Its bytes stay in memory until all are written. After a failed write all are written again.
struct OpenFrame {
    /// `None` once the frame is complete.
    frame: Option<Frame>,
    index: Index,
    bytes: Vec<u8>,
    ticks: u32,
    started: Instant,
    is_started: bool,
    written: usize,
}

struct Writer {
    store: Box<dyn Store>,
    header: Header,
    status: Arc<Status>,
    open: Option<OpenFrame>,
    pause: Option<Pause>,
    clock: Clock,
    /// Reads the clocks.
    now: fn() -> Clock,
    /// Retry interval after a failure.
    retry: Duration,
}

impl Writer {
    fn new(store: Box<dyn Store>, header: Header, status: Arc<Status>) -> Self {
        Writer { store, header, status, open: None, pause: None, clock: about::now(), now: about::now, retry: RETRY }
    }

    fn run(&mut self, ticks: &Receiver<Tick>) {
        loop {
            // A complete frame that is not yet written is retried with the next tick.
            let open = self.open.as_ref().filter(|open| open.frame.is_some());
            let left = open.map_or(MAX_FRAME, |open| MAX_FRAME.saturating_sub(open.started.elapsed()));
            match ticks.recv_timeout(left) {
                Ok(tick) => {
                    self.status.queued.fetch_sub(weight(&tick), Ordering::Relaxed);
                    self.tick(tick);
                }
                Err(RecvTimeoutError::Timeout) => self.end_frame(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.publish_status();
        }
        let left = self.try_resume(None);
        if !left.is_empty() {
            self.add(&left);
        }
        self.end_frame();
        if self.pause.is_none()
            && let Err(error) = self.store.finish()
        {
            self.halt(&error);
        }
        self.publish_status();
    }

    fn publish_status(&mut self) {
        if let (Some(reason), Ok(mut problem)) = (self.store.take_problem(), self.status.problem.lock()) {
            *problem = Some(reason);
        }
        self.status.bytes.store(self.store.bytes(), Ordering::Relaxed);
        if let Ok(mut files) = self.status.files.lock() {
            *files = self.store.files();
        }
    }

    fn tick(&mut self, mut lines: Tick) {
        let start_ns = start_unix_ns_of(&lines);
        let requests = self.status.requests.lock().map(|mut requests| std::mem::take(&mut *requests));
        for request in requests.unwrap_or_default() {
            let by = if request.reason == PRESSURE { Trigger::Pressure } else { Trigger::Request };
            if self.store.trigger(by) {
                lines.push(Line::Kept(request));
            }
        }
        lines.splice(..0, self.try_resume(Some(start_ns)));
        if self.pause.is_none() && !self.store.has_room().unwrap_or(true) {
            self.halt(&Errno::NOSPC.into());
        }
        if let Some(pause) = &mut self.pause {
            pause.missed += snapshots(&lines);
            pause.since_ns.get_or_insert(start_ns);
            if pause.held.len() < MAX_HELD {
                pause.held.extend(lines.into_iter().filter(|line| !matches!(line, Line::Snapshot(_))));
            }
            return;
        }
        self.check_clocks(&mut lines);
        let late = self.late_enough(&lines);
        lines.extend(late);
        self.add(&lines);
        let is_full = self.open.as_ref().is_some_and(|open| {
            open.ticks >= frames::MAX_TICKS
                || open.bytes.len() >= frames::MAX_BYTES
                || open.started.elapsed() >= MAX_FRAME
        });
        if is_full || self.store.wants_end() {
            self.end_frame();
        }
    }

    /// Inserts gaps where clocks were set or the machine was suspended, and a clock reading if one is due.
    fn check_clocks(&mut self, lines: &mut Tick) {
        let (last, now) = (self.clock, (self.now)());
        let awake_ns = now.monotonic_ns.saturating_sub(last.monotonic_ns);
        let all_ns = now.boottime_ns.saturating_sub(last.boottime_ns);
        let suspended_ns = all_ns.saturating_sub(awake_ns);
        let gap = |reason: &str, duration_ns| {
            let start_unix_ns = now.at_unix_ns.saturating_sub(duration_ns);
            Line::Gap(Gap { start_unix_ns, duration_ns, reason: reason.to_owned(), count: 0 })
        };
        let is_set = now.at_unix_ns.abs_diff(last.at_unix_ns.saturating_add(all_ns)) >= STEP_NS;
        if suspended_ns >= STEP_NS {
            lines.insert(0, gap("suspended", suspended_ns));
        }
        if is_set {
            lines.insert(0, gap("clock_set", 0));
        }
        if suspended_ns >= STEP_NS || is_set || awake_ns >= CLOCK_EVERY_NS {
            lines.insert(0, Line::Clock(now));
            self.clock = now;
        }
    }

    /// Returns a line about the first late event that is a reason to write a file, if one is.
    fn late_enough(&mut self, lines: &[Line]) -> Option<Line> {
        let snapshots = lines.iter().filter_map(|line| if let Line::Snapshot(of) = line { Some(of) } else { None });
        let events = snapshots.flat_map(|snapshot| snapshot.late.iter().map(|event| (&snapshot.source, event)));
        let mut late = events.filter(|(_, event)| is_late(event));
        let (source, event) = late.find(|(_, event)| self.store.trigger(Trigger::Late(event.latency_ns)))?;
        let cause = event.causes.iter().max_by_key(|cause| cause.ns);
        let cause = cause.map_or_else(String::new, |cause| format!(", mostly {} {}", cause.kind.name(), cause.who));
        let detail = format!("{source}: {} waited {}{cause}", event.subject, format_ns(event.latency_ns));
        Some(Line::Kept(Kept { at_unix_ns: event.at_unix_ns, reason: "late".to_owned(), detail }))
    }

    /// Adds the lines of one tick to the frame, and writes them so that they can be read.
    fn add(&mut self, lines: &[Line]) {
        let added = self.add_to_frame(lines).and_then(|()| self.write_out());
        if let Err(error) = added {
            self.halt(&error);
        }
    }

    fn add_to_frame(&mut self, lines: &[Line]) -> io::Result<()> {
        // A complete frame is written before a new one begins.
        if self.open.as_ref().is_some_and(|open| open.frame.is_none()) {
            self.write_out()?;
        }
        let open = match &mut self.open {
            Some(open) => open,
            None => self.open.insert(OpenFrame {
                frame: Some(Frame::new()?),
                index: Index::default(),
                bytes: Vec::new(),
                ticks: 0,
                started: Instant::now(),
                is_started: false,
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

    /// Writes the part of the frame that is not yet written.
    fn write_out(&mut self) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        if !open.is_started {
            self.store.begin_frame(&self.header)?;
            (open.is_started, open.written) = (true, 0);
        }
        self.store.write(&open.bytes[open.written..])?;
        open.written = open.bytes.len();
        if open.frame.is_none() {
            self.store.end_frame(&open.index)?;
            self.open = None;
        }
        Ok(())
    }

    /// Pauses writing. Snapshots are counted as a gap until it resumes.
    fn halt(&mut self, error: &io::Error) {
        self.store.discard_frame();
        if let Some(open) = &mut self.open {
            open.is_started = false;
        }
        let is_full = matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT));
        let reason = if is_full { "disk_full" } else { "write_failed" };
        if self.pause.is_none()
            && let Ok(mut problem) = self.status.problem.lock()
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
            None => self.pause = Some(Pause { since_ns: None, retry_at, reason, missed: 0, held: Vec::new() }),
        }
    }

    /// Resumes writing if the pause is over. Returns the lines to record first: those held and the gap, which ends at
    /// `until_ns`. `None` stands for the end of the recording.
    fn try_resume(&mut self, until_ns: Option<u64>) -> Tick {
        let Some(pause) = self.pause.as_ref() else { return Vec::new() };
        let is_due = until_ns.is_none() || Instant::now() >= pause.retry_at;
        if !is_due || !self.store.has_room().unwrap_or(true) {
            return Vec::new();
        }
        if let Err(error) = self.write_out() {
            self.halt(&error);
            return Vec::new();
        }
        let Some(Pause { since_ns, reason, missed, held, .. }) = self.pause.take() else { return Vec::new() };
        if let Ok(mut problem) = self.status.problem.lock() {
            *problem = None;
        }
        let until_ns = until_ns.unwrap_or_else(clock::unix_ns);
        let start_unix_ns = since_ns.unwrap_or(until_ns);
        let duration_ns = until_ns.saturating_sub(start_unix_ns);
        let gap = Line::Gap(Gap { start_unix_ns, duration_ns, reason: reason.to_owned(), count: missed });
        held.into_iter().chain((missed > 0).then_some(gap)).collect()
    }
}

#[cfg(test)]
mod tests;
