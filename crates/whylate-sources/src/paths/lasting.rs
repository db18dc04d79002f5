// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the objects of long waits while the timeline is recorded: when the path is built, they no longer exist.
//!
//! A separate thread walks over all threads every 50 ms. If a thread has not run since the previous walk, it reads the object
//! of the wait. If the wait goes on, it reads which processes could end the wait. The walk itself yields the kernel lock that a
//! thread waits for, and its holder, even if only one walk finds the wait. Threads of the program or command come first.
//! Walks and reads take at most 5 % of a CPU for them; other threads are read only while the total is below 1 %. With very many
//! threads, walks are less frequent.
//!
//! Of a process in execve(2), files that need `exec_update_lock` are not read: a user can hold this lock for ever. A process
//! that calls execve(2) after the walk may still stall the thread. Its earlier results stay, and the rest counts as unread.

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
/// Minimum ratio of that time to the CPU time of the walk before.
const PERIODS_A_WALK: u64 = 40;
/// Number of walks that must find a thread in the same wait until its object is read, and until the peers are.
const WALKS_FOR_OBJECT: u32 = 2;
const WALKS_FOR_PEERS: u32 = 4;
/// Number of walks between two scans of the descriptors of all processes.
const WALKS_A_SCAN: u64 = 5;
/// Maximum share of a CPU, in percent, up to which threads of the program or command are read, and up to which others are
/// read too; and the CPU time that may be used at once.
const MAX_CPU_PERCENT: u64 = 5;
const MAX_CPU_PERCENT_WITH_OTHERS: u64 = 1;
const BURST_CPU_NS: u64 = 100_000_000;
/// Maximum number of objects that are read after one walk, and of walks that try to read one.
const MAX_A_WALK: usize = 64;
const MAX_TRIES: u32 = 8;
/// Maximum number of readings that are kept of threads that come first, and of others.
const MAX_KEPT: usize = 10_000;
const MAX_KEPT_OF_OTHERS: usize = 2_000;
/// Maximum number of readings that are kept of one wait: the walk in which it ends may make three, which do not count.
const MAX_KEPT_OF_WAIT: usize = 4;
/// Maximum time to wait for the first walk, and for the last one.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Objects that were read while their waits lasted.
#[derive(Debug, Default)]
pub(super) struct ReadObjects {
    /// In order of time.
    by_thread: HashMap<u32, Vec<ReadObject>>,
    kept: usize,
    kept_of_others: usize,
    /// Number of waits of the program or command that lasted, and whose object was not read in time, and of threads beyond
    /// the maximum.
    pub unread: u64,
}

#[derive(Clone, Debug)]
struct ReadObject {
    /// The span of time (CLOCK_MONOTONIC) of the reading. The thread waited at some point of it. A wait around it is that
    /// wait; if the wait ended within, what was read may be of a later time.
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
            // A wait that a walk had found before this one began is another one.
            let is_found_within = |from_ns: u64| read.is_earlier || from_ns < read.seen_ns;
            let began = wait
                .from_ns
                .map_or(is_earlier && read.is_earlier, |from_ns| from_ns < read.from_ns && is_found_within(from_ns));
            began && read.to_ns < wait.woken_ns && read.via.as_deref() == via
        };
        let of_thread = self.by_thread.get(&wait.tid)?;
        let before = of_thread.partition_point(|read| read.to_ns < wait.woken_ns);
        of_thread.get(..before)?.last().filter(is_in).map(|read| read.object.clone())
    }

    /// Keeps a reading. Returns whether something is kept of the wait.
    fn add(&mut self, tid: u32, mut read: ReadObject, comes_first: bool) -> bool {
        let (kept, max_kept) = match comes_first {
            true => (&mut self.kept, MAX_KEPT),
            false => (&mut self.kept_of_others, MAX_KEPT_OF_OTHERS),
        };
        let has_room = *kept < max_kept;
        let of_thread = self.by_thread.get(&tid).map_or(&[][..], Vec::as_slice);
        let of_wait = of_thread.iter().rev().take_while(|before| before.seen_ns == read.seen_ns).count();
        if !has_room && of_wait < MAX_KEPT_OF_WAIT {
            return of_wait > 0;
        }
        let of_thread = self.by_thread.entry(tid).or_default();
        if let Some(before) = of_thread.last().filter(|_| of_wait > 0 && read.object.kind == ObjectKind::InodeLock) {
            read.object.path = read.object.path.or_else(|| before.object.path.clone());
        }
        if of_wait >= MAX_KEPT_OF_WAIT {
            of_thread.remove(of_thread.len() - of_wait);
        } else {
            *kept += 1;
        }
        of_thread.push(read);
        true
    }
}

