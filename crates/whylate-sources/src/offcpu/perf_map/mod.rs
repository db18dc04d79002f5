// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of JIT-compiled code from perf maps, `/tmp/perf-PID.map`.
//!
//! A perf map may have any size, and any user can write one. A separate thread reads them, so neither walks nor other
//! sources wait: one turn reads a bounded part of what was appended to one map, and users take turns. Exceeding a bound
//! is counted in `lost` as `unread_perf_maps`, and drops the oldest names first.

mod code;
mod list;
mod turns;

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::kernel::priority;

pub(super) use code::CompiledCode;
#[cfg(feature = "fuzzing")]
pub(super) use code::check;

/// The maximum time that a snapshot waits for the thread. Reading a few appended lines takes a millisecond.
const WAIT: Duration = Duration::from_millis(30);

/// Processes by their ids in the BPF tables, with their TGIDs.
type Wanted = Vec<(u32, u32)>;

/// A request to the thread.
struct Request {
    processes: Wanted,
    /// Whether these are all processes, so that others have exited.
    are_all: bool,
    number: u64,
}

#[derive(Default)]
struct Results {
    /// Names that changed since the last call that took them, by process ID.
    changed: HashMap<u32, Arc<CompiledCode>>,
    /// Processes with a perf map that is not read to its end.
    unfinished: HashSet<u32>,
    /// Processes with names that were skipped or dropped since that was last counted.
    dropped: HashSet<u32>,
    /// The number of the last completed request.
    answered: u64,
}

#[derive(Default)]
struct Shared {
    results: Mutex<Results>,
    is_answered: Condvar,
}

impl Shared {
    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The perf maps of all processes.
#[derive(Default)]
pub(super) struct PerfMaps {
    requests: Option<Sender<Request>>,
    shared: Arc<Shared>,
    asked: u64,
}

impl PerfMaps {
    /// Starts reading the perf maps of these processes.
    pub(super) fn read(&mut self, processes: Wanted) {
        self.ask(processes, false);
    }

    /// Starts reading the perf maps of these processes, which are all, and returns the names that changed so far.
    pub(super) fn changed(&mut self, processes: Wanted) -> HashMap<u32, Arc<CompiledCode>> {
        self.ask(processes, true);
        if self.requests.is_none() {
            return HashMap::new();
        }
        let is_late = |results: &mut Results| results.answered < self.asked;
        let waited = self.shared.is_answered.wait_timeout_while(self.shared.results(), WAIT, is_late);
        let (mut results, _) = waited.unwrap_or_else(PoisonError::into_inner);
        take(&mut results.changed)
    }

    /// Returns the number of perf maps that were read only in part since the last call.
    pub(super) fn take_unread(&mut self) -> u64 {
        let mut results = self.shared.results();
        let mut unread = take(&mut results.dropped);
        unread.extend(&results.unfinished);
        unread.len() as u64
    }

    fn ask(&mut self, processes: Wanted, are_all: bool) {
        if self.requests.is_none() && processes.is_empty() {
            return;
        }
        self.asked += 1;
        if self.requests.is_none() {
            self.requests = start(Arc::clone(&self.shared));
        }
        let request = Request { processes, are_all, number: self.asked };
        if self.requests.as_ref().is_none_or(|requests| requests.send(request).is_err()) {
            self.requests = None;
        }
    }
}

fn start(shared: Arc<Shared>) -> Option<Sender<Request>> {
    let (requests, asked) = mpsc::channel();
    let run = move || {
        // The thread that starts it may have a higher weight.
        priority::favour_no_more();
        turns::Turns::new(shared).run(&asked);
    };
    thread::Builder::new().name("whylate-perfmap".to_owned()).spawn(run).ok()?;
    Some(requests)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    use super::*;

    /// A process with a perf map.
    struct Sleeper {
        child: Child,
        path: String,
    }

    impl Sleeper {
        fn new(map: &str) -> Self {
            let child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().expect("there is a sleep");
            let path = format!("/tmp/perf-{}.map", child.id());
            fs::write(&path, map).expect("written");
            Sleeper { child, path }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.child.kill().and_then(|()| self.child.wait());
            let _ = fs::remove_file(&self.path);
        }
    }

    #[test]
    fn large_map_delays_neither_snapshot_nor_small_maps() {
        let large = Sleeper::new(&"0 0 a\n".repeat((64 << 20) / 6));
        let small = Sleeper::new("1000 10 f\n");
        let all = vec![(1, large.child.id()), (2, small.child.id())];
        let mut maps = PerfMaps::default();
        let (mut names, mut longest, deadline) =
            (HashMap::new(), Duration::ZERO, Instant::now() + Duration::from_secs(30));
        while !names.contains_key(&2) {
            assert!(Instant::now() < deadline, "the small map is never read");
            let began = Instant::now();
            names.extend(maps.changed(all.clone()));
            longest = longest.max(began.elapsed());
        }
        assert_eq!(names[&2].name_at(0x1008).as_deref(), Some("f"));
        assert_eq!(maps.take_unread(), 1, "the large one is read still");
        assert!(longest < WAIT + Duration::from_millis(500), "a snapshot waited {longest:?}");
        // An appended line is read as soon.
        let mut file = fs::OpenOptions::new().append(true).open(&small.path).expect("there");
        file.write_all(b"1000 10 g\n").expect("written");
        while names[&2].name_at(0x1008).as_deref() != Some("g") {
            assert!(Instant::now() < deadline, "the small map is not read again");
            names.extend(maps.changed(all.clone()));
        }
    }
}
