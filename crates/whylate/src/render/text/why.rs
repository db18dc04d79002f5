// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the causes of late events, and the ranking of culprits.

use std::io::{self, Write};

use whylate_model::culprits::{BEYOND, Culprit, Ranking, Victims};
use whylate_model::snapshot::{RecordedFrom, Unexplained};
use whylate_model::sources::EventWords;
pub use whylate_model::units::counted;
use whylate_model::units::{format_ns, format_round_ns, printable};
use whylate_model::{ActorName, Cause, CauseKind, LateEvent};

/// Maximum number of frames of a cause's stack, from the innermost.
const FRAMES: usize = 8;
/// Maximum number of culprits with a line of their own.
const CULPRITS: usize = 10;

/// Causes and culprits below this share of the latency are merged into one line, if there are several.
const SMALL_PERCENT: f64 = 0.5;

/// Writes the causes of a late event, largest first, with their stacks.
pub fn write_causes(out: &mut dyn Write, event: &LateEvent) -> io::Result<()> {
    let is_small = |cause: &Cause| percent(cause.ns, event.latency_ns) < SMALL_PERCENT;
    let shown = event.causes.partition_point(|cause| !is_small(cause));
    let (shown, small) =
        if event.causes.len() - shown > 1 { event.causes.split_at(shown) } else { (&event.causes[..], &[][..]) };
    for Cause { kind, who, ns, stack, .. } in shown {
        let share = percent(*ns, event.latency_ns);
        let (ns, how, who) = (format_ns(*ns), how(*kind, who), actor(who));
        writeln!(out, "    {share:>5.1}% {ns:>8}  {how:<14}  {who}")?;
        for frame in stack.iter().take(FRAMES) {
            writeln!(out, "{:39}{}", "", printable(frame))?;
        }
        if stack.len() > FRAMES {
            writeln!(out, "{:39}... {} more", "", stack.len() - FRAMES)?;
        }
    }
    if !small.is_empty() {
        let ns: u64 = small.iter().map(|cause| cause.ns).sum();
        writeln!(
            out,
            "    {:>5.1}% {:>8}  {} smaller causes",
            percent(ns, event.latency_ns),
            format_ns(ns),
            small.len()
        )?;
    }
    Ok(())
}

/// Writes a line per culprit, largest total delay first, then one for the small ones, and the unknown rest.
pub fn write_ranking(out: &mut dyn Write, ranking: &Ranking, words: EventWords) -> io::Result<()> {
    let waited = format_ns(ranking.latency_ns);
    let total = format!("{} {} {waited} in total.", counted(ranking.events, words.late), words.lasted);
    match unexplained(&ranking.unexplained, ranking.latency_ns, words.event) {
        // No event was explained.
        Some(rest) if ranking.events == 0 => return writeln!(out, "{rest}"),
        Some(rest) => writeln!(out, "{total} {rest}\nWho caused it:")?,
        None => writeln!(out, "{total} Who caused it:")?,
    }
    let mut line = |ns: u64, text: String| writeln!(out, "    {:>5.1}%  {text}", percent(ns, ranking.latency_ns));
    let is_small = |ns: u64| percent(ns, ranking.latency_ns) < SMALL_PERCENT;
    let known: Vec<&Culprit> = ranking.culprits.iter().filter(|of| of.kind != CauseKind::Unknown).collect();
    let shown = known.iter().take(CULPRITS).take_while(|culprit| !is_small(culprit.total_ns)).count();
    let unknown = &ranking.unknown;
    let has_small_rest = unknown.events > 0 && is_small(unknown.total_ns);
    // A single small one takes no more room than its sum.
    let is_alone = known.len() == shown + 1 && shown < CULPRITS && !has_small_rest;
    let shown = if is_alone { known.len() } else { shown };
    let (shown, others) = known.split_at(shown);
    shown.iter().try_for_each(|culprit| line(culprit.total_ns, sentence(culprit, words)))?;
    let beyond_ns = ranking.culprits.iter().filter(|culprit| culprit.who == BEYOND).map(|culprit| culprit.total_ns);
    let beyond_ns: u64 = beyond_ns.sum();
    let others_ns = beyond_ns + others.iter().map(|culprit| culprit.total_ns).sum::<u64>();
    let merges_unknown = has_small_rest && others_ns > 0;
    if others_ns > 0 {
        let more = if beyond_ns > 0 { "more than " } else { "" };
        let others = counted(others.len() as u64, "other");
        let (ns, of_it) = match merges_unknown {
            true => (others_ns + unknown.total_ns, format!(", {} of it unknown", format_ns(unknown.total_ns))),
            false => (others_ns, String::new()),
        };
        line(ns, format!("{more}{others}: {} in total{of_it}", format_ns(ns)))?;
    }
    if unknown.events > 0 && !merges_unknown {
        let items = counted(unknown.events, words.event);
        line(unknown.total_ns, format!("unknown: {items}, {} in total", format_ns(unknown.total_ns)))?;
    }
    Ok(())
}

