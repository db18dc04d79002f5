// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks culprits by the delay that they caused, over the late events of one source or several.

mod program;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::late::CGROUP;
use crate::snapshot::Unexplained;
use crate::sources::Card;
use crate::{ActorName, Cause, CauseKind, Cgroup, LateEvent};

/// Maximum number of distinct culprits; later ones are counted together.
const MAX_CULPRITS: usize = 10_000;
/// Maximum number of distinct victims of one culprit.
const MAX_VICTIMS: usize = 1_000;
/// Row label for culprits beyond the maximum number.
pub const BEYOND: &str = "those beyond the first 10,000";

/// Aggregation of delays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// By thread, work item, interrupt and so on.
    #[default]
    Culprit,
    /// By cgroup; a culprit without one stands for itself.
    Cgroup,
    /// By thread name.
    Name,
}

impl By {
    /// Returns the name under which a cause of an event is added up.
    pub fn name_of<'a>(self, cause: &'a Cause, event: &LateEvent) -> Cow<'a, ActorName> {
        match (&cause.cgroup, self) {
            (Some(cgroup), By::Cgroup) => {
                let is_own = event.labels.get(CGROUP) == Some(&cgroup.path);
                Cow::Owned(ActorName::cgroup(cgroup.path.as_str(), is_own))
            }
            (_, By::Name) => Cow::Owned(cause.who.by_name()),
            _ => Cow::Borrowed(&cause.who),
        }
    }
}

/// Adds up the delay of each culprit. Memory is bounded.
#[derive(Debug, Default)]
pub struct Culprits {
    by: By,
    /// Delays by kind and then by label, so that a label is looked up without being copied.
    delays: HashMap<CauseKind, HashMap<ActorName, Delays>>,
    count: usize,
    unknown: Delay,
    /// IDs of victims' names, which are few and recur.
    subjects: HashMap<String, u32>,
    events: u64,
    latency_ns: u64,
    unexplained: Unexplained,
}

/// A culprit: what made others late. One disturbance that several sources see is one culprit with several victims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Culprit {
    /// Kind of delay.
    pub kind: CauseKind,
    /// Name of the culprit, or the path of its cgroup if delays are aggregated by cgroup.
    pub who: ActorName,
    /// Number of threads of this name if delays are aggregated by name and there are several; 0 otherwise.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub alike: u64,
    /// Cgroup in which the thread was seen last.
    #[serde(flatten)]
    pub cgroup: Option<Cgroup>,
    /// Delay that it caused over all victims, in nanoseconds.
    pub total_ns: u64,
    /// Victims by source, sorted by total delay, largest first.
    pub victims: Vec<Victims>,
}

impl Culprit {
    /// Returns the longest delay of one event in nanoseconds.
    pub fn worst_ns(&self) -> u64 {
        self.victims.iter().map(|victims| victims.worst_ns).max().unwrap_or(0)
    }
}

/// Delay that a culprit caused to the events of one source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Victims {
    /// The source's name.
    pub source: String,
    /// Number of late events that it delayed.
    pub events: u64,
    /// Number of distinct victims (handlers, threads), counted up to 1,000.
    #[serde(default)]
    pub subjects: u64,
    /// Total delay in nanoseconds.
    pub total_ns: u64,
    /// Longest delay of one event in nanoseconds.
    pub worst_ns: u64,
}

/// A ranking of culprits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranking {
    /// Number of late events that were explained.
    pub events: u64,
    /// Total latency of these events, to which the delays of the culprits add up.
    pub latency_ns: u64,
    /// Culprits, sorted by delay, largest first. Unknown time has an entry for each reason, and [`BEYOND`].
    pub culprits: Vec<Culprit>,
    /// Time of unknown cause.
    pub unknown: Victims,
    /// Late events that the ranking does not cover.
    pub unexplained: Unexplained,
}

impl Ranking {
    /// Returns whether nothing was late.
    pub fn is_empty(&self) -> bool {
        self.events == 0 && self.unexplained.is_none()
    }
}

/// Delays of one culprit.
#[derive(Debug, Default)]
struct Delays {
    by_source: BTreeMap<&'static str, Delay>,
    cgroup: Option<Cgroup>,
    /// Labels of threads of one name; empty unless delays are aggregated by name.
    called: BTreeSet<ActorName>,
}

