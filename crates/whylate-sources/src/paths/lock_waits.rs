// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for kernel locks that are over, and the objects that paths show for them.

use std::collections::{HashMap, VecDeque};

use whylate_model::holders::{Holder, Lock};
use whylate_model::object::{Object, ObjectKind, Peer};
use whylate_model::path::WaitSpan;
use whylate_model::path::history::Name;
use whylate_model::thread::ActorName;

use crate::kernel::mounts::Mounts;
use crate::kernel::symbols::DataSymbols;

/// Maximum number of waits that are kept, some 120 bytes each.
const MAX_KEPT: usize = 100_000;
/// Maximum number of waits that are kept of a thread. It is halved when there are too many of all threads.
const MAX_OF_THREAD: usize = 1 << 14;
const MIN_OF_THREAD: usize = 1 << 4;
/// Maximum number of paths that are remembered.
const MAX_PATHS: usize = 1_000;
/// Maximum time from the wakeup of another waiter to the beginning of a thread's own wait, for which it enqueued by then.
const ENQUEUED_NS: u64 = 1_000_000;

/// What a kernel lock is part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LockOf {
    /// Not known.
    Unknown,
    /// The memory map of the waiter's process, or of another process with this PID and name.
    Memory(Option<(u32, Name)>),
    /// An inode. The path is within the file system, whose device has the kernel's number.
    Inode { path: Option<Box<str>>, device: u32, is_deleted: bool },
    /// A pipe, by its inode.
    Pipe(u64),
    /// The position of an open file.
    Position { path: Option<Box<str>>, device: u32 },
}

/// A part of a contended acquisition of a lock, with one owner at its beginning.
#[derive(Clone, Debug)]
pub(super) struct LockWait {
    /// Start and end (CLOCK_MONOTONIC). Each sleep of the thread in between is for the lock.
    pub from_ns: u64,
    pub to_ns: u64,
    pub address: u64,
    pub lock: Option<Lock>,
    pub part_of: LockOf,
    /// TID and name of the owner at the beginning, if known for certain.
    pub holder: Option<(u32, Name)>,
    /// The waker may be another thread than one that held the lock, such as the sender of a signal, or a waiter for the same
    /// rwsem that gave up.
    pub is_waker_uncertain: bool,
    /// TID of the last reader that had taken an rwsem when a writer began to wait; 0: unknown. It may have released the rwsem.
    pub reader: u32,
    /// The thread had the lock at the end.
    pub is_taken: bool,
}

/// Waits for kernel locks by thread.
pub(crate) struct LockWaits {
    /// In order of time.
    by_thread: HashMap<u32, VecDeque<LockWait>>,
    kept: usize,
    /// Maximum number of waits of a thread.
    max_of_thread: usize,
    /// Number of waits without room since the last call of [`LockWaits::take_dropped`].
    dropped: u64,
    mounts: Option<Mounts>,
    /// Paths in this mount namespace, by device and path within the file system.
    paths: HashMap<(u32, Box<str>), Option<String>>,
    symbols: DataSymbols,
}

impl Default for LockWaits {
    fn default() -> Self {
        LockWaits {
            by_thread: HashMap::new(),
            kept: 0,
            max_of_thread: MAX_OF_THREAD,
            dropped: 0,
            mounts: None,
            paths: HashMap::new(),
            symbols: DataSymbols::default(),
        }
    }
}

impl LockWaits {
    /// Adds a wait. If there are too many, drops the oldest ones of the threads with the most.
    pub(super) fn add(&mut self, tid: u32, wait: LockWait) {
        while self.kept >= MAX_KEPT && self.max_of_thread > MIN_OF_THREAD {
            self.max_of_thread /= 2;
            self.by_thread.values_mut().for_each(|of_thread| {
                let over = of_thread.len().saturating_sub(self.max_of_thread);
                of_thread.drain(..over);
                self.kept -= over;
                self.dropped += over as u64;
            });
        }
        if self.kept >= MAX_KEPT {
            self.dropped += 1;
            return;
        }
        let of_thread = self.by_thread.entry(tid).or_default();
        if of_thread.len() >= self.max_of_thread {
            of_thread.pop_front();
            self.kept -= 1;
            self.dropped += 1;
        }
        of_thread.push_back(wait);
        self.kept += 1;
    }

    /// Forgets waits that ended before this time.
    pub(crate) fn forget_before(&mut self, ns: u64) {
        self.by_thread.retain(|_, of_thread| {
            of_thread.retain(|wait| wait.to_ns >= ns);
            !of_thread.is_empty()
        });
        self.kept = self.by_thread.values().map(VecDeque::len).sum();
        if self.kept < MAX_KEPT / 2 {
            self.max_of_thread = MAX_OF_THREAD;
        }
        // Devices get the numbers of others that are gone.
        self.mounts = None;
        self.paths.clear();
    }