/// Writes a row with share, delay and name for each of the first `most` culprits, then one for the others and the small
/// ones. `write_row` gets the rows of culprits.
pub fn write_shares(
    out: &mut dyn Write,
    culprits: &[Culprit],
    all_ns: u64,
    most: usize,
    write_row: &mut dyn FnMut(&mut dyn Write, &Culprit, &str) -> io::Result<()>,
) -> io::Result<()> {
    let row = |ns: u64, name: &str| format!("{:>5.1}%  {:>6}  {name}", percent(ns, all_ns), format_ns(ns));
    let is_shown = |culprit: &&Culprit| percent(culprit.total_ns, all_ns) >= SMALL_PERCENT;
    let shown = culprits.iter().take(most).take_while(is_shown).count();
    let (shown, rest) = culprits.split_at(shown);
    for culprit in shown {
        write_row(out, culprit, &row(culprit.total_ns, &culprit_label(culprit)))?;
    }
    match rest.len() as u64 {
        0 => Ok(()),
        others => writeln!(out, "{}", row(rest.iter().map(|of| of.total_ns).sum(), &counted(others, "other"))),
    }
}

/// Returns the share of the late time that has causes; `None` if all of it has.
pub fn unexplained(unexplained: &Unexplained, explained_ns: u64, event: &str) -> Option<String> {
    if let (true, Some(RecordedFrom { recorded_ns, asked_ns })) = (unexplained.events > 0, unexplained.recorded) {
        let have = if unexplained.events == 1 { "has" } else { "have" };
        return Some(format!(
            "{} of {} or longer {have} no causes in this recording; how many reached {} is unknown.",
            counted(unexplained.events, event),
            format_round_ns(recorded_ns),
            format_round_ns(asked_ns)
        ));
    }
    let percent = unexplained.explained_percent(explained_ns)?;
    let more = if explained_ns == 0 { "" } else { "more " };
    let (events, ns) = (counted(unexplained.events, &format!("{more}late {event}")), format_ns(unexplained.total_ns));
    let unexplained = format!("{events} ({ns} in total) exceeded the budget for explanations.");
    Some(match explained_ns {
        0 => unexplained,
        _ => format!("That is {percent:.1}% of the late time: {unexplained}"),
    })
}

/// Returns the name of a kind of cause.
pub fn word(kind: CauseKind) -> &'static str {
    match kind {
        CauseKind::IrqsOff => "interrupts off",
        CauseKind::PreemptOff => "preemption off",
        CauseKind::Irq => "interrupt",
        CauseKind::Softirq => "softirq",
        CauseKind::Nmi => "NMI",
        CauseKind::Thread => "thread",
        CauseKind::Work => "work",
        CauseKind::MaxActive => "max_active",
        CauseKind::IdleExit => "idle exit",
        CauseKind::Wakeup => "wakeup",
        CauseKind::Steal => "steal",
        CauseKind::Throttled => "throttled",
        CauseKind::Running => "running",
        CauseKind::Disk => "disk",
        CauseKind::DiskQueue => "disk queue",
        CauseKind::Timer => "timer",
        CauseKind::Network => "network",
        CauseKind::Interrupt => "interrupt",
        CauseKind::Rcu => "RCU",
        CauseKind::Outside => "outside",
        CauseKind::Stopped => "stopped",
        CauseKind::Unknown => "unknown",
    }
}