/// Reads objects on a separate thread until it is dropped.
pub(super) struct LastingWaits {
    shared: Arc<Mutex<Shared>>,
    /// Ends the thread when it is dropped.
    going: Option<Sender<()>>,
    /// Says that the thread has ended as it was told to.
    ended: Receiver<()>,
    is_complete: bool,
}

#[derive(Default)]
struct Shared {
    objects: ReadObjects,
    /// Threads of the program. Of these, waits that began before the first walk are read too.
    wanted: HashSet<u32>,
    /// Number of waits of the program or command that are being read.
    being_read: u64,
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
            let Ok(walk) = sleepers.walk() else { return };
            let _ = first.send(Asleep::new(began_ns, &walk.found));
            let (mut walker, mut period, mut cut) = (Walker::new(&walk.found), PERIOD, 0);
            while goes_on.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let (began_ns, began_cpu_ns) = (clock::monotonic_ns(), clock::thread_cpu_ns());
                let Ok(walk) = sleepers.walk() else { return };
                period = period_after(clock::thread_cpu_ns().saturating_sub(began_cpu_ns));
                lock(&of_thread).objects.unread += walk.cut.saturating_sub(cut);
                cut = cut.max(walk.cut);
                walker.look_at(&walk.found, (began_ns, clock::monotonic_ns()), &of_thread);
            }
            let _ = ends.send(());
        });
        // Without these threads, their waits are shown as waits that began earlier.
        let asleep = started.ok().and_then(|_| first_walk.recv_timeout(MAX_WAIT).ok()).unwrap_or_default();
        (LastingWaits { shared, going: Some(going), ended, is_complete: false }, asleep)
    }

    /// Also reads waits of these threads that began earlier.
    pub(super) fn want(&self, threads: impl Iterator<Item = u32>) {
        lock(&self.shared).wanted.extend(threads);
    }

    /// Reads no more. Returns whether the thread has ended as it should: it may have stalled in `/proc`, or failed.
    pub(super) fn end(&mut self) -> bool {
        if self.going.take().is_some() {
            self.is_complete = self.ended.recv_timeout(MAX_WAIT).is_ok();
        }
        self.is_complete
    }

    /// Returns what was read.
    pub(super) fn take(mut self) -> ReadObjects {
        let is_complete = self.end();
        let mut shared = lock(&self.shared);
        let mut objects = std::mem::take(&mut shared.objects);
        if !is_complete {
            // How many waits followed is not known.
            objects.unread += shared.being_read.max(1);
        }
        objects
    }
}

/// Returns the time until the next walk, after one that took this CPU time.
fn period_after(walk_cpu_ns: u64) -> Duration {
    PERIOD.max(Duration::from_nanos(walk_cpu_ns.saturating_mul(PERIODS_A_WALK)))
}

/// The waits that the last walk found.
struct Walker {
    waits: HashMap<u32, Lasting>,
    /// Descendants of this process.
    descendants: HashSet<u32>,
    /// Start of the walks, and CPU time of this thread by then.
    began_ns: u64,
    began_cpu_ns: u64,
    /// CPU time that other threads took for this one.
    other_cpu_ns: u64,
    /// Processes that execute a program.
    in_exec: HashSet<u32>,
    /// TIDs of the threads of these.
    threads_in_exec: HashSet<u32>,
    has_proc: bool,
    walks: u64,
}

