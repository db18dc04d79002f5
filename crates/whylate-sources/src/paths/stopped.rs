// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are stopped now, and by what, from `/proc`.

use std::collections::HashMap;

use whylate_model::path::history::Name;
use whylate_model::wait::Stop;

use crate::kernel::cgroups;
use crate::kernel::proc;

/// Stop of a thread, and the tracer that keeps it stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Kind of the stop.
    pub stop: Stop,
    /// TID and name of the tracer, if a tracer visible here stopped the thread.
    pub tracer: Option<(u32, Name)>,
}

/// Looks up what keeps threads stopped.
#[derive(Debug, Default)]
pub struct StoppedThreads {
    /// Whether the cgroup of each process is frozen: threads are many, and each lookup opens seven files.
    is_frozen: HashMap<u32, bool>,
}

impl StoppedThreads {
    /// Returns what keeps a thread of a process stopped; `None` for one that is not. Of a thread that the recording
    /// shows running (`is_recorded`), only a freezer is looked up: any other stop is in the recording.
    pub fn why_stopped(&mut self, process: u32, tid: u32, is_recorded: bool) -> Option<Stopped> {
        if is_recorded && !self.is_frozen(process) {
            return None;
        }
        let stat = proc::text(format!("/proc/{process}/task/{tid}/stat")).ok()?;
        // The name may contain a closing parenthesis.
        match stat.rsplit_once(") ")?.1.chars().next()? {
            'T' => Some(Stopped { stop: Stop::Signal, tracer: None }),
            't' => Some(Stopped { stop: Stop::Tracer, tracer: tracer_of(tid) }),
            // A frozen thread keeps the state of what it was doing.
            _ => self.is_frozen(process).then_some(Stopped { stop: Stop::Freezer, tracer: None }),
        }
    }

    fn is_frozen(&mut self, process: u32) -> bool {
        *self.is_frozen.entry(process).or_insert_with(|| cgroups::is_frozen(process))
    }
}

/// Returns the TID and name of the thread's tracer, such as a debugger, if it has one that is visible here.
pub(crate) fn tracer_of(tid: u32) -> Option<(u32, Name)> {
    let status = proc::text(format!("/proc/{tid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    let name = proc::text(format!("/proc/{tracer}/comm")).ok()?;
    (tracer != 0).then(|| (tracer, Name::new(name.trim_end_matches('\n'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_thread_is_not_stopped_and_has_no_tracer() {
        let own = std::process::id();
        assert_eq!(StoppedThreads::default().why_stopped(own, own, false), None);
        assert_eq!(tracer_of(u32::MAX), None);
    }
}
