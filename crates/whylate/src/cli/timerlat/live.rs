// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sink of a live measurement, which a threshold may stop.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use whylate_model::blame::Evidence;
use whylate_model::sources::TIMERLAT;
use whylate_model::{Card, LateEvent, Snapshot, TimerEvidence, TopN};
use whylate_sources::timerlat::{self, AttachedTimerlat, Stop};
use whylate_sources::{Attached, Measuring};

use super::figures::Figures;
use super::{Plan, RECORDED_WORST, actions};
use crate::cli::{SUCCESS, THRESHOLD_HIT};
use crate::engine::feed::Feed;
use crate::engine::live::{Live, Pace};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::{Ended, Watch};
use crate::render::text::timerlat as view;
use crate::render::text::timerlat::total::IRQ;
use crate::render::text::timerlat::{analysis, trace};
use crate::store::Recorder;

/// Interval between refreshes of the table.
const REFRESH: Duration = Duration::from_secs(1);
/// Poll interval for hit thresholds and for samples of the tracer.
const SLICE: Duration = Duration::from_millis(50);
/// Maximum number of late activations buffered for a trace: the latest ones.
const MAX_PENDING: usize = 1_000;

/// Measures and prints until the duration is over, a threshold is hit, or a signal. Returns the exit status.
///
/// # Errors
/// Fails if the source fails, or the output or the recording cannot be written.
pub fn measure(
    plan: &Plan<'_>,
    source: Measuring<AttachedTimerlat>,
    watch: Watch,
    recorder: Option<Recorder>,
    out: &mut dyn Write,
) -> anyhow::Result<u8> {
    let (common, options) = (plan.common, plan.options());
    let Measuring { backend, fallback_reason, attached } = source;
    let mut figures = Figures::new(plan);
    figures.has_user = attached.has_user();
    let looks_out = options.stop != Stop::default() || options.explains() || attached.has_tracer();
    let pace = Pace {
        interval: figures.refreshes().then_some(REFRESH),
        duration: common.duration.map(Duration::from_nanos),
        poll: Some(if looks_out { SLICE } else { timerlat::POLLED_EVERY }),
        ..Pace::default()
    };
    let measured = Rc::new(RefCell::new(Measured {
        source: *attached,
        stop: plan.stop,
        stack_ns: plan.stack_ns,
        saves: common.saves(),
        explains: options.explains(),
        is_stopped: false,
        hits: BTreeMap::new(),
        kept: VecDeque::new(),
    }));
    if let Some(warm_up) = common.warm_up {
        if watch.until(Some(Instant::now() + Duration::from_nanos(warm_up)))? != Ended::Time {
            return recorder.map_or(Ok(()), Recorder::end).map(|()| SUCCESS);
        }
        measured.borrow_mut().discard()?;
    }
    figures.begin(out)?;
    let attached: Box<dyn Attached> = Box::new(Shared(Rc::clone(&measured)));
    let feed = Feed { card: &TIMERLAT, source: Measuring { backend, fallback_reason, attached } };
    let mut live = Live::of_one(feed, watch, pace);
    live.record(recorder);
    let mut printer = Printer { plan, measured: &measured, figures, hit_cpu: None, goes_on: None, failed: None, out };
    drive(&mut live, &mut printer)?;
    let mut status = SUCCESS;
    if !live.is_output_closed() {
        // A threshold may have been hit since the last poll, and the hit is counted: report it.
        if printer.goes_on.is_none() && measured.borrow().source.has_stopped() {
            live.take_late(&mut printer)?;
            printer.hit()?;
        }
        let is_hit = printer.goes_on == Some(false);
        status = if is_hit { THRESHOLD_HIT } else { printer.figures.status() };
        printer.finish(is_hit)?;
    }
    printer.out.flush()?;
    live.finish().map(|()| status)
}

/// The attached source, and what it has yielded for actions at a threshold.
struct Measured {
    source: AttachedTimerlat,
    stop: Stop,
    /// Latency from which the interrupted stack is shown, in nanoseconds.
    stack_ns: Option<u64>,
    /// Whether a trace may be saved.
    saves: bool,
    /// Whether late activations are explained, not only buffered for a trace.
    explains: bool,
    /// Whether a threshold had stopped the measurement before late activations were taken last.
    is_stopped: bool,
    /// First activation of each CPU that hit a threshold.
    hits: BTreeMap<u32, LateEvent>,
    /// Late activations for a trace, if one may be saved.
    kept: VecDeque<LateEvent>,
}

