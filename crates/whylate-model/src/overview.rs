// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overview of a machine: what each source found, whether it is late, and the culprits over all sources.

mod rows;
mod source_summary;
mod verdict;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use rows::{Row, RowKind};
pub use source_summary::{SourceSummary, not_recorded};
pub use verdict::{MainCulprit, Verdict};

use crate::culprits::{By, Culprit, Culprits};
use crate::histogram::rounded_up;
use crate::late::{LateKind, SLEEPER};
use crate::programs::Programs;
use crate::recording::Unmeasured;
use crate::snapshot::{Sleeper, Unexplained};
use crate::sources::{self, Card};
use crate::units::rfc3339;
use crate::{ActorName, LateEvent, Snapshot, TopN};

/// Maximum number of worst events.
const MAX_WORST: usize = 5;
/// Maximum number of worst events of one source, so that one source cannot hide the others.
const MAX_WORST_OF_SOURCE: usize = 3;

/// The overview: the results of all sources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Overview {
    /// Version of this JSON format.
    pub schema: u32,
    /// The machine's host name.
    pub host: String,
    /// The PID namespace of the TIDs, by its inode; `None` for the initial namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u32>,
    /// Start, in nanoseconds since 1970 (UTC).
    #[serde(rename = "start", with = "rfc3339")]
    #[cfg_attr(test, schemars(with = "String"))]
    pub start_unix_ns: u64,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
    /// Results of each source, sorted by the time that victims lost, largest first.
    pub sources: Vec<Headline>,
    /// The worst events of all sources, longest first.
    pub worst: Vec<Sighting>,
    /// Culprits, by the delay that they caused.
    pub culprits: Vec<Culprit>,
    /// Programs that were held up for more than the limit of the time, longest first.
    #[serde(default, skip_serializing_if = "Programs::is_none")]
    pub programs: Programs,
    /// Events lost by the CPU trace that explains late events, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost: BTreeMap<String, u64>,
    /// Sources that could not be measured.
    pub unmeasured: Vec<Unmeasured>,
    /// Limitations: what is reported in less detail here than elsewhere.
    #[serde(default, rename = "weaker")]
    pub limitations: Vec<Unmeasured>,
}

/// Result of one source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Headline {
    /// The source's name.
    pub source: String,
    /// Backend that measured.
    pub backend: String,
    /// Subject of the figures.
    pub of: String,
    /// Number of measured values.
    pub count: u64,
    /// Median in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: u64,
    /// Maximum in nanoseconds.
    pub max_ns: u64,
    /// Threshold in nanoseconds from which a value is late.
    pub late_from_ns: u64,
    /// Number of late events, explained or not. If [`Headline::late_of`] is set, it counts those instead.
    pub late: u64,
    /// Lower bound of the number of late values: those in the threshold's own bucket are not counted.
    #[serde(default)]
    pub late_figures: u64,
    /// Threads that are still in uninterruptible sleep and over the threshold, longest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sleepers: Vec<Sleeper>,
    /// Subject of `late` and `late_ns`, if it differs from that of the figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late_of: Option<LateOf>,
    /// Total time of these late events and those of [`Headline::held_up`].
    pub late_ns: u64,
    /// Waits for others that were held up, if the source follows waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_up: Option<HeldUp>,
    /// Late events that were too many to explain; culprits cover only the others.
    #[serde(default, skip_serializing_if = "Unexplained::is_none")]
    pub unexplained: Unexplained,
    /// Whether the source saw anything late.
    pub is_late: bool,
    /// Further remark.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remark: String,
    /// Command that shows more.
    #[serde(default)]
    pub next: String,
    /// Events that could not be counted, by reason; zero counts are left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost: BTreeMap<String, u64>,
}

/// Events that a source judges besides its figures: only late ones are seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LateOf {
    /// Subject of the events.
    pub of: String,
    /// Threshold in nanoseconds from which an event is late.
    pub late_from_ns: u64,
    /// Longest late event in nanoseconds; 0 if none.
    pub max_ns: u64,
    /// Command that shows more.
    #[serde(default)]
    pub next: String,
}

