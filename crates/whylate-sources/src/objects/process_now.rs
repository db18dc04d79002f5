// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a process or thread does now, from `/proc`.

use std::path::PathBuf;

use whylate_model::ActorName;
use whylate_model::holders::Holder;
use whylate_model::wait::State;

use crate::kernel::{cgroups, proc, syscalls};

/// What a process does now. If it has several threads, it is not known which of them holds something or waits.
#[derive(Clone, Debug)]
pub(crate) struct ProcessNow {
    pub(crate) now: Holder,
    pub(crate) has_several_threads: bool,
}

impl ProcessNow {
    /// Reads the state of a process; `with_call`, also the system call of its first thread, for which the kernel may wait until
    /// an execve(2) of that is over.
    pub(crate) fn read(pid: u32, with_call: bool) -> Self {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let stat = proc::text(directory.join("stat")).unwrap_or_default();
        // The first field after the name is the third, the state; the 20th is the number of threads (proc_pid_stat(5)).
        let threads = fields_of(&stat).nth(17);
        let has_several_threads = threads.is_none_or(|threads| threads != "1");
        let mut now = known_of_process(thread_now(&directory, pid, &stat, with_call), has_several_threads);
        if !now.is_stopped() && cgroups::is_frozen(pid) {
            (now.state, now.syscall) = (State::Frozen.name(), None);
        }
        ProcessNow { now, has_several_threads }
    }

    /// Reads the state of one thread, as above.
    pub(crate) fn of_thread(pid: u32, tid: u32, with_call: bool) -> Holder {
        let directory = PathBuf::from(format!("/proc/{pid}/task/{tid}"));
        let stat = proc::text(directory.join("stat")).unwrap_or_default();
        thread_now(&directory, tid, &stat, with_call)
    }
}

/// Returns what the state of the first thread implies for its process. A signal stops all threads at once, but a tracer may
/// have stopped this one alone.
fn known_of_process(first: Holder, has_several_threads: bool) -> Holder {
    if has_several_threads && first.state != "T" {
        return Holder { who: first.who, ..Holder::default() };
    }
    first
}

fn fields_of(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ')
}

fn thread_now(directory: &std::path::Path, tid: u32, stat: &str, with_call: bool) -> Holder {
    let comm = proc::text(directory.join("comm")).unwrap_or_default();
    let who = ActorName::thread(comm.trim_end_matches('\n'), tid).to_string();
    let state = fields_of(stat).next().unwrap_or_default().to_owned();
    let number = if with_call { proc::text(directory.join("syscall")).unwrap_or_default() } else { String::new() };
    let number = number.split(' ').next().and_then(|number| number.parse().ok());
    Holder { who, state, syscall: number.and_then(syscalls::name), ..Holder::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_signal_stops_all_threads() {
        let of = |state: &str, has_several_threads| {
            let first = Holder { who: "a:7".to_owned(), state: state.to_owned(), ..Holder::default() };
            let now = known_of_process(first, has_several_threads);
            assert_eq!(now.who, "a:7");
            now.state
        };
        assert_eq!(["S", "T", "t"].map(|state| of(state, false)), ["S", "T", "t"]);
        assert_eq!(["S", "T", "t"].map(|state| of(state, true)), ["", "T", ""]);
    }
}
