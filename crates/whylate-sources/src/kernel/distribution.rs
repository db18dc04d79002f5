// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes histograms out of memory in which BPF programs of several CPUs count (`bpf/distribution.bpf.h`).

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use anyhow::Context as _;
use libbpf_rs::libbpf_sys::{BPF_F_MMAPABLE, bpf_map_create_opts};
use libbpf_rs::{MapHandle, MapType, OpenMapMut};
use whylate_model::Histogram;
use whylate_model::histogram::BUCKETS;

use crate::kernel::elements;
use crate::kernel::error::AttachError;
use crate::kernel::mapped::MappedArray;

const PAGE_BUCKETS: usize = 16;
/// Number of pages with all buckets of a distribution.
pub(crate) const PAGES: usize = BUCKETS / PAGE_BUCKETS;
/// Maximum number of pages: their numbers have 16 bits (`MAX_PAGES`).
pub(crate) const MAX_PAGES: u32 = 1 << 16;
/// Number of pages that the sources of a session share: 4 MB, about eight for each of the series of `wq`.
const SHARED_PAGES: u32 = 1 << 15;
/// Maximum number of reads. A read takes some microseconds, and values rarely come faster.
const READ_ATTEMPTS: u32 = 16;

/// Position of a counter: the index of its page, and the byte offset in that.
type Position = (usize, usize);
/// A bucket, its counter's position and value.
type Counted = (u32, Position, u64);

/// Offsets of a distribution's fields in its owner, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DistributionOffsets {
    pub sum_ns: usize,
    pub max_ns: usize,
    pub inverted_min_ns: usize,
    pub pages: usize,
}

impl DistributionOffsets {
    /// Offsets of the fields of a `struct distribution` at `at`.
    pub(crate) const fn new(at: usize) -> Self {
        let word = size_of::<u64>();
        DistributionOffsets { sum_ns: at, max_ns: at + word, inverted_min_ns: at + 2 * word, pages: at + 3 * word }
    }

    /// Clears a distribution in which no program counts any more, and frees its pages. Its counts have been taken
    /// before.
    fn clear(&self, owners: &MappedArray, id: usize, pages: &MappedArray) {
        for word in [self.sum_ns, self.max_ns, self.inverted_min_ns] {
            owners.u64_at(id, word).store(0, Relaxed);
        }
        for page in 0..PAGES {
            let number = usize::from(owners.u16_at(id, self.pages + page * size_of::<u16>()).swap(0, Relaxed));
            if number != 0 && number < pages.entries() {
                elements::free(pages, number);
            }
        }
    }
}

/// Pages that the sources of a session share, so that only one of them has to be large. Each source frees series once
/// half of the pages are used, so that none of them leaves the others without. Pages of a source that fails stay taken
/// until the session ends: at most those that it took until its last reading, of which it had freed what was quiet. The
/// others free more series for that, and a value without a page counts as `buckets_full`.
#[derive(Default)]
pub(crate) struct SharedPages(RefCell<Option<MapHandle>>);

impl SharedPages {
    /// Returns the pages for a source that needs `pages` of them: those of the session if it has any, or if the source
    /// needs as many as a session shares. Else the source has its own.
    ///
    /// # Errors
    /// Fails if the kernel refuses the map.
    pub(crate) fn lend(&self, pages: u32) -> Result<BucketPages, AttachError> {
        let mut shared = self.0.borrow_mut();
        if shared.is_none() && pages >= SHARED_PAGES {
            *shared = Some(create_pages()?);
        }
        let map = shared.as_ref().map(|map| map.as_fd().try_clone_to_owned()).transpose();
        Ok(BucketPages { shared: map.context("cannot share the histograms")?, ..BucketPages::of_one(pages) })
    }

    /// Takes over the pages that another session has created.
    pub(crate) fn take_over(&self, before: &SharedPages) {
        let mut shared = self.0.borrow_mut();
        *shared = shared.take().or_else(|| before.0.borrow_mut().take());
    }

    /// Closes the map, which lives while a source uses it.
    pub(crate) fn close(&self) {
        *self.0.borrow_mut() = None;
    }
}

fn create_pages() -> libbpf_rs::Result<MapHandle> {
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as _,
        map_flags: BPF_F_MMAPABLE,
        ..bpf_map_create_opts::default()
    };
    let [key, page] = [size_of::<u32>(), PAGE_BUCKETS * size_of::<u64>()].map(|bytes| bytes as u32);
    MapHandle::create(MapType::Array, Some("bucket_pages"), key, page, SHARED_PAGES, &options)
}

/// The pages of one source.
#[derive(Debug)]
pub(crate) struct BucketPages {
    /// Number of pages of its own.
    pages: u32,
    shared: Option<OwnedFd>,
}

