// SPDX-License-Identifier: MIT OR Apache-2.0
//! Splits what a machine printed by part, and finds complaints in the kernel's messages.

use std::collections::BTreeMap;

/// Messages of a fault of the emulator. A kernel patches code under a breakpoint, syncs all CPUs, and removes the
/// breakpoint. A CPU that QEMU 7.2 emulates in a thread of its own can rarely run the translated breakpoint once more
/// after that, and its kernel panics. (QEMU 8.1 and later locks a page while it translates from it.) Or that CPU runs
/// it again and again, where kprobes take it for one that was just removed, and the kernel ends when RCU has waited for
/// that CPU for too long.
const EMULATOR_FAULTS: [&str; 2] = ["Oops: int3: ", ":asm_exc_int3+"];
/// Messages about an emulated CPU that was not run in time; the kernel ends itself after the last of them.
const STUCK_CPU: [&str; 3] = ["soft lockup", "workqueue lockup", "RCU Stall"];
/// Harmless: a CPU goes offline while a real-time thread delays others, and 6.12 counts one thread more than it then
/// lists.
const HARMLESS: &str = "sched_cpu_dying";
/// Precedes a part's name on the console.
const PART: &str = "whylate-part: ";

/// What a part printed.
#[derive(Debug, Default, PartialEq)]
pub struct Record {
    pub text: String,
    /// Exit status; `None` if the machine ended before.
    pub status: Option<i32>,
    pub seconds: f64,
}

/// Returns the records of all parts that have started, by name.
pub fn of_parts(text: &str, mark: &str) -> BTreeMap<String, Record> {
    let mut records: BTreeMap<String, Record> = BTreeMap::new();
    let (mut now, mut ended_s) = (None, 0.0);
    for line in text.lines() {
        let Some(marked) = line.strip_prefix(mark) else {
            if let Some(record) = now.as_ref().and_then(|name| records.get_mut(name)) {
                record.text.extend([line, "\n"]);
            }
            continue;
        };
        if let Some(name) = marked.strip_prefix(" begin ") {
            records.insert(name.to_owned(), Record::default());
            now = Some(name.to_owned());
        } else if let Some((status, rest)) = marked.strip_prefix(" end ").and_then(|rest| rest.split_once(' '))
            && let Some((uptime, name)) = rest.split_once(' ')
            && let Some(record) = records.get_mut(name)
        {
            let uptime_s: f64 = uptime.parse().unwrap_or(0.0);
            record.status = status.parse().ok();
            record.seconds = uptime_s - ended_s;
            (now, ended_s) = (None, uptime_s);
        }
    }
    records
}

pub fn faults_of_emulator(console: &str) -> bool {
    EMULATOR_FAULTS.iter().any(|fault| console.contains(fault))
}

/// Returns the first line for which `is_it` holds, and the part in which it was printed.
fn part_of_line(console: &str, is_it: impl Fn(&str) -> bool) -> Option<(&str, Option<&str>)> {
    let mut part = None;
    for line in console.lines() {
        if let Some((_, name)) = line.split_once(PART) {
            part = Some(name.trim_end());
        } else if is_it(line) {
            return Some((line, part));
        }
    }
    None
}

/// Returns the first complaint of the kernel, other than those about time and the harmless one, and its part.
pub fn complaint(console: &str) -> Option<(&str, Option<&str>)> {
    let complaints = ["WARNING: ", "BUG: ", "Oops: ", "general protection fault"];
    part_of_line(console, |line| {
        let is_known = line.contains(HARMLESS) || STUCK_CPU.iter().any(|late| line.contains(late));
        !is_known && complaints.iter().any(|complaint| line.contains(complaint))
    })
}

/// Returns the part in which the kernel reported a stuck CPU.
pub fn stuck_cpu_part(console: &str) -> Option<Option<&str>> {
    part_of_line(console, |line| STUCK_CPU.iter().any(|late| line.contains(late))).map(|(_, part)| part)
}

/// Without capturing, a test's name precedes the first line that it prints, and its result has a line of its own.
const NAME_ENDS: &str = " ... ";

pub fn passed_tests(output: &str) -> impl Iterator<Item = String> {
    let mut name = None;
    output.lines().filter_map(move |line| {
        let mut rest = line;
        if let Some((started, after)) = line.strip_prefix("test ").and_then(|line| line.split_once(NAME_ENDS)) {
            (name, rest) = (Some(started), after);
        }
        if rest == "ok" { name.take().map(str::to_owned) } else { None }
    })
}

pub fn without_names(output: &str) -> String {
    let rest = |line: &str| match line.strip_prefix("test ").and_then(|line| line.split_once(NAME_ENDS)) {
        Some((_, rest)) => format!("{rest}\n"),
        None => format!("{line}\n"),
    };
    output.lines().map(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_parts_and_interrupted_one_has_no_status() {
        let text = "noise\nMARK begin a b\nsaid\n\nMARK end 0 12.5 a b\nbetween\nMARK begin c\nsaid too\nMARK end 3 20.5 c\n\
                    MARK begin d\nlast";
        let records = of_parts(text, "MARK");
        let expected =
            [("a b", "said\n\n", Some(0), 12.5), ("c", "said too\n", Some(3), 8.0), ("d", "last\n", None, 0.0)];
        let expected = expected
            .map(|(name, text, status, seconds)| (name.to_owned(), Record { text: text.to_owned(), status, seconds }));
        assert_eq!(records, BTreeMap::from(expected));
    }

    #[test]
    fn stuck_cpu_messages_are_no_complaints() {
        let late = "[  9.0] whylate-part: a b\n[  9.1] BUG: workqueue lockup - pool cpus=1 stuck for 31s!\n\
                    [  9.2] Kernel panic - not syncing: RCU Stall\n";
        assert_eq!((complaint(late), stuck_cpu_part(late)), (None, Some(Some("a b"))));
        let oops = "[  9.3] Oops: general protection fault, 0000 [#1]";
        assert_eq!(complaint(&format!("{late}[ 9.2] whylate-part: c\n{oops}\n")), Some((oops, Some("c"))));
        let warning = "[  0.4] WARNING: CPU: 0 PID: 1 at kernel/x.c:1";
        assert_eq!((complaint(warning), stuck_cpu_part(warning)), (Some((warning, None)), None));
        assert_eq!(complaint("WARNING: CPU: 1 PID: 26 at kernel/sched/core.c:8365 sched_cpu_dying+0x93/0x230"), None);
    }

    #[test]
    fn separates_test_output_from_names() {
        let output = "test a ... ok\ntest b ... skipped: no\nok\ntest c ... 5 executions\nFAILED\ntest d ... ";
        assert_eq!(passed_tests(output).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(without_names(output), "ok\nskipped: no\nok\n5 executions\nFAILED\n\n");
    }
}
