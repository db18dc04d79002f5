// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of waits that last: read while the timeline is recorded, as they are gone when the path is built.
//!
//! A thread of its own walks over all threads every 50 ms. Of a thread that has not run since the walk before, it reads the
//! object of its wait, and if the wait goes on, which processes could end it. All that takes at most 1 % of a CPU. Without
//! waits of such length it only walks.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use whylate_model::object::Object;
use whylate_model::path::WaitSpan;

use super::asleep::{Asleep, Sleeper, Sleepers};
use crate::kernel::{clock, pid_namespace};
use crate::objects::{self, Waiter, waiter};

/// Time between two walks over all threads.
const PERIOD: Duration = Duration::from_millis(50);
/// Number of walks that must find a thread in the same wait until its object is read, and until the peers are.
const WALKS_FOR_OBJECT: u32 = 2;
const WALKS_FOR_PEERS: u32 = 4;
/// Maximum share of a CPU that all that may take, in percent, and what it may take at once.
const MAX_CPU_PERCENT: u64 = 1;
const BURST_CPU_NS: u64 = 30_000_000;
/// Maximum number of objects that are read after one walk, and that are kept.
const MAX_A_WALK: usize = 64;
const MAX_KEPT: usize = 10_000;
/// Maximum time to wait for the first walk, and for the last one.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Objects that were read while their waits lasted.
#[derive(Debug, Default)]
pub(super) struct ReadObjects {
    by_thread: HashMap<u32, Vec<ReadObject>>,
    kept: usize,
    /// Number of waits that lasted, and whose object was not read in time.
    pub unread: u64,
}

#[derive(Clone, Debug)]
struct ReadObject {
    /// A time (CLOCK_MONOTONIC) at which the thread waited.
    at_ns: u64,
    /// Number of switches of the thread.
    switches: u32,
    /// The wait began before the first walk.
    is_earlier: bool,
    /// System call.
    via: String,
    object: Object,
}

impl ReadObjects {
    /// Returns the object of a wait. Where the switch-out was not recorded, it must have been before the first walk
    /// (`is_earlier`).
    pub(super) fn of(&self, wait: WaitSpan, via: &str, is_earlier: bool) -> Option<Object> {
        let is_in = |read: &&ReadObject| {
            let began = wait.from_ns.map_or(is_earlier && read.is_earlier, |from_ns| from_ns < read.at_ns);
            began && read.at_ns < wait.woken_ns && read.via == via
        };
        self.by_thread.get(&wait.tid)?.iter().rev().find(is_in).map(|read| read.object.clone())
    }

    fn add(&mut self, tid: u32, read: ReadObject) {
        let of_thread = self.by_thread.entry(tid).or_default();
        match of_thread.last_mut().filter(|last| last.switches == read.switches) {
            Some(last) => last.object = read.object,
            None if self.kept < MAX_KEPT => {
                self.kept += 1;
                of_thread.push(read);
            }
            None => self.unread += 1,
        }
    }
}

/// Reads objects on a thread of its own until it is dropped.
pub(super) struct LastingWaits {
    shared: Arc<Mutex<Shared>>,
    /// Ends the thread when it is dropped.
    going: Option<Sender<()>>,
    ended: Receiver<()>,
}

#[derive(Default)]
struct Shared {
    objects: ReadObjects,
    /// Threads of which also waits that began before the first walk are read.
    wanted: HashSet<u32>,
}