impl BucketPages {
    /// Returns the pages of a source that shares none: `pages`, or as many as can be numbered.
    pub(crate) fn of_one(pages: u32) -> Self {
        BucketPages { pages: pages.min(MAX_PAGES), shared: None }
    }

    /// Returns the number of pages that there are for the source.
    pub(crate) fn limit(&self) -> u32 {
        if self.shared.is_some() { SHARED_PAGES } else { self.pages }
    }

    /// Makes a BPF object use these pages. Returns their number.
    ///
    /// # Errors
    /// Fails if the kernel does not describe the shared pages.
    pub(crate) fn set(&self, bucket_pages: &mut OpenMapMut<'_>) -> libbpf_rs::Result<u32> {
        match &self.shared {
            Some(shared) => bucket_pages.reuse_fd(shared.as_fd())?,
            None => bucket_pages.set_max_entries(self.limit())?,
        }
        Ok(self.limit())
    }
}

/// Distributions of one kind, each in an element of an array.
#[derive(Debug)]
pub(crate) struct Distributions {
    pages: Rc<MappedArray>,
    offsets: DistributionOffsets,
    /// Last values, where only the owning CPU may write the counters.
    seen: Option<SeenCounters>,
    /// Nanoseconds by which a sum exceeded its counts: a count came in late, and is taken the next time.
    owed_ns: HashMap<usize, i64>,
}

/// Values of counters at the last reading.
#[derive(Debug, Default)]
struct SeenCounters {
    counts: HashMap<Position, u64>,
    sums_ns: HashMap<usize, u64>,
}

/// Takes the growth of a counter since the last reading.
fn take_counter(counter: &AtomicU64, value: u64, seen: Option<&mut u64>) -> u64 {
    match seen {
        Some(seen) => value.wrapping_sub(std::mem::replace(seen, value)),
        None => {
            counter.fetch_sub(value, Relaxed);
            value
        }
    }
}

impl Distributions {
    pub(crate) fn new(pages: Rc<MappedArray>, offsets: DistributionOffsets) -> Self {
        Distributions { pages, offsets, seen: None, owed_ns: HashMap::new() }
    }

    /// Leaves counts and sums in place, as only the owning CPU may write them.
    pub(crate) fn without_writing(self) -> Self {
        Distributions { seen: Some(SeenCounters::default()), ..self }
    }

    /// Takes all counts since the last call.
    pub(crate) fn take(&mut self, owners: &MappedArray, id: usize) -> Histogram {
        let (buckets, sum_ns) = self.read(owners, id);
        let mut counts: Vec<(u32, u64)> = Vec::with_capacity(buckets.len());
        for (bucket, position, value) in buckets {
            let seen = self.seen.as_mut().map(|seen| seen.counts.entry(position).or_default());
            let count = take_counter(self.pages.u64_at(position.0, position.1), value, seen);
            counts.extend((count > 0).then_some((bucket, count)));
        }
        if counts.is_empty() {
            // A sum without counts belongs to a count that is still to come.
            return Histogram::default();
        }
        let seen = self.seen.as_mut().map(|seen| seen.sums_ns.entry(id).or_default());
        let sum_ns = take_counter(owners.u64_at(id, self.offsets.sum_ns), sum_ns, seen);
        let owed_ns = self.owed_ns.remove(&id).unwrap_or(0);
        let sum_ns = sum_ns.saturating_add_signed(owed_ns);
        // Extremes are raised by compare-and-exchange everywhere.
        let max_ns = owners.u64_at(id, self.offsets.max_ns).swap(0, Relaxed);
        let min_ns = !owners.u64_at(id, self.offsets.inverted_min_ns).swap(0, Relaxed);
        // The indices ascend, so the buckets are valid.
        let histogram = Histogram::from_buckets(counts, sum_ns, min_ns, max_ns).unwrap_or_default();
        let rest_ns = i128::from(sum_ns) - i128::try_from(histogram.sum_ns()).unwrap_or(i128::MAX);
        if let (false, Ok(rest_ns)) = (rest_ns == 0, i64::try_from(rest_ns)) {
            self.owed_ns.insert(id, rest_ns);
        }
        histogram
    }

    /// Takes the rest of a distribution in which no program counts any more, and frees its pages.
    pub(crate) fn release(&mut self, owners: &MappedArray, id: usize) -> Histogram {
        let rest = self.take(owners, id);
        self.owed_ns.remove(&id);
        self.offsets.clear(owners, id, &self.pages);
        rest
    }

    /// Reads the nonzero counters and the sum while no program counts; the last attempt returns them regardless.
    fn read(&self, owners: &MappedArray, id: usize) -> (Vec<Counted>, u64) {
        let mut before = self.read_buckets(owners, id);
        if before.is_empty() {
            return (before, 0);
        }
        for attempt in 1.. {
            let sum_ns = owners.u64_at(id, self.offsets.sum_ns).load(Acquire);
            let after = self.read_buckets(owners, id);
            if before == after || attempt == READ_ATTEMPTS {
                return (before, sum_ns);
            }
            before = after;
        }
        unreachable!("the last attempt returns")
    }

