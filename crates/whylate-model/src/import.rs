// SPDX-License-Identifier: MIT OR Apache-2.0
//! Imports stacks from the output of other tools: FreeBSD's `procstat -ka`, dumps of `/proc/PID/stack`, and folded
//! stacks.

mod dump;
mod procstat;

use std::collections::BTreeMap;

use thiserror::Error;

pub use self::dump::kernel_frame;
use self::dump::{Dump, Row};
use self::procstat::{Header, Procstat, Thread};
use crate::name::{CUT, bounded};
use crate::paste::{ELLIPSES, Form, Lines, PasteError, Piece};
use crate::text;

/// Reason why a text could not be imported.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The alterations of its lines cannot be undone.
    #[error(transparent)]
    Paste(#[from] PasteError),
    /// Each line has more than one count.
    #[error(
        "each of its lines has {0} counts, as those of a difference have: keep one, e.g. \
         awk '{{ n = $NF; NF -= {0}; print $0, n }}' keeps the last one"
    )]
    SeveralCounts(usize),
    /// The text is in none of the formats.
    #[error("this is no output of procstat -ka, no dump of /proc/PID/stack and no folded lines")]
    UnknownForm,
    /// All stacks are deeper than [`DEEPEST`], or longer than [`text::LONGEST_LINE`].
    #[error(
        "each of its stacks has more than {DEEPEST} frames, or is longer than 1 MiB: keep the innermost frames only"
    )]
    TooLong,
    /// The sum of all counts would overflow.
    #[error("the counts add up to more than {}: give them in a larger unit", u64::MAX)]
    CountsTooLarge,
}

/// Maximum number of frames of a stack: a taller graph is unreadable.
pub const DEEPEST: usize = 4 << 10;

/// Labels at the start of a stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// No names.
    Nothing,
    /// Name of the process.
    #[default]
    Process,
    /// Names of the process and the thread.
    Thread,
}

/// Order of frames in a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Outermost function first, as in flame graphs.
    #[default]
    RootFirst,
    /// Innermost function first, as procstat prints them: sorting groups threads by what they wait in, whatever the
    /// caller.
    LeafFirst,
}

/// Counts by stack, with the outermost frame first, whatever the order of the tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Number of occurrences by labels and frames.
    pub stacks: BTreeMap<(Vec<String>, Vec<String>), u64>,
    /// Number of lines not in the format.
    pub unread: u64,
    /// Number of stacks that may lack frames: their lines were cut off, or end in no known outermost function.
    pub cut: u64,
    /// Alterations of the lines that were undone.
    pub undone: Vec<String>,
    /// Number of stacks left out for having more than [`DEEPEST`] frames, or more than [`text::LONGEST_LINE`] bytes.
    pub too_long: u64,
    /// Sum of all counts.
    total: u64,
}

impl Imported {
    /// Parses a text in any of the formats.
    ///
    /// # Errors
    /// Fails if the text is in none of them, all its stacks are too long, or its counts too large.
    pub fn read(text: &str, names: Names) -> Result<Self, ImportError> {
        let mut imported = Imported::default();
        // The text may include what surrounded it where it was copied.
        let procstat = Lines::new(text.as_bytes(), Procstat, text::LONGEST_LINE + 1)?;
        if procstat.has_records() || text.lines().any(|line| Header::parse(line).is_some()) {
            imported.read_procstat(procstat, names)?;
        } else {
            let dump = Lines::new(text.as_bytes(), Dump, text::LONGEST_LINE + 1)?;
            if dump.has_records() || text.lines().any(|line| kernel_frame(line).is_some()) {
                imported.read_dump(dump, names, text.contains("+0x"))?;
            } else {
                imported.read_folded(Lines::new(text.as_bytes(), Folded, text::LONGEST_LINE + 1)?)?;
            }
        }
        match imported.stacks.is_empty() {
            true if imported.too_long > 0 => Err(ImportError::TooLong),
            true if !text.trim().is_empty() => Err(ImportError::UnknownForm),
            _ => Ok(imported),
        }
    }

