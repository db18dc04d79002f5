// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `timerlat` while it measures.

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
use super::threads::{Stop, Stopped};
use super::tracer::Tracer;
use super::workload::Workload;
use super::{INFO, Threads, TimerlatOptions};
use crate::attach::Meter;
use crate::floors::Floors;
use crate::occupancy::Account;
use crate::session::{Session, Span};
use crate::source::{AttachError, Attached};
use crate::symbols::KernelSymbols;
use crate::{clock, cpus};

/// Far more activations than come between a late event and the sample of the same activation.
const HELD: usize = 16;
/// A snapshot waits for activations that were due before it, so long at most.
const UNDER_WAY: Duration = Duration::from_millis(200);
/// How often it looks whether they have come in.
const LOOKED_AFTER: Duration = Duration::from_micros(200);

/// Measures until it is dropped.
pub struct AttachedTimerlat {
    /// First, so that it ends while the programs still run.
    workload: Workload,
    /// The tracer needs none where no causes are asked for: nothing is in the way of what it measures then.
    programs: Option<Programs>,
    stopped: Arc<Stopped>,
    /// Where only the worst activations are asked for.
    floors: Option<Floors>,
    symbols: KernelSymbols,
    keep_evidence: bool,
    span: Span,
    /// Late events before are of no measurement.
    counts_from_ns: u64,
    /// Late events whose records were.
    cut_short: u64,
    explain_over_ns: u64,
    explain_irq_over_ns: u64,
    /// A threshold stops it.
    has_stop: bool,
    /// Of a stop, what made it has come in.
    is_told: bool,
    /// Late events that nobody asked for, the newest last: what stops the measurement comes in after them.
    held: VecDeque<(TimerEvidence, LateEvent)>,
    weaker: Option<String>,
    left_out: Option<String>,
    /// Why its period is not the one that was asked for.
    pub(super) chosen: Option<String>,
    meter: Meter,
}

impl AttachedTimerlat {
    /// With the kernel's tracer, or with threads of this process.
    pub(super) fn new(options: &TimerlatOptions, session: &Session, with_tracer: bool) -> Result<Self, AttachError> {
        // What nobody else explains is recorded all the same, where the tracer does not.
        let recorded = options.record.as_ref().filter(|_| !with_tracer && !options.explains());
        let explain_worst = options.explain_worst.or(recorded.and_then(|record| record.worst));
        let options = &TimerlatOptions { explain_worst, ..options.clone() };
        let (wanted, left_out) = chosen_cpus(options, session)?;
        let tracer = with_tracer.then(|| Tracer::new(options, &wanted)).transpose()?;
        let has_programs = !with_tracer || options.explains();
        let programs = has_programs.then(|| Programs::attach(options, session, with_tracer)).transpose()?;
        let account = programs.as_ref().and_then(|programs| programs.account.as_ref());
        let tasks = account.map(Account::threads).transpose().context("cannot map the accounts of CPUs")?;
        let weaker = weaker(account, &wanted);
        let stopped = Arc::new(Stopped::new(tasks.map(|threads| Box::new(move || threads.now()) as _)));
        for (programs, &cpu) in programs.iter().flat_map(|programs| wanted.iter().map(move |cpu| (programs, cpu))) {
            programs.activation(cpu).explain_from(u64::MAX, u64::MAX);
            programs.activation(cpu).measure(with_tracer);
        }
        let workload = match (tracer, &programs) {
            (Some(tracer), _) => Workload::Tracer(Box::new(tracer)),
            (None, programs) => {
                let map = &programs.as_ref().context("threads of this process need the programs")?.map;
                Workload::start(options, &wanted, map, &stopped)?
            }
        };
        workload.settle(options.period_ns)?;
        let mut attached = AttachedTimerlat {
            workload,
            programs,
            stopped,
            floors: options.explain_worst.map(Floors::new),
            symbols: session.symbols(),
            keep_evidence: options.keep_evidence,
            span: Span::begin(INFO.card, session),
            counts_from_ns: 0,
            cut_short: 0,
            is_told: false,
            held: VecDeque::new(),
            weaker,
            left_out,
            chosen: None,
            explain_over_ns: options.explain_over_ns.unwrap_or(u64::MAX),
            explain_irq_over_ns: options.explain_irq_over_ns.unwrap_or(u64::MAX),
            has_stop: options.stop != Stop::default(),
            meter: Meter::default(),
        };
        attached.resume()?;
        attached.span.begin_at(attached.counts_from_ns);
        Ok(attached)
    }
}

/// The CPUs that are measured, and which were left out. Whoever reads the tracer's files chooses where: no thread or
/// timer is this process's then.
fn chosen_cpus(options: &TimerlatOptions, session: &Session) -> Result<(Vec<u32>, Option<String>), AttachError> {
    if options.threads == Threads::Others && options.cpus.is_empty() {
        return Ok((cpus::online().context("cannot read which CPUs are online")?, None));
    }
    let choice = session.cpus(&options.cpus)?;
    Ok((choice.at_least_one()?.to_vec(), choice.remark()))
}