/// Returns the name of a kind of cause, shown with the culprit's name; `sleep`, not `timer`, for a thread that slept.
pub fn how(kind: CauseKind, who: &ActorName) -> &'static str {
    if kind == CauseKind::Timer && is_sleeper(who) { "sleep" } else { word(kind) }
}

/// Returns whether the culprit of a wait for a timer is who slept, and not the timer.
fn is_sleeper(who: &ActorName) -> bool {
    who.is_thread() || who.is_cgroup()
}

/// Renders the name of an actor, and whether it is whylate itself, which measures.
pub fn actor(name: &ActorName) -> String {
    let own = if name.is_own() { " (whylate itself)" } else { "" };
    format!("{}{own}", printable(name))
}

/// Renders a culprit with its kind, and the number of threads of its name.
pub fn culprit_label(of: &Culprit) -> String {
    culprit(of.kind, &of.who) + &how_many(of)
}

/// Renders the number of threads merged into a culprit by name; empty without merging.
pub fn how_many(of: &Culprit) -> String {
    if of.alike > 0 { format!(" ({} threads)", of.alike) } else { String::new() }
}

/// Renders a culprit from its kind and name.
pub fn culprit(kind: CauseKind, name: &ActorName) -> String {
    let (who, word) = (actor(name), word(kind));
    match kind {
        CauseKind::Work => who,
        CauseKind::Thread if name.is_cgroup() => format!("threads of cgroup {who}"),
        CauseKind::Irq
        | CauseKind::Softirq
        | CauseKind::Thread
        | CauseKind::Disk
        | CauseKind::DiskQueue
        | CauseKind::Rcu => {
            format!("{word} {who}")
        }
        CauseKind::Interrupt if kind.is_unnamed(name) => "an unknown interrupt".to_owned(),
        CauseKind::Interrupt => format!("{word} {who}"),
        CauseKind::Outside => format!("a thread {who}"),
        CauseKind::Stopped => format!("{word} by {who}"),
        CauseKind::Running => format!("thread {who} running"),
        CauseKind::Timer if is_sleeper(name) => format!("{who} sleeping"),
        CauseKind::Timer => who,
        CauseKind::Network if kind.is_unnamed(name) => word.to_owned(),
        CauseKind::Network => format!("{word} {who}"),
        CauseKind::IrqsOff | CauseKind::PreemptOff => format!("{word} in {who}"),
        _ => format!("{word} ({who})"),
    }
}

fn sentence(culprit: &Culprit, words: EventWords) -> String {
    let name = culprit_label(culprit);
    let Some(&Victims { events, subjects, total_ns, worst_ns, .. }) = culprit.victims.first() else { return name };
    if events == 1 {
        return format!("{name} delayed 1 {} by {}", words.event, format_ns(total_ns));
    }
    format!(
        "{name} delayed {} of {} by {} in total, worst {}",
        counted(events, words.event),
        counted(subjects, words.of),
        format_ns(total_ns),
        format_ns(worst_ns)
    )
}

fn percent(part_ns: u64, whole_ns: u64) -> f64 {
    part_ns as f64 * 100.0 / whole_ns.max(1) as f64
}

#[cfg(test)]
mod tests {
    use whylate_model::Culprits;
    use whylate_model::sources::WQ;

    use super::*;
    use crate::render::text::text_of;

    fn late(handler: &str, causes: &[(CauseKind, &str, u64)]) -> LateEvent {
        LateEvent {
            subject: handler.to_owned(),
            latency_ns: causes.iter().map(|cause| cause.2).sum(),
            causes: causes.iter().map(|&(kind, who, ns)| Cause::new(kind, who, ns)).collect(),
            ..LateEvent::default()
        }
    }

    fn ranked(events: &[LateEvent]) -> String {
        let mut culprits = Culprits::default();
        for event in events {
            culprits.add(&WQ, event);
        }
        text_of(|out| write_ranking(out, &culprits.take(), WQ.words))
    }

