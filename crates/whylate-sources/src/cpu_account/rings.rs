// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's rings of intervals and disk requests, read while the kernel writes them.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use whylate_model::path::history::{Moves, Request};

use super::skel::types::{account, disk_request, interval, occupancy_limits, occupant_kind, run_queue_move};
use super::slices::{self, Details};
use crate::kernel::attach::PlainData;
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;

/// Maximum number of intervals of all CPUs, unless the minimum for each CPU exceeds it.
const MAX_INTERVALS: u32 = 1 << 20;
/// Maximum number of reads of an account; an account program takes less than a microsecond.
const ATTEMPTS: usize = 1000;

/// Returns the number of intervals per CPU, as a power of two.
pub(super) fn interval_bits(cpus: u32, is_shared: bool) -> u32 {
    let bits = (MAX_INTERVALS / cpus.max(1)).checked_ilog2().unwrap_or(0);
    let max = if is_shared { occupancy_limits::MAX_SHARED_INTERVAL_BITS } else { occupancy_limits::MAX_INTERVAL_BITS };
    bits.clamp(occupancy_limits::INTERVAL_BITS.0, max.0)
}

/// Returns the number of disk requests and of moves per CPU, as a power of two (`index_of_detail`).
pub(super) fn detail_bits(interval_bits: u32) -> u32 {
    (interval_bits - occupancy_limits::INTERVALS_A_REQUEST_BITS.0).min(occupancy_limits::MAX_REQUEST_BITS.0)
}

/// Mapped rings of all CPUs.
#[derive(Debug)]
pub(super) struct Rings {
    accounts: MappedArray,
    intervals: MappedArray,
    requests: MappedArray,
    moves: MappedArray,
    interval_bits: u32,
    /// Whether this process is in a PID namespace of its own, so that TIDs are translated.
    is_translated: bool,
    pub intervals_lost: AtomicU64,
    pub requests_lost: AtomicU64,
    pub moves_lost: AtomicU64,
}

impl Rings {
    pub(super) fn new(
        accounts: MappedArray,
        intervals: MappedArray,
        requests: MappedArray,
        moves: MappedArray,
        interval_bits: u32,
    ) -> Self {
        Rings {
            accounts,
            intervals,
            requests,
            moves,
            interval_bits,
            is_translated: pid_namespace::own().is_some(),
            intervals_lost: AtomicU64::new(0),
            requests_lost: AtomicU64::new(0),
            moves_lost: AtomicU64::new(0),
        }
    }

    pub(super) fn cpus(&self) -> usize {
        self.accounts.entries()
    }

    /// Returns the capacity of a CPU's ring, in intervals.
    pub(super) fn slots(&self) -> u32 {
        1 << self.interval_bits
    }

    /// Returns the number of intervals written for this CPU so far.
    pub(super) fn written(&self, cpu: usize) -> u32 {
        self.accounts.u32_at(cpu, offset_of!(account, written)).load(Ordering::Acquire)
    }

    /// Returns whether steal time is accounted to each interval, not only at switch-out.
    pub(super) fn has_exact_steal(&self, cpu: usize) -> bool {
        self.accounts.u64_at(cpu, offset_of!(account, steal_seen_ns)).load(Ordering::Relaxed) != 0
    }

    /// Returns a finished interval, or `None` if its slot was reused or never written.
    pub(super) fn interval(&self, cpu: usize, position: u32) -> Option<interval> {
        // The kernel may be writing the next slot already.
        let is_there = || (1..self.slots()).contains(&self.written(cpu).wrapping_sub(position));
        if !is_there() {
            return None;
        }
        let of: interval = self.intervals.copy(ring_index(cpu, position, self.interval_bits))?;
        fence(Ordering::Acquire);
        (is_there() && of.start_ns != 0).then_some(of)
    }

    /// Returns only the start of an interval, or `None` if its slot was reused or never written.
    pub(super) fn start_ns(&self, cpu: usize, position: u32) -> Option<u64> {
        let at = ring_index(cpu, position, self.interval_bits);
        let start_ns = self.intervals.u64_at(at, offset_of!(interval, start_ns)).load(Ordering::Acquire);
        // The kernel may be writing the next slot already.
        let is_there = (1..self.slots()).contains(&self.written(cpu).wrapping_sub(position));
        (is_there && start_ns != 0).then_some(start_ns)
    }

