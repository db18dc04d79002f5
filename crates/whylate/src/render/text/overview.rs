// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the overview: late events on this machine, the culprits, and the commands to run next.

use std::borrow::Cow;
use std::io::{self, Write};

use jiff::tz::TimeZone;
use whylate_model::culprits::Culprit;
use whylate_model::late::cpu_subject;
use whylate_model::overview::{ForSleeper, Headline, HeldUp, LateOf, Overview, Sighting, Unmeasured};
use whylate_model::snapshot::Sleeper;
use whylate_model::sources::CARDS;
use whylate_model::units::{format_ns, printable};

use super::table::Table;
use super::time_of_day::time_of_day;
use super::why;
use super::{footer, path};

/// Maximum number of threads in uninterruptible sleep that are shown per source.
const MAX_SLEEPERS: usize = 3;
/// Maximum number of culprits with a line of their own.
const MAX_CULPRITS: usize = 8;
/// Culprits below this percentage of the total delay are merged into one line.
const SMALL_PERCENT: f64 = 0.5;

pub fn write(out: &mut dyn Write, look: &Overview, terminal_columns: Option<usize>) -> io::Result<()> {
    write_in(out, look, terminal_columns, &TimeZone::system())
}

fn write_in(out: &mut dyn Write, look: &Overview, terminal_columns: Option<usize>, zone: &TimeZone) -> io::Result<()> {
    writeln!(out, "{} of {}\n", format_ns(look.duration_ns), printable(&look.host))?;
    let rows: Vec<Row<'_>> = look.sources.iter().flat_map(rows_of).collect();
    headlines(&rows).write(out, terminal_columns)?;
    let of_account = look.lost.iter().map(|(reason, count)| format!("{count} {} (all)", reason.replace('_', " ")));
    let lost: Vec<String> = look.sources.iter().flat_map(lost).chain(of_account).collect();
    footer::write_lost(out, &lost)?;
    if !look.worst.is_empty() || rows.iter().any(|row| !row.source.sleepers.is_empty()) {
        writeln!(out, "\nThe worst:")?;
        look.sources.iter().try_for_each(|source| write_sleepers(out, look, source, zone))?;
        look.worst.iter().try_for_each(|sighting| write_sighting(out, sighting, zone))?;
    }
    write_culprits(out, look)?;
    let for_sleepers = write_for_sleepers(out, look)?;
    for (heading, of) in [("Not measured here", &look.unmeasured), ("Less precise on this machine", &look.limitations)]
    {
        if !of.is_empty() {
            writeln!(out, "\n{heading} (`whylate doctor` shows what the kernel lacks):")?;
        }
        of.iter()
            .try_for_each(|item| writeln!(out, "    {:<9} {}", printable(&item.source), printable(&item.reason)))?;
    }
    writeln!(out)?;
    let late: Vec<&Row<'_>> = rows.iter().filter(|row| row.is_late).collect();
    if late.is_empty() {
        return write_not_judged(out, &look.unmeasured, for_sleepers > 0);
    }
    writeln!(out, "Look closer with:")?;
    late.iter().try_for_each(|row| writeln!(out, "    {}", printable(row.shown().next)))
}

/// Writes that nothing was late, and the commands for what the overview does not cover.
fn write_not_judged(out: &mut dyn Write, unmeasured: &[Unmeasured], has_long_waits: bool) -> io::Result<()> {
    let nothing = if has_long_waits { "None of this counts as late" } else { "Nothing above was late" };
    writeln!(out, "{nothing}. For what this look does not cover:")?;
    let unmeasured = unmeasured.iter().map(|of| (of.source.as_str(), "whylate doctor"));
    let beyond = CARDS.into_iter().flat_map(|card| card.beyond_a_look.iter().copied());
    for (what, command) in beyond.chain(unmeasured) {
        writeln!(out, "    {:<62}{command}", printable(what))?;
    }
    Ok(())
}

/// A row: one thing that a source compares with a threshold.
struct Row<'a> {
    source: &'a Headline,
    of: Of<'a>,
    is_late: bool,
}

