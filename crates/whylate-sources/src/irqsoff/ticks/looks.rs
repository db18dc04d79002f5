// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks into sections with interrupts off, by NMIs: a CPU whose timer is overdue has its present stack taken. On
//! machines with a PMU alone, on x86, where its interrupt is an NMI.

use std::os::fd::{BorrowedFd, OwnedFd};

use anyhow::Context as _;

use crate::perf_event::{count_kernel_cycles, run_at};
use crate::source::AttachError;

/// Of the kernel's code on a CPU, from one look to the next: 2 ms at 4 GHz. A look tells from when the timer is overdue
/// on: a section that takes a period of the timer and `from_ns` more is looked into, others by chance.
const CYCLES: u64 = 8_000_000;

/// One event on each CPU, until it is dropped; none where nobody looks.
#[derive(Debug, Default)]
pub(super) struct Looks {
    events: Vec<(u32, OwnedFd)>,
    /// They are timers, which come in where interrupts are on: for tests alone.
    are_timers: bool,
}

impl Looks {
    /// They begin with [`start`](Self::start). The error is why there can be none here.
    pub(super) fn open(cpus: &[u32]) -> Result<Self, String> {
        if !cfg!(target_arch = "x86_64") {
            return Err("only on x86 is the cycle counter's interrupt sure to be an NMI".to_owned());
        }
        let events = cpus.iter().map(|&cpu| Ok((cpu, count_kernel_cycles(cpu, CYCLES)?)));
        let events = events.collect::<std::io::Result<_>>().map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV) => {
                format!("there is no cycle counter that could (perf_event_open: {error})")
            }
            _ => format!("the cycle counter cannot be used for it (perf_event_open: {error})"),
        })?;
        Ok(Looks { events, are_timers: false })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// They take a stack only where interrupts are off.
    pub(super) fn prove(&self) -> bool {
        !self.are_timers
    }

    /// From now on this program runs at each.
    pub(super) fn start(&self, program: BorrowedFd<'_>) -> Result<(), AttachError> {
        let attach = |(_, event): &(u32, OwnedFd)| run_at(event, program);
        Ok(self.events.iter().try_for_each(attach).context("cannot have a program look into sections")?)
    }

    /// On a CPU that was offline and has lost its event. Whether nothing is missing there now.
    pub(super) fn restart(&mut self, cpu: u32, program: BorrowedFd<'_>) -> bool {
        let Some(lost) = self.events.iter_mut().find(|(of, _)| *of == cpu) else { return true };
        let event = count_kernel_cycles(cpu, CYCLES).and_then(|event| run_at(&event, program).map(|()| event));
        event.map(|event| lost.1 = event).is_ok()
    }
}

