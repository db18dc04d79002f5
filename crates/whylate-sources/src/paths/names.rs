// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of what stands in the past of CPUs as a number.

use std::collections::HashMap;
use std::fs;

use whylate_model::Cgroup;
use whylate_model::path::Names;
use whylate_model::path::history::Blocked;

use crate::cgroups::Cgroups;
use crate::symbols::KernelSymbols;
use crate::syscalls;

/// How many bits of a device's number are its minor one, in the kernel.
const MINOR_BITS: u32 = 20;

/// Looks names up on this machine, each once.
pub struct PathNames {
    symbols: KernelSymbols,
    devices: HashMap<u32, String>,
    cgroups: Cgroups,
}

impl PathNames {
    pub(crate) fn new(symbols: KernelSymbols) -> Self {
        PathNames { symbols, devices: HashMap::new(), cgroups: Cgroups::default() }
    }
}

impl Names for PathNames {
    fn handler(&mut self, number: u64) -> String {
        self.symbols.name(number).to_owned()
    }

    fn device(&mut self, device: u32) -> String {
        self.devices.entry(device).or_insert_with(|| device_name(device)).clone()
    }

    fn limit(&mut self, _number: u32) -> String {
        "its cgroup or its budget".to_owned()
    }

    fn quota(&mut self, cgroup: u64) -> String {
        match self.cgroups.with_quota(cgroup) {
            Some(path) => format!("cgroup {path}"),
            None => "its cgroup".to_owned(),
        }
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        self.cgroups.told(number).as_deref().map(Cgroup::of)
    }

    fn waits_in(&mut self, _tid: u32, _woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        (blocked.syscall.and_then(|number| syscalls::name(number.into())), Vec::new())
    }
}

/// As it is called in `/dev`; its numbers where it is gone.
pub(crate) fn device_name(device: u32) -> String {
    let (major, minor) = (device >> MINOR_BITS, device & ((1 << MINOR_BITS) - 1));
    let known = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok();
    let name = known.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| format!("{major}:{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_has_its_numbers() {
        assert_eq!(device_name(4095 << MINOR_BITS | 77), "4095:77");
    }
}