impl Measured {
    /// Takes the late activations that have arrived, for a trace too. Returns those that are explained.
    fn take_late(&mut self, wait: Duration) -> anyhow::Result<Vec<LateEvent>> {
        // The late event of a hit is in the buffer before the stop: check for the stop first.
        self.is_stopped = self.source.stopped_by().is_some();
        let mut events = Vec::new();
        self.source.drain_late(wait, &mut |event| events.push(event))?;
        for event in &mut events {
            if self.is_hit(event) {
                self.hits.entry(event.cpu).or_insert_with(|| event.clone());
            }
            if self.saves {
                if self.kept.len() >= MAX_PENDING {
                    self.kept.pop_front();
                }
                self.kept.push_back(event.clone());
            }
            if self.stack_ns.is_some_and(|over_ns| event.latency_ns < over_ns) {
                event.stack.clear();
            }
        }
        events.retain(|_| self.explains);
        Ok(events)
    }

    fn is_hit(&self, event: &LateEvent) -> bool {
        let Some(evidence) = evidence_of(event) else { return false };
        if self.source.is_hit(event.cpu, evidence.due_ns) {
            return true;
        }
        let irq_ns = evidence.irq_ns.saturating_sub(evidence.due_ns);
        self.stop.irq_ns.is_some_and(|limit_ns| irq_ns >= limit_ns)
            || self.stop.thread_ns.is_some_and(|limit_ns| event.latency_ns >= limit_ns)
    }

    /// Discards what was measured so far, and goes on.
    fn discard(&mut self) -> anyhow::Result<()> {
        self.source.drain_late(Duration::ZERO, &mut |_| ())?;
        self.source.snapshot()?;
        self.source.resume()
    }
}

/// What the engine takes ticks of, while the sink looks at the source's stops.
struct Shared(Rc<RefCell<Measured>>);

impl Attached for Shared {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.0.borrow_mut().source.snapshot()
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let events = self.0.borrow_mut().take_late(wait)?;
        events.into_iter().for_each(each);
        Ok(())
    }
}

/// Prints late activations and figures, and performs the actions at a threshold.
struct Printer<'a> {
    plan: &'a Plan<'a>,
    measured: &'a RefCell<Measured>,
    figures: Figures<'a>,
    /// CPU that hit a threshold last.
    hit_cpu: Option<u32>,
    /// Whether to go on after the threshold that was hit before the last tick, if one was.
    goes_on: Option<bool>,
    /// Error of an action at a threshold, which is printed at the end.
    failed: Option<anyhow::Error>,
    out: &'a mut dyn Write,
}