    fn read_buckets(&self, owners: &MappedArray, id: usize) -> Vec<Counted> {
        let mut buckets = Vec::new();
        for page in 0..PAGES {
            let entry = self.offsets.pages + page * size_of::<u16>();
            let number = usize::from(owners.u16_at(id, entry).load(Acquire));
            if number == 0 || number >= self.pages.entries() {
                continue;
            }
            for bucket in 0..PAGE_BUCKETS {
                let offset = bucket * size_of::<u64>();
                let value = self.pages.u64_at(number, offset).load(Acquire);
                if value > 0 {
                    buckets.push(((page * PAGE_BUCKETS + bucket) as u32, (number, offset), value));
                }
            }
        }
        buckets
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use libbpf_rs::MapInfo;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// Returns the ID of the map that a source shares.
    fn shared_id(pages: &BucketPages) -> Option<u32> {
        Some(MapInfo::new(pages.shared.as_ref()?.as_fd()).expect("the kernel describes it").info.id)
    }

    #[test]
    fn pages_of_one_source_have_numbers_of_16_bits() {
        assert_eq!(BucketPages::of_one(8).limit(), 8);
        for pages in [MAX_PAGES - 1, MAX_PAGES, MAX_PAGES + 1, u32::MAX] {
            let limit = BucketPages::of_one(pages).limit();
            assert_eq!(limit, pages.min(65_536));
            assert!(u16::try_from(limit - 1).is_ok(), "{pages}");
        }
    }

    #[test]
    fn source_with_few_pages_shares_those_of_one_with_many() {
        let (session, later) = (SharedPages::default(), SharedPages::default());
        assert!(session.lend(8).expect("nothing is created").shared.is_none());
        let many = match session.lend(MAX_PAGES) {
            Ok(many) => many,
            Err(AttachError::NotPermitted) => {
                return println!("skipped: BPF maps cannot be created here (run as root)");
            }
            Err(error) => panic!("{error}"),
        };
        let id = shared_id(&many).expect("it is shared");
        assert_eq!((many.limit(), session.lend(8).expect("it is shared").limit()), (SHARED_PAGES, SHARED_PAGES));
        assert_eq!(shared_id(&session.lend(8).expect("it is shared")), Some(id));
        later.take_over(&session);
        assert_eq!(shared_id(&later.lend(MAX_PAGES).expect("it is shared")), Some(id));
        later.close();
        assert!(later.lend(8).expect("nothing is created").shared.is_none());
        // It lives while a source uses it.
        assert_eq!(shared_id(&many), Some(id));
    }

    #[test]
    fn released_distribution_frees_its_pages() {
        const OWNER: usize = 1;
        let memory = |name: &str| {
            let memory = File::from(memfd_create(name, MemfdFlags::CLOEXEC).expect("memory for a test"));
            ftruncate(&memory, 4096).expect("memory for a test");
            memory
        };
        let offsets = DistributionOffsets::new(0);
        let owners = MappedArray::new(memory("owners"), 2, offsets.pages + (PAGES + 1) * size_of::<u16>());
        let owners = owners.expect("it is mapped");
        let pages = MappedArray::new(memory("pages"), 8, PAGE_BUCKETS * size_of::<u64>()).expect("it is mapped");
        let pages = Rc::new(pages);
        // Two pages are allocated, the first one for twice 3 ns; a third one is of another distribution.
        for (entry, page) in [(0, 1), (1, 2)] {
            owners.u16_at(OWNER, offsets.pages + entry * size_of::<u16>()).store(page, Relaxed);
        }
        let in_use = 3 << 32 | 3;
        pages.u64_at(0, size_of::<u64>()).store(in_use, Relaxed);
        pages.u64_at(1, 3 * size_of::<u64>()).store(2, Relaxed);
        owners.u64_at(OWNER, offsets.sum_ns).store(6, Relaxed);
        owners.u64_at(OWNER, offsets.max_ns).store(3, Relaxed);
        owners.u64_at(OWNER, offsets.inverted_min_ns).store(!3, Relaxed);
        let mut distributions = Distributions::new(Rc::clone(&pages), offsets);
        assert_eq!(elements::in_use(&pages), 3);
        let rest = distributions.release(&owners, OWNER);
        assert_eq!((rest.count(), rest.sum_ns(), rest.max_ns()), (2, 6, 3));
        assert_eq!(elements::in_use(&pages), 1);
        assert!(distributions.release(&owners, OWNER).is_empty());
        assert_eq!(elements::in_use(&pages), 1);
    }
}
