// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the kernel's record of an interval into the model's slice.

use whylate_model::path::events::SOFTIRQS;
use whylate_model::path::history::{
    Blocked, Holder, Move, Moves, Name, Operation, Request, RunSlice, SwitchIn, SwitchOut, Waker,
};
use whylate_model::path::timer::TimerKind;
use whylate_model::wait::Stop;

use super::skel::types::{
    disk_operation, disk_request, entry, entry_kind, interval, lateness, left_bits, occupancy_limits, occupant_kind,
    run_queue_move, stopper,
};
use super::vectors;
use crate::kernel::attach::{self, PlainData};

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for interval {}
// SAFETY: integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for disk_request {}
// SAFETY: integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for run_queue_move {}

const ENTRY_STOPPED: u8 = entry_kind::ENTRY_STOPPED.0 as u8;

/// Records that intervals refer to.
pub(super) trait Details {
    /// Returns the disk request that completed at this position of a CPU's ring.
    fn request(&self, cpu: u32, position: u32) -> Request;

    /// Returns the migration of the thread in the interval at this position of a CPU's ring.
    fn moved(&self, cpu: usize, position: u32) -> Option<Moves>;
}

/// Converts the interval at `position` of a CPU, which ended at `end_ns`.
pub(super) fn slice(of: &interval, end_ns: u64, (cpu, position): (usize, u32), details: &impl Details) -> RunSlice {
    let is_moved = u32::from(of.entry.kind) & entry_kind::ENTRY_MOVED.0 != 0;
    RunSlice {
        start_ns: of.start_ns,
        end_ns,
        holder: holder(of),
        name: name(of),
        entry: entry_of(&of.entry, details),
        moved: is_moved.then(|| details.moved(cpu, position)).flatten(),
        throttled_ns: ns_of_short(of.entry.throttled),
        stopped: stop(u32::from(of.entry.kind & ENTRY_STOPPED) >> entry_kind::ENTRY_STOPPED_SHIFT.0),
        cgroup: (u32::from(of.kind) == occupant_kind::OCCUPANT_THREAD.0).then_some(of.handler),
        exit: exit(of.left.into()),
        steal_ns: of.steal_ns.into(),
        is_in_parents_process: kind_of(&of.entry) == entry_kind::ENTRY_PARENT_OF_THREAD,
        is_member: false,
        is_of_member: false,
    }
}

/// Decodes what `short_of_ns` in `keep_edges.bpf.h` encodes.
fn ns_of_short(short: u8) -> u64 {
    let (doubled, units) = (short >> 5, u64::from(short & 31));
    (if doubled == 0 { units } else { (32 + units) << (doubled - 1) }) << 18
}

fn holder(of: &interval) -> Holder {
    match occupant_kind(of.kind.into()) {
        occupant_kind::OCCUPANT_NOBODY => Holder::Unrecorded,
        occupant_kind::OCCUPANT_IDLE => Holder::Idle,
        occupant_kind::OCCUPANT_WORK => Holder::Work { tid: of.id, handler: of.handler },
        occupant_kind::OCCUPANT_SOFTIRQ => Holder::Softirq,
        occupant_kind::OCCUPANT_DEVICE_IRQ | occupant_kind::OCCUPANT_VECTOR => {
            let lateness: Option<lateness> = attach::read_plain(&of.handler.to_ne_bytes());
            Holder::Irq { late_ns: lateness.map_or(0, |lateness| lateness.late_ns.into()) }
        }
        _ => Holder::Thread(of.id),
    }
}

fn name(of: &interval) -> Name {
    match occupant_kind(of.kind.into()) {
        occupant_kind::OCCUPANT_NOBODY | occupant_kind::OCCUPANT_IDLE => Name::default(),
        occupant_kind::OCCUPANT_SOFTIRQ => Name::new(SOFTIRQS.get(of.id as usize).copied().unwrap_or("softirq")),
        occupant_kind::OCCUPANT_VECTOR => vectors::name_of(of.id).map_or_else(|| terminated_name(&of.name), Name::new),
        _ => terminated_name(&of.name),
    }
}

/// Copies a name without stale bytes after its terminator.
fn terminated_name(name: &[i8; 16]) -> Name {
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(15);
    Name(std::array::from_fn(|at| if at < length { name[at] as u8 } else { 0 }))
}

/// Returns how the thread was switched in, without the flag bits.
fn kind_of(of: &entry) -> entry_kind {
    let flags = entry_kind::ENTRY_OF_ITEM.0 | entry_kind::ENTRY_MOVED.0 | entry_kind::ENTRY_STOPPED.0;
    entry_kind(u32::from(of.kind) & !flags)
}

