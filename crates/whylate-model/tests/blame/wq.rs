// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a work item's wait, case by case.

use whylate_model::blame::{HeldSlot, PoolClass, Wakeup, WorkEvidence, causes};
use whylate_model::occupancy::{BusyPools, Merged, MergedPart, Taken};
use whylate_model::{CauseKind, Interval, Occupancy, Occupant};

const WORKER: u32 = 77;

fn thread(name: &str, tid: u32) -> Occupant {
    Occupant::Thread { tid, name: name.to_owned(), cgroup: None }
}

fn work(handler: &str, name: &str) -> Occupant {
    Occupant::Work { handler: handler.to_owned(), tid: 12, name: name.to_owned() }
}

fn irq() -> Occupant {
    Occupant::Irq { name: "local_timer".to_owned() }
}

fn interval(start_ns: u64, end_ns: u64, occupant: Occupant) -> Interval {
    Interval { start_ns, end_ns, occupant, ..Interval::default() }
}

fn late_irq(start_ns: u64, end_ns: u64, late_ns: u64, frames: &[&str]) -> Interval {
    Interval {
        late_ns,
        stack: frames.iter().map(|&frame| frame.to_owned()).collect(),
        ..interval(start_ns, end_ns, irq())
    }
}

/// Evidence of an item queued at 1000, with a worker awake at once, and started at 2000.
fn woken_at_once(intervals: Vec<Interval>) -> WorkEvidence {
    WorkEvidence {
        queued_ns: 1000,
        activated_ns: 1000,
        started_ns: 2000,
        workqueue: "events".to_owned(),
        worker_tid: WORKER,
        wakeup: Some(Wakeup { woken_ns: 1000, moved: None }),
        occupancy: Occupancy { cpu: 1, intervals, ..Occupancy::default() },
        ..WorkEvidence::default()
    }
}

fn causes_of(evidence: &WorkEvidence) -> Vec<(CauseKind, String, u64)> {
    causes(evidence).into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect()
}

fn cause(kind: CauseKind, who: &str, ns: u64) -> (CauseKind, String, u64) {
    (kind, who.to_owned(), ns)
}

#[test]
fn names_all_causes_of_a_window() {
    let evidence = woken_at_once(vec![
        interval(0, 1800, thread("dd", 5)),
        late_irq(1800, 1810, 700, &["asm_sysvec_apic_timer_interrupt", "console_unlock", "vprintk"]),
        interval(1810, 2000, thread("stress-ng", 6)),
    ]);
    assert_eq!(
        causes_of(&evidence),
        [
            cause(CauseKind::IrqsOff, "dd:5", 700),
            cause(CauseKind::Thread, "stress-ng:6", 190),
            cause(CauseKind::Thread, "dd:5", 100),
            cause(CauseKind::Irq, "local_timer", 10),
        ]
    );
    assert_eq!(causes(&evidence)[0].stack, ["console_unlock", "vprintk"]);
}

#[test]
fn interrupt_delayed_by_steal_is_not_irqs_off() {
    let stolen =
        |steal_ns| Interval { taken: Taken { steal_ns, ..Taken::default() }, ..interval(1000, 1900, thread("dd", 5)) };
    let timer = late_irq(1900, 2000, 600, &["asm_sysvec_apic_timer_interrupt", "ksys_write"]);
    assert_eq!(
        causes_of(&woken_at_once(vec![stolen(600), timer.clone()])),
        [
            cause(CauseKind::Steal, "hypervisor", 600),
            cause(CauseKind::Thread, "dd:5", 300),
            cause(CauseKind::Irq, "local_timer", 100),
        ]
    );
    assert_eq!(
        causes_of(&woken_at_once(vec![stolen(500), timer])),
        [
            cause(CauseKind::Steal, "hypervisor", 500),
            cause(CauseKind::Thread, "dd:5", 300),
            cause(CauseKind::IrqsOff, "dd:5", 100),
            cause(CauseKind::Irq, "local_timer", 100),
        ]
    );
}

