// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of whylate itself: run time of its BPF programs by event, CPU time of the process, and memory.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{FromRawFd as _, OwnedFd};

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::btf::{Btf, BtfType};
use libbpf_rs::libbpf_sys::{BPF_STATS_RUN_TIME, bpf_enable_stats};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use rustix::time::{ClockId, clock_gettime};

use crate::kernel::attach;
use crate::kernel::clock;
use crate::kernel::error::AttachError;

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/own_cost/empty.skel.rs"));
}

/// Prefix of the names of programs; the name of the event follows.
const PREFIX: &str = "on_";

/// Line in the fdinfo of an iterator's link. Iterators run in the thread that reads them.
const ITERATOR_LINK: &str = "link_type:\titer";

/// Cost of this process over a span of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnCost {
    /// Length of the span.
    pub elapsed_ns: u64,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// CPU time of all threads of the process.
    pub cpu_ns: u64,
    /// Programs that ran, by event.
    pub programs: Vec<EventCost>,
    /// Number of programs that did not run.
    pub idle_programs: usize,
    /// Mean run time of an empty program: the kernel's time for counting a run. 0 if it did not run.
    pub empty_ns: u64,
    /// Memory of BPF maps.
    pub map_bytes: u64,
    /// Number of open descriptors.
    pub descriptors: usize,
}

/// Runs of the programs for one event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventCost {
    /// Name of the event, e.g. `sched_switch`.
    pub event: String,
    /// Number of runs.
    pub runs: u64,
    /// Run time as counted by the kernel.
    pub run_ns: u64,
    /// Whether threads of this process run the programs. Then their CPU time includes the run time.
    pub is_own: bool,
}

impl EventCost {
    /// Returns the run time without the time for counting, which is `empty_ns` per run.
    pub fn net_ns(&self, empty_ns: u64) -> u64 {
        self.run_ns.saturating_sub(self.runs.saturating_mul(empty_ns))
    }
}

impl OwnCost {
    /// Returns the run time of the programs that other threads run, without the time for counting.
    pub fn programs_ns(&self) -> u64 {
        self.programs.iter().filter(|of| !of.is_own).map(|of| of.net_ns(self.empty_ns)).sum()
    }
}

/// Counts the cost since its creation.
pub struct CostMeter {
    /// While this is open, the kernel counts run times, without a change of its setting. The end of the process closes it.
    _counting: OwnedFd,
    _empty: Link,
    empty: u32,
    before: BTreeMap<u32, EventCost>,
    began_ns: u64,
    cpu_ns: u64,
}

impl CostMeter {
    /// Starts to count the programs that are loaded now.
    ///
    /// # Errors
    /// Fails if the kernel does not count run times, as before 5.8, or without the privilege.
    pub fn begin() -> Result<Self, AttachError> {
        let before_empty = of_this_process()?;
        let skeleton = skel::EmptySkelBuilder::default().open(attach::open_object())?.load()?;
        let link = skeleton.progs.on_sched_switch.attach()?;
        // The link holds the program.
        drop(skeleton);
        // SAFETY: the call takes a number and returns a descriptor, or a negative error.
        let counting = unsafe { bpf_enable_stats(BPF_STATS_RUN_TIME) };
        if counting < 0 {
            let error = std::io::Error::from_raw_os_error(-counting);
            return Err(AttachError::Unsupported(format!("the kernel does not count run times of programs ({error})")));
        }
        // SAFETY: the descriptor has no other owner.
        let counting = unsafe { OwnedFd::from_raw_fd(counting) };
        let before = of_this_process()?;
        let empty = before.keys().find(|id| !before_empty.contains_key(id)).copied();
        let empty = empty.context("the kernel does not list an own program")?;
        Ok(CostMeter {
            _counting: counting,
            _empty: link,
            empty,
            before,
            began_ns: clock::monotonic_ns(),
            cpu_ns: process_cpu_ns(),
        })
    }