/// Threshold of a source that a row is about.
#[derive(Clone, Copy)]
enum Of<'a> {
    Figures,
    /// Late events, if they do not concern the figures.
    Events(&'a LateOf),
    HeldUp(&'a HeldUp),
}

/// Returns the rows of a source: its figures, its late events, and its waits for other threads.
fn rows_of(source: &Headline) -> impl Iterator<Item = Row<'_>> {
    let late_of = source.late_of.as_ref();
    let is_late = match late_of {
        Some(_) => source.count > 0 && source.max_ns >= source.late_from_ns,
        None => source.is_late,
    };
    let events = late_of.map(|late_of| Row { source, of: Of::Events(late_of), is_late: source.late > 0 });
    let held_up = source.held_up.as_ref();
    let held_up = held_up.map(|held_up| Row { source, of: Of::HeldUp(held_up), is_late: held_up.late > 0 });
    std::iter::once(Row { source, of: Of::Figures, is_late }).chain(events).chain(held_up)
}

/// A row as it is rendered. Unknown figures are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedRow<'a> {
    pub source: &'a str,
    pub is_late: bool,
    pub count: Option<u64>,
    pub p50_ns: Option<u64>,
    pub p99_ns: Option<u64>,
    pub max_ns: Option<u64>,
    pub late_from_ns: u64,
    pub late: Option<u64>,
    pub of: Cow<'a, str>,
    /// The command with more details.
    pub next: &'a str,
}

/// Returns the rows of all sources, in the order of the screen.
pub fn shown(look: &Overview) -> impl Iterator<Item = RenderedRow<'_>> {
    look.sources.iter().flat_map(rows_of).map(|row| row.shown())
}

/// Describes the subject of a source's figures: its remark, or what it measures with the longest sleeper first.
pub fn of_figures(source: &Headline) -> Cow<'_, str> {
    match source.sleepers.first() {
        _ if !source.remark.is_empty() => source.remark.as_str().into(),
        Some(Sleeper { who, .. }) => format!("{}, longest of {}", printable(who), source.of).into(),
        None => source.of.as_str().into(),
    }
}

/// Renders a verdict.
pub fn verdict(is_late: bool) -> &'static str {
    if is_late { "LATE" } else { "normal" }
}

impl<'a> Row<'a> {
    fn shown(&self) -> RenderedRow<'a> {
        let Row { source, of, is_late } = *self;
        let figure = |ns| (source.count > 0).then_some(ns);
        let events = |max_ns, late_from_ns, late: u64, of: &'a str, next: &'a str| RenderedRow {
            source: &source.source,
            is_late,
            count: None,
            p50_ns: None,
            p99_ns: None,
            max_ns: (late > 0).then_some(max_ns),
            late_from_ns,
            late: Some(late),
            of: of.into(),
            next,
        };
        match of {
            Of::Figures => RenderedRow {
                source: &source.source,
                is_late,
                // A source without figures only counts late events.
                count: (!source.of.is_empty()).then_some(source.count),
                p50_ns: figure(source.p50_ns),
                p99_ns: figure(source.p99_ns),
                max_ns: figure(source.max_ns),
                late_from_ns: source.late_from_ns,
                late: match (is_late, source.late) {
                    (false, _) => Some(0),
                    // Sources without explanations count no late events.
                    (true, _) if source.late_of.is_some() => Some(source.late_figures).filter(|&late| late > 0),
                    (true, late) => (late > 0).then_some(late),
                },
                of: of_figures(source),
                next: &source.next,
            },
            Of::Events(late_of) => {
                events(late_of.max_ns, late_of.late_from_ns, source.late, &late_of.of, &late_of.next)
            }
            Of::HeldUp(held_up) => {
                events(held_up.max_ns, held_up.late_from_ns, held_up.late, &held_up.of, &held_up.next)
            }
        }
    }
}

fn headlines(rows: &[Row<'_>]) -> Table {
    let mut table = Table::new("<SOURCE, <VERDICT, COUNT, P50, P99, MAX, LATE FROM, LATE, <OF");
    let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    let ns = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), format_ns);
    for RenderedRow { source, is_late, count: counted, p50_ns, p99_ns, max_ns, late_from_ns, late, of, .. } in
        rows.iter().map(Row::shown)
    {
        let row = vec![
            source.to_owned(),
            verdict(is_late).to_owned(),
            count(counted),
            ns(p50_ns),
            ns(p99_ns),
            ns(max_ns),
            format_ns(late_from_ns),
            count(late),
            of.into_owned(),
        ];
        let is_over = max_ns.is_some_and(|max_ns| max_ns >= late_from_ns);
        table.late_row(
            row,
            if is_late && is_over {
                &[1, 5]
            } else if is_late {
                &[1]
            } else {
                &[]
            },
        );
    }
    table
}

fn lost(source: &Headline) -> impl Iterator<Item = String> {
    source.lost.iter().map(|(reason, count)| format!("{count} {} ({})", reason.replace('_', " "), source.source))
}

