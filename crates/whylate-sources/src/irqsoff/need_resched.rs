// SPDX-License-Identifier: MIT OR Apache-2.0
//! Backend `need_resched`: how long a CPU continues with a thread marked to be rescheduled.

use std::collections::{BTreeMap, VecDeque};
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::{Skel as _, SkelBuilder as _};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use whylate_model::irqsoff::LateReschedule;
use whylate_model::{ActorName, Histogram, Labels, LateEvent, Series, Snapshot};

use self::skel::types::{kept, mark, mark_lost, stack_taken};
use super::wanted::wanted_cpus;
use super::{INFO, IrqsoffOptions, NEED_RESCHED};
use crate::kernel::attach::{self, Meter, PlainData};
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;
use crate::kernel::priority::become_fifo;
use crate::kernel::records::Records;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::{clock, cpus};
use crate::source::floors::Floors;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/irqsoff/need_resched.skel.rs"));
}

/// Reasons for lost events and their names in the output. `need_resched.bpf.c` describes them.
const LOST: [(mark_lost, &str); 2] =
    [(mark_lost::MARK_UNKNOWN_BIT, "unmatched"), (mark_lost::MARK_RECORDS, "late_events")];
/// Number of times that a real-time thread preempts this one to learn the flag's bit, and its sleep before each.
const PREEMPTIONS: (u32, Duration) = (5, Duration::from_millis(1));
/// Time limit for learning the flag.
const LEARNING_TIMEOUT: Duration = Duration::from_millis(50);

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for kept {}

pub(super) struct AttachedMarks {
    /// Dropped first, so that no program runs while the rest is dropped.
    _links: Vec<Link>,
    records: Records,
    marks: MappedArray,
    skeleton: skel::NeedReschedSkel<'static>,
    options: IrqsoffOptions,
    cpus: Vec<u32>,
    floors: Option<Floors>,
    /// Minimum length of late events by CPU, in nanoseconds; CPUs without a late event yet have no entry.
    emit_from_ns: BTreeMap<u32, u64>,
    lengths: BTreeMap<Labels, Histogram>,
    /// Late events that are not emitted yet.
    late: VecDeque<LateEvent>,
    symbols: KernelSymbols,
    span: Span,
    meter: Meter,
    cut_short: u64,
}

impl AttachedMarks {
    pub(super) fn new(options: &IrqsoffOptions, session: &Session) -> Result<Self, AttachError> {
        let wanted = wanted_cpus(&options.cpus)?;
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        if marks_recurse(&release) {
            return Err(AttachError::Unsupported(format!(
                "a program at sched_set_need_resched_tp may overflow a stack of this kernel ({release}; 6.17 to 6.19 are safe): boot one with \
                 CONFIG_PREEMPT_TRACER=y"
            )));
        }
        let mut open = skel::NeedReschedSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.own_namespace = pid_namespace::as_setting();
        settings.from_ns = options.from_ns;
        let entries = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        open.maps.mark_by_cpu.set_max_entries(entries)?;
        let mut skeleton = attach::load(open)?;
        let marks = MappedArray::new(skeleton.maps.mark_by_cpu.as_fd(), entries as usize, size_of::<mark>())
            .context("cannot map the marks")?;
        let records = Records::new(&skeleton.maps.kept_cpus)?;
        let links = skeleton.object().progs_mut().map(|program| program.attach()).collect::<Result<Vec<_>, _>>()?;
        learn_flag(&mut skeleton)?;
        for &cpu in &wanted {
            marks.u64_at(cpu as usize, offset_of!(mark, is_watched)).store(1, Ordering::Release);
        }
        Ok(AttachedMarks {
            _links: links,
            records,
            marks,
            skeleton,
            options: options.clone(),
            cpus: wanted,
            floors: options.worst.map(Floors::new),
            emit_from_ns: BTreeMap::new(),
            lengths: BTreeMap::new(),
            late: VecDeque::new(),
            symbols: session.symbols(),
            span: Span::begin(INFO.card, session),
            meter: Meter::default(),
            cut_short: 0,
        })
    }

    fn read_records(&mut self) {
        loop {
            let Some(bytes) = self.records.next() else { return };
            let Some(record) = attach::read_plain::<kept>(&bytes) else {
                self.cut_short += 1;
                continue;
            };
            let event = event_of(&record, &mut self.symbols);
            let mut culprit = event.labels.clone();
            culprit.remove("task");
            self.lengths.entry(culprit).or_default().merge(&[event.latency_ns].into_iter().collect());
            let default_ns = if self.floors.is_some() { 0 } else { u64::MAX };
            let from_ns = self.emit_from_ns.get(&event.cpu).copied().unwrap_or(default_ns);
            if event.latency_ns >= from_ns.min(self.options.late_from_ns()) {
                if let Some(floor_ns) = self.floors.as_mut().and_then(|floors| floors.add(event.cpu, event.latency_ns))
                {
                    self.emit_from_ns.insert(event.cpu, floor_ns);
                }
                self.late.push_back(event);
            }
        }
    }

