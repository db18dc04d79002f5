// SPDX-License-Identifier: MIT OR Apache-2.0
//! The past of all CPUs from text that others have recorded: ftrace's files `trace` and `trace_pipe`, `trace-cmd
//! report`, `perf script` and `perf sched script`.
//!
//! What a trace does not tell is unknown. Lines that cannot be read, and events that the trace says are missing, are
//! counted; after missing events nothing is known of a CPU until its next one.

mod answer;
mod fields;
mod lives;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead};

use thiserror::Error;

pub use self::answer::{Command, End, LateWait, Wanted, WhyThis};
pub use self::lives::Life;

use self::fields::{Said, Stage, said};
use self::lives::Lives;
use super::events::{Builder, Event};
use super::history::{Exit, Name, Recorded, Waker};
use super::timer::TimerKind;
use crate::ftrace::{COMPRESSED, GONE, Gap, Line, TRACE_DAT, is_blank, read_line};
use crate::text::{BINARY, is_binary};

/// No machine has more CPUs; a damaged file may name more.
const CPUS: usize = 8 << 10;
/// Each takes up to some 250 bytes of memory.
const EVENTS: u64 = 8 << 20;
/// Between two events of perf there is a stack at most. What has none for so long may have no end either.
const WITHOUT_EVENT: u64 = 64 << 20;
/// No kernel has more functions of work items.
const HANDLERS: usize = 64 << 10;
/// What the kernel shows of a thread whose name it has forgotten.
const FORGOTTEN: &str = "<...>";

/// Why a file told nothing.
#[derive(Debug, Error)]
pub enum ImportError {
    /// It cannot be read.
    #[error("cannot read it")]
    Io(#[from] io::Error),
    /// It is of `trace-cmd`.
    #[error("this is a trace.dat: import the output of `trace-cmd report -i` on it")]
    TraceDat,
    /// It is of perf.
    #[error("this is a perf.data: import the output of `perf script --show-lost-events -i` on it")]
    PerfData,
    /// It is compressed.
    #[error("this is compressed: decompress it first")]
    Compressed,
    /// It is no text.
    #[error("{BINARY}")]
    Binary,
    /// It would take too much memory.
    #[error("it has more than {EVENTS} events: cut it to the time that matters")]
    TooLong,
    /// No event tells who had a CPU.
    #[error("no event in it tells who had a CPU: record sched_switch and sched_waking, and interrupts too")]
    NoSwitches,
    /// No line is an event.
    #[error("no line in it is an event: give the text output of trace_pipe, `trace-cmd report` or `perf script`")]
    NotATrace,
    /// It goes on and on with something else.
    #[error("{} MiB in a row contain no trace event: give the text output of trace_pipe, `trace-cmd report` or `perf script`", WITHOUT_EVENT >> 20)]
    NoEvents,
    /// There is no such thread.
    #[error("it has no thread {0}: leave out --pid and --comm, or name one that is in it")]
    NoSuchThread(String),
}

/// What a file has told.
#[derive(Debug)]
pub struct Trace {
    past: Recorded,
    lives: Lives,
    handlers: Vec<Box<str>>,
    /// When its first event was.
    pub begin_ns: u64,
    /// When its last one was.
    pub end_ns: u64,
    /// What could not be used, by the reason.
    pub lost: BTreeMap<&'static str, u64>,
    /// What it does not tell of, and what follows from that.
    pub weaker: Vec<&'static str>,
}

/// Which events there are.
#[derive(Debug, Default)]
struct Kinds {
    wakings: bool,
    interrupts: bool,
    flags: bool,
    requests: bool,
}

#[derive(Debug, Default)]
struct Reader {
    builder: Builder,
    lives: Lives,
    numbers: HashMap<Box<str>, u64>,
    handlers: Vec<Box<str>>,
    /// Of each CPU, whether its last event was that a timer's function runs.
    timers: Vec<bool>,
    kinds: Kinds,
    has_switches: bool,
    events: u64,
    begin_ns: Option<u64>,
    last_ns: u64,
    end_ns: u64,
    lost: BTreeMap<&'static str, u64>,
}

impl Trace {
    /// Reads a file to its end.
    ///
    /// # Errors
    /// When it cannot be read, or does not tell who had the CPUs.
    pub fn read(mut input: impl BufRead) -> Result<Self, ImportError> {
        let start = input.fill_buf()?;
        if start.starts_with(TRACE_DAT) {
            return Err(ImportError::TraceDat);
        }
        if start.starts_with(b"PERFILE") {
            return Err(ImportError::PerfData);
        }
        if COMPRESSED.iter().any(|magic| start.starts_with(magic)) {
            return Err(ImportError::Compressed);
        }
        if is_binary(start) {
            return Err(ImportError::Binary);
        }
        let mut reader = Reader::default();
        let mut bytes = Vec::new();
        let mut input = input.take(WITHOUT_EVENT);
        while read_line(&mut input, &mut bytes)? {
            if input.limit() == 0 {
                return Err(ImportError::NoEvents);
            }
            let events = reader.events;
            // Text that was copied from a web page has spaces that do not break.
            reader.line(&String::from_utf8_lossy(&bytes).replace('\u{a0}', " "));
            if reader.events > events {
                input.set_limit(WITHOUT_EVENT);
            }
            if reader.events > EVENTS {
                return Err(ImportError::TooLong);
            }
        }
        reader.end()
    }

