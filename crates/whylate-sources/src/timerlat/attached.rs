// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached source.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use whylate_model::blame::TimerEvidence;
use whylate_model::{LateEvent, Snapshot};

use super::activation::Activation;
use super::late;
use super::latest::Activated;
use super::programs::Programs;
use super::threads::{Stop, StopState};
use super::tracer::Tracer;
use super::workload::Workload;
use super::{INFO, Threads, TimerlatOptions};
use crate::cpu_account::Account;
use crate::kernel::attach::Meter;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::{clock, cpus};
use crate::source::floors::Floors;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

/// Number of late events held back: far more activations than pass between a late event and the sample of its
/// activation.
const MAX_HELD: usize = 16;
/// Maximum time that a snapshot waits for activations due before it.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_millis(200);
/// Poll interval while a snapshot waits for activations.
const IN_FLIGHT_POLL: Duration = Duration::from_micros(200);

/// The attached source. Dropping it stops the measured threads.
pub struct AttachedTimerlat {
    /// Dropped first, so that it ends while the programs still run.
    workload: Workload,
    /// `None` with the tracer unless causes are wanted, so that no program affects its measurements.
    programs: Option<Programs>,
    stopped: Arc<StopState>,
    /// Minimum latencies of the worst activations, if only those are wanted.
    floors: Option<Floors>,
    symbols: KernelSymbols,
    keep_evidence: bool,
    span: Span,
    /// Late events due before this do not count.
    counts_from_ns: u64,
    /// When the threads have warmed up, unless activations count already.
    settles_at: Option<Instant>,
    /// Number of late events with truncated records.
    truncated: u64,
    explain_over_ns: u64,
    explain_irq_over_ns: u64,
    /// Whether a threshold stops measurement.
    has_stop: bool,
    /// Whether the late event that stopped measurement was reported.
    has_reported_stop: bool,
    /// Late events below the thresholds, the newest last: the one that stopped measurement may be recognized later.
    held: VecDeque<(TimerEvidence, LateEvent)>,
    limitation: Option<String>,
    left_out: Option<String>,
    /// Why the period is not the configured one.
    pub(super) chosen: Option<String>,
    meter: Meter,
}

impl AttachedTimerlat {
    /// Attaches with the kernel's tracer, or with threads of this process.
    pub(super) fn new(options: &TimerlatOptions, session: &Session, with_tracer: bool) -> Result<Self, AttachError> {
        // A recording without the tracer has late events of the worst activations, unless they are configured
        // otherwise.
        let recorded = options.record.as_ref().filter(|_| !with_tracer && !options.explains());
        let explain_worst = options.explain_worst.or(recorded.and_then(|record| record.worst));
        let options = &TimerlatOptions { explain_worst, ..options.clone() };
        let (wanted, left_out) = measured_cpus(options, session)?;
        let tracer = with_tracer.then(|| Tracer::new(options, &wanted)).transpose()?;
        let has_programs = !with_tracer || options.explains();
        let programs = has_programs.then(|| Programs::attach(options, session, with_tracer)).transpose()?;
        let account = programs.as_ref().and_then(|programs| programs.account.as_ref());
        let tasks = account.map(Account::threads).transpose().context("cannot map the accounts of CPUs")?;
        let limitation = limitation_of(account, &wanted);
        let stopped = Arc::new(StopState::new(tasks.map(|threads| Box::new(move || threads.now()) as _)));
        for (programs, &cpu) in programs.iter().flat_map(|programs| wanted.iter().map(move |cpu| (programs, cpu))) {
            programs.activation(cpu).set_thresholds(u64::MAX, u64::MAX);
            programs.activation(cpu).measure(with_tracer);
        }
        let workload = match (tracer, &programs) {
            (Some(tracer), _) => Workload::Tracer(Box::new(tracer)),
            (None, programs) => {
                let map = &programs.as_ref().context("threads of this process need the programs")?.map;
                Workload::start(options, &wanted, map, &stopped)?
            }
        };
        let settles_at = Some(Workload::settles_at(options.period_ns));
        let mut attached = AttachedTimerlat {
            workload,
            programs,
            stopped,
            floors: options.explain_worst.map(Floors::new),
            symbols: session.symbols(),
            keep_evidence: options.keep_evidence,
            span: Span::begin(INFO.card, session),
            counts_from_ns: 0,
            settles_at,
            truncated: 0,
            has_reported_stop: false,
            held: VecDeque::new(),
            limitation,
            left_out,
            chosen: None,
            explain_over_ns: options.explain_over_ns.unwrap_or(u64::MAX),
            explain_irq_over_ns: options.explain_irq_over_ns.unwrap_or(u64::MAX),
            has_stop: options.stop != Stop::default(),
            meter: Meter::default(),
        };
        // Several sources are reset together, which takes a while.
        if !session.has_several() {
            attached.settle()?;
        }
        Ok(attached)
    }

