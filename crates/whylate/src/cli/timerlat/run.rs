// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures or replays, from the first activation to the last output.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use whylate_model::blame::Evidence;
use whylate_model::recording::Line;
use whylate_model::sources::TIMERLAT;
use whylate_model::{LateEvent, Snapshot, TimerEvidence, TopN};
use whylate_sources::kernel::cpu_choice::Choice;
use whylate_sources::timerlat::idle::{self, Shallow};
use whylate_sources::timerlat::{self, AttachedTimerlat, Stop, placement};
use whylate_sources::{Attached as _, Measuring, Session};

use super::figures::Figures;
use super::{Arguments, Common, Plan, RECORDED_WORST, actions};
use crate::cli::{Origin, SUCCESS, THRESHOLD_HIT, UsageError, record};
use crate::engine::feed::Feed;
use crate::engine::live::wait;
use crate::engine::replay::Replay;
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::{Ended, Watch};
use crate::render::json::JsonLines;
use crate::render::text::Output as _;
use crate::render::text::timerlat as view;
use crate::render::text::timerlat::total::IRQ;
use crate::render::text::timerlat::{analysis, trace};
use crate::store::late_buffer::{Keep, LateBuffer};
use crate::store::{Played, Recorder, about};

/// Name of the histogram of the return to user space.
const USER: &str = "user";
/// Interval between refreshes of the table.
const REFRESH: Duration = Duration::from_secs(1);
/// Poll interval for hit thresholds and for samples of the tracer.
const SLICE: Duration = Duration::from_millis(50);
/// Maximum number of late activations buffered for a trace: the latest ones.
const MAX_PENDING: usize = 1_000;

/// Measures until the duration is over, a threshold is hit, or Ctrl-C. Returns the exit status.
///
/// # Errors
/// Fails if the kernel or the caller's privileges do not allow it, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    let plan = arguments.plan();
    if plan.common.bpf_action.is_some() {
        let error = anyhow!("--bpf-action is not supported: run a command with --on-threshold shell,command=COMMAND");
        return Err(UsageError(error).into());
    }
    if let Origin::Recording(recording) = origin {
        record::refuse(plan.common.output.as_deref())?;
        return replay(&plan, recording.play()?);
    }
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let options = plan.options();
    let store = plan.common.output.as_deref().map(record::file).transpose()?;
    if let Some(name) = plan.common.cgroup.as_deref().filter(|name| !name.is_empty()) {
        placement::join_cgroup(name)?;
    }
    // Reads the allowed CPUs after joining the cgroup with its cpuset, and before this thread's affinity is changed.
    let session = Session::of_one();
    let choice = session.cpus(&options.cpus).context("cannot attach timerlat")?;
    // Restored on drop.
    let _surroundings = Surroundings::arrange(plan.common, &choice)?;
    let source = options.start(&session).context("cannot attach timerlat")?;
    if let Some(cgroup) = &plan.common.cgroup {
        placement::move_to_cgroup(cgroup, source.kernel_threads())?;
    }
    let mut measurement = Measurement::new(&plan, source);
    measurement.feed.print_limitations();
    if let Some(store) = store {
        let explained_ns = options.explain_over_ns.or(options.explain_worst.map(|_| 0));
        let header = about::of_one(TIMERLAT.name, measurement.feed.source.backend, explained_ns);
        measurement.recorder = Some(Recorder::start(store, header)?);
    }
    if plan.common.debug {
        let source = &measurement.feed.source;
        let end = if source.sees_own_code() { "runs" } else { "is switched in" };
        say!("whylate: backend {}, a thread's latency ends when it {end}, {options:?}", source.backend);
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let status = measurement.measure(&watch, &mut out)?;
    out.flush()?;
    measurement.recorder.take().map_or(Ok(()), Recorder::end)?;
    Ok(status)
}

/// Prints a recording. Thresholds do not stop a replay.
fn replay(plan: &Plan<'_>, played: Played) -> anyhow::Result<u8> {
    let common = plan.common;
    let late_from_ns = played.late_from_ns(TIMERLAT.name)?;
    if late_from_ns.is_none() && (common.why.is_some() || common.worst.is_some()) {
        say!("whylate: {} was recorded without late events of {}", played.name(), TIMERLAT.name);
    }
    let out = &mut io::BufWriter::new(io::stdout().lock());
    let figures = Figures::new(plan);
    figures.begin(out)?;
    let keep = Keep::worst(common.worst.map(usize::from).filter(|_| common.why.is_none()));
    let mut replay = Replay::of_source(played, &TIMERLAT, None, common.duration);
    let mut replayed = Replayed { common, figures, kept: LateBuffer::new(keep), latest: None, out };
    drive(&mut replay, &mut replayed)?;
    let status = replayed.figures.status();
    if let Some(mut latest) = replayed.latest.take() {
        replayed.kept.move_into(&mut latest);
        replayed.figures.finish(replayed.out, latest, false)?;
        replayed.figures.write_verdict(replayed.out, None)?;
    }
    replayed.out.flush()?;
    replay.finish().map(|()| status)
}

