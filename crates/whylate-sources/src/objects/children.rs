// SPDX-License-Identifier: MIT OR Apache-2.0
//! Children that a thread waits for (wait(2)).

use crate::kernel::proc;

/// Maximum number of threads of a process whose children are listed, and of bytes of each list.
const MAX_PARENTS: usize = 64;
const MAX_LIST_BYTES: u64 = 16 << 10;
/// Maximum number of children whose PIDs are translated from another PID namespace.
const MAX_TRANSLATED: usize = 256;

/// Returns the children of a process.
pub(super) fn children_of(pid: u32) -> Vec<u32> {
    let threads = proc::numbers_on_demand(format!("/proc/{pid}/task")).take(MAX_PARENTS);
    let lists = threads.map(|tid| proc::text_at_most(format!("/proc/{pid}/task/{tid}/children"), MAX_LIST_BYTES));
    lists.flat_map(|list| numbers_in(&list.unwrap_or_default())).collect()
}

/// Returns the child or tracee that a process waits for. `wanted` is its PID in the PID namespace of the waiter; the
/// returned one is that in `/proc`.
pub(super) fn child_of(pid: u32, wanted: u32) -> Option<u32> {
    let status_of = |pid: u32| proc::text(format!("/proc/{pid}/status")).ok();
    let level = Status(&status_of(pid)?).pids().count().checked_sub(1)?;
    let candidates = if level == 0 { vec![wanted] } else { children_of(pid) };
    let is_it = |child: &u32| status_of(*child).is_some_and(|status| Status(&status).is_child(pid, wanted, level));
    candidates.into_iter().take(MAX_TRANSLATED).find(is_it)
}

/// Parses a list such as `812 815 `. What lacks the space may have been cut.
fn numbers_in(list: &str) -> Vec<u32> {
    let whole = list.rsplit_once(' ').map_or("", |(whole, _)| whole);
    whole.split(' ').filter_map(|number| number.parse().ok()).collect()
}

/// The `status` of a process (proc_pid_status(5)).
struct Status<'a>(&'a str);

impl<'a> Status<'a> {
    fn value_of(&self, name: &str) -> Option<&'a str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
    }

    /// Returns the PIDs in each PID namespace, from that of `/proc` to the innermost.
    fn pids(&self) -> impl Iterator<Item = u32> + use<'a> {
        // Kernels without PID namespaces have one only.
        let all = self.value_of("NSpid:").or_else(|| self.value_of("Pid:")).unwrap_or_default();
        all.split_whitespace().filter_map(|pid| pid.parse().ok())
    }

    /// Returns whether the process is a child or tracee of `parent`, with PID `wanted` in the namespace at `level`.
    fn is_child(&self, parent: u32, wanted: u32, level: usize) -> bool {
        let is_of_parent = |name: &str| self.value_of(name).and_then(|pid| pid.parse().ok()) == Some(parent);
        self.pids().nth(level) == Some(wanted) && ["PPid:", "TracerPid:"].into_iter().any(is_of_parent)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn child_has_the_pid_in_the_namespace_of_its_parent() {
        let status = Status("Name:\tNSpid: 7\nPid:\t4107\nPPid:\t4102\nTracerPid:\t90\nNSpid:\t4107\t7\t1\n");
        assert!(status.is_child(4102, 7, 1));
        assert!(status.is_child(90, 4107, 0), "its tracer");
        assert!(!status.is_child(4102, 7, 0) && !status.is_child(4102, 1, 1), "PIDs of other namespaces");
        assert!(!status.is_child(4102, 1, 3) && !status.is_child(4103, 7, 1));
        assert!(Status("Pid:\t12\nPPid:\t1\n").is_child(1, 12, 0));
    }

    #[test]
    fn only_children_are_waited_for() {
        let own = std::process::id();
        let mut child = Command::new("sleep").arg("1000").spawn().expect("started");
        let (found, other) = (child_of(own, child.id()), child_of(own, own));
        child.kill().and_then(|()| child.wait()).expect("killed");
        assert_eq!((found, other), (Some(child.id()), None));
    }

    #[test]
    fn cut_number_is_left_out() {
        assert_eq!(numbers_in("812 815 "), [812, 815]);
        assert_eq!(numbers_in("812 81"), [812]);
        assert!(numbers_in("81").is_empty() && numbers_in("").is_empty());
    }
}
