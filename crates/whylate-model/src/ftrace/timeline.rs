// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports the scheduling timeline from text traces of other tools: ftrace's files `trace` and `trace_pipe`, `trace-cmd
//! report`, `perf script` and `perf sched script`.
//!
//! What a trace does not record is unknown. Unreadable lines, and events that the trace reports as missing, are
//! counted; after missing events nothing is known of a CPU until its next event.

mod answer;
mod lives;

use std::collections::BTreeMap;
use std::io::BufRead;

use thiserror::Error;

pub use self::answer::{Command, End, LateWait, Wanted, WhyThis};
pub use self::lives::Life;

use self::lives::Lives;
use super::fields::{Stage, TraceEvent, parse_event};
use super::form::{Events, has_end};
use super::line::{GONE, Gap, Lacks, TraceLine};
use super::{LONGEST, NO_CPU, NO_POINT, is_blank, is_heading};
use crate::name::Interner;
use crate::paste::{Lines, PasteError};
use crate::path::events::{Builder, Event};
use crate::path::history::{Name, Recorded, SwitchOut, Waker};
use crate::path::timer::TimerKind;

/// Maximum number of CPUs. No machine has more; a damaged file may name more.
const CPUS: usize = 8 << 10;
/// Maximum number of events. Each takes up to some 250 bytes of memory.
const EVENTS: u64 = 8 << 20;
/// Maximum number of bytes without an event. Between two events of perf there is at most a stack; a longer gap may have
/// no end.
const WITHOUT_EVENT: u64 = 64 << 20;
/// One event of this many may be out of order, and some few of any number.
const MAX_OUT_OF_ORDER: u64 = 20;
const FEW_OUT_OF_ORDER: u64 = 20;
/// Name that the kernel prints for a thread without a cached `comm`.
const FORGOTTEN: &str = "<...>";

/// Why a file cannot be imported.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The file cannot be read, or it is unclear how its lines were altered.
    #[error(transparent)]
    Paste(#[from] PasteError),
    /// The file has too many events for memory.
    #[error("it has more than {EVENTS} events: cut it to the time that matters")]
    TooLong,
    /// The events have no CPU number.
    #[error("{NO_CPU}")]
    NoCpu,
    /// The timestamps are in an unknown unit.
    #[error("{NO_POINT}")]
    NoPoint,
    /// No event shows which thread was on a CPU.
    #[error("no event in it shows which thread ran: record sched_switch and sched_waking, and interrupts too")]
    NoSwitches,
    /// No line is an event.
    #[error("no line in it is an event: give the text output of trace_pipe, `trace-cmd report` or `perf script`")]
    NotATrace,
    /// A long run of lines has no event.
    #[error("{} MiB in a row contain no trace event: give the text output of trace_pipe, `trace-cmd report` or `perf script`", WITHOUT_EVENT >> 20)]
    NoEvents,
    /// The file has several traces, one after another: their events are not in order of time.
    #[error(
        "its events are not in order of time, as if it were several traces one after another: give one of them, or sort \
         the lines by their stamps"
    )]
    SeveralTraces,
    /// The trace has no such thread.
    #[error("it has no thread {0}: leave out --pid and --comm, or name one that is in it")]
    NoSuchThread(String),
}

/// An imported trace.
#[derive(Debug)]
pub struct Trace {
    past: Recorded,
    lives: Lives,
    handlers: Interner,
    /// Time of the first event.
    pub begin_ns: u64,
    /// Time of the last event.
    pub end_ns: u64,
    /// Number of lines and events that could not be used, by reason.
    pub lost: BTreeMap<&'static str, u64>,
    /// Limitations: kinds of events that are not recorded, and the consequence.
    pub limitations: Vec<&'static str>,
    /// Alterations of the lines that were undone.
    pub undone: Vec<String>,
}

