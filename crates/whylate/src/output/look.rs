// SPDX-License-Identifier: MIT OR Apache-2.0
//! One screen: what was late on this machine, what made it late, and where to look next.

use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::look::{Culprit, Headline, Look, Sighting, late_from_ns};
use whylate_model::units::{format_ns, printable};

use super::late::time_of_day;
use super::table::{Align, Table};
use super::why::{self, word};

/// How many culprits are shown.
const CULPRITS: usize = 8;
/// Of their delays in all, in percent; those below are summed up.
const SMALL_PERCENT: f64 = 0.5;

/// Writes everything.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut dyn Write, look: &Look, terminal_columns: Option<usize>) -> io::Result<()> {
    write_in(out, look, terminal_columns, &TimeZone::system())
}

fn write_in(out: &mut dyn Write, look: &Look, terminal_columns: Option<usize>, zone: &TimeZone) -> io::Result<()> {
    writeln!(out, "{} of {}\n", format_ns(look.duration_ns), printable(&look.host))?;
    headlines(&look.sources).write(out, terminal_columns)?;
    let of_account = look.lost.iter().map(|(reason, count)| format!("{count} {} (all)", reason.replace('_', " ")));
    let lost: Vec<String> = look.sources.iter().flat_map(lost).chain(of_account).collect();
    if !lost.is_empty() {
        writeln!(out, "lost: {}", lost.join(", "))?;
    }
    if !look.worst.is_empty() {
        writeln!(out, "\nThe worst:")?;
        look.worst.iter().try_for_each(|sighting| write_sighting(out, sighting, zone))?;
    }
    write_culprits(out, &look.culprits)?;
    for (heading, of) in [("Not measured here", &look.unmeasured), ("Less well here than elsewhere", &look.weaker)] {
        if !of.is_empty() {
            writeln!(out, "\n{heading} (`whylate doctor` tells what the kernel lacks):")?;
        }
        of.iter().try_for_each(|told| writeln!(out, "    {:<9} {}", told.source, printable(&told.reason)))?;
    }
    writeln!(out)?;
    let late: Vec<&Headline> = look.sources.iter().filter(|source| source.is_late).collect();
    if late.is_empty() {
        return writeln!(out, "Nothing was late.");
    }
    writeln!(out, "Look closer with:")?;
    late.iter().try_for_each(|source| writeln!(out, "    {}", next(source)))
}

fn headlines(sources: &[Headline]) -> Table {
    let right = |name| (name, Align::Right);
    let left = |name| (name, Align::Left);
    let mut table = Table::new(&[
        left("SOURCE"),
        left("VERDICT"),
        right("COUNT"),
        right("P50"),
        right("P99"),
        right("MAX"),
        right("LATE FROM"),
        right("LATE"),
        left("OF"),
    ]);
    for source in sources {
        let figure = |ns| if source.count == 0 { "-".to_owned() } else { format_ns(ns) };
        table.row(vec![
            source.source.clone(),
            if source.is_late { "LATE" } else { "normal" }.to_owned(),
            source.count.to_string(),
            figure(source.p50_ns),
            figure(source.p99_ns),
            figure(source.max_ns),
            format_ns(source.late_from_ns),
            // Sources that explain nothing count none.
            if source.is_late && source.late == 0 { "-".to_owned() } else { source.late.to_string() },
            if source.remark.is_empty() { source.of.clone() } else { source.remark.clone() },
        ]);
    }
    table
}

fn lost(source: &Headline) -> impl Iterator<Item = String> {
    source.lost.iter().map(|(reason, count)| format!("{count} {} ({})", reason.replace('_', " "), source.source))
}

fn write_sighting(out: &mut dyn Write, sighting: &Sighting, zone: &TimeZone) -> io::Result<()> {
    let event = &sighting.event;
    let what: Vec<String> = ["handler", "function", "process", "thread", "task"]
        .iter()
        .filter_map(|name| event.labels.get(*name))
        .map(|value| printable(value))
        .collect();
    writeln!(
        out,
        "{} {} {} CPU {} {}",
        time_of_day(event.at_unix_ns, zone),
        sighting.source,
        format_ns(event.latency_ns),
        event.cpu,
        what.join(" ")
    )?;
    why::write_causes(out, event)
}

