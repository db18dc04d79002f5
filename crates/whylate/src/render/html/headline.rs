// SPDX-License-Identifier: MIT OR Apache-2.0
//! The line below the headline of a report: the victim with the longest total wait, and its main cause.

use std::collections::HashMap;

use whylate_model::culprits::By;
use whylate_model::units::{counted, format_span};
use whylate_model::{ActorName, Card, CauseKind, LateEvent};

use crate::render::text::why;

/// Maximum number of victims, and of culprits per victim. Beyond it, the victims that waited least are forgotten.
const VICTIMS: usize = 10_000;
const CULPRITS: usize = 200;

/// Sums up the waits of victims as late events come.
#[derive(Debug, Default)]
pub struct Victims {
    rank_by: By,
    waits_by_victim: HashMap<(&'static str, String), Waits>,
    /// Whether victims were forgotten. A victim added later may have been among them.
    has_forgotten: bool,
}

#[derive(Debug, Default)]
struct Waits {
    events: u64,
    total_ns: u64,
    is_part: bool,
    causes: HashMap<(CauseKind, ActorName), u64>,
}

/// The victim that waited longest in total.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    pub source: &'static str,
    pub who: String,
    pub events: u64,
    pub total_ns: u64,
    /// Whether the victim may have waited longer, as some of its waits may have been dropped.
    pub is_part: bool,
    /// The main cause with its time in nanoseconds, if one is known.
    pub cause: Option<(CauseKind, ActorName, u64)>,
}

impl Victims {
    /// Starts without victims, whose causes are added up as the culprits of the report are.
    pub fn ranked_by(rank_by: By) -> Self {
        Victims { rank_by, ..Victims::default() }
    }

    pub fn add(&mut self, card: &Card, event: &LateEvent) {
        if event.subject.is_empty() {
            return;
        }
        let key = (card.name, event.subject.clone());
        if self.waits_by_victim.len() >= VICTIMS && !self.waits_by_victim.contains_key(&key) {
            self.forget_least();
        }
        let is_part = self.has_forgotten;
        let waits = self.waits_by_victim.entry(key).or_insert_with(|| Waits { is_part, ..Waits::default() });
        waits.events += 1;
        waits.total_ns = waits.total_ns.saturating_add(event.latency_ns);
        for cause in &event.causes {
            let key = (cause.kind, self.rank_by.name_of(cause, event).into_owned());
            if waits.causes.len() < CULPRITS || waits.causes.contains_key(&key) {
                let ns = waits.causes.entry(key).or_default();
                *ns = ns.saturating_add(cause.ns);
            }
        }
    }

