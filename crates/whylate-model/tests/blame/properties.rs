// SPDX-License-Identifier: MIT OR Apache-2.0
//! Invariants of the causes of any evidence, however contradictory, and an independent oracle that derives them instant
//! by instant.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use whylate_model::blame::{HeldSlot, PoolClass, Wakeup, WorkEvidence, causes};
use whylate_model::occupancy::{BusyPools, Merged, MergedPart, Taken};
use whylate_model::{Cause, CauseKind, Interval, Occupancy, Occupant};

const WORKER: u32 = 77;
const KERNEL_STACK: [&str; 4] =
    ["hrtimer_interrupt", "asm_sysvec_apic_timer_interrupt", "_raw_spin_unlock_irqrestore", "console_unlock"];

/// Times from a small range collide; times from a large range overflow unchecked arithmetic.
fn any_time() -> impl Strategy<Value = u64> + Clone + use<> {
    prop_oneof![8 => 0..120u64, 1 => any::<u64>(), 1 => u64::MAX - 40..=u64::MAX]
}

fn small_time() -> impl Strategy<Value = u64> + Clone + use<> {
    0..120u64
}

fn any_occupant() -> impl Strategy<Value = Occupant> {
    let work = |handler: &str, tid, name: &str| Occupant::Work { handler: handler.into(), tid, name: name.into() };
    prop_oneof![
        Just(Occupant::Idle),
        Just(Occupant::Thread { tid: 1, name: "dd".into(), cgroup: None }),
        Just(Occupant::Thread { tid: WORKER, name: "kworker/1:0".into(), cgroup: None }),
        Just(work("own_fn", WORKER, "kworker/1:0")),
        Just(work("other_fn", 78, "kworker/1:2")),
        Just(work("high_fn", 79, "kworker/1:1H")),
        Just(work("unbound_fn", 80, "kworker/u4:1")),
        Just(Occupant::Irq { name: "local_timer".into() }),
        Just(Occupant::Irq { name: "nvme0q1".into() }),
        Just(Occupant::Softirq { name: "net_rx".into() }),
    ]
}

fn any_stack() -> impl Strategy<Value = Vec<String>> {
    // Nothing, user code, and kernel code.
    (prop_oneof![Just(0), Just(2), Just(3), Just(4)], any::<bool>()).prop_map(|(frames, in_switch)| {
        let mut stack: Vec<String> = KERNEL_STACK[..frames].iter().map(|frame| frame.to_string()).collect();
        if in_switch && frames == 3 {
            stack.push("finish_task_switch.isra.0".into());
        }
        stack
    })
}

fn any_slot(time: impl Strategy<Value = u64> + Clone) -> impl Strategy<Value = HeldSlot> {
    (prop_oneof![Just("a_fn"), Just("b_fn"), Just("c_fn")], time.clone(), time)
        .prop_map(|(handler, started_ns, ended_ns)| HeldSlot { handler: handler.into(), started_ns, ended_ns })
}

fn any_taken() -> impl Strategy<Value = Taken> {
    let some = || prop_oneof![3 => Just(0), 2 => 0..60u64, 1 => any::<u64>()];
    (some(), some(), some()).prop_map(|(steal_ns, perhaps_stolen_ns, nmi_ns)| Taken {
        steal_ns,
        perhaps_stolen_ns,
        nmi_ns,
    })
}

fn any_interval() -> impl Strategy<Value = Interval> {
    (any_time(), any_time(), any_occupant(), any_taken(), any_time(), any_stack(), any::<(bool, bool)>()).prop_map(
        |(start_ns, end_ns, occupant, taken, late_ns, stack, (normal, highpri))| Interval {
            start_ns,
            end_ns,
            occupant,
            taken,
            late_ns,
            stack,
            busy: BusyPools { normal, highpri },
        },
    )
}

fn any_merged() -> impl Strategy<Value = Merged> {
    let part =
        (any_occupant(), any_time(), any_taken()).prop_map(|(occupant, ns, taken)| MergedPart { occupant, ns, taken });
    (any_time(), any_time(), vec(part, 0..6)).prop_map(|(start_ns, end_ns, parts)| Merged { start_ns, end_ns, parts })
}

/// Sorted and disjoint intervals without steal or NMI time, as a source produces them.
fn sound_intervals() -> impl Strategy<Value = Vec<Interval>> {
    let interval = (0..25u64, 0..4u64, any_occupant(), 0..60u64, any_stack(), any::<(bool, bool)>());
    vec(interval, 0..12).prop_map(|drawn| {
        let mut now_ns = 0;
        let mut intervals = Vec::new();
        for (ns, gap_ns, occupant, late_ns, stack, (normal, highpri)) in drawn {
            let start_ns = now_ns + gap_ns / 3;
            now_ns = start_ns + ns + 1;
            let is_irq = matches!(occupant, Occupant::Irq { .. });
            intervals.push(Interval {
                start_ns,
                end_ns: now_ns,
                occupant,
                taken: Taken::default(),
                late_ns: if is_irq { late_ns } else { 0 },
                stack: if is_irq { stack } else { Vec::new() },
                busy: BusyPools { normal, highpri },
            });
        }
        intervals
    })
}