/// A wait that walks have found.
#[derive(Clone, Copy, Debug, Default)]
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
    /// Number of times that this was tried in vain.
    tries: u32,
    /// The kernel lock that it waits for is known.
    has_lock: bool,
    /// There was no room for what was read.
    is_refused: bool,
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
            other_cpu_ns: 0,
            in_exec: HashSet::new(),
            threads_in_exec: HashSet::new(),
            has_proc: pid_namespace::has_proc(),
            walks: 0,
        }
    }

    /// Returns whether there is CPU time left for threads that come first, or for others.
    fn has_time(&self, comes_first: bool) -> bool {
        let percent = if comes_first { MAX_CPU_PERCENT } else { MAX_CPU_PERCENT_WITH_OTHERS };
        let allowed_ns = clock::monotonic_ns().saturating_sub(self.began_ns) / 100 * percent + BURST_CPU_NS;
        clock::thread_cpu_ns().saturating_sub(self.began_cpu_ns) + self.other_cpu_ns < allowed_ns
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
                let (object, via) = (self.lock_object(of.tid, waited), syscalls::name(of.syscall));
                let to_ns = clock::monotonic_ns().max(ended_ns);
                let read = ReadObject { from_ns: began_ns, to_ns, seen_ns, is_earlier, via, object };
                self.add(of.tid, read, shared);
                self.waits.entry(of.tid).and_modify(|known| known.has_lock = true);
            }
        }
        for comes_first in [true, false] {
            for &of_kind in of_kinds {
                let is_due = |of: &&Sleeper| {
                    let known = self.waits[&of.tid];
                    // The walk has read kernel locks already. Only the file of an inode lock may be missing.
                    let may_have = of.lock.is_none_or(|lock| lock.kind == ObjectKind::InodeLock);
                    let is_of_kind = known.due() == Some(of_kind) && known.comes_first == comes_first;
                    let is_readable = of.syscall >= 0 && !self.in_exec.contains(&of.process);
                    is_of_kind && is_readable && may_have && is_read(self, of)
                };
                let mut due: Vec<&Sleeper> = found.iter().filter(is_due).collect();
                // Those that cannot be read do not keep others from it.
                due.sort_by_key(|of| self.waits[&of.tid].tries);
                due.truncate(MAX_A_WALK);
                if !due.is_empty() && self.has_time(comes_first) {
                    lock(shared).being_read = if comes_first { due.len() as u64 } else { 0 };
                    self.read(&due, of_kind, ended_ns, shared);
                    lock(shared).being_read = 0;
                }
            }
        }
        // Waits that have ended before their object was read.
        let unread = before.iter().filter(|(tid, of)| {
            let goes_on = self.waits.get(tid).is_some_and(|now| now.switches == of.switches);
            !goes_on && of.comes_first && of.is_unread()
        });
        lock(shared).objects.unread += unread.count() as u64;
    }

    /// Updates the waits with the threads that a walk has found. Returns the waits that the previous walk had found.
    fn take_in(&mut self, found: &[Sleeper], wanted: &HashSet<u32>) -> HashMap<u32, Lasting> {
        let (own, now_ns) = (std::process::id(), clock::monotonic_ns());
        let before = std::mem::take(&mut self.waits);
        let processes: HashSet<u32> = found.iter().map(|of| of.process).collect();
        self.descendants.retain(|pid| processes.contains(pid));
        self.in_exec = found.iter().filter(|of| of.in_exec).map(|of| of.process).collect();
        let threads = found.iter().filter(|of| self.in_exec.contains(&of.process)).map(|of| of.tid);
        self.threads_in_exec = threads.collect();
        // Parents come before their children, but for those whose PIDs have started over.
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
        let objects = objects::read_here(&of_waiters, of_kind == Read::Peers, &self.in_exec);
        self.other_cpu_ns += objects.other_cpu_ns;
        let to_ns = clock::monotonic_ns();
        for of in due {
            self.waits.entry(of.tid).and_modify(|known| known.tries += 1);
        }
        for (((of, waiter), object), is_read) in waiters.into_iter().zip(objects.found).zip(objects.is_read) {
            if is_read {
                self.waits.entry(of.tid).and_modify(|known| (known.read, known.tries) = (of_kind, 0));
            }
            let object = match (of.lock, object) {
                (None, Some(object)) => without_waiter(object, of.tid),
                (Some(waited), Some(Object { kind: ObjectKind::File, path, .. })) => {
                    Object { path, ..self.lock_object(of.tid, waited) }
                }
                _ => continue,
            };
            let (Lasting { is_earlier, seen_ns, .. }, via) = (self.waits[&of.tid], Some(waiter.syscall));
            self.add(of.tid, ReadObject { from_ns: since_ns, to_ns, seen_ns, is_earlier, via, object }, shared);
        }
    }

    /// Keeps what was read, if there is room.
    fn add(&mut self, tid: u32, read: ReadObject, shared: &Mutex<Shared>) {
        let Some(known) = self.waits.get_mut(&tid) else { return };
        known.is_refused = !lock(shared).objects.add(tid, read, known.comes_first);
    }

    /// Returns the kernel lock that a thread waits for, with what its holder does now.
    fn lock_object(&self, waiter: u32, of: WaitedLock) -> Object {
        // A thread that has just got the lock waits no more.
        let holder = of.holder.filter(|&tid| tid != waiter);
        let holder = holder.map(|tid| ProcessNow::of_thread(tid, tid, !self.threads_in_exec.contains(&tid)));
        let peers = holder.into_iter().map(|process| Peer { process, others: 0 }).collect();
        Object { lock: Some(of.lock), peers, ..Object::new(of.kind) }
    }
}

