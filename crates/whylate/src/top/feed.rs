// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where moments come from: a thread that measures, or one that reads a recording. It never waits for the screen while it
//! measures: what the screen is too slow for is counted.

use std::collections::VecDeque;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use rustix::time::{ClockId, clock_gettime};
use whylate_model::recording::{Gap, Header, Line};
use whylate_model::sources::named;

use super::state::Own;
use crate::commands::runner::{NOW_AND_THEN, wait};
use crate::commands::sources::{self, Attaching, Recorded, Wish, measured};
use crate::commands::watch::{Ended, Watch};
use crate::recording::about;
use crate::recording::play::{Recording, nothing_in_span};
use crate::recording::recorder::{MAX_QUEUED, weight};

/// So many moments wait for the screen; of a recording, which waits for the screen in turn, a few are enough.
const QUEUED: usize = 64;
const QUEUED_OF_RECORDING: usize = 4;
/// So many lines of one moment are taken.
const MOST_LINES: usize = 100;
/// Why a moment is missing, as recordings say it.
pub const SLOW_SCREEN: &str = "slow_screen";
/// The first figures come sooner than the others.
const FIRST: Duration = Duration::from_millis(500);

/// What a thread said when it panicked, where the screen is not to be written over.
pub static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Panics where a test asks for it, of the screen or of the feed; a release never does.
pub fn panic_if_asked(of: &str) {
    let is_asked = || std::env::var_os("WHYLATE_PANIC").is_some_and(|asked| asked == of);
    assert!(!(cfg!(debug_assertions) && is_asked()), "a test asks for it");
}

/// What a feed tells.
pub enum Told {
    /// That source is being attached.
    Attaching(String),
    /// What those see that are attached already, without causes.
    Early(Box<Header>, Vec<Line>),
    Begun(Box<Header>),
    Moment(Vec<Line>, Own),
    /// A source has failed, in words.
    Problem(String),
    /// A recording was read to its end, of which this is missing.
    Read(Vec<String>),
    /// Nothing follows; `Some` where that is a failure.
    Ended(Option<anyhow::Error>),
}

impl Told {
    /// How much of a moment is of a size that nobody knows before.
    fn weight(&self) -> Option<usize> {
        if let Told::Moment(lines, _) = self { Some(weight(lines)) } else { None }
    }
}

/// A thread that tells.
pub struct Feed {
    receiver: Option<Receiver<Told>>,
    /// Late events and stacks that wait for the screen.
    queued: Arc<AtomicUsize>,
    wake: UnixStream,
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    has_ended: bool,
}

/// The thread's side.
struct Teller {
    sender: SyncSender<Told>,
    queued: Arc<AtomicUsize>,
    wake: UnixStream,
    /// What the screen was too slow for: the next moment has it.
    missed: Option<Gap>,
}

impl Teller {
    /// Tells of a moment; where the screen is too slow for it, the next one tells of that.
    fn moment(&mut self, mut lines: Vec<Line>, own: Own) {
        let span = lines.iter().filter_map(Line::span_unix_ns).reduce(|all, of| (all.0.min(of.0), all.1.max(of.1)));
        let (first_ns, last_ns) = span.unwrap_or_default();
        let count = lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).count() as u64;
        let before = self.missed.take();
        lines.splice(..0, before.iter().cloned().map(Line::Gap));
        if !self.tell(Told::Moment(lines, own)) {
            let mut gap = before.unwrap_or(Gap {
                start_unix_ns: first_ns,
                duration_ns: 0,
                reason: SLOW_SCREEN.to_owned(),
                count: 0,
            });
            (gap.duration_ns, gap.count) = (last_ns.saturating_sub(gap.start_unix_ns), gap.count + count);
            self.missed = Some(gap);
        }
    }

    /// Tells it, if there is room.
    fn tell(&mut self, told: Told) -> bool {
        let weight = told.weight();
        let has_room = weight.is_none() || self.queued.load(Ordering::Relaxed) < MAX_QUEUED;
        self.queued.fetch_add(weight.unwrap_or(0), Ordering::Relaxed);
        let is_told = has_room && self.sender.try_send(told).is_ok();
        if !is_told {
            self.queued.fetch_sub(weight.unwrap_or(0), Ordering::Relaxed);
        }
        // Where it is full, it is readable.
        let _ = self.wake.write(&[0]);
        is_told
    }

    /// The same, and waits until there is room; false where nobody listens any more.
    fn tell_surely(&mut self, told: Told) -> bool {
        self.queued.fetch_add(told.weight().unwrap_or(0), Ordering::Relaxed);
        let is_heard = self.sender.send(told).is_ok();
        let _ = self.wake.write(&[0]);
        is_heard
    }
}