/// Without a PMU: the same program, at timers, which come in where interrupts are on. So a timer that is held back
/// stands for one that is late, and what is proven of a section is left out.
#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::thread::{CpuSet, sched_setaffinity};

    use super::*;
    use crate::cpus;
    use crate::inject::disturbance::{self, Kind, Plan};
    use crate::irqsoff::IrqsoffOptions;
    use crate::irqsoff::ticks::AttachedTicks;
    use crate::perf_event::{EVERY_THREAD, start_timer};
    use crate::session::Session;
    use crate::source::Attached as _;
    use whylate_model::LateEvent;

    const MS_NS: u64 = 1_000_000;
    /// Of the timers that look: they and the heartbeat become due in any order.
    const EVERY_NS: u64 = 700_000;
    /// Overdue by less is in time: a hypervisor makes timers late.
    const FROM_NS: u64 = 40 * MS_NS;

    fn timers(cpu: u32, prove: bool) -> Looks {
        let event = start_timer(EVERY_THREAD, cpu as libc::c_int, EVERY_NS).expect("a timer");
        Looks { events: vec![(cpu, event)], are_timers: !prove }
    }

    fn attached(cpu: u32, from_ns: u64, prove: bool) -> AttachedTicks {
        let options = IrqsoffOptions {
            cpus: vec![cpu],
            period_ns: Some(MS_NS),
            from_ns,
            late_over_ns: Some(from_ns),
            ..IrqsoffOptions::default()
        };
        AttachedTicks::with_looks(&options, &Session::of_one(), vec![cpu], Ok(timers(cpu, prove))).expect("it attaches")
    }

    /// `None`, and a line that says why, where programs cannot be loaded.
    fn cpu() -> Option<u32> {
        if !rustix::process::geteuid().is_root() || crate::attach::require_btf().is_err() {
            println!("skipped: needs root and a kernel with BTF");
            return None;
        }
        cpus::online().expect("there are CPUs").last().copied()
    }

    fn stay_on(cpu: u32) {
        let mut here = CpuSet::new();
        here.set(cpu as usize);
        sched_setaffinity(None, &here).expect("it is online");
    }

    /// While a thread reads zeroes on the CPU: nearly all its time is spent in `read()` in the kernel.
    fn while_reading<T>(cpu: u32, act: impl FnOnce() -> T) -> T {
        /// Has the reader end, also where `act` panics: the scope waits for it.
        struct Ended<'a>(&'a AtomicBool);
        impl Drop for Ended<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _ended = Ended(&over);
            scope.spawn(|| {
                stay_on(cpu);
                let mut zeroes = File::open("/dev/zero").expect("it is there");
                let mut buffer = vec![1; 1 << 20];
                while !over.load(Ordering::Relaxed) {
                    zeroes.read_exact(&mut buffer).expect("zeroes have no end");
                }
            });
            act()
        })
    }

    fn wait_for(ms: u64, is_over: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_over() && began.elapsed() < Duration::from_millis(ms) {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_timer_that_is_overdue_has_the_stack_taken_once() {
        let Some(cpu) = cpu() else { return };
        let mut source = attached(cpu, FROM_NS, false);
        while_reading(cpu, || {
            wait_for(1_000, || source.programs.ticks(cpu) > 100);
            assert!(source.programs.ticks(cpu) > 100, "its timer beats");
            let mut before = source.programs.inside(cpu, &mut source.symbols);
            assert_eq!(before.0, 0, "a stack was taken although the timer was in time: {before:?}");
            // Whoever else is busy on that CPU may have it at that moment.
            let taken = (0..20).find_map(|_| {
                source.heartbeats.hold_back(true).expect("held back");
                wait_for(2_000, || source.programs.inside_due_ns(cpu) != before.0);
                let (due_ns, stack) = source.programs.inside(cpu, &mut source.symbols);
                println!("before: {before:?}, overdue: {stack:?}");
                assert!(due_ns > before.0, "nobody has looked");
                if stack.iter().any(|frame| frame.contains("read_zero") || frame == "vfs_read") {
                    return Some((due_ns, stack));
                }
                source.heartbeats.hold_back(false).expect("it goes on");
                before = (due_ns, stack);
                thread::sleep(Duration::from_millis(50));
                None
            });
            let (due_ns, stack) = taken.expect("the thread that reads is never seen");
            // Many times as long as it takes to look again.
            thread::sleep(Duration::from_millis(100));
            assert_eq!(source.programs.inside(cpu, &mut source.symbols), (due_ns, stack), "it is taken once");
            source.heartbeats.hold_back(false).expect("it goes on");
        });
    }

    #[test]
    fn no_stack_is_taken_where_interrupts_are_on() {
        let Some(cpu) = cpu() else { return };
        let source = attached(cpu, FROM_NS, true);
        while_reading(cpu, || {
            wait_for(1_000, || source.programs.ticks(cpu) > 100);
            source.heartbeats.hold_back(true).expect("held back");
            thread::sleep(Duration::from_nanos(3 * FROM_NS));
        });
        assert_eq!(source.programs.inside_due_ns(cpu), 0);
    }

    /// A timer that looks and the heartbeat are both overdue after a section. Where the former comes in first, its
    /// program takes the stack that both interrupt, and the section's late event has to tell it.
    #[test]
    fn a_stack_that_was_taken_is_told_with_the_late_event() {
        let Some(cpu) = cpu() else { return };
        let mut source = attached(cpu, MS_NS, false);
        let plan = Plan { kind: Kind::IrqsOff, length_ns: 5 * MS_NS, times: 40, every_ns: 17_137_000, cpu: Some(cpu) };
        let made = match disturbance::run(&plan, &AtomicBool::new(false), &mut |_| Ok(())) {
            Ok(report) => report.made.len(),
            Err(AttachError::Unsupported(reason)) => {
                println!("skipped: {reason}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event)).expect("read");
        let is_ours = |event: &&LateEvent| {
            event.labels.get("function").is_some_and(|function| function == "bpf_local_irq_restore")
        };
        let sections: Vec<&LateEvent> = events.iter().filter(is_ours).collect();
        let told: Vec<&&LateEvent> = sections.iter().filter(|event| !event.inside.is_empty()).collect();
        println!("{made} made, {} seen, {} with a stack inside", sections.len(), told.len());
        assert!(told.len() * 5 >= made, "the timer that looks comes in first in a fourth of the cases or more");
        for event in told {
            assert_eq!(event.inside.first(), event.stack.first(), "both interrupt the same code");
        }
    }
}