    /// Adds the stacks of another file, of a later sample.
    ///
    /// # Errors
    /// Fails if the counts of both together are too large.
    pub fn merge(&mut self, other: Imported) -> Result<(), ImportError> {
        for (stack, count) in other.stacks {
            self.add(stack, count)?;
        }
        self.unread += other.unread;
        self.cut += other.cut;
        self.undone.extend(other.undone);
        self.too_long += other.too_long;
        Ok(())
    }

    /// Returns sorted folded lines with counts: labels, then frames in this order.
    pub fn lines(&self, order: Order) -> Vec<String> {
        let line = |((labels, frames), count): (&(Vec<String>, Vec<String>), &u64)| {
            let mut all: Vec<&str> = labels.iter().chain(frames).map(String::as_str).collect();
            if order == Order::LeafFirst {
                all[labels.len()..].reverse();
            }
            crate::folded::line(&all.join(";"), *count)
        };
        let mut lines: Vec<String> = self.stacks.iter().map(line).collect();
        lines.sort_unstable();
        lines
    }

    fn count(&mut self, labels: Vec<String>, frames: Vec<String>, times: u64) -> Result<(), ImportError> {
        if frames.len() > DEEPEST {
            self.too_long += 1;
            return Ok(());
        }
        self.add((labels, frames), times)
    }

    /// Counts are untrusted input, and a graph adds them all up.
    fn add(&mut self, stack: (Vec<String>, Vec<String>), times: u64) -> Result<(), ImportError> {
        self.total = self.total.checked_add(times).ok_or(ImportError::CountsTooLarge)?;
        *self.stacks.entry(stack).or_default() += times;
        Ok(())
    }

    fn read_procstat(&mut self, mut lines: Lines<&[u8], Procstat>, names: Names) -> Result<(), ImportError> {
        let mut header = Header::default();
        let mut line = String::new();
        while lines.next(&mut line).map_err(PasteError::Io)? {
            let text = line.trim_end();
            if let Some(columns) = Header::parse(text) {
                header = columns;
                continue;
            }
            if text.len() > text::LONGEST_LINE {
                self.too_long += 1;
                continue;
            }
            let Some(mut thread) = Thread::parse(text, &header) else {
                self.unread += u64::from(!text.is_empty());
                continue;
            };
            self.cut += u64::from(!thread.has_end());
            if let Some(last) = thread.frames.last_mut().filter(|_| lines.is_cut(&line)) {
                *last = cut(last);
            }
            let Thread { process, name, frames } = thread;
            let labels = match names {
                Names::Nothing => Vec::new(),
                Names::Process => vec![process],
                Names::Thread => vec![process, name],
            };
            self.count(labels, frames.into_iter().rev().collect(), 1)?;
        }
        self.undone = lines.undone();
        Ok(())
    }

