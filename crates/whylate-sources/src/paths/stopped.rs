// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are stopped now, and by what, as `/proc` tells.

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

/// Whether a thread of a process is stopped, and by what.
pub fn stopped(process: u32, tid: u32) -> Option<Stopped> {
    let stat = fs::read_to_string(format!("/proc/{process}/task/{tid}/stat")).ok()?;
    // Its name may hold anything, a closing parenthesis too.
    match stat.rsplit_once(") ")?.1.chars().next()? {
        'T' => Some(Stopped { stop: Stop::Signal, tracer: None }),
        't' => Some(Stopped { stop: Stop::Tracer, tracer: tracer_of(tid) }),
        // What it was doing is told as its state.
        _ => cgroups::is_frozen(process).then_some(Stopped { stop: Stop::Freezer, tracer: None }),
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
        assert_eq!(stopped(own, own), None);
        assert_eq!(tracer_of(u32::MAX), None);
    }
}
