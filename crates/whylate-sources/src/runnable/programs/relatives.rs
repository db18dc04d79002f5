// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the processes of threads, and how two processes are related.

use whylate_model::ActorName;
use whylate_model::programs::Pair;

use super::{Process, field, status_of};
use crate::kernel::{pid_namespace, proc};

/// Returns the process of a thread, while the thread lives.
pub(super) fn process_of(tid: u32) -> Option<Process> {
    if !pid_namespace::has_proc() {
        return None;
    }
    let status = status_of(tid)?;
    let number = |name: &str| field(&status, name)?.parse::<u32>().ok();
    let (pid, parent) = (number("Tgid:")?, number("PPid:")?);
    let comm = proc::text(format!("/proc/{pid}/comm")).ok()?;
    Some(Process { pid, parent, label: ActorName::thread(comm.trim_end_matches('\n'), pid) })
}

/// Returns whether a thread only waits for work from its waker: another thread of its process, a thread of its parent, or a
/// thread of the previous process in a shell's pipeline. If the relation is unknown, it is taken to wait for work.
pub(super) fn is_work(pair: Pair) -> bool {
    let (Some(waiter), Some(waker)) = (process_of(pair.waiter), process_of(pair.waker)) else { return true };
    if waiter.pid == waker.pid || waiter.parent == waker.pid {
        return true;
    }
    waiter.parent == waker.parent && waits_for_children(waiter.parent)
}

/// Returns whether a process waits for its children, as a shell, make and the parent of a vfork(2) do. `wchan` names the
/// kernel function in which its first thread sleeps. Unlike `syscall`, `wchan` takes no lock that execve(2) may hold for as
/// long as another program makes it wait.
fn waits_for_children(pid: u32) -> bool {
    proc::text(format!("/proc/{pid}/wchan")).is_ok_and(|function| function == "do_wait" || function == "kernel_clone")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relatives_wait_for_work() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("a child");
        let (own, of_child) = (std::process::id(), child.id());
        let is_parents = is_work(Pair { waiter: of_child, waker: own });
        let is_childs = is_work(Pair { waiter: own, waker: of_child });
        let _ = child.kill();
        let _ = child.wait();
        assert!(is_parents && !is_childs);
        assert!(is_work(Pair { waiter: own, waker: own }) && is_work(Pair { waiter: own, waker: of_child }));
    }
}
