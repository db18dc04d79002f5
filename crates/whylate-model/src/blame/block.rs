// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why an I/O request took long.
//!
//! Before its queue it was held back by limits, or no request was free. While it was queued, the device served others:
//! each instant is shared equally among the requests that were there. While it was there itself, others may have been,
//! too: then the instant is shared among these, else it is the device's own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::sum::{Blame, Sum};
use super::window::Span;
use crate::{Cause, CauseKind};

/// What a late request's causes are told from. Moments are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestEvidence {
    /// The device's name.
    pub device: String,
    /// It came to the block layer.
    pub submitted_ns: u64,
    /// It was given a request.
    pub made_ns: u64,
    /// It was handed to the device.
    pub issued_ns: u64,
    /// The device was done with it.
    pub completed_ns: u64,
    /// What holds requests back before the queue.
    pub held_back_by: String,
    /// Other requests that the device had meanwhile.
    pub others: Vec<OtherRequest>,
    /// Since when all of these are known.
    pub known_since_ns: u64,
}

/// Another request, while its device had it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherRequest {
    /// Whose and what it was, such as `fio:4711 (writes)`.
    pub who: String,
    /// The path of the cgroup that it is charged to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// It was handed to the device.
    pub issued_ns: u64,
    /// The device was done with it; later than anything where it is not.
    pub completed_ns: u64,
}

/// What made a request late, largest first; the causes add up to its latency.
pub fn request_causes(evidence: &RequestEvidence) -> Vec<Cause> {
    let RequestEvidence { device, submitted_ns, made_ns, issued_ns, completed_ns, .. } = evidence;
    let completed_ns = *completed_ns.max(submitted_ns);
    let made_ns = (*made_ns).clamp(*submitted_ns, completed_ns);
    let issued_ns = (*issued_ns).clamp(made_ns, completed_ns);
    let mut sum = Sum::default();
    sum.add(Blame::new(CauseKind::Throttled, evidence.held_back_by.as_str()), made_ns - submitted_ns, &[]);
    for (kind, span) in [
        (CauseKind::DiskQueue, Span { from_ns: made_ns, to_ns: issued_ns }),
        (CauseKind::Disk, Span { from_ns: issued_ns, to_ns: completed_ns }),
    ] {
        let known_ns = evidence.known_since_ns.clamp(span.from_ns, span.to_ns);
        sum.add(Blame::unknown("what else the device had was overwritten"), known_ns - span.from_ns, &[]);
        share(kind, Span { from_ns: known_ns, to_ns: span.to_ns }, device, &evidence.others, &mut sum);
    }
    sum.into_causes()
}

/// A moment at which a device gets a request, or is done with it.
struct Change<'a> {
    at_ns: u64,
    comes: bool,
    who: (&'a str, Option<&'a str>),
}

