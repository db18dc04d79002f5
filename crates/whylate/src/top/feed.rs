// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that produce ticks, by measuring or from a recording. A measuring thread never waits for the screen: ticks
//! that the screen is too slow for are dropped and counted.

use std::collections::VecDeque;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use rustix::time::{ClockId, clock_gettime};
use whylate_model::recording::{Gap, Header, Line};

use super::state::{Own, SLOW_SCREEN};
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::replay::Replay;
use crate::engine::sources::{self, Attaching, Wish, measured};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::store::about;
use crate::store::play::Recording;
use crate::store::recorder::{MAX_QUEUED, weight};

/// Capacity of the queue to the screen, in messages. A replay waits for the screen and needs only a few.
const LIVE_QUEUE: usize = 64;
const REPLAY_QUEUE: usize = 4;
/// Interval before the first tick, which comes early.
const FIRST_TICK: Duration = Duration::from_millis(500);

/// Panic message, kept because printing it would overwrite the screen.
pub static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Panics if `WHYLATE_PANIC` names this thread (debug builds only, for tests).
pub fn panic_if_asked(of: &str) {
    let is_asked = || std::env::var_os("WHYLATE_PANIC").is_some_and(|asked| asked == of);
    assert!(!(cfg!(debug_assertions) && is_asked()), "a test asks for it");
}

/// Message of a feed.
pub enum Message {
    /// Name of the source that is being attached.
    Attaching(String),
    /// Snapshots of the sources attached so far, without causes.
    Early(Box<Header>, Vec<Line>),
    Started(Box<Header>),
    Tick(Vec<Line>, Own),
    /// Error message of a source that failed.
    Problem(String),
    /// End of a recording, with notes on what is missing from it.
    Read(Vec<String>),
    /// Last message, with the error if the feed failed.
    Ended(Option<anyhow::Error>),
}

impl Message {
    /// Returns the queue weight of a tick: its late events and stacks. Other messages have none.
    fn weight(&self) -> Option<usize> {
        if let Message::Tick(lines, _) = self { Some(weight(lines)) } else { None }
    }
}

/// Receiving side of a feed thread.
pub struct Feed {
    receiver: Option<Receiver<Message>>,
    /// Number of queued late events and stacks.
    queued: Arc<AtomicUsize>,
    wake: UnixStream,
    /// Closing the socket ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    has_ended: bool,
}

/// Sending side, on the feed thread.
struct Sender {
    sender: SyncSender<Message>,
    queued: Arc<AtomicUsize>,
    wake: UnixStream,
    /// Dropped ticks, as a gap that the next tick carries.
    missed: Option<Gap>,
}

impl Sender {
    /// Sends a tick. If the queue is full, drops the tick and adds it to the gap that the next one carries.
    fn send_tick(&mut self, mut lines: Vec<Line>, own: Own) {
        let span = lines.iter().filter_map(Line::span_unix_ns).reduce(|all, of| (all.0.min(of.0), all.1.max(of.1)));
        let (first_ns, last_ns) = span.unwrap_or_default();
        let count = lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).count() as u64;
        let before = self.missed.take();
        lines.splice(..0, before.iter().cloned().map(Line::Gap));
        if !self.try_send(Message::Tick(lines, own)) {
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

    /// Sends a message unless the queue is full. Returns whether it was queued.
    fn try_send(&mut self, message: Message) -> bool {
        let weight = message.weight();
        let has_room = weight.is_none() || self.queued.load(Ordering::Relaxed) < MAX_QUEUED;
        self.queued.fetch_add(weight.unwrap_or(0), Ordering::Relaxed);
        let is_queued = has_room && self.sender.try_send(message).is_ok();
        if !is_queued {
            self.queued.fetch_sub(weight.unwrap_or(0), Ordering::Relaxed);
        }
        // A full socket is readable already: a failed write does no harm.
        let _ = self.wake.write(&[0]);
        is_queued
    }

    /// Sends a message and waits for room. Returns false if the receiver is gone.
    fn send_blocking(&mut self, message: Message) -> bool {
        self.queued.fetch_add(message.weight().unwrap_or(0), Ordering::Relaxed);
        let is_received = self.sender.send(message).is_ok();
        let _ = self.wake.write(&[0]);
        is_received
    }
}

impl Feed {
    /// Starts measuring, with a tick per `every`.
    ///
    /// # Errors
    /// Fails if no thread or descriptor is available.
    pub fn live(wish: Wish, every: Duration) -> anyhow::Result<Self> {
        Self::start("whylate-measure", LIVE_QUEUE, move |sender, stop| measure(sender, stop, &wish, every))
    }

    /// Starts reading a recording.
    ///
    /// # Errors
    /// Fails if no thread or descriptor is available.
    pub fn recorded(recording: Recording) -> anyhow::Result<Self> {
        Self::start("whylate-replay", REPLAY_QUEUE, move |sender, _| replay(sender, &recording))
    }

