// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes histograms out of memory in which BPF programs of several CPUs count (`bpf/distribution.bpf.h`).

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use whylate_model::Histogram;
use whylate_model::histogram::BUCKETS;

use crate::kernel::elements;
use crate::kernel::mapped::MappedArray;

const PAGE_BUCKETS: usize = 16;
/// Number of pages with all buckets of a distribution.
pub(crate) const PAGES: usize = BUCKETS / PAGE_BUCKETS;
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
            let number = owners.u32_at(id, self.pages + page * size_of::<u32>()).swap(0, Relaxed) as usize;
            if number != 0 && number < pages.entries() {
                elements::free(pages, number);
            }
        }
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
            let entry = self.offsets.pages + page * size_of::<u32>();
            let number = owners.u32_at(id, entry).load(Acquire) as usize;
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