    pub(super) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// Returns the kernel lock for which a thread waited, with what was read in between. If it waited for none, returns
    /// what was read.
    pub(crate) fn object_of(&mut self, wait: WaitSpan, read: Option<Object>) -> Option<Object> {
        let Some(known) = self.wait_around(wait).cloned() else { return read };
        let was_held_by = |waker| self.was_held_by_waker(&known, waker, wait.woken_ns);
        let last = wait.waker.filter(|&(tid, _)| tid != wait.tid && was_held_by(tid));
        let mut object = with_reading(self.object(wait.tid, known), read);
        if let Some((tid, name)) = last {
            object.add_last_holder(ActorName::thread(name.text(), tid).to_string());
        }
        Some(object)
    }

    /// Returns the wait for a lock in which a thread slept.
    fn wait_around(&self, wait: WaitSpan) -> Option<&LockWait> {
        let from_ns = wait.from_ns?;
        let of_thread = self.by_thread.get(&wait.tid)?;
        let at = of_thread.partition_point(|known| known.to_ns < wait.woken_ns);
        of_thread.get(at).filter(|known| known.from_ns <= from_ns)
    }

    /// Returns whether the waker of a sleep held the lock during the wait for certain. The sender of a signal did not, nor
    /// did another waiter for the same rwsem that enqueued, or gave up, and woke those behind it.
    fn was_held_by_waker(&self, wait: &LockWait, waker: u32, woken_ns: u64) -> bool {
        if !wait.is_waker_uncertain || wait.holder.is_some_and(|(tid, _)| tid == waker) {
            return true;
        }
        let mut of_waker = self.by_thread.get(&waker).into_iter().flatten().filter(|of| of.address == wait.address);
        // It had read the lock when the wait began, and does not wait for the lock itself.
        let may_wait = |of: &LockWait| of.to_ns >= woken_ns && of.from_ns <= woken_ns.saturating_add(ENQUEUED_NS);
        if wait.reader == waker && waker != 0 && !of_waker.clone().any(may_wait) {
            return true;
        }
        // It took the lock during the wait.
        of_waker.any(|of| of.is_taken && (wait.from_ns..=woken_ns).contains(&of.to_ns))
    }

    fn object(&mut self, waiter: u32, of: LockWait) -> Object {
        let new = Object::new;
        let object = match of.part_of {
            LockOf::Memory(process) => {
                let process = process.map(|(pid, name)| ActorName::thread(name.text(), pid).to_string());
                Object { process, ..new(ObjectKind::MemoryLock) }
            }
            LockOf::Inode { path, device, is_deleted } => {
                Object { path: self.path(path, device), is_deleted, ..new(ObjectKind::InodeLock) }
            }
            LockOf::Pipe(inode) => Object { inode: Some(inode), ..new(ObjectKind::PipeLock) },
            LockOf::Position { path, device } => {
                Object { path: self.path(path, device), ..new(ObjectKind::PositionLock) }
            }
            LockOf::Unknown => Object { symbol: self.symbols.name(of.address), ..new(ObjectKind::KernelLock) },
        };
        let holder = of.holder.filter(|&(tid, _)| tid != waiter);
        let peer = |(tid, name): (u32, Name)| Peer {
            process: Holder { who: ActorName::thread(name.text(), tid).to_string(), ..Holder::default() },
            others: 0,
        };
        let peers = holder.map(peer).into_iter().collect();
        Object { lock: of.lock, lock_address: Some(of.address), peers, ..object }
    }

    /// Returns the path of a file in this process's mount namespace.
    fn path(&mut self, path: Option<Box<str>>, device: u32) -> Option<String> {
        let key = (device, path?);
        if let Some(known) = self.paths.get(&key) {
            return known.clone();
        }
        // The kernel's own numbers have 20 bits of the minor number.
        let device = (device >> 20, device & ((1 << 20) - 1));
        let found = self.mounts.get_or_insert_with(|| Mounts::of_process("self")).path_of(device, &key.1);
        if self.paths.len() >= MAX_PATHS {
            self.paths.clear();
        }
        self.paths.insert(key, found.clone());
        found
    }
}

