// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records the kernel locks for which threads wait, however short the waits are.
//!
//! The tracepoint `contention_begin` is called by a thread that is about to wait for a lock, and `contention_end` when the thread
//! has it. Each sleep in between is for that lock. The owner is read at the beginning; who released the lock last is known by the
//! wakeup edge. Without contention nothing is called.

use std::cell::RefCell;
use std::os::fd::AsFd as _;
use std::rc::Rc;

use anyhow::Context as _;
use libbpf_rs::skel::SkelBuilder as _;
use libbpf_rs::{Link, RingBuffer, RingBufferBuilder};
use whylate_model::holders::Lock;
use whylate_model::path::history::Name;

use self::skel::types::{contended_wait, lock_kind, lock_of};
use self::skel::{ContendedSkel, ContendedSkelBuilder};
use super::lock_waits::{LockOf, LockWait, LockWaits};
use crate::kernel::attach::{self, Loading, PlainData, ProgramStatistics};
use crate::kernel::pid_namespace;
use crate::source::AttachError;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/paths/contended.skel.rs"));
}

/// Describes what is missing where the programs cannot be attached.
pub(crate) fn without_locks(error: &AttachError) -> String {
    format!("short waits for locks of the kernel do not name the lock: {error}")
}

/// The BPF programs, while they are loaded on another thread.
pub(crate) struct LoadingLocks(Option<Loading<ContendedSkel<'static>>>);

/// Records contended locks until dropped.
pub(crate) struct ContendedLocks {
    /// Dropped first, so that no program runs while the rest is dropped.
    _links: Vec<Link>,
    ring: RingBuffer<'static>,
    waits: Rc<RefCell<LockWaits>>,
    skeleton: ContendedSkel<'static>,
    /// Lost waits that were reported.
    lost_reported: u64,
}

impl LoadingLocks {
    /// Starts to load the programs.
    pub(crate) fn begin() -> Self {
        LoadingLocks(Loading::begin(load).ok())
    }

    /// Attaches the programs, which then add to `waits`.
    ///
    /// # Errors
    /// Fails if the kernel lacks the tracepoints (5.19), or refuses the programs.
    pub(crate) fn attach(self, waits: &Rc<RefCell<LockWaits>>) -> Result<ContendedLocks, AttachError> {
        let skeleton = self.0.context("cannot start a thread")?.wait()?;
        let mut builder = RingBufferBuilder::new();
        let theirs = Rc::clone(waits);
        builder.add(&skeleton.maps.contended_waits, move |bytes| {
            if let Some((tid, wait)) = decoded(bytes) {
                theirs.borrow_mut().add(tid, wait);
            }
            0
        })?;
        let ring = builder.build()?;
        // Ends come first, so that nothing begins that does not end.
        let links = vec![skeleton.progs.on_contention_end.attach()?, skeleton.progs.on_contention_begin.attach()?];
        Ok(ContendedLocks { _links: links, ring, waits: Rc::clone(waits), skeleton, lost_reported: 0 })
    }
}

fn load() -> Result<ContendedSkel<'static>, AttachError> {
    let mut open = ContendedSkelBuilder::default().open(attach::open_object())?;
    let settings = open.maps.rodata_data.as_deref_mut().context("the BPF object has no settings")?;
    settings.own_namespace = pid_namespace::as_setting();
    Ok(attach::load(open)?)
}

impl ContendedLocks {
    /// Adds the waits that have ended.
    pub(crate) fn take_in(&self) {
        // A record that cannot be read stays for the next time.
        let _ = self.ring.consume();
    }

    /// Returns the number of waits since the last call of which the lock was not kept.
    pub(crate) fn take_lost(&mut self) -> u64 {
        let counts = self.skeleton.maps.bss_data.as_deref();
        let now = counts.map_or(0, |counts| counts.lost_contended + counts.lost_contending);
        let before = std::mem::replace(&mut self.lost_reported, now);
        now.saturating_sub(before) + self.waits.borrow_mut().take_dropped()
    }

    /// Returns the run time of the programs.
    pub(crate) fn statistics(&self) -> ProgramStatistics {
        let programs = &self.skeleton.progs;
        let all = attach::statistics([programs.on_contention_begin.as_fd(), programs.on_contention_end.as_fd()]);
        // A spinlock's event in an interrupt is skipped while the program runs for another lock. It would record nothing.
        ProgramStatistics { recursion_misses: 0, ..all }
    }
}

