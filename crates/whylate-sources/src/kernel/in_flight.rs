// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kinds of io_uring requests that a thread waits for.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use whylate_model::wait::InFlight;

use crate::kernel::pid_namespace;

/// Maximum number of descriptors that are inspected per process.
const MAX_DESCRIPTORS: usize = 1_024;

/// Time for which the result of a process is cached.
const KNOWN_FOR: Duration = Duration::from_secs(1);
/// Maximum number of processes in the cache.
const MAX_PROCESSES: usize = 256;

/// Cached results of [`in_flight`] by process: a server waits thousands of times a second.
#[derive(Debug, Default)]
pub(crate) struct Rings(HashMap<u32, (Instant, InFlight)>);

impl Rings {
    /// Cached variant of [`in_flight`].
    pub(crate) fn in_flight(&mut self, pid: u32, kernel: &[String]) -> InFlight {
        if !waits_on_ring(kernel) {
            return InFlight::Unknown;
        }
        match self.0.get(&pid) {
            Some(&(at, known)) if at.elapsed() < KNOWN_FOR => return known,
            _ if self.0.len() >= MAX_PROCESSES => self.0.clear(),
            _ => {}
        }
        let found = in_flight(pid, kernel);
        self.0.insert(pid, (Instant::now(), found));
        found
    }
}

fn waits_on_ring(kernel: &[String]) -> bool {
    kernel.iter().any(|frame| frame == "io_cqring_wait")
}

/// Returns the kind of requests that a process has in flight in its rings, if the thread of this kernel stack waits for
/// a completion. fdinfo lists only requests that poll a file, such as a socket, and says nothing of others.
pub(crate) fn in_flight(pid: u32, kernel: &[String]) -> InFlight {
    if !waits_on_ring(kernel) || !pid_namespace::has_proc() {
        return InFlight::Unknown;
    }
    let process = Path::new("/proc").join(pid.to_string());
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().take(MAX_DESCRIPTORS);
    let is_ring = |path: &Path| fs::read_link(path).is_ok_and(|target| target == Path::new("anon_inode:[io_uring]"));
    let rings = descriptors.filter(|descriptor| is_ring(&descriptor.path()));
    let polls = |name| fs::read_to_string(process.join("fdinfo").join(name)).is_ok_and(|text| has_polls(&text));
    match rings.map(|ring| ring.file_name()).any(polls) {
        true => InFlight::Events,
        false => InFlight::Unknown,
    }
}

/// Returns whether a ring has requests that poll for a file to be ready.
fn has_polls(fdinfo: &str) -> bool {
    let polls = fdinfo.lines().skip_while(|line| *line != "PollList:").nth(1);
    polls.is_some_and(|line| line.trim_start().starts_with("op="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_poll_requests_in_fdinfo() {
        let ring = |polls: &str| format!("pos:\t0\nCqTail:\t7\nUserFiles:\t0\nPollList:\n{polls}CqOverflowList:\n");
        assert!(has_polls(&ring("  op=22, task_works=0\n")));
        assert!(!has_polls(&ring("")));
        assert!(!has_polls(""));
    }
}
