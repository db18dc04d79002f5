// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data of one snapshot interval.

use std::collections::HashMap;
use std::mem::{replace, take};
use std::sync::Arc;

use whylate_model::Series;

use super::{LOST, Met, Sampler};
use crate::kernel::attach::{self, ProgramStatistics, read_plain};
use crate::kernel::clock;
use crate::kernel::thread_iterator::iterate;
use crate::offcpu::places::PlaceDelta;
use crate::offcpu::process::Process;
use crate::offcpu::skel::types::{holder_now, thread_now};
use crate::offcpu::{disks, holders};

/// Data of one snapshot interval, not yet symbolized.
pub(in crate::offcpu) struct SampledInterval {
    pub(in crate::offcpu) began_ns: u64,
    pub(in crate::offcpu) ended_ns: u64,
    pub(in crate::offcpu) places: Vec<PlaceDelta>,
    /// Generation of the tables, which gives indexes of places their meaning.
    pub(in crate::offcpu) generation: u32,
    /// Frames by stack ID, innermost first.
    pub(in crate::offcpu) stacks: HashMap<u32, Arc<[u64]>>,
    pub(in crate::offcpu) processes: HashMap<u32, (u32, String)>,
    pub(in crate::offcpu) memory: HashMap<u32, Arc<Process>>,
    pub(in crate::offcpu) threads: Vec<(usize, thread_now)>,
    /// Waiters and lock holders, if they are wanted.
    pub(in crate::offcpu) holders: Vec<holder_now>,
    /// A series for each disk with requests in flight, if sysfs shows them and `holders` is set.
    pub(in crate::offcpu) disks: Option<Vec<Series>>,
    pub(in crate::offcpu) lost: Vec<(&'static str, u64)>,
    pub(in crate::offcpu) statistics: ProgramStatistics,
    pub(in crate::offcpu) walks: u64,
    pub(in crate::offcpu) met: Met,
}

impl Sampler {
    /// Does a last walk, and returns the data collected since the previous call.
    pub(in crate::offcpu) fn collect(&mut self) -> anyhow::Result<SampledInterval> {
        let ended_ns = clock::monotonic_ns();
        self.walk()?;
        let mut threads = Vec::new();
        iterate(&self.report, |bytes| {
            threads.extend(bytes.chunks_exact(size_of::<thread_now>()).filter_map(read_plain::<thread_now>));
        })?;
        let holders = match &self.holders {
            Some(link) => holders::walk(&mut self.skeleton, link)?,
            None => Vec::new(),
        };
        let disks = if self.holders.is_some() { disks::busy() } else { None };
        let generation = self.variables()?.generation;
        let needs_room = self.needs_room()?;
        if needs_room && !self.switches.is_empty() {
            // Time that switches add from here on would be in no snapshot, and a place inserted while the tables are
            // emptied would later count as another one.
            self.variables()?.is_tracing = false;
            attach::wait_for_programs();
        }
        let sums = self.sums();
        let maps = &self.skeleton.maps;
        let places = self.tables.changed(maps, &sums, &self.reported, self.records_wakers)?;
        let index_of_place: HashMap<u32, usize> =
            places.iter().enumerate().map(|(index, place)| (place.number, index)).collect();
        let keys = || places.iter().flat_map(PlaceDelta::keys);
        let stacks = keys().flat_map(|key| [key.kernel_stack, key.user_stack]).collect();
        let stacks = self.tables.stacks(maps, &stacks)?;
        let processes = self.tables.processes(maps, &keys().map(|key| key.process).collect())?;
        let lost = self.lost_counts();
        let reported_lost = replace(&mut self.reported_lost, lost);
        self.processes.read_compiled();
        let interval = SampledInterval {
            began_ns: replace(&mut self.since_ns, ended_ns),
            ended_ns,
            places,
            generation,
            stacks,
            processes,
            memory: self.processes.share(),
            threads: threads
                .into_iter()
                .filter_map(|thread| Some((*index_of_place.get(&thread.place)?, thread)))
                .collect(),
            holders,
            disks,
            lost: LOST
                .iter()
                .enumerate()
                .map(|(index, &(_, name))| (name, lost[index] - reported_lost[index]))
                .chain(self.processes.take_lost())
                .collect(),
            statistics: self.statistics(),
            walks: take(&mut self.walks),
            met: self.met,
        };
        self.reported = sums;
        if needs_room {
            // An error that persists also fails the next walk, which reports it; this interval is complete.
            let _ = self.make_room();
        }
        Ok(interval)
    }

    fn statistics(&self) -> ProgramStatistics {
        let programs = &self.skeleton.progs;
        let walks = [&programs.on_each_thread]
            .into_iter()
            .chain(self.holders.as_ref().map(|_| &programs.on_each_thread_tell_holder));
        if self.switches.is_empty() {
            return attach::statistics(walks);
        }
        let at_switches = [&programs.on_sched_switch, &programs.on_task_newtask];
        let at_wakeups = self.records_wakers.then_some(&programs.on_sched_waking);
        attach::statistics(walks.chain(at_switches).chain(at_wakeups))
    }
}