fn write_culprits(out: &mut dyn Write, culprits: &[Culprit]) -> io::Result<()> {
    let all_ns: u64 = culprits.iter().map(|culprit| culprit.total_ns).sum();
    if all_ns == 0 {
        return Ok(());
    }
    let percent = |ns: u64| ns as f64 * 100.0 / all_ns as f64;
    writeln!(out, "\nWho made others late, {} in all:", format_ns(all_ns))?;
    let is_shown = |culprit: &&Culprit| percent(culprit.total_ns) >= SMALL_PERCENT;
    let shown = culprits.iter().take(CULPRITS).take_while(is_shown).count();
    let (shown, rest) = culprits.split_at(shown);
    for culprit in shown {
        let victims: Vec<String> = culprit
            .victims
            .iter()
            .map(|victims| {
                let times = if victims.events == 1 { "once".to_owned() } else { format!("{} times", victims.events) };
                format!(
                    "{} {times} by {} (worst {})",
                    victims.source,
                    format_ns(victims.total_ns),
                    format_ns(victims.worst_ns)
                )
            })
            .collect();
        writeln!(
            out,
            "    {:>5.1}%  {:<14}  {}: {}",
            percent(culprit.total_ns),
            word(culprit.kind),
            printable(&culprit.who),
            victims.join(", ")
        )?;
    }
    if !rest.is_empty() {
        let rest_ns: u64 = rest.iter().map(|culprit| culprit.total_ns).sum();
        let others = if rest.len() == 1 { "other" } else { "others" };
        writeln!(out, "    {:>5.1}%  {} {others}", percent(rest_ns), rest.len())?;
    }
    Ok(())
}

/// The command that tells more.
fn next(source: &Headline) -> String {
    let from = format_ns(source.late_from_ns);
    match source.source.as_str() {
        "wq" => format!("whylate wq --why {from}"),
        "timerlat" => format!("whylate timerlat top --why {from}"),
        "irqsoff" => format!("whylate irqsoff --why {from}"),
        "offcpu" if source.late > 0 => format!("whylate offcpu --why {} -d 10s", format_ns(late_from_ns("offcpu"))),
        "offcpu" => format!("whylate offcpu --blocked {from}"),
        other => format!("whylate {other} --why {from} 1"),
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::look::{Unmeasured, Victims};
    use whylate_model::{Cause, CauseKind, LateEvent};

    use super::*;

    fn shown(look: &Look) -> String {
        let mut out = Vec::new();
        write_in(&mut out, look, None, &TimeZone::UTC).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    fn headline(source: &str, is_late: bool) -> Headline {
        Headline {
            source: source.to_owned(),
            of: "things that wait".to_owned(),
            count: 1234,
            p50_ns: 3_100,
            p99_ns: 45_000,
            max_ns: 20_000_000,
            late_from_ns: 5_000_000,
            late: u64::from(is_late),
            is_late,
            lost: [("late_events".to_owned(), 3)].into(),
            ..Headline::default()
        }
    }

    #[test]
    fn a_screen_tells_what_was_late_who_did_it_and_where_to_look_next() {
        let culprit = |kind, who: &str, total_ns| Culprit {
            kind,
            who: who.to_owned(),
            total_ns,
            victims: vec![
                Victims { source: "timerlat".to_owned(), events: 3, total_ns, worst_ns: total_ns / 2 },
                Victims { source: "wq".to_owned(), events: 1, total_ns: 7_000, worst_ns: 7_000 },
            ],
        };
        let event = LateEvent {
            labels: [("handler".to_owned(), "evil\x1b[2J".to_owned())].into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 20_000_000,
            cpu: 1,
            causes: vec![Cause {
                kind: CauseKind::IrqsOff,
                who: "dd:4242".to_owned(),
                ns: 20_000_000,
                stack: vec!["console_unlock".to_owned()],
            }],
            ..LateEvent::default()
        };
        let look = Look {
            host: "web1".to_owned(),
            duration_ns: 10_000_000_000,
            sources: vec![headline("timerlat", true), headline("wq", false)],
            worst: vec![Sighting { source: "timerlat".to_owned(), event }],
            culprits: vec![
                culprit(CauseKind::IrqsOff, "dd:4242", 20_000_000),
                culprit(CauseKind::Thread, "evil\x1b[2J:7", 9_000_000),
                culprit(CauseKind::Irq, "nvme0q1", 3_000),
            ],
            unmeasured: vec![Unmeasured { source: "sqpoll".to_owned(), reason: "no thread is there".to_owned() }],
            weaker: vec![Unmeasured { source: "wq".to_owned(), reason: "no heartbeat".to_owned() }],
            ..Look::default()
        };
        insta::assert_snapshot!(shown(&look));
    }

    #[test]
    fn a_screen_of_a_machine_that_is_not_late_says_so() {
        let mut nothing = headline("irqsoff", false);
        (nothing.count, nothing.lost) = (0, std::collections::BTreeMap::new());
        insta::assert_snapshot!(shown(&Look { host: "web1".to_owned(), sources: vec![nothing], ..Look::default() }));
    }
}
