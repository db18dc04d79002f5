// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results of one source, of a whole span at once or of its parts one after the other.

use std::collections::BTreeMap;

use super::{Headline, HeldUp, LateCounts, LateOf};
use crate::programs::Programs;
use crate::recording::{Measured, Unmeasured};
use crate::snapshot::{Sleeper, Unexplained};
use crate::sources::{Card, Judged, Remark, count_lost, named};
use crate::units::{format_ns, format_round_ns};
use crate::{Histogram, Snapshot};

/// Summary of one source over a span, for the overview.
#[derive(Clone, Debug)]
pub struct SourceSummary<'a> {
    /// The source.
    pub card: &'a Card,
    /// Backend that measured.
    pub backend: String,
    /// The machine's host name.
    pub host: String,
    /// PID namespace, as in the snapshot.
    pub pid_namespace: Option<u32>,
    /// Start of the span, in nanoseconds since 1970 (UTC).
    pub start_unix_ns: u64,
    /// Duration of the span in nanoseconds.
    pub duration_ns: u64,
    /// Values that add up over time.
    figures: Histogram,
    /// Values of the waiters at the end.
    at_end: Histogram,
    remark: Remark,
    unexplained: Unexplained,
    lost: BTreeMap<String, u64>,
    /// Threads still in uninterruptible sleep and over the threshold at the end.
    sleepers: Vec<Sleeper>,
    /// Programs by the share of time that they were held up.
    programs: Programs,
    /// Whether there was anything to measure.
    has_series: bool,
}

impl<'a> SourceSummary<'a> {
    /// Summarizes the snapshot of a whole span.
    pub fn new(card: &'a Card, snapshot: &Snapshot) -> Self {
        let Snapshot { backend, host, lost, .. } = snapshot;
        SourceSummary {
            card,
            backend: backend.clone(),
            host: host.clone(),
            pid_namespace: snapshot.pid_namespace,
            start_unix_ns: snapshot.start_unix_ns,
            duration_ns: snapshot.duration_ns,
            figures: (card.figures)(snapshot),
            at_end: Histogram::default(),
            remark: (card.remark)(snapshot),
            unexplained: snapshot.unexplained,
            lost: lost.iter().filter(|(_, count)| **count > 0).map(|(why, count)| (why.clone(), *count)).collect(),
            sleepers: snapshot.uninterruptible.clone(),
            programs: snapshot.programs.clone(),
            has_series: !snapshot.series.is_empty(),
        }
    }

    /// Summarizes the snapshot of a part of the span; [`SourceSummary::add`] adds those that follow.
    pub fn of_part(card: &'a Card, snapshot: &mut Snapshot) -> Self {
        // Stacks show the waiters at the end, and series what happened.
        let stacks = std::mem::take(&mut snapshot.stacks);
        let found = SourceSummary::new(card, snapshot);
        let series = std::mem::take(&mut snapshot.series);
        snapshot.stacks = stacks;
        let at_end = (card.figures)(snapshot);
        snapshot.series = series;
        SourceSummary { at_end, ..found }
    }

    /// Adds the summary of the next part.
    pub fn add(&mut self, later: &SourceSummary<'_>) {
        self.duration_ns = self.duration_ns.saturating_add(later.duration_ns);
        self.figures.merge(&later.figures);
        self.at_end.clone_from(&later.at_end);
        self.remark.clone_from(&later.remark);
        self.sleepers.clone_from(&later.sleepers);
        let dropped = self.programs.add(&later.programs);
        if dropped > 0 {
            *self.lost.entry("merged_full".to_owned()).or_default() += dropped;
        }
        self.has_series |= later.has_series;
        self.unexplained.events = self.unexplained.events.saturating_add(later.unexplained.events);
        self.unexplained.total_ns = self.unexplained.total_ns.saturating_add(later.unexplained.total_ns);
        for (reason, count) in &later.lost {
            let lost = self.lost.entry(reason.clone()).or_default();
            *lost = lost.saturating_add(*count);
        }
    }

    /// Returns the remark besides the figures.
    pub fn remark(&self) -> &Remark {
        &self.remark
    }

    /// Returns whether there is a remark, which can only be derived from the snapshot of the whole span.
    pub fn has_remark(&self) -> bool {
        !self.remark.text.is_empty()
    }

    /// Replaces the remark with that of the whole span's snapshot.
    pub fn remark_on(&mut self, snapshot: &Snapshot) {
        self.remark = (self.card.remark)(snapshot);
    }

    /// Returns whether there was nothing to measure.
    pub fn is_nothing(&self) -> bool {
        !self.has_series && count_lost(self.card.name, &self.lost) == 0
    }

    /// Removes the sources that had nothing to measure and for which the recording has a reason; returns them with the
    /// reason.
    pub fn set_aside(all: &mut Vec<SourceSummary<'_>>, measured: &[Measured]) -> Vec<Unmeasured> {
        let mut aside = Vec::new();
        all.retain(|of| {
            let measured = measured.iter().find(|measured| measured.source == of.card.name);
            let nothing = measured.and_then(|measured| measured.nothing.clone()).filter(|_| of.is_nothing());
            let is_there = nothing.is_none();
            aside.extend(nothing.map(|reason| Unmeasured::new(of.card.name, reason)));
            is_there
        });
        aside
    }