#[test]
fn late_interrupt_of_user_code_blames_no_thread() {
    let evidence = woken_at_once(vec![
        interval(1000, 1900, thread("dd", 5)),
        late_irq(1900, 2000, 600, &["hrtimer_interrupt", "asm_sysvec_apic_timer_interrupt"]),
    ]);
    assert_eq!(
        causes_of(&evidence),
        [cause(CauseKind::Thread, "dd:5", 900), cause(CauseKind::Irq, "local_timer", 100)]
    );
}

#[test]
fn first_of_two_late_interrupts_names_irqs_off_code() {
    let evidence = woken_at_once(vec![
        interval(1000, 1500, thread("dd", 5)),
        late_irq(1500, 1510, 300, &["asm_common_interrupt", "first"]),
        late_irq(1510, 1520, 400, &["asm_common_interrupt", "second"]),
        interval(1520, 2000, Occupant::Idle),
    ]);
    let actual = causes(&evidence);
    let irqs_off = actual.iter().find(|cause| cause.kind == CauseKind::IrqsOff).expect("one cause");
    // 300 before the first one; another 90 while only the second one was due.
    assert_eq!((irqs_off.ns, irqs_off.stack.as_slice()), (390, ["first".to_owned()].as_slice()));
}

#[test]
fn irqs_off_ends_at_context_switch() {
    let before = |frames: &[&str]| {
        causes_of(&woken_at_once(vec![
            interval(1000, 1500, thread("dd", 5)),
            interval(1500, 1900, thread("cat", 6)),
            late_irq(1900, 2000, 800, frames),
        ]))
    };
    let irq = cause(CauseKind::Irq, "local_timer", 100);
    assert_eq!(
        before(&["asm_sysvec_apic_timer_interrupt", "vfs_read"]),
        [cause(CauseKind::Thread, "dd:5", 500), cause(CauseKind::IrqsOff, "cat:6", 400), irq.clone()]
    );
    // The switch from dd to cat itself took long.
    assert_eq!(
        before(&["asm_sysvec_apic_timer_interrupt", "finish_task_switch.isra.0", "__schedule"]),
        [
            cause(CauseKind::IrqsOff, "cat:6", 400),
            cause(CauseKind::IrqsOff, "dd:5", 400),
            irq,
            cause(CauseKind::Thread, "dd:5", 100),
        ]
    );
}

#[test]
fn handled_interrupt_ends_irqs_off() {
    let evidence = |came_in_ns| WorkEvidence {
        started_ns: 1_000_000,
        ..woken_at_once(vec![
            interval(1_000, came_in_ns, thread("dd", 5)),
            interval(came_in_ns, came_in_ns + 10_000, Occupant::Irq { name: "nvme0q1".to_owned() }),
            interval(came_in_ns + 10_000, 900_000, thread("dd", 5)),
            late_irq(900_000, 1_000_000, 800_000, &["asm_sysvec_apic_timer_interrupt", "vfs_read"]),
        ])
    };
    let first_causes = causes_of(&evidence(400_000));
    assert_eq!(
        first_causes[..2],
        [cause(CauseKind::IrqsOff, "dd:5", 490_000), cause(CauseKind::Thread, "dd:5", 399_000)]
    );
    // Both were pending when interrupts were enabled; the first was handled a little before the other.
    let first_causes = causes_of(&evidence(885_000));
    assert_eq!(first_causes[0], cause(CauseKind::IrqsOff, "dd:5", 785_000));
}

#[test]
fn interrupt_during_exit_of_another_was_pending_with_it() {
    let evidence = |innermost: &'static str| WorkEvidence {
        started_ns: 1_000_000,
        ..woken_at_once(vec![
            interval(1_000, 700_000, thread("dd", 5)),
            interval(700_000, 710_000, Occupant::Irq { name: "reschedule".to_owned() }),
            interval(710_000, 800_000, thread("dd", 5)),
            late_irq(800_000, 1_000_000, 795_000, &["asm_sysvec_apic_timer_interrupt", innermost, "irqentry_exit"]),
        ])
    };
    let leaving = causes_of(&evidence("preempt_schedule_irq+0x34"));
    assert_eq!(leaving[0], cause(CauseKind::IrqsOff, "dd:5", 695_000));
    // Nothing shows that interrupts were enabled in between.
    assert_eq!(causes_of(&evidence("vfs_read"))[0], cause(CauseKind::Thread, "dd:5", 699_000));
}