/// Figures of a recording so far.
struct Replayed<'a> {
    common: &'a Common,
    figures: Figures<'a>,
    kept: LateBuffer,
    /// The last snapshot, of which it is not known yet whether another one follows.
    latest: Option<Snapshot>,
    out: &'a mut dyn Write,
}

impl Sink for Replayed<'_> {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        let common = self.common;
        if let Some(mut latest) = self.latest.take().filter(|_| self.figures.refreshes()) {
            if common.json {
                self.kept.move_into(&mut latest);
                JsonLines.snapshot(self.out, latest)?;
            } else {
                self.figures.refresh(self.out)?;
            }
            self.out.flush()?;
        }
        for mut snapshot in tick.into_snapshots() {
            for event in std::mem::take(&mut snapshot.late) {
                match common.json {
                    true if common.worst.is_some() || common.why.is_some_and(|over_ns| event.latency_ns >= over_ns) => {
                        self.kept.add(event);
                    }
                    true => {}
                    false => self.figures.late(self.out, event)?,
                }
            }
            if let Some(cpus) = &common.cpus {
                snapshot.series.retain(|series| {
                    let cpu = series.labels.get("cpu").and_then(|cpu| cpu.parse().ok());
                    cpu.is_none_or(|cpu| cpus.0.contains(&cpu))
                });
            }
            self.figures.has_user |= snapshot.series.iter().any(|series| series.histograms.contains_key(USER));
            self.figures.total.add(&snapshot);
            self.latest = Some(snapshot);
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Settings of the machine that are changed during the measurement.
struct Surroundings {
    _latency: Option<File>,
    _idle: Option<Shallow>,
}

impl Surroundings {
    fn arrange(common: &Common, choice: &Choice) -> anyhow::Result<Self> {
        match &common.house_keeping {
            Some(cpus) => placement::keep_to(&cpus.0)?,
            // Like rtla, whylate's own threads keep off the measured CPUs.
            None => {
                // If this fails, they share the CPUs.
                let _ = choice.others.is_empty() || placement::keep_to(&choice.others).is_ok();
            }
        }
        let latency = common.dma_latency.map(idle::bound_exit_latency).transpose()?;
        let idle = common.deepest_idle_state.map(|state| Shallow::new(&choice.measured, state)).transpose()?;
        Ok(Surroundings { _latency: latency, _idle: idle })
    }
}

/// Reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Refresh,
    Over,
    OutputClosed,
    Hit,
}

struct Measurement<'a> {
    plan: &'a Plan<'a>,
    feed: Feed<AttachedTimerlat>,
    /// Late activations for the next line of JSON.
    pending: LateBuffer,
    figures: Figures<'a>,
    recorder: Option<Recorder>,
    /// CPU that hit a threshold last.
    hit_cpu: Option<u32>,
    /// First activation of each CPU that hit a threshold.
    hits: BTreeMap<u32, LateEvent>,
    /// Late activations for a trace, if one may be saved.
    kept: VecDeque<LateEvent>,
    /// Whether late activations are explained, not only buffered for a trace.
    explains: bool,
    /// Error of an action at a threshold, which is printed at the end.
    failed: Option<anyhow::Error>,
}

impl<'a> Measurement<'a> {
    fn new(plan: &'a Plan<'a>, source: Measuring<AttachedTimerlat>) -> Self {
        let common = plan.common;
        let worst = common.worst.map(usize::from);
        let mut figures = Figures::new(plan);
        figures.has_user = source.has_user();
        Measurement {
            plan,
            feed: Feed { card: &TIMERLAT, source },
            pending: LateBuffer::new(Keep::worst(worst.filter(|_| common.why.is_none()))),
            figures,
            recorder: None,
            hit_cpu: None,
            hits: BTreeMap::new(),
            kept: VecDeque::new(),
            explains: plan.options().explains(),
            failed: None,
        }
    }

