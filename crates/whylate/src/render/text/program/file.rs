// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the time of a program to a file: one flame graph of what its threads did on CPUs, and what they waited for.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use whylate_model::folded::{Frame, Kind};
use whylate_model::path::PathSegment;
use whylate_model::path::budget::{Budget, ProgramReport};
use whylate_model::units::printable;

use super::kind;
use crate::render::extension::{Extension, chosen};
use crate::render::text::run::{Form, add_path, functions, write_stacks};
use crate::render::text::work::has_enough_samples;

/// Returns the format of a file with a path.
///
/// # Errors
/// Fails if the file has another extension.
pub fn form_of(path: &Path) -> anyhow::Result<Form> {
    chosen(path, &[(Extension::Svg, Form::Svg), (Extension::Folded, Form::Folded)])
}

/// Writes the program's time in a format.
///
/// # Errors
/// Fails if the writer does.
pub fn write_file(out: &mut dyn Write, form: Form, seen: &ProgramReport) -> io::Result<()> {
    let title = format!("Time of {}", printable(&seen.name));
    write_stacks(out, form, &title, frames(&seen.budget))?;
    out.flush()
}

/// Returns stacks with their nanoseconds, which add up to the program's time.
fn frames(budget: &Budget) -> Vec<(Vec<Frame>, u64)> {
    let mut stacks: BTreeMap<Vec<Frame>, u64> = BTreeMap::new();
    let mut other_ns = budget.on_cpu_ns;
    let on_cpu = Frame::new(Kind::User, "on CPU");
    for work in budget.work.iter().filter(|work| has_enough_samples(work)) {
        for (thread, stack, ns) in &work.stacks {
            let owner = [on_cpu.clone(), Frame::new(Kind::User, thread)];
            *stacks.entry(owner.into_iter().chain(functions(stack)).collect()).or_default() += ns;
            other_ns = other_ns.saturating_sub(*ns);
        }
    }
    let mut add = |name: &str, ns: u64, path: &[PathSegment]| {
        let root = Frame::new(Kind::Label, name);
        let path_ns: u64 = path.iter().map(|segment| segment.ns).sum();
        add_path(&mut stacks, &root, path);
        if ns > path_ns {
            *stacks.entry(vec![root]).or_default() += ns - path_ns;
        }
    };
    add("sleeping voluntarily", budget.own_sleep_ns, &[]);
    add("waiting for a CPU", budget.ready.ns, &budget.ready.path);
    for waits in &budget.waits {
        add(&kind(waits), waits.ns, &waits.path);
    }
    if other_ns > 0 {
        *stacks.entry(vec![on_cpu]).or_default() += other_ns;
    }
    stacks.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use whylate_model::path::budget::{EndedBy, Waits};
    use whylate_model::work::{RunningStack, Work};
    use whylate_model::{ActorName, CauseKind};

    use super::*;
    use crate::render::text::text_of;

    #[test]
    fn graph_has_work_and_waits() {
        const MS: u64 = 1_000_000;
        let stack = RunningStack { user: vec!["parse".into(), "main".into()], ..RunningStack::default() };
        let work = Work {
            ns: 40 * MS,
            samples: 40,
            equal_samples: 40,
            stacks: vec![("web".to_owned(), stack.into(), 40 * MS)],
            ..Work::default()
        };
        let segment = PathSegment {
            ns: 30 * MS,
            kind: CauseKind::Running,
            who: ActorName::thread("db", 9),
            depth: 1,
            waiter: Some(ActorName::thread("web", 7)),
            via: Some("recvfrom".to_owned()),
            ..PathSegment::default()
        };
        let waits = Waits {
            via: "recvfrom".to_owned(),
            ended_by: Some(EndedBy::Others),
            ns: 35 * MS,
            path: vec![segment],
            ..Waits::default()
        };
        let budget = Budget {
            total_ns: 100 * MS,
            on_cpu_ns: 45 * MS,
            own_sleep_ns: 20 * MS,
            waits: vec![waits],
            work: Some(work),
            ..Budget::default()
        };
        let seen = ProgramReport { budget, ..ProgramReport::default() };
        let folded = text_of(|out| write_file(out, Form::Folded, &seen));
        let expected = "\
on CPU 5000
on CPU;web;main;parse 40000
recvfrom for others 5000
recvfrom for others;web waited in recvfrom;db worked 30000
sleeping voluntarily 20000
";
        assert_eq!(folded, expected);
    }
}