fn any_pool() -> impl Strategy<Value = PoolClass> {
    prop_oneof![Just(PoolClass::Normal), Just(PoolClass::Highpri), Just(PoolClass::Unbound), Just(PoolClass::Softirq)]
}

fn evidence_of(
    time: impl Strategy<Value = u64> + Clone + 'static,
    occupancy: impl Strategy<Value = Occupancy>,
) -> impl Strategy<Value = WorkEvidence> {
    let wakeup =
        (time.clone(), option::of((time.clone(), 0..4u32))).prop_map(|(woken_ns, moved)| Wakeup { woken_ns, moved });
    (
        (time.clone(), time.clone(), time.clone(), any_pool(), any::<bool>(), time.clone()),
        (option::of(wakeup), vec(any_slot(time.clone()), 0..5), option::of(any_slot(time)), occupancy),
    )
        .prop_map(
            |(
                (queued_ns, activated_ns, started_ns, pool, rescued, created_ns),
                (wakeup, slots, previous, occupancy),
            )| {
                WorkEvidence {
                    queued_ns,
                    activated_ns,
                    started_ns,
                    workqueue: "events".into(),
                    pool,
                    worker_tid: WORKER,
                    by_rescuer: rescued && created_ns % 4 == 0,
                    worker_created_ns: if created_ns % 3 == 0 { created_ns } else { 0 },
                    wakeup,
                    slots,
                    previous,
                    occupancy,
                }
            },
        )
}

fn any_evidence() -> impl Strategy<Value = WorkEvidence> {
    let occupancy = (any_time(), option::of(any_merged()), vec(any_interval(), 0..12))
        .prop_map(|(since_ns, merged, intervals)| Occupancy { cpu: 1, since_ns, merged, intervals });
    evidence_of(any_time(), occupancy)
}

fn sound_evidence() -> impl Strategy<Value = WorkEvidence> {
    let occupancy = sound_intervals().prop_map(|intervals| Occupancy { cpu: 1, since_ns: 0, merged: None, intervals });
    evidence_of(small_time(), occupancy)
}

fn by_blame(causes: &[Cause]) -> BTreeMap<(CauseKind, String), u64> {
    causes.iter().map(|cause| ((cause.kind, cause.who.to_string()), cause.ns)).collect()
}

/// Returns whether the occupant at `at_ns` held off `irq`; interrupts at most `between_ns` apart form one burst.
fn could_not_come_in(occupancy: &Occupancy, at_ns: u64, irq: &Interval, between_ns: u64) -> bool {
    let from_user_or_unknown = [0, 2].contains(&irq.stack.len());
    let due_ns = irq.start_ns.saturating_sub(irq.late_ns);
    if irq.late_ns == 0 || from_user_or_unknown || irq.start_ns <= at_ns || at_ns < due_ns {
        return false;
    }
    let occupant_at =
        |at_ns| occupancy.intervals.iter().find(|i| i.start_ns <= at_ns && at_ns < i.end_ns).map(|i| &i.occupant);
    let is_irq = |at_ns: u64| matches!(occupant_at(at_ns), Some(Occupant::Irq { .. }));
    // Interrupts right before it, and those after a short gap.
    let mut end_ns = irq.start_ns;
    let mut first_ns = irq.start_ns;
    while end_ns > 0
        && !matches!(occupant_at(end_ns - 1), None | Some(Occupant::Idle))
        && first_ns - end_ns <= between_ns
    {
        end_ns -= 1;
        if is_irq(end_ns) {
            first_ns = end_ns;
        }
    }
    if at_ns >= first_ns {
        return false;
    }
    let mut since: Vec<Option<&Occupant>> = (at_ns..first_ns).map(occupant_at).collect();
    since.dedup();
    let cannot_disable_irqs =
        |occupant: &Option<&Occupant>| matches!(occupant, None | Some(Occupant::Idle | Occupant::Irq { .. }));
    let switches = irq.stack.iter().filter(|frame| frame.starts_with("finish_task_switch")).count();
    !since.iter().any(cannot_disable_irqs) && since.len() <= 1 + switches
}

