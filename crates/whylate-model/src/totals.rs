// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters since the start, as a monitoring system reads them: waits, what was late, and who caused it.
//!
//! All memory is bounded. No counter falls while it is shown.

mod largest;

use std::collections::BTreeMap;

use crate::late::{CGROUP, LateKind};
use crate::name::cut;
use crate::units::printable;
use crate::{Card, Cause, CauseKind, Cgroup, Histogram, LateEvent, Snapshot};

pub use largest::Largest;

/// Number of culprits that are shown.
const MAX_CULPRITS: usize = 100;
/// Number of pairs of cgroups that are shown.
const MAX_PAIRS: usize = 100;
/// Number of reasons for lost events per source; the known ones are fewer.
const MAX_REASONS: usize = 64;
/// Maximum length of a label, in bytes.
const MAX_LABEL_BYTES: usize = 128;

/// A culprit as a label: without its TID, which would be another label after each restart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CausedBy {
    /// Source of the late events.
    pub source: &'static str,
    /// Kind of delay.
    pub kind: CauseKind,
    /// Name of the culprit, with `*` for numbers in names of pools.
    pub who: String,
    /// Cgroup of the culprit; empty if unknown or none, as of an interrupt.
    pub cgroup: Group,
}

/// A cgroup as a label: the ID of its container, or its path.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// ID of the container: 64 hexadecimal digits; empty if it is none.
    pub container: String,
    /// Path of a cgroup outside containers, e.g. `/system.slice/cron.service`; empty in a container.
    pub path: String,
}

/// A cgroup that delayed another one, or itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    /// Cgroup of the culprit.
    pub culprit: Group,
    /// Cgroup of the delayed thread.
    pub victim: Group,
}

/// A late event that stands for those of about its latency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Latency in nanoseconds.
    pub latency_ns: u64,
    /// Time in nanoseconds since 1970.
    pub at_unix_ns: u64,
    /// Kind of the largest cause.
    pub kind: CauseKind,
    /// Name of the largest cause.
    pub who: String,
    /// CPU of the event.
    pub cpu: u32,
}

/// Counters of one source.
#[derive(Clone, Debug, Default)]
pub struct SourceTotals {
    /// Backend that measures.
    pub backend: String,
    /// All latencies; `None` if the source measures only those that are late, or ages of waits that go on.
    pub waits: Option<Histogram>,
    /// Longest latency of the last span, in nanoseconds.
    pub longest_ns: u64,
    /// Number of late events.
    pub late: u64,
    /// Total latency of the late events, in nanoseconds.
    pub late_ns: u64,
    /// Late events without causes, and their total latency in nanoseconds.
    pub unexplained: (u64, u64),
    /// Lost events by reason.
    pub lost: BTreeMap<String, u64>,
    /// Run time of its BPF programs in nanoseconds; 0 unless the kernel counts.
    pub probe_ns: u64,
    /// The last late event of each power of two, by the exponent of its latency.
    pub examples: BTreeMap<u32, Example>,
}

/// Counters since the start.
#[derive(Clone, Debug)]
pub struct Totals {
    /// When the counters started from zero, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// End of the last span, in nanoseconds since 1970.
    pub ended_unix_ns: u64,
    /// Counters by source.
    pub sources: BTreeMap<&'static str, SourceTotals>,
    /// Delay by culprit.
    pub caused: Largest<CausedBy>,
    /// Delay by pair of cgroups.
    pub pairs: Largest<Pair>,
    /// The sources that measure: an event that two of them report counts once.
    cards: Vec<&'static Card>,
    /// Latency from which events count as late; `None` for each source's own limit.
    late_from_ns: Option<u64>,
}

impl Group {
    /// Returns the label of a cgroup.
    pub fn new(cgroup: &Cgroup) -> Self {
        match &cgroup.container {
            Some(id) => Group { container: id.clone(), path: String::new() },
            // A cgroup that is gone has an ID in place of its path, which would be a new label each time.
            None if !cgroup.path.starts_with('/') => Group { container: String::new(), path: "unknown".to_owned() },
            None => Group { container: String::new(), path: label(&without_runs(&cgroup.path)) },
        }
    }
}

/// Returns a path in which all sessions are one, and all transient units of systemd-run: each has a new name.
fn without_runs(path: &str) -> String {
    let component = |name: &str| {
        let runs = ["session-", "run-"].into_iter().find(|start| name.starts_with(start));
        let suffix = [".scope", ".service"].into_iter().find(|end| name.ends_with(end));
        match (runs, suffix) {
            (Some(start), Some(end)) => format!("{start}*{end}"),
            _ => name.to_owned(),
        }
    };
    path.split('/').map(component).collect::<Vec<_>>().join("/")
}

/// Returns printable text of bounded length.
fn label(text: &str) -> String {
    cut(printable(text), MAX_LABEL_BYTES)
}

