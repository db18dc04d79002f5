// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `events`: each section with interrupts or preemption off, by the tracepoints at its start and end.

mod programs;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use whylate_model::ftrace::section_event;
use whylate_model::{ActorName, Histogram, Labels, LateEvent, Series, Snapshot};

use self::programs::{PlaceNames, Programs, late_section};
use super::wanted::wanted_cpus;
use super::{EVENTS, INFO, IrqsoffOptions, What};
use crate::kernel::attach::{self, Meter};
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::{clock, cpus};
use crate::source::floors::Floors;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

pub(super) struct AttachedEvents {
    /// Dropped first, so that no program runs while the rest is dropped.
    programs: Programs,
    options: IrqsoffOptions,
    /// All possible CPUs, or the requested ones.
    cpus: Vec<u32>,
    floors: Option<Floors>,
    symbols: KernelSymbols,
    span: Span,
    meter: Meter,
    cut_short: u64,
    /// Lengths of sections since the last snapshot.
    lengths: BTreeMap<Labels, Histogram>,
}

impl AttachedEvents {
    pub(super) fn new(options: &IrqsoffOptions, session: &Session) -> Result<Self, AttachError> {
        wanted_cpus(&options.cpus)?;
        let programs = Programs::attach(options.what)?;
        // CPUs that come online later are measured too.
        let cpus = if options.cpus.is_empty() { (0..programs.cpus()).collect() } else { options.cpus.clone() };
        let mut attached = AttachedEvents {
            programs,
            options: options.clone(),
            cpus,
            floors: options.worst.map(Floors::new),
            symbols: session.symbols(),
            span: Span::begin(INFO.card, session),
            meter: Meter::default(),
            cut_short: 0,
            lengths: BTreeMap::new(),
        };
        attached.forget_worst();
        attached.cpus.iter().for_each(|&cpu| attached.programs.watch(cpu));
        Ok(attached)
    }

    /// Resets the thresholds of the worst sections: from now on, lengths are compared only with later ones.
    fn forget_worst(&mut self) {
        let from_ns = match &mut self.floors {
            // Shorter sections come by the thousand.
            Some(floors) => {
                floors.forget();
                self.options.from_ns.min(self.options.late_from_ns())
            }
            None => self.options.late_from_ns(),
        };
        self.cpus.iter().for_each(|&cpu| self.programs.send_from(cpu, from_ns));
    }

    fn raise_floor(&mut self, event: &LateEvent) {
        let floor_ns = self.floors.as_mut().and_then(|floors| floors.add(event.cpu, event.latency_ns));
        if let Some(floor_ns) = floor_ns {
            self.programs.send_from(event.cpu, floor_ns.min(self.options.late_from_ns()));
        }
    }

    fn event_of(&mut self, late: &late_section) -> LateEvent {
        let names = self.programs.names_of(late).unwrap_or_else(|| {
            // Address 0: the kernel reported no caller.
            let mut name = |address| if address == 0 { String::new() } else { self.symbols.name(address).to_owned() };
            PlaceNames {
                enabled_by: name(late.key.enabled_by),
                caller: name(late.key.caller),
                disabled_by: name(late.key.disabled_by),
            }
        });
        event_of(late, &names, self.options.what, &mut self.symbols)
    }

    fn gather(&mut self) {
        for (names, length) in self.programs.take_lengths() {
            self.lengths.entry(names.place(self.options.what).labels()).or_default().merge(&length);
        }
    }

    /// Makes one series of all call sites with the same names.
    fn series(&mut self, measured_ns: f64) -> Vec<Series> {
        self.gather();
        let series = std::mem::take(&mut self.lengths).into_iter().map(|(labels, length)| Series {
            labels,
            values: [("share".to_owned(), length.sum_ns() as f64 / measured_ns)].into(),
            histograms: [("length".to_owned(), length)].into(),
            ..Series::default()
        });
        series.collect()
    }
}

fn event_of(late: &late_section, names: &PlaceNames, what: What, symbols: &mut KernelSymbols) -> LateEvent {
    let bytes = usize::try_from(late.stack_bytes).unwrap_or(0);
    let addresses: Vec<u64> = late.stack.iter().copied().take(bytes / size_of::<u64>()).collect();
    // Frames above the function that ended the section are the tracepoint's and this program's.
    let own = addresses.iter().position(|&address| address == late.key.enabled_by).unwrap_or(0);
    let stack = addresses[own..].iter().map(|&address| {
        // These names are the kernel's own, from when the section ended: the symbols may be older, or the module gone.
        let known = [(late.key.enabled_by, &names.enabled_by), (late.key.caller, &names.caller)];
        match known.into_iter().find(|&(known, name)| known == address && !name.is_empty()) {
            Some((_, name)) => name.clone(),
            None => symbols.name(address).to_owned(),
        }
    });
    let stack = stack.collect();
    let thread = ActorName::thread(attach::text(&late.comm), late.tid);
    let latency_ns = late.end_ns.saturating_sub(late.start_ns);
    let at_unix_ns = clock::unix_ns_of(late.end_ns);
    let event = section_event(&names.place(what), thread, at_unix_ns, latency_ns, late.cpu, stack);
    LateEvent { at_ns: late.end_ns, ..event }
}

impl Attached for AttachedEvents {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let online = cpus::online().context("cannot list the online CPUs")?;
        let measured = self.cpus.iter().filter(|cpu| online.contains(cpu)).count();
        let mut snapshot = self.span.end(EVENTS);
        snapshot.series = self.series((snapshot.duration_ns as f64 * measured as f64).max(1.0));
        snapshot.lost = self.programs.take_lost();
        *snapshot.lost.entry("late_events".to_owned()).or_default() += std::mem::take(&mut self.cut_short);
        self.meter.report(self.programs.statistics(), &mut snapshot);
        self.forget_worst();
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if self.programs.needs_room() {
            self.gather();
        }
        self.programs.poll(wait)?;
        while let Some(bytes) = self.programs.take_record() {
            match attach::read_plain::<late_section>(&bytes) {
                Some(late) => {
                    let event = self.event_of(&late);
                    self.raise_floor(&event);
                    each(event);
                }
                None => self.cut_short += 1,
            }
        }
        Ok(())
    }

    fn fills_between_snapshots(&self) -> bool {
        true
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::*;
    use crate::cpu_account::fuzzing::with_names;

    /// Decodes a section with the kernel's names of the functions at its ends.
    pub fn sections(bytes: &[u8]) {
        let Some(late) = attach::read_plain::<late_section>(bytes) else { return };
        let mut names = bytes[size_of::<late_section>()..].splitn(3, |&byte| byte == 0);
        let mut name = || names.next().map(|name| String::from_utf8_lossy(name).into_owned()).unwrap_or_default();
        let names = PlaceNames { enabled_by: name(), caller: name(), disabled_by: name() };
        for what in [What::Irqs, What::Preemption] {
            with_names(|_, symbols| Some(event_of(&late, &names, what, symbols)));
        }
    }
}
