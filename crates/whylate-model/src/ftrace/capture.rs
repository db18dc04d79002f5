// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of a capture: sections with interrupts or preemption disabled, interrupt handlers, and the timers that they
//! delayed.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::line::{Gap, TraceLine};
use super::place::SectionFunctions;
use super::series::{AllSeries, SeriesIndex};
use super::timers::{LateTimer, Timers};
use super::{LateSink, section_event};
use crate::late::cpu_subject;
use crate::name::Interner;
use crate::text::function;
use crate::{ActorName, Cause, CauseKind, Labels, LateEvent, Snapshot};

/// Maximum number of CPUs; a damaged file may name more.
const MAX_CPUS: usize = 8 << 10;
/// Number of recent sections per CPU that are kept to explain late timers.
const MAX_RECENT: usize = 512;
/// Minimum length of a section that is kept to explain a late timer.
const MIN_SECTION_NS: u64 = 1_000;

/// Index of an interned name.
type Name = u32;

/// A section in progress.
#[derive(Clone, Copy, Debug)]
struct OpenSection {
    since_ns: u64,
    disabled_by: Name,
    /// Handler of an interrupt that was called in the section.
    handler: Option<Name>,
}

/// A finished section, or an interrupt handler.
#[derive(Clone, Copy, Debug)]
struct Section {
    start_ns: u64,
    end_ns: u64,
    key: Key,
    /// Thread on the CPU.
    comm: Name,
    tid: u32,
    series: Option<SeriesIndex>,
}

#[derive(Debug, Default)]
struct Cpu {
    irqs: Option<OpenSection>,
    preempt: Option<OpenSection>,
    handler: Option<(Name, u64)>,
    recent: VecDeque<Section>,
}

impl Cpu {
    fn remember(&mut self, section: Section) {
        if self.recent.len() >= MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(section);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    is_preemption: bool,
    enabled_by: Name,
    caller: Name,
    disabled_by: Name,
    handler: Name,
}

/// A printed overrun message.
#[derive(Debug, PartialEq, Eq)]
struct Overruns {
    comm: Box<str>,
    tid: u32,
    cpu: u32,
    time_ns: u64,
    function: Box<str>,
    missed: u64,
}

/// State of a capture.
#[derive(Debug, Default)]
pub(super) struct Capture {
    pub series: AllSeries,
    names: Interner,
    known: HashMap<Key, Option<SeriesIndex>>,
    cpus: HashMap<u32, Cpu>,
    timers: Timers,
    /// The last overrun message without a lateness: a report may show it alone and repeat it among other events.
    pending_overruns: Option<Overruns>,
    /// The last overrun message with a lateness.
    counted_overruns: Option<Overruns>,
    span_ns: Option<(u64, u64)>,
    has_any: bool,
    lost: BTreeMap<&'static str, u64>,
}

impl Capture {
    /// Returns whether there was any event of interrupts or timers.
    pub(super) fn has_any(&self) -> bool {
        self.has_any
    }

    /// Returns the timestamp of the last event; 0 without events.
    pub(super) fn last_ns(&self) -> u64 {
        self.span_ns.map_or(0, |(_, last_ns)| last_ns)
    }

    pub(super) fn count_lost(&mut self, reason: &'static str, more: u64) {
        let lost = self.lost.entry(reason).or_default();
        *lost = lost.saturating_add(more);
    }

    /// Handles a line that reports missing events: `CPU:6 [LOST 12 EVENTS]`, or `##### CPU 6 buffer started ####`. Open
    /// sections of the CPU are dropped, as they may have ended in between. Returns whether it was such a line.
    pub(super) fn gap(&mut self, line: &str) -> bool {
        let Some(Gap { cpu, lost }) = Gap::parse(line) else { return false };
        self.count_lost("events", lost);
        if let Some(cpu) = self.cpus.get_mut(&cpu) {
            (cpu.irqs, cpu.preempt, cpu.handler) = (None, None, None);
        }
        true
    }

    /// Adds the next event.
    pub(super) fn add(&mut self, line: &TraceLine<'_>, lates: &mut LateSink<'_>) {
        let (first_ns, last_ns) = self.span_ns.unwrap_or((line.time_ns, line.time_ns));
        self.span_ns = Some((first_ns.min(line.time_ns), last_ns.max(line.time_ns)));
        if self.cpus.len() >= MAX_CPUS && !self.cpus.contains_key(&line.cpu) {
            return self.count_lost("cpus_full", 1);
        }
        match line.event {
            "irq_disable" | "preempt_disable" => self.disable(line),
            "irq_enable" | "preempt_enable" => self.enable(line, lates),
            "irq_handler_entry" => self.handler_begins(line),
            "irq_handler_exit" => self.handler_ends(line, lates),
            event => {
                let timer = if event.starts_with("hrtimer_") { self.timers.event(line) } else { None };
                let timer = timer.or_else(|| self.timers.printed(line));
                self.has_any |= timer.is_some() || matches!(event, "hrtimer_start" | "hrtimer_expire_entry");
                if let Some(timer) = timer {
                    self.count_timer_once(line, &timer, lates);
                }
            }
        }
    }

