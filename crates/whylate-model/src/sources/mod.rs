// SPDX-License-Identifier: MIT OR Apache-2.0
//! Card of each source: the properties that generic code uses.

mod block;
mod irqsoff;
mod lost;
mod merging;
mod offcpu;
mod sqpoll;
mod timerlat;
mod wq;

pub use block::BLOCK;
pub use irqsoff::IRQSOFF;
pub use lost::{Reason, SHARED_LOST};
pub use merging::{Merging, PRESENT, sum_all};
pub use offcpu::OFFCPU;
pub use sqpoll::SQPOLL;
pub use timerlat::TIMERLAT;
pub use wq::WQ;

use std::collections::BTreeMap;

use crate::late::LateKind;
use crate::snapshot::{RecordedFrom, Unexplained};
use crate::{Histogram, LateEvent, Snapshot};

/// All sources, in listing order.
pub static CARDS: [&Card; 6] = [&WQ, &TIMERLAT, &IRQSOFF, &OFFCPU, &SQPOLL, &BLOCK];

/// Stands for a source's name where something is lost by what the sources share, such as the CPU account.
pub const SHARED: &str = "all";

/// Properties of a source, and the thresholds by which the overview judges it.
#[derive(Debug)]
pub struct Card {
    /// Lower-case name: directory, command and JSON `source`.
    pub name: &'static str,
    /// Name of one late event among those of other sources.
    pub event: &'static str,
    /// Words before the subject of a late event; empty if the subject speaks for itself, as a thread does.
    pub subject: &'static str,
    /// Latency of the headline figures, and its threshold.
    pub judged: Judged,
    /// Returns the headline figures of a snapshot.
    pub figures: fn(&Snapshot) -> Histogram,
    /// Latency of its late events, if another one than that of the figures.
    pub events: Option<Judged>,
    /// Latency of late events with a path.
    pub held_up: Option<Judged>,
    /// Returns a further remark on a snapshot.
    pub remark: fn(&Snapshot) -> Remark,
    /// Returns advice on a snapshot, one sentence each.
    pub advice: fn(&Snapshot) -> Vec<String>,
    /// Returns whether this source reports another source's late event as well; if both are selected, it counts only
    /// here.
    pub also_reports: fn(&LateEvent) -> bool,
    /// Returns how a value of its series is merged when two spans are merged.
    pub merging: fn(&str) -> Merging,
    /// Values that are shares of time, in the order of a stacked bar; the rest of the time has no name.
    pub shares: &'static [&'static str],
    /// Share of time with a threshold, in addition to latencies.
    pub judged_share: Option<JudgedShare>,
    /// Meaning of its stacks; empty if it has none.
    pub stacks: &'static str,
    /// Label by which its series are grouped first, if there are many of one thing.
    pub grouped_by: Option<&'static str>,
    /// Phases of its latencies in chronological order, with their meanings; empty if it has none.
    pub phases: &'static [(&'static str, &'static str)],
    /// Columns of a table of its series, the most important first; the others follow.
    pub columns: &'static [SeriesColumn<'static>],
    /// Names of its late events in sentences.
    pub words: EventWords,
    /// Measurements that the overview omits, and the commands that make them.
    pub beyond_a_look: &'static [(&'static str, &'static str)],
    /// Reasons for lost events, in addition to [`SHARED_LOST`], sorted by name.
    pub lost: &'static [Reason],
}

