// SPDX-License-Identifier: MIT OR Apache-2.0
//! How far apart the kernel's per-CPU variables are: BTF always tells places, addresses need CONFIG_KALLSYMS_ALL.

use libbpf_rs::Btf;
use libbpf_rs::btf::types::{DataSec, Var};

#[derive(Debug)]
pub(crate) struct PerCpu {
    types: Btf<'static>,
}

impl PerCpu {
    pub(crate) fn new() -> Result<Self, libbpf_rs::Error> {
        Ok(PerCpu { types: Btf::from_vmlinux()? })
    }

    /// How many bytes `to` lies after `from`, for each CPU; `None` where the kernel lacks one of them.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_add_up() {
        let Ok(places) = PerCpu::new() else {
            println!("skipped: this kernel has no BTF");
            return;
        };
        let (there, back) =
            (places.distance("hrtimer_bases", "runqueues"), places.distance("runqueues", "hrtimer_bases"));
        assert_eq!(there.map(|bytes| bytes + back.unwrap_or(0)), Some(0));
        assert_ne!(there, Some(0));
        assert_eq!(places.distance("hrtimer_bases", "no such variable"), None);
    }
}