impl Feed {
    /// Measures from now on, so often.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn live(wish: Wish, every: Duration) -> anyhow::Result<Self> {
        Self::start("whylate-measure", QUEUED, move |teller, stop| measure(teller, stop, &wish, every))
    }

    /// Reads a recording.
    ///
    /// # Errors
    /// As above.
    pub fn recorded(recording: Recording) -> anyhow::Result<Self> {
        Self::start("whylate-replay", QUEUED_OF_RECORDING, move |teller, stop| replay(teller, &stop, &recording))
    }

    fn start(
        name: &str,
        most: usize,
        run: impl FnOnce(&mut Teller, UnixStream) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (sender, receiver) = sync_channel(most);
        let (wake, wakes) = UnixStream::pair().context("cannot start to measure")?;
        let (stop, stops) = UnixStream::pair().context("cannot start to measure")?;
        for stream in [&wake, &wakes, &stops] {
            stream.set_nonblocking(true)?;
        }
        let queued = Arc::new(AtomicUsize::new(0));
        let mut teller = Teller { sender, queued: Arc::clone(&queued), wake: wakes, missed: None };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let outcome = run(&mut teller, stops);
            teller.tell_surely(Told::Ended(outcome.err()));
        })?;
        Ok(Feed { receiver: Some(receiver), queued, wake, stop: Some(stop), thread: Some(thread), has_ended: false })
    }

    /// Becomes readable when there is something; `None` where nothing follows.
    pub fn wake(&self) -> Option<&UnixStream> {
        Some(&self.wake).filter(|_| !self.has_ended)
    }

    /// What was told since the last call, one by one.
    pub fn take(&mut self) -> Option<Told> {
        let told = self.receiver.as_ref()?.try_recv();
        match told {
            Ok(told) => {
                self.queued.fetch_sub(told.weight().unwrap_or(0), Ordering::Relaxed);
                self.has_ended |= matches!(told, Told::Ended(_));
                Some(told)
            }
            // It has panicked.
            Err(TryRecvError::Disconnected) if !self.has_ended => {
                self.has_ended = true;
                let said = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
                Some(Told::Ended(Some(anyhow!("internal error (please report it): {said}"))))
            }
            Err(TryRecvError::Disconnected | TryRecvError::Empty) => None,
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        drop((self.stop.take(), self.receiver.take()));
        // Programs are detached, and settings put back, before the process ends.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn measure(teller: &mut Teller, stop: UnixStream, wish: &Wish, every: Duration) -> anyhow::Result<()> {
    let watch = Watch::of(stop);
    let mut attaching = |step: Attaching<'_>| match step {
        Attaching::Begins(card) => {
            teller.tell(Told::Attaching(card.name.to_owned()));
        }
        Attaching::Done(looking) => {
            // The newest one has seen nothing yet. What fails now fails again, and is told then.
            let last = looking.len().saturating_sub(1);
            let sources = looking[..last].iter().map(|feed| measured(feed, wish)).collect();
            let lines = looking[..last].iter_mut().filter_map(|feed| feed.snapshot().ok());
            let lines: Vec<Line> = lines.map(|snapshot| Line::Snapshot(Box::new(snapshot))).collect();
            if !lines.is_empty() {
                teller.tell(Told::Early(Box::new(Header { sources, ..about::this_machine() }), lines));
            }
        }
    };
    let Some(attached) = sources::attach(&watch, wish, &mut attaching)? else { return Ok(()) };
    let (mut recorded, header) = Recorded::begin(attached, wish)?;
    let every_ns = u64::try_from(every.as_nanos()).ok();
    teller.tell(Told::Begun(Box::new(Header { every_ns, ..header })));
    let started = Instant::now();
    let mut cost = Cost::now();
    let mut due = started + FIRST.min(every);
    let mut problems: VecDeque<String> = VecDeque::new();
    loop {
        let ended = wait(&watch, Some(due), NOW_AND_THEN, &mut || recorded.take_late().map(|()| false))?;
        if ended != Ended::Time {
            return Ok(());
        }
        let moment = recorded.moment()?;
        teller.moment(moment.lines, cost.since());
        panic_if_asked("feed");
        problems.extend(moment.problems);
        // Where there is no room now, there is later.
        while let Some(problem) = problems.front()
            && teller.tell(Told::Problem(problem.clone()))
        {
            problems.pop_front();
        }
        // What was missed, as while it was stopped, is not caught up with.
        let number = (started.elapsed().as_nanos() / every.as_nanos().max(1)) as u32 + 1;
        due = started + every.saturating_mul(number);
    }
}

