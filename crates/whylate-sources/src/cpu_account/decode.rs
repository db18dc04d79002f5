// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the kernel's record of a window into the model's.

use std::mem::offset_of;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;

use whylate_model::occupancy::{BusyPools, Interval, Merged, MergedPart, Occupancy, Occupant, Taken};
use whylate_model::path::events::SOFTIRQS;

use super::skel::types::{busy_pools, interval, late_stack, lateness, merged_part, occupant_kind, window};
use super::vectors;
use crate::kernel::attach::{self, PlainData};
use crate::kernel::cgroups::Cgroups;
use crate::kernel::mapped::MappedArray;
use crate::kernel::symbols::KernelSymbols;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for window {}
// SAFETY: integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for lateness {}

/// Decodes windows and caches what their labels need.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// Stacks of late interrupts; `None` if stacks are not recorded.
    late_stacks: Option<MappedArray>,
    /// Stacks overwritten before they were read.
    stacks_overwritten: u64,
    /// Cgroup paths, shared with the sources.
    pub(crate) cgroups: Cgroups,
}

impl Windows {
    pub(super) fn with(late_stacks: MappedArray) -> Self {
        Windows { late_stacks: Some(late_stacks), ..Windows::default() }
    }

    /// Decodes a window copied by a source's BPF program. `bytes` may omit unused intervals at the end.
    pub(crate) fn read(&mut self, bytes: &[u8], symbols: &mut KernelSymbols) -> Option<Occupancy> {
        let mut whole = bytes.to_vec();
        whole.resize(size_of::<window>().max(bytes.len()), 0);
        let record: window = attach::read_plain(&whole)?;
        let mut end_ns = record.end_ns;
        let mut intervals = Vec::new();
        for from in record.intervals.iter().take(record.count as usize) {
            // An interrupt started after the window's end and before the copy.
            if from.start_ns >= end_ns {
                continue;
            }
            intervals.extend(self.interval(from, end_ns, symbols));
            end_ns = from.start_ns;
        }
        intervals.reverse();
        if record.is_steal_exact == 0 {
            spread_steal(&mut intervals);
        }
        let parts = record.merged.iter().filter(has_known_occupant);
        let merged = (record.merged_end_ns != 0).then(|| Merged {
            start_ns: record.merged_start_ns,
            end_ns: record.merged_end_ns,
            parts: parts.map(|part| merged_from(part, symbols, &mut self.cgroups)).collect(),
        });
        Some(Occupancy { cpu: record.cpu, since_ns: record.since_ns, merged, intervals })
    }

    /// Decodes one interval. `None` if its occupant is unknown.
    pub(super) fn interval(&mut self, from: &interval, end_ns: u64, symbols: &mut KernelSymbols) -> Option<Interval> {
        if from.kind == occupant_kind::OCCUPANT_NOBODY.0 as u8 {
            return None;
        }
        let mut to = Interval {
            start_ns: from.start_ns,
            end_ns,
            occupant: occupant(from.kind.into(), from.id, from.handler, &from.name, symbols, &mut self.cgroups),
            taken: Taken { steal_ns: from.steal_ns.into(), nmi_ns: from.nmi_ns.into(), ..Taken::default() },
            busy: BusyPools {
                normal: u32::from(from.busy) & busy_pools::BUSY_NORMAL.0 != 0,
                highpri: u32::from(from.busy) & busy_pools::BUSY_HIGHPRI.0 != 0,
            },
            ..Interval::default()
        };
        if matches!(to.occupant, Occupant::Irq { .. })
            && let Some(lateness) = attach::read_plain::<lateness>(&from.handler.to_ne_bytes())
            && lateness.late_ns > 0
        {
            to.late_ns = lateness.late_ns.into();
            to.stack = self.stack(lateness.stack, symbols);
        }
        Some(to)
    }

    /// Stacks overwritten before they were read.
    pub(super) fn stacks_overwritten(&self) -> u64 {
        self.stacks_overwritten
    }

    fn stack(&mut self, number: i32, symbols: &mut KernelSymbols) -> Vec<String> {
        let (Ok(number), Some(stacks)) = (u64::try_from(number), &self.late_stacks) else { return Vec::new() };
        let Some(frames) = frames_of(stacks, number) else {
            self.stacks_overwritten += 1;
            return Vec::new();
        };
        symbols.stack(&frames)
    }
}

/// Returns the frames of stack `number` as bytes, or `None` if its slot was reused.
fn frames_of(stacks: &MappedArray, number: u64) -> Option<Vec<u8>> {
    let slot = number as usize % stacks.entries();
    let is_there = || stacks.u64_at(slot, offset_of!(late_stack, number)).load(Acquire) == number + 1;
    if !is_there() {
        return None;
    }
    let bytes = stacks.u64_at(slot, offset_of!(late_stack, bytes)).load(Relaxed) as i64;
    let frames = (usize::try_from(bytes).unwrap_or(0) / size_of::<u64>()).min(late_stack::default().frames.len());
    let frame = |frame: usize| {
        stacks.u64_at(slot, offset_of!(late_stack, frames) + frame * size_of::<u64>()).load(Relaxed).to_ne_bytes()
    };
    let frames = (0..frames).flat_map(frame).collect();
    fence(Acquire);
    is_there().then_some(frames)
}

