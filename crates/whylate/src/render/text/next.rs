// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command to run next, by the culprit that leads a ranking.

use whylate_model::culprits::{Culprit, Ranking};
use whylate_model::sources::{BLOCK, IRQSOFF};
use whylate_model::{Card, CauseKind};

/// Where the next command measures, or which recording it shows.
#[derive(Debug)]
pub enum Next {
    /// On this machine. Returns the process of a thread that still runs.
    Live(fn(u32) -> Option<u32>),
    /// In a recording: the command line of the replay, and the recorded sources.
    Replay(String, Vec<String>),
}

impl Next {
    /// Returns the command that shows more of the main culprit of a source's late events, below a comment on it.
    pub fn lines(&self, card: &Card, ranking: &Ranking) -> Vec<String> {
        let is_named = |culprit: &&Culprit| culprit.kind != CauseKind::Unknown && !culprit.who.is_own();
        let culprit = ranking.culprits.iter().find(is_named);
        let source = culprit.and_then(|culprit| source_of(culprit.kind));
        let (what, command) = match self {
            Next::Live(process_of) => match (source, culprit.and_then(|culprit| process(culprit, *process_of))) {
                (Some((source, options, what)), _) => (what, format!("whylate {}{options} -d 10s", source.name)),
                (None, Some(pid)) => ("what this process does", format!("whylate -p {pid}")),
                (None, None) => (card.judged.of, format!("whylate {} --table -d 10s", card.name)),
            },
            Next::Replay(replay, sources) => match source.filter(|(of, ..)| sources.iter().any(|one| one == of.name)) {
                Some((source, options, what)) => (what, format!("{replay} {}{options}", source.name)),
                None if sources.len() > 1 => ("what else was late", replay.clone()),
                None => (card.judged.of, format!("{replay} {} --table", card.name)),
            },
        };
        vec![format!("# {what}"), command]
    }
}

/// Returns the source that shows more of culprits of a kind, the options for that, and what it shows.
fn source_of(kind: CauseKind) -> Option<(&'static Card, &'static str, &'static str)> {
    match kind {
        CauseKind::IrqsOff | CauseKind::Irq | CauseKind::Softirq | CauseKind::Nmi => {
            Some((&IRQSOFF, "", "what keeps interrupts off"))
        }
        CauseKind::PreemptOff => Some((&IRQSOFF, " --preempt", "what keeps preemption off")),
        CauseKind::Disk | CauseKind::DiskQueue => {
            Some((&BLOCK, " --table --by process", "the processes that use the disk"))
        }
        _ => None,
    }
}

/// Returns the process of a culprit that is a thread.
fn process(culprit: &Culprit, process_of: fn(u32) -> Option<u32>) -> Option<u32> {
    let is_thread = matches!(culprit.kind, CauseKind::Thread | CauseKind::Running) && culprit.who.is_thread();
    culprit.who.tid().filter(|_| is_thread).and_then(process_of)
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::WQ;
    use whylate_model::{ActorName, Cause, Culprits, LateEvent};

    use super::*;

    fn ranking(kind: CauseKind, who: &str) -> Ranking {
        let mut culprits = Culprits::default();
        let cause = |kind, who: &str, ns| Cause::new(kind, who.parse::<ActorName>().expect("any text"), ns);
        let causes = vec![cause(CauseKind::Thread, "whylate:5", 8_000), cause(kind, who, 1_000)];
        culprits.add(&WQ, &LateEvent { latency_ns: 9_000, causes, ..LateEvent::default() });
        culprits.take()
    }

    #[test]
    fn command_shows_more_of_the_main_culprit() {
        let live = Next::Live(|tid| (tid == 43).then_some(42));
        let next = |kind, who| live.lines(&WQ, &ranking(kind, who)).join(" ");
        let table = "# workqueue latency, from queued to started whylate wq --table -d 10s";
        assert_eq!(next(CauseKind::IrqsOff, "dd:7"), "# what keeps interrupts off whylate irqsoff -d 10s");
        assert_eq!(next(CauseKind::Thread, "hog-thread:43"), "# what this process does whylate -p 42");
        // Such a thread has exited.
        assert_eq!(next(CauseKind::Thread, "hog-thread:44"), table);
        assert_eq!(next(CauseKind::Work, "wb_workfn"), table);
        assert_eq!(live.lines(&WQ, &Ranking::default()).join(" "), table);
    }

    #[test]
    fn command_below_a_replay_shows_the_recording() {
        let next = |sources: &[&str], kind| {
            let sources = sources.iter().map(|&name| name.to_owned()).collect();
            let next = Next::Replay("whylate replay a.whylate".to_owned(), sources);
            next.lines(&WQ, &ranking(kind, "dd:7")).join(" ")
        };
        let disk = "# the processes that use the disk whylate replay a.whylate block --table --by process";
        assert_eq!(next(&["wq", "block"], CauseKind::Disk), disk);
        assert_eq!(next(&["wq", "irqsoff"], CauseKind::Disk), "# what else was late whylate replay a.whylate");
        let alone = "# workqueue latency, from queued to started whylate replay a.whylate wq --table";
        assert_eq!(next(&["wq"], CauseKind::Disk), alone);
    }
}
