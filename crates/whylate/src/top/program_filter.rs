// SPDX-License-Identifier: MIT OR Apache-2.0
//! Filters by program. They match labels of stacks and late events, as a recording has no `/proc`.

use whylate_model::Labels;
use whylate_model::late::CGROUP;
use whylate_sources::paths::{Program, is_same_name, is_within};

/// Labels with a PID: of the waiter, of the queuer of a work item, and of the submitter of a request.
const PIDS: [&str; 3] = ["pid", "queued_by_pid", "submitter_pid"];
/// Labels with a thread name, in the order of `PIDS`.
const THREADS: [&str; 3] = ["thread", "queued_by", "submitter_thread"];

/// Program filter: a process, an executable's name, a cgroup, or threads by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramFilter {
    Program(Program),
    /// All threads of this name.
    Threads(String),
}

impl ProgramFilter {
    /// Returns whether the labels match.
    pub fn matches(&self, labels: &Labels) -> bool {
        let any = |names: &[&str], is: &dyn Fn(&str) -> bool| {
            names.iter().any(|name| labels.get(*name).is_some_and(|value| is(value)))
        };
        match self {
            ProgramFilter::Program(Program::Process(pid)) => any(&PIDS, &|value| value.parse() == Ok(*pid)),
            // Queuers of work items and submitters of requests have only a thread name.
            ProgramFilter::Program(Program::Name(name)) => {
                any(&["process"], &|value| is_same_name(value, name))
                    || !labels.contains_key("process") && any(&THREADS, &|value| is_same_name(value, name))
            }
            ProgramFilter::Program(Program::Cgroup(path)) => {
                any(&[CGROUP, "charged_to"], &|value| is_within(value, path))
            }
            ProgramFilter::Threads(name) => any(&THREADS, &|value| is_same_name(value, name)),
        }
    }

    /// Derives the filter from labels; `None` if they name no process and no thread.
    pub fn from_labels(labels: &Labels) -> Option<Self> {
        // PID 0: an interrupt.
        let pids: Vec<u32> = PIDS.iter().filter_map(|name| labels.get(*name)?.parse().ok()).collect();
        if !pids.is_empty() && pids.iter().all(|pid| *pid == 0) {
            return None;
        }
        let pid = pids.into_iter().find(|pid| *pid != 0);
        let by_name = || labels.get("process").cloned().map(Program::Name);
        let threads = || THREADS.iter().find_map(|name| labels.get(*name)).cloned().map(ProgramFilter::Threads);
        pid.map(Program::Process).or_else(by_name).map(ProgramFilter::Program).or_else(threads)
    }

    /// Returns the display name; for a PID, with the process name from `seen` if it has one.
    pub fn name(&self, seen: Option<&Labels>) -> String {
        match self {
            ProgramFilter::Program(Program::Process(pid)) => match seen.and_then(|labels| labels.get("process")) {
                Some(name) => format!("{name}:{pid}"),
                None => format!("process {pid}"),
            },
            ProgramFilter::Program(Program::Name(name)) => name.clone(),
            ProgramFilter::Program(Program::Cgroup(path)) => format!("cgroup {path}"),
            ProgramFilter::Threads(name) => format!("threads {name}"),
        }
    }
}

/// Selects stacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stacks {
    #[default]
    All,
    /// Stacks that agree with the labels of a series.
    Series(Labels),
    Program(ProgramFilter),
    /// Wait chains of the program's late events.
    Chains(ProgramFilter),
}

impl Stacks {
    /// Returns whether a stack with these labels is selected.
    pub fn matches(&self, labels: &Labels) -> bool {
        match self {
            Stacks::All => true,
            Stacks::Series(series) => agree(labels, series),
            Stacks::Program(program) | Stacks::Chains(program) => program.matches(labels),
        }
    }
}

/// Returns whether two label sets share at least one name and have equal values for every shared name.
pub fn agree(one: &Labels, other: &Labels) -> bool {
    let common = || other.iter().filter_map(|(name, value)| one.get(name).map(|of| of == value));
    common().all(|is_same| is_same) && common().next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn matches_program_by_pid_name_or_cgroup() {
        let waits = labels(&[("process", "postgres"), ("pid", "7"), ("thread", "writer"), ("cgroup", "/db/main")]);
        assert_eq!(ProgramFilter::from_labels(&labels(&[("handler", "f"), ("queued_by_pid", "0")])), None);
        let item = labels(&[("handler", "f"), ("queued_by", "postgres"), ("queued_by_pid", "7")]);
        let matches = |program: ProgramFilter| (program.matches(&waits), program.matches(&item));
        assert_eq!(matches(ProgramFilter::Program(Program::Process(7))), (true, true));
        assert_eq!(matches(ProgramFilter::Program(Program::Process(8))), (false, false));
        assert_eq!(matches(ProgramFilter::Program(Program::Name("postgres".to_owned()))), (true, true));
        assert_eq!(matches(ProgramFilter::Program(Program::Name("writer".to_owned()))), (false, false));
        assert_eq!(matches(ProgramFilter::Program(Program::Cgroup("/db".to_owned()))), (true, false));
        assert_eq!(matches(ProgramFilter::Program(Program::Cgroup("/d".to_owned()))), (false, false));
        assert_eq!(matches(ProgramFilter::Program(Program::Cgroup("/".to_owned()))), (false, false));
        assert_eq!(matches(ProgramFilter::Threads("writer".to_owned())), (true, false));
    }

    #[test]
    fn compares_names_up_to_comm_length() {
        let program = ProgramFilter::Program(Program::Name("a_very_long_name_of_a_program".to_owned()));
        assert!(program.matches(&labels(&[("process", "a_very_long_nam")])));
        assert!(!program.matches(&labels(&[("process", "a_very_long_na")])));
    }

    #[test]
    fn derives_program_from_labels() {
        let of = |pairs: &[(&str, &str)]| {
            ProgramFilter::from_labels(&labels(pairs)).map(|program| program.name(Some(&labels(pairs))))
        };
        assert_eq!(of(&[("process", "app"), ("pid", "7")]), Some("app:7".to_owned()));
        assert_eq!(of(&[("submitter_pid", "9")]), Some("process 9".to_owned()));
        assert_eq!(of(&[("queued_by", "app")]), Some("threads app".to_owned()));
        assert_eq!(of(&[("cpu", "1")]), None);
    }
}
