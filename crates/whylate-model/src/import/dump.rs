// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parser of dumps of Linux's `/proc/PID/stack`: one line per frame, innermost first.

use super::safe;
use crate::name::CUT;
use crate::paste::{ELLIPSES, Form, Piece};
use crate::text::function;

/// A parsed line of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Frame(String),
    /// `[<ffffffffffffffff>] 0xffffffffffffffff`, the end marker of stacks up to Linux 4.x.
    End,
    /// `? function`: an unreliable frame, possibly of an earlier call.
    Guess,
    /// An address without a function.
    Address,
    /// `[module]`, the rest of the previous line.
    Module,
    Other,
}

impl Row {
    pub(super) fn parse(line: &str) -> Self {
        let line = file(line).map_or(line, |(_, rest)| rest).trim();
        let Some(rest) = line.strip_prefix("[<") else {
            let module = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
            let is_name =
                |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            return if module.is_some_and(is_name) { Row::Module } else { Row::Other };
        };
        match rest.split_once(">]").and_then(|(_, frame)| frame.split_whitespace().next()) {
            None => Row::Address,
            Some("?") => Row::Guess,
            // Of either width, possibly cut off.
            Some(symbol) if is_end(symbol) => Row::End,
            // No function name contains `+`; the text after it may be cut off.
            Some(symbol) => Row::Frame(safe(function(symbol).split('+').next().unwrap_or_default())),
        }
    }
}

/// Splits a line of `grep . /proc/*/stack` into the file and the rest: `/proc/812/stack:[<0>] function+0x12/0x34`.
pub(super) fn file(line: &str) -> Option<(&str, &str)> {
    let (file, rest) = line.trim_start().split_once(':')?;
    (file.ends_with("/stack") && !file.contains(char::is_whitespace) && rest.starts_with("[<")).then_some((file, rest))
}

/// Functions in which stacks of system calls, new threads and interrupted user code start, by prefix.
const ENTRIES: [&str; 16] = [
    "entry_SYS",
    "entry_INT80",
    "system_call",
    "sysenter_",
    "tracesys",
    "ret_from_fork",
    "ret_fast_syscall",
    "ret_from_exception",
    "ret_from_syscall",
    "kernel_thread_helper",
    "handle_exception",
    "el0_svc",
    "el0_sync",
    "el0_da",
    "el0t_",
    "__start_kernel",
];

/// Minimum length of a truncated name that is taken for one of these.
const MIN_ENTRY_BYTES: usize = 4;

/// Parts of the names of functions that copy to or from user memory, some of them inline.
const COPIES: [&str; 11] = [
    "user",
    "copy",
    "rep_",
    "fault_in",
    "filldir",
    "do_sys_poll",
    "ep_send_events",
    "rt_frame",
    "sigcontext",
    "waitid",
    "select",
];

/// Returns whether a frame is a user address, which 32-bit arm prints after the entry. Kernel addresses there start at
/// 0xbf000000 (modules).
fn is_user_address(frame: &str) -> bool {
    let address = frame.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    address.is_some_and(|address| address < 0xbf00_0000)
}

/// Returns whether a frame can only start the next stack: the one before it was the outermost of its stack. Stacks of one
/// file after another have nothing else between them.
pub(super) fn starts_next(frame: &str, before: &str) -> bool {
    // `do_el0_svc` calls `el0_svc_common` (arm64).
    let is_entry = |name: &str| match name.strip_suffix(CUT) {
        Some(start) => {
            start.len() >= MIN_ENTRY_BYTES
                && ENTRIES.iter().any(|entry| start.starts_with(entry) || entry.starts_with(start))
        }
        None => name == "do_el0_svc" || is_user_address(name) || ENTRIES.iter().any(|entry| name.starts_with(entry)),
    };
    // A fault may come while the kernel copies to or from user memory.
    let is_copy = |name: &str| COPIES.iter().any(|part| name.contains(part));
    match before.starts_with("asm_exc_") {
        true => !is_copy(frame),
        false => is_entry(before) && !is_entry(frame),
    }
}

/// Returns whether a line is the rest of a frame: `x12/0x34 [module]`, `dule]`.
pub(super) fn is_rest(line: &str) -> bool {
    let line = line.trim();
    let (offset, module) = line.rsplit_once('[').unwrap_or(match line.ends_with(']') {
        true => ("", line),
        false => (line, "]"),
    });
    let is_offset = |byte: u8| byte.is_ascii_hexdigit() || b"x/".contains(&byte);
    !line.is_empty() && module.ends_with(']') && offset.trim().bytes().all(is_offset)
}

fn is_end(symbol: &str) -> bool {
    let start = ELLIPSES.iter().find_map(|ellipsis| symbol.strip_suffix(ellipsis)).unwrap_or(symbol);
    !start.is_empty() && "0xffffffffffffffff".starts_with(start)
}

/// Returns the function of a line of proc_pid_stack(5), `[<0>] function+0x12/0x34 [module]`.
pub fn kernel_frame(line: &str) -> Option<String> {
    match Row::parse(line) {
        Row::Frame(name) => Some(name),
        _ => None,
    }
}

/// Format of `/proc/PID/stack`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dump;

impl Form for Dump {
    fn piece(&self, line: &str) -> Piece {
        match Row::parse(line) {
            Row::Frame(_) if !line.contains("+0x") => Piece::Begins,
            Row::Frame(_) | Row::End | Row::Guess => Piece::Whole,
            Row::Module => Piece::Own,
            // The function is in the next line.
            Row::Address => Piece::Begins,
            Row::Other => Piece::Other,
        }
    }

    fn subject<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.split_once(">]").map(|(_, symbol)| function(symbol))
    }

    fn can_continue(&self, line: &str) -> bool {
        line.trim_start().starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') && line.contains("0x")
    }

    fn is_ended_by_blanks(&self) -> bool {
        true
    }

    fn is_same(&self, one: &str, other: &str) -> bool {
        Row::parse(one) == Row::parse(other)
    }
}
