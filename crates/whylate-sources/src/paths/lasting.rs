// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the objects of long waits while the timeline is recorded: when the path is built, they no longer exist.
//!
//! A separate thread walks over all threads every 50 ms. If a thread has not run since the previous walk, it reads the object
//! of the wait. If the wait goes on, it reads which processes could end the wait. The walk itself yields the kernel lock that a
//! thread waits for, and its holder, even if only one walk finds the wait. Threads of the program or command come first.
//! Walks and reads take at most 5 % of a CPU for them; other threads are read only while the total is below 1 %.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use whylate_model::object::{Object, ObjectKind, Peer};
use whylate_model::path::WaitSpan;

use super::asleep::{Asleep, Sleeper, Sleepers, WaitedLock};
use crate::kernel::{clock, pid_namespace, syscalls};
use crate::objects::{self, ProcessNow, Waiter, waiter};

/// Time between two walks over all threads.
const PERIOD: Duration = Duration::from_millis(50);
/// Number of walks that must find a thread in the same wait before its object is read, and before the peers are read.
const WALKS_FOR_OBJECT: u32 = 2;
const WALKS_FOR_PEERS: u32 = 4;
/// Number of walks between two scans of the descriptors of all processes.
const WALKS_A_SCAN: u64 = 5;
/// Maximum share of a CPU, in percent, up to which threads of the program or command are read, and up to which others are
/// read too; and the CPU time that may be used at once.
const MAX_CPU_PERCENT: u64 = 5;
const MAX_CPU_PERCENT_WITH_OTHERS: u64 = 1;
const BURST_CPU_NS: u64 = 100_000_000;
/// Maximum number of objects that are read after one walk, and of objects that are kept.
const MAX_A_WALK: usize = 64;
const MAX_KEPT: usize = 10_000;
/// Maximum time to wait for the first walk, and for the last one.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Objects that were read while their waits lasted.
#[derive(Debug, Default)]
pub(super) struct ReadObjects {
    by_thread: HashMap<u32, Vec<ReadObject>>,
    kept: usize,
    /// Number of long waits of the program or command of which the object was not read in time.
    pub unread: u64,
}

#[derive(Clone, Debug)]
struct ReadObject {
    /// Span of time (CLOCK_MONOTONIC) in which the thread was seen waiting. The wait that contains the span is the one that was
    /// read.
    from_ns: u64,
    to_ns: u64,
    /// Time at which a walk first found the wait. It identifies the wait, as TIDs are reused.
    seen_ns: u64,
    /// The wait began before the first walk.
    is_earlier: bool,
    /// System call, if the thread is in one.
    via: Option<String>,
    object: Object,
}

impl ReadObjects {
    /// Returns the object of a wait. If its switch-out was not recorded, the wait must have begun before the first walk
    /// (`is_earlier`).
    pub(super) fn of(&self, wait: WaitSpan, via: Option<&str>, is_earlier: bool) -> Option<Object> {
        let is_in = |read: &&ReadObject| {
            let began = wait.from_ns.map_or(is_earlier && read.is_earlier, |from_ns| from_ns < read.from_ns);
            began && read.to_ns < wait.woken_ns && read.via.as_deref() == via
        };
        // Each wait has one entry, and entries are in order of time.
        let of_thread = self.by_thread.get(&wait.tid)?;
        let before = of_thread.partition_point(|read| read.to_ns < wait.woken_ns);
        of_thread.get(..before)?.last().filter(is_in).map(|read| read.object.clone())
    }

    fn add(&mut self, tid: u32, read: ReadObject) {
        let of_thread = self.by_thread.entry(tid).or_default();
        match of_thread.last_mut().filter(|last| last.seen_ns == read.seen_ns) {
            Some(last) => {
                let path = if read.object.kind == ObjectKind::InodeLock { last.object.path.take() } else { None };
                last.object = Object { path: read.object.path.or(path), ..read.object };
            }
            None if self.kept < MAX_KEPT => {
                self.kept += 1;
                of_thread.push(read);
            }
            None => self.unread += 1,
        }
    }
}

/// Reads objects on a separate thread until it is dropped.
pub(super) struct LastingWaits {
    shared: Arc<Mutex<Shared>>,
    /// Ends the thread when it is dropped.
    going: Option<Sender<()>>,
    ended: Receiver<()>,
}

#[derive(Default)]
struct Shared {
    objects: ReadObjects,
    /// Threads of the program. Of these, waits that began before the first walk are read too.
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
                let began_ns = clock::monotonic_ns();
                let Ok(found) = sleepers.walk() else { break };
                walker.look_at(&found, (began_ns, clock::monotonic_ns()), &of_thread);
            }
            let _ = ends.send(());
        });
        // Without these threads, their waits are shown as waits that began earlier.
        let asleep = started.ok().and_then(|_| first_walk.recv_timeout(MAX_WAIT).ok()).unwrap_or_default();
        (LastingWaits { shared, going: Some(going), ended }, asleep)
    }

    /// Also reads waits of these threads that began earlier.
    pub(super) fn want(&self, threads: impl Iterator<Item = u32>) {
        lock(&self.shared).wanted.extend(threads);
    }

    /// Stops reading.
    pub(super) fn end(&mut self) {
        if self.going.take().is_some() {
            let _ = self.ended.recv_timeout(MAX_WAIT);
        }
    }

    /// Returns what was read.
    pub(super) fn take(mut self) -> ReadObjects {
        self.end();
        std::mem::take(&mut lock(&self.shared).objects)
    }
}

