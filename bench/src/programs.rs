// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of the BPF programs of a process, and empty BPF programs in this one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::mem::MaybeUninit;

use libbpf_rs::Link;
use libbpf_rs::btf::Btf;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

/// The kernel's counters of one program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub name: String,
    pub runs: u64,
    pub run_ns: u64,
    /// Runs that the kernel skipped, because the program was running on the same CPU already.
    pub missed: u64,
}

impl Counts {
    pub fn mean_ns(&self) -> f64 {
        self.run_ns as f64 / self.runs.max(1) as f64
    }
}

pub fn total(programs: &[Counts], counter: fn(&Counts) -> u64) -> f64 {
    programs.iter().map(counter).sum::<u64>() as f64
}

/// Counters by program ID, which ascends in the order of loading.
pub type Programs = BTreeMap<u32, Counts>;

/// Returns the programs that a process holds, itself or through a link: other tools' programs are never counted.
pub fn of_process(pid: u32) -> io::Result<Programs> {
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The descriptor may have been closed since.
        ids.extend(fs::read_to_string(entry?.path()).ok().as_deref().and_then(program_id));
    }
    let with_functions = ProgInfoQueryOptions::default().include_func_info(true);
    let ours = ProgInfoIter::with_query_opts(with_functions).filter(|program| ids.contains(&program.id));
    let counts = |program: ProgramInfo| {
        let name = full_name(&program).unwrap_or_else(|| program.name.to_string_lossy().into_owned());
        let (runs, run_ns, missed) = (program.run_cnt, program.run_time_ns, program.recursion_misses);
        (program.id, Counts { name, runs, run_ns, missed })
    };
    Ok(ours.map(counts).collect())
}

/// Returns the name of its main function, if it has BTF; the program's own name is cut after 15 characters.
fn full_name(program: &ProgramInfo) -> Option<String> {
    let main = program.func_info.first()?;
    let types = Btf::from_prog_id(program.id).ok()?;
    let function: libbpf_rs::btf::BtfType<'_> = types.type_by_id(main.type_id.into())?;
    Some(function.name()?.to_string_lossy().into_owned())
}

/// Returns what each of the programs has done since `before`.
pub fn difference(before: &Programs, after: &Programs) -> Vec<Counts> {
    let none = Counts::default();
    let since = |(id, after): (&u32, &Counts)| {
        let before = before.get(id).unwrap_or(&none);
        let (runs, run_ns) = (after.runs - before.runs, after.run_ns - before.run_ns);
        Counts { name: after.name.clone(), runs, run_ns, missed: after.missed - before.missed }
    };
    after.iter().map(since).collect()
}

/// Parses the ID in `/proc/PID/fdinfo/FD` of a program or a link.
fn program_id(fdinfo: &str) -> Option<u32> {
    fdinfo.lines().find_map(|line| line.strip_prefix("prog_id:")).and_then(|id| id.trim().parse().ok())
}

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/floor.skel.rs"));
}

fn attach_with<T>(attach: impl FnOnce(&skel::FloorProgs<'_>) -> libbpf_rs::Result<T>) -> libbpf_rs::Result<T> {
    let mut object = MaybeUninit::uninit();
    let skeleton = skel::FloorSkelBuilder::default().open(&mut object)?.load()?;
    attach(&skeleton.progs)
}

/// Attaches an empty program to each of the two events of a work item, until the links are dropped.
pub fn attach_to_work_items() -> libbpf_rs::Result<Vec<Link>> {
    attach_with(|programs| Ok(vec![programs.on_queue_work.attach()?, programs.on_execute_start.attach()?]))
}

/// Attaches an empty program to context switches, until the link is dropped.
pub fn attach_to_switches() -> libbpf_rs::Result<Vec<Link>> {
    attach_with(|programs| Ok(vec![programs.on_switch.attach()?]))
}

/// Attaches an iterator over all threads that takes each kernel stack and drops it.
pub fn attach_to_threads() -> libbpf_rs::Result<Link> {
    attach_with(|programs| programs.on_each_thread.attach())
}

#[cfg(test)]
#[path = "../unit/programs.rs"]
mod tests;
