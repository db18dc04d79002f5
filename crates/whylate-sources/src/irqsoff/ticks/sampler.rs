// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes stacks inside sections with interrupts off, by NMIs, on CPUs with an overdue timer. Needs x86 with a PMU,
//! which interrupts by NMI there.

use std::os::fd::{BorrowedFd, OwnedFd};

use anyhow::Context as _;

use crate::kernel::perf_event::{count_kernel_cycles, run_at};
use crate::source::AttachError;

/// Kernel cycles between two samples on a CPU: 2 ms at 4 GHz. A sample counts only while the timer is overdue: a
/// section that is longer than the timer's period plus `from_ns` is always sampled, others by chance.
const CYCLES: u64 = 8_000_000;

/// One perf event on each CPU until dropped; none if sampling is off.
#[derive(Debug, Default)]
pub(super) struct NmiSampler {
    events: Vec<(u32, OwnedFd)>,
    /// Whether the events are timers, which come in with interrupts on. For tests only.
    are_timers: bool,
}

impl NmiSampler {
    /// Opens the events; [`start`](Self::start) starts sampling. The error says why sampling is impossible here.
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
        Ok(NmiSampler { events, are_timers: false })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns whether stacks are taken only with interrupts off.
    pub(super) fn requires_irqs_off(&self) -> bool {
        !self.are_timers
    }

    /// Runs the program at each event from now on.
    pub(super) fn start(&self, program: BorrowedFd<'_>) -> Result<(), AttachError> {
        let attach = |(_, event): &(u32, OwnedFd)| run_at(event, program);
        Ok(self.events.iter().try_for_each(attach).context("cannot have a program look into sections")?)
    }

    /// Reopens the event of a CPU that was offline. Returns whether the CPU is sampled as before.
    pub(super) fn restart(&mut self, cpu: u32, program: BorrowedFd<'_>) -> bool {
        let Some(lost) = self.events.iter_mut().find(|(of, _)| *of == cpu) else { return true };
        let event = count_kernel_cycles(cpu, CYCLES).and_then(|event| run_at(&event, program).map(|()| event));
        event.map(|event| lost.1 = event).is_ok()
    }
}

/// Tests for machines without a PMU: the same program, run at timers, which come in with interrupts on. A timer that is
/// held back stands in for a late one, and the check for disabled interrupts is off.
#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::inject::disturbance::{self, Kind, Plan};
    use crate::irqsoff::IrqsoffOptions;
    use crate::irqsoff::ticks::AttachedTicks;
    use crate::kernel::cpus;
    use crate::kernel::perf_event::{EVERY_THREAD, start_timer};
    use crate::kernel::priority::run_on;
    use crate::source::Attached as _;
    use crate::source::session::Session;
    use whylate_model::LateEvent;

    const MS_NS: u64 = 1_000_000;
    /// Period of the sampling timers: they and the heartbeat become due in any order.
    const SAMPLE_PERIOD_NS: u64 = 700_000;
    /// Lateness below this is in time: a hypervisor makes timers late.
    const FROM_NS: u64 = 40 * MS_NS;

    fn timers(cpu: u32, requires_irqs_off: bool) -> NmiSampler {
        let event = start_timer(EVERY_THREAD, cpu as libc::c_int, SAMPLE_PERIOD_NS).expect("a timer");
        NmiSampler { events: vec![(cpu, event)], are_timers: !requires_irqs_off }
    }

    fn attached(cpu: u32, from_ns: u64, requires_irqs_off: bool) -> AttachedTicks {
        let options = IrqsoffOptions {
            cpus: vec![cpu],
            period_ns: Some(MS_NS),
            from_ns,
            late_over_ns: Some(from_ns),
            ..IrqsoffOptions::default()
        };
        AttachedTicks::with_sampler(&options, &Session::of_one(), vec![cpu], Ok(timers(cpu, requires_irqs_off)))
            .expect("it attaches")
    }

    /// Returns the CPU to test, or `None` after printing why programs cannot be loaded.
    fn cpu() -> Option<u32> {
        if !rustix::process::geteuid().is_root() || crate::kernel::attach::require_btf().is_err() {
            println!("skipped: needs root and a kernel with BTF");
            return None;
        }
        cpus::online().expect("there are CPUs").last().copied()
    }

    /// Runs `act` while a thread reads zeroes on the CPU, nearly all the time in `read()` in the kernel.
    fn while_reading<T>(cpu: u32, act: impl FnOnce() -> T) -> T {
        /// Ends the reader, also if `act` panics: the scope waits for it.
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
                run_on(&[cpu]).expect("it is online");
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
    fn overdue_timer_is_sampled_once() {
        let Some(cpu) = cpu() else { return };
        let mut source = attached(cpu, FROM_NS, false);
        while_reading(cpu, || {
            wait_for(1_000, || source.programs.ticks(cpu) > 100);
            assert!(source.programs.ticks(cpu) > 100, "its timer beats");
            // A CPU that the hypervisor takes away makes the timer late.
            let in_time = (0..5).filter(|_| {
                let before = source.programs.inside_due_ns(cpu);
                thread::sleep(Duration::from_nanos(FROM_NS));
                source.programs.inside_due_ns(cpu) == before
            });
            let in_time = in_time.count();
            assert!(in_time >= 4, "stacks were taken in {} of 5 spans although the timer was in time", 5 - in_time);
            let mut before = source.programs.inside(cpu, &mut source.symbols);
            // Another busy thread may run on that CPU just then.
            let taken = (0..20).find_map(|_| {
                source.heartbeats.hold_back(true).expect("held back");
                wait_for(2_000, || source.programs.inside_due_ns(cpu) != before.0);
                let (due_ns, stack) = source.programs.inside(cpu, &mut source.symbols);
                println!("before: {before:?}, overdue: {stack:?}");
                assert!(due_ns > before.0, "no probe has run");
                if stack.iter().any(|frame| frame.contains("read_zero") || frame == "vfs_read") {
                    return Some((due_ns, stack));
                }
                source.heartbeats.hold_back(false).expect("it goes on");
                before = (due_ns, stack);
                thread::sleep(Duration::from_millis(50));
                None
            });
            let (due_ns, stack) = taken.expect("the thread that reads is never seen");
            // Many times the sampling period.
            thread::sleep(Duration::from_millis(100));
            assert_eq!(source.programs.inside(cpu, &mut source.symbols), (due_ns, stack), "it is taken once");
            source.heartbeats.hold_back(false).expect("it goes on");
        });
    }

    #[test]
    fn takes_no_stack_with_interrupts_on() {
        let Some(cpu) = cpu() else { return };
        let source = attached(cpu, FROM_NS, true);
        while_reading(cpu, || {
            wait_for(1_000, || source.programs.ticks(cpu) > 100);
            source.heartbeats.hold_back(true).expect("held back");
            thread::sleep(Duration::from_nanos(3 * FROM_NS));
        });
        assert_eq!(source.programs.inside_due_ns(cpu), 0);
    }

    /// A sampling timer and the heartbeat are both overdue after a section. If the former comes in first, its program
    /// takes the stack that both interrupt, and the section's late event has to contain it.
    #[test]
    fn late_event_contains_sampled_stack() {
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
        let sampled: Vec<&&LateEvent> = sections.iter().filter(|event| !event.inside.is_empty()).collect();
        println!("{made} made, {} seen, {} with a stack inside", sections.len(), sampled.len());
        assert!(sampled.len() * 5 >= made, "the timer that looks comes in first in a fourth of the cases or more");
        for event in sampled {
            assert_eq!(event.inside.first(), event.stack.first(), "both interrupt the same code");
        }
    }
}
