// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who caused how much delay, over many late events.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use crate::{CauseKind, LateEvent};

/// How many culprits are told apart; those that come later are counted together.
const CULPRITS: usize = 10_000;
/// How many handlers one culprit's victims are told apart by.
const VICTIMS: usize = 1_000;

/// Adds up what each culprit did. Memory is bounded.
#[derive(Debug, Default)]
pub struct Culprits {
    /// By kind and then by name, so that a name is looked up without being copied.
    delays: HashMap<CauseKind, HashMap<String, Delay>>,
    count: usize,
    unknown: Delay,
    others: Delay,
    /// Numbers stand for the names of victims, which are the same few again and again.
    handlers: HashMap<String, u32>,
    events: u64,
    latency_ns: u64,
}

/// A culprit and the delay it caused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Culprit {
    /// How it delayed others.
    pub kind: CauseKind,
    /// Its name.
    pub who: String,
    /// What it caused.
    pub caused: Caused,
}

/// Delay, by whomever it was caused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caused {
    /// How many late events had to wait for it.
    pub items: u64,
    /// How many handlers (or threads) these had; no more than 1,000 are told apart.
    pub handlers: u64,
    /// The delay in all.
    pub total_ns: u64,
    /// The longest delay of one late event.
    pub worst_ns: u64,
}

/// Culprits in order, and what is not one culprit's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranking {
    /// How many late events were explained.
    pub events: u64,
    /// How long these waited in all: all delays below add up to it.
    pub latency_ns: u64,
    /// By the delay they caused, largest first.
    pub culprits: Vec<Culprit>,
    /// What those caused that were too many to be told apart.
    pub others: Caused,
    /// What cannot be told.
    pub unknown: Caused,
}

#[derive(Debug, Default)]
struct Delay {
    items: u64,
    total_ns: u64,
    worst_ns: u64,
    victims: BTreeSet<u32>,
}

impl Culprits {
    /// Adds the causes of one event; an event without causes was not explained and does not count.
    pub fn add(&mut self, event: &LateEvent) {
        if event.causes.is_empty() {
            return;
        }
        self.events += 1;
        self.latency_ns = self.latency_ns.saturating_add(event.latency_ns);
        let victim = self.number_of(&event.subject);
        // What is unknown for several reasons, or of several culprits that are not told apart, is one delay of this event.
        let (mut unknown_ns, mut others_ns) = (0u64, 0u64);
        for cause in &event.causes {
            if cause.kind == CauseKind::Unknown {
                unknown_ns = unknown_ns.saturating_add(cause.ns);
                continue;
            }
            let of_kind = self.delays.entry(cause.kind).or_default();
            if let Some(delay) = of_kind.get_mut(&cause.who) {
                delay.add(cause.ns, victim);
            } else if self.count < CULPRITS {
                self.count += 1;
                of_kind.entry(cause.who.clone()).or_default().add(cause.ns, victim);
            } else {
                others_ns = others_ns.saturating_add(cause.ns);
            }
        }
        self.unknown.add(unknown_ns, victim);
        self.others.add(others_ns, victim);
    }

    /// Everything added since the previous call, ranked.
    pub fn take(&mut self) -> Ranking {
        let taken = std::mem::take(self);
        let mut culprits: Vec<Culprit> = taken
            .delays
            .into_iter()
            .flat_map(|(kind, delays)| {
                delays.into_iter().map(move |(who, delay)| Culprit { kind, who, caused: delay.caused() })
            })
            .collect();
        culprits.sort_by(|a, b| {
            let rank =
                |culprit: &Culprit| (Reverse(culprit.caused.total_ns), Reverse(culprit.caused.items), culprit.kind);
            rank(a).cmp(&rank(b)).then_with(|| a.who.cmp(&b.who))
        });
        Ranking {
            events: taken.events,
            latency_ns: taken.latency_ns,
            culprits,
            others: taken.others.caused(),
            unknown: taken.unknown.caused(),
        }
    }