    #[test]
    fn culprits_are_ranked_by_the_delay_they_caused() {
        use CauseKind::{IdleExit, Irq, IrqsOff, MaxActive, Softirq, Steal, Thread, Unknown, Wakeup, Work};
        let mut events = vec![
            late("vmstat_update", &[(Work, "wb_workfn", 48_000_000), (Irq, "nvme0q1", 20_000), (Unknown, "x", 7_000)]),
            late("flush_to_ldisc", &[(Work, "wb_workfn", 20_000_000), (Thread, "evil\x1b[2J:77", 3_000_000)]),
            late("flush_to_ldisc", &[(IrqsOff, "dd:4242", 11_000_000), (Thread, "evil\x1b[2J:77", 1_000_000)]),
            late("xlog_ioend_work", &[(MaxActive, "xlog_cil_push_work", 9_000_000), (Steal, "hypervisor", 400_000)]),
            late("xlog_ioend_work", &[(Wakeup, "run queue of CPU 3", 90_000), (Softirq, "net_rx", 80_000)]),
            late("xlog_ioend_work", &[(IdleExit, "CPU 1", 70_000), (Unknown, "y", 5_000), (Unknown, "z", 5_000)]),
        ];
        for number in 0..3 {
            events.push(late("vmstat_update", &[(Thread, &format!("small:{number}"), 1_000 + number)]));
        }
        insta::assert_snapshot!(ranked(&events));
    }

    #[test]
    fn ranking_has_explained_share() {
        let ranked = |explained: &[LateEvent], total_ns| {
            let mut culprits = Culprits::default();
            explained.iter().for_each(|event| culprits.add(&WQ, event));
            culprits.add_unexplained(Unexplained { events: 3, total_ns, recorded: None });
            text_of(|out| write_ranking(out, &culprits.take(), WQ.words))
        };
        let one = [late("a", &[(CauseKind::Work, "b", 5_000)])];
        let text = ranked(&one, 15_000);
        assert!(
            text.starts_with(
                "1 late item waited 5.00us in total. That is 25.0% of the late time: 3 more late items (15.0us in total) \
                 exceeded the budget for explanations.\nWho caused it:\n    100.0%"
            ),
            "{text}"
        );
        // Rounding does not turn nearly all into 100 %.
        assert!(ranked(&one, 1).contains("That is 99.9% of"));
        assert_eq!(ranked(&[], 15_000), "3 late items (15.0us in total) exceeded the budget for explanations.\n");
    }

    #[test]
    fn what_reached_a_higher_threshold_than_the_recorded_one_is_unknown() {
        let recorded = Some(RecordedFrom { recorded_ns: 10_000_000, asked_ns: 10_000_000_000 });
        let text = |events| unexplained(&Unexplained { events, total_ns: 5, recorded }, 7, "wait").expect("a sentence");
        assert_eq!(
            text(963),
            "963 waits of 10ms or longer have no causes in this recording; how many reached 10s is unknown."
        );
        assert!(text(1).starts_with("1 wait of 10ms or longer has no causes in this recording;"));
    }

    #[test]
    fn names_sleeper_or_purpose_of_timer() {
        let rendered = |who: &str| {
            let Ok(who) = who.parse();
            (how(CauseKind::Timer, &who), culprit(CauseKind::Timer, &who))
        };
        assert_eq!(rendered("sleep:5823"), ("sleep", "sleep:5823 sleeping".to_owned()));
        for who in ["timeout in poll (curl:7)", "TCP retransmission"] {
            assert_eq!(rendered(who), ("timer", who.to_owned()));
        }
        assert_eq!(culprit(CauseKind::Network, &"network".into()), "network");
    }

    #[test]
    fn whylate_is_named_as_itself() {
        let rendered = |kind, who: &str| culprit(kind, &who.parse().expect("any text"));
        assert_eq!(rendered(CauseKind::Thread, "whylate:938"), "thread whylate:938 (whylate itself)");
        assert_eq!(rendered(CauseKind::IrqsOff, "timerlat/1:7"), "interrupts off in timerlat/1:7 (whylate itself)");
        // What the user injects is not.
        assert_eq!(rendered(CauseKind::Thread, "whylate-hog:7"), "thread whylate-hog:7");
    }

    #[test]
    fn uses_singular_for_one_item() {
        insta::assert_snapshot!(ranked(&[late("a", &[(CauseKind::Work, "b", 5_000)])]));
    }
}