    fn read_dump(&mut self, mut lines: Lines<&[u8], Dump>, names: Names, has_offsets: bool) -> Result<(), ImportError> {
        let mut label = None;
        let mut frames: Vec<String> = Vec::new();
        let mut line = String::new();
        loop {
            let is_any = lines.next(&mut line).map_err(PasteError::Io)?;
            match if is_any { Row::parse(&line) } else { Row::End } {
                // One frame above the limit shows that the stack is too deep.
                Row::Frame(frame) => {
                    let is_whole = !has_offsets || line.contains("+0x") || frame.starts_with("0x");
                    let is_cut = !is_whole || lines.is_cut(&line);
                    self.cut += u64::from(is_cut);
                    if frames.len() <= DEEPEST {
                        frames.push(if is_cut { cut(&frame) } else { frame });
                    }
                    continue;
                }
                Row::Address => {
                    self.cut += 1;
                    // The mark stands for one or more frames.
                    if frames.last().is_none_or(|last| last != CUT) {
                        frames.push(CUT.to_owned());
                    }
                    continue;
                }
                Row::Module => continue,
                Row::Guess => {
                    self.unread += 1;
                    continue;
                }
                Row::Other if !frames.is_empty() && dump::is_rest(&line) => {
                    self.unread += 1;
                    continue;
                }
                Row::End | Row::Other => {}
            }
            if !frames.is_empty() {
                // The kernel prints the innermost frame first.
                let outermost_first: Vec<String> = std::mem::take(&mut frames).into_iter().rev().collect();
                let labels = if names == Names::Nothing { Vec::new() } else { label.take().into_iter().collect() };
                self.count(labels, outermost_first, 1)?;
            }
            if !is_any {
                break;
            }
            // A line that is no frame ends a stack, and names the thread of the next one.
            let header = line.trim().trim_start_matches("==>").trim_end_matches("<==").trim();
            if !header.is_empty() && Row::parse(&line) != Row::End {
                // The next thread is named by its path, or in a header of tail(1); other text may be a part of a line.
                let is_header = line.contains("/proc/") || line.contains("==>");
                self.unread += u64::from(!is_header);
                let path =
                    header.split_whitespace().find(|word| word.starts_with("/proc/") && word.ends_with("/stack"));
                label = path.or(Some(header).filter(|header| !is_prose(header))).map(safe);
            }
        }
        self.undone = lines.undone();
        Ok(())
    }

    fn read_folded(&mut self, mut lines: Lines<&[u8], Folded>) -> Result<(), ImportError> {
        let mut line = String::new();
        // Minimum number of counts at the end of each line.
        let mut counts = usize::MAX;
        let (mut after_part, mut has_frames) = (false, false);
        while lines.next(&mut line).map_err(PasteError::Io)? {
            let text = line.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let is_part =
                std::mem::replace(&mut after_part, Folded.piece(text) == Piece::Begins) && !text.contains(';');
            match folded(text) {
                _ if text.len() > text::LONGEST_LINE => self.too_long += 1,
                // Its count may lack digits, or it is the rest of the previous line.
                Some(_) if lines.is_cut(&line) || is_part => self.unread += 1,
                Some((frames, _)) if is_quoted(frames) || is_prose(frames) => self.unread += 1,
                Some((frames, count)) => {
                    has_frames |= frames.contains(';');
                    let numbers = frames.split(' ').rev().take_while(|word| word.parse::<u64>().is_ok()).count();
                    counts = counts.min(1 + numbers);
                    let frames = frames.split(';').take(DEEPEST + 1).map(safe).collect();
                    self.count(Vec::new(), frames, count)?;
                }
                None => self.unread += 1,
            }
        }
        // A name may end in a number if the lines have no frames that delimit it.
        if has_frames && (2..usize::MAX).contains(&counts) {
            return Err(ImportError::SeveralCounts(counts));
        }
        self.undone = lines.undone();
        Ok(())
    }
}

/// Folded stacks.
#[derive(Clone, Copy, Debug, Default)]
struct Folded;

impl Form for Folded {
    fn piece(&self, line: &str) -> Piece {
        let line = line.trim();
        match folded(line) {
            _ if line.is_empty() || line.starts_with('#') => Piece::Own,
            Some((frames, _)) if is_quoted(frames) || is_prose(frames) => Piece::Other,
            Some(_) => Piece::Whole,
            None if line.contains(';') => Piece::Begins,
            None => Piece::Other,
        }
    }

    fn subject<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.split(';').next()
    }

    fn can_continue(&self, _line: &str) -> bool {
        true
    }

    fn has_open_end(&self, _line: &str, is_at_edge: bool) -> bool {
        is_at_edge
    }

    fn is_rest_alike(&self) -> bool {
        true
    }
}

/// Returns whether a line has a prefix that was not undone.
fn is_quoted(frames: &str) -> bool {
    frames.starts_with('>') || frames.contains('\t') || frames.contains("=\"")
}

