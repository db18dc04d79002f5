// SPDX-License-Identifier: MIT OR Apache-2.0
//! A row for each place where threads wait.

use whylate_model::folded::waiting;
use whylate_model::units::format_ns;
use whylate_model::{Snapshot, Stack, Waker, WokenBy};

use super::percent;
use crate::output::table::{Align, Table};

/// The table, widest first; with a threshold only of what has waited for so long by now.
pub fn table(snapshot: &Snapshot, hide_idle: bool, blocked_ns: Option<u64>) -> Table {
    let has_wakers = snapshot.stacks.iter().any(|stack| stack.waker.is_some());
    let mut columns = vec![
        ("SHARE", Align::Right),
        ("TIME", Align::Right),
        ("THREADS", Align::Right),
        ("AGE-P50", Align::Right),
        ("AGE-MAX", Align::Right),
        ("S", Align::Left),
        ("CLASS", Align::Left),
        ("PROCESS", Align::Left),
        ("THREAD", Align::Left),
        ("TID", Align::Right),
        ("WHERE", Align::Left),
        ("RULE", Align::Left),
    ];
    if has_wakers {
        columns.insert(columns.len() - 1, ("WOKEN BY", Align::Left));
    }
    let mut table = Table::new(&columns);
    let mut stacks: Vec<&Stack> = waiting(snapshot, hide_idle)
        .filter(|stack| blocked_ns.is_none_or(|least| !stack.age.is_empty() && stack.age.max_ns() >= least))
        .collect();
    match blocked_ns {
        None => stacks.sort_by_key(|stack| std::cmp::Reverse(stack.weight_ns)),
        Some(_) => stacks.sort_by_key(|stack| std::cmp::Reverse(stack.age.max_ns())),
    }
    let whole_ns: u64 = waiting(snapshot, hide_idle).map(|stack| stack.weight_ns).sum();
    for stack in stacks {
        let label = |name: &str| stack.labels.get(name).cloned().unwrap_or_default();
        let age = |ns: u64| if stack.age.is_empty() { String::new() } else { format_ns(ns) };
        let mut row = vec![
            percent(stack.weight_ns, whole_ns),
            format_ns(stack.weight_ns),
            stack.age.count().to_string(),
            age(stack.age.quantile_ns(0.5)),
            age(stack.age.max_ns()),
            stack.state.clone(),
            stack.wait.as_ref().map_or("", |wait| wait.class.words()).to_owned(),
            label("process"),
            label("thread"),
            label("tid"),
            place(&stack.user, &stack.kernel),
            stack.wait.as_ref().map_or("", |wait| wait.rule.as_str()).to_owned(),
        ];
        if has_wakers {
            row.insert(row.len() - 1, stack.waker.as_ref().map_or_else(String::new, woken_by));
        }
        table.row(row);
    }
    table
}

/// The innermost user function, and the kernel's below it.
fn place(user: &[String], kernel: &[String]) -> String {
    let innermost = |frames: &[String]| frames.first().cloned().unwrap_or_default();
    match (user.is_empty(), kernel.is_empty()) {
        (false, false) => format!("{} > {}", innermost(user), innermost(kernel)),
        (false, true) => innermost(user),
        (true, _) => innermost(kernel),
    }
}

/// Whose wakeup ended the waits, and where it was.
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

    fn written(hide_idle: bool, blocked_ns: Option<u64>) -> String {
        let mut out = Vec::new();
        table(&sample::snapshot(), hide_idle, blocked_ns).write(&mut out, None).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_row_tells_what_for_and_for_how_long() {
        insta::assert_snapshot!(written(false, None));
    }

    #[test]
    fn a_row_tells_who_ended_the_waits() {
        let mut out = Vec::new();
        table(&sample::with_wakers(), false, None).write(&mut out, None).expect("a vector takes everything");
        insta::assert_snapshot!(String::from_utf8(out).expect("text"));
    }

    #[test]
    fn blocked_threads_are_those_that_have_waited_long_enough() {
        let text = written(false, Some(2_000_000_000));
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.lines().nth(1).is_some_and(|line| line.contains("40.0s")), "{text}");
    }
}