/// The waits that the last walk found.
struct Walker {
    waits: HashMap<u32, Lasting>,
    /// Descendants of this process.
    descendants: HashSet<u32>,
    /// Start of the walks, and CPU time of this thread by then.
    began_ns: u64,
    began_cpu_ns: u64,
    has_proc: bool,
    walks: u64,
}

/// A wait that walks have found.
#[derive(Clone, Copy, Debug)]
struct Lasting {
    switches: u32,
    /// Time at which a walk first found it.
    seen_ns: u64,
    /// Number of walks that have found it.
    walks: u32,
    is_earlier: bool,
    /// The thread belongs to the program, or to a descendant of this process.
    comes_first: bool,
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
        let earlier = |of: &Sleeper| (of.tid, Lasting { walks: 1, is_earlier: true, ..Lasting::new(of, 0) });
        Walker {
            waits: found.iter().map(earlier).collect(),
            descendants: HashSet::new(),
            began_ns: clock::monotonic_ns(),
            began_cpu_ns: clock::thread_cpu_ns(),
            has_proc: pid_namespace::has_proc(),
            walks: 0,
        }
    }

    /// Returns whether there is CPU time left for threads that come first, or for others.
    fn has_time(&self, comes_first: bool) -> bool {
        let percent = if comes_first { MAX_CPU_PERCENT } else { MAX_CPU_PERCENT_WITH_OTHERS };
        let allowed_ns = clock::monotonic_ns().saturating_sub(self.began_ns) / 100 * percent + BURST_CPU_NS;
        clock::thread_cpu_ns().saturating_sub(self.began_cpu_ns) < allowed_ns
    }

    /// Updates the waits after a walk from `began_ns` to `ended_ns`, and reads the objects that are due.
    fn look_at(&mut self, found: &[Sleeper], (began_ns, ended_ns): (u64, u64), shared: &Mutex<Shared>) {
        let before = self.take_in(found, &lock(shared).wanted);
        self.walks += 1;
        let of_kinds: &[Read] =
            if self.walks.is_multiple_of(WALKS_A_SCAN) { &[Read::Object, Read::Peers] } else { &[Read::Object] };
        let own = std::process::id();
        let is_read = |walker: &Self, of: &Sleeper| {
            let known = walker.waits[&of.tid];
            of.process != own && walker.has_proc && (known.comes_first || !known.is_earlier)
        };
        for (of, waited) in found.iter().filter_map(|of| Some((of, of.lock?))) {
            let Lasting { comes_first, is_earlier, seen_ns, .. } = self.waits[&of.tid];
            if is_read(self, of) && self.has_time(comes_first) {
                let (object, via) = (lock_object(waited), syscalls::name(of.syscall));
                let read = ReadObject { from_ns: began_ns, to_ns: ended_ns, seen_ns, is_earlier, via, object };
                lock(shared).objects.add(of.tid, read);
            }
        }
        for comes_first in [true, false] {
            for &of_kind in of_kinds {
                let is_due = |of: &&Sleeper| {
                    let known = self.waits[&of.tid];
                    // The walk has read kernel locks already. Only the file of an inode lock may be missing.
                    let may_have = of.lock.is_none_or(|lock| lock.kind == ObjectKind::InodeLock);
                    let is_of_kind = known.due() == Some(of_kind) && known.comes_first == comes_first;
                    is_of_kind && of.syscall >= 0 && may_have && is_read(self, of)
                };
                let due: Vec<&Sleeper> = found.iter().filter(is_due).take(MAX_A_WALK).collect();
                if !due.is_empty() && self.has_time(comes_first) {
                    self.read(&due, of_kind, ended_ns, shared);
                }
            }
        }
        // Waits that have ended before their object was read.
        let unread = before.iter().filter(|(tid, of)| {
            let goes_on = self.waits.get(tid).is_some_and(|now| now.switches == of.switches);
            !goes_on && of.comes_first && of.read == Read::Nothing && of.walks > WALKS_FOR_OBJECT
        });
        lock(shared).objects.unread += unread.count() as u64;
    }

    /// Updates the waits with the threads that a walk has found. Returns the waits that the previous walk had found.
    fn take_in(&mut self, found: &[Sleeper], wanted: &HashSet<u32>) -> HashMap<u32, Lasting> {
        let (own, now_ns) = (std::process::id(), clock::monotonic_ns());
        let before = std::mem::take(&mut self.waits);
        let processes: HashSet<u32> = found.iter().map(|of| of.process).collect();
        self.descendants.retain(|pid| processes.contains(pid));
        // Walks go by PID: parents come before their children, unless PIDs have wrapped around.
        for of in found {
            if of.parent == own || self.descendants.contains(&of.parent) {
                self.descendants.insert(of.process);
            }
        }
        for of in found {
            let known = before.get(&of.tid).filter(|known| known.switches == of.switches);
            let known = known.copied().unwrap_or_else(|| Lasting::new(of, now_ns));
            let comes_first = wanted.contains(&of.tid) || self.descendants.contains(&of.process);
            self.waits.insert(of.tid, Lasting { walks: known.walks.saturating_add(1), comes_first, ..known });
        }
        before
    }

    /// Reads the objects of these waits, which began before `since_ns`.
    fn read(&mut self, due: &[&Sleeper], of_kind: Read, since_ns: u64, shared: &Mutex<Shared>) {
        let waiters: Vec<(&Sleeper, Waiter)> =
            due.iter().filter_map(|of| Some((*of, waiter(of.process, of.tid, of.switches.into())?))).collect();
        let of_waiters: Vec<Waiter> = waiters.iter().map(|(_, waiter)| waiter.clone()).collect();
        let objects = objects::read_here(&of_waiters, of_kind == Read::Peers);
        for ((of, waiter), object) in waiters.into_iter().zip(objects) {
            let object = match (of.lock, object) {
                (None, Some(object)) => object,
                (Some(waited), Some(Object { kind: ObjectKind::File, path, .. })) => {
                    Object { path, ..lock_object(waited) }
                }
                _ => continue,
            };
            let (Lasting { is_earlier, seen_ns, .. }, via) = (self.waits[&of.tid], Some(waiter.syscall));
            let (from_ns, to_ns) = (since_ns, since_ns);
            lock(shared).objects.add(of.tid, ReadObject { from_ns, to_ns, seen_ns, is_earlier, via, object });
        }
        for of in due {
            self.waits.entry(of.tid).and_modify(|known| known.read = of_kind);
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a kernel lock as an object, with the current state of its holder.
fn lock_object(of: WaitedLock) -> Object {
    let holder = of.holder.map(|tid| ProcessNow::of_thread(tid, tid));
    let peers = holder.into_iter().map(|process| Peer { process, others: 0 }).collect();
    Object { lock: Some(of.lock), peers, ..Object::new(of.kind) }
}

impl Lasting {
    fn new(of: &Sleeper, seen_ns: u64) -> Self {
        Lasting { switches: of.switches, seen_ns, walks: 0, is_earlier: false, comes_first: false, read: Read::Nothing }
    }

    /// Returns what is due to be read, if anything.
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

    fn read(at_ns: u64, seen_ns: u64, path: &str) -> ReadObject {
        let object = Object::with_path(ObjectKind::File, path);
        let via = Some("read".to_owned());
        ReadObject { from_ns: at_ns, to_ns: at_ns, seen_ns, is_earlier: seen_ns == 1, via, object }
    }

    #[test]
    fn object_belongs_to_the_wait_around_the_time_at_which_it_was_read() {
        let mut objects = ReadObjects::default();
        [(10, 1, "/a"), (30, 2, "/b"), (35, 2, "/c"), (50, 3, "/d")]
            .into_iter()
            .for_each(|(at_ns, seen_ns, path)| objects.add(7, read(at_ns, seen_ns, path)));
        let of = |from_ns, woken_ns, via, is_earlier| {
            objects.of(WaitSpan { tid: 7, from_ns, woken_ns }, Some(via), is_earlier).and_then(|object| object.path)
        };
        assert_eq!(of(Some(29), 40, "read", false).as_deref(), Some("/c"), "what was read last of one wait");
        assert_eq!(of(Some(40), 60, "read", false).as_deref(), Some("/d"));
        assert_eq!(of(Some(40), 60, "write", false), None, "another call");
        assert_eq!(of(Some(31), 49, "read", false), None, "a wait in between");
        assert_eq!(of(None, 20, "read", true).as_deref(), Some("/a"));
        assert_eq!(of(None, 40, "read", false), None, "it is not known when the wait began");
        assert_eq!(objects.of(WaitSpan { tid: 8, from_ns: Some(0), woken_ns: 99 }, Some("read"), true), None);
    }

    #[test]
    fn object_is_due_once_the_wait_lasts_and_peers_later() {
        let of =
            |walks, read| Lasting { switches: 0, seen_ns: 0, walks, is_earlier: false, comes_first: false, read }.due();
        assert_eq!([1, 2, 9].map(|walks| of(walks, Read::Nothing)), [None, Some(Read::Object), Some(Read::Object)]);
        assert_eq!([3, 4].map(|walks| of(walks, Read::Object)), [None, Some(Read::Peers)]);
        assert_eq!(of(9, Read::Peers), None);
    }
}