/// Waits for others that were late.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeldUp {
    /// Subject of the waits.
    pub of: String,
    /// Threshold in nanoseconds from which a wait is late.
    pub late_from_ns: u64,
    /// Number of late waits.
    pub late: u64,
    /// Total of late waits in nanoseconds.
    pub late_ns: u64,
    /// Longest late wait in nanoseconds; 0 if none.
    pub max_ns: u64,
    /// Command that shows more.
    pub next: String,
    /// Waits over the threshold for threads that slept, possibly by design; not in the counts above. Largest totals
    /// first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub for_sleepers: Vec<ForSleeper>,
}

/// Waits of one thread for another that slept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ForSleeper {
    /// Waiter.
    pub who: String,
    /// Sleeping thread.
    pub sleeper: String,
    /// Number of waits.
    pub waits: u64,
    /// Total in nanoseconds.
    pub total_ns: u64,
}

/// A late event and its source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Sighting {
    /// The source's name.
    pub source: String,
    /// The late event.
    #[serde(flatten)]
    pub event: LateEvent,
}

impl Overview {
    /// Rounds percentiles as JSON has them: up to three digits, which the width of a bucket justifies, and at most the
    /// maximum.
    pub fn round_percentiles(&mut self) {
        for source in &mut self.sources {
            for ns in [&mut source.p50_ns, &mut source.p99_ns] {
                *ns = rounded_up(*ns, 3).min(source.max_ns);
            }
        }
    }

    /// Returns the events of all sources that could not be counted, with source and reason; not those that are left out
    /// on purpose.
    pub fn lost(&self) -> impl Iterator<Item = (&str, &str, u64)> {
        let of_sources = self.sources.iter().map(|source| (source.source.as_str(), &source.lost));
        let all = of_sources.chain([(sources::SHARED, &self.lost)]);
        all.flat_map(|(source, lost)| {
            sources::lost_events(source, lost).map(move |(reason, count)| (source, reason, count))
        })
    }

    /// Returns the number of events that could not be counted.
    pub fn count_lost(&self) -> u64 {
        self.lost().map(|(.., count)| count).fold(0, u64::saturating_add)
    }

    /// Returns the late events of all sources that the culprits do not cover.
    pub fn unexplained(&self) -> Unexplained {
        let each = self.sources.iter().map(|headline| headline.unexplained);
        each.fold(Unexplained::default(), |sum, of| Unexplained {
            events: sum.events + of.events,
            total_ns: sum.total_ns.saturating_add(of.total_ns),
            recorded: sum.recorded.or(of.recorded),
        })
    }
}

/// Number of pairs of waiter and sleeper that are shown, and maximum that are counted separately.
const SHOWN_SLEEPERS: usize = 3;
const MAX_SLEEPERS: usize = 1_000;

/// Collects late events as they arrive.
#[derive(Debug, Default)]
pub struct Gatherer {
    /// Sources of the overview.
    cards: Vec<&'static Card>,
    culprits: Culprits,
    worst: BTreeMap<String, Option<TopN>>,
    late: BTreeMap<String, LateCounts>,
    held_up: BTreeMap<String, LateCounts>,
    /// Number and total of waits by source, waiter and sleeper.
    for_sleepers: BTreeMap<(String, String, String), (u64, u64)>,
}

/// Counters of the late events of one source.
#[derive(Clone, Copy, Debug, Default)]
struct LateCounts {
    count: u64,
    total_ns: u64,
    max_ns: u64,
}

impl Gatherer {
    /// Creates a collector for an overview with these sources; culprits are aggregated by `by`.
    pub fn for_cards(cards: Vec<&'static Card>, by: By) -> Self {
        Gatherer { cards, culprits: Culprits::by(by), ..Gatherer::default() }
    }

    /// Adds a late event, unless it is below the card's threshold or another selected source reports it too.
    pub fn add(&mut self, card: &Card, event: LateEvent) {
        if let Some(worst) = self.count(card, &event) {
            worst.add(event);
        }
    }

