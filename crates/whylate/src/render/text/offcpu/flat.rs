// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders a table with a row for each call site where threads wait.

use std::collections::{BTreeMap, BTreeSet};

use whylate_model::folded::{is_idle_kernel_thread, runnable, waiting};
use whylate_model::units::format_ns;
use whylate_model::{Histogram, Snapshot, WaitClass, Waker, WokenBy};

use super::threads::{UNINTERRUPTIBLE, is_blocked, is_idle};
use super::{on_cpu, percent, sets_idle_kernel_threads_apart};
use crate::render::text::table::Table;

/// Grouping of stacks.
#[derive(Default, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Whether the row is that of all idle kernel threads, which is last.
    is_idle_kernel_thread: bool,
    /// Process, thread and TID; empty for idle kernel threads, like what follows.
    who: [String; 3],
    state: String,
    class: Option<WaitClass>,
    /// Call site; `None` for a runnable thread, as its stack is not where it waits.
    place: Option<String>,
    woken_by: String,
}

/// Sum of the stacks of a row.
#[derive(Default)]
struct Row {
    weight_ns: u64,
    waits: u64,
    age: Histogram,
    /// Call sites of the threads.
    places: BTreeSet<String>,
    /// Names and PIDs of idle kernel threads.
    idle: BTreeSet<[String; 2]>,
    rule: String,
}

impl Row {
    /// Renders where the threads wait.
    fn place(&self) -> String {
        match (self.idle.len(), self.places.len()) {
            (0, 2..) => format!("({} places)", self.places.len()),
            (0, _) => self.places.iter().cloned().collect(),
            (1, _) => "(1 idle kernel thread)".to_owned(),
            (threads, _) => format!("({threads} idle kernel threads)"),
        }
    }
}

/// Returns the name of a class in a narrow column.
fn short(class: WaitClass) -> &'static str {
    match class {
        WaitClass::Cpu => "CPU",
        WaitClass::Idle => "idle",
        WaitClass::Throttled => "throttled",
        class => class.words(),
    }
}

/// Returns the table, widest row first, and a row for all idle kernel threads at the end. Shares are of the off-CPU
/// time. With a threshold, only threads that have waited that long and are not idle by design: those in uninterruptible
/// sleep first, and those that wait for a pipe, as most of a shell's pipelines do, last.
pub fn table(snapshot: &Snapshot, hide_idle: bool, blocked_ns: Option<u64>) -> Table {
    let has_wakers = snapshot.stacks.iter().any(|stack| stack.waker.is_some());
    let waker = if has_wakers { ", <WOKEN BY" } else { "" };
    // A share or a sum of time says nothing about threads that wait now.
    let first = if blocked_ns.is_some() { "<S, <CLASS" } else { "SHARE, <CLASS, TIME, <S" };
    let waits = if blocked_ns.is_some() { "" } else { "WAITS, " };
    // For a thread that waits now, the TID is worth more than the full name of the place.
    let place = if blocked_ns.is_some() { "<WHERE" } else { "<<WHERE" };
    let columns = format!("{first}, <PROCESS, <THREAD, TID, {waits}THREADS, AGE-P50, AGE-MAX, {place}{waker}, <=RULE");
    let table = Table::new(&columns);
    let mut table = table.hiding_first(match blocked_ns {
        Some(_) => "AGE-P50, THREADS, RULE, THREAD, AGE-MAX, TID",
        None => "AGE-P50, TID, WAITS, THREADS, S, THREAD, AGE-MAX, RULE, TIME",
    });
    // Not every backend counts waits.
    let has_waits = snapshot.stacks.iter().any(|stack| stack.waits > 0);
    let whole_ns: u64 = waiting(snapshot, hide_idle).map(|stack| stack.weight_ns).sum();
    for (key, row) in rows(snapshot, hide_idle, blocked_ns) {
        let age = |ns: u64| if row.age.is_empty() { String::new() } else { format_ns(ns) };
        let is_on_cpu = key.class == Some(WaitClass::OnCpu);
        let place = row.place();
        let [process, mut thread, tid] = key.who;
        if blocked_ns.is_some() && thread == process {
            // The process column has the name. An empty cell leaves room for the place.
            thread.clear();
        }
        let class = key.class.map_or("", short).to_owned();
        let mut cells = match blocked_ns {
            Some(_) => vec![key.state, class],
            None if is_on_cpu => vec!["-".to_owned(), class, format_ns(row.weight_ns), key.state],
            None => vec![percent(row.weight_ns, whole_ns), class, format_ns(row.weight_ns), key.state],
        };
        cells.extend([process, thread, tid]);
        let waits = if has_waits { row.waits.to_string() } else { String::new() };
        cells.extend(blocked_ns.is_none().then_some(waits));
        let threads = if row.age.is_empty() { String::new() } else { row.age.count().to_string() };
        cells.extend([threads, age(row.age.quantile_ns(0.5)), age(row.age.max_ns()), place, row.rule]);
        if has_wakers {
            cells.insert(cells.len() - 1, key.woken_by);
        }
        table.row(cells);
    }
    table.without_empty_columns()
}

