// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exit statuses: one rule for all commands, and the commands that differ from it.

use whylate_model::sources::TIMERLAT;

/// Success.
pub const SUCCESS: u8 = 0;
/// A failure, or nothing to show.
pub const FAILURE: u8 = 1;
/// A usage error, or the name of something that does not exist.
pub const USAGE: u8 = 2;
/// `timerlat`: a threshold was hit, as rtla's from 6.16 on.
pub const THRESHOLD_HIT: u8 = 2;
/// The machine or the caller's privileges do not allow the command.
pub const NOT_POSSIBLE: u8 = 3;
/// With `--fail-if-late`: something was late.
pub const LATE: u8 = 4;

/// Statuses, their meanings, and the commands that have them; all commands if there are none. The overview has no name.
const STATUSES: [(&str, &str, &[&str]); 5] = [
    ("0", "Success.", &[]),
    ("1", "Failure, or nothing to show: no data in that span, or nothing that matches.", &[]),
    ("2", "Usage error, or the named process, CPU, disk, cgroup, user or file does not exist.", &[]),
    ("3", "Not permitted, or not supported by this kernel.", &MEASURING),
    ("4", "With --fail-if-late: something was late.", &FAILING_IF_LATE),
];
const MEASURING: [&str; 14] = [
    "", "wq", "timerlat", "irqsoff", "offcpu", "sqpoll", "block", "top", "run", "record", "serve", "report", "inject",
    "selftest",
];
const FAILING_IF_LATE: [&str; 8] = ["", "wq", "timerlat", "irqsoff", "offcpu", "sqpoll", "block", "replay"];

/// Statuses of commands that differ from the rule.
const OTHERS: [(&str, &[(&str, &str)]); 3] = [
    (
        "timerlat",
        &[
            ("1", "Failure or usage error, as in rtla."),
            ("2", "A threshold stopped the measurement, as in rtla of Linux 6.16 and later."),
        ],
    ),
    (
        "run",
        &[
            ("*", "The status of the command that is run; 128+N if signal N ends it."),
            ("126", "The command cannot be executed."),
            ("127", "The command is not found."),
        ],
    ),
    ("selftest", &[("1", "A check failed."), ("3", "Nothing can be checked here."), ("128+N", "Signal N stopped it.")]),
];

/// Returns the statuses of a command by its name.
pub fn statuses_of(command: &str) -> Vec<(&'static str, &'static str)> {
    let own = OTHERS.iter().find(|(name, _)| *name == command).map_or(&[][..], |(_, own)| own);
    let rule = STATUSES.iter().filter(|(_, _, of)| of.is_empty() || of.contains(&command));
    let rule = rule.map(|(status, meaning, _)| (*status, *meaning));
    let rule = rule.map(|of_all| own.iter().find(|(status, _)| *status == of_all.0).copied().unwrap_or(of_all));
    let others = own.iter().filter(|(status, _)| !STATUSES.iter().any(|(of_all, ..)| of_all == status));
    rule.chain(others.copied()).collect()
}

/// Returns the status of a usage error, given the name of the command: 1 for `timerlat`, where 2 means that a threshold
/// was hit.
pub fn of_usage_error(command: Option<&str>) -> u8 {
    if command == Some(TIMERLAT.name) { FAILURE } else { USAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_every_status() {
        let page = include_str!("../../../../docs/command-line.md");
        for (status, meaning) in OTHERS.iter().flat_map(|(_, own)| *own) {
            let row = format!("| {} | {meaning} |", if *status == "*" { "any" } else { status });
            assert!(page.contains(&row), "docs/command-line.md has no row {row}");
        }
        for (status, meaning, of) in STATUSES {
            let names = of.iter().map(|name| format!("`{}`", if name.is_empty() { "overview" } else { name }));
            let names = if of.is_empty() { "all".to_owned() } else { names.collect::<Vec<_>>().join(", ") };
            let row = format!("| {status} | {meaning} | {names}");
            assert!(page.contains(&row), "docs/command-line.md has no row {row}");
        }
    }

    #[test]
    fn a_man_page_has_the_statuses_of_its_command() {
        let statuses = |command| statuses_of(command).iter().map(|(status, _)| *status).collect::<Vec<_>>();
        assert_eq!(statuses("diff"), ["0", "1", "2"]);
        assert_eq!(statuses(""), ["0", "1", "2", "3", "4"]);
        assert_eq!(statuses("replay"), ["0", "1", "2", "4"]);
        assert_eq!(statuses("selftest"), ["0", "1", "2", "3", "128+N"]);
    }
}