/// What is told less well on these CPUs than it could be.
fn weaker(account: Option<&Account>, cpus: &[u32]) -> Option<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let moves = read("/proc/sys/kernel/timer_migration").trim() == "1";
    let without_tick = cpus::numbers(&read("/sys/devices/system/cpu/nohz_full")).unwrap_or_default();
    if moves && cpus.iter().any(|cpu| without_tick.contains(cpu)) {
        // Timers of threads are not pinned (get_nohz_timer_target() in kernel/sched/core.c).
        let told = "other CPUs may serve the timers of nohz_full CPUs, whose activations are unseen then (set kernel.timer_migration=0)";
        return Some(told.to_owned());
    }
    account.and_then(Account::weaker).map(str::to_owned)
}

impl Attached for AttachedTimerlat {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        // What has gathered may take a while; what has come in since does not.
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
        // Activations whose timer or thread was not seen: they have a latency of the return to user space only.
        snapshot.lost.insert("unseen".to_owned(), unseen);
        match &mut self.workload {
            // The same where the thread was stopped, or preempted on its way to sleep, until after its timer was due.
            Workload::Own { .. } => snapshot.lost.insert("armed_late".to_owned(), armed_late),
            // Samples that the kernel overwrote before they were read.
            Workload::Tracer(tracer) => snapshot.lost.insert("samples".to_owned(), tracer.take_lost()),
        };
        snapshot.lost.insert("late_events".to_owned(), std::mem::take(&mut self.cut_short));
        if let Some(programs) = &mut self.programs {
            if let Some(account) = &mut programs.account {
                snapshot.lost.extend(account.take_lost().into_iter().map(|(reason, count)| (reason.to_owned(), count)));
                account.report_unexplained(&mut snapshot);
            }
            self.meter.report(programs.statistics(), &mut snapshot);
        }
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if let Some(programs) = &self.programs {
            programs.poll(wait)?;
        }
        // After it, so that what made a stop is known for such.
        self.workload.collect(clock::monotonic_ns())?;
        if let (Workload::Tracer(_), Some(cpu)) = (&self.workload, self.workload.stopped_by()) {
            self.stopped.stop(cpu, 0, clock::monotonic_ns());
        }
        while let Some(bytes) = self.programs.as_ref().and_then(Programs::take_record) {
            let Some((evidence, event)) = self.event_of(&bytes) else {
                self.cut_short += 1;
                continue;
            };
            let is_hit = self.is_hit(event.cpu, evidence.due_ns);
            self.is_told |= is_hit;
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
                while self.held.len() >= HELD {
                    self.held.pop_front();
                }
                self.held.push_back((evidence, event));
            }
        }
        if let Some((evidence, event)) = self.take_held_hit() {
            self.is_told = true;
            self.raise_floor(&event);
            each(self.with_evidence(event, evidence));
        }
        Ok(())
    }

    fn weaker(&self) -> Option<&str> {
        self.weaker.as_deref()
    }

    fn left_out(&self) -> Option<&str> {
        self.left_out.as_deref()
    }

    fn chosen(&self) -> Option<&str> {
        self.chosen.as_deref()
    }
}

impl AttachedTimerlat {
    /// The CPU whose latency stopped the measurement, if one did. No thread counts from then on.
    pub fn stopped_by(&self) -> Option<u32> {
        let by = self.workload.stopped_by()?;
        match &self.workload {
            // The tracer stops at an interrupt before the thread has run, whose late event tells why.
            Workload::Tracer(tracer) if self.explains() && !self.is_told && !tracer.is_overdue() => None,
            _ => Some(by),
        }
    }

    /// The late event of the activation that stopped the measurement, where it came in before what did.
    fn take_held_hit(&mut self) -> Option<(TimerEvidence, LateEvent)> {
        let index = self.held.iter().position(|(evidence, event)| self.is_hit(event.cpu, evidence.due_ns))?;
        self.held.remove(index)
    }

    /// Takes in activations due until then, waiting for those on their way. Returns how many are late for longer.
    fn collect_all(&mut self, until_ns: u64) -> anyhow::Result<Vec<(u32, u64)>> {
        let began = Instant::now();
        loop {
            self.workload.collect(until_ns)?;
            let overdue = self.workload.overdue(until_ns);
            if overdue.iter().all(|&(_, periods)| periods == 0) || began.elapsed() >= UNDER_WAY {
                return Ok(overdue);
            }
            std::thread::sleep(LOOKED_AFTER);
        }
    }

    fn explains(&self) -> bool {
        self.programs.as_ref().is_some_and(|programs| programs.account.is_some())
    }

