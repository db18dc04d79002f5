// SPDX-License-Identifier: MIT OR Apache-2.0
//! Latency traces of the tracers `irqsoff`, `preemptoff` and `preemptirqsoff`: a header about the longest section, its
//! records, and the stack at its end (print_trace_header() in kernel/trace/trace.c). Up to 2.6.2x the header lines have
//! no `#`, and records have the caller in parentheses.

use super::line::{LONGEST_COMM, number};
use super::place::SectionFunctions;
use crate::text::function;
use crate::{ActorName, Labels, LateEvent};

/// Functions of the tracers themselves, which appear at the end of a section.
const TRACER_FUNCTIONS: [&str; 6] = [
    "trace_hardirqs_on",
    "trace_hardirqs_off",
    "tracer_hardirqs_",
    "trace_preempt_on",
    "tracer_preempt_on",
    "stop_critical_timing",
];
/// Maximum number of frames of a kernel stack.
const MAX_FRAMES: usize = 128;

/// The longest section that a tracer recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyTrace {
    /// Name of the tracer.
    pub tracer: String,
    /// Kernel release.
    pub release: String,
    /// Length of the section, in whole microseconds.
    pub latency_ns: u64,
    /// CPU of the section.
    pub cpu: u32,
    /// Name of the thread at the section's end.
    pub comm: String,
    /// TID of the thread.
    pub tid: u32,
    /// Caller of the function that started the section.
    pub started_at: String,
    /// Caller of the function that ended the section.
    pub ended_at: String,
    /// Function that started the section, if its record is present.
    pub disabled_by: Option<String>,
    /// Function that ended the section, if its record is present.
    pub enabled_by: Option<String>,
    /// Whether interrupts were disabled when the ending function was called, if its record is present.
    ended_with_irqs_off: Option<bool>,
    /// Time of the end's record, since the start.
    ended_us: Option<u64>,
    /// Stack at the end, innermost frame first.
    pub stack: Vec<String>,
}

impl LatencyTrace {
    /// Parses the first latency trace in a text.
    pub fn parse(text: &str) -> Option<Self> {
        let mut reader = LatencyReader::default();
        let found = text.lines().find_map(|line| reader.take(line).1);
        found.or_else(|| reader.finish())
    }

    /// Returns whether the header matches the records: the kernel may start another trace while one is read. The
    /// records at the end are written just before and after the latency is taken.
    pub fn is_whole(&self) -> bool {
        let latency_us = self.latency_ns / 1_000;
        let has_end = self.ended_us.is_some_and(|ended_us| ended_us.abs_diff(latency_us) <= 50 + latency_us / 20);
        has_end && !self.stack.is_empty()
    }

    /// Returns whether the header or a record names the section's thread.
    pub fn has_thread(&self) -> bool {
        self.tid != 0 || !self.comm.is_empty()
    }

    /// Returns whether the section is a CPU's time offline: it went offline with interrupts disabled, and enables them
    /// when it comes online.
    pub fn is_cpu_coming_online(&self) -> bool {
        self.tid == 0
            && ["start_secondary", "secondary_start_kernel"].iter().any(|name| self.ended_at.starts_with(name))
    }