/// Kinds of events that the trace has.
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
    handlers: Interner,
    /// Kind of the timer that expired with the last event of each CPU, if one did.
    timers: Vec<Option<TimerKind>>,
    kinds: Kinds,
    has_switches: bool,
    events: u64,
    /// A heading came after events: another trace begins.
    is_next_trace: bool,
    /// Another trace began before the last event.
    has_earlier_trace: bool,
    begin_ns: Option<u64>,
    last_ns: u64,
    end_ns: u64,
    without_cpu: u64,
    without_point: u64,
    lost: BTreeMap<&'static str, u64>,
    undone: Vec<String>,
}

impl Trace {
    /// Reads a file to its end.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or does not show which threads were on the CPUs.
    pub fn read(input: impl BufRead) -> Result<Self, ImportError> {
        let mut reader = Reader::default();
        let mut lines = Lines::new(input, Events, LONGEST)?;
        let (mut line, mut with_event) = (String::new(), 0);
        while lines.next(&mut line).map_err(PasteError::Io)? {
            let events = reader.events;
            if lines.is_cut(&line) {
                reader.lose("unreadable", 1);
                continue;
            }
            reader.line(&line);
            if reader.events > events {
                with_event = lines.taken();
            }
            if lines.taken() - with_event >= WITHOUT_EVENT {
                return Err(ImportError::NoEvents);
            }
            if reader.events > EVENTS {
                return Err(ImportError::TooLong);
            }
        }
        reader.undone = lines.undone();
        let out_of_order = reader.lost.get("out_of_order").copied().unwrap_or(0);
        if reader.has_earlier_trace
            || out_of_order >= FEW_OUT_OF_ORDER && out_of_order > reader.events / MAX_OUT_OF_ORDER
        {
            return Err(ImportError::SeveralTraces);
        }
        reader.end()
    }

    /// Returns the scheduling timeline.
    pub fn history(&self) -> &Recorded {
        &self.past
    }

    /// Returns the threads, in the order of their first mention.
    pub fn lives(&self) -> &[Life] {
        &self.lives.all
    }
}

impl Reader {
    fn line(&mut self, text: &str) {
        // In a line of perf a space precedes the TID, in one of ftrace a dash.
        if let Some(line) =
            TraceLine::parse_perf(text).or_else(|| TraceLine::parse(text)).filter(TraceLine::is_credible)
        {
            self.event(&line);
        } else if let Some(gap) = Gap::parse(text) {
            self.lose("events", gap.lost);
            if (gap.cpu as usize) < CPUS {
                self.add(gap.cpu as usize, Event::Lost);
            }
        } else if text.trim_start().starts_with("# tracer:") {
            self.is_next_trace |= self.events > 0;
        } else if !is_blank(text) && !is_heading(text) {
            self.lose("unreadable", 1);
            match TraceLine::lacks(text) {
                Some(Lacks::Cpu) => self.without_cpu += 1,
                Some(Lacks::Point) => self.without_point += 1,
                None => {}
            }
        }
    }

    fn lose(&mut self, reason: &'static str, more: u64) {
        let lost = self.lost.entry(reason).or_default();
        *lost = lost.saturating_add(more);
    }

