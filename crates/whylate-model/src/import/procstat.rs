// SPDX-License-Identifier: MIT OR Apache-2.0
//! FreeBSD's `procstat -ka` and `procstat -kka`: a line per thread, with its stack, innermost frame first.

use super::safe;
use crate::paste::{Form, Piece};
use crate::text::function;

/// The first frame of a thread that is off its CPU, or what stands for it.
const INNERMOST: [&str; 6] = ["mi_switch", "sched_switch", "fork_trampoline", "<running>", "<swapped", "<no"];
/// The last frame of a stack: where the kernel is entered, or a thread of its own begins.
const OUTERMOST: [&str; 19] = [
    "fork_trampoline",
    "fast_syscall_common",
    "fast_syscall",
    "Xfast_syscall",
    "Xint0x80_syscall",
    "int0x80_syscall",
    "Xlcall_syscall",
    "btext",
    "mi_startup",
    "calltrap",
    "handle_el0_sync",
    "handle_el0_irq",
    "swi_entry",
    "cpu_exception_handler_user",
    "powerpc_interrupt",
    "trapexit",
    "<running>",
    "<swapped out>",
    "<no stack>",
];

/// The lines of `procstat -ka`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Procstat;

impl Form for Procstat {
    fn piece(&self, line: &str) -> Piece {
        if Heading::of(line).is_some() {
            return Piece::Own;
        }
        match Thread::of(line, &Heading::default()) {
            Some(thread) if thread.has_end() => Piece::Whole,
            Some(_) => Piece::Begins,
            None => Piece::Other,
        }
    }

    fn subject<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.split_whitespace().nth(1)
    }

    /// Names of functions alone, in the way that the kernel's are written.
    fn can_continue(&self, line: &str) -> bool {
        let is_function = |word: &str| {
            function(word).bytes().enumerate().all(|(at, byte)| {
                byte.is_ascii_alphanumeric() && (at > 0 || !byte.is_ascii_digit()) || b"_.$+".contains(&byte)
            })
        };
        line.split_whitespace().all(|word| is_function(word) || word.starts_with("0x"))
    }
}

/// Where columns begin that hold blanks, behind the start of the process's name: what stands before that is often
/// trimmed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heading {
    thread: Option<usize>,
    stack: Option<usize>,
}

impl Heading {
    /// Of a line `  PID    TID COMM             TDNAME           KSTACK`.
    pub(super) fn of(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let is_heading = words.next() == Some("PID") && words.any(|word| word == "KSTACK");
        let process = line.find("COMM");
        let behind = |name: &str| line.find(name)?.checked_sub(process?);
        is_heading.then(|| Heading { thread: behind("TDNAME"), stack: behind("KSTACK") })
    }
}

/// A thread and its stack.
#[derive(Debug)]
pub(super) struct Thread {
    pub process: String,
    pub name: String,
    /// Innermost first.
    pub frames: Vec<String>,
}

impl Thread {
    /// Of a line with the thread's numbers, names and stack.
    pub(super) fn of(line: &str, heading: &Heading) -> Option<Self> {
        let (pid, rest) = first_word(line)?;
        let (tid, names) = first_word(rest)?;
        if [pid, tid].iter().any(|number| number.parse::<u32>().is_err()) {
            return None;
        }
        let names = names.trim_start();
        // Where columns are not padded any more, the first frame is known by its name.
        let known = || {
            let mut words = names.match_indices(|c: char| !c.is_whitespace()).map(|(at, _)| at).filter(|&at| at > 0);
            let begins = |at: &usize| names[..*at].ends_with(char::is_whitespace);
            words.find(|at| {
                begins(at) && first_word(&names[*at..]).is_some_and(|(word, _)| INNERMOST.contains(&function(word)))
            })
        };
        let stack_at = known().or_else(|| heading.stack.filter(|&at| begins_column(names, at)))?;
        let (process, name) = match heading.thread.filter(|&at| at < stack_at && begins_column(names, at)) {
            Some(at) => (names[..at].trim(), names[at..stack_at].trim()),
            // Blanks are of the process's name where the thread has none.
            None => match names[..stack_at].trim().strip_suffix(" -") {
                Some(process) => (process.trim(), "-"),
                None => {
                    let (process, name) = first_word(&names[..stack_at])?;
                    (process, name.trim())
                }
            },
        };
        let frames = names[stack_at..].split_whitespace().map(|frame| safe(function(frame))).collect();
        let name = if name.is_empty() { "-" } else { name };
        Some(Thread { process: safe(process), name: safe(&squeezed(name)), frames })
    }

    /// Whether its outermost function is one in which stacks end, or something stands for the stack.
    pub(super) fn has_end(&self) -> bool {
        self.frames.last().is_some_and(|last| OUTERMOST.contains(&last.as_str()))
            || OUTERMOST.contains(&self.frames.join(" ").as_str())
    }
}

/// Whether a word begins there.
fn begins_column(line: &str, at: usize) -> bool {
    let parts = line.split_at_checked(at);
    parts.is_some_and(|(before, after)| {
        before.ends_with(char::is_whitespace) && after.starts_with(|c: char| !c.is_whitespace())
    })
}

fn first_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// With one blank between words, as those of a padded column and of another one are the same name.
fn squeezed(name: &str) -> String {
    name.split_whitespace().collect::<Vec<_>>().join(" ")
}