/// Distributes steal time over the intervals of a run slice, for kernels where the steal clock is read only at
/// switch-out and the slice's last interval holds its total. vCPU preemptions are long, so the longest intervals take
/// it first, interrupts included. If the slice may have started before the first interval, its steal time may predate
/// the window.
pub(super) fn spread_steal(intervals: &mut [Interval]) {
    let thread_of = |interval: &Interval| match interval.occupant {
        Occupant::Thread { tid, .. } | Occupant::Work { tid, .. } => Some(tid),
        Occupant::Idle => Some(0),
        Occupant::Irq { .. } | Occupant::Softirq { .. } => None,
    };
    let mut end = intervals.len();
    while let Some(last) = end.checked_sub(1) {
        let mut left_ns = std::mem::take(&mut intervals[last].taken.steal_ns);
        if left_ns == 0 {
            end = last;
            continue;
        }
        let thread = thread_of(&intervals[last]);
        // A run slice ends with a switch, which accounts all earlier steal time.
        let same_slice = |interval: &&Interval| {
            thread_of(interval).is_none_or(|tid| Some(tid) == thread) && interval.taken.steal_ns == 0
        };
        let first = last - intervals[..last].iter().rev().take_while(same_slice).count();
        let mut longest_first: Vec<usize> = (first..=last).collect();
        longest_first.sort_by_key(|&index| std::cmp::Reverse(intervals[index].end_ns - intervals[index].start_ns));
        for index in longest_first {
            let interval = &mut intervals[index];
            let takes_ns = left_ns.min(interval.end_ns - interval.start_ns);
            let taken = &mut interval.taken;
            *(if first == 0 { &mut taken.perhaps_stolen_ns } else { &mut taken.steal_ns }) = takes_ns;
            left_ns -= takes_ns;
        }
        end = first;
    }
}

/// Tests whether the part has a known occupant. Other parts are dropped, which leaves their time unaccounted.
fn has_known_occupant(part: &&merged_part) -> bool {
    part.ns != 0 && part.kind != occupant_kind::OCCUPANT_NOBODY.0
}

fn merged_from(part: &merged_part, symbols: &mut KernelSymbols, cgroups: &mut Cgroups) -> MergedPart {
    MergedPart {
        occupant: occupant(part.kind, part.id, part.handler, &part.name, symbols, cgroups),
        ns: part.ns,
        taken: Taken { steal_ns: part.steal_ns, nmi_ns: part.nmi_ns, ..Taken::default() },
    }
}

fn occupant(
    kind: u32,
    id: u32,
    handler: u64,
    name: &[i8; 16],
    symbols: &mut KernelSymbols,
    cgroups: &mut Cgroups,
) -> Occupant {
    let text = || attach::text(name);
    match occupant_kind(kind) {
        occupant_kind::OCCUPANT_WORK => {
            Occupant::Work { handler: symbols.name(handler).to_owned(), tid: id, name: text() }
        }
        // The `handler` of a thread is its cgroup.
        occupant_kind::OCCUPANT_THREAD => {
            Occupant::Thread { tid: id, name: text(), cgroup: cgroups.path_or_placeholder(handler) }
        }
        occupant_kind::OCCUPANT_SOFTIRQ => {
            let known = SOFTIRQS.get(id as usize).map(|&name| name.to_owned());
            Occupant::Softirq { name: known.unwrap_or_else(|| id.to_string()) }
        }
        occupant_kind::OCCUPANT_DEVICE_IRQ => {
            let name = text();
            Occupant::Irq { name: if name.is_empty() { format!("irq {id}") } else { name } }
        }
        occupant_kind::OCCUPANT_VECTOR => Occupant::Irq { name: vectors::name_of(id).map_or_else(text, str::to_owned) },
        _ => Occupant::Idle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributes_steal_over_run_slice_that_reports_it() {
        let thread = |tid| Occupant::Thread { tid, name: String::new(), cgroup: None };
        let irq = Occupant::Irq { name: "local_timer".to_owned() };
        let spans =
            [(thread(7), 0, 500, 0), (thread(8), 500, 3800, 0), (irq, 3800, 3850, 0), (thread(8), 3850, 3853, 3310)];
        let mut intervals = spans.map(|(occupant, start_ns, end_ns, steal_ns)| Interval {
            start_ns,
            end_ns,
            occupant,
            taken: Taken { steal_ns, ..Taken::default() },
            ..Interval::default()
        });
        spread_steal(&mut intervals);
        assert_eq!(intervals.map(|interval| interval.taken.steal_ns), [0, 3300, 10, 0]);
    }

    #[test]
    fn distributes_steal_of_several_preemptions_within_run_slice() {
        // A thread interrupted by the heartbeat timer, with two vCPU preemptions, the longer one first.
        let lengths = [1_000, 1_000, 10_500, 1_000, 1_000, 8_500, 100];
        let mut intervals = Vec::new();
        for (tid, steal_ns) in [(7, 900), (8, 18_000)] {
            for (index, ns) in lengths.into_iter().enumerate() {
                let start_ns = intervals.last().map_or(0, |last: &Interval| last.end_ns);
                let is_last = index + 1 == lengths.len();
                intervals.push(Interval {
                    start_ns,
                    end_ns: start_ns + ns,
                    occupant: Occupant::Thread { tid, name: String::new(), cgroup: None },
                    taken: Taken { steal_ns: if is_last { steal_ns } else { 0 }, ..Taken::default() },
                    ..Interval::default()
                });
            }
        }
        spread_steal(&mut intervals);
        let steal: Vec<u64> = intervals.iter().map(|interval| interval.taken.steal_ns).collect();
        assert_eq!(steal[7..], [0, 0, 10_500, 0, 0, 7_500, 0]);
        // The first run slice may have started before the window.
        let perhaps: Vec<u64> = intervals.iter().map(|interval| interval.taken.perhaps_stolen_ns).collect();
        assert_eq!((&steal[..7], &perhaps[..7]), (&[0; 7][..], &[0, 0, 900, 0, 0, 0, 0][..]));
        assert_eq!(perhaps[7..], [0; 7]);
    }
}
