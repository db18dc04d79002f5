// SPDX-License-Identifier: MIT OR Apache-2.0
//! The card of each source: what everything that speaks of all sources knows of it.

mod block;
mod irqsoff;
mod lost;
mod offcpu;
mod sqpoll;
mod timerlat;
mod wq;

pub use block::BLOCK;
pub use irqsoff::IRQSOFF;
pub use lost::{Reason, SHARED_LOST};
pub use offcpu::OFFCPU;
pub use sqpoll::SQPOLL;
pub use timerlat::TIMERLAT;
pub use wq::WQ;

use crate::late::SLEEPER;
use crate::merge::{Merging, sum_all};
use crate::{Histogram, LateEvent, Snapshot};

/// Every source, in the order in which they are listed.
pub static CARDS: [&Card; 6] = [&WQ, &TIMERLAT, &IRQSOFF, &OFFCPU, &SQPOLL, &BLOCK];

/// What a source measures, and how a look judges it.
#[derive(Debug)]
pub struct Card {
    /// Lower-case name: folder, command and JSON `source`.
    pub name: &'static str,
    /// What its headline figures are of, and when one of them is late.
    pub judged: Judged,
    /// The headline figures of a snapshot.
    pub figures: fn(&Snapshot) -> Histogram,
    /// What its late events are, where they are of something else than its figures.
    pub events: Option<Judged>,
    /// What those of its late events are that have a path.
    pub held_up: Option<Judged>,
    /// What else there is to say of a snapshot.
    pub remark: fn(&Snapshot) -> Remark,
    /// What to change, by what a snapshot shows, in a sentence each.
    pub advice: fn(&Snapshot) -> Vec<String>,
    /// Whether it tells this late event of another source as well: where both measure, that counts once, here.
    pub tells: fn(&LateEvent) -> bool,
    /// What becomes of each figure of its series where two spans become one.
    pub merging: fn(&str) -> Merging,
    /// Those figures of a series that are shares of its time, in the order of their names in a bar; the rest is not told.
    pub shares: &'static [&'static str],
    /// What else is judged of its series than latencies.
    pub judged_share: Option<JudgedShare>,
    /// Of what its stacks tell; empty where it has none.
    pub stacks: &'static str,
    /// The label by which its series are added up first, where they are many of one thing.
    pub grouped_by: Option<&'static str>,
    /// What a look leaves out, and the command that measures it.
    pub beyond_a_look: &'static [(&'static str, &'static str)],
    /// Why its events may be lost, beside [`SHARED_LOST`], in the order of their names.
    pub lost: &'static [Reason],
}

/// A latency that is judged by one limit.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// Whose latency, until when; empty where only late events are seen.
    pub of: &'static str,
    /// From where on one is late, in nanoseconds: what is longer is noticed by those who wait, on a machine that is not
    /// set up for real-time work as well as on one that is.
    pub late_from_ns: u64,
    /// The command that tells more, with the limit in place of `{from}`.
    pub next: &'static str,
}

/// A share of time that is judged: of each series that has it.
#[derive(Clone, Copy, Debug)]
pub struct JudgedShare {
    /// The figure's name.
    pub value: &'static str,
    /// From where on it is late, as a fraction of 1.
    pub late_from: f64,
    /// What the series are of, and what those are called that are late.
    pub of: &'static str,
    /// The same.
    pub late: &'static str,
}

impl JudgedShare {
    /// In words, of so many series of which some are late.
    pub fn remark(&self, all: usize, late: usize) -> Remark {
        Remark { text: format!("{}: {all}, {}: {late}", self.of, self.late), is_late: late > 0 }
    }
}

/// What figures alone do not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remark {
    /// In words; empty for nothing.
    pub text: String,
    /// Whether something is late by it.
    pub is_late: bool,
}

impl Card {
    /// A source whose late events are those of its figures, and that has nothing else to say.
    pub const fn new(name: &'static str, judged: Judged, figures: fn(&Snapshot) -> Histogram) -> Self {
        Card {
            name,
            judged,
            figures,
            events: None,
            held_up: None,
            remark: |_| Remark { text: String::new(), is_late: false },
            advice: |_| Vec::new(),
            tells: |_| false,
            merging: sum_all,
            shares: &[],
            judged_share: None,
            stacks: "",
            grouped_by: None,
            beyond_a_look: &[],
            lost: &[],
        }
    }

    /// What its late events are judged by.
    pub fn events(&self) -> &Judged {
        self.events.as_ref().unwrap_or(&self.judged)
    }

    /// What this late event of it is judged by.
    pub fn judges(&self, event: &LateEvent) -> &Judged {
        self.held_up.as_ref().filter(|_| !event.path.is_empty()).unwrap_or_else(|| self.events())
    }

    /// Whether a late event of it counts here, and not with one of these sources that tells it as well.
    pub fn counts(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        !beside.iter().any(|other| other.name != self.name && (other.tells)(event))
    }

    /// Whether it is as long as what is late, and counts here.
    pub fn judges_late(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        event.latency_ns >= self.judges(event).late_from_ns && self.counts(event, beside)
    }

    /// The same, but for what waits for somebody who sleeps, which may be so by design.
    pub fn is_late(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        self.judges_late(event, beside) && !event.labels.contains_key(SLEEPER)
    }

    /// Every reason for which its events may be lost, in the order of their names.
    pub fn reasons(&self) -> Vec<&'static Reason> {
        let mut reasons: Vec<&Reason> = self.lost.iter().chain(SHARED_LOST).collect();
        reasons.sort_by_key(|reason| reason.name);
        reasons
    }

    /// What such a reason means.
    pub fn meaning(&self, reason: &str) -> Option<&'static str> {
        self.lost.iter().chain(SHARED_LOST).find(|known| known.name == reason).map(|known| known.meaning)
    }
}

/// The card of the source of this name.
pub fn named(name: &str) -> Option<&'static Card> {
    CARDS.into_iter().find(|card| card.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_means_one_thing_in_a_source() {
        for card in CARDS {
            let names: Vec<&str> = card.reasons().iter().map(|reason| reason.name).collect();
            assert!(names.is_sorted_by(|a, b| a < b), "{}: {names:?}", card.name);
            assert!(card.lost.is_sorted_by_key(|reason| reason.name), "{}", card.name);
        }
        assert_ne!(WQ.meaning("stacks"), IRQSOFF.meaning("stacks"));
        assert_eq!(WQ.meaning("torn"), None);
    }

    #[test]
    fn a_meaning_is_a_line() {
        for Reason { name, meaning } in CARDS.into_iter().flat_map(Card::reasons) {
            assert!((20..=120).contains(&meaning.len()) && !meaning.contains('\n'), "{name}: {}", meaning.len());
        }
    }

    #[test]
    fn the_command_that_tells_more_takes_the_limit() {
        for card in CARDS {
            assert!(named(card.name).is_some_and(|found| std::ptr::eq(found, card)));
            for judged in [&card.judged, card.events()].into_iter().chain(&card.held_up) {
                assert!(judged.next.starts_with(&format!("whylate {}", card.name)), "{}", judged.next);
                assert!(judged.next.contains("{from}"), "{}", judged.next);
            }
        }
    }
}
