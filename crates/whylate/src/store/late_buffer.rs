// SPDX-License-Identifier: MIT OR Apache-2.0
//! Late events until the next snapshot, in bounded memory.

use whylate_model::late::Thresholds;
use whylate_model::{LateEvent, Snapshot, TopN};

/// Maximum number of late events of a snapshot. Others are counted as lost.
const MAX_LATE_EVENTS: usize = 10_000;

/// Which late events a snapshot carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// None: late events are printed as they arrive.
    Nothing,
    All,
    /// The N worst late events with causes, and all late events without causes.
    TopN(usize),
    /// The N worst late events with causes, and no others.
    OnlyWorst(usize),
}

impl Keep {
    /// Chooses by the options: all late events (or the worst) for JSON, the worst for `--worst`, otherwise none.
    pub fn for_output(is_json: bool, thresholds: Thresholds) -> Self {
        match thresholds.worst {
            worst if is_json => Keep::worst(worst),
            Some(limit) => Keep::OnlyWorst(limit),
            None => Keep::Nothing,
        }
    }

    /// Keeps the `limit` worst late events, or all without a limit.
    pub fn worst(limit: Option<usize>) -> Self {
        limit.map_or(Keep::All, Keep::TopN)
    }
}

/// Late events of one source until the snapshot that has them.
#[derive(Debug)]
pub struct LateBuffer {
    keep: Keep,
    late: Vec<LateEvent>,
    worst: Option<TopN>,
    beyond_limit: u64,
}

impl LateBuffer {
    pub fn new(keep: Keep) -> Self {
        let worst = match keep {
            Keep::TopN(limit) | Keep::OnlyWorst(limit) => Some(TopN::new(limit)),
            Keep::Nothing | Keep::All => None,
        };
        LateBuffer { keep, late: Vec::new(), worst, beyond_limit: 0 }
    }

    pub fn add(&mut self, event: LateEvent) {
        match &mut self.worst {
            _ if self.keep == Keep::Nothing => {}
            Some(worst) if !event.causes.is_empty() => worst.add(event),
            _ if matches!(self.keep, Keep::OnlyWorst(_)) => {}
            _ if self.late.len() < MAX_LATE_EVENTS => self.late.push(event),
            _ => self.beyond_limit += 1,
        }
    }

    /// Moves the buffered late events into a snapshot: first those without causes, then the worst, longest first.
    pub fn move_into(&mut self, snapshot: &mut Snapshot) {
        snapshot.late.append(&mut self.late);
        snapshot.late.extend(self.worst.iter_mut().flat_map(TopN::take));
        let beyond_limit = std::mem::take(&mut self.beyond_limit);
        if beyond_limit > 0 {
            *snapshot.lost.entry("late_events".to_owned()).or_default() += beyond_limit;
        }
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind};

    use super::*;

    fn snapshot_of(kept: &mut LateBuffer) -> Snapshot {
        let mut snapshot = Snapshot::new(WQ.name, "fentry", "host", 0);
        kept.move_into(&mut snapshot);
        snapshot
    }

    #[test]
    fn counts_late_events_beyond_limit_as_lost() {
        let mut kept = LateBuffer::new(Keep::All);
        (0..MAX_LATE_EVENTS + 3).for_each(|_| kept.add(LateEvent::default()));
        let snapshot = snapshot_of(&mut kept);
        assert_eq!((snapshot.late.len(), snapshot.lost["late_events"]), (MAX_LATE_EVENTS, 3));
        let next = snapshot_of(&mut kept);
        assert!(next.late.is_empty() && next.lost.is_empty());
    }

    #[test]
    fn keeps_only_worst_late_events() {
        let late = |latency_ns| {
            let causes = vec![Cause::new(CauseKind::Work, "hog", latency_ns)];
            LateEvent { latency_ns, causes, ..LateEvent::default() }
        };
        let mut kept = LateBuffer::new(Keep::TopN(2));
        [4, 9, 2].into_iter().for_each(|ns| kept.add(late(ns)));
        let latencies = |snapshot: Snapshot| snapshot.late.iter().map(|event| event.latency_ns).collect::<Vec<_>>();
        assert_eq!(latencies(snapshot_of(&mut kept)), [9, 4]);
        // An event without causes does not compete for the worst.
        kept.add(LateEvent { latency_ns: 1, ..LateEvent::default() });
        assert_eq!(latencies(snapshot_of(&mut kept)), [1]);
        let mut only = LateBuffer::new(Keep::OnlyWorst(2));
        [late(7), LateEvent { latency_ns: 1, ..LateEvent::default() }].into_iter().for_each(|event| only.add(event));
        assert_eq!(latencies(snapshot_of(&mut only)), [7]);
        let mut nothing = LateBuffer::new(Keep::Nothing);
        nothing.add(late(7));
        assert!(snapshot_of(&mut nothing).late.is_empty());
    }
}