/// Decodes a record, which lacks the unused names at its end.
fn decoded(bytes: &[u8]) -> Option<(u32, LockWait)> {
    let mut padded = bytes.to_vec();
    padded.resize(size_of::<contended_wait>().max(bytes.len()), 0);
    let of = attach::read_plain::<contended_wait>(&padded)?;
    let lock = match lock_kind(of.kind.into()) {
        lock_kind::LOCK_MUTEX => Some(Lock::Mutex),
        lock_kind::LOCK_SEMAPHORE => Some(Lock::Semaphore),
        lock_kind::LOCK_RWSEM => Some(Lock::Rwsem),
        lock_kind::LOCK_RWSEM_READERS => Some(Lock::RwsemReaders),
        lock_kind::LOCK_RT_MUTEX => Some(Lock::RtMutex),
        _ => None,
    };
    let part_of = match lock_of(of.lock_of.into()) {
        lock_of::LOCK_OF_MEMORY => LockOf::Memory((of.memory_of != 0).then(|| (of.memory_of, name(&of.memory_name)))),
        lock_of::LOCK_OF_INODE => LockOf::Inode { path: path(&of), device: of.device, is_deleted: of.is_deleted != 0 },
        lock_of::LOCK_OF_PIPE => LockOf::Pipe(of.inode),
        lock_of::LOCK_OF_POSITION => LockOf::Position { path: path(&of), device: of.device },
        _ => LockOf::Unknown,
    };
    let holder = (of.holder != 0).then(|| (of.holder, name(&of.holder_name)));
    let wait = LockWait {
        from_ns: of.from_ns,
        to_ns: of.to_ns,
        address: of.lock,
        lock,
        part_of,
        holder,
        is_waker_uncertain: of.is_waker_uncertain != 0,
        reader: of.reader,
    };
    Some((of.tid, wait))
}

fn name(characters: &[i8; 16]) -> Name {
    Name(characters.map(|character| character as u8))
}

/// Returns the path of an inode within its file system; `None` if it has none. Parts that were cut are shown as `…`.
fn path(of: &contended_wait) -> Option<Box<str>> {
    let names = of.names.get(..usize::from(of.count))?;
    let mut path = String::new();
    if of.is_whole == 0 {
        if names.is_empty() {
            return None;
        }
        path.push('…');
    }
    for name in names.iter().rev() {
        path.push('/');
        let bytes: Vec<u8> = name.iter().flat_map(|word| word.to_ne_bytes()).collect();
        match bytes.iter().position(|&byte| byte == 0) {
            Some(end) => path.push_str(&String::from_utf8_lossy(&bytes[..end])),
            None => path.extend([&String::from_utf8_lossy(&bytes[..bytes.len() - 1]), "…"]),
        }
    }
    Some(if path.is_empty() { "/".into() } else { path.into() })
}

#[allow(unsafe_code)]
// SAFETY: integers and arrays of integers only.
unsafe impl PlainData for contended_wait {}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str], is_whole: bool) -> contended_wait {
        let mut of = contended_wait { count: names.len() as u16, is_whole: is_whole.into(), ..Default::default() };
        for (to, from) in of.names.iter_mut().zip(names) {
            let mut bytes = from.as_bytes().to_vec();
            bytes.resize(size_of_val(to), 0);
            to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, from)| *to = u64::from_ne_bytes(*from));
        }
        of
    }

    #[test]
    fn path_has_the_outermost_name_first() {
        let path = |names: &[&str], is_whole| path(&named(names, is_whole)).map(String::from);
        assert_eq!(path(&["c", "b", "a"], true).as_deref(), Some("/a/b/c"));
        assert_eq!(path(&["c", "b"], false).as_deref(), Some("…/b/c"), "deeper than what is recorded");
        assert_eq!(
            (path(&[], true).as_deref(), path(&[], false)),
            (Some("/"), None),
            "a root, and an inode without a name"
        );
        let cut = "x".repeat(71) + "*";
        assert_eq!(path(&["c", &cut], true), Some(format!("/{}…/c", "x".repeat(71))));
    }

    #[test]
    fn record_without_its_last_names_is_whole() {
        let of = contended_wait { tid: 7, holder: 8, from_ns: 1, to_ns: 2, ..named(&["a"], true) };
        let of = contended_wait { lock_of: lock_of::LOCK_OF_INODE.0 as u8, kind: lock_kind::LOCK_RWSEM.0 as u16, ..of };
        let size = std::mem::offset_of!(contended_wait, names) + size_of_val(&of.names[0]);
        #[allow(unsafe_code)]
        // SAFETY: the record is made of integers, and lives as long as the slice.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const of).cast::<u8>(), size) };
        let (tid, wait) = decoded(bytes).expect("a record");
        let part_of = LockOf::Inode { path: Some("/a".into()), device: 0, is_deleted: false };
        assert_eq!((tid, wait.lock, wait.part_of), (7, Some(Lock::Rwsem), part_of));
        assert_eq!(wait.holder.map(|(tid, _)| tid), Some(8));
    }
}
