// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports ftrace files: latency traces of `irqsoff` and its relatives, and captures of `trace_pipe`. One file may have
//! both, with any text in between, as in a mailed report. [`timeline`] reads the scheduling timeline from captures.
//!
//! A file is read once, line by line, with memory use independent of its size.

mod capture;
mod fields;
mod form;
mod latency;
mod line;
mod place;
mod series;
pub mod timeline;
mod timers;

use std::io::BufRead;

use thiserror::Error;

pub(crate) use self::form::Events;
pub use self::latency::LatencyTrace;
pub(crate) use self::latency::is_section_trace;
pub use self::line::{GONE, Gap, Lacks, TraceLine};
pub use self::place::SectionFunctions;

use self::capture::Capture;
use self::form::has_end;
use self::latency::{LatencyReader, LineClass};
use crate::late::cpu_subject;
use crate::name::MAX_BYTES;
use crate::paste::{Lines, PasteError};
use crate::sources::IRQSOFF;
use crate::{ActorName, Cause, LateEvent, Snapshot, TopN};

/// Maximum length of a line; longer ones are no trace lines.
pub(crate) const LONGEST: usize = MAX_BYTES;

/// Options of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportOptions {
    /// Report each section at least this long, and each timer at least this late.
    pub late_over_ns: Option<u64>,
    /// Number of longest sections to report at the end if there is no threshold.
    pub worst: usize,
}

/// Why a file could not be imported.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The file cannot be read, or its line wrapping cannot be undone.
    #[error(transparent)]
    Paste(#[from] PasteError),
    /// A latency trace without its header, with a header that ends before the latency, or with truncated lines, and
    /// nothing else.
    #[error(
        "the latency trace breaks off in its heading, lacks it, or has lines that are cut off: copy all of it, from `# tracer:` on"
    )]
    Truncated,
    /// A latency trace of a tracer that measures something else.
    #[error("this is the latency trace of another tracer: give one of irqsoff, preemptoff or preemptirqsoff")]
    AnotherTracer,
    /// The events have no CPU number.
    #[error("{NO_CPU}")]
    NoCpu,
    /// The timestamps are in an unknown unit.
    #[error("{NO_POINT}")]
    NoPoint,
    /// There are events, but none of interrupts or timers.
    #[error(
        "no event in it tells of interrupts: record irq_disable and irq_enable, and irq_handler_* and hrtimer_* beside them"
    )]
    NoSuchEvents,
    /// No line is ftrace output.
    #[error(
        "no line in it is a latency trace or an event of trace_pipe: give the text of ftrace's file `trace` or `trace_pipe`"
    )]
    NotATrace,
}

/// Advice on events without a CPU.
const NO_CPU: &str = "its events have no CPU number, so the CPU of each is not known: record with \
    perf record -a or -C, and print with perf script -F +cpu";
/// Advice on timestamps without a decimal point.
const NO_POINT: &str = "its stamps have no decimal point, so their unit is not known: record with another \
    trace clock (echo mono > trace_clock; not counter or x86-tsc), or, where they are nanoseconds, set the point: \
    sed -E 's/ ([0-9]+)([0-9]{{9}}): / \\1.\\2: /'";

/// Imports a file and passes late events to `each` as they are found. Also returns which alterations of the lines were
/// undone.
///
/// Timestamps are of the trace clock, which starts at boot: as wall-clock times they are in 1970.
///
/// # Errors
/// Fails if the file cannot be read, or has no events of interrupts.
pub fn import(
    input: impl BufRead,
    host: &str,
    options: ImportOptions,
    each: &mut dyn FnMut(LateEvent),
) -> Result<(Snapshot, Vec<String>), ImportError> {
    let mut lines = Lines::new(input, Events, LONGEST)?;
    let mut state = ImportState::default();
    let mut lates = LateSink { threshold_ns: options.late_over_ns, worst: TopN::new(options.worst), each };
    let mut line = String::new();
    while lines.next(&mut line).map_err(PasteError::Io)? {
        match lines.is_cut(&line) {
            true => state.unreadable += 1,
            false => state.line(&line, &mut lates),
        }
    }
    Ok((state.end(host, &mut lates)?, lines.undone()))
}

/// Consumer of late events.
struct LateSink<'a> {
    threshold_ns: Option<u64>,
    worst: TopN,
    each: &'a mut dyn FnMut(LateEvent),
}

impl LateSink<'_> {
    /// Returns whether an event of this length would be reported, now or at the end.
    fn wants(&self, latency_ns: u64) -> bool {
        match self.threshold_ns {
            Some(threshold_ns) => latency_ns >= threshold_ns,
            None => {
                !self.worst.is_full()
                    || self.worst.iter().last().is_some_and(|shortest| latency_ns > shortest.latency_ns)
            }
        }
    }

    fn send(&mut self, event: LateEvent) {
        match self.threshold_ns {
            Some(threshold_ns) if event.latency_ns < threshold_ns => {}
            Some(_) => (self.each)(event),
            None => self.worst.add(event),
        }
    }
}