#[test]
fn pool_waits_only_for_its_running_items() {
    let busy = |interval| Interval { busy: BusyPools { normal: true, highpri: false }, ..interval };
    let mut evidence = woken_at_once(vec![
        busy(interval(1000, 1600, work("hog", "kworker/1:3"))),
        busy(interval(1600, 1700, thread("dd", 5))),
        interval(1700, 1900, thread("dd", 5)),
        interval(1900, 2000, Occupant::Idle),
    ]);
    evidence.wakeup = Some(Wakeup { woken_ns: 1900, moved: None });
    assert_eq!(
        causes_of(&evidence),
        [
            cause(CauseKind::Work, "hog", 600),
            cause(CauseKind::Unknown, "before a worker was woken", 200),
            cause(CauseKind::Thread, "dd:5", 100),
            cause(CauseKind::IdleExit, "CPU 1", 100),
        ]
    );
    // The other pool of the CPU does not matter.
    evidence.pool = PoolClass::Highpri;
    assert_eq!(causes_of(&evidence)[0], cause(CauseKind::Unknown, "before a worker was woken", 900));
}

#[test]
fn merged_account_applies_only_if_a_worker_of_the_pool_ran() {
    let part = |occupant, ns| MergedPart { occupant, ns, taken: Taken::default() };
    let merged = |worker: &str| {
        let parts = vec![part(work("hog", worker), 600), part(thread("dd", 5), 300)];
        let mut evidence = woken_at_once(Vec::new());
        evidence.wakeup = Some(Wakeup { woken_ns: 2000, moved: None });
        evidence.occupancy.merged = Some(Merged { start_ns: 1000, end_ns: 2000, parts });
        causes_of(&evidence)
    };
    assert_eq!(
        merged("kworker/1:3"),
        [
            cause(CauseKind::Work, "hog", 600),
            cause(CauseKind::Thread, "dd:5", 300),
            cause(CauseKind::Unknown, "before a worker was woken", 100),
        ]
    );
    for other in ["kworker/1:3H", "kworker/2:3", "kworker/u4:1", "kworker/R-ext4"] {
        assert_eq!(merged(other), [cause(CauseKind::Unknown, "before a worker was woken", 1000)], "{other}");
    }
}

#[test]
fn sleeping_worker_blames_earlier_item_creation_or_rescuer() {
    let mut evidence = woken_at_once(Vec::new());
    evidence.pool = PoolClass::Unbound;
    evidence.wakeup = Some(Wakeup { woken_ns: 1900, moved: Some((1950, 3)) });
    evidence.occupancy.intervals = vec![interval(1950, 2000, thread("dd", 5))];
    evidence.previous = Some(HeldSlot { handler: "slow_fn".to_owned(), started_ns: 900, ended_ns: 1800 });
    let rest = [cause(CauseKind::Thread, "dd:5", 50), cause(CauseKind::Wakeup, "run queue of CPU 3", 50)];
    let and_rest = |first: &[_]| [first, &rest].concat();
    let unknown = cause(CauseKind::Unknown, "before a worker was woken", 100);
    assert_eq!(causes_of(&evidence), and_rest(&[cause(CauseKind::Work, "slow_fn", 800), unknown.clone()]));

    evidence.previous = None;
    evidence.worker_created_ns = 1800;
    assert_eq!(causes_of(&evidence), and_rest(&[cause(CauseKind::Wakeup, "worker creation", 800), unknown]));

    evidence.worker_created_ns = 0;
    evidence.by_rescuer = true;
    assert_eq!(causes_of(&evidence), and_rest(&[cause(CauseKind::Wakeup, "rescuer", 900)]));
}

#[test]
fn max_active_without_holders_goes_to_workqueue() {
    let mut evidence = woken_at_once(Vec::new());
    evidence.activated_ns = 2000;
    assert_eq!(causes_of(&evidence), [cause(CauseKind::MaxActive, "events", 1000)]);
}