#[derive(Debug, Default)]
struct Delay {
    events: u64,
    total_ns: u64,
    worst_ns: u64,
    subjects: BTreeSet<u32>,
}

impl Culprits {
    /// Creates an empty ranking that aggregates by `by`.
    pub fn by(by: By) -> Self {
        Culprits { by, ..Culprits::default() }
    }

    /// Adds the causes of one event of a source. An event without causes was not explained and does not count.
    pub fn add(&mut self, card: &Card, event: &LateEvent) {
        if event.causes.is_empty() {
            return;
        }
        self.events += 1;
        self.latency_ns = self.latency_ns.saturating_add(event.latency_ns);
        let subject = self.number_of(&event.subject);
        let mut by_whom: BTreeMap<(CauseKind, Cow<'_, ActorName>), u64> = BTreeMap::new();
        let mut unknown_ns = 0_u64;
        for cause in &event.causes {
            let of_kind = self.delays.entry(cause.kind).or_default();
            let mut kind = cause.kind;
            let mut who = self.by.name_of(cause, event);
            match of_kind.get_mut(&*who) {
                Some(known) if cause.cgroup.is_none() || known.cgroup == cause.cgroup => {}
                Some(known) => known.cgroup.clone_from(&cause.cgroup),
                // There are only a few reasons for unknown time.
                None if cause.kind == CauseKind::Unknown || self.count < MAX_CULPRITS => {
                    self.count += 1;
                    of_kind
                        .insert(who.clone().into_owned(), Delays { cgroup: cause.cgroup.clone(), ..Delays::default() });
                }
                None => (kind, who) = (CauseKind::Unknown, Cow::Owned(BEYOND.into())),
            }
            if self.by == By::Name
                && let Some(delays) = of_kind.get_mut(&*who)
                && delays.called.len() < MAX_VICTIMS
                && !delays.called.contains(&cause.who)
            {
                delays.called.insert(cause.who.clone());
            }
            let ns = by_whom.entry((kind, who)).or_default();
            *ns = ns.saturating_add(cause.ns);
            if cause.kind == CauseKind::Unknown {
                unknown_ns = unknown_ns.saturating_add(cause.ns);
            }
        }
        for ((kind, who), ns) in by_whom {
            let of_kind = self.delays.entry(kind).or_default();
            // Only `BEYOND` can be new.
            if !of_kind.contains_key(&*who) {
                of_kind.insert(who.clone().into_owned(), Delays::default());
            }
            let of_source = of_kind.get_mut(&*who).map(|delays| delays.by_source.entry(card.name).or_default());
            of_source.into_iter().for_each(|delay| delay.add(ns, subject));
        }
        self.unknown.add(unknown_ns, subject);
    }

    /// Adds late events that are not explained.
    pub fn add_unexplained(&mut self, unexplained: Unexplained) {
        self.unexplained.events += unexplained.events;
        self.unexplained.recorded = unexplained.recorded.or(self.unexplained.recorded);
        self.unexplained.total_ns = self.unexplained.total_ns.saturating_add(unexplained.total_ns);
    }

    /// Returns the ranking of all delays added since the previous call.
    pub fn take(&mut self) -> Ranking {
        let taken = std::mem::replace(self, Culprits::by(self.by));
        let by_name =
            taken.delays.into_iter().flat_map(|(kind, by_name)| by_name.into_iter().map(move |of| (kind, of)));
        let mut culprits: Vec<Culprit> = by_name
            .map(|(kind, (who, delays))| {
                let Delays { by_source, cgroup, called } = delays;
                // A single thread keeps its TID.
                let alike = if called.len() > 1 { called.len() as u64 } else { 0 };
                let who = called.into_iter().next().filter(|_| alike == 0).unwrap_or(who);
                let mut victims: Vec<Victims> = by_source.iter().map(|(source, delay)| delay.victims(source)).collect();
                victims.sort_by_key(|victims| Reverse(victims.total_ns));
                let total_ns = victims.iter().map(|victims| victims.total_ns).sum();
                Culprit { kind, who, alike, cgroup, total_ns, victims }
            })
            .collect();
        let events = |culprit: &Culprit| culprit.victims.iter().map(|victims| victims.events).sum::<u64>();
        culprits.retain(|culprit| culprit.total_ns > 0);
        culprits.sort_by(|a, b| {
            let rank = |culprit: &Culprit| (Reverse(culprit.total_ns), Reverse(events(culprit)), culprit.kind);
            rank(a).cmp(&rank(b)).then_with(|| a.who.cmp(&b.who))
        });
        Ranking {
            events: taken.events,
            latency_ns: taken.latency_ns,
            culprits,
            unknown: taken.unknown.victims(""),
            unexplained: taken.unexplained,
        }
    }

    fn number_of(&mut self, subject: &str) -> u32 {
        if let Some(&number) = self.subjects.get(subject) {
            return number;
        }
        // Names beyond the limit share an ID.
        let number = self.subjects.len().min(MAX_CULPRITS) as u32;
        if self.subjects.len() < MAX_CULPRITS {
            self.subjects.insert(subject.to_owned(), number);
        }
        number
    }
}

impl Delay {
    fn add(&mut self, ns: u64, subject: u32) {
        if ns == 0 {
            return;
        }
        self.events += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
        self.worst_ns = self.worst_ns.max(ns);
        if self.subjects.len() < MAX_VICTIMS {
            self.subjects.insert(subject);
        }
    }