    /// Returns the current interval and the number of intervals written before it; `None` before the first switch.
    pub(super) fn present(&self, cpu: usize) -> Option<(interval, u32)> {
        let mut seen = account::default();
        for _ in 0..ATTEMPTS {
            seen = self.accounts.copy(cpu)?;
            fence(Ordering::Acquire);
            let again: account = self.accounts.copy(cpu)?;
            let is_same = (seen.written, seen.since_ns) == (again.written, again.since_ns);
            if is_same && seen.is_busy == 0 && again.is_busy == 0 {
                return (seen.since_ns != 0).then(|| (self.describe(&seen), seen.written));
            }
            std::hint::spin_loop();
        }
        // It switches all the time, or its vCPU was preempted just here.
        let kind = occupant_kind::OCCUPANT_NOBODY.0 as u8;
        (seen.since_ns != 0).then(|| (interval { start_ns: seen.since_ns, kind, ..interval::default() }, seen.written))
    }

    /// Returns the capacity of a CPU's rings of requests and moves, as a power of two.
    fn detail_bits(&self) -> u32 {
        detail_bits(self.interval_bits)
    }

    /// Reimplements `describe` of `bpf/occupancy.bpf.h`.
    fn describe(&self, of: &account) -> interval {
        let mut to = interval { start_ns: of.since_ns, entry: of.entry, ..interval::default() };
        if of.in_irq != 0 {
            let [late, stack] = [of.lateness.late_ns.to_ne_bytes(), of.lateness.stack.to_ne_bytes()];
            let lateness = std::array::from_fn(|at| if at < 4 { late[at] } else { stack[at - 4] });
            (to.handler, to.id, to.kind) = (u64::from_ne_bytes(lateness), of.irq_id, of.irq_kind);
            to.name = of.irq_name;
        } else if of.softirq != 0 {
            (to.id, to.kind) = (u32::from(of.softirq) - 1, occupant_kind::OCCUPANT_SOFTIRQ.0 as u8);
        } else {
            let work = occupant_kind::OCCUPANT_WORK.0 as u8;
            to.id = if self.is_translated { of.shown_tid } else { of.tid };
            (to.handler, to.kind) = if of.handler != 0 { (of.handler, work) } else { (of.cgroup, of.kind) };
            to.name = of.name;
        }
        to
    }
}

impl Details for Rings {
    /// Returns a request without times if its slot was reused.
    fn request(&self, cpu: u32, position: u32) -> Request {
        let index = ring_index(cpu as usize, position, self.detail_bits());
        let read = read_slot::<disk_request>(&self.requests, index, offset_of!(disk_request, position), position);
        read.map(|of| slices::request(&of)).unwrap_or_else(|| {
            self.requests_lost.fetch_add(1, Ordering::Relaxed);
            Request::default()
        })
    }

    /// Returns `None` if the slot was reused: the whole wait is then attributed to this CPU.
    fn moved(&self, cpu: usize, position: u32) -> Option<Moves> {
        let index = ring_index(cpu, position, self.detail_bits());
        let read = read_slot::<run_queue_move>(&self.moves, index, offset_of!(run_queue_move, position), position);
        read.map(|of| slices::moved(&of)).or_else(|| {
            self.moves_lost.fetch_add(1, Ordering::Relaxed);
            None
        })
    }
}

/// Copies a slot of a ring; `None` if it was reused. `position_at` is the offset of the slot's position.
fn read_slot<T: PlainData>(ring: &MappedArray, index: usize, position_at: usize, position: u32) -> Option<T> {
    let is_there = || index < ring.entries() && ring.u32_at(index, position_at).load(Ordering::Acquire) == position;
    let slot = if is_there() { ring.copy::<T>(index)? } else { return None };
    fence(Ordering::Acquire);
    is_there().then_some(slot)
}