/// Returns whether a line, or the text before its count, is a shell command or a sentence.
fn is_prose(text: &str) -> bool {
    let words = || text.split_whitespace();
    let has_prompt = || words().count() > 1 && words().take(2).any(|word| word.ends_with(['$', '#', '%']));
    let is_function = text.contains(['(', ':']);
    !text.contains(';') && (words().count() > 3 && !is_function || has_prompt())
}

/// Parses a folded line into its frames and count.
fn folded(line: &str) -> Option<(&str, u64)> {
    let (frames, count) = line.rsplit_once(' ')?;
    Some((frames, count.parse().ok()?))
}

/// Marks a name with its end missing.
fn cut(name: &str) -> String {
    let start = ELLIPSES.iter().find_map(|ellipsis| name.strip_suffix(ellipsis)).unwrap_or(name);
    // No function name contains the sign of an offset.
    format!("{}{CUT}", start.split('+').next().unwrap_or_default())
}

/// A name as a line may have it, of bounded length.
fn safe(name: &str) -> String {
    crate::folded::safe(&bounded(name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The columns as procstat pads them: 5, 6, 16 and 16 characters wide.
    const PADDED: &str = "\
  PID    TID COMM             TDNAME           KSTACK                       
    0 100000 kernel           swapper          mi_switch sleepq_timedwait _sleep swapper btext 
    0 100023 kernel           firmware taskq   mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline 
    0 100025 kernel           kqueue taskq     mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline 
  812 100110 nginx            -                mi_switch sleepq_catch_signals sleepq_wait_sig _sleep kern_kevent sys_kevent amd64_syscall Xfast_syscall 
";

    #[test]
    fn refuses_overflowing_counts() {
        let read = |text: String| Imported::read(&text, Names::Thread);
        let mut largest = read(format!("a;b {}\na;c 1\n", u64::MAX - 1)).expect("as much as there can be");
        assert!(matches!(largest.merge(largest.clone()), Err(ImportError::CountsTooLarge)));
        for twice in ["a", "b"].map(|other| format!("a {0}\n{other} {0}\n", u64::MAX)) {
            assert!(matches!(read(twice), Err(ImportError::CountsTooLarge)));
        }
    }

    #[test]
    fn counts_and_skips_too_deep_stacks() {
        let deep = |frames: usize| format!("{}f 1\n", "f;".repeat(frames - 1));
        let read = |text: &str| {
            let read = Imported::read(text, Names::Thread).map(|read| (read.stacks.len(), read.too_long));
            read.map_err(|error| error.to_string())
        };
        assert_eq!(read(&format!("{}{}", deep(DEEPEST), deep(DEEPEST + 1))), Ok((1, 1)));
        assert_eq!(read(&deep(2_000_000)), Err(ImportError::TooLong.to_string()));
        assert_eq!(read(&format!("{} 1\na 1\n", "f".repeat(text::LONGEST_LINE + 1))), Ok((1, 1)));
        assert_eq!(read(&format!("==> a <==\n{}\n==> b <==\n[<0>] g\n", "[<0>] f\n".repeat(DEEPEST + 1))), Ok((1, 1)));
        assert_eq!(
            read(&format!("0 1 kernel swapper mi_switch{}\n", " f".repeat(DEEPEST))),
            Err(ImportError::TooLong.to_string())
        );
    }

    #[test]
    fn cuts_long_names() {
        let long = "f".repeat(70_000);
        for text in [
            format!("{long};b 1\n"),
            format!("==> {long} <==\n[<0>] {long}+0x1/0x2\n"),
            format!("0 1 {long} {long} mi_switch {long}\n"),
        ] {
            let read = Imported::read(&text, Names::Thread).expect("it is one of the forms");
            let names = || read.stacks.keys().flat_map(|(labels, frames)| labels.iter().chain(frames));
            assert!(
                names().all(|name| name.len() <= crate::name::MAX_BYTES) && names().any(|name| name.ends_with("[cut]"))
            );
        }
    }

    #[test]
    fn number_at_end_of_name_is_no_count() {
        let read = Imported::read("a;worker 9223372036854775808 1\nb 2\n", Names::Thread).expect("folded lines");
        assert_eq!(read.lines(Order::RootFirst), ["a;worker_9223372036854775808 1", "b 2"]);
    }

    #[test]
    fn refuses_lines_with_several_counts() {
        for (text, counts) in [("a;b 3 5\na;c 0 7\n", 2), ("# diff\na;b 1 2 3\na;c 4 5 6\n", 3), ("a;b 3 5\n", 2)] {
            let refused =
                Imported::read(text, Names::Process).expect_err("which count is meant is not known").to_string();
            assert!(refused.starts_with(&format!("each of its lines has {counts} counts")), "{refused}");
        }
    }

    #[test]
    fn parses_procstat_with_offsets_and_without_columns() {
        let wide = "\
  PID    TID COMM             TDNAME           KSTACK                       
  812 100110 Web Content      -                mi_switch+0xbc _sleep+0x29b sys_kevent+0x61 fast_syscall_common+0xf8
  813 100111 Web Content      io worker        mi_switch+0xbc _sleep+0x29c sys_kevent+0x74 fast_syscall_common+0xf8
";
        let read = |text: &str, names| Imported::read(text, names).expect("it is procstat's").lines(Order::RootFirst);
        assert_eq!(read(wide, Names::Nothing), ["fast_syscall_common;sys_kevent;_sleep;mi_switch 2"]);
        assert_eq!(read(wide, Names::Process), ["Web Content;fast_syscall_common;sys_kevent;_sleep;mi_switch 2"]);
        assert_eq!(
            read(wide, Names::Thread)[1],
            "Web Content;io worker;fast_syscall_common;sys_kevent;_sleep;mi_switch 1"
        );
        // A long name moves the stack out of its column; no letter is lost.
        let moved = "  PID    TID COMM             TDNAME           KSTACK\n    5 100042 a_much_longer_process_name thread 7         \
                     mi_switch _sleep fork_trampoline\n";
        assert_eq!(read(moved, Names::Process), ["a_much_longer_process_name;fork_trampoline;_sleep;mi_switch 1"]);
        // Without a header, and without the column of thread names.
        for text in [
            "5 100042 ctld mi_switch+0xe2 fork_trampoline+0xe\n",
            "See:\n  5 100042 ctld - mi_switch fork_trampoline\n",
        ] {
            assert_eq!(read(text, Names::Thread), ["ctld;-;fork_trampoline;mi_switch 1"]);
        }
    }

    #[test]
    fn wrapped_stacks_are_joined_or_refused() {
        let read =
            |text: &str| Imported::read(text, Names::Process).map(|read| (read.lines(Order::RootFirst), read.unread));
        let text = "  PID    TID COMM TDNAME KSTACK\n 4510 100912 logger - mi_switch sleepq_switch\n    _cv_wait_sig ttydisc_read\n  \
                    sys_read fast_syscall_common\nThat is all.\n";
        let expected = "logger;fast_syscall_common;sys_read;ttydisc_read;_cv_wait_sig;sleepq_switch;mi_switch 1";
        assert_eq!(read(text).expect("one stack"), (vec![expected.to_owned()], 1));
        // Cut at the edge of a terminal within a word: with a space it would be two names, without it one.
        let text = "1 2 logger - mi_switch sleepq_sw\nitch fast_syscall_common\n";
        let refused = read(text).expect_err("it cannot be known").to_string();
        assert!(refused.contains("wrapped"), "{refused}");
        let text =
            "==> /proc/9/stack <==\n[<ffffffffc0411a2f>]\ntxg_wait_open+0xaf/0xe0\n[poolfs]\n[<0>] vfs_write+0x1/0x2\n";
        assert_eq!(read(text).expect("one stack").0, ["/proc/9/stack;vfs_write;txg_wait_open 1"]);
    }

    #[test]
    fn parses_end_marker_of_old_kernels() {
        for end in ["[<ffffffffffffffff>] 0xffffffffffffffff", "[<ffffffff>] 0xffffffff"] {
            let text =
                format!("[<c1>] a+0x1/0x2\n[<c2>] ? guess+0x1/0x2\n[<c3>] b+0x1/0x2\n{end}\n[<c1>] a+0x1/0x2\n{end}\n");
            let read = Imported::read(&text, Names::Process).expect("two stacks");
            assert_eq!((read.lines(Order::RootFirst), read.unread), (vec!["a 1".to_owned(), "b;a 1".to_owned()], 1));
        }
        let text = "    $ sudo cat /proc/812/stack\n    [<ffffffff810f7a56>] a+0x1/0x2\n";
        assert_eq!(
            Imported::read(text, Names::Process).expect("a stack").lines(Order::RootFirst),
            ["/proc/812/stack;a 1"]
        );
    }

    #[test]
    fn marks_and_counts_truncated_stacks() {
        let read = |text: &str| {
            let read = Imported::read(text, Names::Nothing).expect("stacks");
            (read.lines(Order::RootFirst), read.cut, read.unread)
        };
        let two = |lines: [&str; 2]| lines.map(str::to_owned).to_vec();
        // In one column; at an ellipsis; and between words.
        for (end, last) in
            [("_sle", "_sle[cut]"), ("_sle...", "_sle[cut]"), ("_sle\u{2026}", "_sle[cut]"), ("", "mi_switch")]
        {
            let text = format!("1 2 a - mi_switch {end}\n3 4 b - mi_switch {end}\n5 6 c - mi_switch fork_trampoline\n");
            let text = if end.is_empty() { text.replace("switch \n", "switch\n") } else { text };
            let (lines, cut, unread) = read(&text.replace(" fork", if end == "_sle" { "\n" } else { " fork" }));
            let expected = if end.is_empty() { "mi_switch 2".to_owned() } else { format!("{last};mi_switch 2") };
            assert!(lines.contains(&expected), "{lines:?}");
            assert_eq!(cut, if end == "_sle" { 3 } else { 2 }, "{end}: {lines:?} {unread}");
        }
        let dump = "[<0>] futex_wait+0x1/0x2\n[<0>] do_fu\n[<0>\n[<0>] entry+0x1/0x2\n";
        assert_eq!(read(dump), (vec!["entry;[cut];do_fu[cut];futex_wait 1".to_owned()], 2, 0));
        // The counts may have had more digits.
        let folded = "a;bbbbb 12\na;cccccc 3\na;b 120\na;dddddddd\n";
        assert_eq!(read(folded), (vec!["a;b 120".to_owned()], 0, 3));
        assert_eq!(read("a;b 1\na;c 12\n").0, two(["a;b 1", "a;c 12"]));
    }

    #[test]
    fn rejects_commands_and_sentences_as_folded_lines() {
        let text = "$ head -n 20\nme@host:~$ uptime -s 2\nIt happens since 12\nIt has happened since release 12\na;b 1\nmain 2\n";
        let read = Imported::read(text, Names::Nothing).expect("folded lines");
        assert_eq!(
            (read.lines(Order::RootFirst), read.unread),
            (vec!["It happens since 12".to_owned(), "a;b 1".to_owned(), "main 2".to_owned()], 3)
        );
    }

    #[test]
    fn process_name_keeps_blanks_if_thread_is_unnamed() {
        let read =
            Imported::read("5 100042 Web Content - mi_switch fork_trampoline\n", Names::Thread).expect("a stack");
        assert_eq!(read.lines(Order::RootFirst), ["Web Content;-;fork_trampoline;mi_switch 1"]);
    }

    #[test]
    fn procstat_matches_existing_shell_script() {
        for text in [PADDED.to_owned(), squeezed(PADDED)] {
            let read = |names| Imported::read(&text, names).expect("it is procstat's").lines(Order::LeafFirst);
            assert_eq!(
                read(Names::Nothing),
                [
                    "mi_switch;sleepq_catch_signals;sleepq_wait_sig;_sleep;kern_kevent;sys_kevent;amd64_syscall;Xfast_syscall 1",
                    "mi_switch;sleepq_timedwait;_sleep;swapper;btext 1",
                    "mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 2",
                ]
            );
            assert_eq!(
                read(Names::Process)[1..],
                [
                    "kernel;mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 2",
                    "nginx;mi_switch;sleepq_catch_signals;sleepq_wait_sig;_sleep;kern_kevent;sys_kevent;amd64_syscall;Xfast_syscall 1",
                ]
            );
            assert_eq!(
                read(Names::Thread)[0],
                "kernel;firmware taskq;mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 1"
            );
        }
    }

    fn squeezed(text: &str) -> String {
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
    }

    #[test]
    fn skips_and_counts_surrounding_text() {
        let text = format!("My threads:\n\nprocstat -ka\n\n{}[...]\n1.27 real\n", squeezed(PADDED));
        let read = Imported::read(&text, Names::Process).expect("it is procstat's");
        assert_eq!((read.stacks.values().sum::<u64>(), read.unread), (4, 4));
    }

    #[test]
    fn merges_files_as_samples() {
        let mut all = Imported::read(PADDED, Names::Process).expect("it is procstat's");
        all.merge(Imported::read(PADDED, Names::Process).expect("it is procstat's")).expect("small counts");
        assert!(
            all.lines(Order::RootFirst)
                .contains(&"kernel;btext;swapper;_sleep;sleepq_timedwait;mi_switch 2".to_owned())
        );
    }

    #[test]
    fn puts_outermost_frame_first_in_every_format() {
        let dump = "==> kernel <==\n[<0>] mi_switch+0x1/0x2\n[<0>] _sleep+0x1/0x2\n[<0>] btext+0x1/0x2\n";
        let procstat = "0 100000 kernel swapper mi_switch _sleep btext\n";
        for text in [dump, procstat, "kernel;btext;_sleep;mi_switch 1\n"] {
            let read = Imported::read(text, Names::Process).expect("it is one of the forms");
            assert_eq!(read.lines(Order::RootFirst), ["kernel;btext;_sleep;mi_switch 1"]);
        }
        let leaf_first = |text| Imported::read(text, Names::Process).expect("a form").lines(Order::LeafFirst);
        assert_eq!(leaf_first(dump), ["kernel;mi_switch;_sleep;btext 1"]);
        assert_eq!(leaf_first(procstat), leaf_first(dump));
    }

    #[test]
    fn parses_linux_dump_with_headers() {
        let text = "==> /proc/1/stack <==\n[<0>] do_epoll_wait+0x6c/0x90\n[<0>] f+0x1/0x2 [ext4]\n\n\
                    [<0>] pipe_read+0x1/0x2\n";
        let read = |names| Imported::read(text, names).expect("it is a dump").lines(Order::RootFirst);
        assert_eq!(read(Names::Process), ["/proc/1/stack;f;do_epoll_wait 1", "pipe_read 1"]);
        assert_eq!(read(Names::Nothing), ["f;do_epoll_wait 1", "pipe_read 1"]);
    }

    #[test]
    fn keeps_folded_lines() {
        let read = Imported::read("a;b c;d 3\n# comment\na;b c;d 4\nbroken\n", Names::Process).expect("folded");
        assert_eq!((read.lines(Order::RootFirst), read.unread), (vec!["a;b c;d 7".to_owned()], 1));
    }

    #[test]
    fn refuses_other_text() {
        assert!(matches!(Imported::read("hello\nworld\n", Names::Process), Err(ImportError::UnknownForm)));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(?s).*") {
            if let Ok(read) = Imported::read(&text, Names::Thread) {
                prop_assert!(read.lines(Order::RootFirst).iter().all(|line| !line.contains('\n')));
            }
        }

        #[test]
        fn arbitrary_procstat_line_does_not_panic(rest in "[ -~]*", column in 0_usize..80) {
            let header = Header::parse(&format!("PID{}COMM TDNAME KSTACK", " ".repeat(column))).unwrap_or_default();
            Thread::parse(&format!("1 2 {rest}"), &header);
        }
    }
}