impl Totals {
    /// Starts from zero, at this time in nanoseconds since 1970, with the sources that measure and the latency from which
    /// events count as late; `None` for each source's own limit.
    pub fn new(started_unix_ns: u64, cards: Vec<&'static Card>, late_from_ns: Option<u64>) -> Self {
        Totals {
            started_unix_ns,
            ended_unix_ns: started_unix_ns,
            sources: BTreeMap::new(),
            caused: Largest::new(MAX_CULPRITS),
            pairs: Largest::new(MAX_PAIRS),
            cards,
            late_from_ns,
        }
    }

    /// Adds a late event. Waits for a sleeping thread do not count as late, as in the overview.
    pub fn late(&mut self, card: &'static Card, event: &LateEvent) {
        let limit_ns = self.late_from_ns.unwrap_or(card.judges(event).late_from_ns);
        let is_late = event.latency_ns >= limit_ns && event.kind != LateKind::TimerWait;
        if !is_late || !card.counts(event, &self.cards) {
            return;
        }
        let of = self.sources.entry(card.name).or_default();
        of.late = of.late.saturating_add(1);
        of.late_ns = of.late_ns.saturating_add(event.latency_ns);
        if let Some(cause) = event.causes.iter().max_by_key(|cause| cause.ns) {
            let (who, latency_ns, at_unix_ns) = (name_of(cause), event.latency_ns, event.at_unix_ns);
            let example = Example { latency_ns, at_unix_ns, kind: cause.kind, who, cpu: event.cpu };
            of.examples.insert(event.latency_ns.max(1).ilog2(), example);
        }
        let victim = event.labels.get(CGROUP).map(|path| Group::new(&Cgroup::new(path)));
        for cause in &event.causes {
            let cgroup = cause.cgroup.as_ref().map(Group::new).unwrap_or_default();
            if let (Some(victim), Some(_)) = (&victim, &cause.cgroup) {
                let pair = Pair { culprit: cgroup.clone(), victim: victim.clone() };
                self.pairs.add(pair, cause.ns, event.at_unix_ns);
            }
            let by = CausedBy { source: card.name, kind: cause.kind, who: name_of(cause), cgroup };
            self.caused.add(by, cause.ns, event.at_unix_ns);
        }
    }

    /// Starts the next span.
    pub fn begin_span(&mut self) {
        self.sources.values_mut().for_each(|of| of.longest_ns = 0);
    }

    /// Adds a snapshot, without its late events.
    pub fn snapshot(&mut self, card: &'static Card, snapshot: &Snapshot) {
        let of = self.sources.entry(card.name).or_default();
        of.backend.clone_from(&snapshot.backend);
        if has_latencies(card) {
            let figures = (card.figures)(snapshot);
            of.longest_ns = of.longest_ns.max(figures.max_ns());
            of.waits.get_or_insert_default().merge(&figures);
        }
        let (events, total_ns) = of.unexplained;
        let unexplained = snapshot.unexplained;
        of.unexplained = (events.saturating_add(unexplained.events), total_ns.saturating_add(unexplained.total_ns));
        of.late = of.late.saturating_add(unexplained.events);
        of.late_ns = of.late_ns.saturating_add(unexplained.total_ns);
        of.probe_ns = of.probe_ns.saturating_add(snapshot.probe.run_ns);
        self.lost(card.name, &snapshot.lost);
        self.ended_unix_ns = self.ended_unix_ns.max(snapshot.start_unix_ns.saturating_add(snapshot.duration_ns));
    }

    /// Adds numbers of lost events of a source, or of [`SHARED`](crate::sources::SHARED).
    pub fn lost(&mut self, source: &'static str, lost: &BTreeMap<String, u64>) {
        let of = self.sources.entry(source).or_default();
        for (reason, count) in lost {
            if of.lost.len() < MAX_REASONS || of.lost.contains_key(reason) {
                let all = of.lost.entry(label(reason)).or_default();
                *all = all.saturating_add(*count);
            }
        }
    }

    /// Ends a span of this length: decides anew which culprits and pairs are shown.
    pub fn end_span(&mut self, ns: u64) {
        self.caused.pass(ns);
        self.pairs.pass(ns);
    }
}

/// Returns whether the figures of a source are all latencies of what it judges. Those of others are another quantity
/// than their late events: ages of waits that go on, which are seen in each span.
fn has_latencies(card: &Card) -> bool {
    card.events.is_none() && !card.judged.of.is_empty()
}