/// Part of a series, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SeriesColumn<'a> {
    /// A label.
    Label(&'a str),
    /// A distribution.
    Distribution(&'a str),
    /// A value.
    Value(&'a str),
}

/// Nouns and verbs for the events of a source.
#[derive(Clone, Copy, Debug)]
pub struct EventWords {
    /// One late event, e.g. `late item`.
    pub late: &'static str,
    /// Verb of the latency, e.g. `waited`.
    pub lasted: &'static str,
    /// One event, late or not, e.g. `item`.
    pub event: &'static str,
    /// Several latencies, e.g. `waits`.
    pub latencies: &'static str,
    /// Grouping of events, e.g. `handler`.
    pub of: &'static str,
}

/// Waits of threads for a CPU or for others.
const THREAD_WAITS: EventWords =
    EventWords { late: "long wait", lasted: "took", event: "wait", latencies: "waits", of: "thread" };

/// A latency with one threshold.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// Subject of the latency, and its end; empty if only late events are recorded.
    pub of: &'static str,
    /// What waits, and until when, in at most 24 columns.
    pub row: &'static str,
    /// Name of one late event, and of several.
    pub late: [&'static str; 2],
    /// Threshold in nanoseconds: a longer latency is noticed by users, on machines with or without a real-time setup.
    pub late_from_ns: u64,
    /// Command that shows more, with `{from}` in place of the threshold.
    pub next: &'static str,
}

/// A share of time with a threshold, in each series that has it.
#[derive(Clone, Copy, Debug)]
pub struct JudgedShare {
    /// Name of the value.
    pub value: &'static str,
    /// Threshold, as a fraction of 1.
    pub late_from: f64,
    /// Name of the series.
    pub of: &'static str,
    /// Name of series above the threshold.
    pub late: &'static str,
}

impl JudgedShare {
    /// Returns the remark on `all` series of which `late` are above the threshold.
    pub fn remark(&self, all: usize, late: usize) -> Remark {
        Remark { text: format!("{}: {all}, {}: {late}", self.of, self.late), is_late: late > 0 }
    }
}

/// Information beyond the figures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remark {
    /// Text; empty for nothing.
    pub text: String,
    /// Whether it reports something late.
    pub is_late: bool,
}

impl Card {
    /// Marks late events without causes that were recorded from a lower threshold than the requested one: how many of
    /// them reached it is unknown. There are none if no latency of the source did.
    pub fn limit_unexplained(&self, snapshot: &mut Snapshot, from: RecordedFrom) {
        if snapshot.unexplained.is_none() || from.asked_ns <= from.recorded_ns {
            return;
        }
        let figures = (self.figures)(snapshot);
        let none_reached = self.events.is_none() && !figures.is_empty() && figures.max_ns() < from.asked_ns;
        snapshot.unexplained = match none_reached {
            true => Unexplained::default(),
            false => Unexplained { recorded: Some(from), ..snapshot.unexplained },
        };
    }

    /// Creates a card that uses the threshold of its figures for late events, and defaults otherwise.
    pub const fn new(name: &'static str, judged: Judged, figures: fn(&Snapshot) -> Histogram) -> Self {
        Card {
            name,
            event: judged.late[0],
            subject: "",
            judged,
            figures,
            events: None,
            held_up: None,
            remark: |_| Remark { text: String::new(), is_late: false },
            advice: |_| Vec::new(),
            also_reports: |_| false,
            merging: sum_all,
            shares: &[],
            judged_share: None,
            stacks: "",
            grouped_by: None,
            phases: &[],
            columns: &[],
            words: THREAD_WAITS,
            beyond_a_look: &[],
            lost: &[],
        }
    }

    /// Sorts the columns of a table of its series by importance.
    pub fn sort_columns(&self, columns: &mut [SeriesColumn<'_>]) {
        let place = |column: &SeriesColumn<'_>| self.columns.iter().position(|of| of == column);
        columns.sort_by_key(|column| (place(column).unwrap_or(usize::MAX), *column));
    }

    /// Returns the threshold of the source's late events.
    pub fn events(&self) -> &Judged {
        self.events.as_ref().unwrap_or(&self.judged)
    }

    /// Returns the threshold of this late event.
    pub fn judges(&self, event: &LateEvent) -> &Judged {
        self.held_up.as_ref().filter(|_| event.kind != LateKind::Latency).unwrap_or_else(|| self.events())
    }

    /// Returns whether this source counts the late event, and none of the sources `beside` it reports it as well.
    pub fn counts(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        !beside.iter().any(|other| other.name != self.name && (other.also_reports)(event))
    }

    /// Returns whether the event is above the threshold and counts for this source.
    pub fn judges_late(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        event.latency_ns >= self.judges(event).late_from_ns && self.counts(event, beside)
    }

    /// Returns whether the event is late: above the threshold, counted for this source, and not a wait for a sleeping
    /// thread, which may be by design.
    pub fn is_late(&self, event: &LateEvent, beside: &[&Card]) -> bool {
        self.judges_late(event, beside) && event.kind != LateKind::TimerWait
    }

    /// Returns all reasons for lost events, sorted by name.
    pub fn reasons(&self) -> Vec<&'static Reason> {
        let mut reasons: Vec<&Reason> = self.lost.iter().chain(SHARED_LOST).collect();
        reasons.sort_by_key(|reason| reason.name);
        reasons
    }

    /// Returns what is known of a reason.
    pub fn reason(&self, name: &str) -> Option<&'static Reason> {
        self.lost.iter().chain(SHARED_LOST).find(|known| known.name == name)
    }

    /// Returns the meaning of a reason.
    pub fn meaning(&self, reason: &str) -> Option<&'static str> {
        self.reason(reason).map(|known| known.meaning)
    }
}