    /// Returns the functions that start and end the section.
    pub fn place(&self) -> SectionFunctions<'_> {
        let is_preemption = match self.tracer.as_str() {
            "preemptoff" => true,
            "preemptirqsoff" => self.ended_with_irqs_off == Some(false),
            _ => false,
        };
        let disabled_by = self.disabled_by.as_deref().unwrap_or(&self.started_at);
        SectionFunctions { is_preemption, enabled_by: self.function(), caller: self.caller(), disabled_by, handler: "" }
    }

    /// Returns the function that ended the section, as far as it is known: `vprintk_emit` if a function that it called
    /// enabled interrupts.
    pub fn function(&self) -> &str {
        self.enabled_by.as_deref().unwrap_or(&self.ended_at)
    }

    /// Returns the caller of that function, as far as it is known.
    pub fn caller(&self) -> &str {
        if self.function() != self.ended_at {
            return &self.ended_at;
        }
        let within = self.stack.iter().position(|frame| frame == self.function()).map_or(0, |at| at + 1);
        self.stack.get(within).map_or("", String::as_str)
    }

    /// Returns the stack, innermost frame first, with the functions that are recorded apart from it.
    pub fn whole_stack(&self) -> Vec<String> {
        let mut stack = self.stack.clone();
        for name in [Some(&self.ended_at), self.enabled_by.as_ref()].into_iter().flatten() {
            if !name.is_empty() && !stack.contains(name) {
                stack.insert(0, name.clone());
            }
        }
        stack
    }

    /// Returns labels that identify the section.
    pub fn labels(&self) -> Labels {
        self.place().labels()
    }

    /// Returns the late event of the section, which ended at `at_unix_ns`.
    pub fn event(&self, at_unix_ns: u64) -> LateEvent {
        let thread = ActorName::thread(self.comm.as_str(), self.tid);
        let stack = self.whole_stack();
        let mut event = super::section_event(&self.place(), thread, at_unix_ns, self.latency_ns, self.cpu, stack);
        event.labels.insert("started_at".to_owned(), self.started_at.clone());
        event.labels.insert("ended_at".to_owned(), self.ended_at.clone());
        event
    }
}

/// Assembles latency traces line by line.
#[derive(Debug, Default)]
pub struct LatencyReader {
    open: Option<LatencyTrace>,
    /// Whether the header was read up to the latency.
    has_latency: bool,
    /// Whether the line with the latency lacks its closing parenthesis so far.
    is_unended: bool,
    /// Whether the previous line was a record.
    after_record: bool,
    in_stack: bool,
}

/// Class of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineClass {
    /// A part of a latency trace.
    Part,
    /// The heading of another tracer's latency trace.
    AnotherTracer,
    /// Any other line.
    Other,
}

impl LatencyReader {
    /// Adds a line; returns its class, and the trace that ended with or before it.
    pub fn take(&mut self, line: &str) -> (LineClass, Option<LatencyTrace>) {
        let line = line.trim();
        if let Some((tracer, release)) = title(line) {
            let finished = self.finish();
            let is_ours = ["irqsoff", "preemptoff", "preemptirqsoff"].contains(&tracer);
            if !is_ours {
                return (LineClass::AnotherTracer, finished);
            }
            let release = release.split_once(" on ").map_or("", |(_, release)| release.trim());
            let (tracer, release) = (tracer.to_owned(), release.to_owned());
            self.open = Some(LatencyTrace { tracer, release, ..LatencyTrace::default() });
            return (LineClass::Part, finished);
        }
        let Some(trace) = &mut self.open else { return (LineClass::Other, None) };
        if line.is_empty() {
            return (LineClass::Other, None);
        }
        if line.strip_prefix('#').is_some_and(|comment| comment.trim_start().starts_with("tracer:")) {
            return (LineClass::Part, self.finish());
        }
        let after_record = std::mem::replace(&mut self.after_record, false);
        if self.is_unended && line.ends_with(')') && !line.contains("| task:") {
            self.is_unended = false;
            return (LineClass::Part, None);
        }
        if is_heading(line) {
            if heading(trace, line.trim_start_matches('#').trim()) {
                (self.has_latency, self.is_unended) = (true, !line.ends_with(')'));
            }
            return (LineClass::Part, None);
        }
        if let Some(frame) = line.strip_prefix("=> ") {
            if self.in_stack && trace.stack.len() < MAX_FRAMES {
                trace.stack.push(function(frame).to_owned());
            }
            return (LineClass::Part, None);
        }
        let record = record(line);
        if !self.in_stack && (is_cut(line) || after_record && record.is_none() && is_rest(line)) {
            // The function names of the trace are unreliable then.
            self.open = None;
            return (LineClass::Other, None);
        }
        self.after_record = record.is_some();
        match record {
            // The stack ends the trace.
            Some(_) if self.in_stack => (LineClass::Other, self.finish()),
            Some(Record::Stack) => {
                self.in_stack = true;
                (LineClass::Part, None)
            }
            Some(Record::Call { function, irqs_off, at_us }) => {
                if trace.comm.is_empty()
                    && let Some((comm, tid)) = thread(line).filter(|(comm, _)| comm.chars().count() <= LONGEST_COMM)
                {
                    (trace.comm, trace.tid) = (comm.to_owned(), tid);
                }
                if trace.disabled_by.is_none() {
                    trace.disabled_by = Some(function.to_owned());
                }
                if !TRACER_FUNCTIONS.iter().any(|hook| function.starts_with(hook)) {
                    trace.enabled_by = Some(function.to_owned());
                    trace.ended_with_irqs_off = Some(irqs_off);
                    trace.ended_us = at_us;
                }
                (LineClass::Part, None)
            }
            Some(Record::Event) => (LineClass::Part, None),
            None if self.in_stack => (LineClass::Other, self.finish()),
            None => (LineClass::Other, None),
        }
    }