    /// Makes activations count, once the threads have warmed up.
    fn settle(&mut self) -> anyhow::Result<()> {
        if let Some(settles_at) = self.settles_at.take() {
            self.workload.settle(settles_at)?;
            self.resume()?;
            self.span.begin_at(self.counts_from_ns);
        }
        Ok(())
    }
}

/// Returns the measured CPUs, and a note on those left out. Other programs that read the tracer's files choose their
/// own CPUs: no measured thread or timer is this process's then.
fn measured_cpus(options: &TimerlatOptions, session: &Session) -> Result<(Vec<u32>, Option<String>), AttachError> {
    if options.threads == Threads::Others && options.cpus.is_empty() {
        return Ok((cpus::online().context("cannot read which CPUs are online")?, None));
    }
    let choice = session.cpus(&options.cpus)?;
    Ok((choice.at_least_one()?.to_vec(), choice.remark()))
}

/// Returns the limitation of measurement on these CPUs, if there is one.
fn limitation_of(account: Option<&Account>, cpus: &[u32]) -> Option<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let moves = read("/proc/sys/kernel/timer_migration").trim() == "1";
    let without_tick = cpus::numbers(&read("/sys/devices/system/cpu/nohz_full")).unwrap_or_default();
    if moves && cpus.iter().any(|cpu| without_tick.contains(cpu)) {
        // Timers of threads are not pinned (get_nohz_timer_target() in kernel/sched/core.c).
        let limitation = "other CPUs may serve the timers of nohz_full CPUs; activations there are unseen then (set kernel.timer_migration=0)";
        return Some(limitation.to_owned());
    }
    account.and_then(Account::limitations).map(str::to_owned)
}

impl Attached for AttachedTimerlat {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.settle()?;
        // Collecting the backlog may take a while; collecting what has come in since does not.
        self.workload.collect(clock::monotonic_ns())?;
        let mut snapshot = self.span.end(self.workload.backend());
        let overdue = self.collect_all(self.span.began_ns())?;
        let (mut unseen, mut armed_late) = (0, 0);
        for (cpu, taken) in self.workload.take() {
            let mut series = taken.series;
            series.labels.insert("cpu".to_owned(), cpu.to_string());
            let overdue = overdue.iter().find(|&&(of, _)| of == cpu).map_or(0, |&(_, periods)| periods);
            series.values.insert("overdue".to_owned(), overdue as f64);
            snapshot.series.push(series);
            unseen += taken.unseen;
            armed_late += taken.armed_late;
        }
        // Activations without a timestamp of the interrupt or thread: only their return to user space has a latency.
        snapshot.lost.insert("unseen".to_owned(), unseen);
        match &mut self.workload {
            // Likewise, because the thread was stopped or preempted on its way to sleep until after its timer was due.
            Workload::Own { .. } => snapshot.lost.insert("armed_late".to_owned(), armed_late),
            // Samples that the kernel overwrote before they were read.
            Workload::Tracer(tracer) => snapshot.lost.insert("samples".to_owned(), tracer.take_lost()),
        };
        snapshot.lost.insert("late_events".to_owned(), std::mem::take(&mut self.truncated));
        if let Some(programs) = &mut self.programs {
            if let Some(account) = &mut programs.account {
                account.report(&mut snapshot);
            }
            self.meter.report(programs.statistics(), &mut snapshot);
        }
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.settle()?;
        if let Some(programs) = &self.programs {
            programs.poll(wait)?;
        }
        // Collected after the late events, so that the one that stopped measurement is recognized.
        self.workload.collect(clock::monotonic_ns())?;
        if let (Workload::Tracer(_), Some(cpu)) = (&self.workload, self.workload.stopped_by()) {
            self.stopped.stop(cpu, 0, 0, clock::monotonic_ns());
        }
        while let Some(bytes) = self.programs.as_ref().and_then(Programs::take_record) {
            let Some((evidence, event)) = self.event_of(&bytes) else {
                self.truncated += 1;
                continue;
            };
            let is_hit = self.is_hit(event.cpu, evidence.due_ns);
            self.has_reported_stop |= is_hit;
            let irq_ns = evidence.irq_ns.saturating_sub(evidence.due_ns);
            let is_asked = event.latency_ns >= self.floor_ns() || irq_ns >= self.explain_irq_over_ns;
            let counts = self.workload.counts(event.cpu, evidence.due_ns, evidence.thread_ns);
            if evidence.due_ns < self.counts_from_ns || !counts {
                continue;
            }
            if is_asked || is_hit {
                self.raise_floor(&event);
                each(self.with_evidence(event, evidence));
            } else if self.workload.stopped_by().is_none() {
                while self.held.len() >= MAX_HELD {
                    self.held.pop_front();
                }
                self.held.push_back((evidence, event));
            }
        }
        if let Some((evidence, event)) = self.take_held_hit() {
            self.has_reported_stop = true;
            self.raise_floor(&event);
            each(self.with_evidence(event, evidence));
        }
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        self.limitation.as_deref()
    }

    fn left_out(&self) -> Option<&str> {
        self.left_out.as_deref()
    }

    fn chosen(&self) -> Option<&str> {
        self.chosen.as_deref()
    }
}