impl LastingWaits {
    /// Starts the thread, and returns the threads that are asleep now.
    pub(super) fn start() -> (Self, Asleep) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (going, goes_on) = mpsc::channel();
        let (first, first_walk) = mpsc::channel();
        let (ends, ended) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let started = thread::Builder::new().name("whylate-waits".to_owned()).spawn(move || {
            let Ok(sleepers) = Sleepers::load() else { return };
            let began_ns = clock::monotonic_ns();
            let Ok(found) = sleepers.walk() else { return };
            let _ = first.send(Asleep::new(began_ns, &found));
            let mut walker = Walker::new(&found);
            while goes_on.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let Ok(found) = sleepers.walk() else { break };
                walker.look_at(&found, &of_thread);
            }
            let _ = ends.send(());
        });
        // Without them, these waits are ones that began earlier.
        let asleep = started.ok().and_then(|_| first_walk.recv_timeout(MAX_WAIT).ok()).unwrap_or_default();
        (LastingWaits { shared, going: Some(going), ended }, asleep)
    }

    /// Also reads waits of these threads that began earlier.
    pub(super) fn want(&self, threads: impl Iterator<Item = u32>) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).wanted.extend(threads);
    }

    /// Reads no more.
    pub(super) fn end(&mut self) {
        if self.going.take().is_some() {
            let _ = self.ended.recv_timeout(MAX_WAIT);
        }
    }

    /// Returns what was read.
    pub(super) fn take(mut self) -> ReadObjects {
        self.end();
        std::mem::take(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner).objects)
    }
}

/// The waits that the last walk found.
struct Walker {
    waits: HashMap<u32, Lasting>,
    /// Start of the walks, and CPU time of this thread by then.
    began_ns: u64,
    began_cpu_ns: u64,
    has_proc: bool,
}

/// A wait that walks have found.
#[derive(Clone, Copy, Debug)]
struct Lasting {
    switches: u32,
    /// Number of walks that have found it.
    walks: u32,
    is_earlier: bool,
    read: Read,
}

/// What was read of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Read {
    #[default]
    Nothing,
    Object,
    Peers,
}

impl Walker {
    fn new(found: &[Sleeper]) -> Self {
        let earlier =
            |of: &Sleeper| (of.tid, Lasting { switches: of.switches, walks: 1, is_earlier: true, read: Read::Nothing });
        Walker {
            waits: found.iter().map(earlier).collect(),
            began_ns: clock::monotonic_ns(),
            began_cpu_ns: clock::thread_cpu_ns(),
            has_proc: pid_namespace::has_proc(),
        }
    }

    /// Returns whether there is CPU time left.
    fn has_time(&self) -> bool {
        let allowed_ns = clock::monotonic_ns().saturating_sub(self.began_ns) / 100 * MAX_CPU_PERCENT + BURST_CPU_NS;
        clock::thread_cpu_ns().saturating_sub(self.began_cpu_ns) < allowed_ns
    }