fn ring_index(cpu: usize, position: u32, bits: u32) -> usize {
    (cpu << bits) | (position & ((1 << bits) - 1)) as usize
}

#[cfg(test)]
pub(super) mod fixtures {
    //! Rings that a test writes as the kernel does.

    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    pub const BITS: u32 = 6;
    pub const SLOTS: u32 = 1 << BITS;

    pub struct Kernel {
        accounts: MappedArray,
        intervals: MappedArray,
    }

    /// Creates the rings of one CPU.
    pub fn rings() -> (Rings, Kernel) {
        let file = |entries: usize, bytes: usize| {
            let file = File::from(memfd_create("made up", MemfdFlags::CLOEXEC).expect("there is memory"));
            file.set_len((entries * bytes).next_multiple_of(4096) as u64).expect("there is memory");
            move || MappedArray::new(&file, entries, bytes).expect("it can be mapped")
        };
        let accounts = file(1, size_of::<account>());
        let intervals = file(SLOTS as usize, size_of::<interval>());
        let requests = file(1 << super::detail_bits(BITS), size_of::<disk_request>());
        let moves = file(1 << super::detail_bits(BITS), size_of::<run_queue_move>());
        let kernel = Kernel { accounts: accounts(), intervals: intervals() };
        (Rings::new(accounts(), intervals(), requests(), moves(), BITS), kernel)
    }

    impl Kernel {
        fn put(&self, field: usize, value: u64) {
            self.accounts.u64_at(0, field).store(value, Ordering::Relaxed);
        }

        /// Switches to another thread. Each runs for 10 ns, and its TID is its position.
        pub fn switch(&self) {
            let written_at = self.accounts.u32_at(0, offset_of!(account, written));
            let written = written_at.load(Ordering::Relaxed);
            let busy = self.accounts.u8_at(0, offset_of!(account, is_busy));
            let since_ns = self.accounts.u64_at(0, offset_of!(account, since_ns)).load(Ordering::Relaxed);
            busy.store(1, Ordering::SeqCst);
            let mut now = written;
            if since_ns != 0 {
                let slot = (written % SLOTS) as usize;
                let put = |at: usize, value| self.intervals.u64_at(slot, at).store(value, Ordering::Release);
                put(offset_of!(interval, start_ns), since_ns);
                put(offset_of!(interval, handler), since_ns);
                self.intervals.u32_at(slot, offset_of!(interval, id)).store(written, Ordering::Release);
                let kind = occupant_kind::OCCUPANT_WORK.0 as u8;
                self.intervals.u8_at(slot, offset_of!(interval, kind)).store(kind, Ordering::Release);
                self.intervals.u64_at(slot, offset_of!(interval, entry)).store(since_ns, Ordering::Release);
                now = written.wrapping_add(1);
                written_at.store(now, Ordering::Release);
            }
            self.put(offset_of!(account, since_ns), start_of(now));
            self.put(offset_of!(account, handler), start_of(now));
            self.accounts.u32_at(0, offset_of!(account, tid)).store(now, Ordering::Release);
            busy.store(0, Ordering::SeqCst);
        }
    }

    pub fn start_of(position: u32) -> u64 {
        1_000 + u64::from(position) * 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_bits_bound_total_memory() {
        let cpus = [1, 2, 16, 17, 64, 256, 1024];
        assert_eq!(cpus.map(|cpus| interval_bits(cpus, false)), [16, 16, 16, 15, 14, 12, 12]);
        assert_eq!(cpus.map(|cpus| interval_bits(cpus, true)), [15, 15, 15, 15, 14, 12, 12]);
        assert_eq!(size_of::<interval>() << 20, 64 << 20);
        // Sources that share the account keep as many requests and moves as one alone.
        for is_shared in [false, true] {
            let bits = cpus.map(|cpus| detail_bits(interval_bits(cpus, is_shared)));
            assert_eq!(bits, [12, 12, 12, 12, 11, 9, 9], "{is_shared}");
        }
        assert!((size_of::<disk_request>() + size_of::<run_queue_move>()) << 17 <= 10 << 20);
    }
}
