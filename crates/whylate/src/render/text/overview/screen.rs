// SPDX-License-Identifier: MIT OR Apache-2.0
//! The screen of the overview: the verdict, the culprits, what waited, the worst event, and the commands to run next.

use std::borrow::Cow;
use std::io::{self, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use whylate_model::culprits::Culprit;
use whylate_model::late::cpu_subject;
use whylate_model::overview::{ForSleeper, Headline, Overview, Row, Sighting};
use whylate_model::snapshot::Sleeper;
use whylate_model::sources::{CARDS, named};
use whylate_model::thread::number;
use whylate_model::units::{format_ns, format_round_ns, printable};

use super::{Sentences, lost_events, programs, status};
use crate::render::text::fit::{Fit, command_lines};
use crate::render::text::table::Table;
use crate::render::text::time_of_day::time_of_day;
use crate::render::text::{footer, path, why};

/// Minimum width for a column of sources.
const WITH_SOURCE: usize = 90;
/// Maximum number of threads in uninterruptible sleep that are shown per source.
const MAX_SLEEPERS: usize = 3;
/// Maximum number of lines of the worst event, unless all of it is asked for.
const MAX_WORST_LINES: usize = 9;
/// Maximum number of held-up programs with a line of their own.
const MAX_PROGRAMS: usize = 5;
/// Maximum number of culprits with a line of their own.
const MAX_CULPRITS: usize = 8;

/// How much is written, and for which place.
#[derive(Debug)]
pub struct Screen {
    /// Width of the terminal; `None` for a file or a pipe.
    pub columns: Option<usize>,
    /// Whether all worst events and everything about the measurement itself are written.
    pub is_verbose: bool,
    /// Time zone of the times of day.
    pub zone: TimeZone,
    /// Command line of the replay that is shown; `None` for a live measurement.
    pub replay: Option<String>,
}

impl Screen {
    /// Returns the command to type next. If a recording is shown, the command replays it.
    fn on_replay(&self, command: &str) -> String {
        match &self.replay {
            // All of a recording is shown anyway.
            Some(replay) => command.replacen("whylate", replay, 1).trim_end_matches(" -d 10s").to_owned(),
            None => command.to_owned(),
        }
    }
}

/// Writes the overview as text.
///
/// # Errors
/// Fails if the output does.
pub fn write(out: &mut dyn Write, look: &Overview, screen: &Screen) -> io::Result<()> {
    let mut fit = Fit::new(out, screen.columns);
    let out: &mut dyn Write = &mut fit;
    let mut rows: Vec<Row<'_>> = look.rows().collect();
    rows.sort_by_key(|row| !row.is_late);
    let verdict = Sentences::new(&look.verdict());
    writeln!(out, "{}", verdict.colored())?;
    verdict.culprit.iter().try_for_each(|culprit| writeln!(out, "{culprit}"))?;
    write_programs(out, look)?;
    write_culprits(out, look, screen)?;
    writeln!(out)?;
    table(&rows, screen.columns.is_none_or(|columns| columns >= WITH_SOURCE)).write(out, screen.columns)?;
    for of in &look.unmeasured {
        writeln!(out, "-     {}: {}", printable(&of.source), printable(&of.reason))?;
    }
    write_left_out(out, look)?;
    programs::unjudged(&look.programs).iter().try_for_each(|sentence| writeln!(out, "      {sentence}"))?;
    for source in look.sources.iter().filter(|source| source.is_late && !source.remark.is_empty()) {
        writeln!(out, "      {}", printable(&source.remark))?;
    }
    write_worst(out, look, screen)?;
    write_for_sleepers(out, look)?;
    write_commands(out, look, &rows, screen)?;
    write_measurement(out, look, screen)?;
    fit.flush()
}

/// Writes which CPUs were not measured, and why: one line for all sources with the same reason.
fn write_left_out(out: &mut dyn Write, look: &Overview) -> io::Result<()> {
    let mut sources: Vec<(&str, Vec<&str>)> = Vec::new();
    for of in look.limitations.iter().filter(|of| of.is_about_cpus()) {
        match sources.iter_mut().find(|(reason, _)| *reason == of.reason) {
            Some((_, sources)) => sources.push(&of.source),
            None => sources.push((&of.reason, vec![&of.source])),
        }
    }
    for (reason, sources) in sources {
        writeln!(out, "-     {}: {}", printable(&sources.join(", ")), printable(reason))?;
    }
    Ok(())
}

/// Writes the programs that were held up for a large share of the time.
fn write_programs(out: &mut dyn Write, look: &Overview) -> io::Result<()> {
    let held_up = &look.programs.held_up;
    if held_up.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nHELD UP")?;
    held_up.iter().take(MAX_PROGRAMS).try_for_each(|of| writeln!(out, "{}", programs::line(&look.programs, of)))?;
    match held_up.len().saturating_sub(MAX_PROGRAMS) {
        0 => Ok(()),
        more => writeln!(out, "{} more", why::counted(more as u64, "program")),
    }
}

fn write_culprits(out: &mut dyn Write, look: &Overview, screen: &Screen) -> io::Result<()> {
    let (culprits, all_ns) = (&look.culprits, look.explained_ns());
    let rest = why::unexplained(&look.unexplained(), all_ns, "event");
    if all_ns == 0 {
        return rest.map_or(Ok(()), |rest| writeln!(out, "{rest}"));
    }
    writeln!(out, "\nCULPRITS, {} in total", format_ns(all_ns))?;
    rest.map_or(Ok(()), |rest| writeln!(out, "{rest}"))?;
    why::write_shares(out, culprits, all_ns, MAX_CULPRITS, &mut |out, culprit, row| {
        let delayed = delayed(culprit);
        let length = row.chars().count() + delayed.chars().count() + 2;
        match screen.columns {
            // Nothing decisive is cut: the victims have a line of their own.
            Some(columns) if length > columns => writeln!(out, "{row}:\n{:16}{delayed}", ""),
            _ => writeln!(out, "{row}: {delayed}"),
        }
    })
}

/// Counts the events that a culprit delayed, with the worst delay.
pub fn delayed(culprit: &Culprit) -> String {
    format!("{}, worst {}", delayed_events(culprit), format_ns(culprit.worst_ns()))
}

/// Counts the events that a culprit delayed.
pub fn delayed_events(culprit: &Culprit) -> String {
    let each = culprit.victims.iter().map(|victims| match named(&victims.source) {
        Some(card) => why::counted(victims.events, card.event),
        None => format!("{} of {}", why::counted(victims.events, "event"), printable(&victims.source)),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn table(rows: &[Row<'_>], has_source: bool) -> Table {
    let source = if has_source { "<SOURCE, " } else { "" };
    let mut table = Table::new(&format!("{source}<, <WHAT WAITED, LATE, COUNT, P50, P99, MAX, LIMIT"));
    let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    let ns = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), format_ns);
    for row in rows {
        let is_over = row.max_ns.is_some_and(|max_ns| max_ns >= row.late_from_ns);
        let late: &[usize] = match (row.is_late, is_over) {
            (true, true) => &[0, 6],
            (true, false) => &[0],
            (false, _) => &[],
        };
        let mut cells = vec![row.source.to_owned(); usize::from(has_source)];
        cells.extend([
            status(row.is_late).to_owned(),
            row.judged.map_or(row.source, |judged| judged.row).to_owned(),
            count(row.late),
            count(row.count),
            ns(row.p50_ns),
            ns(row.p99_ns),
            ns(row.max_ns),
            format_round_ns(row.late_from_ns),
        ]);
        let late: Vec<usize> = late.iter().map(|column| column + usize::from(has_source)).collect();
        table.late_row(cells, &late);
    }
    table
}

/// Writes threads that are still blocked, and the worst late events.
fn write_worst(out: &mut dyn Write, look: &Overview, screen: &Screen) -> io::Result<()> {
    let has_sleepers = look.sources.iter().any(|source| !source.sleepers.is_empty());
    if look.worst.is_empty() && !has_sleepers {
        return Ok(());
    }
    writeln!(out, "\nWORST")?;
    look.sources.iter().try_for_each(|source| write_sleepers(out, look, source, screen))?;
    if screen.is_verbose {
        return look.worst.iter().try_for_each(|sighting| write_sighting(out, sighting, screen));
    }
    let Some(worst) = look.worst.first() else { return Ok(()) };
    let mut text = Vec::new();
    write_sighting(&mut text, worst, screen)?;
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().count();
    text.lines().take(MAX_WORST_LINES).try_for_each(|line| writeln!(out, "{line}"))?;
    match (lines.saturating_sub(MAX_WORST_LINES), look.worst.len() - 1) {
        (0, 0) => Ok(()),
        (0, events) => writeln!(out, "({events} more with -v)"),
        (more, _) => writeln!(out, "     ... ({} more with -v)", why::counted(more as u64, "line")),
    }
}

fn write_sighting(out: &mut dyn Write, sighting: &Sighting, screen: &Screen) -> io::Result<()> {
    let event = &sighting.event;
    let (at, latency) = (time_of_day(event.at_unix_ns, &screen.zone), format_ns(event.latency_ns));
    let card = named(&sighting.source);
    let what = if event.subject == cpu_subject(event.cpu) {
        let what = card.map_or(sighting.source.as_str(), |card| card.event);
        format!("{}, {}", printable(what), printable(&event.subject))
    } else {
        let before = card.map(|card| card.subject).filter(|before| !before.is_empty());
        let before = before.map_or_else(String::new, |before| format!("{before} "));
        let waited_in = event.labels.get("waited_in").filter(|_| !event.path.is_empty());
        let between = if path::stop_of(&event.path).is_some() { ", " } else { " in " };
        let waited_in = waited_in.map_or_else(String::new, |via| format!("{between}{}", printable(via)));
        format!("{before}{}{waited_in}, CPU {}", printable(&event.subject), event.cpu)
    };
    writeln!(out, "{at} {latency} {what}")?;
    if event.path.is_empty() { why::write_causes(out, event) } else { path::write_wait(out, &event.path, 4) }
}

/// Writes the threads that are still in uninterruptible sleep.
fn write_sleepers(out: &mut dyn Write, look: &Overview, source: &Headline, screen: &Screen) -> io::Result<()> {
    let at = time_of_day(look.start_unix_ns.saturating_add(look.duration_ns), &screen.zone);
    for Sleeper { who, process, asleep_ns, waits_in, class } in source.sleepers.iter().take(MAX_SLEEPERS) {
        let (who, asleep) = (printable(who), format_ns(*asleep_ns));
        let of = process.as_deref().map_or_else(String::new, |of| format!(" of {}", printable(of)));
        let place = waits_in.as_deref().map_or_else(String::new, |place| format!(" in {}", printable(place)));
        writeln!(out, "{at} {asleep} {who}{of}, still in D state{place} ({})", class.words())?;
    }
    Ok(())
}

/// Writes long waits for threads that slept on a timer themselves. They do not count as late: they may be by design.
fn write_for_sleepers(out: &mut dyn Write, look: &Overview) -> io::Result<()> {
    let held_up = look.sources.iter().filter_map(|source| source.held_up.as_ref());
    for held_up in held_up.filter(|held_up| !held_up.for_sleepers.is_empty()) {
        let from = format_round_ns(held_up.late_from_ns);
        writeln!(out, "\nNot counted, maybe by design: waits of {from} or longer for a sleeping thread")?;
        for ForSleeper { who, sleeper, waits, total_ns } in &held_up.for_sleepers {
            let times = if *waits == 1 { "once".to_owned() } else { format!("{waits} times") };
            let (who, sleeper, total) = (printable(who), printable(sleeper), format_ns(*total_ns));
            writeln!(out, "    {who} waited for {sleeper} {times}, {total} in total")?;
        }
    }
    Ok(())
}

/// Writes the commands that show more: of what was late, or of what the overview does not cover.
fn write_commands(out: &mut dyn Write, look: &Overview, rows: &[Row<'_>], screen: &Screen) -> io::Result<()> {
    let mut next: Vec<Cow<'_, str>> = Vec::new();
    // A recording has no view of one program.
    let pid = look.programs.held_up.first().filter(|_| screen.replay.is_none()).and_then(|of| of.program().tid());
    next.extend(pid.map(|pid| format!("whylate -p {} -d 10s", number(pid)).into()));
    for row in rows.iter().filter(|row| row.is_late) {
        if next.iter().all(|command| command != row.next) {
            next.push(row.next.into());
        }
    }
    if !next.is_empty() {
        writeln!(out, "\nNEXT")?;
        let columns = screen.columns.unwrap_or(usize::MAX);
        let lines = next.iter().flat_map(|next| command_lines(&printable(&screen.on_replay(next)), 2, columns));
        lines.into_iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    // A recording has what it has: these commands measure anew.
    if screen.is_verbose && screen.replay.is_none() {
        writeln!(out, "\nNOT COVERED")?;
        for (what, command) in CARDS.into_iter().flat_map(|card| card.beyond_a_look.iter().copied()) {
            writeln!(out, "  {command:<33} # {}", printable(what))?;
        }
    }
    Ok(())
}

/// Writes everything about the measurement itself: when it was made, what was lost, and what is less precise.
fn write_measurement(out: &mut dyn Write, look: &Overview, screen: &Screen) -> io::Result<()> {
    writeln!(out)?;
    if screen.is_verbose {
        footer::write_lost(out, &lost_events(look))?;
        for of in look.limitations.iter().filter(|of| !of.is_about_cpus()) {
            writeln!(out, "less precise: {}: {}", printable(&of.source), printable(&of.reason))?;
        }
    }
    let at = i64::try_from(look.start_unix_ns).ok().and_then(|ns| Timestamp::from_nanosecond(ns.into()).ok());
    let at = at.map(|at| at.to_zoned(screen.zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string());
    let mut notes: Vec<String> = at.map(|at| format!("from {at}")).into_iter().collect();
    notes.extend(footer::rate(look.count_lost(), look.duration_ns));
    let precision = look.limitations.iter().filter(|of| !of.is_about_cpus()).count() as u64;
    if precision > 0 {
        notes.push(why::counted(precision, "precision note"));
    }
    if !screen.is_verbose {
        notes.push("more: -v".to_owned());
    }
    writeln!(out, "{}", notes.join("; "))
}

#[cfg(test)]
mod tests;
