// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the lines below the figures: lost events, and the run time of the probes.

use std::collections::BTreeMap;
use std::io::{self, Write};

use whylate_model::Snapshot;
use whylate_model::sources::{self, OFFCPU, SHARED, count_lost, lost_events};
use whylate_model::units::{counted, format_ns, printable};

/// Minimum age, in nanoseconds, of an item that still waits or runs to be mentioned.
const STUCK_NS: f64 = 1e6;

/// Writes a line for items that still wait or run, one for lost events, if there are any, and one for the probes' run
/// time, where the kernel counts it. With `is_verbose`, lost events are listed by reason; without it, notes on precision
/// are counted.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot, is_verbose: bool) -> io::Result<()> {
    write_stuck(out, snapshot, "queued", "oldest_queued_ns")?;
    write_stuck(out, snapshot, "running", "oldest_running_ns")?;
    are_explained(snapshot);
    if is_verbose {
        write_lost(out, &by_reason(&snapshot.source, &snapshot.lost))?;
    } else {
        let lost = rate(count_lost(&snapshot.source, &snapshot.lost), snapshot.duration_ns);
        let notes = (snapshot.notes > 0).then(|| counted(snapshot.notes, "precision note"));
        match (lost, notes) {
            (Some(lost), None) => writeln!(out, "{lost}: -v shows why")?,
            (Some(lost), Some(notes)) => writeln!(out, "{lost}; {notes}: -v")?,
            (None, Some(notes)) => writeln!(out, "{notes}: -v")?,
            (None, None) => {}
        }
    }
    let probe = snapshot.probe;
    if let Some(each_ns) = probe.run_ns.checked_div(probe.runs) {
        writeln!(out, "probe: {} in {} runs, {each_ns} ns each", format_ns(probe.run_ns), probe.runs)?;
    }
    Ok(())
}

/// Lists the lost events of a source by reason.
pub fn by_reason(source: &str, counts: &BTreeMap<String, u64>) -> Vec<String> {
    lost_events(source, counts).map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect()
}

/// Renders the number and rate of lost events; `None` if none was lost. The rate is left out if the duration is unknown,
/// which is 0.
pub fn rate(events: u64, duration_ns: u64) -> Option<String> {
    let rate = per_second(events, duration_ns).map_or_else(String::new, |rate| format!(" ({rate})"));
    (events > 0).then(|| format!("{} lost{rate}", counted(events, "event")))
}

/// Renders a number of events per second; `None` if there are none, or the duration is unknown, which is 0.
pub fn per_second(events: u64, duration_ns: u64) -> Option<String> {
    let each_second = events as f64 * 1e9 / duration_ns.max(1) as f64;
    (events > 0 && duration_ns > 0).then(|| match each_second {
        ..0.1 => "less than 0.1/s".to_owned(),
        0.1..9.95 => format!("{each_second:.1}/s"),
        _ => format!("{each_second:.0}/s"),
    })
}

/// Writes the lost events, if any, and the command that explains the reasons.
pub fn write_lost(out: &mut dyn Write, lost: &[String]) -> io::Result<()> {
    if lost.is_empty() { Ok(()) } else { writeln!(out, "{}", listed(lost)) }
}

fn listed(lost: &[String]) -> String {
    format!("lost: {} (see whylate help lost)", printable(&lost.join(", ")))
}

/// Renders everything about the measurement itself in one line: what the CPU account has lost, by reason with
/// `is_verbose`, and the options that show more.
pub fn about(lost: &BTreeMap<String, u64>, duration_ns: u64, is_verbose: bool, more: &[&str]) -> String {
    // The samples of `run` and of one program are those of offcpu.
    let is_lost = |reason: &&String| OFFCPU.lost.iter().all(|known| known.name != **reason || known.is_lost);
    let lost =
        &lost.iter().filter(|(reason, _)| is_lost(reason)).map(|(reason, &count)| (reason.clone(), count)).collect();
    let reasons = by_reason(SHARED, lost);
    let lost = match (is_verbose, reasons.is_empty()) {
        (true, true) => Some("no event lost".to_owned()),
        (true, false) => Some(listed(&reasons)),
        (false, _) => rate(count_lost(SHARED, lost), duration_ns),
    };
    let more = (!more.is_empty()).then(|| format!("more: {}", more.join(", ")));
    lost.into_iter().chain(more).collect::<Vec<_>>().join("; ")
}

/// Asserts, in debug builds, that the source's card explains each reason for lost events.
pub fn are_explained(snapshot: &Snapshot) {
    let card = sources::named(&snapshot.source);
    let is_explained = |reason: &String| card.is_some_and(|card| card.meaning(reason).is_some());
    debug_assert!(snapshot.lost.keys().all(is_explained), "of {}: {:?}", snapshot.source, snapshot.lost);
}

fn write_stuck(out: &mut dyn Write, snapshot: &Snapshot, count: &str, oldest: &str) -> io::Result<()> {
    let oldest_series = snapshot.series.iter().max_by(|a, b| a.value(oldest).total_cmp(&b.value(oldest)));
    let Some(series) = oldest_series.filter(|series| series.value(oldest) >= STUCK_NS) else {
        return Ok(());
    };
    let items: f64 = snapshot.series.iter().map(|series| series.value(count)).sum();
    let who = series.labels.values().next().map(|label| format!(" ({})", printable(label))).unwrap_or_default();
    writeln!(out, "still {count}: {items}, the oldest for {}{who}", format_ns(series.value(oldest) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::text_of;

    #[test]
    fn samples_of_interrupts_are_not_lost() {
        let lost = |reason: &str| about(&[(reason.to_owned(), 3)].into(), 1_000_000_000, false, &[]);
        assert_eq!(lost("samples_in_interrupts"), "");
        assert_eq!(lost("samples_full"), "3 events lost (3.0/s)");
    }

    #[test]
    fn one_line_tells_how_many_events_were_lost_and_v_why() {
        let mut snapshot = Snapshot::new("block", "fexit", "host", 0);
        snapshot.duration_ns = 3_000_000_000;
        let printed = |snapshot: &Snapshot, is_verbose| text_of(|out| write(out, snapshot, is_verbose));
        // Left out on purpose.
        snapshot.lost = [("own".to_owned(), 258), ("reused".to_owned(), 0)].into();
        assert_eq!([printed(&snapshot, false), printed(&snapshot, true)], ["", ""]);
        snapshot.lost.extend([("late_events".to_owned(), 963), ("unmatched".to_owned(), 112)]);
        assert_eq!(printed(&snapshot, false), "1075 events lost (358/s): -v shows why\n");
        assert_eq!(printed(&snapshot, true), "lost: 963 late events, 112 unmatched (see whylate help lost)\n");
        snapshot.notes = 1;
        assert_eq!(printed(&snapshot, false), "1075 events lost (358/s); 1 precision note: -v\n");
        snapshot.lost.clear();
        assert_eq!([printed(&snapshot, false), printed(&snapshot, true)], ["1 precision note: -v\n", ""]);
    }

    #[test]
    fn rates_have_two_digits_at_most_below_ten() {
        let of = |events, seconds: u64| rate(events, seconds * 1_000_000_000);
        assert_eq!(of(0, 1), None);
        assert_eq!(of(1, 100).as_deref(), Some("1 event lost (less than 0.1/s)"));
        assert_eq!(of(3, 2).as_deref(), Some("3 events lost (1.5/s)"));
        assert_eq!(of(668, 2).as_deref(), Some("668 events lost (334/s)"));
    }
}