    /// Returns an upper bound of the summary's memory in bytes.
    pub fn heap_bytes(&self) -> usize {
        // Each text is an allocation of its own, and a map has nodes with room for eleven entries.
        let text = |text: &String| if text.is_empty() { 0 } else { text.len() + 32 };
        let texts = [&self.backend, &self.host, &self.remark.text].map(text).iter().sum::<usize>();
        let lost = self.lost.keys().map(text).sum::<usize>() + self.lost.len().div_ceil(6) * 11 * 40;
        let buckets = [&self.figures, &self.at_end].map(|of| of.iter().count() * 12 + 64).iter().sum::<usize>();
        let of_sleeper = |of: &Sleeper| {
            let others = of.process.iter().chain(&of.waits_in).map(text).sum::<usize>();
            size_of::<Sleeper>() + text(&of.who.to_string()) + others
        };
        size_of::<Self>()
            + self.programs.heap_bytes()
            + texts
            + lost
            + buckets
            + self.sleepers.iter().map(of_sleeper).sum::<usize>()
    }

    /// Returns the maximum of the values; `None` if there are none.
    pub fn max_ns(&self) -> Option<u64> {
        let has_any = !self.figures.is_empty() || !self.at_end.is_empty();
        has_any.then(|| self.figures.max_ns().max(self.at_end.max_ns()))
    }

    /// Returns the values that add up over time.
    pub fn adding(&self) -> &Histogram {
        &self.figures
    }

    /// Returns the values of the waiters at the end; those of the next part replace them.
    pub fn at_end(&self) -> &Histogram {
        &self.at_end
    }

    /// Returns the programs by the share of time that they were held up.
    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Returns the late events that were too many to explain.
    pub fn unexplained(&self) -> Unexplained {
        self.unexplained
    }

    /// Returns the number of events that could not be counted, by reason.
    pub fn lost(&self) -> &BTreeMap<String, u64> {
        &self.lost
    }

    /// Returns whether there was anything to measure.
    pub fn has_series(&self) -> bool {
        self.has_series
    }

    /// Returns all values.
    pub fn figures(&self) -> Histogram {
        let mut figures = self.figures.clone();
        figures.merge(&self.at_end);
        figures
    }

    /// Returns lower bounds of the number of late values that add up over time, and of late waiters at the end.
    pub fn late_parts(&self) -> (u64, u64) {
        (self.surely_late(&self.figures), self.surely_late(&self.at_end).max(self.sleepers.len() as u64))
    }

    /// Returns a lower bound of the number of late values.
    fn late_figures(&self, figures: &Histogram) -> u64 {
        let is_late = !figures.is_empty() && figures.max_ns() >= self.card.judged.late_from_ns;
        self.surely_late(figures).max(self.sleepers.len() as u64).max(u64::from(is_late))
    }

    /// Counts the values in buckets above the threshold: one that begins below it may have some too.
    fn surely_late(&self, figures: &Histogram) -> u64 {
        let late_from_ns = self.card.judged.late_from_ns;
        figures.iter().filter(|(ns, _)| *ns.start() >= late_from_ns).map(|(_, count)| count).sum()
    }

    pub(super) fn headline(&self, lates: LateCounts, held_up: LateCounts) -> Headline {
        let SourceSummary { card, unexplained, remark, .. } = self;
        let late = lates.count + unexplained.events;
        let figures = self.figures();
        let next = |judged: &Judged| judged.next.replace("{from}", &format_round_ns(judged.late_from_ns));
        let late_of = card.events.map(|judged| LateOf {
            of: judged.of.to_owned(),
            late_from_ns: judged.late_from_ns,
            max_ns: lates.max_ns,
            next: next(&judged),
        });
        Headline {
            source: card.name.to_owned(),
            backend: self.backend.clone(),
            of: card.judged.of.to_owned(),
            count: figures.count(),
            p50_ns: figures.quantile_ns(0.5),
            p99_ns: figures.quantile_ns(0.99),
            max_ns: figures.max_ns(),
            late_from_ns: card.judged.late_from_ns,
            late,
            sleepers: self.sleepers.clone(),
            late_figures: self.late_figures(&figures),
            late_ns: lates.total_ns.saturating_add(held_up.total_ns).saturating_add(unexplained.total_ns),
            unexplained: *unexplained,
            late_of,
            held_up: card.held_up.map(|judged| HeldUp {
                of: judged.of.to_owned(),
                late_from_ns: judged.late_from_ns,
                late: held_up.count,
                late_ns: held_up.total_ns,
                max_ns: held_up.max_ns,
                next: next(&judged),
                for_sleepers: Vec::new(),
            }),
            is_late: late > 0 || held_up.count > 0 || figures.max_ns() >= card.judged.late_from_ns || remark.is_late,
            remark: remark.text.clone(),
            next: next(&card.judged),
            lost: self.lost.clone(),
        }
    }
}

/// Lists sources of a recording with a threshold above the overview's, so that late events are missing.
pub fn not_recorded(sources: &[Measured]) -> impl Iterator<Item = Unmeasured> {
    sources.iter().filter_map(|of| {
        let (from_ns, own_ns) = (of.late_from_ns?, named(&of.source)?.events().late_from_ns);
        let reason = format!("late events of {} and longer only: the recording has no others", format_ns(from_ns));
        (from_ns > own_ns).then(|| Unmeasured::new(of.source.clone(), reason))
    })
}
