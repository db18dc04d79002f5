// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names for the IDs in the scheduling timeline.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::rc::Rc;

use whylate_model::Cgroup;
use whylate_model::object::Object;
use whylate_model::path::history::{Blocked, Name};
use whylate_model::path::{Names, WaitSpan};
use whylate_model::thread::{ActorName, OUTSIDE};

use super::asleep::Calls;
use super::lock_waits::LockWaits;
use super::read_objects::ReadObjects;
use crate::kernel::cgroups::Cgroups;
use crate::kernel::pid_namespace;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::syscalls;

/// Number of minor bits in the kernel's device numbers.
const MINOR_BITS: u32 = 20;

/// Looks names up on this machine, and caches them.
pub struct PathNames {
    symbols: KernelSymbols,
    devices: HashMap<u32, String>,
    cgroups: Cgroups,
    /// Whether `/proc` has the TIDs of the timeline.
    has_proc: Option<bool>,
    /// System calls of waits that started before recording did.
    earlier: Calls,
    objects: ReadObjects,
    locks: Rc<RefCell<LockWaits>>,
}

impl PathNames {
    /// Looks up names, and kernel locks among these waits.
    pub(crate) fn new(symbols: KernelSymbols, locks: Rc<RefCell<LockWaits>>) -> Self {
        PathNames {
            symbols,
            devices: HashMap::new(),
            cgroups: Cgroups::default(),
            has_proc: None,
            earlier: Calls::default(),
            objects: ReadObjects::default(),
            locks,
        }
    }

    /// Adds the system calls in which threads waited before the recording started, and the objects of waits.
    pub(super) fn knows(&mut self, earlier: Calls, objects: ReadObjects) {
        (self.earlier, self.objects) = (earlier, objects);
    }

    /// Returns the kernel's symbols.
    pub fn symbols(&mut self) -> &mut KernelSymbols {
        &mut self.symbols
    }

    /// Returns the current name of the thread.
    pub(crate) fn present_thread(&mut self, tid: u32) -> Option<Name> {
        if tid & OUTSIDE != 0 || !*self.has_proc.get_or_insert_with(pid_namespace::has_proc) {
            return None;
        }
        let comm = fs::read(format!("/proc/{tid}/comm")).ok()?;
        let mut name = [0; 16];
        name.iter_mut().zip(strip_work_item(&comm).iter().take(15)).for_each(|(to, &from)| *to = from);
        Some(Name(name))
    }
}

impl Names for PathNames {
    fn handler(&mut self, number: u64) -> String {
        self.symbols.name(number).to_owned()
    }

    fn device(&mut self, device: u32) -> String {
        self.devices.entry(device).or_insert_with(|| device_name(device)).clone()
    }

    fn thread(&mut self, _tid: u32) -> Option<Name> {
        // The timeline is evaluated long after it was recorded, when the TID may be reused.
        None
    }

    fn limit(&mut self, _number: u32) -> ActorName {
        "its cgroup or its budget".into()
    }

    fn quota(&mut self, cgroup: u64) -> String {
        match self.cgroups.with_quota(cgroup) {
            Some(path) => format!("cgroup {path}"),
            None => "its cgroup".to_owned(),
        }
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        self.cgroups.path_or_placeholder(number).as_deref().map(Cgroup::new)
    }

    fn waits_in(&mut self, tid: u32, woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        let earlier = || self.earlier.get(&(tid, woken_ns)).copied().filter(|_| *blocked == Blocked::default());
        let number = blocked.syscall.map(i32::from).or_else(earlier);
        (number.and_then(syscalls::name), Vec::new())
    }

    fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        let read = self.objects.object_of(wait, via, self.earlier.contains_key(&(wait.tid, wait.woken_ns)));
        self.locks.borrow_mut().object_of(wait, read)
    }
}

/// Strips the newline of a name in `/proc`, and of a worker's name its current item, which `/proc` adds behind a `-` or
/// a `+` (`wq_worker_comm` in kernel/workqueue.c) and switches do not report. A rescuer's own name has a `-`
/// (`kworker/R-`).
fn strip_work_item(comm: &[u8]) -> &[u8] {
    let name = comm.strip_suffix(b"\n").unwrap_or(comm);
    if !name.starts_with(b"kworker/") {
        return name;
    }
    let is_rescuer = name.starts_with(b"kworker/R-");
    name.split(|&byte| byte == b'+' || byte == b'-' && !is_rescuer).next().unwrap_or(name)
}

/// Returns the name of a device in `/dev`, or its numbers if it is gone.
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
    fn missing_device_is_named_by_numbers() {
        assert_eq!(device_name(4095 << MINOR_BITS | 77), "4095:77");
    }

    #[test]
    fn worker_name_matches_switch_events() {
        for (in_proc, name) in [
            ("kworker/0:1-events", "kworker/0:1"),
            ("kworker/u9:3+events_unbound", "kworker/u9:3"),
            ("kworker/0:1H", "kworker/0:1H"),
            ("kworker/R-nfsiod", "kworker/R-nfsiod"),
            ("kworker/R-nfsiod+nfsiod", "kworker/R-nfsiod"),
            ("jbd2/vda-8\n", "jbd2/vda-8"),
        ] {
            assert_eq!(strip_work_item(in_proc.as_bytes()), name.as_bytes());
        }
    }
}