    fn number_of(&mut self, handler: &str) -> u32 {
        if let Some(&number) = self.handlers.get(handler) {
            return number;
        }
        // Names beyond the limit share a number.
        let number = self.handlers.len().min(CULPRITS) as u32;
        if self.handlers.len() < CULPRITS {
            self.handlers.insert(handler.to_owned(), number);
        }
        number
    }
}

impl Delay {
    fn add(&mut self, ns: u64, victim: u32) {
        if ns == 0 {
            return;
        }
        self.items += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
        self.worst_ns = self.worst_ns.max(ns);
        if self.victims.len() < VICTIMS {
            self.victims.insert(victim);
        }
    }

    fn caused(&self) -> Caused {
        Caused {
            items: self.items,
            handlers: self.victims.len() as u64,
            total_ns: self.total_ns,
            worst_ns: self.worst_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;

    fn late(handler: &str, causes: &[(CauseKind, &str, u64)]) -> LateEvent {
        let causes: Vec<Cause> =
            causes.iter().map(|&(kind, who, ns)| Cause { kind, who: who.to_owned(), ns, stack: Vec::new() }).collect();
        LateEvent {
            subject: handler.to_owned(),
            latency_ns: causes.iter().map(|cause| cause.ns).sum(),
            causes,
            ..LateEvent::default()
        }
    }

    #[test]
    fn delays_of_one_culprit_add_up_over_its_victims() {
        let mut culprits = Culprits::default();
        culprits.add(&late("a", &[(CauseKind::Work, "hog", 40), (CauseKind::Thread, "dd:1", 2)]));
        culprits.add(&late(
            "b",
            &[(CauseKind::Work, "hog", 50), (CauseKind::Unknown, "x", 1), (CauseKind::Unknown, "y", 2)],
        ));
        culprits.add(&late("b", &[(CauseKind::Work, "hog", 1)]));
        culprits.add(&LateEvent { latency_ns: 99, ..LateEvent::default() });
        let ranking = culprits.take();
        let hog = Caused { items: 3, handlers: 2, total_ns: 91, worst_ns: 50 };
        let dd = Caused { items: 1, handlers: 1, total_ns: 2, worst_ns: 2 };
        assert_eq!((ranking.events, ranking.latency_ns), (3, 96));
        assert_eq!(
            ranking.culprits,
            [
                Culprit { kind: CauseKind::Work, who: "hog".to_owned(), caused: hog },
                Culprit { kind: CauseKind::Thread, who: "dd:1".to_owned(), caused: dd },
            ]
        );
        assert_eq!(ranking.unknown, Caused { items: 1, handlers: 1, total_ns: 3, worst_ns: 3 });
        assert_eq!(culprits.take(), Ranking::default());
    }

    #[test]
    fn more_culprits_than_there_is_room_for_are_counted_together() {
        let mut culprits = Culprits::default();
        for number in 0..CULPRITS as u64 + 5 {
            culprits.add(&late(&format!("handler{number}"), &[(CauseKind::Thread, &format!("sh:{number}"), 7)]));
        }
        culprits.add(&late("a", &[(CauseKind::Thread, "sh:0", 7)]));
        let ranking = culprits.take();
        assert_eq!(ranking.culprits.len(), CULPRITS);
        assert_eq!((ranking.others.items, ranking.others.total_ns, ranking.culprits[0].caused.items), (5, 35, 2));
        let told: u64 = ranking.culprits.iter().map(|culprit| culprit.caused.total_ns).sum();
        assert_eq!(told + ranking.others.total_ns, ranking.latency_ns);
    }

    #[test]
    fn victims_of_one_culprit_are_told_apart_up_to_a_limit() {
        let mut culprits = Culprits::default();
        for number in 0..VICTIMS + 9 {
            culprits.add(&late(&format!("handler{number}"), &[(CauseKind::Work, "hog", 1)]));
        }
        assert_eq!(culprits.take().culprits[0].caused.handlers, VICTIMS as u64);
    }
}