impl Sink for Printer<'_> {
    fn late(&mut self, _card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        self.figures.late(self.out, event).map(|()| None)
    }

    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        self.out.flush()?;
        Ok(if self.measured.borrow().is_stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        tick.report_problems();
        let is_refresh = tick.is_due && !tick.is_last;
        tick.into_snapshots().for_each(|snapshot| self.figures.add(snapshot));
        self.goes_on = None;
        if self.measured.borrow().is_stopped {
            self.hit()?;
        } else if is_refresh {
            self.figures.refresh(self.out)?;
            if self.plan.common.json {
                // Each JSON line has the worst of its own interval.
                self.measured.borrow_mut().source.forget_worst();
            }
        }
        Ok(if self.goes_on == Some(false) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

impl Printer<'_> {
    /// Performs the actions of a threshold that was hit.
    fn hit(&mut self) -> anyhow::Result<()> {
        self.hit_cpu = self.measured.borrow().source.stopped_by().or(self.hit_cpu);
        self.goes_on = Some(self.goes_on_after_hit()?);
        Ok(())
    }

    /// Performs the actions. Returns whether to continue measuring.
    fn goes_on_after_hit(&mut self) -> anyhow::Result<bool> {
        let common = self.plan.common;
        let actions = common.on_threshold();
        if !actions.is_empty() {
            // The output of actions must not be cleared.
            self.figures.screen.keep();
        }
        let late = self.late_to_save();
        let prints = !common.json;
        let measured = self.measured;
        let mut save = |path: &Path, out: &mut dyn Write| save(&measured.borrow().source, path, &late, out, prints);
        match actions::perform(&actions, self.out, &mut save) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                // The figures are still printed.
                self.failed = Some(error);
                return Ok(false);
            }
        }
        if !common.json {
            self.write_hit()?;
        }
        self.measured.borrow_mut().hits.clear();
        self.measured.borrow_mut().discard()?;
        Ok(true)
    }

    fn finish(&mut self, is_hit: bool) -> anyhow::Result<()> {
        let common = self.plan.common;
        self.figures.finish(self.out, is_hit)?;
        if is_hit && !common.json {
            self.write_hit()?;
        }
        self.figures.write_verdict(self.out, self.hit_cpu)?;
        let (late, prints, measured) = (self.late_to_save(), !common.json, self.measured);
        let mut save = |path: &Path, out: &mut dyn Write| save(&measured.borrow().source, path, &late, out, prints);
        let ended = actions::perform(&common.on_end, self.out, &mut save);
        self.out.flush()?;
        if let Some(error) = self.failed.take() {
            say!("whylate: {error:#}");
        }
        ended.map(|_| ())
    }

    /// Returns the activations that a trace explains: hits of a threshold, or else the worst or latest late ones.
    fn late_to_save(&self) -> Vec<LateEvent> {
        let Measured { hits, kept, explains, .. } = &*self.measured.borrow();
        if !hits.is_empty() {
            return hits.values().cloned().collect();
        }
        let common = self.plan.common;
        match common.worst.map(usize::from).or_else(|| (!explains).then_some(RECORDED_WORST)) {
            Some(limit) => {
                let mut worst = TopN::new(limit);
                kept.iter().for_each(|event| worst.add(event.clone()));
                worst.take()
            }
            None => kept.iter().cloned().collect(),
        }
    }

    /// Writes the analysis of the activations that stopped the measurement.
    fn write_hit(&mut self) -> anyhow::Result<()> {
        let (common, out) = (self.plan.common, &mut *self.out);
        let Measured { source, hits, .. } = &*self.measured.borrow();
        writeln!(out, "whylate timerlat hit stop tracing")?;
        if common.no_aa {
            return Ok(());
        }
        for (cpu, event) in hits {
            if let Some(mut evidence) = evidence_of(event).cloned() {
                let shows_stack = self.plan.stack_ns.is_some_and(|over_ns| event.latency_ns >= over_ns);
                if !shows_stack {
                    evidence.stack.clear();
                }
                analysis::write(out, *cpu, &evidence, common.stack_format)?;
                writeln!(out)?;
            }
        }
        if let Some(cpu) = source.stopped_by().filter(|cpu| !hits.contains_key(cpu)) {
            let us = |ns: u64| ns as f64 / 1_000.0;
            match source.thread_times_at_stop() {
                // Late events end at the switch-in.
                Some((thread_ns, user_ns)) => writeln!(
                    out,
                    "## CPU {cpu} hit stop tracing: its thread was switched in after {:.2} us, and returned to user space \
                     after {:.2} us ##",
                    us(thread_ns),
                    us(user_ns)
                )?,
                None => writeln!(out, "## CPU {cpu} hit stop tracing, and it was not recorded who had it ##")?,
            }
        }
        let total = &self.figures.total;
        let counted =
            |&(cpu, ns): &(u32, u64)| total.cpus.get(&cpu).is_some_and(|of_cpu| ns <= of_cpu.latencies[IRQ].max_ns());
        if let Some((cpu, ns)) = source.max_from_idle().filter(counted).max_by_key(|&(_, ns)| ns) {
            let us = ns as f64 / 1_000.0;
            writeln!(out, "  Max timerlat IRQ latency from idle: {us:.2} us in cpu {cpu}")?;
        }
        if common.dump_tasks {
            writeln!(out, "Printing CPU tasks:")?;
            for (cpu, thread) in source.tasks_at_stop() {
                writeln!(out, "    [{cpu}] {}", view::printable_task(&thread))?;
            }
        }
        Ok(())
    }
}

/// Saves the tracer's trace, or the latest and the late activations. Prints the file name if `prints`.
fn save(
    source: &AttachedTimerlat,
    path: &Path,
    late: &[LateEvent],
    out: &mut dyn Write,
    prints: bool,
) -> anyhow::Result<()> {
    if source.records() {
        actions::save(path, |file| source.write_trace(file))?;
        for (event, histogram) in source.kernel_histograms()? {
            let path = PathBuf::from(format!("{event}_hist.txt"));
            actions::save(&path, |file| Ok(file.write_all(histogram.as_bytes())?))?;
        }
    } else {
        actions::save(path, |file| Ok(trace::write(file, &source.latest(), late)?))?;
    }
    if prints {
        writeln!(out, "  Saving trace to {}", path.display())?;
    }
    Ok(())
}

fn evidence_of(event: &LateEvent) -> Option<&TimerEvidence> {
    match event.evidence.as_deref()? {
        Evidence::Timer(evidence) => Some(evidence),
        _ => None,
    }
}