    /// Counts a late timer once: an equal line with an equal timestamp is the same event.
    fn count_timer_once(&mut self, line: &TraceLine<'_>, timer: &LateTimer<'_>, lates: &mut LateSink<'_>) {
        if timer.missed == 0 {
            return self.timer(line, timer, lates);
        }
        let this = Overruns {
            comm: line.comm.into(),
            tid: line.tid,
            cpu: line.cpu,
            time_ns: line.time_ns,
            function: timer.function.into(),
            missed: timer.missed,
        };
        if self.pending_overruns.as_ref() == Some(&this) {
            self.pending_overruns = None;
        }
        self.flush(lates);
        if timer.lateness_ns > 0 {
            self.counted_overruns = Some(this);
            self.timer(line, timer, lates);
        } else if self.counted_overruns.as_ref() != Some(&this) {
            self.pending_overruns = Some(this);
        }
    }

    /// Counts an overrun message that was held back in case of a repetition.
    pub(super) fn flush(&mut self, lates: &mut LateSink<'_>) {
        let Some(Overruns { comm, tid, cpu, time_ns, function, missed }) = self.pending_overruns.take() else { return };
        let line = TraceLine { comm: &comm, tid, cpu, flags: "", time_ns, event: &function, text: "", is_cut: false };
        let timer = LateTimer { function: &function, at_ns: time_ns, lateness_ns: 0, missed };
        self.timer(&line, &timer, lates);
    }

    fn disable(&mut self, line: &TraceLine<'_>) {
        self.has_any = true;
        let disabled_by = self.names.number(function(line.field("caller").unwrap_or_default()));
        let cpu = self.cpus.entry(line.cpu).or_default();
        let open = if line.event == "irq_disable" { &mut cpu.irqs } else { &mut cpu.preempt };
        if open.replace(OpenSection { since_ns: line.time_ns, disabled_by, handler: None }).is_some() {
            self.count_lost("unmatched", 1);
        }
    }

    fn enable(&mut self, line: &TraceLine<'_>, lates: &mut LateSink<'_>) {
        self.has_any = true;
        let is_irqs = line.event == "irq_enable";
        let cpu = self.cpus.entry(line.cpu).or_default();
        let open = if is_irqs { cpu.irqs.take() } else { cpu.preempt.take() };
        let Some(open) = open.filter(|open| open.since_ns <= line.time_ns) else {
            return self.count_lost("unmatched", 1);
        };
        let enabled_by = self.names.number(function(line.field("caller").unwrap_or_default()));
        let caller = self.names.number(function(line.field("parent").unwrap_or_default()));
        let handler = open.handler.unwrap_or_else(|| self.names.number(""));
        let key = Key { is_preemption: !is_irqs, enabled_by, caller, disabled_by: open.disabled_by, handler };
        self.section(line, key, open.since_ns, lates);
    }

    fn handler_begins(&mut self, line: &TraceLine<'_>) {
        self.has_any = true;
        let handler = self.names.number(name_of_handler(line.text));
        let cpu = self.cpus.entry(line.cpu).or_default();
        match &mut cpu.irqs {
            Some(open) => open.handler = open.handler.or(Some(handler)),
            None => cpu.handler = Some((handler, line.time_ns)),
        }
    }

    /// Counts a handler as a section of its own if no event shows how long interrupts were disabled.
    fn handler_ends(&mut self, line: &TraceLine<'_>, lates: &mut LateSink<'_>) {
        let Some((handler, since_ns)) = self.cpus.entry(line.cpu).or_default().handler.take() else { return };
        let empty = self.names.number("");
        if since_ns <= line.time_ns {
            let key = Key { is_preemption: false, enabled_by: empty, caller: empty, disabled_by: empty, handler };
            self.section(line, key, since_ns, lates);
        }
    }

    fn section(&mut self, line: &TraceLine<'_>, key: Key, start_ns: u64, lates: &mut LateSink<'_>) {
        let length_ns = line.time_ns - start_ns;
        let (names, all) = (&self.names, &mut self.series);
        let series = *self.known.entry(key).or_insert_with(|| all.index(place_of(names, key).labels()));
        match series {
            Some(series) => self.series.section(series, length_ns),
            None => self.count_lost("series_full", 1),
        }
        if lates.wants(length_ns) {
            let place = place_of(&self.names, key);
            let thread = ActorName::thread(line.comm, line.tid);
            lates.send(section_event(&place, thread, line.time_ns, length_ns, line.cpu, stack_of(&place)));
        }
        if length_ns >= MIN_SECTION_NS {
            let (comm, tid, end_ns) = (self.names.number(line.comm), line.tid, line.time_ns);
            let section = Section { start_ns, end_ns, key, comm, tid, series };
            self.cpus.entry(line.cpu).or_default().remember(section);
        }
    }

