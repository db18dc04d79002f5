// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of a slow I/O request.
//!
//! Before the queue, limits of the cgroup or writeback throttling held the request back. While it was queued, or no
//! free request (tag) was available, the device served others: each instant is shared equally among the requests at the
//! device. While the request was at the device, each instant is shared among the other requests there, or is the
//! device's own if there were none. From the device's interrupt on, completion is up to its CPU, so the occupant of
//! that CPU is blamed.
//!
//! The time at which the device finished is unknown before its interrupt is handled. Where interrupts were disabled on
//! the CPU right before, the device is assumed to have finished after the usual recent time of such requests; the rest
//! is blamed on the code that disabled interrupts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde::{Deserialize, Serialize};

use super::span::Span;
use super::sum::{Blame, Sum};
use super::timeline::{Coverage, Timeline};
use super::window::{NOT_RECORDED, Window};
use crate::{ActorName, Cause, CauseKind, Occupancy};

/// Evidence of a slow request. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RequestEvidence {
    /// Name of the device.
    pub device: String,
    /// Time of submission to the block layer.
    pub submitted_ns: u64,
    /// Time at which cgroup limits released the request; 0 if they did not throttle it.
    #[serde(default)]
    pub let_go_ns: u64,
    /// Cgroup limits that throttled the request.
    #[serde(default)]
    pub limit: String,
    /// Path of the throttled cgroup: the one with the limits, or a descendant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_cgroup: Option<String>,
    /// Time at which a request structure was allocated.
    pub made_ns: u64,
    /// Time at which the request was issued to the device.
    pub issued_ns: u64,
    /// Start of the completion interrupt, or the time at which it raised the softirq that completes the request.
    pub told_ns: u64,
    /// Whether the softirq completes the request.
    #[serde(default)]
    pub is_told_by_softirq: bool,
    /// Time of completion.
    pub completed_ns: u64,
    /// Cause that held the request back before the queue; empty if it waited for a free request (all were in use).
    pub held_back_by: String,
    /// Other requests at the device in this time.
    pub others: Vec<OtherRequests>,
    /// Start of the time for which these records are complete.
    pub known_since_ns: u64,
    /// Recent median time of such requests at the device, in nanoseconds; 0 if none completed before: then no late
    /// interrupt is blamed.
    #[serde(default)]
    pub usual_device_ns: u64,
    /// The CPU that takes the device's interrupt, from when the request was issued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupted: Option<Occupancy>,
    /// The CPU that completed the request, which may be another one, from the interrupt on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_on: Option<Occupancy>,
}

/// Requests of one other owner, while they were at the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct OtherRequests {
    /// Owner and operation of the requests, such as `fio:4711 (writes)`.
    pub who: ActorName,
    /// Path of the cgroup that the requests are charged to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Issue and completion time of each request; completion is later than any timestamp if still in flight.
    pub at_device_ns: Vec<(u64, u64)>,
}

/// Returns the causes of a request's latency, largest first; they add up to it.
pub fn request_causes(evidence: &RequestEvidence) -> Vec<Cause> {
    let RequestEvidence { device, submitted_ns, made_ns, issued_ns, told_ns, completed_ns, .. } = evidence;
    let completed_ns = *completed_ns.max(submitted_ns);
    let made_ns = (*made_ns).clamp(*submitted_ns, completed_ns);
    let issued_ns = (*issued_ns).clamp(made_ns, completed_ns);
    let told_ns = (*told_ns).clamp(issued_ns, completed_ns);
    let let_go_ns = evidence.let_go_ns.clamp(*submitted_ns, made_ns);
    let mut sum = Sum::default();
    let limit = Blame::new(CauseKind::Throttled, evidence.limit.as_str());
    sum.add(Blame { cgroup: evidence.limited_cgroup.clone(), ..limit }, let_go_ns - submitted_ns, &[]);
    // A device has a fixed number of requests; their owners make others wait, as in the queue.
    let queued_from_ns = if evidence.held_back_by.is_empty() { let_go_ns } else { made_ns };
    sum.add(Blame::new(CauseKind::Throttled, evidence.held_back_by.as_str()), queued_from_ns - let_go_ns, &[]);
    let completion = if evidence.is_told_by_softirq {
        Blame::new(CauseKind::Softirq, "block")
    } else {
        Blame::new(CauseKind::Irq, device.as_str())
    };
    let [interrupted, ended_on] = [&evidence.interrupted, &evidence.ended_on].map(|of| of.as_ref().map(Timeline::new));
    let irqs_off_since_ns = interrupted.as_ref().and_then(|timeline| timeline.irqs_off_since_ns(told_ns));
    let done_ns = irqs_off_since_ns.filter(|_| evidence.usual_device_ns > 0).map_or(told_ns, |since_ns| {
        since_ns.max(issued_ns.saturating_add(evidence.usual_device_ns)).clamp(issued_ns, told_ns)
    });
    blame_cpu(Span { from_ns: done_ns, to_ns: told_ns }, interrupted.as_ref(), &completion, &mut sum);
    blame_cpu(Span { from_ns: told_ns, to_ns: completed_ns }, ended_on.as_ref(), &completion, &mut sum);
    for (kind, span) in [
        (CauseKind::DiskQueue, Span { from_ns: queued_from_ns, to_ns: issued_ns }),
        (CauseKind::Disk, Span { from_ns: issued_ns, to_ns: done_ns }),
    ] {
        let known_ns = evidence.known_since_ns.clamp(span.from_ns, span.to_ns);
        sum.add(
            Blame::unknown("records of the device's other requests were overwritten"),
            known_ns - span.from_ns,
            &[],
        );
        share(kind, Span { from_ns: known_ns, to_ns: span.to_ns }, device, &evidence.others, &mut sum);
    }
    sum.into_causes()
}