/// What the process took.
struct Cost {
    at: Instant,
    cpu: Duration,
}

impl Cost {
    fn now() -> Self {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = Duration::new(cpu.tv_sec.unsigned_abs(), cpu.tv_nsec.unsigned_abs() as u32);
        Cost { at: Instant::now(), cpu }
    }

    /// Since the last call.
    fn since(&mut self) -> Own {
        let before = std::mem::replace(self, Cost::now());
        let elapsed = self.at.duration_since(before.at).as_secs_f64().max(1e-9);
        let cpu = self.cpu.saturating_sub(before.cpu).as_secs_f64() / elapsed;
        // proc_pid_statm(5): the second number is what is in memory, in pages.
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Own { cpu, resident_bytes: pages.saturating_mul(rustix::param::page_size() as u64) }
    }
}

fn replay(teller: &mut Teller, stop: &UnixStream, recording: &Recording) -> anyhow::Result<()> {
    let mut played = recording.play()?;
    if !teller.tell_surely(Told::Begun(Box::new(played.header().clone()))) {
        return Ok(());
    }
    let (mut lines, mut seen, mut has_any): (Vec<Line>, Vec<&str>, bool) = (Vec::new(), Vec::new(), false);
    let mut beyond = 0;
    while let Some(line) = played.next_of_any_kind()? {
        // A recording made to do harm may have no moment for long.
        if rustix::io::read(stop, &mut [0_u8]).is_ok() {
            return Ok(());
        }
        if let Line::Snapshot(snapshot) = &line {
            let Some(card) = named(&snapshot.source) else { continue };
            // All sources are asked in turn: the second snapshot of one begins the next moment.
            if seen.contains(&card.name) {
                seen.clear();
                if !teller.tell_surely(Told::Moment(std::mem::take(&mut lines), Own::default())) {
                    return Ok(());
                }
            }
            seen.push(card.name);
            has_any = true;
        }
        // A moment has few lines of other kinds.
        if lines.len() < MOST_LINES {
            lines.push(line);
        } else {
            beyond += 1;
        }
    }
    // Without a moment the screen ends, and says why below the prompt.
    if !has_any {
        return Err(nothing_in_span(played.name()));
    }
    teller.tell_surely(Told::Moment(lines, Own::default()));
    let mut missing = played.missing();
    missing.extend(played.skipped_message(beyond));
    teller.tell_surely(Told::Read(missing));
    Ok(())
}