    fn measure(&mut self, watch: &Watch, out: &mut dyn Write) -> anyhow::Result<u8> {
        let common = self.plan.common;
        if let Some(warm_up) = common.warm_up {
            let until = Instant::now() + Duration::from_nanos(warm_up);
            if watch.until(Some(until))? != Ended::Time {
                return Ok(SUCCESS);
            }
            self.discard()?;
        }
        self.figures.begin(out)?;
        let started = Instant::now();
        let end = common.duration.and_then(|ns| started.checked_add(Duration::from_nanos(ns)));
        let mut refreshes = 0;
        loop {
            // A fixed schedule: an output that takes long does not shift the ones after it.
            let has_steps = self.figures.refreshes() || self.recorder.is_some();
            let refresh = has_steps.then(|| started + REFRESH.saturating_mul(refreshes + 1));
            let mut step = self.step(watch, refresh.into_iter().chain(end).min(), end, out)?;
            if step == Step::OutputClosed {
                return Ok(SUCCESS);
            }
            let latest = self.feed.source.snapshot()?;
            if let Some(recorder) = &mut self.recorder {
                recorder.tick(vec![Line::Snapshot(Box::new(latest.clone()))]);
            }
            self.figures.total.add(&latest);
            // The time may be over after a long action, or with a threshold that is hit all the time.
            let is_over = step == Step::Over || end.is_some_and(|end| Instant::now() >= end);
            // A threshold may have been hit since the last poll, and the hit is counted: report it.
            if step == Step::Over && self.feed.source.has_stopped() {
                self.take_late(out)?;
                step = Step::Hit;
            }
            if step == Step::Hit {
                self.hit_cpu = self.feed.source.stopped_by().or(self.hit_cpu);
            }
            let goes_on = step == Step::Hit && self.goes_on_after_hit(out)?;
            let hit = step == Step::Hit && !goes_on;
            if hit || is_over {
                let status = if hit { THRESHOLD_HIT } else { self.figures.status() };
                return self.finish(out, latest, hit).map(|()| status);
            }
            if step == Step::Refresh {
                refreshes += 1;
                if self.figures.refreshes() {
                    self.refresh(out, latest)?;
                    out.flush()?;
                }
            }
        }
    }

    /// Waits for the next refresh, and drains late activations while waiting.
    fn step(
        &mut self,
        watch: &Watch,
        until: Option<Instant>,
        end: Option<Instant>,
        out: &mut dyn Write,
    ) -> anyhow::Result<Step> {
        let options = self.plan.options();
        let looks_out = options.stop != Stop::default() || options.explains() || self.feed.source.has_tracer();
        let slice = if looks_out { SLICE } else { timerlat::POLLED_EVERY };
        let mut is_hit = false;
        let ended = wait(watch, until, slice, &mut || {
            // The late event of a hit is in the buffer before the stop: check for the stop first.
            is_hit = self.feed.source.stopped_by().is_some();
            self.take_late(out)?;
            out.flush()?;
            Ok(is_hit)
        })?;
        Ok(match ended {
            Ended::OutputClosed => Step::OutputClosed,
            Ended::Signal => Step::Over,
            Ended::Time if is_hit => Step::Hit,
            Ended::Time if end.is_some_and(|end| Instant::now() >= end) => Step::Over,
            Ended::Time => Step::Refresh,
        })
    }

    fn take_late(&mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut events = Vec::new();
        self.feed.source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        for mut event in events {
            if self.is_hit(&event) {
                self.hits.entry(event.cpu).or_insert_with(|| event.clone());
            }
            let common = self.plan.common;
            if common.saves() {
                if self.kept.len() >= MAX_PENDING {
                    self.kept.pop_front();
                }
                self.kept.push_back(event.clone());
            }
            if !self.explains {
                continue;
            }
            if self.plan.stack_ns.is_some_and(|over_ns| event.latency_ns < over_ns) {
                event.stack.clear();
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.late(TIMERLAT.name, event.clone());
            }
            let is_asked = common.why.is_some_and(|over_ns| event.latency_ns >= over_ns);
            if common.json {
                let evidence = event.evidence.take();
                if is_asked || common.worst.is_some() || (evidence.is_some() && common.why.is_none()) {
                    self.pending.add(event);
                }
            } else {
                self.figures.late(out, event)?;
            }
        }
        Ok(())
    }

    fn is_hit(&self, event: &LateEvent) -> bool {
        let Some(evidence) = evidence_of(event) else { return false };
        if self.feed.source.is_hit(event.cpu, evidence.due_ns) {
            return true;
        }
        let irq_ns = evidence.irq_ns.saturating_sub(evidence.due_ns);
        let stop = self.plan.stop;
        stop.irq_ns.is_some_and(|limit_ns| irq_ns >= limit_ns)
            || stop.thread_ns.is_some_and(|limit_ns| event.latency_ns >= limit_ns)
    }

