// SPDX-License-Identifier: MIT OR Apache-2.0
//! Says in which functions threads worked.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use whylate_model::units::printable;
use whylate_model::work::{Work, WorkKind, WorkPart};

/// Minimum number of samples for shares: of fewer, a share could be wrong by half of the whole.
const MIN_SAMPLES: u64 = 20;
/// Number of samples from which a share is right within a tenth of the whole.
const MANY_SAMPLES: u64 = 100;
/// Smaller shares of the time are left out.
const SHOWN_PERCENT: f64 = 1.0;
/// Minimum number of samples of a function that is shown.
const MIN_SAMPLES_OF_FUNCTION: u64 = 5;
/// Maximum number of programs, of functions of each, and of kinds of kernel work.
const MAX_PROGRAMS: usize = 3;
const MAX_FUNCTIONS: usize = 3;
const MAX_KINDS: usize = 5;
/// Maximum length of a function's name, in characters.
const MAX_NAME: usize = 40;

/// Returns whether there are enough samples for shares.
pub(super) fn has_enough_samples(work: &Work) -> bool {
    work.equal_samples >= MIN_SAMPLES
}

/// Returns a sentence about the work and its shares of `total_ns`; `None` if there are too few samples.
pub(super) fn sentence(work: &Work, total_ns: u64) -> Option<String> {
    let percent = |ns: u64| ns as f64 * 100.0 / total_ns.max(1) as f64;
    if !has_enough_samples(work) || percent(work.ns) < SHOWN_PERCENT {
        return None;
    }
    let is_shown = |ns: u64| percent(ns) >= SHOWN_PERCENT;
    let mut of_programs: BTreeMap<&str, (u64, Vec<&WorkPart>)> = BTreeMap::new();
    let mut of_kernel: BTreeMap<String, u64> = BTreeMap::new();
    for part in &work.parts {
        if part.kind == WorkKind::NotSampled {
            continue;
        }
        if part.kind == WorkKind::User {
            let (ns, parts) = of_programs.entry(&part.thread).or_default();
            *ns += part.ns;
            parts.push(part);
        } else {
            *of_kernel.entry(kernel_words(part)).or_default() += part.ns;
        }
    }
    let mut programs: Vec<_> = of_programs.into_iter().filter(|(_, (ns, _))| is_shown(*ns)).collect();
    programs.sort_by_key(|(_, (ns, _))| Reverse(*ns));
    let program = |(name, (ns, parts)): (&str, (u64, Vec<&WorkPart>))| {
        let functions = parts.iter().filter(|part| is_shown(part.ns) && part.samples >= MIN_SAMPLES_OF_FUNCTION);
        let functions = functions.take(MAX_FUNCTIONS);
        let functions = functions.map(|part| format!("{:.0}% {}", percent(part.ns), function(part)));
        let functions = functions.collect::<Vec<_>>().join(", ");
        let functions = if functions.is_empty() { String::new() } else { format!(" ({functions})") };
        format!("{} {:.0}%{functions}", printable(name), percent(ns))
    };
    let mut shares: Vec<String> = programs.into_iter().take(MAX_PROGRAMS).map(program).collect();
    let kernel_ns = of_kernel.values().sum();
    if is_shown(kernel_ns) {
        let mut kinds: Vec<(String, u64)> = of_kernel.into_iter().filter(|(_, ns)| is_shown(*ns)).collect();
        kinds.sort_by_key(|(_, ns)| Reverse(*ns));
        let kinds = kinds.iter().take(MAX_KINDS).map(|(name, ns)| format!("{name} {:.0}%", percent(*ns)));
        let kinds = kinds.collect::<Vec<_>>().join(", ");
        let kinds = if kinds.is_empty() { String::new() } else { format!(" ({kinds})") };
        shares.push(format!("kernel {:.0}%{kinds}", percent(kernel_ns)));
    }
    if is_shown(work.not_sampled_ns) {
        shares.push(format!("not sampled {:.0}%", percent(work.not_sampled_ns)));
    }
    let rough = if work.equal_samples < MANY_SAMPLES { "; shares are rough" } else { "" };
    let worked = format!("Worked {:.0}% ({} samples{rough})", percent(work.ns), work.samples);
    (!shares.is_empty()).then(|| format!("{worked}: {}.", shares.join("; ")))
}

