// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `ticks`: how late the interrupt of each CPU's own timer is.

mod culprits;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod programs;
mod sampler;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use whylate_model::blame::Keeper;
use whylate_model::{CauseKind, Histogram, LateEvent, Series, Snapshot, Stack};

use self::culprits::Late;
use self::programs::{CulpritLengths, Programs};
use self::sampler::NmiSampler;
use super::{INFO, IrqsoffOptions, TICKS};
use crate::kernel::attach::Meter;
use crate::kernel::cpus;
use crate::kernel::heartbeat::{Heartbeats, Period};
use crate::kernel::symbols::KernelSymbols;
use crate::source::floors::Floors;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

pub(super) struct AttachedTicks {
    /// Dropped first, so that no program runs while the rest is dropped.
    programs: Programs,
    heartbeats: Heartbeats,
    sampler: NmiSampler,
    /// CPUs that came back online without a sampler since the last snapshot.
    samplers_lost: u64,
    options: IrqsoffOptions,
    period: Period,
    chosen: Option<String>,
    cpus: Vec<u32>,
    floors: Option<Floors>,
    /// Number of each CPU's ticks at the last check for lost timers.
    ticks_seen: BTreeMap<u32, u64>,
    symbols: KernelSymbols,
    span: Span,
    limitation: Option<String>,
    left_out: Option<String>,
    meter: Meter,
    cut_short: u64,
    /// Lengths by culprit and interrupted stack since the last snapshot.
    by_stack: BTreeMap<(Keeper, Vec<String>), Histogram>,
}

impl AttachedTicks {
    pub(super) fn new(options: &IrqsoffOptions, session: &Session) -> Result<Self, AttachError> {
        let choice = session.cpus(&options.cpus)?;
        let wanted = choice.at_least_one()?.to_vec();
        let sampler = if sends_late_events(options) { NmiSampler::open(&wanted) } else { Ok(NmiSampler::default()) };
        Ok(AttachedTicks { left_out: choice.remark(), ..Self::with_sampler(options, session, wanted, sampler)? })
    }

    /// Attaches with `sampler`, or with the reason why no stack can be taken inside sections.
    fn with_sampler(
        options: &IrqsoffOptions,
        session: &Session,
        wanted: Vec<u32>,
        sampler: Result<NmiSampler, String>,
    ) -> Result<Self, AttachError> {
        let (sampler, blind) = match sampler {
            Ok(sampler) => (sampler, None),
            Err(reason) => {
                (NmiSampler::default(), Some(format!("no stacks from inside sections with interrupts off: {reason}")))
            }
        };
        // Before other timers run.
        let period = Period::new(options.period_ns, &wanted);
        let programs = Programs::attach(options, session, period.ns, &sampler)?;
        let heartbeats = Heartbeats::start(&wanted, period.ns).map_err(refused_heartbeat)?;
        for (cpu, id) in heartbeats.ids().context("cannot distinguish the timers of CPUs")? {
            programs.watch(cpu, id);
        }
        let floors = options.worst.map(Floors::new);
        // If the account has timers of its own, it reports that too.
        let limitation =
            programs.limitations().map(str::to_owned).or_else(|| cpus::unseen_interrupts().map(str::to_owned));
        let limitations: Vec<String> = [limitation, blind].into_iter().flatten().collect();
        let limitation = (!limitations.is_empty()).then(|| limitations.join("; "));
        let mut attached = AttachedTicks {
            programs,
            heartbeats,
            sampler,
            samplers_lost: 0,
            options: options.clone(),
            period,
            chosen: period.remark("heartbeats come", "irqsoff --period 1ms for finer bounds"),
            cpus: wanted,
            floors,
            ticks_seen: BTreeMap::new(),
            symbols: session.symbols(),
            span: Span::begin(INFO.card, session),
            limitation,
            left_out: None,
            meter: Meter::default(),
            cut_short: 0,
            by_stack: BTreeMap::new(),
        };
        attached.forget_worst();
        Ok(attached)
    }

    /// Resets the thresholds of the worst sections: from now on, lengths are compared only with later ones.
    fn forget_worst(&mut self) {
        if let Some(floors) = &mut self.floors {
            floors.forget();
        }
        let from_ns = if self.floors.is_some() { 0 } else { self.options.late_from_ns() };
        for &cpu in &self.cpus {
            self.programs.send_from(cpu, from_ns);
        }
    }

    fn raise_floor(&mut self, event: &LateEvent) {
        // Other causes may be longer, and are not what was asked for.
        if event.labels.get("kind").is_some_and(|kind| kind != CauseKind::IrqsOff.name()) {
            return;
        }
        let floor_ns = self.floors.as_mut().and_then(|floors| floors.add(event.cpu, event.latency_ns));
        if let Some(floor_ns) = floor_ns {
            self.programs.send_from(event.cpu, floor_ns.min(self.options.late_from_ns()));
        }
    }

    /// Starts a new timer on each CPU that lost its timer by going offline and is back.
    fn restart_lost_timers(&mut self, span_ns: u64) -> anyhow::Result<()> {
        // A shorter span may have no tick.
        if span_ns < 2 * self.period.ns {
            return Ok(());
        }
        let mut still = Vec::new();
        for &cpu in &self.cpus {
            let ticks = self.programs.ticks(cpu);
            if self.ticks_seen.insert(cpu, ticks) == Some(ticks) {
                still.push(cpu);
            }
        }
        if still.is_empty() {
            return Ok(());
        }
        let online = cpus::online().context("cannot list the online CPUs")?;
        for cpu in still {
            if online.contains(&cpu) {
                let id = self.heartbeats.restart(cpu, self.period.ns);
                self.programs.watch(cpu, id.with_context(|| format!("cannot start the timer of CPU {cpu} again"))?);
                self.samplers_lost += u64::from(!self.sampler.restart(cpu, self.programs.sampler_program()));
            }
        }
        Ok(())
    }

