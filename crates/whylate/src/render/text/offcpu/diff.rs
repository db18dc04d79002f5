// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares two off-CPU profiles.

use std::collections::BTreeMap;

use crate::render::text::table::Table;

/// Two profiles by stack, in millionths of their thread-seconds, so that runs of different lengths and numbers of
/// threads are comparable.
#[derive(Debug, Default, PartialEq)]
pub struct Difference {
    by_stack: BTreeMap<String, [u64; 2]>,
}

/// Denominator of the shares.
const WHOLE: u128 = 1_000_000;

impl Difference {
    /// Compares folded lines before and after.
    pub fn between(before: &[String], after: &[String]) -> Self {
        let mut difference = Difference::default();
        for (side, lines) in [before, after].into_iter().enumerate() {
            let parsed: Vec<(&str, u64)> = lines
                .iter()
                .filter_map(|line| {
                    let (frames, count) = line.rsplit_once(' ')?;
                    Some((frames, count.parse().ok()?))
                })
                .collect();
            let all: u128 = parsed.iter().map(|&(_, count)| u128::from(count)).sum();
            for (frames, count) in parsed {
                let part = (u128::from(count) * WHOLE / all.max(1)) as u64;
                difference.by_stack.entry(frames.to_owned()).or_default()[side] += part;
            }
        }
        difference
    }

    /// Returns folded lines with both shares, the input of differential flame graphs.
    pub fn lines(&self) -> Vec<String> {
        self.by_stack.iter().map(|(frames, [before, after])| format!("{frames} {before} {after}")).collect()
    }

    /// Returns a table, largest change first, without changes below a thousandth of the total.
    pub fn table(&self) -> Table {
        let mut table = Table::new("CHANGE, BEFORE, AFTER, <STACK");
        let mut rows: Vec<(i64, &String, &[u64; 2])> =
            self.by_stack.iter().map(|(frames, both)| (both[1] as i64 - both[0] as i64, frames, both)).collect();
        rows.sort_by_key(|&(change, frames, _)| (std::cmp::Reverse(change.abs()), frames));
        let percent = |part: f64| part * 100.0 / WHOLE as f64;
        for (change, frames, [before, after]) in rows.into_iter().filter(|row| row.0.abs() >= 1000) {
            table.row(vec![
                format!("{:+.1}%", percent(change as f64)),
                format!("{:.1}%", percent(*before as f64)),
                format!("{:.1}%", percent(*after as f64)),
                frames.clone(),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::{screens_of, text_of};

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn compares_shares_of_runs_of_different_length() {
        let difference = Difference::between(&lines(&["a;b 10", "a;c 10"]), &lines(&["a;b 3000", "a;d 1000"]));
        assert_eq!(difference.lines(), ["a;b 500000 750000", "a;c 500000 0", "a;d 0 250000"]);
        insta::assert_snapshot!(text_of(|out| difference.table().write(out, None)));
    }

    #[test]
    fn stack_gives_way_on_a_narrow_terminal() {
        let stack =
            "postgres;main;PostmasterMain;BackendRun;exec_simple_query;CommitTransaction;XLogFlush;-;futex_do_wait";
        let (one, other) = (format!("{stack} 10"), format!("{stack};reclaim_throttle 3"));
        let difference = Difference::between(&lines(&[&one]), &lines(&[&one, &other]));
        insta::assert_snapshot!(screens_of(|out, columns| difference.table().write(out, columns)));
    }

    #[test]
    fn omits_unchanged_stacks() {
        let both = lines(&["a;b 10", "a;c 30"]);
        assert_eq!(text_of(|out| Difference::between(&both, &both).table().write(out, None)).lines().count(), 1);
    }
}