    /// Returns the current trace, unless its header ends before the latency.
    pub fn finish(&mut self) -> Option<LatencyTrace> {
        let LatencyReader { open, has_latency, is_unended, .. } = std::mem::take(self);
        open.filter(|_| has_latency && !is_unended)
    }
}

/// Returns whether a line belongs to a latency trace, whatever precedes it.
pub(crate) fn is_part(line: &str) -> bool {
    let line = line.trim();
    title(line).is_some()
        || super::is_stack_frame(line)
        || is_heading(line) && !line.starts_with(['#', '-'])
        || record(line).is_some() && !is_cut(line) && (line.contains(" <-") || !line.contains("<-"))
}

/// Returns whether a line shows that a text is a latency trace: its title, its latency, or a record of a section.
pub(crate) fn is_section_trace(line: &str) -> bool {
    let line = line.trim();
    let is_header = line.trim_start_matches(['#', ' ']).starts_with("latency: ");
    title(line).is_some() || is_header || matches!(record(line), Some(Record::Call { .. }))
}

/// Returns whether a header line or a record is cut off.
pub(crate) fn is_cut(line: &str) -> bool {
    let line = line.trim_start_matches([' ', '#']).trim_end();
    let has_cpu = || line.split_once("CPU#").is_some_and(|(_, cpu)| cpu.starts_with(|c: char| c.is_ascii_digit()));
    let has_no_function = || match record(line) {
        // The name of an event contains a colon.
        Some(Record::Event) => line.split_once("us").is_some_and(|(_, text)| text.matches(": ").count() < 2),
        Some(_) => false,
        None => line.ends_with(':') && record(&format!("{line} x")).is_some(),
    };
    line == "=> started at:"
        || line == "=> ended at:"
        || line.starts_with("latency: ") && !has_cpu()
        || has_no_function()
}

/// Returns whether a line may be the rest of a record: `lock <-caller`, `(caller)`, a word.
fn is_rest(line: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte);
    line.contains("<-") || line.ends_with(')') || line.bytes().all(is_name)
}

/// Parses the tracer and the text after it: `irqsoff latency trace v1.1.5 on 2.6.26`.
fn title(line: &str) -> Option<(&str, &str)> {
    let (tracer, rest) = line.trim_start_matches('#').trim_start().split_once(" latency trace v")?;
    (!tracer.contains(char::is_whitespace)).then_some((tracer, rest))
}

/// Returns whether a line belongs to a header: a comment, or what old kernels write without `#`.
pub(crate) fn is_heading(line: &str) -> bool {
    let starts = ["latency: ", "| task: ", "=> started at:", "=> ended at:"];
    line.starts_with('#')
        || starts.iter().any(|start| line.starts_with(start))
        || line.len() >= 10 && line.bytes().all(|byte| byte == b'-')
}

/// Parses a header line; returns whether it is the one with the latency.
fn heading(trace: &mut LatencyTrace, line: &str) -> bool {
    if let Some(rest) = line.strip_prefix("latency: ").filter(|_| !is_cut(line)) {
        let latency = rest.split_once(" us").and_then(|(us, _)| number::<u64>(us)?.checked_mul(1_000));
        let cpu = rest
            .split_once("CPU#")
            .map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
        if let (Some(latency_ns), Some(cpu)) = (latency, cpu.and_then(number)) {
            (trace.latency_ns, trace.cpu) = (latency_ns, cpu);
            return true;
        }
    } else if let Some(rest) = line.strip_prefix("| task: ") {
        // A name may contain anything.
        let thread = rest.rsplit_once(" (uid:").map_or(rest, |(thread, _)| thread);
        if let Some((comm, tid)) = thread.rsplit_once('-')
            && let Some(tid) = number(tid)
        {
            (trace.comm, trace.tid) = (comm.to_owned(), tid);
        }
    } else if let Some(place) = line.strip_prefix("=> started at:") {
        trace.started_at = function(place).to_owned();
    } else if let Some(place) = line.strip_prefix("=> ended at:") {
        trace.ended_at = function(place).to_owned();
    }
    false
}