fn name_of(cause: &Cause) -> String {
    label(&cause.who.alike().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ActorName;
    use crate::sources::{CARDS, OFFCPU, SQPOLL, WQ};

    fn late(latency_ns: u64, causes: &[(CauseKind, ActorName, u64, &str)]) -> LateEvent {
        let of = |(kind, who, ns, cgroup): &(CauseKind, ActorName, u64, &str)| Cause {
            cgroup: (!cgroup.is_empty()).then(|| Cgroup::new(cgroup)),
            ..Cause::new(*kind, who.clone(), *ns)
        };
        let labels = [(CGROUP.to_owned(), "/victim.service".to_owned())].into();
        LateEvent { latency_ns, causes: causes.iter().map(of).collect(), labels, ..LateEvent::default() }
    }

    #[test]
    fn each_session_and_run_is_no_series_of_its_own() {
        let path = |path| Group::new(&Cgroup::new(path)).path;
        assert_eq!(path("/user.slice/user-0.slice/session-123.scope"), "/user.slice/user-0.slice/session-*.scope");
        assert_eq!(path("/system.slice/run-u42.service"), "/system.slice/run-*.service");
        assert_eq!(path("/system.slice/session-cleaner"), "/system.slice/session-cleaner");
        assert_eq!(path("/system.slice/runner.service"), "/system.slice/runner.service");
    }

    #[test]
    fn culprits_have_no_tids_and_pairs_have_cgroups() {
        let mut totals = Totals::new(5, CARDS.into(), Some(1));
        let container = format!("/docker/{}", "a".repeat(64));
        let of = |tid| (CauseKind::Thread, ActorName::thread("gzip", tid), 40, container.as_str());
        totals.late(&OFFCPU, &late(50, &[of(1), (CauseKind::Irq, "timer".into(), 10, "")]));
        totals.late(&OFFCPU, &late(40, &[of(2)]));
        let caused: Vec<_> = totals
            .caused
            .shown()
            .map(|(by, ns, _)| (by.kind, by.who.as_str(), by.cgroup.container.len(), ns))
            .collect();
        assert_eq!(caused, [(CauseKind::Irq, "timer", 0, 10), (CauseKind::Thread, "gzip", 64, 80)]);
        let pairs: Vec<_> = totals.pairs.shown().map(|(pair, ns, _)| (pair.victim.path.as_str(), ns)).collect();
        assert_eq!(pairs, [("/victim.service", 80)]);
        let of = &totals.sources["offcpu"];
        assert_eq!((of.late, of.late_ns, of.examples[&5].who.as_str()), (2, 90, "gzip"));
    }

    #[test]
    fn waits_for_sleeping_threads_are_not_late() {
        let mut totals = Totals::new(0, CARDS.into(), Some(1));
        let mut event = late(50, &[(CauseKind::Timer, "timer".into(), 50, "")]);
        event.kind = LateKind::TimerWait;
        totals.late(&OFFCPU, &event);
        assert!(totals.sources.is_empty());
    }

    #[test]
    fn event_that_two_sources_report_counts_once() {
        let mut totals = Totals::new(0, vec![&OFFCPU, &SQPOLL], None);
        let mut event = late(30_000_000, &[(CauseKind::Thread, ActorName::thread("gzip", 1), 30_000_000, "/a")]);
        event.labels.insert(crate::late::ROLE.to_owned(), crate::late::SUBMISSION_THREAD.to_owned());
        totals.late(&OFFCPU, &event);
        totals.late(&SQPOLL, &event);
        assert_eq!(totals.sources.keys().collect::<Vec<_>>(), [&"sqpoll"]);
        // Below the limit, events are explained for others, such as a recording.
        event.latency_ns = 1_000;
        totals.late(&SQPOLL, &event);
        assert_eq!(totals.sources["sqpoll"].late, 1);
    }

    #[test]
    fn ages_of_waits_that_go_on_are_no_latencies() {
        let mut totals = Totals::new(0, CARDS.into(), None);
        for card in CARDS {
            totals.snapshot(card, &Snapshot::new(card.name, "made", "host", 0));
        }
        let with: Vec<_> = totals.sources.iter().filter(|(_, of)| of.waits.is_some()).map(|(name, _)| *name).collect();
        assert_eq!(with, ["block", "irqsoff", "timerlat", "wq"]);
    }

    #[test]
    fn snapshots_add_up() {
        let mut totals = Totals::new(0, CARDS.into(), Some(1));
        let mut snapshot = Snapshot::new("wq", "made", "host", 100);
        snapshot.duration_ns = 10;
        snapshot.lost = [("series_full".to_owned(), 3)].into();
        snapshot.unexplained.events = 2;
        snapshot.unexplained.total_ns = 9;
        totals.snapshot(&WQ, &snapshot);
        totals.snapshot(&WQ, &snapshot);
        let of = &totals.sources["wq"];
        assert_eq!((of.late, of.late_ns, of.unexplained, of.lost["series_full"]), (4, 18, (4, 18), 6));
        assert_eq!(totals.ended_unix_ns, 110);
    }

    #[test]
    fn hostile_names_are_bounded() {
        let mut totals = Totals::new(0, CARDS.into(), Some(1));
        let name = format!("\x1b[2J{}", "x".repeat(10_000));
        totals.late(&OFFCPU, &late(50, &[(CauseKind::Thread, ActorName::thread(name, 1), 50, "")]));
        let who = totals.caused.shown().map(|(by, ..)| by.who.clone()).next().expect("a culprit");
        assert!(who.len() <= MAX_LABEL_BYTES && who.starts_with("?["), "{who}");
    }
}