/// Returns a lock as recorded at the beginning and the end of the wait, with what was read in between.
fn with_reading(recorded: Object, read: Option<Object>) -> Object {
    let Some(read) = read.filter(Object::is_kernel_lock) else { return recorded };
    let mut peers = read.peers;
    // Later holders come first.
    let others = recorded.peers.iter().filter(|peer| peers.iter().all(|known| known.process.who != peer.process.who));
    let others: Vec<Peer> = others.cloned().collect();
    peers.extend(others);
    if recorded.kind == ObjectKind::KernelLock && read.kind != ObjectKind::KernelLock {
        return Object {
            kind: read.kind,
            path: read.path,
            is_deleted: read.is_deleted,
            process: read.process,
            peers,
            ..recorded
        };
    }
    // The walk has the path that the program opened, and reads whether it still exists.
    let (path, is_deleted) = match recorded.path {
        Some(path) => (Some(path), recorded.is_deleted),
        None => (read.path, read.is_deleted),
    };
    Object { path, is_deleted, peers, ..recorded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(from_ns: u64, to_ns: u64, holder: u32) -> LockWait {
        let holder = Some((holder, Name::new("holder")));
        let (lock, part_of) = (Some(Lock::Mutex), LockOf::Unknown);
        let (is_waker_uncertain, is_taken) = (false, true);
        LockWait { from_ns, to_ns, address: 1, lock, part_of, holder, is_waker_uncertain, reader: 0, is_taken }
    }

    fn holder_of(waits: &mut LockWaits, tid: u32, from_ns: u64, woken_ns: u64) -> Option<String> {
        let object = waits.object_of(WaitSpan { tid, from_ns: Some(from_ns), woken_ns, waker: None }, None)?;
        Some(object.peers.first().map(|peer| peer.process.who.clone()).unwrap_or_default())
    }

    #[test]
    fn lock_belongs_to_the_sleeps_within() {
        let mut waits = LockWaits::default();
        // A mutex passes from one owner to another, and the thread spins in between.
        [wait(10, 20, 1), wait(25, 40, 3), wait(50, 60, 7)].into_iter().for_each(|wait| waits.add(7, wait));
        let mut of = |from_ns, woken_ns| holder_of(&mut waits, 7, from_ns, woken_ns);
        assert_eq!(of(11, 19).as_deref(), Some("holder:1"));
        assert_eq!(of(26, 30).as_deref(), Some("holder:3"));
        assert_eq!(of(31, 39).as_deref(), Some("holder:3"), "two sleeps for one lock");
        assert_eq!([of(21, 24), of(41, 45), of(24, 39), of(11, 30)], [const { None }; 4]);
        assert_eq!(of(51, 59).as_deref(), Some(""), "no thread waits for itself");
        assert_eq!(holder_of(&mut waits, 8, 11, 19), None);
        waits.forget_before(30);
        assert_eq!((waits.kept, holder_of(&mut waits, 7, 11, 19)), (2, None));
    }

    /// Returns the holders of thread 7, which waited from 10 to 20 and was woken at 19.
    fn holders(known: LockWait, of_waker: Vec<LockWait>, waker: u32) -> Vec<String> {
        let mut waits = LockWaits::default();
        waits.add(7, known);
        of_waker.into_iter().for_each(|wait| waits.add(waker, wait));
        let waker = Some((waker, Name::new("waker")));
        let wait = WaitSpan { tid: 7, from_ns: Some(11), woken_ns: 19, waker };
        let object = waits.object_of(wait, None).expect("a lock");
        object.peers.into_iter().map(|peer| peer.process.who).collect()
    }

    #[test]
    fn waker_counts_only_if_it_held_the_lock() {
        assert_eq!(holders(wait(10, 20, 1), vec![], 2), ["waker:2", "holder:1"]);
        assert_eq!(holders(wait(10, 20, 1), vec![], 7), ["holder:1"], "no thread waits for itself");
        let uncertain = LockWait { is_waker_uncertain: true, ..wait(10, 20, 1) };
        assert_eq!(holders(uncertain.clone(), vec![], 2), ["holder:1"], "a signal, or another waiter of an rwsem");
        let by_owner = LockWait { holder: Some((2, Name::new("waker"))), ..uncertain };
        assert_eq!(holders(by_owner, vec![], 2), ["waker:2"]);
    }

    #[test]
    fn waker_held_an_rwsem_if_it_took_it_during_the_wait() {
        let of = |of_waker: LockWait| {
            let known = LockWait { is_waker_uncertain: true, ..wait(10, 20, 1) };
            holders(known, vec![of_waker], 2)
        };
        assert_eq!(of(wait(5, 15, 1)), ["waker:2", "holder:1"], "it waited earlier, and took the rwsem");
        assert_eq!(
            of(LockWait { is_taken: false, ..wait(5, 15, 1) }),
            ["holder:1"],
            "it was killed, and woke the next"
        );
        assert_eq!(of(LockWait { address: 2, ..wait(5, 15, 1) }), ["holder:1"], "another lock");
        assert_eq!(of(wait(5, 9, 1)), ["holder:1"], "it may have released the rwsem before");
        assert_eq!(of(wait(18, 25, 1)), ["holder:1"], "it enqueued, and woke the first waiter");
    }

    #[test]
    fn waker_held_an_rwsem_if_it_was_the_last_reader_when_a_writer_began_to_wait() {
        let known = |reader| LockWait { reader, is_waker_uncertain: true, holder: None, ..wait(10, 20, 1) };
        assert_eq!(holders(known(2), vec![], 2), ["waker:2"]);
        assert!(holders(known(3), vec![], 2).is_empty());
        assert!(holders(known(0), vec![], 0).is_empty(), "unknown, and an interrupt");
        let later = |from_ns, to_ns| vec![LockWait { is_taken: false, ..wait(from_ns, to_ns, 1) }];
        assert!(
            holders(known(2), later(12, 19), 2).is_empty(),
            "it released the rwsem, waited for it again, and gave up"
        );
        assert!(
            holders(known(2), later(21, 30), 2).is_empty(),
            "it enqueued, and its wait is recorded only afterwards"
        );
        assert_eq!(holders(known(2), later(19 + 2 * ENQUEUED_NS, 3 * ENQUEUED_NS), 2), ["waker:2"]);
    }

    #[test]
    fn what_was_read_stays_without_a_contended_lock() {
        let mut waits = LockWaits::default();
        let wait = WaitSpan { tid: 7, from_ns: Some(11), woken_ns: 19, waker: Some((2, Name::new("waker"))) };
        let read = Object::new(ObjectKind::MemoryLock);
        assert_eq!(waits.object_of(wait, Some(read.clone())), Some(read));
        assert_eq!(waits.object_of(wait, None), None);
    }

    #[test]
    fn waits_are_bounded_and_counted() {
        let mut waits = LockWaits::default();
        let many = MAX_OF_THREAD as u64 + 3;
        (0..many).for_each(|at_ns| waits.add(7, wait(at_ns, at_ns, 1)));
        assert_eq!((waits.kept, waits.take_dropped(), waits.take_dropped()), (MAX_OF_THREAD, 3, 0));
        assert_eq!((holder_of(&mut waits, 7, 2, 2), holder_of(&mut waits, 7, 3, 3)), (None, Some("holder:1".into())));

        let (mut waits, threads) = (LockWaits::default(), 20);
        (0..threads * many).for_each(|number| waits.add((number % threads) as u32, wait(number, number, 1)));
        assert!((MAX_KEPT / 2..=MAX_KEPT).contains(&waits.kept), "{}", waits.kept);
        assert_eq!(waits.take_dropped() + waits.kept as u64, threads * many);
        let last = threads * many - 1;
        assert!(holder_of(&mut waits, (last % threads) as u32, last, last).is_some(), "new waits are kept");
        (100..MAX_KEPT as u32 * 2).for_each(|tid| waits.add(tid, wait(1, 1, 1)));
        assert_eq!((waits.kept, waits.max_of_thread), (MAX_KEPT, MIN_OF_THREAD));
        waits.forget_before(2);
        assert_eq!(waits.max_of_thread, MAX_OF_THREAD);
    }

    #[test]
    fn last_holder_comes_first() {
        let object = |who: &[&str]| Object {
            peers: who
                .iter()
                .map(|who| Peer { process: Holder { who: (*who).to_owned(), ..Holder::default() }, others: 0 })
                .collect(),
            ..Object::new(ObjectKind::InodeLock)
        };
        let of = |recorded: &[&str], read: Option<Object>| with_reading(object(recorded), read);
        assert_eq!(of(&["a:1"], Some(object(&["b:2"]))), object(&["b:2", "a:1"]));
        assert_eq!(of(&["a:1"], Some(object(&["a:1"]))), object(&["a:1"]));
        assert_eq!(of(&["a:1"], None), object(&["a:1"]));
        let file = Object::with_path(ObjectKind::File, "/a");
        assert_eq!(of(&[], Some(file)), object(&[]), "what the call is for is not the lock");
        let read = Object { path: Some("/a".to_owned()), ..object(&[]) };
        assert_eq!(of(&[], Some(read.clone())).path.as_deref(), Some("/a"));
        let recorded = Object { lock_address: Some(1), ..Object::new(ObjectKind::KernelLock) };
        let expected = Object { lock_address: Some(1), ..read.clone() };
        assert_eq!(with_reading(recorded, Some(read)), expected, "the walk knows what the lock is part of");
    }
}