    /// Takes in what a walk has found, and reads what is due.
    fn look_at(&mut self, found: &[Sleeper], shared: &Mutex<Shared>) {
        let lock = || shared.lock().unwrap_or_else(PoisonError::into_inner);
        let at_ns = clock::monotonic_ns();
        let before = std::mem::take(&mut self.waits);
        for of in found {
            let new = Lasting { switches: of.switches, walks: 0, is_earlier: false, read: Read::Nothing };
            let known = before.get(&of.tid).filter(|known| known.switches == of.switches).copied().unwrap_or(new);
            self.waits.insert(of.tid, Lasting { walks: known.walks.saturating_add(1), ..known });
        }
        let own = std::process::id();
        let mut due: Vec<(bool, &Sleeper, Read)> = {
            let wanted = &lock().wanted;
            let due = |of: &Sleeper| {
                let known = self.waits[&of.tid];
                let is_wanted = wanted.contains(&of.tid);
                let read = known.due().filter(|_| of.process != own && (is_wanted || !known.is_earlier));
                read.map(|read| (is_wanted, read))
            };
            found.iter().filter_map(|of| due(of).map(|(is_wanted, read)| (is_wanted, of, read))).collect()
        };
        due.sort_by_key(|&(is_wanted, of, read)| (!is_wanted, read == Read::Peers, of.tid));
        for with_peers in [false, true] {
            let of_kind = due.iter().filter(|(.., read)| (*read == Read::Peers) == with_peers);
            let of_kind: Vec<&Sleeper> = of_kind.map(|(_, of, _)| *of).take(MAX_A_WALK).collect();
            if of_kind.is_empty() || !self.has_proc || !self.has_time() {
                continue;
            }
            let waiter = |of: &&Sleeper| waiter(of.process, of.tid, of.switches.into());
            let waiters: Vec<Waiter> = of_kind.iter().filter_map(waiter).collect();
            let objects = objects::read_here(&waiters, with_peers);
            let mut shared = lock();
            for (waiter, object) in waiters.into_iter().zip(objects) {
                let Some(object) = object else { continue };
                let is_earlier = self.waits.get(&waiter.tid).is_some_and(|known| known.is_earlier);
                let Waiter { tid, switches, syscall: via, .. } = waiter;
                shared.objects.add(tid, ReadObject { at_ns, switches, is_earlier, via, object });
            }
            let read = if with_peers { Read::Peers } else { Read::Object };
            for of in of_kind {
                self.waits.entry(of.tid).and_modify(|known| known.read = read);
            }
        }
        // Waits that have ended, without what was due.
        let unread = before.iter().filter(|(tid, of)| {
            let goes_on = self.waits.get(tid).is_some_and(|now| now.switches == of.switches);
            !goes_on && !of.is_earlier && of.read == Read::Nothing && of.walks > WALKS_FOR_OBJECT
        });
        lock().objects.unread += unread.count() as u64;
    }
}

impl Lasting {
    /// Returns what is to be read now, if anything.
    fn due(&self) -> Option<Read> {
        match self.read {
            Read::Nothing if self.walks >= WALKS_FOR_OBJECT => Some(Read::Object),
            Read::Object if self.walks >= WALKS_FOR_PEERS => Some(Read::Peers),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::object::ObjectKind;

    use super::*;

    fn read(at_ns: u64, switches: u32, path: &str) -> ReadObject {
        let object = Object::with_path(ObjectKind::File, path);
        ReadObject { at_ns, switches, is_earlier: switches == 1, via: "read".to_owned(), object }
    }

    #[test]
    fn object_belongs_to_the_wait_around_the_time_at_which_it_was_read() {
        let mut objects = ReadObjects::default();
        [(10, 1, "/a"), (30, 2, "/b"), (35, 2, "/c"), (50, 3, "/d")]
            .into_iter()
            .for_each(|(at_ns, switches, path)| objects.add(7, read(at_ns, switches, path)));
        let of = |from_ns, woken_ns, via, is_earlier| {
            objects.of(WaitSpan { tid: 7, from_ns, woken_ns }, via, is_earlier).and_then(|object| object.path)
        };
        assert_eq!(of(Some(29), 40, "read", false).as_deref(), Some("/c"), "what was read last of one wait");
        assert_eq!(of(Some(40), 60, "read", false).as_deref(), Some("/d"));
        assert_eq!(of(Some(40), 60, "write", false), None, "another call");
        assert_eq!(of(Some(31), 49, "read", false), None, "a wait in between");
        assert_eq!(of(None, 20, "read", true).as_deref(), Some("/a"));
        assert_eq!(of(None, 40, "read", false), None, "it is not known when the wait began");
        assert_eq!(objects.of(WaitSpan { tid: 8, from_ns: Some(0), woken_ns: 99 }, "read", true), None);
    }

    #[test]
    fn object_is_due_once_the_wait_lasts_and_peers_later() {
        let of = |walks, read| Lasting { switches: 0, walks, is_earlier: false, read }.due();
        assert_eq!([1, 2, 9].map(|walks| of(walks, Read::Nothing)), [None, Some(Read::Object), Some(Read::Object)]);
        assert_eq!([3, 4].map(|walks| of(walks, Read::Object)), [None, Some(Read::Peers)]);
        assert_eq!(of(9, Read::Peers), None);
    }
}