/// Returns a mutex without an owner that is the waiter, which has just got it.
fn without_waiter(mut object: Object, tid: u32) -> Object {
    if object.kind == ObjectKind::Mutex {
        let is_waiter = |peer: &Peer| peer.process.who.rsplit_once(':').is_some_and(|(_, of)| of == tid.to_string());
        object.peers.retain(|peer| !is_waiter(peer));
    }
    object
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lasting {
    fn new(of: &Sleeper, seen_ns: u64) -> Self {
        Lasting { switches: of.switches, seen_ns, ..Lasting::default() }
    }

    /// Returns whether it lasted, but nothing is kept of it.
    fn is_unread(&self) -> bool {
        self.is_refused || self.read == Read::Nothing && !self.has_lock && self.walks > WALKS_FOR_OBJECT
    }

    /// Returns what is due to be read, if anything.
    fn due(&self) -> Option<Read> {
        match self.read {
            _ if self.tries >= MAX_TRIES => None,
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
        [(10, 1, "/a"), (30, 30, "/b"), (35, 30, "/c"), (50, 50, "/d")]
            .into_iter()
            .for_each(|(at_ns, seen_ns, path)| assert!(objects.add(7, read(at_ns, seen_ns, path), true)));
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
        let of = |walks, read| Lasting { walks, read, ..Lasting::default() }.due();
        assert_eq!([1, 2, 9].map(|walks| of(walks, Read::Nothing)), [None, Some(Read::Object), Some(Read::Object)]);
        assert_eq!([3, 4].map(|walks| of(walks, Read::Object)), [None, Some(Read::Peers)]);
        assert_eq!(of(9, Read::Peers), None);
    }

    #[test]
    fn reading_in_which_the_wait_ends_does_not_replace_the_one_before() {
        let mut objects = ReadObjects::default();
        let within = |from_ns, to_ns, path| ReadObject { from_ns, to_ns, ..read(from_ns, 1, path) };
        for (from_ns, to_ns, path) in [(10, 12, "/a"), (20, 22, "/b"), (30, 39, "/c")] {
            assert!(objects.add(7, within(from_ns, to_ns, path), true));
        }
        let of = |woken_ns| objects.of(WaitSpan { tid: 7, from_ns: Some(5), woken_ns }, Some("read"), false);
        let path = |woken_ns| of(woken_ns).and_then(|object| object.path);
        assert_eq!(
            [40, 35, 21, 11].map(path).each_ref().map(Option::as_deref),
            [Some("/c"), Some("/b"), Some("/a"), None]
        );
    }

    #[test]
    fn memory_is_bounded_of_each_wait_and_of_others() {
        let mut objects = ReadObjects::default();
        for at_ns in 0..1_000 {
            assert!(objects.add(7, read(at_ns, 3, "/long"), true));
        }
        assert_eq!((objects.by_thread[&7].len(), objects.kept), (MAX_KEPT_OF_WAIT, MAX_KEPT_OF_WAIT));
        let kept_of_others = (0..3_000).filter(|&at_ns| objects.add(8, read(at_ns, at_ns, "/other"), false)).count();
        assert_eq!((kept_of_others, objects.kept_of_others), (MAX_KEPT_OF_OTHERS, MAX_KEPT_OF_OTHERS));
        assert!(objects.add(9, read(1, 1, "/first"), true), "others take no room from those that come first");
        let known = Lasting { comes_first: true, walks: 9, ..Lasting::default() };
        assert!(known.is_unread() && Lasting { is_refused: true, read: Read::Object, ..known }.is_unread());
        assert!(
            !Lasting { read: Read::Object, ..known }.is_unread() && !Lasting { has_lock: true, ..known }.is_unread()
        );
    }

    #[test]
    fn lock_of_an_inode_keeps_its_path() {
        let mut objects = ReadObjects::default();
        for (at_ns, path) in [(10, None), (20, Some("/a".to_owned())), (30, None)] {
            let object = Object { path, ..Object::new(ObjectKind::InodeLock) };
            assert!(objects.add(7, ReadObject { object, ..read(at_ns, 6, "") }, true));
        }
        let found = objects.of(WaitSpan { tid: 7, from_ns: Some(5), woken_ns: 99 }, Some("read"), false);
        assert_eq!(found.and_then(|object| object.path).as_deref(), Some("/a"));
    }

    #[test]
    fn walks_over_many_threads_are_rarer() {
        assert_eq!([0, 1_000_000].map(period_after), [PERIOD; 2]);
        assert_eq!(period_after(10_000_000), Duration::from_millis(400));
    }

    #[test]
    fn thread_that_fails_counts_once_and_keeps_what_was_read() {
        let shared = Arc::new(Mutex::new(Shared::default()));
        lock(&shared).objects.add(7, read(10, 1, "/a"), true);
        let (going, (ends, ended)) = (mpsc::channel().0, mpsc::channel());
        drop(ends);
        let objects = LastingWaits { shared, going: Some(going), ended, is_complete: false }.take();
        assert_eq!((objects.kept, objects.unread), (1, 1));
    }

    #[test]
    fn waiter_is_not_the_owner_of_its_mutex() {
        let who = |tid: u32| whylate_model::holders::Holder { who: format!("a:b:{tid}"), ..Default::default() };
        let peers = [7, 8].map(|tid| Peer { process: who(tid), others: 0 }).to_vec();
        let mutex = Object { peers, ..Object::new(ObjectKind::Mutex) };
        assert_eq!(without_waiter(mutex.clone(), 7).peers, mutex.peers[1..]);
        assert_eq!(without_waiter(Object { kind: ObjectKind::Pipe, ..mutex.clone() }, 7).peers, mutex.peers);
    }
}