    /// Forgets the half of the victims that waited least.
    fn forget_least(&mut self) {
        let mut all: Vec<((&'static str, String), Waits)> = self.waits_by_victim.drain().collect();
        // Breaks ties in a fixed order.
        all.sort_unstable_by(|a, b| b.1.total_ns.cmp(&a.1.total_ns).then_with(|| a.0.cmp(&b.0)));
        self.waits_by_victim.extend(all.into_iter().take(VICTIMS / 2));
        self.has_forgotten = true;
    }

    pub fn first(self) -> Option<Victim> {
        let longest = |(_, waits): &(_, Waits)| waits.total_ns;
        let mut all: Vec<((&'static str, String), Waits)> = self.waits_by_victim.into_iter().collect();
        // Breaks ties in a fixed order.
        all.sort_by(|a, b| b.0.cmp(&a.0));
        let ((source, who), waits) = all.into_iter().max_by_key(longest)?;
        let mut causes: Vec<((CauseKind, ActorName), u64)> =
            waits.causes.iter().map(|(of, ns)| (of.clone(), *ns)).collect();
        causes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let cause = causes.into_iter().next().map(|((kind, who), ns)| (kind, who, ns));
        let Waits { events, total_ns, is_part, .. } = waits;
        Some(Victim { source, who, events, total_ns, is_part, cause })
    }
}

/// Returns the line.
pub fn sentence(victim: &Victim) -> String {
    let Victim { source, who, events, total_ns, is_part, cause } = victim;
    let (waits, total) = (counted(*events, "wait"), format_span(*total_ns));
    let at_least = if *is_part { "at least " } else { "" };
    let due = cause.as_ref().map_or_else(String::new, |(kind, who, ns)| {
        let percent = *ns as f64 * 100.0 / (*total_ns).max(1) as f64;
        let text = match kind {
            CauseKind::Disk | CauseKind::DiskQueue => format!("{}: {}", why::word(*kind), why::actor(who)),
            _ => why::culprit(*kind, who),
        };
        format!(", {percent:.0}% of it due to {text}")
    });
    format!("Waited longest: {who} ({source}), {at_least}{total} in {waits}{due}.")
}

#[cfg(test)]
mod tests {
    use whylate_model::Cause;
    use whylate_model::sources::{OFFCPU, WQ};

    use super::*;

    fn late(subject: &str, causes: &[(CauseKind, &str, u64)]) -> LateEvent {
        LateEvent {
            subject: subject.to_owned(),
            latency_ns: causes.iter().map(|cause| cause.2).sum(),
            causes: causes
                .iter()
                .map(|&(kind, who, ns)| Cause::new(kind, who.parse::<ActorName>().expect("any text"), ns))
                .collect(),
            ..LateEvent::default()
        }
    }

    #[test]
    fn finds_top_victim_among_many_single_waits() {
        let mut victims = Victims::default();
        for number in 0..3 * VICTIMS {
            victims.add(&OFFCPU, &late(&format!("thread:{number}"), &[(CauseKind::Running, "hog", 1)]));
            victims.add(&OFFCPU, &late("steady", &[(CauseKind::Running, "hog", 2)]));
            assert!(victims.waits_by_victim.len() <= VICTIMS);
        }
        let most = |victims: &Victims| {
            let all = victims.waits_by_victim.iter().max_by_key(|(_, waits)| waits.total_ns);
            all.map(|((_, who), waits)| (who.clone(), waits.total_ns, waits.is_part))
        };
        assert_eq!(most(&victims), Some(("steady".to_owned(), 6 * VICTIMS as u64, false)));
        victims.add(&OFFCPU, &late("new", &[(CauseKind::Running, "hog", 1_000_000)]));
        let first = victims.first().expect("there are some");
        let text = sentence(&first);
        assert!(text.starts_with("Waited longest: new (offcpu), at least 1.00ms in 1 wait, 100% of it"), "{text}");
    }

    #[test]
    fn names_victim_and_its_main_cause() {
        let of = |victims: Victims| victims.first().map(|victim| sentence(&victim));
        assert_eq!(of(Victims::default()), None);
        let mut victims = Victims::default();
        let disk = (CauseKind::Disk, "nvme0n1 (write by backup:812)", 640_000_000);
        for _ in 0..2 {
            victims.add(&OFFCPU, &late("postgres:4711", &[disk, (CauseKind::Running, "writer:9", 360_000_000)]));
        }
        victims.add(&WQ, &late("vmstat_update", &[(CauseKind::Work, "hog", 1_900_000_000)]));
        let expected = "Waited longest: postgres:4711 (offcpu), 2.00s in 2 waits, 64% of it due to disk: nvme0n1 (write by backup:812).";
        assert_eq!(of(victims).as_deref(), Some(expected));
        let mut waited_for_a_sleeper = Victims::default();
        waited_for_a_sleeper.add(&OFFCPU, &late("fz-writer:5780", &[(CauseKind::Timer, "sleep:5823", 50)]));
        let text = of(waited_for_a_sleeper).unwrap_or_default();
        assert!(text.ends_with("100% of it due to sleep:5823 sleeping."), "{text}");
        let mut by_name = Victims::ranked_by(By::Name);
        for gzip in ["gzip:1", "gzip:2"] {
            let causes = [(CauseKind::Running, gzip, 40), (CauseKind::Irq, "local_timer", 30)];
            by_name.add(&OFFCPU, &late("postgres:4711", &causes));
        }
        let text = of(by_name).unwrap_or_default();
        assert!(text.contains("57% of it due to") && text.contains("gzip"), "{text}");
        let mut one = Victims::default();
        one.add(&WQ, &late("vmstat_update", &[]));
        assert_eq!(of(one).as_deref(), Some("Waited longest: vmstat_update (wq), 0ns in 1 wait."));
    }
}