/// A record of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record<'a> {
    Call { function: &'a str, irqs_off: bool, at_us: Option<u64> },
    Stack,
    Event,
}

/// Parses `comm-tid 7d..1 12116us : function <-parent`: the name may contain spaces, so parsing starts at the
/// timestamp.
fn record(line: &str) -> Option<Record<'_>> {
    let at = line.match_indices("us").map(|(at, _)| at).take(8).find(|&at| is_stamp(line, at))?;
    let (_, text) = line[at + 2..].split_once(": ")?;
    if text.trim() == "<stack trace>" {
        return Some(Record::Stack);
    }
    // A kernel without frame pointers does not know the caller.
    let text = text.trim();
    let in_parentheses = || text.strip_suffix(')')?.split_once(" (");
    let called = text.split_once(" <-").or_else(in_parentheses).map_or(text, |(called, _)| called).trim();
    if called.is_empty() || called.contains([' ', ':', '=']) {
        return Some(Record::Event);
    }
    // The word before the timestamp starts with the CPU and the flags.
    let flags = line[..at].trim_end_matches(|c: char| c.is_ascii_digit()).split_ascii_whitespace().next_back()?;
    let irqs_off = flags.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(['d', 'D']);
    let stamp = line[..at].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    Some(Record::Call { function: function(called), irqs_off, at_us: number(stamp) })
}

/// Parses the thread of a record; its name has up to 8 bytes.
fn thread(line: &str) -> Option<(&str, u32)> {
    let at = line.match_indices("us").map(|(at, _)| at).take(8).find(|&at| is_stamp(line, at))?;
    let head = line[..at].trim_end_matches(|c: char| c.is_ascii_digit()).trim_end();
    let (thread, _) = head.rsplit_once(' ')?;
    let (comm, tid) = thread.trim().rsplit_once('-')?;
    Some((comm, number(tid)?))
}