    /// Who had each CPU, and how.
    pub fn history(&self) -> &Recorded {
        &self.past
    }

    /// Its threads, in the order in which they are first told of.
    pub fn lives(&self) -> &[Life] {
        &self.lives.all
    }
}

impl Reader {
    fn line(&mut self, text: &str) {
        // A line of perf has a space before the thread's number, and one of ftrace a dash.
        if let Some(line) = Line::parse_perf(text).or_else(|| Line::parse(text)) {
            self.event(&line);
        } else if let Some(gap) = Gap::parse(text) {
            self.lose("events", gap.lost);
            if (gap.cpu as usize) < CPUS {
                self.add(gap.cpu as usize, Event::Lost);
            }
        } else if !is_blank(text) && !is_heading(text) {
            self.lose("unreadable", 1);
        }
    }

    fn lose(&mut self, reason: &'static str, more: u64) {
        let lost = self.lost.entry(reason).or_default();
        *lost = lost.saturating_add(more);
    }

    fn event(&mut self, line: &Line<'_>) {
        self.events += 1;
        let cpu = line.cpu as usize;
        if cpu >= CPUS {
            return self.lose("cpus_full", 1);
        }
        if line.time_ns < self.last_ns {
            // It is put at the end of what came before it in the file.
            self.lose("out_of_order", 1);
        }
        self.last_ns = self.last_ns.max(line.time_ns);
        self.begin_ns.get_or_insert(self.last_ns);
        let Some(said) = said(line.event, line.text) else { return self.lose("unreadable", 1) };
        if self.timers.len() <= cpu {
            self.timers.resize(cpu + 1, false);
        }
        let (tid, name) = match said {
            Said::Switch { from, from_name, .. } => (from, from_name),
            _ => (line.tid, line.comm),
        };
        if tid != GONE {
            let name = if name == FORGOTTEN { self.lives.present(tid, self.last_ns).name() } else { Name::of(name) };
            self.builder.seen(cpu, self.last_ns, tid, name);
        }
        self.take(cpu, line, said);
        if !matches!(said, Said::Waking(_) | Said::Awake(_)) {
            self.timers[cpu] = said == Said::TimerExpires;
        }
    }

    fn add(&mut self, cpu: usize, event: Event) -> u64 {
        self.end_ns = self.builder.add(cpu, self.last_ns, event);
        self.end_ns
    }

