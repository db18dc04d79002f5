// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are stopped now, and by what, as `/proc` tells.

use std::collections::HashMap;
use std::fs;

use whylate_model::path::history::Name;
use whylate_model::wait::Stop;

use crate::cgroups;

/// What keeps a thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Of what kind it is.
    pub stop: Stop,
    /// The tracer, by its number and name, where that is it and is seen here.
    pub tracer: Option<(u32, Name)>,
}

/// Looks up what keeps threads stopped.
#[derive(Debug, Default)]
pub struct StoppedThreads {
    /// Whether the cgroup of each process is frozen: threads are many, and each lookup opens seven files.
    is_frozen: HashMap<u32, bool>,
}

impl StoppedThreads {
    /// Returns what keeps a thread of a process stopped; `None` for one that is not.
    pub fn of(&mut self, process: u32, tid: u32) -> Option<Stopped> {
        let stat = fs::read_to_string(format!("/proc/{process}/task/{tid}/stat")).ok()?;
        // Its name may hold anything, a closing parenthesis too.
        match stat.rsplit_once(") ")?.1.chars().next()? {
            'T' => Some(Stopped { stop: Stop::Signal, tracer: None }),
            't' => Some(Stopped { stop: Stop::Tracer, tracer: tracer_of(tid) }),
            // The state is that of what the thread was doing.
            _ => {
                let is_frozen = *self.is_frozen.entry(process).or_insert_with(|| cgroups::is_frozen(process));
                is_frozen.then_some(Stopped { stop: Stop::Freezer, tracer: None })
            }
        }
    }
}

/// The number and the name of the thread's tracer, such as a debugger, where it has one that is seen here.
pub(crate) fn tracer_of(tid: u32) -> Option<(u32, Name)> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    let name = fs::read_to_string(format!("/proc/{tracer}/comm")).ok()?;
    (tracer != 0).then(|| (tracer, Name::of(name.trim_end_matches('\n'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_is_not_stopped_and_has_no_tracer() {
        let own = std::process::id();
        assert_eq!(StoppedThreads::default().of(own, own), None);
        assert_eq!(tracer_of(u32::MAX), None);
    }
}