/// Shares a span among the requests that the device had; what it had none for is its own.
fn share(kind: CauseKind, span: Span, device: &str, others: &[OtherRequest], sum: &mut Sum<'_>) {
    let mut changes = Vec::new();
    for other in others {
        let (issued_ns, completed_ns) = (other.issued_ns.max(span.from_ns), other.completed_ns.min(span.to_ns));
        if issued_ns < completed_ns {
            let who = (other.who.as_str(), other.cgroup.as_deref());
            changes.push(Change { at_ns: issued_ns, comes: true, who });
            changes.push(Change { at_ns: completed_ns, comes: false, who });
        }
    }
    changes.sort_by_key(|change| change.at_ns);
    let mut present: BTreeMap<(&str, Option<&str>), u64> = BTreeMap::new();
    let mut now_ns = span.from_ns;
    let mut until = |at_ns: u64, present: &BTreeMap<(&str, Option<&str>), u64>| {
        let ns = at_ns - now_ns;
        now_ns = at_ns;
        let all: u64 = present.values().sum();
        if all == 0 {
            sum.add(Blame::new(kind, device), ns, &[]);
        }
        // What each gets is cut where the next one's begins, so that all of them are the whole.
        let (mut before, mut given_ns) = (0_u64, 0_u64);
        for (&(who, cgroup), &requests) in present {
            before += requests;
            let up_to_ns = (u128::from(ns) * u128::from(before) / u128::from(all)) as u64;
            let blame = Blame { cgroup: cgroup.map(str::to_owned), ..Blame::new(kind, who) };
            sum.add(blame, up_to_ns - given_ns, &[]);
            given_ns = up_to_ns;
        }
    };
    for change in changes {
        until(change.at_ns, &present);
        let requests = present.entry(change.who).or_default();
        if change.comes {
            *requests += 1;
        } else {
            *requests = requests.saturating_sub(1);
            if *requests == 0 {
                present.remove(&change.who);
            }
        }
    }
    until(span.to_ns, &present);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn other(who: &str, issued_ns: u64, completed_ns: u64) -> OtherRequest {
        OtherRequest { who: who.to_owned(), issued_ns, completed_ns, ..OtherRequest::default() }
    }

    fn evidence(moments: [u64; 4], others: &[(&str, u64, u64)]) -> RequestEvidence {
        let [submitted_ns, made_ns, issued_ns, completed_ns] = moments;
        RequestEvidence {
            device: "vda".to_owned(),
            submitted_ns,
            made_ns,
            issued_ns,
            completed_ns,
            held_back_by: "limits of vda".to_owned(),
            others: others.iter().map(|&(who, from_ns, to_ns)| other(who, from_ns, to_ns)).collect(),
            known_since_ns: 0,
        }
    }

    fn told(evidence: &RequestEvidence) -> Vec<(CauseKind, String, u64)> {
        request_causes(evidence).into_iter().map(|cause| (cause.kind, cause.who, cause.ns)).collect()
    }

    fn of(expected: &[(CauseKind, &str, u64)]) -> Vec<(CauseKind, String, u64)> {
        expected.iter().map(|&(kind, who, ns)| (kind, who.to_owned(), ns)).collect()
    }

    use CauseKind::{Disk, DiskQueue, Throttled, Unknown};

    #[test]
    fn alone_it_is_the_device() {
        assert_eq!(
            told(&evidence([100, 110, 130, 500], &[])),
            of(&[(Disk, "vda", 370), (DiskQueue, "vda", 20), (Throttled, "limits of vda", 10)])
        );
    }

    #[test]
    fn whom_it_waits_behind_has_the_time_in_the_queue() {
        // One of two others is done early; the rest of the queue is the other's. Then it is alone.
        let others = [("hog:1 (writes)", 0, 200), ("hog:2 (writes)", 0, 150), ("late:3 (reads)", 900, 950)];
        assert_eq!(
            told(&evidence([100, 100, 200, 260], &others)),
            of(&[(DiskQueue, "hog:1 (writes)", 75), (Disk, "vda", 60), (DiskQueue, "hog:2 (writes)", 25)])
        );
    }

    #[test]
    fn many_requests_of_one_are_a_larger_share() {
        let others = [("hog (writes)", 0, 1_000), ("hog (writes)", 0, 1_000), ("cat (reads)", 0, 1_000)];
        assert_eq!(
            told(&evidence([100, 100, 100, 400], &others)),
            of(&[(Disk, "hog (writes)", 200), (Disk, "cat (reads)", 100)])
        );
    }

    #[test]
    fn what_was_overwritten_is_unknown() {
        let evidence =
            RequestEvidence { known_since_ns: 250, ..evidence([100, 100, 200, 300], &[("hog (writes)", 220, 280)]) };
        assert_eq!(
            told(&evidence),
            of(&[
                (Unknown, "what else the device had was overwritten", 150),
                (Disk, "hog (writes)", 30),
                (Disk, "vda", 20)
            ])
        );
    }

    proptest! {
        #[test]
        fn causes_add_up(
            moments in any::<[u16; 4]>(),
            others in prop::collection::vec((0..4_u8, any::<u16>(), any::<u16>()), 0..20),
            known_since_ns in any::<u16>(),
        ) {
            let others: Vec<OtherRequest> = others
                .iter()
                .map(|&(who, from_ns, to_ns)| other(&format!("{who}"), from_ns.into(), to_ns.into()))
                .collect();
            let evidence =
                RequestEvidence { others, known_since_ns: known_since_ns.into(), ..evidence(moments.map(u64::from), &[]) };
            let all_ns: u64 = request_causes(&evidence).iter().map(|cause| cause.ns).sum();
            prop_assert_eq!(all_ns, evidence.completed_ns.saturating_sub(evidence.submitted_ns));
        }
    }
}