fn entry_of(of: &entry, details: &impl Details) -> SwitchIn {
    let of_item = entry_kind::ENTRY_OF_ITEM.0 as u8;
    let by = match kind_of(of) {
        entry_kind::ENTRY_GOES_ON => return SwitchIn::GoesOn,
        entry_kind::ENTRY_PREEMPTED => return SwitchIn::Preempted { at_ns: of.woken_ns },
        entry_kind::ENTRY_THREAD => Waker::Thread(of.waker),
        entry_kind::ENTRY_PARENT | entry_kind::ENTRY_PARENT_OF_THREAD => Waker::Parent(of.waker),
        entry_kind::ENTRY_TIMER => Waker::Timer(timer(of.waker)),
        entry_kind::ENTRY_NETWORK => Waker::Network,
        entry_kind::ENTRY_RCU => Waker::Rcu,
        entry_kind::ENTRY_SOFTIRQ => Waker::Softirq,
        entry_kind::ENTRY_IRQ => Waker::Irq,
        entry_kind::ENTRY_DISK => Waker::Disk(details.request(of.waker_cpu.into(), of.waker)),
        _ if of.kind & of_item != 0 => return SwitchIn::GoesOn,
        _ => return SwitchIn::Unseen,
    };
    let (at_ns, cpu) = (of.woken_ns, of.waker_cpu.into());
    if of.kind & of_item == 0 { SwitchIn::Woken { at_ns, by, cpu } } else { SwitchIn::Queued { at_ns, by, cpu } }
}

/// Decodes `enum stopper` (`bpf/stopped.bpf.h`). `None` if the thread was not stopped.
pub(crate) fn stop(number: u32) -> Option<Stop> {
    match stopper(number) {
        stopper::STOPPED_BY_SIGNAL => Some(Stop::Signal),
        stopper::STOPPED_BY_TRACER => Some(Stop::Tracer),
        stopper::STOPPED_BY_FREEZER => Some(Stop::Freezer),
        _ => None,
    }
}

/// Decodes the 1-based index of a timer's function.
fn timer(number: u32) -> TimerKind {
    match occupancy_limits(number) {
        occupancy_limits::DIRTY_THROTTLING => return TimerKind::DirtyThrottling,
        occupancy_limits::MEMORY_LIMIT => return TimerKind::MemoryLimit,
        _ => {}
    }
    let known = (number as usize).checked_sub(1).and_then(|at| TimerKind::FUNCTIONS.get(at));
    known.map_or_else(TimerKind::default, |&(_, kind)| kind)
}

fn exit(left: u32) -> SwitchOut {
    let has = |bits: left_bits| left & bits.0 != 0;
    let syscall = (left & left_bits::LEFT_SYSCALL.0).checked_sub(1);
    match left_bits(left & left_bits::LEFT_HOW.0) {
        left_bits::LEFT_PREEMPTED => SwitchOut::Preempted,
        left_bits::LEFT_DEAD => SwitchOut::Dead,
        left_bits::LEFT_BLOCKED if has(left_bits::LEFT_STOPPED) => SwitchOut::Blocked(Blocked {
            syscall: syscall.map(|number| number as u16),
            is_kernel: has(left_bits::LEFT_IS_KERNEL),
            stop: stop(left >> left_bits::LEFT_STOPPER_SHIFT.0 & 3),
            ..Blocked::default()
        }),
        left_bits::LEFT_BLOCKED => SwitchOut::Blocked(Blocked {
            syscall: syscall.map(|number| number as u16),
            is_uninterruptible: has(left_bits::LEFT_UNINTERRUPTIBLE),
            in_iowait: has(left_bits::LEFT_IN_IOWAIT),
            is_kernel: has(left_bits::LEFT_IS_KERNEL),
            stop: None,
        }),
        _ => SwitchOut::GoesOn,
    }
}

pub(super) fn moved(of: &run_queue_move) -> Moves {
    let of = &of.moves;
    let last = Move { at_ns: of.last_ns, from_cpu: of.last_from };
    let first = (of.first_ns != 0).then_some(Move { at_ns: of.first_ns, from_cpu: of.first_from });
    Moves::recorded(last, first, of.count)
}