    /// Adds a series without labels for the heartbeats themselves.
    fn add_period_series(&self, snapshot: &mut Snapshot) {
        let interrupt = self.period.interrupt_ns.map(|ns| ("interrupt_ns".to_owned(), ns as f64));
        let values = [("period_ns".to_owned(), self.period.ns as f64)].into_iter().chain(interrupt).collect();
        snapshot.series.push(Series { values, ..Series::default() });
    }

    /// Adds a series for each culprit, and a stack for each interrupted stack.
    fn add_culprit_series(&mut self, snapshot: &mut Snapshot, lengths: Vec<(usize, Histogram)>) {
        let measured_ns = snapshot.duration_ns as f64 * self.cpus.len() as f64;
        let mut by_culprit: BTreeMap<Keeper, Histogram> = BTreeMap::new();
        self.name_culprits(lengths);
        for ((culprit, stack), length) in std::mem::take(&mut self.by_stack) {
            if culprit.kind == CauseKind::IrqsOff {
                let weight_ns = u64::try_from(length.sum_ns()).unwrap_or(u64::MAX);
                let (labels, samples) = (culprit.labels(), length.count());
                snapshot.stacks.push(Stack { labels, samples, weight_ns, kernel: stack, ..Stack::default() });
            }
            by_culprit.entry(culprit).or_default().merge(&length);
        }
        for (culprit, length) in by_culprit {
            let values = [
                ("period_ns".to_owned(), self.period.ns as f64),
                ("share".to_owned(), length.sum_ns() as f64 / measured_ns.max(1.0)),
            ];
            let histograms = [("length".to_owned(), length)].into();
            snapshot.series.push(Series {
                labels: culprit.labels(),
                histograms,
                values: values.into(),
                ..Series::default()
            });
        }
    }

    /// Names culprits, and frees some if little room is left.
    fn name_culprits(&mut self, lengths: Vec<(usize, Histogram)>) {
        let mut named = self.programs.name_lengths(lengths, &mut self.symbols);
        named.extend(self.programs.free_unused(&mut self.symbols));
        for CulpritLengths { culprit, stack, length } in named {
            self.by_stack.entry((culprit, stack)).or_default().merge(&length);
        }
    }

    fn add_tick_series(&self, snapshot: &mut Snapshot, ticks: Vec<(u32, (Histogram, u64))>) {
        for (cpu, (lateness, overruns)) in ticks {
            let values = [("overruns", overruns as f64), ("period_ns", self.period.ns as f64)];
            snapshot.series.push(Series {
                labels: [("cpu".to_owned(), cpu.to_string())].into(),
                histograms: [("lateness".to_owned(), lateness)].into(),
                values: values.map(|(name, value)| (name.to_owned(), value)).into(),
                ..Series::default()
            });
        }
    }

    fn event_of(&mut self, late: &Late, window: &[u8]) -> Option<LateEvent> {
        let occupancy = self.programs.occupancy(window, &mut self.symbols);
        // The record is truncated.
        if occupancy.is_none() && self.options.explain_over_ns.is_some() {
            return None;
        }
        let stack = self.symbols.stack(&late.stack);
        Some(late.event(stack, occupancy, &self.options, self.period.ns, &mut self.symbols))
    }
}

/// Tests whether late events are sent; only they contain stacks from inside sections.
fn sends_late_events(options: &IrqsoffOptions) -> bool {
    options.late_over_ns.is_some() || options.explain_over_ns.is_some() || options.worst.is_some()
}

fn refused_heartbeat(error: std::io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => AttachError::NotPermitted,
        _ => AttachError::Unsupported(format!("there can be no timer of its own on each CPU: {error}")),
    }
}

impl Attached for AttachedTicks {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let lengths = self.programs.take_lengths();
        let cpus = if self.options.timer_test { self.cpus.as_slice() } else { &[] };
        let ticks: Vec<_> = cpus.iter().map(|&cpu| (cpu, self.programs.take_ticks(cpu))).collect();
        // Name culprits only after everything is read: reading the kernel's symbols takes long.
        let mut snapshot = self.span.end(TICKS);
        self.add_period_series(&mut snapshot);
        self.add_culprit_series(&mut snapshot, lengths);
        self.add_tick_series(&mut snapshot, ticks);
        snapshot.lost = self.programs.take_lost(&self.cpus);
        *snapshot.lost.entry("late_events".to_owned()).or_default() += std::mem::take(&mut self.cut_short);
        self.programs.report_account(&mut snapshot);
        self.meter.report(self.programs.statistics(), &mut snapshot);
        self.restart_lost_timers(snapshot.duration_ns)?;
        snapshot.lost.insert("looks".to_owned(), std::mem::take(&mut self.samplers_lost));
        self.forget_worst();
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if self.programs.needs_room() {
            let lengths = self.programs.take_lengths();
            self.name_culprits(lengths);
        }
        self.programs.poll(wait)?;
        while let Some(bytes) = self.programs.take_record() {
            let event = Late::read(&bytes).and_then(|(late, window)| self.event_of(&late, window));
            let Some(event) = event else {
                self.cut_short += 1;
                continue;
            };
            self.raise_floor(&event);
            each(event);
        }
        Ok(())
    }

    fn fills_between_snapshots(&self) -> bool {
        true
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
