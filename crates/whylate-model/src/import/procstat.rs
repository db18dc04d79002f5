// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parser of FreeBSD's `procstat -ka` and `procstat -kka`: one line per thread with its stack, innermost frame first.

use super::safe;
use crate::paste::{Form, Piece};
use crate::text::function;

/// Innermost frames of a thread off its CPU, or the text in place of a stack.
const INNERMOST: [&str; 6] = ["mi_switch", "sched_switch", "fork_trampoline", "<running>", "<swapped", "<no"];
/// Outermost frames of a stack: kernel entry, or start of a kernel thread; or the text in place of a stack.
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

/// Format of `procstat -ka`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Procstat;

impl Form for Procstat {
    fn piece(&self, line: &str) -> Piece {
        if Header::parse(line).is_some() {
            return Piece::Own;
        }
        match Thread::parse(line, &Header::default()) {
            Some(thread) if thread.has_end() => Piece::Whole,
            Some(_) => Piece::Begins,
            None => Piece::Other,
        }
    }

    fn subject<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.split_whitespace().nth(1)
    }

    /// Returns whether a line has only function names as FreeBSD writes them, possibly preceded by the end of an
    /// offset.
    fn can_continue(&self, line: &str) -> bool {
        let is_function = |word: &str| {
            function(word).bytes().enumerate().all(|(at, byte)| {
                byte.is_ascii_alphanumeric() && (at > 0 || !byte.is_ascii_digit()) || b"_.$+".contains(&byte)
            })
        };
        let mut words = line.split_whitespace();
        words.all(|word| is_function(word) || word.starts_with("0x")) || {
            let (first, rest) = first_word(line).unwrap_or_default();
            first.bytes().all(|byte| byte.is_ascii_hexdigit())
                && rest.split_whitespace().all(|word| is_function(word) && word.contains("+0x"))
        }
    }
}

/// Offsets of columns that may contain blanks, relative to the start of the process's name: the text before that is
/// often trimmed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Header {
    thread: Option<usize>,
    stack: Option<usize>,
}

impl Header {
    /// Returns whether a line contains the header, possibly after a prefix.
    pub(super) fn is_in(line: &str) -> bool {
        line.match_indices("PID").take(8).any(|(at, _)| Header::parse(&line[at..]).is_some())
    }

    /// Parses the header line `  PID    TID COMM             TDNAME           KSTACK`.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let is_header = words.next() == Some("PID") && words.any(|word| word == "KSTACK");
        let process = line.find("COMM");
        let behind = |name: &str| line.find(name)?.checked_sub(process?);
        is_header.then(|| Header { thread: behind("TDNAME"), stack: behind("KSTACK") })
    }
}

/// A thread and its stack.
#[derive(Debug)]
pub(super) struct Thread {
    pub process: String,
    pub name: String,
    /// Innermost frame first.
    pub frames: Vec<String>,
}

impl Thread {
    /// Parses a line with the thread's IDs, names and stack.
    pub(super) fn parse(line: &str, header: &Header) -> Option<Self> {
        let (pid, rest) = first_word(line)?;
        let (tid, names) = first_word(rest)?;
        if [pid, tid].iter().any(|number| number.parse::<u32>().is_err()) {
            return None;
        }
        let names = names.trim_start();
        // TIDs of FreeBSD start at 100000: a smaller second number is a PID after a line number.
        let is_tid = |word: &str| word.len() >= 6 && word.parse::<u32>().is_ok();
        if !is_tid(tid) && first_word(names).is_some_and(|(word, _)| is_tid(word)) {
            return None;
        }
        // If the columns are not padded, the first frame is recognized by its name.
        let by_name = || {
            let mut words = names.match_indices(|c: char| !c.is_whitespace()).map(|(at, _)| at).filter(|&at| at > 0);
            let begins = |at: &usize| names[..*at].ends_with(char::is_whitespace);
            words.find(|at| {
                begins(at) && first_word(&names[*at..]).is_some_and(|(word, _)| INNERMOST.contains(&function(word)))
            })
        };
        let stack_at = by_name().or_else(|| header.stack.filter(|&at| begins_column(names, at)))?;
        let (process, name) = match header.thread.filter(|&at| at < stack_at && begins_column(names, at)) {
            Some(at) => (names[..at].trim(), names[at..stack_at].trim()),
            // Blanks belong to the process's name if the thread is unnamed.
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

    /// Returns whether the only frame is a truncated name: each complete stack starts with one of [`INNERMOST`].
    pub(super) fn is_cut_in_first_frame(&self) -> bool {
        self.frames.len() == 1 && !INNERMOST.contains(&self.frames[0].as_str()) && !self.has_end()
    }

    /// Returns whether the stack ends in a known outermost function, or other text stands in place of a stack.
    pub(super) fn has_end(&self) -> bool {
        self.frames.last().is_some_and(|last| OUTERMOST.contains(&last.as_str()))
            || OUTERMOST.contains(&self.frames.join(" ").as_str())
    }
}

/// Returns whether a word starts at `at`.
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

/// Collapses blanks, so that a name from a padded column equals the one from another column.
fn squeezed(name: &str) -> String {
    name.split_whitespace().collect::<Vec<_>>().join(" ")
}