/// Returns the rows, sorted.
fn rows(snapshot: &Snapshot, hide_idle: bool, blocked_ns: Option<u64>) -> Vec<(Key, Row)> {
    let apart = sets_idle_kernel_threads_apart(snapshot);
    let mut rows: BTreeMap<Key, Row> = BTreeMap::new();
    let on_cpu = on_cpu(snapshot).filter(|_| blocked_ns.is_none());
    for stack in waiting(snapshot, hide_idle).chain(on_cpu) {
        if blocked_ns.is_some_and(|least_ns| !is_blocked(stack, least_ns) || is_idle(stack)) {
            continue;
        }
        let label = |name: &str| stack.labels.get(name).cloned().unwrap_or_default();
        let place = place(&stack.user, &stack.kernel);
        let class = stack.wait.as_ref().map(|wait| wait.class);
        let is_idle_kernel_thread = apart && is_idle_kernel_thread(stack);
        let key = match is_idle_kernel_thread {
            true => Key { is_idle_kernel_thread, class, ..Key::default() },
            false => Key {
                is_idle_kernel_thread,
                who: [label("process"), label("thread"), label("tid")],
                state: stack.state.clone(),
                class,
                place: runnable(stack).is_none().then(|| place.clone()),
                woken_by: stack.waker.as_ref().map_or_else(String::new, woken_by),
            },
        };
        let row = rows.entry(key).or_default();
        if is_idle_kernel_thread {
            row.idle.insert([label("process"), label("pid")]);
        } else if row.places.is_empty() {
            row.rule = stack.wait.as_ref().map_or_else(String::new, |wait| wait.rule.clone());
        }
        row.places.insert(place);
        row.weight_ns += stack.weight_ns;
        row.waits += stack.waits;
        row.age.merge(&stack.age);
    }
    let mut rows: Vec<(Key, Row)> = rows.into_iter().collect();
    rows.sort_by_key(|(key, row)| {
        let size = if blocked_ns.is_some() { row.age.max_ns() } else { row.weight_ns };
        let is_later = blocked_ns.is_some() && key.state != UNINTERRUPTIBLE;
        let is_last = blocked_ns.is_some() && key.class == Some(WaitClass::Pipe);
        (key.is_idle_kernel_thread, is_later, is_last, std::cmp::Reverse(size))
    });
    rows
}

/// Renders the innermost user function and the innermost kernel function.
fn place(user: &[String], kernel: &[String]) -> String {
    let innermost = |frames: &[String]| frames.first().cloned().unwrap_or_default();
    match (user.is_empty(), kernel.is_empty()) {
        (false, false) => format!("{} > {}", innermost(user), innermost(kernel)),
        (false, true) => innermost(user),
        (true, _) => innermost(kernel),
    }
}

/// Renders the waker, and its call site if it is a thread.
fn woken_by(waker: &Waker) -> String {
    match waker.by {
        WokenBy::Thread => format!("{}: {}", waker.name(), place(&waker.user, &waker.kernel)),
        _ => waker.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::render::text::text_of;

    fn written(hide_idle: bool, blocked_ns: Option<u64>) -> String {
        text_of(|out| table(&sample::snapshot(), hide_idle, blocked_ns).write(out, None))
    }

    #[test]
    fn row_has_class_and_age() {
        insta::assert_snapshot!(written(false, None));
    }

    #[test]
    fn row_has_waker() {
        insta::assert_snapshot!(text_of(|out| table(&sample::with_wakers(), false, None).write(out, None)));
    }

    #[test]
    fn one_row_per_call_site_idle_kernel_threads_last() {
        let table = table(&sample::crowd(), false, None);
        let text = text_of(|out| table.write(out, None));
        let lines: Vec<&str> = text.lines().collect();
        let service: Vec<&&str> = lines.iter().filter(|line| line.contains("service")).collect();
        assert_eq!(service.len(), 4, "{text}");
        assert!(service.iter().any(|line| line.contains("throttled") && line.contains("(30 places)")));
        assert!(lines.last().is_some_and(|line| line.ends_with("  (150 idle kernel threads)")), "{text}");
        assert!(!text.contains("kworker") && !text.contains("TID"), "{text}");
        insta::assert_snapshot!(lines[..6].join("\n"));
    }

    #[test]
    fn shares_are_of_the_threads_that_were_chosen() {
        let mut snapshot = sample::crowd();
        snapshot.stacks.retain(|stack| stack.labels["process"] == "service");
        let text = text_of(|out| table(&snapshot, false, None).write(out, None));
        let shares =
            text.lines().filter_map(|line| line.split_whitespace().next()?.strip_suffix('%')?.parse::<f64>().ok());
        let sum: f64 = shares.sum();
        assert!((sum - 100.0).abs() < 0.3, "{sum}: {text}");
    }

    #[test]
    fn blocked_threads_are_those_that_have_waited_long_enough() {
        let text = written(false, Some(2_000_000_000));
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.lines().nth(1).is_some_and(|line| line.contains("40.0s")), "{text}");
    }
}