    fn victims(&self, source: &str) -> Victims {
        let (events, subjects) = (self.events, self.subjects.len() as u64);
        Victims { source: source.to_owned(), events, subjects, total_ns: self.total_ns, worst_ns: self.worst_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;
    use crate::sources::WQ;

    fn late(handler: &str, causes: &[(CauseKind, &str, u64)]) -> LateEvent {
        let name = |who: &str| who.parse::<ActorName>().expect("any text");
        let causes: Vec<Cause> = causes.iter().map(|&(kind, who, ns)| Cause::new(kind, name(who), ns)).collect();
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
        culprits.add(&WQ, &late("a", &[(CauseKind::Work, "hog", 40), (CauseKind::Thread, "dd:1", 2)]));
        culprits.add(
            &WQ,
            &late("b", &[(CauseKind::Work, "hog", 50), (CauseKind::Unknown, "x", 1), (CauseKind::Unknown, "y", 2)]),
        );
        culprits.add(&WQ, &late("b", &[(CauseKind::Work, "hog", 1)]));
        culprits.add(&WQ, &LateEvent { latency_ns: 99, ..LateEvent::default() });
        let ranking = culprits.take();
        let victims = |events, subjects, total_ns, worst_ns| {
            vec![Victims { source: "wq".to_owned(), events, subjects, total_ns, worst_ns }]
        };
        let culprit = |kind, who: &str, total_ns, victims| Culprit {
            kind,
            who: who.parse().expect("any text"),
            alike: 0,
            cgroup: None,
            total_ns,
            victims,
        };
        assert_eq!((ranking.events, ranking.latency_ns), (3, 96));
        assert_eq!(
            ranking.culprits,
            [
                culprit(CauseKind::Work, "hog", 91, victims(3, 2, 91, 50)),
                culprit(CauseKind::Thread, "dd:1", 2, victims(1, 1, 2, 2)),
                culprit(CauseKind::Unknown, "y", 2, victims(1, 1, 2, 2)),
                culprit(CauseKind::Unknown, "x", 1, victims(1, 1, 1, 1)),
            ]
        );
        assert_eq!(ranking.unknown, Victims { source: String::new(), ..victims(1, 1, 3, 3).remove(0) });
        assert_eq!(culprits.take(), Ranking::default());
    }

    #[test]
    fn delays_add_up_by_the_cgroups_that_cause_them() {
        let in_cgroup = |path: &str, cause| Cause { cgroup: Some(Cgroup::new(path)), ..cause };
        let mut event = late("service:1", &[(CauseKind::Irq, "nvme0q1", 5)]);
        event.labels.insert(CGROUP.to_owned(), "/pod1".to_owned());
        for (path, who, ns) in [("/pod1", "a:1", 10), ("/pod2", "b:2", 20), ("/pod2", "c:3", 30)] {
            event.causes.push(in_cgroup(path, Cause::new(CauseKind::Thread, who, ns)));
            event.latency_ns += ns;
        }
        let ranked = |by| {
            let mut culprits = Culprits::by(by);
            culprits.add(&WQ, &event);
            let first = culprits.take();
            // The buffer is empty, and the next span is aggregated the same way.
            culprits.add(&WQ, &event);
            assert_eq!(culprits.take(), first);
            first.culprits.into_iter().map(|culprit| (culprit.who.to_string(), culprit.total_ns)).collect::<Vec<_>>()
        };
        let named = |list: &[(&str, u64)]| list.iter().map(|&(who, ns)| (who.to_owned(), ns)).collect::<Vec<_>>();
        assert_eq!(ranked(By::Cgroup), named(&[("/pod2", 50), ("/pod1 (itself)", 10), ("nvme0q1", 5)]));
        assert_eq!(ranked(By::Culprit), named(&[("c:3", 30), ("b:2", 20), ("a:1", 10), ("nvme0q1", 5)]));
    }

    #[test]
    fn delays_add_up_by_the_names_of_threads() {
        let mut culprits = Culprits::by(By::Name);
        let off = |who, ns| (CauseKind::IrqsOff, who, ns);
        culprits.add(&WQ, &late("a", &[(CauseKind::Thread, "dd:1", 10), (CauseKind::Thread, "dd:2", 20)]));
        culprits
            .add(&WQ, &late("b", &[(CauseKind::Thread, "dd:2", 5), off("dd:2", 4), off("kworker/0:1-events:9", 3)]));
        culprits.add(&WQ, &late("b", &[off("kworker/1:2-events:8", 7), (CauseKind::Work, "f:1", 1)]));
        let ranked = culprits.take().culprits.into_iter();
        let ranked: Vec<_> =
            ranked.map(|of| (of.who.to_string(), of.alike, of.total_ns, of.victims[0].events)).collect();
        let expected = [
            ("dd", 2, 35, 2),
            ("kworker/1:2-events:8", 0, 7, 1),
            ("dd:2", 0, 4, 1),
            ("kworker/0:1-events:9", 0, 3, 1),
            ("f:1", 0, 1, 1),
        ];
        assert_eq!(ranked, expected.map(|(who, alike, ns, events)| (who.to_owned(), alike, ns, events)));
    }

    #[test]
    fn cause_without_cgroup_keeps_known_cgroup() {
        let mut culprits = Culprits::default();
        for cgroup in [Some(Cgroup::new("/a")), None] {
            let cause = Cause { cgroup, ..Cause::new(CauseKind::Thread, "sh:1", 7) };
            culprits.add(&WQ, &LateEvent { causes: vec![cause], ..late("a", &[]) });
        }
        assert_eq!(culprits.take().culprits[0].cgroup, Some(Cgroup::new("/a")));
    }

    #[test]
    fn culprits_beyond_limit_are_merged() {
        let mut culprits = Culprits::default();
        for number in 0..MAX_CULPRITS as u64 + 5 {
            culprits.add(&WQ, &late(&format!("handler{number}"), &[(CauseKind::Thread, &format!("sh:{number}"), 7)]));
        }
        culprits.add(&WQ, &late("a", &[(CauseKind::Thread, "sh:0", 7)]));
        culprits.add(&WQ, &late("a", &[(CauseKind::Unknown, "not recorded", 3)]));
        let ranking = culprits.take();
        assert_eq!((ranking.culprits.len(), ranking.unknown.total_ns), (MAX_CULPRITS + 2, 3));
        let [others, first, ..] = &ranking.culprits[..] else { panic!("there are more") };
        assert_eq!((&*others.who.to_string(), others.victims[0].events, others.total_ns), (BEYOND, 5, 35));
        assert_eq!((&*first.who.to_string(), first.victims[0].events), ("sh:0", 2));
        let caused_ns: u64 = ranking.culprits.iter().map(|culprit| culprit.total_ns).sum();
        assert_eq!(caused_ns, ranking.latency_ns);
    }

    #[test]
    fn distinct_victims_are_counted_up_to_limit() {
        let mut culprits = Culprits::default();
        for number in 0..MAX_VICTIMS + 9 {
            culprits.add(&WQ, &late(&format!("handler{number}"), &[(CauseKind::Work, "hog", 1)]));
        }
        assert_eq!(culprits.take().culprits[0].victims[0].subjects, MAX_VICTIMS as u64);
    }
}