fn write_sighting(out: &mut dyn Write, sighting: &Sighting, zone: &TimeZone) -> io::Result<()> {
    let event = &sighting.event;
    let (at, latency) = (time_of_day(event.at_unix_ns, zone), format_ns(event.latency_ns));
    let place = if event.subject == cpu_subject(event.cpu) { String::new() } else { format!(", CPU {}", event.cpu) };
    let waited_in = event.labels.get("waited_in").filter(|_| !event.path.is_empty());
    let is_stopped = path::stop_of(&event.path).is_some();
    let between = if is_stopped { ", " } else { " in " };
    let waited_in = waited_in.map_or_else(String::new, |via| format!("{between}{}", printable(via)));
    writeln!(out, "{at} {} {latency} {}{waited_in}{place}", sighting.source, printable(&event.subject))?;
    if event.path.is_empty() { why::write_causes(out, event) } else { path::write_wait(out, &event.path, 4) }
}

/// Writes the threads that are still in uninterruptible sleep.
fn write_sleepers(out: &mut dyn Write, look: &Overview, source: &Headline, zone: &TimeZone) -> io::Result<()> {
    let at = time_of_day(look.start_unix_ns.saturating_add(look.duration_ns), zone);
    for Sleeper { who, process, asleep_ns, waits_in, class } in source.sleepers.iter().take(MAX_SLEEPERS) {
        let (who, asleep) = (printable(who), format_ns(*asleep_ns));
        let of = process.as_deref().map_or_else(String::new, |of| format!(" of {}", printable(of)));
        let place = waits_in.as_deref().map_or_else(String::new, |place| format!(" in {}", printable(place)));
        let class = class.words();
        writeln!(out, "{at} {} {asleep} {who}{of}{place} ({class}), still in uninterruptible sleep", source.source)?;
    }
    Ok(())
}

fn write_culprits(out: &mut dyn Write, look: &Overview) -> io::Result<()> {
    let culprits = &look.culprits;
    let all_ns: u64 = culprits.iter().map(|culprit| culprit.total_ns).sum();
    let rest = why::unexplained(&look.unexplained(), all_ns, "event");
    if all_ns == 0 {
        return rest.map_or(Ok(()), |rest| writeln!(out, "\n{rest}"));
    }
    let percent = |ns: u64| ns as f64 * 100.0 / all_ns as f64;
    writeln!(out, "\nWho made others late, {} in total:", format_ns(all_ns))?;
    rest.map_or(Ok(()), |rest| writeln!(out, "    {rest}"))?;
    let is_shown = |culprit: &&Culprit| percent(culprit.total_ns) >= SMALL_PERCENT;
    let shown = culprits.iter().take(MAX_CULPRITS).take_while(is_shown).count();
    let (shown, rest) = culprits.split_at(shown);
    for culprit in shown {
        writeln!(
            out,
            "    {:>5.1}%  {:<14}  {}{}: {}",
            percent(culprit.total_ns),
            why::how(culprit.kind, &culprit.who),
            printable(&culprit.who),
            why::how_many(culprit),
            victims(culprit)
        )?;
    }
    if !rest.is_empty() {
        let rest_ns: u64 = rest.iter().map(|culprit| culprit.total_ns).sum();
        let others = if rest.len() == 1 { "other" } else { "others" };
        writeln!(out, "    {:>5.1}%  {} {others}", percent(rest_ns), rest.len())?;
    }
    Ok(())
}

