// SPDX-License-Identifier: MIT OR Apache-2.0
//! Frees elements of arrays that BPF programs allocate (`bpf/elements.bpf.h`), so that tables of series never stay
//! full.

use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use crate::kernel::attach;
use crate::kernel::mapped::MappedArray;

/// State of an element that counts (`ELEMENT_COUNTS`).
const COUNTS: u64 = u64::MAX;

/// Free list at the start of element 0 (`struct element_list`).
#[repr(C)]
struct List {
    head: u64,
    used: u32,
    in_use: u32,
}

/// Adds an element to the free list: its first word becomes the index of the next free element.
pub(crate) fn free(array: &MappedArray, index: usize) {
    let head = array.u64_at(0, offset_of!(List, head));
    let mut before = head.load(Acquire);
    loop {
        array.u64_at(index, 0).store(before & u64::from(u32::MAX), Relaxed);
        let after = ((before >> 32).wrapping_add(1) << 32) | index as u64;
        match head.compare_exchange_weak(before, after, AcqRel, Acquire) {
            Ok(_) => break,
            Err(now) => before = now,
        }
    }
    array.u32_at(0, offset_of!(List, in_use)).fetch_sub(1, AcqRel);
}

/// Returns the number of elements in use.
pub(crate) fn in_use(array: &MappedArray) -> usize {
    array.u32_at(0, offset_of!(List, in_use)).load(Relaxed) as usize
}

/// Kernel operations that `Elements` needs.
pub(crate) trait Kernel {
    /// Returns the index that the hash map has for a key.
    fn index_of(&self, key: &[u8]) -> Option<u32>;
    fn delete(&self, key: &[u8]);
    /// Waits until every program that runs now has ended.
    fn wait_for_programs(&self);
}

/// A hash map from keys to indices.
pub(crate) struct IndexByKey(MapHandle);

impl Kernel for IndexByKey {
    fn index_of(&self, key: &[u8]) -> Option<u32> {
        let index = self.0.lookup(key, MapFlags::ANY).ok()??;
        Some(u32::from_ne_bytes(index.try_into().ok()?))
    }

    fn delete(&self, key: &[u8]) {
        // A missing key needs no deletion.
        let _ = self.0.delete(key);
    }

    fn wait_for_programs(&self) {
        attach::wait_for_programs();
    }
}

/// Elements in which programs count, found by a key.
pub(crate) struct Elements<K = IndexByKey> {
    pub array: MappedArray,
    /// Byte range of the key in an element; a multiple of 4.
    key: Range<usize>,
    /// Maximum number of elements in use.
    limit: usize,
    /// Pages of their histograms, which elements of other sources may use as well.
    pages: Option<Rc<MappedArray>>,
    kernel: K,
}

impl Elements {
    /// Opens the hash map.
    ///
    /// # Errors
    /// Fails if the kernel refuses another descriptor.
    pub fn new(
        array: MappedArray,
        key: Range<usize>,
        limit: u32,
        index_by_key: &libbpf_rs::MapMut<'_>,
    ) -> io::Result<Self> {
        let map = MapHandle::try_from(index_by_key).map_err(io::Error::other)?;
        let limit = (limit as usize).min(array.entries());
        Ok(Elements { limit, array, key, pages: None, kernel: IndexByKey(map) })
    }
}

impl<K: Kernel> Elements<K> {
    /// Frees elements also if few of these pages are left, as an element may have many pages.
    pub fn with_pages(self, pages: Rc<MappedArray>) -> Self {
        Elements { pages: Some(pages), ..self }
    }

    /// Returns the indices of elements that count.
    pub fn counting(&self) -> Vec<usize> {
        (1..self.limit).filter(|&index| self.array.u64_at(index, 0).load(Acquire) == COUNTS).collect()
    }

    /// Tests whether unused elements should be freed.
    pub fn is_half_full(&self) -> bool {
        self.are_in_use(1, 2)
    }

    /// Tests whether all elements should be freed: series that still count get new ones.
    pub fn is_nearly_full(&self) -> bool {
        self.are_in_use(3, 4)
    }

