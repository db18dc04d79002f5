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
    /// The waker may be another thread than one that held the lock, such as the sender of a signal.
    pub is_waker_uncertain: bool,
    /// TID of the last reader that had taken an rwsem when the wait ended; 0: unknown.
    pub reader: u32,
}

impl LockWait {
    /// Returns whether the waker of a sleep held the lock until then. A signal's sender did not, nor did a reader that took
    /// an rwsem as soon as it was free, and woke the other readers.
    fn was_held_by_waker(&self, waker: u32) -> bool {
        self.holder.is_some_and(|(tid, _)| tid == waker) || !(self.is_waker_uncertain || self.reader == waker)
    }
}

/// Waits for kernel locks by thread.
#[derive(Default)]
pub(crate) struct LockWaits {
    /// In order of time.
    by_thread: HashMap<u32, VecDeque<LockWait>>,
    kept: usize,
    /// Number of waits without room since the last call of [`LockWaits::take_dropped`].
    dropped: u64,
    mounts: Option<Mounts>,
    symbols: DataSymbols,
}

impl LockWaits {
    pub(super) fn add(&mut self, tid: u32, wait: LockWait) {
        if self.kept >= MAX_KEPT {
            self.dropped += 1;
            return;
        }
        self.by_thread.entry(tid).or_default().push_back(wait);
        self.kept += 1;
    }

    /// Forgets waits that ended before this time.
    pub(crate) fn forget_before(&mut self, ns: u64) {
        self.by_thread.retain(|_, of_thread| {
            of_thread.retain(|wait| wait.to_ns >= ns);
            !of_thread.is_empty()
        });
        self.kept = self.by_thread.values().map(VecDeque::len).sum();
        // Devices get the numbers of others that are gone.
        self.mounts = None;
    }

    pub(super) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// Returns the kernel lock for which a thread waited, with what was read in between. If it waited for none, returns
    /// what was read.
    pub(crate) fn object_of(&mut self, wait: WaitSpan, read: Option<Object>) -> Option<Object> {
        let Some(known) = self.wait_around(wait).cloned() else { return read };
        let last = wait.waker.filter(|&(tid, _)| tid != wait.tid && known.was_held_by_waker(tid));
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
        Object { lock: of.lock, peers: holder.map(peer).into_iter().collect(), ..object }
    }

    /// Returns the path of a file in this process's mount namespace.
    fn path(&mut self, path: Option<Box<str>>, device: u32) -> Option<String> {
        let path = path?;
        // The kernel's own numbers have 20 bits of the minor number.
        let device = (device >> 20, device & ((1 << 20) - 1));
        self.mounts.get_or_insert_with(|| Mounts::of_process("self")).path_of(device, &path)
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
    Object { path: recorded.path.or(read.path), peers, ..recorded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(from_ns: u64, to_ns: u64, holder: u32) -> LockWait {
        let holder = Some((holder, Name::new("holder")));
        let (lock, part_of) = (Some(Lock::Mutex), LockOf::Unknown);
        LockWait { from_ns, to_ns, address: 1, lock, part_of, holder, is_waker_uncertain: false, reader: 0 }
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

    #[test]
    fn waker_counts_only_if_it_held_the_lock() {
        let holders = |known: LockWait, waker: u32| -> Vec<String> {
            let mut waits = LockWaits::default();
            waits.add(7, known);
            let waker = Some((waker, Name::new("waker")));
            let wait = WaitSpan { tid: 7, from_ns: Some(11), woken_ns: 19, waker };
            let object = waits.object_of(wait, None).expect("a lock");
            object.peers.into_iter().map(|peer| peer.process.who).collect()
        };
        assert_eq!(holders(wait(10, 20, 1), 2), ["waker:2", "holder:1"]);
        assert_eq!(holders(wait(10, 20, 1), 7), ["holder:1"], "no thread waits for itself");
        let by_signal = LockWait { is_waker_uncertain: true, ..wait(10, 20, 1) };
        assert_eq!(holders(by_signal, 2), ["holder:1"]);
        let reader = LockWait { reader: 2, ..wait(10, 20, 1) };
        assert_eq!(holders(reader.clone(), 2), ["holder:1"]);
        assert_eq!(holders(reader, 3), ["waker:3", "holder:1"]);
        // A writer may take the lock as a reader right after it.
        let holder = Some((2, Name::new("waker")));
        assert_eq!(holders(LockWait { reader: 2, holder, ..wait(10, 20, 1) }, 2), ["waker:2"]);
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
        (0..MAX_KEPT as u64 + 3).for_each(|at_ns| waits.add(7, wait(at_ns, at_ns, 1)));
        assert_eq!((waits.kept, waits.take_dropped(), waits.take_dropped()), (MAX_KEPT, 3, 0));
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
        assert_eq!(of(&[], Some(read)).path.as_deref(), Some("/a"));
    }
}