    /// Performs the actions. Returns whether to continue measuring.
    fn goes_on_after_hit(&mut self, out: &mut dyn Write) -> anyhow::Result<bool> {
        let common = self.plan.common;
        let actions = common.on_threshold();
        if !actions.is_empty() {
            // The output of actions must not be cleared.
            self.figures.screen.keep();
        }
        let late = self.late_to_save();
        let prints = !common.json;
        match actions::perform(&actions, out, &mut |path, out| save(&self.feed.source, path, &late, out, prints)) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                // The figures are still printed.
                self.failed = Some(error);
                return Ok(false);
            }
        }
        if !common.json {
            self.write_hit(out)?;
        }
        self.hits.clear();
        self.discard()?;
        Ok(true)
    }

    /// Discards what was measured so far, and goes on.
    fn discard(&mut self) -> anyhow::Result<()> {
        self.feed.source.drain_late(Duration::ZERO, &mut |_| ())?;
        self.feed.source.snapshot()?;
        self.feed.source.resume()
    }

    fn refresh(&mut self, out: &mut dyn Write, latest: Snapshot) -> anyhow::Result<()> {
        if self.plan.common.json {
            self.write_json(out, latest)?;
            // Each JSON line has the worst of its own interval.
            self.feed.source.forget_worst();
        } else {
            self.figures.refresh(out)?;
        }
        Ok(())
    }

    fn write_json(&mut self, out: &mut dyn Write, mut snapshot: Snapshot) -> io::Result<()> {
        self.pending.move_into(&mut snapshot);
        JsonLines.snapshot(out, snapshot)
    }

    fn finish(&mut self, out: &mut dyn Write, mut latest: Snapshot, hit: bool) -> anyhow::Result<()> {
        let common = self.plan.common;
        self.pending.move_into(&mut latest);
        self.figures.finish(out, latest, hit)?;
        if hit && !common.json {
            self.write_hit(out)?;
        }
        self.figures.write_verdict(out, self.hit_cpu)?;
        let (late, prints) = (self.late_to_save(), !common.json);
        let ended =
            actions::perform(&common.on_end, out, &mut |path, out| save(&self.feed.source, path, &late, out, prints));
        out.flush()?;
        if let Some(error) = self.failed.take() {
            say!("whylate: {error:#}");
        }
        ended.map(|_| ())
    }

    /// Returns the activations that a trace explains: hits of a threshold, or else the worst or latest late ones.
    fn late_to_save(&self) -> Vec<LateEvent> {
        if !self.hits.is_empty() {
            return self.hits.values().cloned().collect();
        }
        let common = self.plan.common;
        match common.worst.map(usize::from).or_else(|| (!self.explains).then_some(RECORDED_WORST)) {
            Some(limit) => {
                let mut worst = TopN::new(limit);
                self.kept.iter().for_each(|event| worst.add(event.clone()));
                worst.take()
            }
            None => self.kept.iter().cloned().collect(),
        }
    }

    /// Writes the analysis of the activations that stopped the measurement.
    fn write_hit(&mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        let common = self.plan.common;
        writeln!(out, "whylate timerlat hit stop tracing")?;
        if common.no_aa {
            return Ok(());
        }
        for (cpu, event) in &self.hits {
            if let Some(mut evidence) = evidence_of(event).cloned() {
                let shows_stack = self.plan.stack_ns.is_some_and(|over_ns| event.latency_ns >= over_ns);
                if !shows_stack {
                    evidence.stack.clear();
                }
                analysis::write(out, *cpu, &evidence, common.stack_format)?;
                writeln!(out)?;
            }
        }
        if let Some(cpu) = self.feed.source.stopped_by().filter(|cpu| !self.hits.contains_key(cpu)) {
            let us = |ns: u64| ns as f64 / 1_000.0;
            match self.feed.source.thread_times_at_stop() {
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
        if let Some((cpu, ns)) = self.feed.source.max_from_idle().filter(counted).max_by_key(|&(_, ns)| ns) {
            let us = ns as f64 / 1_000.0;
            writeln!(out, "  Max timerlat IRQ latency from idle: {us:.2} us in cpu {cpu}")?;
        }
        if common.dump_tasks {
            writeln!(out, "Printing CPU tasks:")?;
            for (cpu, thread) in self.feed.source.tasks_at_stop() {
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