    /// Tests whether this share of the elements or of the pages is in use.
    fn are_in_use(&self, parts: usize, of: usize) -> bool {
        let are = |array, limit| in_use(array) * of >= limit * parts;
        are(&self.array, self.limit) || self.pages.as_ref().is_some_and(|pages| are(pages, pages.entries()))
    }

    /// Frees elements that count. `take_last` takes the rest of each, once no program counts in it any more, and clears
    /// its counters.
    pub fn free(&self, unused: &[usize], mut take_last: impl FnMut(&MappedArray, usize)) {
        if unused.is_empty() {
            return;
        }
        for &index in unused {
            let words = self.key.clone().step_by(4);
            let key: Vec<u8> =
                words.clone().flat_map(|at| self.array.u32_at(index, at).load(Relaxed).to_ne_bytes()).collect();
            if self.kernel.index_of(&key) == Some(index as u32) {
                self.kernel.delete(&key);
            }
            // After the entry is deleted: a program that finds the cleared key creates a new series, for which the hash
            // map has room.
            self.array.u64_at(index, 0).store(0, Release);
            words.for_each(|at| self.array.u32_at(index, at).store(0, Relaxed));
        }
        self.kernel.wait_for_programs();
        for &index in unused {
            take_last(&self.array, index);
            free(&self.array, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::rc::Rc;

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const KEY: usize = 8;
    const COUNT: usize = 16;
    const ELEMENT: usize = 24;

    /// State of a program; each step is one access to shared memory.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        LookUp,
        ReadIndex { slot: usize },
        CompareKey { index: usize, is_last_chance: bool },
        Take,
        WriteKey { index: usize, word: usize },
        Insert { index: usize },
        LookUpAgain,
        ReadIndexAgain { slot: usize },
        Publish { index: usize },
        Count { index: usize },
    }

    /// A kernel with running programs that follow `bpf/elements.bpf.h`.
    struct World {
        array: MappedArray,
        limit: usize,
        /// Entries of the hash map. A deleted entry's memory is reused at once.
        slots: RefCell<Vec<(Option<u32>, usize)>>,
        programs: RefCell<Vec<(u32, Step)>>,
        counted: RefCell<BTreeMap<u32, u64>>,
        lost: Cell<u64>,
        /// Whether no further program starts.
        are_last: Cell<bool>,
        random: Cell<u64>,
    }

    impl World {
        fn next(&self, below: usize) -> usize {
            let mut random = self.random.get();
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            self.random.set(random);
            (random >> 11) as usize % below
        }

        fn slot_of(&self, key: u32) -> Option<usize> {
            self.slots.borrow().iter().position(|slot| slot.0 == Some(key))
        }

        fn key_in(&self, index: usize) -> [u32; 2] {
            [KEY, KEY + 4].map(|at| self.array.u32_at(index, at).load(Relaxed))
        }

        fn take(&self) -> Option<usize> {
            let head = self.array.u64_at(0, 0);
            let first = head.load(Relaxed) as u32 as usize;
            let index = if first != 0 {
                let next = self.array.u64_at(first, 0).load(Relaxed);
                head.store(((head.load(Relaxed) >> 32) + 1) << 32 | u64::from(next as u32), Relaxed);
                self.array.u64_at(first, 0).store(0, Relaxed);
                first
            } else {
                let used = self.array.u32_at(0, offset_of!(List, used));
                let index = used.load(Relaxed) as usize + 1;
                if index >= self.limit {
                    return None;
                }
                used.fetch_add(1, Relaxed);
                index
            };
            self.array.u32_at(0, offset_of!(List, in_use)).fetch_add(1, Relaxed);
            Some(index)
        }

        /// Runs one step of a program with this key; `None` if the program ends.
        fn after(&self, key: u32, step: Step) -> Option<Step> {
            let lose = || {
                self.lost.set(self.lost.get() + 1);
                None
            };
            match step {
                Step::LookUp => Some(self.slot_of(key).map_or(Step::Take, |slot| Step::ReadIndex { slot })),
                Step::ReadIndex { slot } => {
                    Some(Step::CompareKey { index: self.slots.borrow()[slot].1, is_last_chance: false })
                }
                Step::CompareKey { index, .. } if self.key_in(index) == [key, !key] => Some(Step::Count { index }),
                Step::CompareKey { is_last_chance: true, .. } => lose(),
                Step::CompareKey { .. } => Some(Step::Take),
                Step::Take => match self.take() {
                    Some(index) => Some(Step::WriteKey { index, word: 0 }),
                    None => lose(),
                },
                Step::WriteKey { index, word } => {
                    self.array.u32_at(index, KEY + word * 4).store([key, !key][word], Relaxed);
                    Some(if word == 0 { Step::WriteKey { index, word: 1 } } else { Step::Insert { index } })
                }
                Step::Insert { index } if self.slot_of(key).is_none() => {
                    let mut slots = self.slots.borrow_mut();
                    let free = slots.iter().position(|slot| slot.0.is_none());
                    slots[free.expect("as many entries as elements")] = (Some(key), index);
                    Some(Step::Publish { index })
                }
                Step::Insert { index } => {
                    [KEY, KEY + 4].into_iter().for_each(|at| self.array.u32_at(index, at).store(0, Relaxed));
                    free(&self.array, index);
                    Some(Step::LookUpAgain)
                }
                Step::LookUpAgain => self.slot_of(key).map(|slot| Step::ReadIndexAgain { slot }).or_else(lose),
                Step::ReadIndexAgain { slot } => {
                    Some(Step::CompareKey { index: self.slots.borrow()[slot].1, is_last_chance: true })
                }
                Step::Publish { index } => {
                    self.array.u64_at(index, 0).store(COUNTS, Relaxed);
                    Some(Step::Count { index })
                }
                Step::Count { index } => {
                    self.array.u64_at(index, COUNT).fetch_add(1, Relaxed);
                    *self.counted.borrow_mut().entry(key).or_default() += 1;
                    None
                }
            }
        }

        fn advance(&self, program: usize) {
            let (key, step) = self.programs.borrow()[program];
            match self.after(key, step) {
                Some(step) => self.programs.borrow_mut()[program].1 = step,
                None => drop(self.programs.borrow_mut().swap_remove(program)),
            }
        }

        fn end_programs(&self) {
            loop {
                let programs = self.programs.borrow().len();
                if programs == 0 {
                    break;
                }
                self.advance(self.next(programs));
            }
        }

        /// Starts and advances programs in random order.
        fn run_some(&self, keys: u32) {
            for _ in 0..self.next(12) {
                let programs = self.programs.borrow().len();
                if !self.are_last.get() && programs < 4 && self.next(3) == 0 {
                    self.programs.borrow_mut().push((1 + self.next(keys as usize) as u32, Step::LookUp));
                } else if programs > 0 {
                    self.advance(self.next(programs));
                }
            }
        }
    }

    struct Simulated {
        world: Rc<World>,
        keys: u32,
    }

    impl Kernel for Simulated {
        fn index_of(&self, key: &[u8]) -> Option<u32> {
            self.world.run_some(self.keys);
            let slot = self.world.slot_of(u32::from_ne_bytes(key[..4].try_into().ok()?))?;
            Some(self.world.slots.borrow()[slot].1 as u32)
        }

        fn delete(&self, key: &[u8]) {
            self.world.run_some(self.keys);
            let key = u32::from_ne_bytes(key[..4].try_into().expect("a key has eight bytes"));
            let slot = self.world.slot_of(key).expect("it is there");
            self.world.slots.borrow_mut()[slot].0 = None;
            self.world.run_some(self.keys);
        }

        fn wait_for_programs(&self) {
            let running = self.world.programs.borrow().len();
            self.world.run_some(self.keys);
            // More of them than necessary.
            self.world.end_programs();
            (0..=running).for_each(|_| self.world.run_some(self.keys));
        }
    }

    fn elements(limit: usize, keys: u32, random: u64) -> (Rc<World>, Elements<Simulated>) {
        let memory = File::from(memfd_create("elements", MemfdFlags::CLOEXEC).expect("memory for a test"));
        ftruncate(&memory, 4096).expect("memory for a test");
        let map = || MappedArray::new(&memory, limit, ELEMENT).expect("it is mapped");
        let world = Rc::new(World {
            array: map(),
            limit,
            slots: RefCell::new(vec![(None, 0); limit]),
            programs: RefCell::default(),
            counted: RefCell::default(),
            lost: Cell::new(0),
            are_last: Cell::new(keys == 0),
            random: Cell::new(random | 1),
        });
        let kernel = Simulated { world: Rc::clone(&world), keys };
        (world, Elements { array: map(), key: KEY..COUNT, limit, pages: None, kernel })
    }

    /// Takes the counts since the last call by key, as sources do it.
    fn take(elements: &Elements<Simulated>, taken: &mut BTreeMap<u32, u64>) {
        let mut unused = Vec::new();
        let mut add = |key, count| *taken.entry(key).or_default() += count;
        for index in elements.counting() {
            let key = elements.array.u32_at(index, KEY).load(Relaxed);
            let count = elements.array.u64_at(index, COUNT).swap(0, Relaxed);
            add(key, count);
            if count == 0 || elements.is_nearly_full() {
                unused.push((index, key));
            }
        }
        if elements.is_half_full() {
            let indices: Vec<usize> = unused.iter().map(|&(index, _)| index).collect();
            elements.free(&indices, |array, index| {
                let rest = array.u64_at(index, COUNT).swap(0, Relaxed);
                unused.iter().filter(|&&(unused, _)| rest > 0 && unused == index).for_each(|&(_, key)| add(key, rest));
            });
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]
        #[test]
        fn each_event_counts_once_under_its_key_in_any_order(
            random: u64, limit in 2..8_usize, keys in 1..12_u32, rounds in 1..60_usize,
        ) {
            let (world, elements) = elements(limit, keys, random);
            let mut taken = BTreeMap::new();
            for _ in 0..rounds {
                world.run_some(keys);
                take(&elements, &mut taken);
            }
            world.are_last.set(true);
            world.end_programs();
            take(&elements, &mut taken);
            taken.retain(|_, count| *count > 0);
            prop_assert_eq!(&taken, &*world.counted.borrow());
        }
    }

    #[test]
    fn later_keys_replace_unused_ones() {
        let (world, elements) = elements(8, 0, 1);
        let mut taken = BTreeMap::new();
        for key in 1..=1_000 {
            world.programs.borrow_mut().push((key, Step::LookUp));
            world.end_programs();
            take(&elements, &mut taken);
        }
        assert_eq!((taken.len(), world.lost.get()), (1_000, 0));
    }

    #[test]
    fn freed_element_is_allocated_next() {
        let (world, elements) = elements(4, 0, 1);
        let all: Vec<_> = std::iter::from_fn(|| world.take()).collect();
        assert_eq!((all, elements.is_half_full()), (vec![1, 2, 3], true));
        [3, 1].into_iter().for_each(|index| free(&elements.array, index));
        assert!(!elements.is_half_full());
        assert_eq!(std::iter::from_fn(|| world.take()).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn few_free_pages_require_room_of_each_source_that_shares_them() {
        let memory = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).expect("memory for a test"));
        ftruncate(&memory, 4096).expect("memory for a test");
        let pages = Rc::new(MappedArray::new(&memory, 8, 128).expect("it is mapped"));
        let sources = [1, 2].map(|random| elements(64, 0, random));
        sources.iter().for_each(|(world, _)| assert_eq!(world.take(), Some(1)));
        let sources = sources.map(|(_, elements)| elements.with_pages(Rc::clone(&pages)));
        let states = || sources.each_ref().map(|source| (source.is_half_full(), source.is_nearly_full()));
        for (used, is_half, is_nearly) in [(0, false, false), (3, false, false), (4, true, false), (6, true, true)] {
            pages.u32_at(0, offset_of!(List, in_use)).store(used, Relaxed);
            assert_eq!(states(), [(is_half, is_nearly); 2], "{used} pages");
        }
        [1, 2, 3].into_iter().for_each(|page| free(&pages, page));
        assert_eq!((in_use(&pages), states()), (3, [(false, false); 2]));
    }
}
