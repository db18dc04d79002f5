// SPDX-License-Identifier: MIT OR Apache-2.0
//! Says in which functions threads worked.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use whylate_model::units::{format_ns, printable};
use whylate_model::work::{Work, WorkKind, WorkPart};

/// Minimum number of samples for shares: a half of that many is 28 to 72 % in 19 of 20 runs.
const MIN_SAMPLES: u64 = 20;
/// Number of samples from which a share is right within a tenth of the whole.
const MANY_SAMPLES: u64 = 100;
/// Smaller shares of the time are left out.
const SHOWN_PERCENT: f64 = 1.0;
/// Minimum number of samples of a program, a function or a kind of kernel work that is shown.
const MIN_SAMPLES_OF_PART: u64 = 5;
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

/// Returns a sentence about the work, with shares of its time; `None` if there are too few samples.
pub(super) fn sentence(work: &Work) -> Option<String> {
    if !has_enough_samples(work) {
        return None;
    }
    let percent = |ns: u64| ns as f64 * 100.0 / work.ns.max(1) as f64;
    let is_shown = |sum: &Sum| percent(sum.ns) >= SHOWN_PERCENT && sum.samples >= MIN_SAMPLES_OF_PART;
    let mut of_programs: BTreeMap<&str, Program<'_>> = BTreeMap::new();
    let mut of_kernel: BTreeMap<String, Sum> = BTreeMap::new();
    let sampled = work.parts.iter().chain(&work.further).filter(|part| part.kind != WorkKind::NotSampled);
    for part in sampled {
        if part.kind == WorkKind::User {
            let program = of_programs.entry(without_number(&part.thread)).or_default();
            program.names.insert(&part.thread);
            program.sum.add(part);
            program.functions.entry(function(part)).or_default().add(part);
        } else {
            of_kernel.entry(kernel_words(part)).or_default().add(part);
        }
    }
    let mut kernel = Sum::default();
    of_kernel.values().for_each(|sum| (kernel.ns, kernel.samples) = (kernel.ns + sum.ns, kernel.samples + sum.samples));
    let mut programs: Vec<_> = of_programs.into_iter().filter(|(_, program)| is_shown(&program.sum)).collect();
    programs.sort_by_key(|(_, program)| Reverse(program.sum.ns));
    programs.truncate(MAX_PROGRAMS);
    let mut shares: Vec<String> = Vec::new();
    let mut left_ns = work.ns.saturating_sub(work.not_sampled_ns);
    for (stem, program) in programs {
        left_ns = left_ns.saturating_sub(program.sum.ns);
        let name = match program.names.first() {
            Some(name) if program.names.len() == 1 => printable(name),
            _ => printable(&format!("{stem}*")),
        };
        let mut functions: Vec<(String, Sum)> =
            program.functions.into_iter().filter(|(_, sum)| is_shown(sum)).collect();
        functions.sort_by_key(|(_, sum)| Reverse(sum.ns));
        let functions = functions.iter().take(MAX_FUNCTIONS);
        let functions = functions.map(|(function, sum)| format!("{:.0}% {function}", percent(sum.ns)));
        shares.push(format!("{name} {:.0}%{}", percent(program.sum.ns), in_brackets(functions)));
    }
    if is_shown(&kernel) {
        left_ns = left_ns.saturating_sub(kernel.ns);
        let mut kinds: Vec<(String, Sum)> = of_kernel.into_iter().filter(|(_, sum)| is_shown(sum)).collect();
        kinds.sort_by_key(|(_, sum)| Reverse(sum.ns));
        let kinds = kinds.iter().take(MAX_KINDS).map(|(name, sum)| format!("{name} {:.0}%", percent(sum.ns)));
        shares.push(format!("kernel {:.0}%{}", percent(kernel.ns), in_brackets(kinds)));
    }
    for (name, ns) in [("others", left_ns), ("not sampled", work.not_sampled_ns)] {
        if percent(ns) >= SHOWN_PERCENT {
            shares.push(format!("{name} {:.0}%", percent(ns)));
        }
    }
    let rough = if work.equal_samples < MANY_SAMPLES { "; shares are rough" } else { "" };
    let worked = format!("Worked {} ({} samples{rough})", format_ns(work.ns), work.samples);
    (!shares.is_empty()).then(|| format!("{worked}: {}.", shares.join("; ")))
}

/// Sum of parts of the work.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    ns: u64,
    samples: u64,
}

impl Sum {
    fn add(&mut self, part: &WorkPart) {
        (self.ns, self.samples) = (self.ns + part.ns, self.samples + part.samples);
    }
}

/// Work of threads with names that differ only in the number at the end.
#[derive(Debug, Default)]
struct Program<'a> {
    names: BTreeSet<&'a str>,
    sum: Sum,
    functions: BTreeMap<String, Sum>,
}

/// Returns a name without the number at its end, unless it is one.
fn without_number(name: &str) -> &str {
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    if stem.is_empty() { name } else { stem }
}

fn in_brackets(shares: impl Iterator<Item = String>) -> String {
    let shares = shares.collect::<Vec<_>>().join(", ");
    if shares.is_empty() { String::new() } else { format!(" ({shares})") }
}

fn function(part: &WorkPart) -> String {
    let Some(name) = &part.name else { return "in code without names".to_owned() };
    let name = printable(without_parameters(name));
    let name = if name.chars().count() > MAX_NAME { without_template_arguments(&name) } else { name };
    // The function is at the end, behind its modules or classes.
    let excess = name.chars().count().saturating_sub(MAX_NAME);
    let name = match name.char_indices().nth(excess) {
        Some((begin, _)) if excess > 0 => format!("...{}", &name[begin..]),
        _ => name,
    };
    if part.is_caller { format!("called by {name}") } else { format!("in {name}") }
}