    fn event(&mut self, line: &TraceLine<'_>) {
        self.events += 1;
        let cpu = line.cpu as usize;
        if cpu >= CPUS {
            return self.lose("cpus_full", 1);
        }
        if std::mem::take(&mut self.is_next_trace) {
            self.has_earlier_trace |= line.time_ns < self.last_ns;
            // Between two traces nothing was recorded.
            for other in 0..self.timers.len() {
                self.add(other, Event::Lost);
            }
        }
        if line.time_ns < self.last_ns {
            // The event is moved to the end of those that precede it in the file.
            self.lose("out_of_order", 1);
        }
        self.last_ns = self.last_ns.max(line.time_ns);
        self.begin_ns.get_or_insert(self.last_ns);
        let Some(parsed) = parse_event(line.event, line.text).filter(|_| has_end(line.event, line.text)) else {
            return self.lose("unreadable", 1);
        };
        if self.timers.len() <= cpu {
            self.timers.resize(cpu + 1, None);
        }
        let (tid, name) = match parsed {
            TraceEvent::Switch { from, from_name, .. } => (from, from_name),
            _ => (line.tid, line.comm),
        };
        if tid != GONE {
            let is_name_known = name != FORGOTTEN && !(line.is_cut && name == line.comm);
            let name = if is_name_known { Name::new(name) } else { self.name_of(tid, name) };
            match parsed {
                TraceEvent::Exec { tid, old_tid, .. } if tid != old_tid && self.builder.holder(cpu) != Some(tid) => {
                    let old_name = self.lives.present(old_tid, self.last_ns).name();
                    self.builder.seen(cpu, self.last_ns, old_tid, old_name);
                    self.renumber(cpu, tid, old_tid);
                }
                _ => {
                    // A thread that executes a program has its new TID already before the event.
                    if let Some(old_tid) = self.builder.holder(cpu)
                        && old_tid != tid
                        && old_tid != 0
                        && self.lives.has_ended(tid)
                        && self.lives.present(old_tid, self.last_ns).name() == name
                    {
                        self.renumber(cpu, tid, old_tid);
                    }
                    self.builder.seen(cpu, self.last_ns, tid, name);
                }
            }
        }
        self.take(cpu, line, parsed);
        if !matches!(parsed, TraceEvent::Waking(_) | TraceEvent::Awake(_)) {
            self.timers[cpu] = if let TraceEvent::TimerExpires(timer) = parsed { Some(timer) } else { None };
        }
    }

    /// Returns a thread's name if the line has none, or only its start.
    fn name_of(&mut self, tid: u32, start: &str) -> Name {
        let known = self.lives.present(tid, self.last_ns).name();
        if start == FORGOTTEN || known.text().starts_with(start) { known } else { Name::new(start) }
    }

    fn renumber(&mut self, cpu: usize, tid: u32, old_tid: u32) {
        let at_ns = self.add(cpu, Event::Renumbered(tid));
        self.lives.renumbered(tid, old_tid, at_ns);
    }

    fn add(&mut self, cpu: usize, event: Event) -> u64 {
        self.end_ns = self.builder.add(cpu, self.last_ns, event);
        self.end_ns
    }

    fn take(&mut self, cpu: usize, line: &TraceLine<'_>, parsed: TraceEvent<'_>) {
        self.kinds.flags |= !line.flags.is_empty();
        let event = match parsed {
            TraceEvent::Switch { from, from_name, exit, to, to_name } => {
                self.has_switches = true;
                let (from_name, to_name) = (Name::new(from_name), Name::new(to_name));
                let event = Event::Switch { from, from_name, exit, to, to_name };
                let at_ns = self.add(cpu, event);
                if from != 0 {
                    self.lives.switched_out(from, from_name, at_ns, exit == SwitchOut::Dead);
                }
                if to != 0 {
                    self.lives.switched_in(to, to_name, at_ns);
                }
                return;
            }
            TraceEvent::New(tid, name) => {
                let at_ns = self.add(cpu, Event::New(tid));
                return self.lives.born(tid, Name::new(name), line.tid, at_ns);
            }
            TraceEvent::Exec { path, .. } => {
                let name = Name::new(path.rsplit_once('/').map_or(path, |(_, name)| name));
                let at_ns = self.add(cpu, Event::Exec(name));
                return self.lives.exec(line.tid, name, at_ns);
            }
            TraceEvent::Waking(tid) => {
                self.kinds.wakings = true;
                self.waking(cpu, line, tid)
            }
            // Without `sched_waking`, `sched_wakeup` has the same information, except for the waker if it happens on
            // another CPU.
            TraceEvent::Awake(tid) if !self.kinds.wakings => self.waking(cpu, line, tid),
            TraceEvent::Awake(tid) => Event::Awake(tid),
            TraceEvent::Moved(tid, from_cpu) => Event::Moved(tid, from_cpu),
            TraceEvent::Irq(name) => {
                self.kinds.interrupts = true;
                Event::Irq(Name::new(name))
            }
            TraceEvent::IrqEnds => Event::IrqEnds,
            TraceEvent::Softirq(number) => {
                self.kinds.interrupts = true;
                Event::Softirq(number)
            }
            TraceEvent::SoftirqEnds => Event::SoftirqEnds,
            TraceEvent::SoftirqRaised(number) => Event::SoftirqRaised(number),
            TraceEvent::TimerExpires(timer) => Event::TimerExpires(timer),
            TraceEvent::TimerEnds => Event::TimerEnds,
            TraceEvent::Queued(item) => Event::Queued(item, self.context(cpu, line)),
            TraceEvent::Work(item, function) => Event::Work(item, u64::from(self.handlers.number(function))),
            TraceEvent::WorkEnds => Event::WorkEnds,
            TraceEvent::Request { device, sector, operation, stage } => {
                self.kinds.requests = true;
                match stage {
                    Stage::Created => Event::RequestBegins(device, sector, operation),
                    Stage::Issued => Event::RequestIssued(device, sector, operation),
                    Stage::Done => Event::RequestDone(device, sector),
                }
            }
            TraceEvent::Other => return,
        };
        self.add(cpu, event);
    }