    fn activation(&self, cpu: u32) -> Option<Activation<'_>> {
        self.programs.as_ref().map(|programs| programs.activation(cpu))
    }

    /// The same, also where what made it is still to come.
    pub fn has_stopped(&self) -> bool {
        self.workload.stopped_by().is_some()
    }

    /// Whether an activation that was due then has stopped the measurement, by what the tracer or the thread measured:
    /// that may be more than its late event's latency, which ends when the thread has the CPU.
    pub fn is_hit(&self, cpu: u32, due_ns: u64) -> bool {
        match &self.workload {
            Workload::Own { .. } => self.stopped.is_by(cpu, due_ns),
            Workload::Tracer(tracer) => tracer.is_hit(cpu, due_ns),
        }
    }

    /// Whether the kernel's tracer measures.
    pub fn has_tracer(&self) -> bool {
        matches!(self.workload, Workload::Tracer(_))
    }

    /// Whether the threads' latency ends when they ran, and not when they had the CPU, some steps before.
    pub fn tells_ran(&self) -> bool {
        self.programs.as_ref().is_none_or(|programs| self.has_tracer() || programs.tells_ran())
    }

    /// Whether threads return to user space, and have a latency of that.
    pub fn has_user(&self) -> bool {
        self.workload.has_user()
    }

    /// The threads of the kernel that are measured; empty where others are.
    pub fn kernel_threads(&self) -> &[u32] {
        match &self.workload {
            Workload::Own { .. } => &[],
            Workload::Tracer(tracer) => &tracer.threads,
        }
    }

    /// Writes what the tracer has recorded, as text; returns whether there is any.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn write_trace(&self, out: &mut dyn Write) -> anyhow::Result<bool> {
        match &self.workload {
            Workload::Own { .. } => Ok(false),
            Workload::Tracer(tracer) => tracer.save(out),
        }
    }

    /// The latest activations in the order in which they were due, where a record is wanted and the tracer makes none.
    pub fn latest(&self) -> Vec<Activated> {
        self.workload.latest(self.counts_from_ns)
    }

    /// Whether the tracer records.
    pub fn records(&self) -> bool {
        matches!(&self.workload, Workload::Tracer(tracer) if tracer.records())
    }

    /// Histograms that the kernel made because a trigger told it to, each with the name `SYSTEM_EVENT`.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn kernel_histograms(&self) -> anyhow::Result<Vec<(String, String)>> {
        match &self.workload {
            Workload::Own { .. } => Ok(Vec::new()),
            Workload::Tracer(tracer) => tracer.histograms(),
        }
    }

    /// The longest latency of an interrupt that found its CPU idle, and that CPU; `None` where none did.
    pub fn max_from_idle(&self) -> Option<(u32, u64)> {
        let cpus = self.workload.cpus().into_iter();
        let each = cpus.filter_map(|cpu| Some((cpu, self.activation(cpu)?.max_from_idle_ns())));
        each.max_by_key(|&(_, ns)| ns).filter(|&(_, ns)| ns > 0)
    }

    /// Which thread had each CPU when the measurement stopped, by name and id; empty before, or without causes.
    pub fn tasks_at_stop(&self) -> Vec<(u32, String)> {
        self.stopped.tasks()
    }

    /// Goes on after a stop. Late events of before do not come any more, and are not among the worst.
    ///
    /// # Errors
    /// When the tracer cannot be told to.
    pub fn resume(&mut self) -> anyhow::Result<()> {
        self.forget_worst();
        for activation in self.workload.cpus().into_iter().filter_map(|cpu| self.activation(cpu)) {
            activation.forget_idle();
        }
        self.is_told = false;
        self.held.clear();
        self.counts_from_ns = self.workload.resume(&self.stopped)?;
        Ok(())
    }

    /// From now on, activations are compared with later ones only to find the worst.
    pub fn forget_worst(&mut self) {
        if let Some(floors) = &mut self.floors {
            floors.forget();
        }
        let (over_ns, irq_over_ns) = (self.sent_over(self.floor_ns()), self.sent_over(self.explain_irq_over_ns));
        for activation in self.workload.cpus().into_iter().filter_map(|cpu| self.activation(cpu)) {
            activation.explain_from(over_ns, irq_over_ns);
        }
    }

    /// From which latency on late events are wanted where nothing else is known; of the worst, any to begin with.
    fn floor_ns(&self) -> u64 {
        if self.floors.is_some() { 0 } else { self.explain_over_ns }
    }

    /// From which latency on the programs send what is wanted from this one on: they see an activation before the
    /// tracer's samples and the return to user space, which may be what is late enough to stop at.
    fn sent_over(&self, over_ns: u64) -> u64 {
        if self.has_stop && over_ns < u64::MAX { over_ns / 2 } else { over_ns }
    }

    fn raise_floor(&mut self, event: &LateEvent) {
        let cpu = event.cpu;
        if let Some(floor_ns) = self.floors.as_mut().and_then(|floors| floors.add(cpu, event.latency_ns)) {
            let over_ns = self.sent_over(floor_ns.min(self.explain_over_ns));
            if let Some(activation) = self.activation(cpu) {
                activation.explain_worse_than(over_ns);
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
