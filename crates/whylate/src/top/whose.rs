// SPDX-License-Identifier: MIT OR Apache-2.0
//! One program, as labels of stacks and late events tell it: what is recorded has no `/proc`.

use whylate_model::Labels;
use whylate_model::late::CGROUP;
use whylate_sources::paths::{Program, is_same_name, is_within};

/// Where a process's number stands: of who waited, who queued a work item, and who asked for a request.
const PIDS: [&str; 3] = ["pid", "queued_by_pid", "submitter_pid"];
/// The same of threads, by name.
const THREADS: [&str; 3] = ["thread", "queued_by", "submitter_thread"];

/// Whose point of view it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    Program(Program),
    /// All threads of this name.
    Threads(String),
}

impl Whose {
    /// Whether something with these labels is of it.
    pub fn has(&self, labels: &Labels) -> bool {
        let any = |names: &[&str], is: &dyn Fn(&str) -> bool| {
            names.iter().any(|name| labels.get(*name).is_some_and(|value| is(value)))
        };
        match self {
            Whose::Program(Program::Process(pid)) => any(&PIDS, &|value| value.parse() == Ok(*pid)),
            // Who queued an item or asked for a request is known by its thread's name alone.
            Whose::Program(Program::Name(name)) => {
                any(&["process"], &|value| is_same_name(value, name))
                    || !labels.contains_key("process") && any(&THREADS, &|value| is_same_name(value, name))
            }
            Whose::Program(Program::Cgroup(path)) => any(&[CGROUP, "charged_to"], &|value| is_within(value, path)),
            Whose::Threads(name) => any(&THREADS, &|value| is_same_name(value, name)),
        }
    }

    /// Whom something with these labels is of, where they tell a process or a thread.
    pub fn of(labels: &Labels) -> Option<Self> {
        // 0: an interrupt.
        let pid = PIDS.iter().find_map(|name| labels.get(*name)?.parse().ok().filter(|pid| *pid != 0));
        let by_name = || labels.get("process").cloned().map(Program::Name);
        let threads = || THREADS.iter().find_map(|name| labels.get(*name)).cloned().map(Whose::Threads);
        pid.map(Program::Process).or_else(by_name).map(Whose::Program).or_else(threads)
    }

    /// What it is called; a process by its name where that was seen.
    pub fn name(&self, seen: Option<&Labels>) -> String {
        match self {
            Whose::Program(Program::Process(pid)) => match seen.and_then(|labels| labels.get("process")) {
                Some(name) => format!("{name}:{pid}"),
                None => format!("process {pid}"),
            },
            Whose::Program(Program::Name(name)) => name.clone(),
            Whose::Program(Program::Cgroup(path)) => format!("cgroup {path}"),
            Whose::Threads(name) => format!("threads {name}"),
        }
    }
}

/// Whose stacks are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stacks {
    #[default]
    All,
    /// Those that agree with the labels of a series.
    Series(Labels),
    Of(Whose),
    /// The chains of its late waits, along who ended them.
    Chains(Whose),
}

impl Stacks {
    /// Whether one with these labels is.
    pub fn has(&self, labels: &Labels) -> bool {
        match self {
            Stacks::All => true,
            Stacks::Series(series) => agree(labels, series),
            Stacks::Of(whose) | Stacks::Chains(whose) => whose.has(labels),
        }
    }
}

/// Whether labels of one thing are those of another, as far as both have them, and they have any in common.
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
    fn a_program_is_known_by_number_name_or_cgroup() {
        let waits = labels(&[("process", "postgres"), ("pid", "7"), ("thread", "writer"), ("cgroup", "/db/main")]);
        assert_eq!(Whose::of(&labels(&[("handler", "f"), ("queued_by_pid", "0")])), None);
        let item = labels(&[("handler", "f"), ("queued_by", "postgres"), ("queued_by_pid", "7")]);
        let has = |whose: Whose| (whose.has(&waits), whose.has(&item));
        assert_eq!(has(Whose::Program(Program::Process(7))), (true, true));
        assert_eq!(has(Whose::Program(Program::Process(8))), (false, false));
        assert_eq!(has(Whose::Program(Program::Name("postgres".to_owned()))), (true, true));
        assert_eq!(has(Whose::Program(Program::Name("writer".to_owned()))), (false, false));
        assert_eq!(has(Whose::Program(Program::Cgroup("/db".to_owned()))), (true, false));
        assert_eq!(has(Whose::Program(Program::Cgroup("/d".to_owned()))), (false, false));
        assert_eq!(has(Whose::Program(Program::Cgroup("/".to_owned()))), (false, false));
        assert_eq!(has(Whose::Threads("writer".to_owned())), (true, false));
    }

    #[test]
    fn names_are_compared_as_far_as_the_kernel_keeps_them() {
        let whose = Whose::Program(Program::Name("a_very_long_name_of_a_program".to_owned()));
        assert!(whose.has(&labels(&[("process", "a_very_long_nam")])));
        assert!(!whose.has(&labels(&[("process", "a_very_long_na")])));
    }

    #[test]
    fn whose_something_is_follows_from_its_labels() {
        let of = |pairs: &[(&str, &str)]| Whose::of(&labels(pairs)).map(|whose| whose.name(Some(&labels(pairs))));
        assert_eq!(of(&[("process", "app"), ("pid", "7")]), Some("app:7".to_owned()));
        assert_eq!(of(&[("submitter_pid", "9")]), Some("process 9".to_owned()));
        assert_eq!(of(&[("queued_by", "app")]), Some("threads app".to_owned()));
        assert_eq!(of(&[("cpu", "1")]), None);
    }
}
