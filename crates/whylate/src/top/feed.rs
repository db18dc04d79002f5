// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where moments come from: a thread that measures, or one that reads a recording. It never waits for the screen while it
//! measures: what the screen is too slow for is counted.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::time::{ClockId, clock_gettime};
use whylate_model::recording::{Header, Line};

use super::state::Own;
use crate::commands::runner::{NOW_AND_THEN, wait};
use crate::commands::sources::{self, Recorded, Wish};
use crate::commands::watch::{Ended, Watch};
use crate::recording::play::Recording;

/// So much waits for the screen.
const QUEUED: usize = 64;
/// The first figures come sooner than the others.
const FIRST: Duration = Duration::from_millis(500);

/// What a feed tells.
#[derive(Debug)]
pub enum Told {
    /// That source is being attached.
    Attaching(String),
    Begun(Box<Header>),
    Moment(Vec<Line>, Own),
    /// So many moments were not told.
    Missed(u64),
    /// Nothing follows; `Some` where that is a failure, in words.
    Ended(Option<String>),
}

/// A thread that tells.
pub struct Feed {
    receiver: Option<Receiver<Told>>,
    /// Readable when there is something.
    pub wake: UnixStream,
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    has_ended: bool,
}

/// The thread's side.
struct Teller {
    sender: SyncSender<Told>,
    wake: UnixStream,
    missed: u64,
}

impl Teller {
    /// Tells it, or counts it.
    fn tell(&mut self, told: Told) {
        let is_moment = matches!(told, Told::Moment(..));
        match self.sender.try_send(told) {
            Ok(()) if self.missed > 0 => {
                if self.sender.try_send(Told::Missed(self.missed)).is_ok() {
                    self.missed = 0;
                }
            }
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.missed += u64::from(is_moment),
        }
        // Where it is full, it is readable.
        let _ = self.wake.write(&[0]);
    }

    /// The same, and waits until there is room; false where nobody listens any more.
    fn tell_surely(&mut self, told: Told) -> bool {
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
        Self::start("whylate-measure", move |teller, stop| measure(teller, stop, &wish, every))
    }

    /// Reads a recording.
    ///
    /// # Errors
    /// As above.
    pub fn recorded(recording: Recording) -> anyhow::Result<Self> {
        Self::start("whylate-replay", move |teller, _| replay(teller, &recording))
    }

    fn start(
        name: &str,
        run: impl FnOnce(&mut Teller, UnixStream) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (sender, receiver) = sync_channel(QUEUED);
        let (wake, wakes) = UnixStream::pair().context("cannot start to measure")?;
        let (stop, stops) = UnixStream::pair().context("cannot start to measure")?;
        for stream in [&wake, &wakes, &stops] {
            stream.set_nonblocking(true)?;
        }
        let mut teller = Teller { sender, wake: wakes, missed: 0 };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let outcome = run(&mut teller, stops);
            teller.tell_surely(Told::Ended(outcome.err().map(|error| format!("{error:#}"))));
        })?;
        Ok(Feed { receiver: Some(receiver), wake, stop: Some(stop), thread: Some(thread), has_ended: false })
    }

    /// What was told since the last call, one by one.
    pub fn take(&mut self) -> Option<Told> {
        let told = self.receiver.as_ref()?.try_recv();
        match told {
            Ok(told) => {
                self.has_ended |= matches!(told, Told::Ended(_));
                Some(told)
            }
            // It has panicked.
            Err(TryRecvError::Disconnected) if !self.has_ended => {
                self.has_ended = true;
                Some(Told::Ended(Some("what measures has failed".to_owned())))
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
    let mut attaching = |card: &whylate_model::Card| teller.tell(Told::Attaching(card.name.to_owned()));
    let Some(attached) = sources::attach(&watch, wish, &mut attaching)? else { return Ok(()) };
    let (mut recorded, header) = Recorded::begin(attached, wish)?;
    teller.tell(Told::Begun(Box::new(header)));
    let started = Instant::now();
    let mut cost = Cost::now();
    let mut due = started + FIRST.min(every);
    loop {
        let ended = wait(&watch, Some(due), NOW_AND_THEN, &mut || recorded.take_late().map(|()| false))?;
        if ended != Ended::Time {
            return Ok(());
        }
        let moment = recorded.moment()?;
        teller.tell(Told::Moment(moment.lines, cost.since()));
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

fn replay(teller: &mut Teller, recording: &Recording) -> anyhow::Result<()> {
    let mut played = recording.play()?;
    if !teller.tell_surely(Told::Begun(Box::new(played.header().clone()))) {
        return Ok(());
    }
    let (mut lines, mut has_any) = (Vec::new(), false);
    while let Some(line) = played.next_line()? {
        // All sources are asked in turn: the second snapshot of one begins the next moment.
        let source = |line: &Line| if let Line::Snapshot(of) = line { Some(of.source.clone()) } else { None };
        let of = source(&line);
        if of.is_some() && lines.iter().any(|before| source(before) == of) {
            has_any = true;
            if !teller.tell_surely(Told::Moment(std::mem::take(&mut lines), Own::default())) {
                return Ok(());
            }
        }
        lines.push(line);
    }
    has_any |= !lines.is_empty();
    teller.tell_surely(Told::Moment(lines, Own::default()));
    if !has_any {
        bail!("{} has no snapshots of that time (choose a span within the recording)", played.name());
    }
    Ok(())
}