/// State of an import.
#[derive(Debug, Default)]
struct ImportState {
    latency: LatencyReader,
    capture: Capture,
    traces: u64,
    events: u64,
    has_broken_heading: bool,
    has_another_tracer: bool,
    unreadable: u64,
    without_cpu: u64,
    without_point: u64,
}

impl ImportState {
    fn line(&mut self, line: &str, lates: &mut LateSink<'_>) {
        let (class, finished) = self.latency.take(line);
        if let Some(trace) = finished {
            self.trace(&trace, lates);
        }
        match class {
            LineClass::Part => self.has_broken_heading = true,
            LineClass::AnotherTracer => self.has_another_tracer = true,
            LineClass::Other => {
                if let Some(line) = TraceLine::parse(line).filter(TraceLine::is_credible) {
                    self.events += 1;
                    match has_end(line.event, line.text) {
                        true => self.capture.add(&line, lates),
                        false => self.unreadable += 1,
                    }
                } else if !self.capture.gap(line) && !is_blank(line) {
                    self.unreadable += 1;
                    self.has_broken_heading |= latency::is_part(line) || latency::is_cut(line);
                    match TraceLine::lacks(line) {
                        Some(Lacks::Cpu) => self.without_cpu += 1,
                        Some(Lacks::Point) => self.without_point += 1,
                        None => {}
                    }
                }
            }
        }
    }

    fn trace(&mut self, trace: &LatencyTrace, lates: &mut LateSink<'_>) {
        if !trace.has_thread() {
            (self.has_broken_heading, self.unreadable) = (true, self.unreadable + 1);
            return;
        }
        self.traces += 1;
        match self.capture.series.index(trace.labels()) {
            Some(index) => self.capture.series.section(index, trace.latency_ns),
            None => self.capture.count_lost("series_full", 1),
        }
        if lates.wants(trace.latency_ns) {
            lates.send(trace.event(self.capture.last_ns()));
        }
    }

    fn end(mut self, host: &str, lates: &mut LateSink<'_>) -> Result<Snapshot, ImportError> {
        if let Some(trace) = self.latency.finish() {
            self.trace(&trace, lates);
        }
        self.capture.flush(lates);
        if self.traces == 0 && !self.capture.has_any() {
            return Err(match self {
                ImportState { without_point: 1.., .. } => ImportError::NoPoint,
                ImportState { without_cpu: 1.., .. } => ImportError::NoCpu,
                ImportState { events: 1.., .. } => ImportError::NoSuchEvents,
                ImportState { has_another_tracer: true, .. } => ImportError::AnotherTracer,
                ImportState { has_broken_heading: true, .. } => ImportError::Truncated,
                _ => ImportError::NotATrace,
            });
        }
        for event in lates.worst.take() {
            (lates.each)(event);
        }
        let mut snapshot = Snapshot::new(IRQSOFF.name, "import", host, 0);
        self.capture.finish(&mut snapshot);
        *snapshot.lost.entry("unreadable".to_owned()).or_default() += self.unreadable;
        Ok(snapshot)
    }
}

/// Returns whether a line has no data: a header, a stack frame, or an empty line.
fn is_blank(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#') || is_stack_frame(line) || line.ends_with("<stack trace>")
}

/// Returns whether a line is a stack frame, ` => function`, and not the second half of a context switch.
fn is_stack_frame(line: &str) -> bool {
    let frame = line.trim_start().strip_prefix("=> ");
    frame.is_some_and(|frame| !frame.contains(['=', ':']) && !frame.trim().is_empty())
}

/// Returns whether a line is part of trace-cmd's header, or a stack frame as perf prints it.
fn is_heading(line: &str) -> bool {
    let line = line.trim();
    let is_cpu = || line.starts_with("CPU ") && line.ends_with(" is empty");
    let mut words = line.split_ascii_whitespace();
    let (address, symbol) = (words.next().unwrap_or_default(), words.next());
    let is_field = |word: &str| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        })
    };
    let is_frame = || {
        let is_address = address.len() >= 5 && address.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_symbol = |symbol: &str| !is_field(symbol) && (!symbol.starts_with('[') || symbol == "[unknown]");
        is_address && symbol.is_some_and(is_symbol)
    };
    line.starts_with("cpus=") || line.starts_with("version = ") || is_cpu() || is_frame()
}

/// Returns the late event of a section that ended at `at_unix_ns`, in a thread. Its only cause is the
/// section itself.
pub fn section_event(
    place: &SectionFunctions<'_>,
    thread: ActorName,
    at_unix_ns: u64,
    latency_ns: u64,
    cpu: u32,
    stack: Vec<String>,
) -> LateEvent {
    let mut labels = place.labels();
    labels.insert("task".to_owned(), thread.to_string());
    let causes = vec![Cause { stack: stack.clone(), ..Cause::new(place.kind(), place.who(thread), latency_ns) }];
    LateEvent { subject: cpu_subject(cpu), labels, at_unix_ns, latency_ns, cpu, stack, causes, ..LateEvent::default() }
}