/// Blames the occupant of the CPU that completes the request, or `completion` where no account of the CPU exists.
fn blame_cpu<'a>(span: Span, timeline: Option<&Timeline<'a>>, completion: &Blame, sum: &mut Sum<'a>) {
    let Some(timeline) = timeline else {
        sum.add(completion.clone(), span.ns(), &[]);
        return;
    };
    let window = Window::new(span, 0);
    timeline.each(span, |part, known| match known {
        Coverage::Piece(piece) => window.blame_piece(part, piece, timeline.cpu, sum),
        Coverage::Merged(_) | Coverage::Nothing => sum.add(Blame::unknown(NOT_RECORDED), part.ns(), &[]),
    });
}

/// Shares a span among the requests at the device; time without any is the device's own.
fn share(kind: CauseKind, span: Span, device: &str, others: &[OtherRequests], sum: &mut Sum<'_>) {
    // (time, index into `others`, issued or completed)
    let mut changes: Vec<(u64, usize, bool)> = Vec::new();
    for (number, other) in others.iter().enumerate() {
        for &(issued_ns, completed_ns) in &other.at_device_ns {
            let (issued_ns, completed_ns) = (issued_ns.max(span.from_ns), completed_ns.min(span.to_ns));
            if issued_ns < completed_ns {
                changes.extend([(issued_ns, number, true), (completed_ns, number, false)]);
            }
        }
    }
    changes.sort_unstable();
    // Requests now at the device, by index into `others`.
    let mut present: BTreeMap<usize, u64> = BTreeMap::new();
    let (mut shares_ns, mut alone_ns) = (vec![0_u64; others.len()], 0);
    let (mut all, mut now_ns) = (0_u64, span.from_ns);
    for (at_ns, number, comes) in changes.into_iter().chain([(span.to_ns.max(span.from_ns), 0, false)]) {
        let ns = at_ns - now_ns;
        now_ns = at_ns;
        if all == 0 {
            alone_ns += ns;
        } else if ns > 0 {
            // Rounding the running sum and not each share keeps the total exact.
            let (mut before, mut given_ns) = (0, 0);
            for (&number, &requests) in &present {
                before += requests;
                let up_to_ns = (u128::from(ns) * u128::from(before) / u128::from(all)) as u64;
                shares_ns[number] += up_to_ns - given_ns;
                given_ns = up_to_ns;
            }
        }
        if comes {
            *present.entry(number).or_insert(0) += 1;
            all += 1;
        } else if let Entry::Occupied(mut requests) = present.entry(number) {
            all -= 1;
            *requests.get_mut() -= 1;
            if *requests.get() == 0 {
                requests.remove();
            }
        }
    }
    sum.add(Blame::new(kind, device), alone_ns, &[]);
    for (other, share_ns) in others.iter().zip(shares_ns) {
        sum.add(Blame { cgroup: other.cgroup.clone(), ..Blame::new(kind, other.who.clone()) }, share_ns, &[]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Interval, Occupant};

    fn other(who: &str, issued_ns: u64, completed_ns: u64) -> OtherRequests {
        OtherRequests { who: who.into(), cgroup: None, at_device_ns: vec![(issued_ns, completed_ns)] }
    }

    fn evidence(timestamps: [u64; 4], others: &[(&str, u64, u64)]) -> RequestEvidence {
        let [submitted_ns, made_ns, issued_ns, completed_ns] = timestamps;
        RequestEvidence {
            device: "vda".to_owned(),
            submitted_ns,
            made_ns,
            issued_ns,
            told_ns: completed_ns,
            completed_ns,
            held_back_by: "limits of vda".to_owned(),
            others: others.iter().map(|&(who, from_ns, to_ns)| other(who, from_ns, to_ns)).collect(),
            ..RequestEvidence::default()
        }
    }

    fn on_cpu(intervals: &[(u64, u64, Occupant, u64)]) -> Option<Occupancy> {
        let interval = |(start_ns, end_ns, occupant, late_ns): &(u64, u64, Occupant, u64)| Interval {
            start_ns: *start_ns,
            end_ns: *end_ns,
            occupant: occupant.clone(),
            late_ns: *late_ns,
            stack: if *late_ns == 0 { Vec::new() } else { vec!["_raw_spin_unlock_irqrestore".to_owned()] },
            ..Interval::default()
        };
        Some(Occupancy { intervals: intervals.iter().map(interval).collect(), ..Occupancy::default() })
    }

    fn thread(name: &str) -> Occupant {
        Occupant::Thread { tid: 7, name: name.to_owned(), cgroup: None }
    }

    fn irq(name: &str) -> Occupant {
        Occupant::Irq { name: name.to_owned() }
    }

    fn causes_of(evidence: &RequestEvidence) -> Vec<(CauseKind, String, u64)> {
        request_causes(evidence).into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect()
    }

    fn owned(expected: &[(CauseKind, &str, u64)]) -> Vec<(CauseKind, String, u64)> {
        expected.iter().map(|&(kind, who, ns)| (kind, who.to_owned(), ns)).collect()
    }

    use CauseKind::{Disk, DiskQueue, Irq, IrqsOff, Softirq, Thread, Throttled, Unknown};

    #[test]
    fn attributes_time_without_other_requests_to_device() {
        assert_eq!(
            causes_of(&evidence([100, 110, 130, 500], &[])),
            owned(&[(Disk, "vda", 370), (DiskQueue, "vda", 20), (Throttled, "limits of vda", 10)])
        );
    }

    #[test]
    fn splits_cgroup_limit_and_completion_time() {
        let limited = RequestEvidence {
            let_go_ns: 160,
            limit: "io.max of /a".to_owned(),
            limited_cgroup: Some("/a/b".to_owned()),
            told_ns: 290,
            is_told_by_softirq: true,
            ..evidence([100, 170, 190, 300], &[])
        };
        let causes = request_causes(&limited);
        assert_eq!(
            causes.into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect::<Vec<_>>(),
            owned(&[
                (Disk, "vda", 100),
                (Throttled, "io.max of /a", 60),
                (DiskQueue, "vda", 20),
                (Softirq, "block", 10),
                (Throttled, "limits of vda", 10),
            ])
        );
        let by_interrupt = RequestEvidence { is_told_by_softirq: false, ..limited };
        assert!(causes_of(&by_interrupt).contains(&(Irq, "vda".to_owned(), 10)));
    }

    #[test]
    fn time_beyond_usual_device_time_goes_to_irqs_off() {
        // The late timer shows it, and the device's interrupt comes in right after.
        let ended_on = on_cpu(&[
            (0, 40_000, thread("cat"), 0),
            (40_000, 90_000, thread("hog"), 0),
            (90_000, 91_000, irq("local_timer"), 45_000),
            (91_000, 91_500, thread("hog"), 0),
            (91_500, 93_000, irq("vda"), 0),
            (93_000, 99_000, thread("hog"), 0),
        ]);
        let timestamps = [10_000, 10_000, 10_000, 92_800];
        let interrupted = ended_on.clone();
        let late = RequestEvidence {
            told_ns: 91_600,
            usual_device_ns: 1_000,
            interrupted,
            ended_on,
            ..evidence(timestamps, &[])
        };
        let of_cpu = [(Irq, "vda", 1_300), (Irq, "local_timer", 1_000), (Thread, "hog:7", 500)];
        assert_eq!(
            causes_of(&late),
            owned(&[&[(IrqsOff, "hog:7", 45_000), (Disk, "vda", 35_000)], &of_cpu[..]].concat())
        );
        // Without an earlier request, the usual duration is unknown.
        let first = RequestEvidence { usual_device_ns: 0, ..late.clone() };
        assert_eq!(causes_of(&first)[0], (Disk, "vda".to_owned(), 81_600));
        let slow = RequestEvidence { usual_device_ns: 60_000, ..late.clone() };
        assert_eq!(
            causes_of(&slow),
            owned(&[&[(Disk, "vda", 60_000), (IrqsOff, "hog:7", 20_000)], &of_cpu[..]].concat())
        );
        // The usual duration is as long as the wait: disabled interrupts delayed nothing.
        let slower = RequestEvidence { usual_device_ns: 90_000, ..late };
        assert_eq!(causes_of(&slower), owned(&[(Disk, "vda", 81_600), (Irq, "vda", 1_200)]));
    }

    #[test]
    fn completion_softirq_delayed_by_running_thread() {
        let softirq = Occupant::Softirq { name: "block".to_owned() };
        let ended_on =
            on_cpu(&[(0, 5_000, irq("vda"), 0), (5_000, 30_000, thread("urgent"), 0), (30_000, 32_000, softirq, 0)]);
        let late = RequestEvidence { told_ns: 4_000, ended_on, ..evidence([1_000, 1_000, 1_000, 31_000], &[]) };
        let late = RequestEvidence { is_told_by_softirq: true, ..late };
        assert_eq!(
            causes_of(&late),
            owned(&[
                (Thread, "urgent:7", 25_000),
                (Disk, "vda", 3_000),
                (Irq, "vda", 1_000),
                (Softirq, "block", 1_000)
            ])
        );
        // No account of the CPU.
        let unseen = RequestEvidence { ended_on: on_cpu(&[]), ..late };
        assert_eq!(causes_of(&unseen), owned(&[(Unknown, NOT_RECORDED, 27_000), (Disk, "vda", 3_000)]));
        let without = RequestEvidence { ended_on: None, ..unseen };
        assert_eq!(causes_of(&without), owned(&[(Softirq, "block", 27_000), (Disk, "vda", 3_000)]));
    }

    #[test]
    fn queue_time_goes_to_requests_at_device() {
        // One of the two others completes early; the rest of the queueing is due to the other one. Then the device is
        // idle otherwise.
        let others = [("hog:1 (writes)", 0, 200), ("hog:2 (writes)", 0, 150), ("late:3 (reads)", 900, 950)];
        assert_eq!(
            causes_of(&evidence([100, 100, 200, 260], &others)),
            owned(&[(DiskQueue, "hog:1 (writes)", 75), (Disk, "vda", 60), (DiskQueue, "hog:2 (writes)", 25)])
        );
    }

    #[test]
    fn shares_are_proportional_to_requests() {
        let others = [("hog (writes)", 0, 1_000), ("hog (writes)", 0, 1_000), ("cat (reads)", 0, 1_000)];
        assert_eq!(
            causes_of(&evidence([100, 100, 100, 400], &others)),
            owned(&[(Disk, "hog (writes)", 200), (Disk, "cat (reads)", 100)])
        );
    }

    #[test]
    fn wait_for_free_request_goes_to_their_owners() {
        let evidence = RequestEvidence {
            held_back_by: String::new(),
            ..evidence([100, 150, 160, 200], &[("hog (writes)", 0, 158)])
        };
        assert_eq!(
            causes_of(&evidence),
            owned(&[(DiskQueue, "hog (writes)", 58), (Disk, "vda", 40), (DiskQueue, "vda", 2)])
        );
    }

    #[test]
    fn overwritten_records_give_unknown() {
        let evidence =
            RequestEvidence { known_since_ns: 250, ..evidence([100, 100, 200, 300], &[("hog (writes)", 220, 280)]) };
        assert_eq!(
            causes_of(&evidence),
            owned(&[
                (Unknown, "records of the device's other requests were overwritten", 150),
                (Disk, "hog (writes)", 30),
                (Disk, "vda", 20)
            ])
        );
    }

    proptest! {
        #[test]
        fn causes_add_up_to_latency(
            timestamps in any::<[u16; 4]>(),
            others in prop::collection::vec((0..4_u8, any::<u16>(), any::<u16>()), 0..20),
            (known_since_ns, let_go_ns, told_ns, usual_device_ns) in any::<(u16, u16, u16, u16)>(),
            cpu in prop::collection::vec((any::<u16>(), any::<u16>(), 0..3_u8, any::<u16>()), 0..20),
        ) {
            let others: Vec<OtherRequests> = others
                .iter()
                .map(|&(who, from_ns, to_ns)| other(&format!("{who}"), from_ns.into(), to_ns.into()))
                .collect();
            let cpu: Vec<_> = cpu.iter().map(|&(from_ns, to_ns, who, late_ns)| {
                let (occupant, late_ns) = match who {
                    0 => (thread("hog"), 0),
                    1 => (irq("vda"), 0),
                    _ => (irq("local_timer"), late_ns.into()),
                };
                (from_ns.into(), to_ns.into(), occupant, late_ns)
            }).collect();
            let evidence =
                RequestEvidence {
                others,
                known_since_ns: known_since_ns.into(),
                let_go_ns: let_go_ns.into(),
                told_ns: told_ns.into(),
                usual_device_ns: usual_device_ns.into(),
                interrupted: on_cpu(&cpu),
                ended_on: on_cpu(&cpu),
                ..evidence(timestamps.map(u64::from), &[]) };
            let all_ns: u64 = request_causes(&evidence).iter().map(|cause| cause.ns).sum();
            prop_assert_eq!(all_ns, evidence.completed_ns.saturating_sub(evidence.submitted_ns));
        }
    }
}