impl AttachedTimerlat {
    /// Returns the CPU of which a latency stopped measurement, if one did. No activation counts from then on.
    pub fn stopped_by(&self) -> Option<u32> {
        let by = self.workload.stopped_by()?;
        match &self.workload {
            // The tracer may stop at the interrupt, before the thread has run; its late event comes later.
            Workload::Tracer(tracer) if self.explains() && !self.has_reported_stop && !tracer.is_overdue() => None,
            _ => Some(by),
        }
    }

    /// Takes the late event of the activation that stopped measurement, if it was received before the stop.
    fn take_held_hit(&mut self) -> Option<(TimerEvidence, LateEvent)> {
        let index = self.held.iter().position(|(evidence, event)| self.is_hit(event.cpu, evidence.due_ns))?;
        self.held.remove(index)
    }

    /// Collects activations due until then, and waits for those in flight. Returns the number still overdue, per CPU.
    fn collect_all(&mut self, until_ns: u64) -> anyhow::Result<Vec<(u32, u64)>> {
        let began = Instant::now();
        loop {
            self.workload.collect(until_ns)?;
            let overdue = self.workload.overdue(until_ns);
            if overdue.iter().all(|&(_, periods)| periods == 0) || began.elapsed() >= IN_FLIGHT_TIMEOUT {
                return Ok(overdue);
            }
            std::thread::sleep(IN_FLIGHT_POLL);
        }
    }

    fn explains(&self) -> bool {
        self.programs.as_ref().is_some_and(|programs| programs.account.is_some())
    }

