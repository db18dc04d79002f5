// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the numbers in run slices stand for.

use std::collections::BTreeMap;

use whylate_model::path::Names;
use whylate_model::path::history::{Blocked, Name};
use whylate_model::{ActorName, Cgroup};

/// System calls of x86-64 by their numbers.
pub const CALLS: [(u16, &str); 15] = [
    (0, "read"),
    (1, "write"),
    (7, "poll"),
    (23, "select"),
    (45, "recvfrom"),
    (46, "sendmsg"),
    (59, "execve"),
    (61, "wait4"),
    (74, "fsync"),
    (176, "delete_module"),
    (186, "gettid"),
    (202, "futex"),
    (230, "clock_nanosleep"),
    (232, "epoll_wait"),
    (288, "accept4"),
];

/// Names of handlers, devices and cgroups, and the numbers that stand for them in a [`RunSlice`].
#[derive(Default)]
pub struct Symbols {
    names: Vec<String>,
    /// Threads that still exist when the answer is given.
    threads: BTreeMap<u32, Name>,
}

impl Symbols {
    /// The number that stands for a name.
    pub fn number(&mut self, name: &str) -> u64 {
        let at = self.names.iter().position(|known| known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        at as u64
    }

    /// A thread that still exists when the answer is given.
    pub fn add_thread(&mut self, tid: u32, name: Name) {
        self.threads.insert(tid, name);
    }

    fn name(&self, number: u64) -> String {
        self.names[number as usize].clone()
    }
}

impl Names for Symbols {
    fn handler(&mut self, number: u64) -> String {
        self.name(number)
    }

    fn device(&mut self, device: u32) -> String {
        self.name(device.into())
    }

    fn thread(&mut self, tid: u32) -> Option<Name> {
        self.threads.get(&tid).copied()
    }

    fn limit(&mut self, number: u32) -> ActorName {
        self.name(number.into()).into()
    }

    fn quota(&mut self, cgroup: u64) -> String {
        self.name(cgroup)
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        Some(Cgroup::new(&self.name(number)))
    }

    fn waits_in(&mut self, _tid: u32, _woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        let name = |number| CALLS.iter().find(|call| call.0 == number).map(|call| call.1.to_owned());
        (blocked.syscall.and_then(name), Vec::new())
    }
}
