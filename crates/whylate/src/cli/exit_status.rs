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

/// Statuses and their meanings.
pub const STATUSES: [(&str, &str); 5] = [
    ("0", "Success."),
    ("1", "Failure, or nothing to show: no data in that span, or nothing that matches."),
    ("2", "Usage error, or the named process, CPU, disk, cgroup, user or file does not exist."),
    ("3", "Not permitted, or not supported by this kernel."),
    ("4", "With --fail-if-late: something was late."),
];

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
    let rule = STATUSES.iter().map(|of_all| own.iter().find(|(status, _)| *status == of_all.0).unwrap_or(of_all));
    let others = own.iter().filter(|(status, _)| !STATUSES.iter().any(|(of_all, _)| of_all == status));
    rule.chain(others).copied().collect()
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
        for (status, meaning) in STATUSES.iter().chain(OTHERS.iter().flat_map(|(_, own)| *own)) {
            let row = format!("| {} | {meaning} |", if *status == "*" { "any" } else { status });
            assert!(page.contains(&row), "docs/command-line.md has no row {row}");
        }
    }
}
