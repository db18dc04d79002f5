// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects that were read during waits, and the waits that they belong to.

use std::collections::HashMap;

use whylate_model::object::{Object, ObjectKind};
use whylate_model::path::WaitSpan;

/// Maximum number of readings that are kept of threads that come first, and of others.
const MAX_KEPT: usize = 10_000;
const MAX_KEPT_OF_OTHERS: usize = 2_000;
/// Maximum number of readings that are kept of one wait: the walk in which it ends may make three, which do not count.
const MAX_KEPT_OF_WAIT: usize = 4;

/// Objects that were read while their waits lasted.
#[derive(Debug, Default)]
pub(super) struct ReadObjects {
    /// In order of time.
    by_thread: HashMap<u32, Vec<ReadObject>>,
    kept: usize,
    kept_of_others: usize,
    /// Number of waits of the program or command that lasted without being read in time, and of threads beyond the maximum.
    pub unread: u64,
}

/// An object, and when it was read.
#[derive(Clone, Debug)]
pub(super) struct ReadObject {
    /// The span of time (CLOCK_MONOTONIC) of the reading. The thread waited at some point of it. A wait around it is that
    /// wait; if the wait ended within, what was read may be of a later time.
    pub from_ns: u64,
    pub to_ns: u64,
    /// Time at which a walk first found the wait. It identifies the wait, as TIDs are reused.
    pub seen_ns: u64,
    /// The wait began before the first walk.
    pub is_earlier: bool,
    /// System call, if the thread is in one.
    pub via: Option<String>,
    pub object: Object,
}

impl ReadObjects {
    /// Returns the object of a wait. If its switch-out was not recorded, it has to be one that the first walk found
    /// (`is_earlier`).
    pub(super) fn object_of(&self, wait: WaitSpan, via: Option<&str>, is_earlier: bool) -> Option<Object> {
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

    /// Returns the object of a wait, and forgets what was read of the thread until its end. The waits of a thread have to
    /// be asked for in order of time.
    pub(super) fn take_object_of(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        let object = self.object_of(wait, via, false);
        if let Some(of_thread) = self.by_thread.get_mut(&wait.tid) {
            let before = of_thread.partition_point(|read| read.to_ns < wait.woken_ns);
            of_thread.drain(..before);
            self.kept -= before;
            if of_thread.is_empty() {
                self.by_thread.remove(&wait.tid);
            }
        }
        object
    }

    /// Forgets what was read before this time.
    pub(super) fn forget_before(&mut self, ns: u64) {
        self.by_thread.retain(|_, of_thread| {
            of_thread.retain(|read| read.to_ns >= ns);
            !of_thread.is_empty()
        });
        self.kept = self.by_thread.values().map(Vec::len).sum();
    }

    /// Keeps a reading. Returns whether something is kept of the wait.
    pub(super) fn add(&mut self, tid: u32, mut read: ReadObject, comes_first: bool) -> bool {
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

#[cfg(test)]
impl ReadObject {
    /// Creates a reading of a file in read(2). A wait that was seen at 1 ns is one that the first walk found.
    pub(super) fn of_file(at_ns: u64, seen_ns: u64, path: &str) -> Self {
        let object = Object::with_path(ObjectKind::File, path);
        let via = Some("read".to_owned());
        ReadObject { from_ns: at_ns, to_ns: at_ns, seen_ns, is_earlier: seen_ns == 1, via, object }
    }
}

#[cfg(test)]
impl ReadObjects {
    pub(super) fn kept(&self) -> usize {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(at_ns: u64, seen_ns: u64, path: &str) -> ReadObject {
        ReadObject::of_file(at_ns, seen_ns, path)
    }

    #[test]
    fn object_belongs_to_the_wait_around_the_time_at_which_it_was_read() {
        let mut objects = ReadObjects::default();
        [(10, 1, "/a"), (30, 30, "/b"), (35, 30, "/c"), (50, 50, "/d")]
            .into_iter()
            .for_each(|(at_ns, seen_ns, path)| assert!(objects.add(7, read(at_ns, seen_ns, path), true)));
        let of = |from_ns, woken_ns, via, is_earlier| {
            objects
                .object_of(WaitSpan { tid: 7, from_ns, woken_ns, waker: None }, Some(via), is_earlier)
                .and_then(|object| object.path)
        };
        assert_eq!(of(Some(29), 40, "read", false).as_deref(), Some("/c"), "what was read last of one wait");
        assert_eq!(of(Some(40), 60, "read", false).as_deref(), Some("/d"));
        assert_eq!(of(Some(40), 60, "write", false), None, "another call");
        assert_eq!(of(Some(31), 49, "read", false), None, "a wait in between");
        assert_eq!(of(None, 20, "read", true).as_deref(), Some("/a"));
        assert_eq!(of(None, 40, "read", false), None, "it is not known when the wait began");
        assert_eq!(
            objects.object_of(WaitSpan { tid: 8, from_ns: Some(0), woken_ns: 99, waker: None }, Some("read"), true),
            None
        );
    }

    #[test]
    fn reading_in_which_the_wait_ends_does_not_replace_the_one_before() {
        let mut objects = ReadObjects::default();
        let within = |from_ns, to_ns, path| ReadObject { from_ns, to_ns, ..read(from_ns, 1, path) };
        for (from_ns, to_ns, path) in [(10, 12, "/a"), (20, 22, "/b"), (30, 39, "/c")] {
            assert!(objects.add(7, within(from_ns, to_ns, path), true));
        }
        let of = |woken_ns| {
            objects.object_of(WaitSpan { tid: 7, from_ns: Some(5), woken_ns, waker: None }, Some("read"), false)
        };
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
    }

    #[test]
    fn lock_of_an_inode_keeps_its_path() {
        let mut objects = ReadObjects::default();
        for (at_ns, path) in [(10, None), (20, Some("/a".to_owned())), (30, None)] {
            let object = Object { path, ..Object::new(ObjectKind::InodeLock) };
            assert!(objects.add(7, ReadObject { object, ..read(at_ns, 6, "") }, true));
        }
        let found =
            objects.object_of(WaitSpan { tid: 7, from_ns: Some(5), woken_ns: 99, waker: None }, Some("read"), false);
        assert_eq!(found.and_then(|object| object.path).as_deref(), Some("/a"));
    }

    #[test]
    fn readings_are_taken_in_order_of_the_waits() {
        let mut objects = ReadObjects::default();
        for (at_ns, path) in [(10, "/a"), (20, "/b"), (30, "/c")] {
            assert!(objects.add(7, read(at_ns, at_ns, path), true));
        }
        let mut take = |from_ns, woken_ns| {
            let wait = WaitSpan { tid: 7, from_ns: Some(from_ns), woken_ns, waker: None };
            let object = objects.take_object_of(wait, Some("read"));
            (object.and_then(|object| object.path), objects.kept)
        };
        assert_eq!(take(5, 15), (Some("/a".to_owned()), 2));
        assert_eq!(take(22, 25), (None, 1), "it was read before the wait");
        assert_eq!(take(26, 29), (None, 1), "the next one is kept");
        assert_eq!(take(29, 35), (Some("/c".to_owned()), 0));
        assert!(objects.by_thread.is_empty());
        for at_ns in [40, 50] {
            objects.add(8, read(at_ns, at_ns, "/d"), true);
        }
        objects.forget_before(45);
        assert_eq!(objects.kept, 1);
        objects.forget_before(55);
        assert!(objects.by_thread.is_empty());
    }
}