    fn activation(&self, cpu: u32) -> Option<Activation<'_>> {
        self.programs.as_ref().map(|programs| programs.activation(cpu))
    }

    /// Returns whether measurement has stopped, even if the late event of the stop is still to come.
    pub fn has_stopped(&self) -> bool {
        self.workload.stopped_by().is_some()
    }

    /// Returns whether this activation stopped measurement, by the latency that the tracer or the thread measured. That
    /// may be more than the latency of its late event, which ends at the switch-in.
    pub fn is_hit(&self, cpu: u32, due_ns: u64) -> bool {
        match &self.workload {
            Workload::Own { .. } => self.stopped.is_by(cpu, due_ns),
            Workload::Tracer(tracer) => tracer.is_hit(cpu, due_ns),
        }
    }

    /// Returns whether the kernel's tracer measures.
    pub fn has_tracer(&self) -> bool {
        matches!(self.workload, Workload::Tracer(_))
    }

    /// Returns whether thread latency ends when the thread runs its own code, not already at the switch-in.
    pub fn sees_own_code(&self) -> bool {
        self.programs.as_ref().is_none_or(|programs| self.has_tracer() || programs.sees_ran())
    }

    /// Returns whether threads return to user space, and so have a latency of the return.
    pub fn has_user(&self) -> bool {
        self.workload.has_user()
    }

    /// Returns the TIDs of the measured kernel threads; empty if other threads are measured.
    pub fn kernel_threads(&self) -> &[u32] {
        match &self.workload {
            Workload::Own { .. } => &[],
            Workload::Tracer(tracer) => &tracer.threads,
        }
    }

    /// Writes the tracer's recording as text; returns whether there is one.
    ///
    /// # Errors
    /// Fails if the recording cannot be read or written.
    pub fn write_trace(&self, out: &mut dyn Write) -> anyhow::Result<bool> {
        match &self.workload {
            Workload::Own { .. } => Ok(false),
            Workload::Tracer(tracer) => tracer.save(out),
        }
    }

    /// Returns the latest activations by due time, if a recording is wanted and the tracer makes none.
    pub fn latest(&self) -> Vec<Activated> {
        self.workload.latest(self.counts_from_ns)
    }

    /// Returns whether the tracer records.
    pub fn records(&self) -> bool {
        matches!(&self.workload, Workload::Tracer(tracer) if tracer.records())
    }

    /// Returns histograms that triggers made the kernel count, each with the name `SYSTEM_EVENT`.
    ///
    /// # Errors
    /// Fails if a histogram cannot be read.
    pub fn kernel_histograms(&self) -> anyhow::Result<Vec<(String, String)>> {
        match &self.workload {
            Workload::Own { .. } => Ok(Vec::new()),
            Workload::Tracer(tracer) => tracer.histograms(),
        }
    }

    /// Returns the CPUs that were idle at an interrupt, each with the longest latency of such an interrupt in
    /// nanoseconds. That may be of an activation after the stop, which no snapshot counts.
    pub fn max_from_idle(&self) -> impl Iterator<Item = (u32, u64)> {
        let cpus = self.workload.cpus().into_iter();
        cpus.filter_map(|cpu| Some((cpu, self.activation(cpu)?.max_from_idle_ns()))).filter(|&(_, ns)| ns > 0)
    }

    /// Returns, in nanoseconds since it was due, when the thread of the activation that stopped measurement was switched
    /// in and when it returned to user space; `None` before the stop, or if one of the times is unknown.
    pub fn thread_times_at_stop(&self) -> Option<(u64, u64)> {
        self.stopped.thread_times()
    }

    /// Returns the thread (comm and TID) that ran on each CPU at the stop; empty before it, or without causes.
    pub fn tasks_at_stop(&self) -> Vec<(u32, String)> {
        self.stopped.tasks()
    }

    /// Resumes measurement after a stop. Late events from before do not count, and are not among the worst.
    ///
    /// # Errors
    /// Fails if the tracer cannot be resumed.
    pub fn resume(&mut self) -> anyhow::Result<()> {
        self.forget_worst();
        for activation in self.workload.cpus().into_iter().filter_map(|cpu| self.activation(cpu)) {
            activation.reset_max_from_idle();
        }
        self.has_reported_stop = false;
        self.held.clear();
        self.counts_from_ns = self.workload.resume(&self.stopped)?;
        Ok(())
    }

    /// Forgets the worst activations: later ones are compared only with each other.
    pub fn forget_worst(&mut self) {
        if let Some(floors) = &mut self.floors {
            floors.forget();
        }
        let (over_ns, irq_over_ns) = (self.sent_over(self.floor_ns()), self.sent_over(self.explain_irq_over_ns));
        for activation in self.workload.cpus().into_iter().filter_map(|cpu| self.activation(cpu)) {
            activation.set_thresholds(over_ns, irq_over_ns);
        }
    }

    /// Returns the latency from which late events are wanted initially; 0 for the worst ones.
    fn floor_ns(&self) -> u64 {
        if self.floors.is_some() { 0 } else { self.explain_over_ns }
    }

    /// Returns the latency from which the programs send late events. With a stop threshold it is halved: the programs
    /// see an activation before the tracer's sample and the return to user space, which may be late enough to stop.
    fn sent_over(&self, over_ns: u64) -> u64 {
        if self.has_stop && over_ns < u64::MAX { over_ns / 2 } else { over_ns }
    }

    fn raise_floor(&mut self, event: &LateEvent) {
        let cpu = event.cpu;
        if let Some(floor_ns) = self.floors.as_mut().and_then(|floors| floors.add(cpu, event.latency_ns)) {
            let over_ns = self.sent_over(floor_ns.min(self.explain_over_ns));
            if let Some(activation) = self.activation(cpu) {
                activation.set_thread_threshold(over_ns);
            }
        }
    }

    fn with_evidence(&self, mut event: LateEvent, evidence: TimerEvidence) -> LateEvent {
        event.evidence = self.keep_evidence.then(|| Box::new(evidence.into()));
        event
    }

    fn event_of(&mut self, bytes: &[u8]) -> Option<(TimerEvidence, LateEvent)> {
        let account = self.programs.as_ref()?.account.as_ref()?;
        late::event_of(bytes, &mut account.windows(), &mut self.symbols)
    }
}