fn function(part: &WorkPart) -> String {
    let Some(name) = &part.name else { return "in code without names".to_owned() };
    let name = printable(without_parameters(name));
    let name = match name.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name,
    };
    if part.is_caller { format!("called by {name}") } else { format!("in {name}") }
}

/// Returns the name of a C++ function without its parameters.
fn without_parameters(name: &str) -> &str {
    let end = name.find('(').filter(|&end| end > 0 && !name[..end].ends_with("operator"));
    end.map_or(name, |end| &name[..end])
}

/// Returns the words for kernel work.
fn kernel_words(part: &WorkPart) -> String {
    match (part.kind, &part.name) {
        (WorkKind::Syscall, Some(call)) => printable(call),
        (kind, _) => match kind {
            WorkKind::User | WorkKind::Kernel | WorkKind::NotSampled => "other",
            WorkKind::Syscall => "system calls",
            WorkKind::PageFault => "page faults",
            WorkKind::Fork => "fork",
            WorkKind::Exec => "exec",
            WorkKind::Exit => "exit",
            WorkKind::Reclaim => "memory reclaim",
        }
        .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(thread: &str, kind: WorkKind, name: Option<&str>, samples: u64) -> WorkPart {
        let name = name.map(str::to_owned);
        WorkPart { thread: thread.to_owned(), kind, name, is_caller: false, samples, ns: samples * 1_000 }
    }

    #[test]
    fn programs_come_before_the_kernel_with_their_functions() {
        use WorkKind::{Exec, Fork, PageFault, Syscall, User};
        let parts = vec![
            part("cc1", User, Some("parse_expr"), 310),
            part("cc1", User, Some("ggc_alloc"), 120),
            part("cc1", PageFault, None, 80),
            part("as", User, None, 60),
            part("sh", Fork, None, 40),
            part("sh", Exec, None, 30),
            part("as", PageFault, None, 10),
            part("cc1", Syscall, Some("write"), 20),
            part("cc1", User, Some("rare"), 9),
        ];
        let samples = parts.iter().map(|part| part.samples).sum();
        let work = Work { ns: samples * 1_000, samples, equal_samples: samples, parts, ..Work::default() };
        assert_eq!(
            sentence(&work, 1_000_000).as_deref(),
            Some(
                "Worked 68% (679 samples): cc1 44% (31% in parse_expr, 12% in ggc_alloc); as 6% (6% in code without names); \
                 kernel 18% (page faults 9%, fork 4%, exec 3%, write 2%)."
            )
        );
    }

    #[test]
    fn function_is_short_and_says_what_has_no_name() {
        let words = |name, is_caller| function(&WorkPart { is_caller, ..part("cc1", WorkKind::User, Some(name), 1) });
        assert_eq!(words("ht_lookup(ht*, int)", false), "in ht_lookup");
        assert_eq!(words("A::operator()(int)", false), "in A::operator()(int)");
        assert_eq!(words("toplev::main(int, char**)", true), "called by toplev::main");
        let long = words(&"x".repeat(100), false);
        assert_eq!(long, format!("in {}...", "x".repeat(MAX_NAME)));
    }

    #[test]
    fn few_samples_have_no_shares() {
        let work = |samples| Work {
            ns: samples * 1_000,
            samples,
            equal_samples: samples,
            parts: vec![part("cc1", WorkKind::User, Some("main"), samples)],
            ..Work::default()
        };
        assert_eq!(sentence(&work(19), 20_000), None);
        assert_eq!(
            sentence(&work(20), 20_000).as_deref(),
            Some("Worked 100% (20 samples; shares are rough): cc1 100% (100% in main).")
        );
        assert_eq!(sentence(&work(20), 20_000_000), None, "the work is no part of the time");
    }

    #[test]
    fn work_without_samples_and_rare_functions_are_no_shares_of_functions() {
        use WorkKind::{NotSampled, User};
        let parts = vec![
            WorkPart { ns: 300_000, ..part("web", NotSampled, None, 0) },
            part("web", User, Some("serve"), 96),
            part("web", User, Some("rare"), 4),
        ];
        let (samples, not_sampled_ns) = (100, 300_000);
        let work = Work { ns: 400_000, samples, equal_samples: samples, not_sampled_ns, parts, ..Work::default() };
        let expected = "Worked 100% (100 samples): web 25% (24% in serve); not sampled 75%.";
        assert_eq!(sentence(&work, 400_000).as_deref(), Some(expected));
    }
}