    fn waking(&self, cpu: usize, line: &TraceLine<'_>, tid: u32) -> Event {
        self.context(cpu, line).map_or(Event::Waking(tid), |by| Event::WakingBy(tid, by))
    }

    /// Returns the context in which a thread is woken, from the line's flags if it has any.
    fn context(&self, cpu: usize, line: &TraceLine<'_>) -> Option<Waker> {
        if let Some(timer) = self.timers[cpu] {
            return Some(Waker::Timer(timer));
        }
        // Kernels with PREEMPT_LAZY patches have another column before that of interrupts; the preemption depth, a digit or a
        // point, comes after it.
        match line.flags.bytes().skip(2).take(2).find(|flag| b"hHzZs".contains(flag)) {
            Some(b's') => Some(Waker::Softirq),
            Some(_) => Some(Waker::Irq),
            None => None,
        }
    }

    fn end(mut self) -> Result<Trace, ImportError> {
        let begin_ns = match self.begin_ns.filter(|_| self.has_switches || self.without_point + self.without_cpu == 0) {
            Some(begin_ns) => begin_ns,
            None if self.without_point > 0 => return Err(ImportError::NoPoint),
            None if self.without_cpu > 0 => return Err(ImportError::NoCpu),
            None => return Err(ImportError::NotATrace),
        };
        let end_ns = self.end_ns.max(self.last_ns);
        if !self.has_switches {
            return Err(ImportError::NoSwitches);
        }
        self.lose("unseen_switches", self.builder.unseen_switches);
        self.lose("queuers_overwritten", self.builder.queuers_lost);
        self.lost.retain(|_, count| *count > 0);
        let tells_interrupts = self.kinds.interrupts || self.kinds.flags;
        let mut limitations = Vec::new();
        if !self.kinds.wakings {
            limitations.push(
                "no sched_waking: wakers are taken from sched_wakeup, which another CPU than the waker's may record",
            );
        }
        if !tells_interrupts {
            limitations.push(
                "no interrupts: a waker is believed only if the two threads wake each other, or have a common ancestor",
            );
        }
        if !self.kinds.requests {
            limitations.push("no block events: waits for disks are shown as waits for interrupts");
        }
        // The thread switched in by the last event is still on the CPU.
        let mut past = self.builder.finish(end_ns.saturating_add(1));
        let Reader { lives, handlers, lost, undone, .. } = self;
        if !tells_interrupts {
            lives.drop_unreliable_wakers(&mut past);
        }
        Ok(Trace { past, lives, handlers, begin_ns, end_ns, lost, limitations, undone })
    }
}

#[cfg(test)]
mod tests;
