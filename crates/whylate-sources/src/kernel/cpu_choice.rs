// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPUs that are measured with threads or timers of this process: the allowed CPUs that are not isolated, or the
//! requested ones.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use anyhow::Context as _;
use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::kernel::cgroups;
use crate::kernel::cpus::{all_online, allowed_of, list, numbers, online, read};
use crate::kernel::error::AttachError;
use crate::kernel::priority::run_on;
use crate::kernel::proc;
use crate::kernel::realtime;

/// Why a CPU is excluded if none is requested.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The CPU is not in this process's affinity mask (taskset) or cpuset.
    NotAllowed,
    /// `isolcpus=`.
    Isolated,
    /// A cpuset partition of cgroup v2.
    Partition,
    /// `nohz_full=`.
    NohzFull,
    /// A real-time thread of another process runs on it.
    RealTime(String),
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reason::NotAllowed => f.write_str("not in whylate's affinity or cpuset"),
            Reason::Isolated => f.write_str("isolated (isolcpus)"),
            Reason::Partition => f.write_str("isolated (cpuset)"),
            Reason::NohzFull => f.write_str("nohz_full"),
            Reason::RealTime(thread) => write!(f, "real-time thread {thread} runs there"),
        }
    }
}

/// Rules by which CPUs are excluded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    /// CPUs that this process may use, including offline ones.
    allowed: BTreeSet<u32>,
    isolated: BTreeSet<u32>,
    /// Isolated by cpusets: until Linux 7.0 the kernel's list of isolated CPUs lacks them.
    partitions: BTreeSet<u32>,
    nohz_full: BTreeSet<u32>,
    /// CPUs on which real-time threads of other processes run, with one thread of each.
    realtime: BTreeMap<u32, String>,
}

impl Rules {
    /// Reads the rules of this machine for this process, without real-time threads.
    pub(crate) fn here() -> std::io::Result<Self> {
        let of = |which| read(which).unwrap_or_default().into_iter().collect();
        Ok(Rules {
            allowed: allowed()?,
            isolated: of("isolated"),
            partitions: partitions().into_iter().collect(),
            nohz_full: of("nohz_full"),
            realtime: BTreeMap::new(),
        })
    }

    /// Returns why a CPU is excluded if none is requested; `None` if it is measured.
    fn why_left_out(&self, cpu: u32) -> Option<Reason> {
        match cpu {
            _ if self.isolated.contains(&cpu) => Some(Reason::Isolated),
            _ if self.partitions.contains(&cpu) => Some(Reason::Partition),
            _ if self.nohz_full.contains(&cpu) => Some(Reason::NohzFull),
            _ if !self.allowed.contains(&cpu) => Some(Reason::NotAllowed),
            _ => self.realtime.get(&cpu).cloned().map(Reason::RealTime),
        }
    }

    /// Returns the CPUs of `online` that no rule excludes.
    pub(crate) fn usable(&self, online: &[u32]) -> Vec<u32> {
        online.iter().copied().filter(|&cpu| self.why_left_out(cpu).is_none()).collect()
    }

    fn choose(self, online: &[u32], asked: &[u32]) -> Choice {
        let usable = self.usable(online);
        if !asked.is_empty() {
            let others = usable.into_iter().filter(|cpu| !asked.contains(cpu)).collect();
            return Choice { measured: asked.to_vec(), left_out: Vec::new(), others, asked: true, rules: self };
        }
        let left_out = online.iter().filter_map(|&cpu| Some((cpu, self.why_left_out(cpu)?))).collect();
        Choice { measured: usable, left_out, others: Vec::new(), asked: false, rules: self }
    }
}

/// The CPUs that are measured with threads or timers of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Measured CPUs, all of them online; empty if each is excluded.
    pub measured: Vec<u32>,
    /// The other online CPUs, if none was requested.
    pub left_out: Vec<(u32, Reason)>,
    /// Usable CPUs besides the requested ones.
    pub others: Vec<u32>,
    asked: bool,
    rules: Rules,
}

impl Choice {
    /// Chooses for this process: the requested CPUs or, if there are none, the usable ones. Takes 100 ms if there are
    /// real-time threads of other processes; threads that start later change nothing.
    ///
    /// # Errors
    /// Fails if a requested CPU is offline or outside of the cpuset, or the kernel does not list its CPUs.
    pub fn here(asked: &[u32]) -> Result<Self, AttachError> {
        let online = online().context("cannot read which CPUs are online")?;
        let mut rules = Rules::here().context("cannot read which CPUs this process may use")?;
        if asked.is_empty() {
            let usable = rules.usable(&online);
            rules.realtime = realtime::busy_cpus(&usable).context("cannot read where real-time threads run")?;
            return Ok(rules.choose(&online, asked));
        }
        all_online(asked)?;
        let denied: Vec<u32> =
            asked.iter().copied().filter(|cpu| !rules.allowed.contains(cpu) && !may_run_on(*cpu)).collect();
        if !denied.is_empty() {
            return Err(AttachError::Unsupported(format!(
                "{} outside of the cpuset of this process: choose others (-c {}), or run whylate in a cgroup with {}",
                are(&denied, "is", "are"),
                list(&rules.allowed.iter().copied().filter(|cpu| online.contains(cpu)).collect::<Vec<_>>()),
                if denied.len() == 1 { "that CPU" } else { "those CPUs" },
            )));
        }
        Ok(rules.choose(&online, asked))
    }