    fn start(
        name: &str,
        capacity: usize,
        run: impl FnOnce(&mut Sender, UnixStream) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (sender, receiver) = sync_channel(capacity);
        let (wake, wakes) = UnixStream::pair().context("cannot start to measure")?;
        let (stop, stops) = UnixStream::pair().context("cannot start to measure")?;
        for stream in [&wake, &wakes, &stops] {
            stream.set_nonblocking(true)?;
        }
        let queued = Arc::new(AtomicUsize::new(0));
        let mut sender = Sender { sender, queued: Arc::clone(&queued), wake: wakes, missed: None };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let outcome = run(&mut sender, stops);
            sender.send_blocking(Message::Ended(outcome.err()));
        })?;
        Ok(Feed { receiver: Some(receiver), queued, wake, stop: Some(stop), thread: Some(thread), has_ended: false })
    }

    /// Returns a socket that is readable while messages are queued; `None` after the last message.
    pub fn wake(&self) -> Option<&UnixStream> {
        Some(&self.wake).filter(|_| !self.has_ended)
    }

    /// Returns the next queued message, without waiting.
    pub fn take(&mut self) -> Option<Message> {
        let message = self.receiver.as_ref()?.try_recv();
        match message {
            Ok(message) => {
                self.queued.fetch_sub(message.weight().unwrap_or(0), Ordering::Relaxed);
                self.has_ended |= matches!(message, Message::Ended(_));
                Some(message)
            }
            // The thread panicked.
            Err(TryRecvError::Disconnected) if !self.has_ended => {
                self.has_ended = true;
                let said = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
                Some(Message::Ended(Some(anyhow!("internal error (please report it): {said}"))))
            }
            Err(TryRecvError::Disconnected | TryRecvError::Empty) => None,
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        drop((self.stop.take(), self.receiver.take()));
        // The thread detaches programs and restores settings before the process exits.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A replay waits for the screen, and ends when that is closed.
impl Sink for Sender {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        let is_received = self.send_blocking(Message::Tick(tick.lines, Own::default()));
        Ok(if is_received { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }
}

fn measure(sender: &mut Sender, stop: UnixStream, wish: &Wish, every: Duration) -> anyhow::Result<()> {
    let watch = Watch::of_socket(stop);
    let mut attaching = |step: Attaching<'_>| match step {
        Attaching::Begins(card) => {
            sender.try_send(Message::Attaching(card.name.to_owned()));
        }
        Attaching::Done(looking) => {
            // The newest source has recorded nothing yet. A source that fails here fails again later, and is reported
            // then.
            let last = looking.len().saturating_sub(1);
            let sources = looking[..last].iter().map(|feed| measured(feed, wish)).collect();
            let lines = looking[..last].iter_mut().filter_map(|feed| feed.source.snapshot().ok());
            let lines: Vec<Line> = lines.map(|snapshot| Line::Snapshot(Box::new(snapshot))).collect();
            if !lines.is_empty() {
                sender.try_send(Message::Early(Box::new(Header { sources, ..about::this_machine() }), lines));
            }
        }
    };
    let Some(attached) = sources::attach(&watch, wish, &mut attaching)? else { return Ok(()) };
    let pace = Pace { interval: Some(every), first: Some(FIRST_TICK), poll: Some(NOW_AND_THEN), ..Pace::default() };
    let (mut live, header) = Live::begin(attached, wish, watch, pace)?;
    let every_ns = u64::try_from(every.as_nanos()).ok();
    sender.try_send(Message::Started(Box::new(Header { every_ns, ..header })));
    drive(&mut live, &mut Measured { sender, cost: Cost::now(), problems: VecDeque::new() })
}

/// Sends what is measured, unless the screen is too slow.
struct Measured<'a> {
    sender: &'a mut Sender,
    cost: Cost,
    /// Problems that wait for room in the queue.
    problems: VecDeque<String>,
}

impl Sink for Measured<'_> {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        self.sender.send_tick(tick.lines, self.cost.since());
        panic_if_asked("feed");
        self.problems.extend(tick.problems);
        while let Some(problem) = self.problems.front()
            && self.sender.try_send(Message::Problem(problem.clone()))
        {
            self.problems.pop_front();
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Resource usage at a point in time.
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

    /// Returns the usage since the last call.
    fn since(&mut self) -> Own {
        let before = std::mem::replace(self, Cost::now());
        let elapsed = self.at.duration_since(before.at).as_secs_f64().max(1e-9);
        let cpu = self.cpu.saturating_sub(before.cpu).as_secs_f64() / elapsed;
        // proc_pid_statm(5): the second field is the resident size in pages.
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Own { cpu, resident_bytes: pages.saturating_mul(rustix::param::page_size() as u64) }
    }
}

fn replay(sender: &mut Sender, recording: &Recording) -> anyhow::Result<()> {
    let mut replay = Replay::new(recording.play()?);
    if !sender.send_blocking(Message::Started(Box::new(replay.header().clone()))) {
        return Ok(());
    }
    drive(&mut replay, sender)?;
    // Without a tick the screen closes, and the error is printed below the prompt.
    replay.ensure_any()?;
    sender.send_blocking(Message::Read(replay.played().missing()));
    Ok(())
}