pub(super) fn request(of: &disk_request) -> Request {
    Request {
        queued_ns: of.queued_ns,
        issued_ns: of.issued_ns,
        device: of.device,
        operation: match disk_operation(of.operation.into()) {
            disk_operation::DISK_READS => Operation::Read,
            disk_operation::DISK_WRITES => Operation::Write,
            disk_operation::DISK_FLUSHES => Operation::Flush,
            _ => Operation::Other,
        },
        submitter: of.submitter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct FakeDetails;

    impl Details for FakeDetails {
        fn request(&self, cpu: u32, position: u32) -> Request {
            Request { queued_ns: cpu.into(), submitter: position, ..Request::default() }
        }

        fn moved(&self, cpu: usize, position: u32) -> Option<Moves> {
            Some(Moves::one(Move { at_ns: 50 + u64::from(position), from_cpu: cpu as u32 + 1 }))
        }
    }

    fn decoded(of: &interval) -> RunSlice {
        slice(of, 200, (3, 9), &FakeDetails)
    }

    fn thread() -> interval {
        let mut of =
            interval { start_ns: 100, id: 7, kind: occupant_kind::OCCUPANT_THREAD.0 as u8, ..Default::default() };
        of.name[..3].copy_from_slice(&[b'a' as i8, b'b' as i8, 0]);
        // Stale bytes of a longer name.
        of.name[5] = b'x' as i8;
        of
    }

    #[test]
    fn decodes_switch_in_and_switch_out_of_thread() {
        let mut of = thread();
        of.entry = entry { woken_ns: 50, waker: 9, waker_cpu: 3, kind: entry_kind::ENTRY_THREAD.0 as u8, throttled: 0 };
        of.left = (left_bits::LEFT_BLOCKED.0 | left_bits::LEFT_UNINTERRUPTIBLE.0 | (75 + 1)) as u16;
        let slice = decoded(&of);
        assert_eq!(
            (slice.start_ns, slice.end_ns, slice.holder, slice.called()),
            (100, 200, Holder::Thread(7), "ab:7".to_owned())
        );
        assert_eq!(slice.entry, SwitchIn::Woken { at_ns: 50, by: Waker::Thread(9), cpu: 3 });
        of.entry.kind |= entry_kind::ENTRY_OF_ITEM.0 as u8;
        assert_eq!(decoded(&of).entry, SwitchIn::Queued { at_ns: 50, by: Waker::Thread(9), cpu: 3 });
        let blocked = Blocked { syscall: Some(75), is_uninterruptible: true, ..Blocked::default() };
        assert_eq!(slice.exit, SwitchOut::Blocked(blocked));
        assert_eq!(slice.name, Name::new("ab"));
    }

    #[test]
    fn decodes_migration_of_thread() {
        let mut of = thread();
        of.entry = entry { woken_ns: 50, waker: 9, waker_cpu: 3, kind: entry_kind::ENTRY_THREAD.0 as u8, throttled: 0 };
        let entry = decoded(&of).entry;
        assert_eq!(decoded(&of).moved, None);
        of.entry.kind |= entry_kind::ENTRY_MOVED.0 as u8;
        assert_eq!(
            (decoded(&of).moved, decoded(&of).entry),
            (Some(Moves::one(Move { at_ns: 59, from_cpu: 4 })), entry)
        );
        of.entry.kind = (entry_kind::ENTRY_MOVED.0 | entry_kind::ENTRY_PREEMPTED.0) as u8;
        assert_eq!(decoded(&of).entry, SwitchIn::Preempted { at_ns: 50 });
        // A new thread that was first queued on another CPU.
        of.entry.kind = (entry_kind::ENTRY_MOVED.0 | entry_kind::ENTRY_PARENT_OF_THREAD.0) as u8;
        assert!(decoded(&of).is_in_parents_process && decoded(&of).moved.is_some());
    }

    #[test]
    fn decodes_throttled_time_and_cgroup() {
        assert_eq!([0, 1, 31, 32, 63, 64].map(ns_of_short), [0, 1, 31, 32, 63, 64].map(|units| units << 18));
        assert!((1..=u8::MAX).all(|short| ns_of_short(short) > ns_of_short(short - 1)));
        let entry = entry { woken_ns: 50, kind: entry_kind::ENTRY_PREEMPTED.0 as u8, throttled: 2, ..entry::default() };
        let slice = decoded(&interval { handler: 77, entry, ..thread() });
        assert_eq!((slice.throttled_ns, slice.cgroup), (2 << 18, Some(77)));
        assert_eq!(slice.entry, SwitchIn::Preempted { at_ns: 50 });
    }

    #[test]
    fn distinguishes_switch_out_reasons() {
        let left = |bits: u32| decoded(&interval { left: bits as u16, ..thread() }).exit;
        assert_eq!(left(0), SwitchOut::GoesOn);
        assert_eq!(left(left_bits::LEFT_PREEMPTED.0), SwitchOut::Preempted);
        assert_eq!(left(left_bits::LEFT_DEAD.0), SwitchOut::Dead);
        let kernel = left_bits::LEFT_BLOCKED.0 | left_bits::LEFT_IS_KERNEL.0 | left_bits::LEFT_IN_IOWAIT.0;
        let blocked = Blocked { is_kernel: true, in_iowait: true, ..Blocked::default() };
        assert_eq!(left(kernel), SwitchOut::Blocked(blocked));
        // System call 0 is a valid one.
        let read = left(left_bits::LEFT_BLOCKED.0 | 1);
        assert_eq!(read, SwitchOut::Blocked(Blocked { syscall: Some(0), ..Blocked::default() }));
    }

    #[test]
    fn decodes_stop_at_switch_out_and_switch_in() {
        for (number, stop) in [
            (stopper::STOPPED_BY_SIGNAL, Stop::Signal),
            (stopper::STOPPED_BY_TRACER, Stop::Tracer),
            (stopper::STOPPED_BY_FREEZER, Stop::Freezer),
        ] {
            let kind = entry_kind::ENTRY_THREAD.0 | number.0 << entry_kind::ENTRY_STOPPED_SHIFT.0;
            let entry = entry { woken_ns: 60, waker: 9, waker_cpu: 2, kind: kind as u8, throttled: 0 };
            let left = left_bits::LEFT_BLOCKED.0 | left_bits::LEFT_STOPPED.0 | (35 + 1);
            let left = (left | number.0 << left_bits::LEFT_STOPPER_SHIFT.0) as u16;
            let slice = decoded(&interval { entry, left, ..thread() });
            assert_eq!(slice.entry, SwitchIn::Woken { at_ns: 60, by: Waker::Thread(9), cpu: 2 });
            assert_eq!(slice.stopped, Some(stop));
            let blocked = Blocked { syscall: Some(35), stop: Some(stop), ..Blocked::default() };
            assert_eq!(slice.exit, SwitchOut::Blocked(blocked));
        }
    }

    #[test]
    fn decodes_disk_waker_by_request() {
        let kind = entry_kind::ENTRY_DISK.0 as u8;
        let of = interval { entry: entry { woken_ns: 60, waker: 41, waker_cpu: 2, kind, throttled: 0 }, ..thread() };
        let request = Request { queued_ns: 2, submitter: 41, ..Request::default() };
        assert_eq!(decoded(&of).entry, SwitchIn::Woken { at_ns: 60, by: Waker::Disk(request), cpu: 2 });
        let unseen = entry { kind: entry_kind::ENTRY_UNSEEN.0 as u8, ..entry::default() };
        assert_eq!(decoded(&interval { entry: unseen, ..thread() }).entry, SwitchIn::Unseen);
    }

    #[test]
    fn decodes_timer_by_function_index() {
        let by = |waker| {
            let entry = entry { woken_ns: 60, waker, kind: entry_kind::ENTRY_TIMER.0 as u8, ..entry::default() };
            let SwitchIn::Woken { by, .. } = decoded(&interval { entry, ..thread() }).entry else { panic!("woken") };
            by
        };
        for (number, (_, kind)) in (1..).zip(TimerKind::FUNCTIONS) {
            assert_eq!(by(number), Waker::Timer(kind));
        }
        // As the BPF programs take them (GENERIC_TIMERS).
        assert!(TimerKind::FUNCTIONS[..2].iter().all(|(_, kind)| *kind == TimerKind::Wakeup));
        assert_eq!([0, 100, u32::MAX].map(by), [Waker::Timer(TimerKind::Other); 3]);
        assert_eq!(by(255), Waker::Timer(TimerKind::DirtyThrottling));
        assert_eq!(by(254), Waker::Timer(TimerKind::MemoryLimit));
    }

    #[test]
    fn decodes_interrupt_names_and_lateness() {
        let late = u64::from_ne_bytes({
            let mut bytes = [0xff; 8];
            bytes[..4].copy_from_slice(&1234_u32.to_ne_bytes());
            bytes
        });
        let kind = occupant_kind::OCCUPANT_VECTOR.0 as u8;
        let irq = decoded(&interval { kind, id: 0, handler: late, ..thread() });
        assert_eq!((irq.holder, irq.name), (Holder::Irq { late_ns: 1234 }, Name::new("local_timer")));
        let softirq = interval { kind: occupant_kind::OCCUPANT_SOFTIRQ.0 as u8, id: 3, ..thread() };
        assert_eq!((decoded(&softirq).holder, decoded(&softirq).name), (Holder::Softirq, Name::new("net_rx")));
        let unknown = interval { kind: occupant_kind::OCCUPANT_NOBODY.0 as u8, ..thread() };
        assert_eq!((decoded(&unknown).holder, decoded(&unknown).name), (Holder::Unrecorded, Name::default()));
    }
}