/// Returns the name of a C++ function without its parameters: those in the last brackets, at the end or before `const`.
fn without_parameters(name: &str) -> &str {
    let whole = name.strip_suffix(" const").unwrap_or(name);
    if !whole.ends_with(')') {
        return name;
    }
    let mut depth = 0_usize;
    for (at, letter) in whole.char_indices().rev() {
        match letter {
            ')' => depth += 1,
            '(' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            let is_operator = at == 0 || whole[..at].ends_with("operator");
            return if is_operator { name } else { &whole[..at] };
        }
    }
    name
}

/// Returns a name with `<>` for the outermost template arguments, and for the type of a Rust method.
fn without_template_arguments(name: &str) -> String {
    let (mut kept, mut depth, mut before) = (String::new(), 0_usize, ' ');
    for letter in name.chars() {
        // Arrows and operators are no brackets.
        let is_bracket = before != '-' && !kept.ends_with("operator") && !kept.ends_with("operator<");
        if letter == '>' && is_bracket {
            depth = depth.saturating_sub(1);
        }
        if depth == 0 {
            kept.push(letter);
        }
        depth += usize::from(letter == '<' && is_bracket);
        before = letter;
    }
    kept
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
            sentence(&work).as_deref(),
            Some(
                "Worked 679us (679 samples): cc1 65% (46% in parse_expr, 18% in ggc_alloc, 1% in rare); as 9% (9% in code \
                 without names); kernel 27% (page faults 13%, fork 6%, exec 4%, write 3%)."
            )
        );
    }

    #[test]
    fn programs_with_many_functions_have_all_of_their_work() {
        let parts = |from: u64, to: u64| {
            (from..to).map(|at| part("cc1", WorkKind::User, Some(&format!("f{at}")), 2)).collect::<Vec<_>>()
        };
        let (mut first, mut further) = (parts(0, 100), parts(100, 300));
        first.push(part("as", WorkKind::User, Some("assemble"), 100));
        further.push(part("sh", WorkKind::User, Some("shell"), 4));
        further.extend(('a'..'y').map(|at| part(&format!("sed-{at}"), WorkKind::User, None, 4)));
        let samples = 800;
        let work = Work { ns: 800_000, samples, equal_samples: samples, parts: first, further, ..Work::default() };
        let expected = "Worked 800us (800 samples): cc1 75%; as 12% (12% in assemble); others 12%.";
        assert_eq!(sentence(&work).as_deref(), Some(expected));
    }

    #[test]
    fn threads_with_numbers_are_one_program() {
        let parts = (0..32).map(|at| part(&format!("pool-1-thread-{at}"), WorkKind::User, Some("handle"), 3));
        let mut parts: Vec<WorkPart> = parts.collect();
        parts.push(part("cc1", WorkKind::User, Some("main"), 4));
        let work = Work { ns: 100_000, samples: 100, equal_samples: 100, parts, ..Work::default() };
        let expected = "Worked 100us (100 samples): pool-1-thread-* 96% (96% in handle); others 4%.";
        assert_eq!(sentence(&work).as_deref(), Some(expected));
        assert_eq!(["cc1", "cc", "7"].map(without_number), ["cc", "cc", "7"]);
    }

    #[test]
    fn function_is_short_and_says_what_has_no_name() {
        let words = |name, is_caller| function(&WorkPart { is_caller, ..part("cc1", WorkKind::User, Some(name), 1) });
        assert_eq!(words("ht_lookup(ht*, int)", false), "in ht_lookup");
        assert_eq!(words("A::operator()(int) const", false), "in A::operator()");
        assert_eq!(words("A::operator()", false), "in A::operator()");
        assert_eq!(
            words("clang::(anonymous namespace)::visit(Decl*)", false),
            "in clang::(anonymous namespace)::visit"
        );
        assert_eq!(words("std::function<void (int)>::call(int) const", false), "in std::function<void (int)>::call");
        assert_eq!(
            words("<fn(u8) as core::ops::FnOnce>::call_once", false),
            "in <fn(u8) as core::ops::FnOnce>::call_once"
        );
        let template = "std::map<std::string, std::vector<int>, std::less<>>::find(int)";
        assert_eq!(words(template, false), "in std::map<>::find");
        let method = "<fn(Option<u8>) -> core::option::Option<u8> as core::ops::Fn>::call_once";
        assert_eq!(words(method, false), "in <>::call_once");
        assert_eq!(words("toplev::main(int, char**)", true), "called by toplev::main");
        let long = words(&format!("{}::parse", "x".repeat(100)), false);
        assert_eq!(long, format!("in ...{}::parse", "x".repeat(MAX_NAME - "::parse".len())));
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
        assert_eq!(sentence(&work(19)), None);
        assert_eq!(
            sentence(&work(20)).as_deref(),
            Some("Worked 20.0us (20 samples; shares are rough): cc1 100% (100% in main).")
        );
        let mut with_rare = work(96);
        with_rare.parts.push(part("cc1", WorkKind::Fork, None, 4));
        (with_rare.ns, with_rare.samples, with_rare.equal_samples) = (100_000, 100, 100);
        let expected = "Worked 100us (100 samples): cc1 96% (96% in main); others 4%.";
        assert_eq!(sentence(&with_rare).as_deref(), Some(expected), "four samples of fork are too few");
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
        let expected = "Worked 400us (100 samples): web 25% (24% in serve); not sampled 75%.";
        assert_eq!(sentence(&work).as_deref(), Some(expected));
    }
}