    fn take_lost(&mut self) -> BTreeMap<String, u64> {
        let of = |reason: mark_lost| {
            let offset = offset_of!(mark, lost) + 8 * reason.0 as usize;
            let cpus = self.cpus.iter();
            cpus.map(|&cpu| self.marks.u64_at(cpu as usize, offset).swap(0, Ordering::Relaxed)).sum::<u64>()
        };
        let mut lost: BTreeMap<String, u64> =
            LOST.into_iter().map(|(reason, name)| (name.to_owned(), of(reason))).collect();
        *lost.entry("late_events".to_owned()).or_default() += std::mem::take(&mut self.cut_short);
        lost
    }
}

/// Tests for kernels that may recurse: from 7.0 on, leaving RCU after a BPF program may mark the running thread, which
/// calls the program again before the mark is set. BTF does not show whether a kernel has the fix.
fn marks_recurse(release: &str) -> bool {
    release.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_none_or(|major| major >= 7)
}

/// Learns which flag means "reschedule at once"; another one means that the switch may wait. Wakeups of a real-time
/// thread use the former. Without the privilege for one, the first CPU that leaves idle shows the same.
fn learn_flag(skeleton: &mut skel::NeedReschedSkel<'_>) -> anyhow::Result<()> {
    let set = |skeleton: &mut skel::NeedReschedSkel<'_>, learning| {
        if let Some(data) = skeleton.maps.bss_data.as_deref_mut() {
            data.learning = learning;
        }
    };
    let before = sched_getaffinity(None)?;
    let mut here = CpuSet::new();
    here.set(sched_getcpu());
    sched_setaffinity(None, &here)?;
    let (takes, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let taker = scope.spawn(|| {
            if become_fifo(1).is_ok() {
                takes.store(true, Ordering::Relaxed);
                let (times, sleep) = PREEMPTIONS;
                (0..times).for_each(|_| thread::sleep(sleep));
            }
            over.store(true, Ordering::Relaxed);
        });
        let began = Instant::now();
        let mut is_learning = false;
        while !over.load(Ordering::Relaxed) && began.elapsed() < LEARNING_TIMEOUT {
            // Other threads may be marked by a flag that means something else.
            if !is_learning && takes.load(Ordering::Relaxed) {
                is_learning = true;
                set(skeleton, 1);
            }
            std::hint::spin_loop();
        }
        // The thread does not panic.
        let _ = taker.join();
        set(skeleton, 0);
    });
    Ok(sched_setaffinity(None, &before)?)
}

fn event_of(record: &kept, symbols: &mut KernelSymbols) -> LateEvent {
    let inside = stack_of(&record.inside, symbols);
    let at_end = stack_of(&record.at_end, symbols);
    let kept = LateReschedule {
        thread: ActorName::thread(attach::text(&record.comm), record.tid),
        cpu: record.cpu,
        length_ns: record.end_ns.saturating_sub(record.since_ns),
        inside,
        at_end,
    };
    LateEvent { at_ns: record.end_ns, ..kept.event(clock::unix_ns_of(record.end_ns)) }
}

fn stack_of(taken: &stack_taken, symbols: &mut KernelSymbols) -> Vec<String> {
    let bytes = usize::try_from(taken.bytes).unwrap_or(0);
    let frames = taken.frames.iter().take(bytes / size_of::<u64>());
    frames.map(|&address| symbols.name(address).to_owned()).collect()
}

impl Attached for AttachedMarks {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.records.poll(Duration::ZERO)?;
        self.read_records();
        let mut snapshot = self.span.end(NEED_RESCHED);
        let measured_ns = (snapshot.duration_ns as f64 * self.cpus.len() as f64).max(1.0);
        let lengths = std::mem::take(&mut self.lengths);
        snapshot.series = lengths
            .into_iter()
            .map(|(labels, length)| Series {
                labels,
                values: [("share".to_owned(), length.sum_ns() as f64 / measured_ns)].into(),
                histograms: [("length".to_owned(), length)].into(),
                ..Series::default()
            })
            .collect();
        snapshot.lost = self.take_lost();
        self.meter.report(attach::statistics(self.skeleton.object().progs()), &mut snapshot);
        // From now on, lengths are compared only with later ones.
        if let Some(floors) = &mut self.floors {
            floors.forget();
        }
        self.emit_from_ns.clear();
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        if self.late.is_empty() {
            self.records.poll(wait)?;
            self.read_records();
        }
        self.late.drain(..).for_each(each);
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        Some(
            "disabled preemption counts only while it keeps a thread waiting; what a hypervisor or a handler took in that time is part of it",
        )
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::*;
    use crate::cpu_account::fuzzing::with_names;

    /// Decodes the record of a thread that ignored a reschedule request.
    pub fn kept_cpus(bytes: &[u8]) {
        let Some(record) = attach::read_plain::<kept>(bytes) else { return };
        with_names(|_, symbols| Some(event_of(&record, symbols)));
    }
}

#[cfg(test)]
mod tests {
    use super::marks_recurse;

    #[test]
    fn rejects_kernels_not_known_to_be_safe() {
        assert!(!marks_recurse("6.18.44-fc") && !marks_recurse("6.17.0"));
        assert!(marks_recurse("7.0.0-rc1") && marks_recurse("10.1") && marks_recurse(""));
    }
}