    fn take(&mut self, cpu: usize, line: &Line<'_>, said: Said<'_>) {
        self.kinds.flags |= !line.flags.is_empty();
        let event = match said {
            Said::Switch { from, from_name, exit, to, to_name } => {
                self.has_switches = true;
                let (from_name, to_name) = (Name::of(from_name), Name::of(to_name));
                let event = Event::Switch { from, from_name, exit, to, to_name };
                let at_ns = self.add(cpu, event);
                if from != 0 {
                    self.lives.leaves(from, from_name, at_ns, exit == Exit::Dead);
                }
                if to != 0 {
                    self.lives.comes(to, to_name, at_ns);
                }
                return;
            }
            Said::New(tid, name) => {
                let at_ns = self.add(cpu, Event::New(tid));
                return self.lives.born(tid, Name::of(name), line.tid, at_ns);
            }
            Said::Exec(path) => {
                let name = Name::of(path.rsplit_once('/').map_or(path, |(_, name)| name));
                let at_ns = self.add(cpu, Event::Exec(name));
                return self.lives.exec(line.tid, name, at_ns);
            }
            Said::Waking(tid) => {
                self.kinds.wakings = true;
                self.waking(cpu, line, tid)
            }
            // Without the event of a waking its end tells as much, but for who it was where it ended on another CPU.
            Said::Awake(tid) if !self.kinds.wakings => self.waking(cpu, line, tid),
            Said::Awake(tid) => Event::Awake(tid),
            Said::Irq(name) => {
                self.kinds.interrupts = true;
                Event::Irq(Name::of(name))
            }
            Said::IrqEnds => Event::IrqEnds,
            Said::Softirq(number) => {
                self.kinds.interrupts = true;
                Event::Softirq(number)
            }
            Said::SoftirqEnds => Event::SoftirqEnds,
            Said::SoftirqRaised(number) => Event::SoftirqRaised(number),
            Said::TimerExpires => Event::TimerExpires,
            Said::Queued(item) => Event::Queued(item, self.context(cpu, line)),
            Said::Work(item, function) => Event::Work(item, self.handler(function)),
            Said::WorkEnds => Event::WorkEnds,
            Said::Request { device, sector, operation, stage } => {
                self.kinds.requests = true;
                match stage {
                    Stage::Begun => Event::RequestBegins(device, sector, operation),
                    Stage::Issued => Event::RequestIssued(device, sector, operation),
                    Stage::Done => Event::RequestDone(device, sector),
                }
            }
            Said::TimerEnds | Said::Other => return,
        };
        self.add(cpu, event);
    }

    fn waking(&self, cpu: usize, line: &Line<'_>, tid: u32) -> Event {
        self.context(cpu, line).map_or(Event::Waking(tid), |by| Event::WakingBy(tid, by))
    }

    /// In what a thread is woken is told by the flags, where there are any.
    fn context(&self, cpu: usize, line: &Line<'_>) -> Option<Waker> {
        match line.flags.as_bytes().get(2) {
            _ if self.timers[cpu] => Some(Waker::Timer(TimerKind::Other)),
            Some(b'h' | b'H' | b'z' | b'Z') => Some(Waker::Irq),
            Some(b's') => Some(Waker::Softirq),
            _ => None,
        }
    }

    fn handler(&mut self, function: &str) -> u64 {
        if let Some(&number) = self.numbers.get(function) {
            return number;
        }
        // One more stands for all that there is no room for.
        let function = if self.handlers.len() < HANDLERS { function } else { "(others)" };
        let next = self.handlers.len() as u64;
        let number = *self.numbers.entry(function.into()).or_insert(next);
        if number == next {
            self.handlers.push(function.into());
        }
        number
    }

    fn end(mut self) -> Result<Trace, ImportError> {
        let Some(begin_ns) = self.begin_ns else { return Err(ImportError::NotATrace) };
        let end_ns = self.end_ns.max(self.last_ns);
        if !self.has_switches {
            return Err(ImportError::NoSwitches);
        }
        self.lose("unseen_switches", self.builder.unseen_switches);
        self.lose("queuers_overwritten", self.builder.queuers_lost);
        self.lost.retain(|_, count| *count > 0);
        let tells_interrupts = self.kinds.interrupts || self.kinds.flags;
        let mut weaker = Vec::new();
        if !self.kinds.wakings {
            weaker.push(
                "no sched_waking: wakers are taken from sched_wakeup, which another CPU than the waker's may record",
            );
        }
        if !tells_interrupts {
            weaker.push(
                "no interrupts: a waker is believed only if the two threads wake each other, or have a common ancestor",
            );
        }
        if !self.kinds.requests {
            weaker.push("no block events: waits for disks are shown as waits for interrupts");
        }
        // Whoever got a CPU with the last event has it.
        let mut past = self.builder.finish(end_ns.saturating_add(1));
        let Reader { lives, handlers, lost, .. } = self;
        if !tells_interrupts {
            lives.doubt(&mut past);
        }
        Ok(Trace { past, lives, handlers, begin_ns, end_ns, lost, weaker })
    }
}

/// What trace-cmd writes first, and the frames of stacks that perf writes.
fn is_heading(line: &str) -> bool {
    let line = line.trim();
    let is_cpu = || line.starts_with("CPU ") && line.ends_with(" is empty");
    let word = line.split_ascii_whitespace().next().unwrap_or_default();
    let is_frame = || word.len() >= 5 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    line.starts_with("cpus=") || line.starts_with("version = ") || is_cpu() || is_frame()
}

#[cfg(test)]
mod tests;