    /// Adds a late event that the caller keeps.
    pub fn add_kept(&mut self, card: &Card, event: &LateEvent) {
        if let Some(worst) = self.count(card, event).filter(|worst| worst.takes(event.latency_ns)) {
            worst.add(event.clone());
        }
    }

    /// Counts an event and returns the list of worst events that it may enter; `None` if it does not count.
    fn count(&mut self, card: &Card, event: &LateEvent) -> Option<&mut TopN> {
        if !card.judges_late(event, &self.cards) {
            return None;
        }
        let source = card.name;
        if let Some(sleeper) = event.labels.get(SLEEPER) {
            let mut pair = (source.to_owned(), event.subject.clone(), sleeper.clone());
            if self.for_sleepers.len() >= MAX_SLEEPERS && !self.for_sleepers.contains_key(&pair) {
                pair = (source.to_owned(), "others".to_owned(), "others".to_owned());
            }
            let (waits, total_ns) = self.for_sleepers.entry(pair).or_default();
            (*waits, *total_ns) = (*waits + 1, total_ns.saturating_add(event.latency_ns));
            return None;
        }
        let is_held_up = card.held_up.is_some() && event.kind != LateKind::Latency;
        let lates = if is_held_up { &mut self.held_up } else { &mut self.late };
        let lates = lates.entry(source.to_owned()).or_default();
        lates.count += 1;
        lates.total_ns = lates.total_ns.saturating_add(event.latency_ns);
        lates.max_ns = lates.max_ns.max(event.latency_ns);
        self.culprits.add(card, event);
        let worst = self.worst.entry(source.to_owned()).or_default();
        Some(worst.get_or_insert_with(|| TopN::new(MAX_WORST_OF_SOURCE)))
    }

    /// Returns the overview over the snapshots of all sources that measured.
    pub fn finish(self, snapshots: &[(&Card, Snapshot)], unmeasured: Vec<Unmeasured>) -> Overview {
        let found: Vec<SourceSummary<'_>> =
            snapshots.iter().map(|(card, snapshot)| SourceSummary::new(card, snapshot)).collect();
        self.finish_with(&found, unmeasured)
    }