/// Renders the victims of a culprit per source: how often they were delayed, in total, and the worst delay.
pub fn victims(culprit: &Culprit) -> String {
    let each = culprit.victims.iter().map(|victims| {
        let times = if victims.events == 1 { "once".to_owned() } else { format!("{} times", victims.events) };
        let (total, worst) = (format_ns(victims.total_ns), format_ns(victims.worst_ns));
        format!("{} {times} by {total} (worst {worst})", victims.source)
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Writes long waits for threads that slept on a timer themselves, and returns their number. They do not count as late:
/// they may be by design.
fn write_for_sleepers(out: &mut dyn Write, look: &Overview) -> io::Result<usize> {
    let held_up = look.sources.iter().filter_map(|source| source.held_up.as_ref());
    let mut written = 0;
    for held_up in held_up.filter(|held_up| !held_up.for_sleepers.is_empty()) {
        let from = format_ns(held_up.late_from_ns);
        writeln!(
            out,
            "\nWaits of {from} or longer for a thread that waited for a timer itself (a sleep or a timeout), maybe by design:"
        )?;
        for ForSleeper { who, sleeper, waits, total_ns } in &held_up.for_sleepers {
            let times = if *waits == 1 { "once".to_owned() } else { format!("{waits} times") };
            writeln!(
                out,
                "    {} waited for {} {times}, {} in total",
                printable(who),
                printable(sleeper),
                format_ns(*total_ns)
            )?;
            written += 1;
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use whylate_model::culprits::Victims;
    use whylate_model::path::PathSegment;
    use whylate_model::snapshot::Unexplained;
    use whylate_model::{Cause, CauseKind, LateEvent, WaitClass};

    use super::*;

    fn screen(look: &Overview) -> String {
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
            next: format!("whylate {source} top --why 5.00ms"),
            lost: [("late_events".to_owned(), 3)].into(),
            ..Headline::default()
        }
    }

    #[test]
    fn renders_late_events_culprits_and_next_commands() {
        let culprit = |kind, who: &str, total_ns| Culprit {
            kind,
            who: who.to_owned(),
            alike: 0,
            cgroup: None,
            total_ns,
            victims: vec![
                Victims { source: "timerlat".to_owned(), events: 3, subjects: 1, total_ns, worst_ns: total_ns / 2 },
                Victims { source: "wq".to_owned(), events: 1, subjects: 1, total_ns: 7_000, worst_ns: 7_000 },
            ],
        };
        let event = LateEvent {
            subject: "evil\x1b[2J".to_owned(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 20_000_000,
            cpu: 1,
            causes: vec![Cause {
                stack: vec!["console_unlock".to_owned()],
                ..Cause::new(CauseKind::IrqsOff, "dd:4242", 20_000_000)
            }],
            ..LateEvent::default()
        };
        let look = Overview {
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
            limitations: vec![Unmeasured { source: "wq".to_owned(), reason: "no heartbeat".to_owned() }],
            ..Overview::default()
        };
        insta::assert_snapshot!(screen(&look));
    }

    #[test]
    fn ranking_has_explained_share() {
        let culprit = Culprit {
            kind: CauseKind::Thread,
            who: "hog:7".to_owned(),
            alike: 0,
            cgroup: None,
            total_ns: 1_000_000,
            victims: vec![Victims { source: "wq".to_owned(), events: 1, subjects: 1, total_ns: 1, worst_ns: 1 }],
        };
        let mut wq = headline("wq", true);
        wq.unexplained = Unexplained { events: 40, total_ns: 3_000_000 };
        let look = Overview { sources: vec![wq], culprits: vec![culprit], ..Overview::default() };
        let expected = "Who made others late, 1.00ms in total:\n    That is 25.0% of the late time: 40 late events more (3.00ms in total) \
                    came too fast to be explained.\n";
        assert!(screen(&look).contains(expected), "{}", screen(&look));
    }

    #[test]
    fn renders_machine_that_is_not_late() {
        let mut nothing = headline("irqsoff", false);
        (nothing.count, nothing.lost) = (0, std::collections::BTreeMap::new());
        let unmeasured = vec![Unmeasured { source: "sqpoll".to_owned(), reason: "no thread is there".to_owned() }];
        let sources = vec![nothing, offcpu(0, 0)];
        insta::assert_snapshot!(screen(&Overview {
            host: "web1".to_owned(),
            sources,
            unmeasured,
            ..Overview::default()
        }));
    }

    /// `stuck` threads in uninterruptible sleep for 20 s, and `waits` long run-queue waits.
    fn offcpu(stuck: u64, waits: u64) -> Headline {
        let max_ns = if waits > 0 { 95_000_000 } else { 0 };
        let late_of = Some(LateOf {
            of: "threads that can run".to_owned(),
            late_from_ns: 20_000_000,
            max_ns,
            next: "whylate offcpu --why 20.0ms -d 10s".to_owned(),
        });
        Headline {
            count: stuck,
            max_ns: 20_000_000_000,
            late_from_ns: 1_000_000_000,
            late: waits,
            late_of,
            held_up: Some(HeldUp {
                of: "threads that wait for others".to_owned(),
                late_from_ns: 100_000_000,
                next: "whylate offcpu --why 100ms -d 10s".to_owned(),
                ..HeldUp::default()
            }),
            next: "whylate offcpu --blocked 1.00s".to_owned(),
            lost: [].into(),
            ..headline("offcpu", stuck + waits > 0)
        }
    }

    #[test]
    fn renders_wait_chain() {
        let mut source = offcpu(0, 0);
        let held_up = source.held_up.as_mut().expect("it follows waits");
        (held_up.late, held_up.late_ns, held_up.max_ns) = (3, 700_000_000, 240_000_000);
        source.is_late = true;
        let segment = |ms: u64, kind, who: &str, depth, waiter: Option<&str>| PathSegment {
            ns: ms * 1_000_000,
            kind,
            who: who.to_owned(),
            via: Some("recvfrom (network)".to_owned()),
            waiter: waiter.map(str::to_owned),
            depth,
            ..PathSegment::default()
        };
        let event = LateEvent {
            subject: "client:7".to_owned(),
            labels: [("waited_in".to_owned(), "recvfrom (network)".to_owned())].into(),
            at_unix_ns: 1_795_252_440_123_456_789,
            latency_ns: 240_000_000,
            cpu: 1,
            path: vec![
                segment(180, CauseKind::Running, "server:8", 1, Some("client:7")),
                segment(60, CauseKind::Disk, "vda (write by server:8)", 2, Some("server:8")),
            ],
            ..LateEvent::default()
        };
        let worst = vec![Sighting { source: "offcpu".to_owned(), event }];
        insta::assert_snapshot!(screen(&Overview { sources: vec![source], worst, ..Overview::default() }));
    }

    #[test]
    fn renders_waits_for_sleepers_separately() {
        let mut source = offcpu(0, 0);
        let held_up = source.held_up.as_mut().expect("it follows waits");
        let pair = |who: &str, waits, ms: u64| ForSleeper {
            who: who.to_owned(),
            sleeper: "peer\x1b[2J:8".to_owned(),
            waits,
            total_ns: ms * 1_000_000,
        };
        held_up.for_sleepers = vec![pair("client:7", 12, 1_800), pair("client:9", 1, 150)];
        let text = screen(&Overview { sources: vec![source], ..Overview::default() });
        let expected = "\nWaits of 100ms or longer for a thread that waited for a timer itself (a sleep or a timeout), maybe by design:
    client:7 waited for peer?[2J:8 12 times, 1.80s in total
    client:9 waited for peer?[2J:8 once, 150ms in total

None of this counts as late.";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn names_thread_in_uninterruptible_sleep() {
        let sleeper = |who: &str, process: Option<&str>| Sleeper {
            who: who.to_owned(),
            process: process.map(str::to_owned),
            asleep_ns: 5_210_000_000,
            waits_in: Some("mem_cgroup_oom_synchronize".to_owned()),
            class: WaitClass::Memory,
        };
        let sleepers = vec![sleeper("mem-waiter:71", Some("app\x1b[2J:70")), sleeper("alone:80", None)];
        let source = Headline { sleepers, late_figures: 2, ..offcpu(2, 0) };
        let look = Overview { sources: vec![source], duration_ns: 7_000_000_000, ..Overview::default() };
        let text = screen(&look);
        let row = text.lines().find(|line| line.contains(" 1.00s ")).expect("a row");
        assert!(row.contains(" 1.00s     2  mem-waiter:71, longest of things that wait"), "{row}");
        let worst = "The worst:\n00:00:07.000000 offcpu 5.21s mem-waiter:71 of app?[2J:70 in mem_cgroup_oom_synchronize \
                     (memory), still in uninterruptible sleep\n00:00:07.000000 offcpu 5.21s alone:80 in ";
        assert!(text.contains(worst), "{text}");
        let parsed: Overview =
            serde_json::from_str(&serde_json::to_string(&look).expect("an overview serializes")).expect("and parses");
        assert_eq!(parsed.sources[0].sleepers, look.sources[0].sleepers);
    }

    #[test]
    fn each_row_has_threshold_and_late_count() {
        let look = |source| Overview { sources: vec![source], ..Overview::default() };
        let (waits, both) = (screen(&look(offcpu(0, 69))), screen(&look(offcpu(2, 69))));
        insta::assert_snapshot!(format!("{waits}\n{both}"));
        // A source without figures has no count.
        let sqpoll = Headline {
            of: String::new(),
            count: 0,
            remark: "submission threads: 1".to_owned(),
            ..headline("sqpoll", true)
        };
        let text = screen(&look(sqpoll));
        let row: Vec<&str> = text.lines().nth(3).unwrap_or_default().split_whitespace().take(8).collect();
        assert_eq!(row, ["sqpoll", "LATE", "-", "-", "-", "-", "5.00ms", "1"]);
    }
}
