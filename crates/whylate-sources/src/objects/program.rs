// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the threads of a program wait for at the end of a measurement.

use std::fs;

use whylate_model::ActorName;
use whylate_model::object::UnfinishedWait;

use super::call::Call;
use super::{Waiter, read, switches_in};
use crate::kernel::proc;

/// Maximum number of threads that are asked.
const MAX_THREADS: usize = 1_000;

/// Threads, and the numbers of their switches.
#[derive(Clone, Debug, Default)]
pub struct SwitchCounts(Vec<(u32, u32, u64)>);

impl SwitchCounts {
    /// Reads the numbers of switches of these threads, by PID and TID.
    pub fn read(threads: impl Iterator<Item = (u32, u32)>) -> Self {
        let count_of = |(pid, tid): (u32, u32)| {
            let status = proc::text(format!("/proc/{pid}/task/{tid}/status")).ok()?;
            Some((pid, tid, switches_in(&status)?))
        };
        SwitchCounts(threads.take(MAX_THREADS).filter_map(count_of).collect())
    }

    /// Returns what those threads wait for that have not run since their switches were counted, as far as it is known.
    pub fn unfinished_waits(&self) -> Vec<UnfinishedWait> {
        let waiters: Vec<Waiter> =
            self.0.iter().filter_map(|&(pid, tid, switches)| waiter(pid, tid, switches)).collect();
        let named: Vec<(ActorName, String)> = waiters.iter().map(|of| (name(of), of.syscall.clone())).collect();
        let waits = named.into_iter().zip(read(waiters).found);
        waits.filter_map(|((waiter, via), object)| Some(UnfinishedWait { waiter, via, object: object? })).collect()
    }
}

/// Returns a thread that waits in a system call.
pub(crate) fn waiter(pid: u32, tid: u32, switches: u64) -> Option<Waiter> {
    let file = |name: &str| format!("/proc/{pid}/task/{tid}/{name}");
    let syscall = Call::parse(&fs::read_to_string(file("syscall")).ok()?)?.name;
    let stack = fs::read_to_string(file("stack")).unwrap_or_default();
    Some(Waiter { pid, tid, switches: switches as u32, syscall, kernel: frames_in(&stack) })
}

fn name(waiter: &Waiter) -> ActorName {
    let comm = proc::text(format!("/proc/{}/task/{}/comm", waiter.pid, waiter.tid)).unwrap_or_default();
    ActorName::thread(comm.trim_end_matches('\n'), waiter.tid)
}

/// Parses lines such as `[<0>] anon_pipe_read+0x1f2/0x4f0`, innermost first.
fn frames_in(stack: &str) -> Vec<String> {
    let frame = |line: &str| Some(line.split_once("] ")?.1.split(['+', ' ']).next()?.to_owned());
    stack.lines().filter_map(frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_names() {
        let stack = "[<0>] anon_pipe_read+0x1f2/0x4f0\n[<0>] vfs_read+0x2a0/0x3c0\n[<0>] nf_hook [nf]\nnonsense\n";
        assert_eq!(frames_in(stack), ["anon_pipe_read", "vfs_read", "nf_hook"]);
    }
}