/// Returns the blame for the nanosecond at `at_ns`, from the rules alone. Supports at most one slot.
fn blame_at(evidence: &WorkEvidence, at_ns: u64, between_ns: u64) -> (CauseKind, String) {
    let cause = |kind, who: &str| (kind, who.to_owned());
    if at_ns < evidence.activated_ns {
        // With one slot, the time before and after it is its as well.
        let of_wait = |slot: &&HeldSlot| slot.ended_ns > slot.started_ns.max(evidence.queued_ns);
        let holder = evidence.slots.iter().find(of_wait);
        return cause(CauseKind::MaxActive, holder.map_or("events", |slot| &slot.handler));
    }
    let previous = evidence.previous.as_ref().filter(|item| item.started_ns <= at_ns && at_ns < item.ended_ns);
    let interval =
        evidence.occupancy.intervals.iter().find(|interval| interval.start_ns <= at_ns && at_ns < interval.end_ns);
    if evidence.pool != PoolClass::Softirq && evidence.wakeup.is_none_or(|wakeup| at_ns < wakeup.woken_ns) {
        let busy = interval.is_some_and(|interval| match evidence.pool {
            PoolClass::Normal => interval.busy.normal,
            PoolClass::Highpri => interval.busy.highpri,
            PoolClass::Unbound | PoolClass::Softirq => false,
        });
        let awaited = interval.is_some_and(|interval| {
            matches!(interval.occupant, Occupant::Thread { tid: WORKER, .. } | Occupant::Work { tid: WORKER, .. })
        });
        if !busy && !awaited {
            return match previous {
                Some(item) => cause(CauseKind::Work, &item.handler),
                None if evidence.by_rescuer => cause(CauseKind::Wakeup, "rescuer"),
                None if at_ns < evidence.worker_created_ns => cause(CauseKind::Wakeup, "worker creation"),
                None if interval.is_none() && evidence.pool != PoolClass::Unbound => {
                    cause(CauseKind::Unknown, "not recorded")
                }
                None if evidence.wakeup.is_none() => cause(CauseKind::Unknown, "the worker's wakeup was not seen"),
                None => cause(CauseKind::Unknown, "before a worker was woken"),
            };
        }
    } else if let Some((_, cpu)) = evidence
        .wakeup
        .filter(|_| evidence.pool != PoolClass::Softirq)
        .and_then(|wakeup| wakeup.moved)
        .filter(|&(moved_ns, _)| at_ns < moved_ns)
    {
        let woken_ns = evidence.wakeup.map_or(0, |wakeup| wakeup.woken_ns);
        let ran_since = evidence
            .previous
            .as_ref()
            .is_some_and(|item| woken_ns <= item.started_ns && item.started_ns < item.ended_ns);
        return match previous {
            Some(item) => cause(CauseKind::Work, &item.handler),
            None if ran_since => cause(CauseKind::Unknown, &format!("the worker was on CPU {cpu}")),
            None => cause(CauseKind::Wakeup, &format!("run queue of CPU {cpu}")),
        };
    }
    let Some(interval) = interval else {
        return cause(CauseKind::Unknown, "not recorded");
    };
    let (kind, who) = match &interval.occupant {
        Occupant::Idle => return cause(CauseKind::IdleExit, "CPU 1"),
        Occupant::Irq { name } => return cause(CauseKind::Irq, name),
        Occupant::Softirq { name } => cause(CauseKind::Softirq, name),
        Occupant::Work { handler, .. } => cause(CauseKind::Work, handler),
        Occupant::Thread { tid: WORKER, name, .. } => cause(CauseKind::Wakeup, &format!("{name}:{WORKER}")),
        Occupant::Thread { tid, name, .. } => cause(CauseKind::Thread, &format!("{name}:{tid}")),
    };
    let holds_off = |irq: &Interval| could_not_come_in(&evidence.occupancy, at_ns, irq, between_ns);
    let masked = evidence.occupancy.intervals.iter().any(holds_off);
    (if masked { CauseKind::IrqsOff } else { kind }, who)
}