    /// Returns the measured CPUs, at least one.
    ///
    /// # Errors
    /// Fails if each CPU is excluded.
    pub(crate) fn at_least_one(&self) -> Result<&[u32], AttachError> {
        match self.remark() {
            Some(remark) if self.measured.is_empty() => Err(AttachError::Unsupported(remark)),
            _ => Ok(&self.measured),
        }
    }

    /// Tests whether a CPU that comes online later is measured.
    pub(crate) fn takes(&self, cpu: u32) -> bool {
        if self.asked { self.measured.contains(&cpu) } else { self.rules.why_left_out(cpu).is_none() }
    }

    /// Returns the excluded CPUs by reason.
    fn by_reason(&self) -> BTreeMap<&Reason, Vec<u32>> {
        let mut by_reason: BTreeMap<&Reason, Vec<u32>> = BTreeMap::new();
        self.left_out.iter().for_each(|(cpu, reason)| by_reason.entry(reason).or_default().push(*cpu));
        by_reason
    }

    /// Returns a text with the excluded CPUs and the reasons; `None` if no CPU is excluded.
    pub(crate) fn named(&self) -> Option<String> {
        let by_reason = self.by_reason();
        let named = by_reason.iter().map(|(reason, cpus)| format!("{} left out: {reason}", are(cpus, "was", "were")));
        (!by_reason.is_empty()).then(|| named.collect::<Vec<_>>().join("; "))
    }

    /// Returns the text of `named` without the consequence: `CPU 1: isolated`.
    pub(crate) fn excluded(&self) -> Option<String> {
        let by_reason = self.by_reason();
        let named = by_reason.iter().map(|(reason, cpus)| match &cpus[..] {
            [cpu] => format!("CPU {cpu}: {reason}"),
            _ => format!("CPUs {}: {reason}", list(cpus)),
        });
        (!by_reason.is_empty()).then(|| named.collect::<Vec<_>>().join("; "))
    }

    /// Returns the text of `named`, and how to measure these CPUs.
    pub fn remark(&self) -> Option<String> {
        let cpus: Vec<u32> = self.left_out.iter().map(|&(cpu, _)| cpu).collect();
        let them = if cpus.len() == 1 { "it" } else { "them" };
        self.named().map(|named| format!("{named}; -c {} measures {them}", list(&cpus)))
    }
}

/// Formats `CPU 1 is` or `CPUs 1-2 are`.
fn are(cpus: &[u32], one: &str, more: &str) -> String {
    if cpus.len() == 1 { format!("CPU {} {one}", list(cpus)) } else { format!("CPUs {} {more}", list(cpus)) }
}

/// Returns the CPUs allowed for the first thread of this process, which is what taskset has set; other threads may be
/// bound already. Includes offline CPUs, which sched_getaffinity(2) leaves out.
fn allowed() -> std::io::Result<BTreeSet<u32>> {
    let listed = proc::text("/proc/self/status").ok().and_then(|status| allowed_of(&status));
    if let Some(listed) = listed {
        return Ok(listed.into_iter().collect());
    }
    let set = sched_getaffinity(Some(getpid()))?;
    Ok((0..CpuSet::MAX_CPU as u32).filter(|&cpu| set.is_set(cpu as usize)).collect())
}

/// Returns online CPUs that this process may use, and that are not isolated (`isolcpus`, `nohz_full`, cpusets).
///
/// # Errors
/// Fails if the kernel does not list them.
pub fn usable() -> std::io::Result<Vec<u32>> {
    Ok(Rules::here()?.usable(&online()?))
}

fn partitions() -> Vec<u32> {
    let listed =
        cgroups::unified_root().and_then(|root| std::fs::read_to_string(root.join("cpuset.cpus.isolated")).ok());
    listed.and_then(|text| numbers(&text)).unwrap_or_default()
}