/// Returns the card of the source of this name.
pub fn named(name: &str) -> Option<&'static Card> {
    CARDS.into_iter().find(|card| card.name == name)
}

/// Returns the counts of a source's lost events by reason, without zeros and without events that are left out on
/// purpose. What the sources share has no card, and lost all that it counts.
pub fn lost_events<'a>(
    source: &str,
    counts: &'a BTreeMap<String, u64>,
) -> impl Iterator<Item = (&'a str, u64)> + use<'a> {
    let card = named(source);
    let is_lost = move |reason: &str| card.and_then(|card| card.reason(reason)).is_none_or(|known| known.is_lost);
    let counts = counts.iter().map(|(reason, &count)| (reason.as_str(), count));
    counts.filter(move |&(reason, count)| count > 0 && is_lost(reason))
}

/// Returns the number of a source's lost events.
pub fn count_lost(source: &str, counts: &BTreeMap<String, u64>) -> u64 {
    lost_events(source, counts).fold(0, |all, (_, count)| all.saturating_add(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_names_are_unique_in_a_source() {
        for card in CARDS {
            let names: Vec<&str> = card.reasons().iter().map(|reason| reason.name).collect();
            assert!(names.is_sorted_by(|a, b| a < b), "{}: {names:?}", card.name);
            assert!(card.lost.is_sorted_by_key(|reason| reason.name), "{}", card.name);
        }
        assert_ne!(WQ.meaning("stacks"), IRQSOFF.meaning("stacks"));
        assert_eq!(WQ.meaning("torn"), None);
    }

    #[test]
    fn events_left_out_on_purpose_are_not_lost() {
        let counts = [("own", 3), ("unmatched", 2), ("reused", 0), ("new", 1)];
        let counts = counts.map(|(reason, count)| (reason.to_owned(), count)).into();
        assert_eq!(lost_events(BLOCK.name, &counts).collect::<Vec<_>>(), [("new", 1), ("unmatched", 2)]);
        assert_eq!((count_lost(BLOCK.name, &counts), count_lost(SHARED, &counts)), (3, 6));
    }

    #[test]
    fn meanings_fit_one_line() {
        for Reason { name, meaning, .. } in CARDS.into_iter().flat_map(Card::reasons) {
            assert!((20..=120).contains(&meaning.len()) && !meaning.contains('\n'), "{name}: {}", meaning.len());
        }
    }

    #[test]
    fn next_command_takes_the_threshold() {
        for card in CARDS {
            assert!(named(card.name).is_some_and(|found| std::ptr::eq(found, card)));
            for judged in [&card.judged, card.events()].into_iter().chain(&card.held_up) {
                assert!(judged.next.starts_with(&format!("whylate {}", card.name)), "{}", judged.next);
                assert!(judged.next.contains("{from}"), "{}", judged.next);
            }
        }
    }
}