    fn timer(&mut self, line: &TraceLine<'_>, timer: &LateTimer<'_>, lates: &mut LateSink<'_>) {
        let mut labels = Labels::from([("callback".to_owned(), timer.function.to_owned())]);
        labels.insert("cpu".to_owned(), line.cpu.to_string());
        match self.series.index(labels.clone()) {
            Some(place) => {
                self.series.timer(place, timer.lateness_ns);
                self.series.value(place, "overruns", timer.missed);
            }
            None => self.count_lost("series_full", 1),
        }
        if timer.missed == 0 && !lates.wants(timer.lateness_ns) {
            return;
        }
        let (causes, main) = self.causes(line, timer);
        if let Some(place) = main.filter(|_| timer.missed > 0) {
            self.series.value(place, "overruns", timer.missed);
        }
        if lates.wants(timer.lateness_ns) {
            labels.insert("overruns".to_owned(), timer.missed.to_string());
            let (latency_ns, cpu) = (timer.lateness_ns, line.cpu);
            let subject = cpu_subject(cpu);
            let at_unix_ns = timer.at_ns;
            lates.send(LateEvent { subject, labels, at_unix_ns, latency_ns, cpu, causes, ..LateEvent::default() });
        }
    }

    /// Returns the causes of a late timer, which add up to the lateness, and the series of the section with the largest
    /// part.
    fn causes(&self, line: &TraceLine<'_>, timer: &LateTimer<'_>) -> (Vec<Cause>, Option<SeriesIndex>) {
        let due_ns = timer.at_ns.saturating_sub(timer.lateness_ns);
        let cpu = self.cpus.get(&line.cpu);
        let mut left_ns = timer.lateness_ns;
        let mut causes: Vec<Cause> = Vec::new();
        let mut longest: (u64, Option<SeriesIndex>) = (0, None);
        let mut blame = |kind, who: ActorName, from_ns: u64, until_ns: u64, stack: Vec<String>| {
            let ns = until_ns.min(timer.at_ns).saturating_sub(from_ns.max(due_ns)).min(left_ns);
            left_ns -= ns;
            match causes.iter_mut().find(|cause| cause.kind == kind && cause.who == who) {
                Some(cause) => cause.ns += ns,
                None if ns > 0 => causes.push(Cause { stack, ..Cause::new(kind, who, ns) }),
                None => {}
            }
            ns
        };
        if let Some(open) = cpu.and_then(|cpu| cpu.irqs) {
            let (kind, who) = match open.handler {
                Some(handler) => (CauseKind::Irq, self.names.get(handler).into()),
                None => (CauseKind::IrqsOff, ActorName::thread(line.comm, line.tid)),
            };
            blame(kind, who, open.since_ns, timer.at_ns, Vec::new());
        }
        // Sections of one kind do not overlap; disabled preemption delays no timer.
        let recent = cpu.into_iter().flat_map(|cpu| &cpu.recent).filter(|section| !section.key.is_preemption);
        for section in recent {
            let place = place_of(&self.names, section.key);
            let who = place.who(ActorName::thread(self.names.get(section.comm), section.tid));
            let ns = blame(place.kind(), who, section.start_ns, section.end_ns, stack_of(&place));
            if ns > longest.0 {
                longest = (ns, section.series);
            }
        }
        causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
        if left_ns > 0 {
            causes.push(Cause::new(CauseKind::Unknown, "not recorded", left_ns));
        }
        (causes, longest.1)
    }

    /// Writes all results to the snapshot.
    pub(super) fn finish(mut self, snapshot: &mut Snapshot) {
        // Sections still open at the end of the file have no length.
        let unfinished = |cpu: &Cpu| u64::from(cpu.irqs.is_some()) + u64::from(cpu.preempt.is_some());
        let open = self.cpus.values().map(unfinished).sum();
        self.count_lost("unmatched", open);
        let (first_ns, last_ns) = self.span_ns.unwrap_or_default();
        // The start of a snapshot has microsecond resolution (`rfc3339`); the remainder is added to the length.
        let start_ns = first_ns - first_ns % 1_000;
        (snapshot.start_unix_ns, snapshot.duration_ns) = (start_ns, last_ns - start_ns);
        snapshot.lost = self.lost.iter().map(|(&reason, &count)| (reason.to_owned(), count)).collect();
        snapshot.series = self.series.into_series();
    }
}

fn place_of(names: &Interner, key: Key) -> SectionFunctions<'_> {
    SectionFunctions {
        is_preemption: key.is_preemption,
        enabled_by: names.get(key.enabled_by),
        caller: names.get(key.caller),
        disabled_by: names.get(key.disabled_by),
        handler: names.get(key.handler),
    }
}

/// Returns the two frames of the event; those at the end of a handler are not the cause.
fn stack_of(place: &SectionFunctions<'_>) -> Vec<String> {
    let frames = if place.kind() == CauseKind::Irq { [""; 2] } else { [place.enabled_by, place.caller] };
    frames.into_iter().filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the name in `irq=3 name=arch timer`, which may contain spaces.
fn name_of_handler(text: &str) -> &str {
    text.split_once("name=").map_or(text, |(_, name)| name)
}