/// Tests whether the cpuset of this process includes a CPU: only then a thread can be bound to it.
fn may_run_on(cpu: u32) -> bool {
    // A thread of its own, so that the caller remains where it is.
    thread::spawn(move || run_on(&[cpu])).join().is_ok_and(|outcome| outcome.is_ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules() -> Rules {
        Rules {
            allowed: (0..8).collect(),
            isolated: [1].into(),
            partitions: [2].into(),
            nohz_full: [1, 3].into(),
            realtime: [(4, "loop:123 (fifo)".to_owned())].into(),
        }
    }

    #[test]
    fn names_excluded_cpus() {
        let choice = rules().choose(&[0, 1, 2, 3, 4, 5, 6, 7], &[]);
        assert_eq!(choice.measured, [0, 5, 6, 7]);
        let remark = "CPU 1 was left out: isolated (isolcpus); CPU 2 was left out: isolated (cpuset); CPU 3 was left out: nohz_full; \
                      CPU 4 was left out: real-time thread loop:123 (fifo) runs there; -c 1-4 measures them";
        assert_eq!(choice.remark().as_deref(), Some(remark));
        let excluded = choice.excluded().unwrap_or_default();
        assert!(excluded.starts_with("CPU 1: isolated (isolcpus); CPU 2: ") && !excluded.contains("left out"));
    }

    #[test]
    fn excludes_cpus_outside_affinity() {
        let rules = Rules { allowed: [0].into(), ..Rules::default() };
        let choice = rules.choose(&[0, 1, 2], &[]);
        assert_eq!(choice.measured, [0]);
        let remark = "CPUs 1-2 were left out: not in whylate's affinity or cpuset; -c 1-2 measures them";
        assert_eq!(choice.remark().as_deref(), Some(remark));
    }

    #[test]
    fn measures_requested_cpus_despite_rules() {
        let choice = rules().choose(&[0, 1, 2, 3, 4, 5], &[1, 5]);
        assert_eq!((choice.measured.as_slice(), choice.others.as_slice()), (&[1, 5][..], &[0][..]));
        assert_eq!(choice.remark(), None);
        assert!(choice.takes(1) && !choice.takes(0));
    }

    #[test]
    fn error_names_reason_if_all_cpus_are_excluded() {
        let rules = Rules { allowed: [1].into(), isolated: [1].into(), ..Rules::default() };
        let error = rules.choose(&[1], &[]).at_least_one().expect_err("no CPU is measured");
        assert_eq!(error.to_string(), "CPU 1 was left out: isolated (isolcpus); -c 1 measures it");
    }

    #[test]
    fn measures_hotplugged_cpu_unless_excluded() {
        let choice = rules().choose(&[0], &[]);
        assert_eq!((choice.measured.as_slice(), choice.remark()), (&[0][..], None));
        assert_eq!([1, 2, 3, 4, 5, 8].map(|cpu| choice.takes(cpu)), [false, false, false, false, true, false]);
    }

    #[test]
    fn rejects_missing_cpu() {
        let error = Choice::here(&[60_000]).expect_err("there is no such CPU").to_string();
        assert!(error.starts_with("CPU 60000 is not online: choose from 0"), "{error}");
    }

    #[test]
    fn reads_affinity_of_process_not_of_bound_thread() -> std::io::Result<()> {
        let set = sched_getaffinity(Some(getpid()))?;
        run_on(&[(0..CpuSet::MAX_CPU as u32).find(|&cpu| set.is_set(cpu as usize)).unwrap_or(0)])?;
        let of_call: BTreeSet<u32> = (0..CpuSet::MAX_CPU as u32).filter(|&cpu| set.is_set(cpu as usize)).collect();
        assert!(allowed()?.is_superset(&of_call));
        assert_eq!(allowed_of("Name:\ta\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1,4\n"), Some(vec![0, 1, 4]));
        assert_eq!(allowed_of("Name:\ta\n"), None);
        Ok(())
    }

    proptest! {
        #[test]
        fn each_online_cpu_is_measured_or_excluded(
            online in proptest::collection::btree_set(0..12_u32, 1..12),
            allowed in proptest::collection::btree_set(0..12_u32, 0..12),
            isolated in proptest::collection::btree_set(0..12_u32, 0..4),
            partitions in proptest::collection::btree_set(0..12_u32, 0..4),
            nohz_full in proptest::collection::btree_set(0..12_u32, 0..4),
            realtime in proptest::collection::btree_map(0..12_u32, "[a-z]", 0..4),
        ) {
            let rules = Rules { allowed, isolated, partitions, nohz_full, realtime };
            let online: Vec<u32> = online.into_iter().collect();
            let choice = rules.clone().choose(&online, &[]);
            let mut all: Vec<u32> = choice.left_out.iter().map(|&(cpu, _)| cpu).chain(choice.measured.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, online);
            for cpu in choice.measured {
                let apart = [&rules.isolated, &rules.partitions, &rules.nohz_full];
                prop_assert!(rules.allowed.contains(&cpu) && !apart.iter().any(|set| set.contains(&cpu)));
                prop_assert!(!rules.realtime.contains_key(&cpu));
            }
        }
    }
}