    /// Returns the overview over the results of all sources.
    pub fn finish_with(mut self, found: &[SourceSummary<'_>], unmeasured: Vec<Unmeasured>) -> Overview {
        let mut sources: Vec<Headline> = found
            .iter()
            .map(|found| {
                let of = |lates: &BTreeMap<String, LateCounts>| lates.get(found.card.name).copied().unwrap_or_default();
                found.headline(of(&self.late), of(&self.held_up))
            })
            .collect();
        for headline in &mut sources {
            let Some(held_up) = &mut headline.held_up else { continue };
            // The measuring threads of whylate wait for each other by design.
            let is_own = |who: &str| who.parse::<ActorName>().is_ok_and(|who| who.is_own());
            let of_source = self
                .for_sleepers
                .iter()
                .filter(|((source, who, sleeper), _)| *source == headline.source && !(is_own(who) && is_own(sleeper)));
            held_up.for_sleepers = of_source
                .map(|((_, who, sleeper), &(waits, total_ns))| ForSleeper {
                    who: who.clone(),
                    sleeper: sleeper.clone(),
                    waits,
                    total_ns,
                })
                .collect();
            held_up.for_sleepers.sort_by_key(|pair| Reverse(pair.total_ns));
            held_up.for_sleepers.truncate(SHOWN_SLEEPERS);
        }
        // Programs that were held up have rows of their own: they do not put a source before others.
        sources.sort_by_key(|headline| (!headline.is_late, Reverse(headline.late_ns)));
        let mut programs = Programs::default();
        for found in found {
            let over = found.programs().over_limit();
            if over.is_none() {
                continue;
            }
            let of_source = sources.iter_mut().filter(|headline| headline.source == found.card.name);
            of_source.for_each(|headline| headline.is_late |= !over.held_up.is_empty());
            programs = over;
        }
        let mut worst: Vec<Sighting> = self
            .worst
            .into_iter()
            .flat_map(|(source, kept)| {
                let events = kept.map(|mut kept| kept.take()).unwrap_or_default();
                events.into_iter().map(move |event| Sighting { source: source.clone(), event })
            })
            .collect();
        worst.sort_by_key(|sighting| Reverse(sighting.event.latency_ns));
        worst.truncate(MAX_WORST);
        Overview {
            schema: crate::snapshot::SCHEMA,
            host: found.first().map(|found| found.host.clone()).unwrap_or_default(),
            pid_namespace: found.first().and_then(|found| found.pid_namespace),
            start_unix_ns: found.iter().map(|found| found.start_unix_ns).min().unwrap_or_default(),
            duration_ns: found.iter().map(|found| found.duration_ns).max().unwrap_or_default(),
            sources,
            worst,
            culprits: self.culprits.take().culprits,
            programs,
            unmeasured,
            limitations: Vec::new(),
            lost: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::path::PathSegment;
    use crate::sources::{IRQSOFF, Judged, OFFCPU, SQPOLL, TIMERLAT, WQ};
    use crate::{Cause, CauseKind, Series};

    fn late(latency_ns: u64, causes: &[(CauseKind, &str, u64)]) -> LateEvent {
        let name = |who: &str| who.parse::<ActorName>().expect("any text");
        let causes = causes.iter().map(|&(kind, who, ns)| Cause::new(kind, name(who), ns)).collect();
        LateEvent { latency_ns, causes, ..LateEvent::default() }
    }

    fn snapshot<'a>(card: &'a Card, name: &str, labels: &[(&str, &str)], latencies_ns: &[u64]) -> (&'a Card, Snapshot) {
        let mut snapshot = Snapshot::new(card.name, "bpf", "host", 7);
        snapshot.series.push(Series {
            labels: labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            histograms: [(name.to_owned(), latencies_ns.iter().copied().collect())].into(),
            ..Series::default()
        });
        (card, snapshot)
    }

    #[test]
    fn one_disturbance_is_one_culprit_with_several_victims() {
        let mut gatherer = Gatherer::default();
        let hog = (CauseKind::Thread, "hog:7");
        gatherer
            .add(&WQ, late(20_000_000, &[(hog.0, hog.1, 19_000_000), (CauseKind::Unknown, "not recorded", 1_000_000)]));
        gatherer.add(&TIMERLAT, late(12_000_000, &[(hog.0, hog.1, 7_000_000), (hog.0, hog.1, 5_000_000)]));
        gatherer.add(&TIMERLAT, late(6_000_000, &[(hog.0, hog.1, 6_000_000)]));
        // Below its source's threshold.
        gatherer.add(&WQ, late(9_000_000, &[(CauseKind::Work, "other", 9_000_000)]));
        let snapshots = [
            snapshot(&IRQSOFF, "length", &[("kind", "irqs_off")], &[200_000]),
            snapshot(&TIMERLAT, "thread", &[("cpu", "0")], &[12_000_000, 6_000_000, 5_000]),
            snapshot(&WQ, "latency", &[], &[20_000_000, 9_000_000]),
        ];
        let look = gatherer.finish(&snapshots, Vec::new());
        let order: Vec<(&str, bool, u64)> =
            look.sources.iter().map(|source| (source.source.as_str(), source.is_late, source.late)).collect();
        assert_eq!(order, [("wq", true, 1), ("timerlat", true, 2), ("irqsoff", false, 0)]);
        assert_eq!(look.culprits.len(), 2);
        let first = &look.culprits[0];
        assert_eq!((&*first.who.to_string(), first.total_ns), ("hog:7", 37_000_000));
        let victims: Vec<(&str, u64, u64, u64)> =
            first.victims.iter().map(|v| (v.source.as_str(), v.events, v.total_ns, v.worst_ns)).collect();
        assert_eq!(victims, [("wq", 1, 19_000_000, 19_000_000), ("timerlat", 2, 18_000_000, 12_000_000)]);
        let worst: Vec<u64> = look.worst.iter().map(|sighting| sighting.event.latency_ns).collect();
        assert_eq!(worst, [20_000_000, 12_000_000, 6_000_000]);
    }

    #[test]
    fn delays_that_culprits_caused_add_up_to_what_was_late() {
        let mut gatherer = Gatherer::default();
        for number in 1..50u64 {
            let part_ns = number * 1_000_000;
            let causes =
                [(CauseKind::Thread, "a:1", part_ns), (CauseKind::Irq, "b", part_ns / 2), (CauseKind::Steal, "c", 7)];
            gatherer.add(&TIMERLAT, late(causes.iter().map(|cause| cause.2).sum(), &causes));
        }
        let look = gatherer.finish(&[snapshot(&TIMERLAT, "thread", &[], &[9_000_000])], Vec::new());
        let caused_ns: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
        assert_eq!(caused_ns, look.sources[0].late_ns);
    }

    #[test]
    fn waits_for_a_cpu_are_not_judged_as_uninterruptible_sleep() {
        let mut gatherer = Gatherer::default();
        gatherer.add(&OFFCPU, late(30_000_000, &[(CauseKind::Thread, "hog:7", 30_000_000)]));
        gatherer.add(&OFFCPU, late(90_000_000, &[(CauseKind::Thread, "hog:7", 90_000_000)]));
        let look = gatherer.finish(&[(&OFFCPU, Snapshot::new(OFFCPU.name, "sample", "host", 7))], Vec::new());
        let offcpu = &look.sources[0];
        assert_eq!((offcpu.count, offcpu.late_from_ns, offcpu.late), (0, 1_000_000_000, 2));
        assert!(offcpu.is_late && offcpu.remark.is_empty());
        let late_of = offcpu.late_of.as_ref().expect("it has waits");
        assert_eq!((late_of.late_from_ns, late_of.max_ns), (20_000_000, 90_000_000));
    }

    /// A source that only its card describes goes through overview, ranking and JSON.
    #[test]
    fn source_is_described_by_its_card() {
        static MADE_UP: Card = Card {
            events: Some(Judged {
                of: "letters in a bag",
                row: "letter: in a bag",
                late: ["letter", "letters"],
                late_from_ns: 7_000,
                next: "whylate post --why {from}",
            }),
            ..Card::new(
                "post",
                Judged {
                    of: "letters",
                    row: "letter: until read",
                    late: ["letter", "letters"],
                    late_from_ns: 9_000,
                    next: "whylate post {from}",
                },
                |snapshot| snapshot.total("days"),
            )
        };
        static ALSO_MADE_UP: Card = Card {
            also_reports: |event| event.labels.contains_key("registered"),
            ..Card::new(
                "courier",
                Judged {
                    of: "parcels",
                    row: "parcel: until taken",
                    late: ["parcel", "parcels"],
                    late_from_ns: 1,
                    next: "whylate courier {from}",
                },
                |snapshot| snapshot.total("days"),
            )
        };
        let mut gatherer = Gatherer::for_cards(vec![&MADE_UP, &ALSO_MADE_UP], By::Culprit);
        let mut letter =
            LateEvent { subject: "to Ann".to_owned(), ..late(8_000, &[(CauseKind::Thread, "fog:1", 8_000)]) };
        gatherer.add(&MADE_UP, letter.clone());
        gatherer.add(&MADE_UP, late(6_999, &[(CauseKind::Thread, "fog:1", 6_999)]));
        letter.labels.insert("registered".to_owned(), "yes".to_owned());
        gatherer.add(&MADE_UP, letter.clone());
        // No other source reports it, so it counts.
        let mut alone = Gatherer::for_cards(vec![&MADE_UP], By::Culprit);
        alone.add(&MADE_UP, letter);
        assert_eq!(alone.finish(&[snapshot(&MADE_UP, "days", &[], &[])], Vec::new()).sources[0].late, 1);
        let look = gatherer.finish(&[snapshot(&MADE_UP, "days", &[], &[100, 200])], Vec::new());
        let restored: Overview =
            serde_json::from_str(&serde_json::to_string(&look).expect("an overview serializes")).expect("and parses");
        assert_eq!(
            (&restored.sources, &restored.worst, &restored.culprits),
            (&look.sources, &look.worst, &look.culprits)
        );
        let row = &restored.sources[0];
        assert_eq!((row.source.as_str(), row.of.as_str(), row.count, row.late), ("post", "letters", 2, 1));
        assert_eq!(row.late_of.as_ref().map(|of| of.next.as_str()), Some("whylate post --why 7us"));
        assert_eq!((restored.worst[0].event.subject.as_str(), restored.culprits[0].total_ns), ("to Ann", 8_000));
    }

    #[test]
    fn wait_counts_once_for_any_comm() {
        let wait = |thread: &str, labels: &[(&str, &str)]| {
            let labels = labels.iter().copied().chain([("thread", thread)]);
            LateEvent {
                labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
                ..late(30_000_000, &[(CauseKind::Thread, "hog:7", 30_000_000)])
            }
        };
        let counted = |cards: &[&'static Card]| {
            let mut gatherer = Gatherer::for_cards(cards.to_vec(), By::Culprit);
            gatherer.add(&OFFCPU, wait("kworker/0:0", &[]));
            gatherer.add(&OFFCPU, wait("iou-sqp-7", &[]));
            gatherer.add(&OFFCPU, wait("kworker/0:1", &[("role", "worker"), ("handler", "vmstat_update")]));
            gatherer.add(&OFFCPU, wait("kworker/0:2", &[("role", "worker")]));
            gatherer.add(&OFFCPU, wait("iou-sqp-8", &[("role", "submission_thread")]));
            gatherer.finish(&[(&OFFCPU, Snapshot::new(OFFCPU.name, "sample", "host", 7))], Vec::new()).sources[0].late
        };
        assert_eq!([counted(&[&OFFCPU, &WQ, &SQPOLL]), counted(&[&OFFCPU, &WQ]), counted(&[&OFFCPU])], [3, 4, 5]);
    }

    #[test]
    fn waits_for_others_have_their_own_threshold() {
        let held_up = |ms: u64| {
            let event = late(ms * 1_000_000, &[(CauseKind::Running, "server:7", ms * 1_000_000)]);
            let path = vec![PathSegment { ns: event.latency_ns, depth: 1, ..PathSegment::default() }];
            LateEvent { kind: LateKind::BlockedWait, path, ..event }
        };
        let mut gatherer = Gatherer::default();
        gatherer.add(&OFFCPU, held_up(99));
        gatherer.add(&OFFCPU, held_up(100));
        gatherer.add(&OFFCPU, held_up(250));
        gatherer.add(&OFFCPU, late(30_000_000, &[(CauseKind::Thread, "hog:7", 30_000_000)]));
        let look = gatherer.finish(&[(&OFFCPU, Snapshot::new(OFFCPU.name, "sample", "host", 7))], Vec::new());
        let offcpu = &look.sources[0];
        assert_eq!((offcpu.is_late, offcpu.late, offcpu.late_ns), (true, 1, 380_000_000));
        let held_up = offcpu.held_up.as_ref().expect("it follows waits");
        assert_eq!((held_up.late, held_up.late_ns, held_up.max_ns), (2, 350_000_000, 250_000_000));
        assert_eq!(held_up.next, "whylate offcpu --why 100ms -d 10s");
        let caused_ns: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
        assert_eq!((caused_ns, &*look.culprits[0].who.to_string()), (offcpu.late_ns, "server:7"));
    }

    #[test]
    fn sleepers_at_end_are_named_and_counted() {
        let sleeper = |tid: u32, asleep_ns| Sleeper {
            who: ActorName::thread("a", tid),
            process: None,
            asleep_ns,
            waits_in: None,
            class: crate::WaitClass::Other,
        };
        let part = |ages_ns: &[u64], uninterruptible: Vec<Sleeper>| {
            let age = ages_ns.iter().copied().collect();
            let stack = crate::Stack { state: "D".to_owned(), age, ..crate::Stack::default() };
            let mut snapshot = Snapshot { uninterruptible, ..Snapshot::new(OFFCPU.name, "sample", "host", 7) };
            snapshot.stacks.push(stack);
            snapshot
        };
        let look = |parts: Vec<Snapshot>| {
            let mut found: Vec<SourceSummary<'_>> =
                parts.into_iter().map(|mut part| SourceSummary::of_part(&OFFCPU, &mut part)).collect();
            let mut first = found.remove(0);
            found.iter().for_each(|later| first.add(later));
            let look = Gatherer::default().finish_with(&[first], Vec::new());
            let offcpu = look.sources.into_iter().next().expect("a source");
            (offcpu.is_late, offcpu.late_figures, offcpu.sleepers.first().map(|of| of.who.clone()))
        };
        let late = || part(&[5_000_000, 1_010_000_000, 9_000_000_000], vec![sleeper(9, 9_000_000_000), sleeper(1, 1)]);
        let none = || part(&[5_000_000], Vec::new());
        assert_eq!(look(vec![none(), late()]), (true, 2, Some(ActorName::thread("a", 9))));
        assert_eq!(look(vec![late(), none()]), (false, 0, None));
        // From an old recording.
        assert_eq!(look(vec![part(&[1_010_000_000], Vec::new())]), (true, 1, None));
    }

    #[test]
    fn nothing_late_is_normal() {
        let look = Gatherer::default().finish(&[snapshot(&WQ, "latency", &[], &[5_000, 90_000])], Vec::new());
        assert!(!look.sources[0].is_late && look.culprits.is_empty() && look.worst.is_empty());
        // A submission thread that had to wait is late, even without explained events.
        let mut starved = Snapshot::new(SQPOLL.name, "bpf", "host", 7);
        starved.series.push(Series { values: [("starved".to_owned(), 0.4)].into(), ..Series::default() });
        let look = Gatherer::default().finish(&[(&SQPOLL, starved)], Vec::new());
        assert_eq!(
            (look.sources[0].is_late, look.sources[0].remark.as_str()),
            (true, "submission threads: 1, starved: 1")
        );
    }

    #[test]
    fn waits_for_sleepers_are_not_late_and_listed_by_pair() {
        let wait = |who: &str, sleeper: &str, ms: u64| LateEvent {
            kind: LateKind::TimerWait,
            subject: who.to_owned(),
            labels: [(SLEEPER.to_owned(), sleeper.to_owned())].into(),
            ..late(ms * 1_000_000, &[])
        };
        let mut gatherer = Gatherer::for_cards(vec![&OFFCPU], By::default());
        for (who, sleeper, ms) in [("a:1", "x:7", 150), ("a:1", "x:7", 250), ("b:2", "x:7", 100), ("b:2", "y:8", 500)] {
            gatherer.add(&OFFCPU, wait(who, sleeper, ms));
        }
        // Of whylate itself.
        gatherer.add(&OFFCPU, wait("whylate-reads:3", "whylate-offcpu:4", 900));
        // More than are shown.
        (0..5).for_each(|number| gatherer.add(&OFFCPU, wait(&format!("c:{number}"), "z:9", 101)));
        let look = gatherer.finish(&[snapshot(&OFFCPU, "wait", &[], &[])], Vec::new());
        let [offcpu] = &look.sources[..] else { panic!("{look:?}") };
        assert!(!offcpu.is_late && look.culprits.is_empty() && look.worst.is_empty());
        let pairs = &offcpu.held_up.as_ref().expect("it follows waits").for_sleepers;
        let ranked: Vec<_> = pairs.iter().map(|pair| (&*pair.who, &*pair.sleeper, pair.waits, pair.total_ns)).collect();
        assert_eq!(ranked[..2], [("b:2", "y:8", 1, 500_000_000), ("a:1", "x:7", 2, 400_000_000)]);
        assert_eq!(ranked.len(), SHOWN_SLEEPERS);
    }
}
