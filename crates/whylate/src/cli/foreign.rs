// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of other tools, and the commands that take their place.

/// Name of a tool, what it belongs to, and the command.
const TOOLS: [(&str, &str, &str); 50] = [
    ("offcputime", "bcc", "whylate offcpu -d 10s"),
    ("offwaketime", "bcc", "whylate offcpu --wakers -d 10s"),
    ("wakeuptime", "bcc", "whylate offcpu --wakers -d 10s"),
    ("runqlat", "bcc", "whylate offcpu --why 1ms -d 10s"),
    ("runqlen", "bcc", "whylate offcpu --why 1ms -d 10s"),
    ("runqslower", "bcc", "whylate offcpu --why 10ms -d 10s"),
    ("biolatency", "bcc", "whylate block 1 10"),
    ("biosnoop", "bcc", "whylate block --slower 1ms"),
    ("biotop", "bcc", "whylate block --table --by process 1"),
    ("hardirqs", "bcc", "whylate irqsoff -d 10s"),
    ("softirqs", "bcc", "whylate irqsoff -d 10s"),
    ("criticalstat", "bcc", "whylate irqsoff --slower 1ms"),
    ("ext4slower", "bcc", "whylate offcpu --why 10ms -d 10s"),
    ("xfsslower", "bcc", "whylate offcpu --why 10ms -d 10s"),
    ("fileslower", "bcc", "whylate offcpu --why 10ms -d 10s"),
    ("biopattern", "bcc", "whylate block --table --by process 1"),
    ("biostacks", "bcc", "whylate offcpu -d 10s"),
    ("klockstat", "bcc", "whylate offcpu --why 5ms -d 10s"),
    ("deadlock", "bcc", "whylate offcpu --blocked 10s"),
    ("wqlat", "bcc", "whylate wq 1"),
    ("perf", "Linux", "whylate -p PID"),
    ("sched", "perf", "whylate -p PID"),
    ("timehist", "perf", "whylate -p PID"),
    ("trace", "perf", "whylate -p PID"),
    ("lock", "perf", "whylate offcpu --why 5ms -d 10s"),
    ("kwork", "perf", "whylate wq 1"),
    ("latency", "perf", "whylate -p PID"),
    ("strace", "Linux", "whylate -p PID"),
    ("time", "Linux", "whylate run -- COMMAND"),
    ("rtla", "Linux", "whylate timerlat"),
    ("osnoise", "rtla", "whylate timerlat"),
    ("hwnoise", "rtla", "whylate irqsoff -d 10s"),
    ("oslat", "rt-tests", "whylate irqsoff -d 10s"),
    ("cyclictest", "rt-tests", "whylate timerlat"),
    ("hwlatdetect", "rt-tests", "whylate irqsoff -d 10s"),
    ("preemptoff", "ftrace", "whylate irqsoff --preempt"),
    ("preemptirqsoff", "ftrace", "whylate irqsoff --preempt"),
    ("wakeup_rt", "ftrace", "whylate timerlat"),
    ("trace-cmd", "Linux", "whylate record"),
    ("hung_task", "Linux", "whylate offcpu --blocked 10s"),
    ("ftrace", "Linux", "whylate record"),
    ("iostat", "Linux", "whylate block --table 1"),
    ("blktrace", "Linux", "whylate block --slower 1ms"),
    ("iotop", "Linux", "whylate block --table --by process 1"),
    ("latencytop", "Linux", "whylate offcpu -d 10s"),
    ("htop", "Linux", "whylate top"),
    ("atop", "Linux", "whylate record"),
    ("below", "Linux", "whylate record"),
    ("sar", "Linux", "whylate record"),
    ("procstat", "FreeBSD", "whylate import FILE"),
];
/// Name of a tool without a command that takes its place, and what to do.
const OTHERS: [(&str, &str); 3] = [
    ("cpudist", "whylate does not profile running threads: use `perf record`"),
    ("profile", "whylate does not profile running threads: use `perf record`"),
    ("bpftrace", "whylate runs no scripts: see what it measures with `whylate --help`"),
];
/// Ends of names of bcc's tools in Debian, and of bpftrace's.
const SUFFIXES: [&str; 2] = ["-bpfcc", ".bt"];

/// Returns advice to users of another tool.
pub fn advice(name: &str) -> Option<String> {
    let tool = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    let replaced = TOOLS.iter().find(|(known, ..)| *known == tool);
    let replaced = replaced.map(|(_, of, command)| format!("{tool} ({of}) is not a whylate command: use `{command}`"));
    replaced.or_else(|| OTHERS.iter().find(|(known, _)| *known == tool).map(|(_, advice)| (*advice).to_owned()))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::CommandFactory as _;

    use crate::cli::parser::{Cli, parse_words};

    use super::*;

    #[test]
    fn each_advice_is_a_command() {
        for (tool, _, command) in TOOLS {
            let words = command.replace("PID", "1").replace("COMMAND", "true");
            let words: Vec<OsString> = words.split(' ').skip(1).map(OsString::from).collect();
            let parsed = parse_words(&words);
            assert!(parsed.is_ok(), "{command}: {:?}", parsed.err());
            for name in [tool.to_owned(), format!("{tool}-bpfcc"), format!("{tool}.bt")] {
                let error = parse_words(&[name.into(), "10".into()]).expect_err("no command of whylate").to_string();
                assert!(error.contains(command) && error.trim_end().lines().count() == 1, "{error}");
            }
        }
    }

    const PAGE: &str = include_str!("../../../../docs/if-you-used.md");

    /// Returns the names of tools in a row of the page: the first words of its first cell's commands, or the second
    /// words for perf.
    fn names(row: &str) -> Vec<&str> {
        let tools = row.split('|').nth(1).unwrap_or_default();
        let commands = tools.split('`').skip(1).step_by(2);
        let names = commands.filter_map(|command| {
            let mut words = command.split(' ');
            let first = words.next()?;
            if first == "perf" { words.next() } else { Some(first) }
        });
        let cli = Cli::command();
        let is_tool = |name: &&str| {
            !name.starts_with('-') && !["echo", "cat"].contains(name) && cli.find_subcommand(name).is_none()
        };
        names.filter(is_tool).collect()
    }

    #[test]
    fn each_name_of_the_page_has_advice_that_agrees_with_it() {
        let rows: Vec<&str> = PAGE.lines().filter(|line| line.starts_with('|')).skip(2).collect();
        let all: Vec<&str> = rows.iter().flat_map(|row| names(row)).collect();
        assert!(all.len() > 25, "{all:?}");
        for name in all {
            let said = advice(name).unwrap_or_else(|| panic!("there is no advice on {name}"));
            let command = said.split('`').nth(1).expect("a command in backquotes");
            let mut of_name = rows.iter().filter(|row| names(row).contains(&name));
            assert!(of_name.any(|row| row.contains(command)), "the page does not name {command} for {name}");
        }
    }
}
