// SPDX-License-Identifier: MIT OR Apache-2.0
//! Distances between the kernel's per-CPU variables: BTF always has offsets, addresses need CONFIG_KALLSYMS_ALL.

use std::sync::OnceLock;

use libbpf_rs::Btf;
use libbpf_rs::btf::types::{DataSec, Struct, Var};

#[derive(Debug)]
pub(crate) struct PerCpu {
    types: Btf<'static>,
}

impl PerCpu {
    pub(crate) fn new() -> Result<Self, libbpf_rs::Error> {
        Ok(PerCpu { types: Btf::from_vmlinux()? })
    }

    /// Returns how many bytes `to` is after `from`, on each CPU; `None` if the kernel lacks one of them.
    pub(crate) fn distance(&self, from: &str, to: &str) -> Option<i64> {
        Some(self.offset(to)? - self.offset(from)?)
    }

    fn offset(&self, name: &str) -> Option<i64> {
        let section = self.types.type_by_name::<DataSec<'_>>(".data..percpu")?;
        let is_named = |variable: &Var<'_>| variable.name().is_some_and(|found| found == name);
        section.iter().find_map(|place| {
            let variable: Var<'_> = self.types.type_by_id(place.ty)?;
            is_named(&variable).then_some(i64::from(place.offset))
        })
    }
}

/// Location of a CPU's preemption count, which shows whether an interrupt runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PreemptCount {
    /// A field of the current thread: every architecture but x86.
    InThread,
    /// A per-CPU variable, at this distance from the CPU's `runqueues`, in bytes.
    BesideRunQueue(i64),
    /// BTF does not show the location.
    Unknown,
}

/// Per-CPU variables with the preemption count: the second from 6.2 to 6.14.
const PREEMPT_COUNTS: [&str; 2] = ["__preempt_count", "pcpu_hot"];

impl PreemptCount {
    /// Reads this kernel's BTF, once.
    pub(crate) fn here() -> Self {
        static HERE: OnceLock<PreemptCount> = OnceLock::new();
        *HERE.get_or_init(|| match PerCpu::new() {
            _ if !cfg!(target_arch = "x86_64") => PreemptCount::InThread,
            Ok(variables) => variables.preempt_count(),
            Err(_) => PreemptCount::Unknown,
        })
    }

    /// Returns the value of programs' `preempt_count_distance`; 0 if unused.
    pub(crate) fn distance(self) -> i64 {
        match self {
            PreemptCount::BesideRunQueue(distance) => distance,
            PreemptCount::InThread | PreemptCount::Unknown => 0,
        }
    }

    /// Returns the limitation if programs cannot read the count.
    pub(crate) fn limitation(self) -> Option<&'static str> {
        const UNKNOWN: &str = "a thread that is interrupted without a tracepoint may be shown as a waker, a submitter or a queuer: \
                               the kernel's BTF does not say where the CPU's preemption count is";
        (self == PreemptCount::Unknown).then_some(UNKNOWN)
    }
}

impl PerCpu {
    fn preempt_count(&self) -> PreemptCount {
        // With CONFIG_FAIR_GROUP_SCHED a thread points to the run queue of its CPU.
        let entity = self.types.type_by_name::<Struct<'_>>("sched_entity");
        let has_queue =
            entity.is_some_and(|entity| entity.iter().any(|member| member.name.is_some_and(|name| name == "cfs_rq")));
        let distance = PREEMPT_COUNTS.iter().find_map(|name| self.distance("runqueues", name));
        distance.filter(|_| has_queue).map_or(PreemptCount::Unknown, PreemptCount::BesideRunQueue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_preemption_count() {
        if PerCpu::new().is_err() {
            println!("skipped: this kernel has no BTF");
            return;
        }
        let found = PreemptCount::here();
        assert!(found.limitation().is_none(), "{found:?}");
        assert_eq!(found.distance() != 0, cfg!(target_arch = "x86_64"), "{found:?}");
        assert!(PreemptCount::Unknown.limitation().is_some_and(|limitation| limitation.contains("preemption count")));
    }

    #[test]
    fn distances_are_symmetric() {
        let Ok(variables) = PerCpu::new() else {
            println!("skipped: this kernel has no BTF");
            return;
        };
        let (there, back) =
            (variables.distance("hrtimer_bases", "runqueues"), variables.distance("runqueues", "hrtimer_bases"));
        assert_eq!(there.map(|bytes| bytes + back.unwrap_or(0)), Some(0));
        assert_ne!(there, Some(0));
        assert_eq!(variables.distance("hrtimer_bases", "no such variable"), None);
    }
}