/// Multiplies each time by `by`.
fn scale(evidence: &mut WorkEvidence, by: u64) {
    let WorkEvidence { queued_ns, activated_ns, started_ns, worker_created_ns, .. } = evidence;
    let mut times = vec![queued_ns, activated_ns, started_ns, worker_created_ns];
    if let Some(wakeup) = &mut evidence.wakeup {
        times.push(&mut wakeup.woken_ns);
        times.extend(wakeup.moved.as_mut().map(|(moved_ns, _)| moved_ns));
    }
    for slot in evidence.slots.iter_mut().chain(&mut evidence.previous) {
        times.extend([&mut slot.started_ns, &mut slot.ended_ns]);
    }
    for interval in &mut evidence.occupancy.intervals {
        times.extend([&mut interval.start_ns, &mut interval.end_ns, &mut interval.late_ns]);
    }
    for time_ns in times {
        *time_ns *= by;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn causes_add_up_to_the_latency(evidence in any_evidence()) {
        let actual = causes(&evidence);
        let total: u128 = actual.iter().map(|cause| u128::from(cause.ns)).sum();
        prop_assert_eq!(total, u128::from(evidence.started_ns.saturating_sub(evidence.queued_ns)));
        prop_assert!(actual.iter().all(|cause| cause.ns > 0), "{:?}", actual);
        prop_assert!(actual.is_sorted_by(|a, b| a.ns >= b.ns), "{:?}", actual);
        prop_assert_eq!(by_blame(&actual).len(), actual.len(), "equal causes are one");
        prop_assert_eq!(causes(&evidence), actual);
    }

    #[test]
    fn causes_match_instant_oracle(
        mut evidence in sound_evidence(),
        unit_ns in prop_oneof![Just(1u64), Just(2_000), Just(20_000)],
    ) {
        evidence.slots.truncate(1);
        let mut expected = BTreeMap::new();
        for at in evidence.queued_ns..evidence.started_ns {
            *expected.entry(blame_at(&evidence, at, 20_000 / unit_ns)).or_default() += unit_ns;
        }
        scale(&mut evidence, unit_ns);
        prop_assert_eq!(by_blame(&causes(&evidence)), expected);
    }

    #[test]
    fn splitting_intervals_changes_nothing(evidence in sound_evidence(), cuts in vec(0..300u64, 0..8)) {
        let mut cut = evidence.clone();
        for at_ns in cuts {
            let Some(index) = cut.occupancy.intervals.iter().position(|i| i.start_ns < at_ns && at_ns < i.end_ns) else {
                continue;
            };
            let whole = &mut cut.occupancy.intervals[index];
            // An interrupt comes in once.
            let rest = Interval { start_ns: at_ns, late_ns: 0, stack: Vec::new(), ..whole.clone() };
            whole.end_ns = at_ns;
            cut.occupancy.intervals.insert(index + 1, rest);
        }
        prop_assert_eq!(causes(&cut), causes(&evidence));
    }

    #[test]
    fn order_of_evidence_changes_nothing(evidence in sound_evidence()) {
        let mut turned = evidence.clone();
        turned.slots.reverse();
        turned.occupancy.intervals.reverse();
        prop_assert_eq!(causes(&turned), causes(&evidence));
    }

    /// Without stacks of late interrupts, a merged account gives the same causes.
    #[test]
    fn merging_conserves_time_of_each_occupant(mut intervals in sound_intervals(), pool in any_pool()) {
        for (now_ns, interval) in intervals.iter_mut().enumerate() {
            interval.late_ns = 0;
            interval.taken.steal_ns = (interval.end_ns - interval.start_ns) / (2 + now_ns as u64);
        }
        let end_ns = intervals.last().map_or(0, |interval| interval.end_ns);
        let woken = WorkEvidence {
            started_ns: end_ns,
            pool,
            worker_tid: WORKER,
            wakeup: Some(Wakeup::default()),
            occupancy: Occupancy { cpu: 1, since_ns: 0, merged: None, intervals },
            ..WorkEvidence::default()
        };
        let mut merged = woken.clone();
        let parts = merged.occupancy.intervals.drain(..).map(|interval| MergedPart {
            ns: interval.end_ns - interval.start_ns,
            occupant: interval.occupant,
            taken: interval.taken,
        });
        let parts = parts.collect();
        merged.occupancy.merged = Some(Merged { start_ns: 0, end_ns, parts });
        prop_assert_eq!(by_blame(&causes(&merged)), by_blame(&causes(&woken)));
    }

    #[test]
    fn missing_evidence_gives_unknown(queued_ns in any::<u64>(), latency_ns in 1..u64::MAX, pool in any_pool()) {
        let started_ns = queued_ns.saturating_add(latency_ns);
        let bare = WorkEvidence { queued_ns, activated_ns: queued_ns, started_ns, pool, worker_tid: WORKER, ..WorkEvidence::default() };
        let actual = causes(&bare);
        prop_assert!(actual.iter().all(|cause| cause.kind == CauseKind::Unknown && cause.stack.is_empty()), "{:?}", actual);
        prop_assert_eq!(actual.iter().map(|cause| cause.ns).sum::<u64>(), started_ns - queued_ns);
    }

    #[test]
    fn evidence_survives_json(evidence in any_evidence()) {
        let text = serde_json::to_string(&evidence).expect("evidence serialises");
        prop_assert_eq!(serde_json::from_str::<WorkEvidence>(&text).expect("and parses"), evidence);
    }
}