    /// Returns the cost since the meter was created.
    ///
    /// # Errors
    /// Fails if /proc cannot be read.
    pub fn end(self) -> anyhow::Result<OwnCost> {
        let (cpu_ns, ended_ns) = (process_cpu_ns(), clock::monotonic_ns());
        let mut after = of_this_process()?;
        let since = |id: &u32, of: &EventCost| {
            let before = self.before.get(id).cloned().unwrap_or_default();
            (of.runs.saturating_sub(before.runs), of.run_ns.saturating_sub(before.run_ns))
        };
        let empty_ns = after.remove(&self.empty).map_or(0, |of| {
            let (runs, run_ns) = since(&self.empty, &of);
            run_ns.checked_div(runs).unwrap_or(0)
        });
        let mut by_event: BTreeMap<&str, EventCost> = BTreeMap::new();
        let mut idle_programs = 0;
        for (id, of) in &after {
            let (runs, run_ns) = since(id, of);
            if runs == 0 {
                idle_programs += 1;
                continue;
            }
            let sum = by_event.entry(&of.event).or_default();
            sum.is_own |= of.is_own;
            sum.runs += runs;
            sum.run_ns += run_ns;
        }
        let named = |(event, of): (&str, EventCost)| EventCost { event: event.to_owned(), ..of };
        let mut programs: Vec<EventCost> = by_event.into_iter().map(named).collect();
        programs.sort_by_key(|of| std::cmp::Reverse(of.net_ns(empty_ns)));
        let (map_bytes, descriptors) = memory()?;
        Ok(OwnCost {
            elapsed_ns: ended_ns.saturating_sub(self.began_ns),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_ns: cpu_ns.saturating_sub(self.cpu_ns),
            programs,
            idle_programs,
            empty_ns,
            map_bytes,
            descriptors,
        })
    }
}

/// Returns the CPU time of all threads of this process.
fn process_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// Returns the texts of /proc/self/fdinfo.
fn descriptors() -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir("/proc/self/fdinfo").context("cannot list the descriptors of this process")?;
    // The descriptor of the directory itself is closed by then.
    Ok(entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok()).collect())
}

/// Returns the value of a line of an fdinfo text.
fn value(fdinfo: &str, name: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

/// Returns the counters of the programs that this process holds, itself or through a link, by program ID.
fn of_this_process() -> anyhow::Result<BTreeMap<u32, EventCost>> {
    let descriptors = descriptors()?;
    let ids = |of: &dyn Fn(&str) -> bool| -> BTreeSet<u32> {
        let of = descriptors.iter().filter(|fdinfo| of(fdinfo));
        of.filter_map(|fdinfo| value(fdinfo, "prog_id")?.try_into().ok()).collect()
    };
    let (ids, iterators) = (ids(&|_| true), ids(&|fdinfo| fdinfo.lines().any(|line| line == ITERATOR_LINK)));
    let with_functions = ProgInfoQueryOptions::default().include_func_info(true);
    let own = ProgInfoIter::with_query_opts(with_functions).filter(|program| ids.contains(&program.id));
    Ok(own.map(|program| (program.id, counters(&program, iterators.contains(&program.id)))).collect())
}

fn counters(program: &ProgramInfo, is_own: bool) -> EventCost {
    let name = full_name(program).unwrap_or_else(|| program.name.to_string_lossy().into_owned());
    let event = name.strip_prefix(PREFIX).unwrap_or(&name).to_owned();
    EventCost { event, runs: program.run_cnt, run_ns: program.run_time_ns, is_own }
}

/// Returns the name of the program's main function; the program's own name is cut after 15 characters.
fn full_name(program: &ProgramInfo) -> Option<String> {
    let main = program.func_info.first()?;
    let types = Btf::from_prog_id(program.id).ok()?;
    let function: BtfType<'_> = types.type_by_id(main.type_id.into())?;
    Some(function.name()?.to_string_lossy().into_owned())
}

/// Returns the bytes of the maps of this process, and the number of its descriptors.
fn memory() -> anyhow::Result<(u64, usize)> {
    let descriptors = descriptors()?;
    let maps: BTreeMap<u64, u64> =
        descriptors.iter().filter_map(|fdinfo| Some((value(fdinfo, "map_id")?, value(fdinfo, "memlock")?))).collect();
    Ok((maps.values().sum(), descriptors.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_for_counting_is_left_out_of_the_cost() {
        let of = |runs, run_ns| EventCost { runs, run_ns, ..EventCost::default() };
        assert_eq!(of(10, 1_000).net_ns(40), 600);
        assert_eq!(of(10, 300).net_ns(40), 0);
    }

    #[test]
    fn reads_values_of_descriptors() {
        let fdinfo = "pos:\t0\nflags:\t02000002\nmap_type:\t2\nmemlock:\t8192\nmap_id:\t17\nfrozen:\t0\n";
        assert_eq!((value(fdinfo, "map_id"), value(fdinfo, "memlock")), (Some(17), Some(8_192)));
        assert_eq!(value(fdinfo, "prog_id"), None);
    }
}