/// Returns whether a number of microseconds ends at `at`, followed by a delay mark and a colon.
fn is_stamp(line: &str, at: usize) -> bool {
    let (before, after) = (&line.as_bytes()[..at], &line.as_bytes()[at + 2..]);
    before.last().is_some_and(u8::is_ascii_digit) && matches!(after, [_, b':', b' ', ..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CauseKind;

    pub(crate) const REFERENCE: &str = include_str!("../../tests/ftrace/irqsoff-5.4.txt");

    #[test]
    fn parses_trace_of_5_4_kernel() {
        let trace = LatencyTrace::parse(REFERENCE).expect("a trace");
        assert_eq!((trace.latency_ns, trace.cpu, trace.tid), (12_116_000, 7, 207));
        assert_eq!(format!("{}-{}", trace.comm, trace.tid), "qseecom-unload--207");
        assert_eq!((trace.started_at.as_str(), trace.ended_at.as_str()), ("vprintk_emit", "vprintk_emit"));
        assert_eq!((trace.tracer.as_str(), trace.release.as_str()), ("irqsoff", "5.4.161-qgki-debug"));
        assert_eq!(trace.function(), "console_trylock_spinning");
        assert!(trace.is_whole());
        assert_eq!(trace.place().kind(), CauseKind::IrqsOff);
        let stack = "console_trylock_spinning vprintk_emit vprintk_default vprintk_func printk __dynamic_pr_debug \
                     __qseecom_unload_app_kthread_func kthread ret_from_fork";
        assert_eq!(trace.whole_stack(), stack.split_whitespace().collect::<Vec<_>>());
        let event = trace.event(1);
        assert_eq!((event.latency_ns, event.causes[0].ns), (12_116_000, 12_116_000));
    }

    #[test]
    fn accepts_newer_flags_and_offsets() {
        let text = "# preemptirqsoff latency trace v1.1.5 on 6.12.57\n\
            # latency: 20012 us, #4/4, CPU#1 | (M:preempt VP:0, KP:0, SP:0 HP:0 #P:2)\n\
            #    | task: my task (uid:7)-1-88 (uid:0 nice:0 policy:0 rt_prio:0)\n\
            #  => started at: execute_preemptirqtest+0x30/0x100\n#  => ended at:   preemptirqtest_0+0x9/0x20\n\
            my task(-88        1...1.    0us : preemptirqtest_0 <-preemptirq_delay_run\n\
            my task(-88        1...1. 20011us!: execute_preemptirqtest+0x5/0x10 <-preemptirqtest_0+0x9/0x20\n\
            my task(-88        1...1. 20012us : tracer_preempt_on <-preemptirqtest_0\n\
            my task(-88        1...1. 20020us : <stack trace>\n => preemptirqtest_0+0x9/0x20\n\n# tracer: nop\n => not_of_it\n";
        let trace = LatencyTrace::parse(text).expect("a trace");
        assert_eq!(
            (trace.comm.as_str(), trace.tid, trace.place().kind()),
            ("my task (uid:7)-1", 88, CauseKind::PreemptOff)
        );
        assert_eq!(trace.function(), "execute_preemptirqtest");
        assert_eq!(trace.disabled_by.as_deref(), Some("preemptirqtest_0"));
        assert_eq!(trace.whole_stack(), ["execute_preemptirqtest", "preemptirqtest_0"]);
    }

    #[test]
    fn parses_trace_of_6_12_without_callers() {
        let trace = LatencyTrace::parse(include_str!("../../tests/ftrace/irqsoff-6.12.txt")).expect("a trace");
        assert_eq!((trace.latency_ns, trace.cpu, trace.place().kind()), (20_113_000, 1, CauseKind::IrqsOff));
        assert_eq!((trace.function(), trace.caller()), ("execute_preemptirqtest", "preemptirq_delay_run"));
        assert_eq!(trace.labels()["disabled_by"], "execute_preemptirqtest");
        let stack = "execute_preemptirqtest preemptirq_delay_run kthread ret_from_fork ret_from_fork_asm";
        assert_eq!(trace.whole_stack(), stack.split_whitespace().collect::<Vec<_>>());
    }

    #[test]
    fn parses_header_of_2_6_without_comment_signs() {
        for indent in ["", " "] {
            let text = include_str!("../../tests/ftrace/irqsoff-2.6.txt");
            let text: String = text.lines().map(|line| format!("{indent}{line}\n")).collect();
            let trace = LatencyTrace::parse(&text).expect("a trace");
            assert_eq!((trace.latency_ns, trace.cpu, trace.release.as_str()), (7_310_000, 3, "2.6.27"));
            assert_eq!((trace.comm.as_str(), trace.tid), ("my daemon", 412));
            assert_eq!((trace.function(), trace.caller()), ("_spin_unlock_irqrestore", "tty_ldisc_flush"));
            assert_eq!(trace.disabled_by.as_deref(), Some("_spin_lock_irqsave"));
            assert_eq!(trace.place().kind(), CauseKind::IrqsOff);
        }
    }

    #[test]
    fn truncated_header_is_no_trace() {
        let until = |mark: &str| &REFERENCE[..REFERENCE.find(mark).expect("it is there")];
        assert_eq!(LatencyTrace::parse(until(" us, #4/4")), None);
        let broken = LatencyTrace::parse(until("qseecom--207")).expect("a trace");
        assert_eq!((broken.latency_ns, broken.function()), (12_116_000, "vprintk_emit"));
        assert!(!broken.is_whole());
    }

    #[test]
    fn trace_that_changed_during_read_is_inconsistent() {
        for (was, is) in [("latency: 12116 us", "latency: 13116 us"), (" => ", "")] {
            let trace = LatencyTrace::parse(&REFERENCE.replace(was, is)).expect("a trace");
            assert!(!trace.is_whole(), "{is}");
        }
    }
}
