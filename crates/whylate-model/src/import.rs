// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks from what other tools write: FreeBSD's `procstat -ka`, dumps of `/proc/PID/stack`, and folded lines.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::name::bounded;
use crate::text;

/// Why a text could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ImportError {
    /// It is none of the forms.
    #[error("this is no output of procstat -ka, no dump of /proc/PID/stack and no folded lines")]
    UnknownForm,
    /// It has stacks, and each is deeper than [`DEEPEST`], or longer than [`text::LONGEST_LINE`].
    #[error(
        "each of its stacks has more than {DEEPEST} frames, or is longer than 1 MiB: keep the innermost frames only"
    )]
    TooLong,
    /// A sum would wrap around.
    #[error("the counts add up to more than {}: give them in a larger unit", u64::MAX)]
    CountsTooLarge,
}

/// No stack has more frames: a graph of it would be higher than anybody can look at.
pub const DEEPEST: usize = 4 << 10;

/// What a stack begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// Nothing: the stacks alone.
    Nothing,
    /// The process's name.
    #[default]
    Process,
    /// The process's and the thread's name.
    Thread,
}

/// In which order the frames of a stack stand in a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// From the outermost function on, as in flame graphs.
    #[default]
    RootFirst,
    /// From the innermost function on, as procstat prints them: what waits in one place is together, whoever called it.
    LeafFirst,
}

/// Counts by stack, frames from the outermost on, whichever way round the tool writes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Labels and frames, with how often they were seen.
    pub stacks: BTreeMap<(Vec<String>, Vec<String>), u64>,
    /// Lines that are none of the form.
    pub unread: u64,
    /// Stacks that are left out, as they have more than [`DEEPEST`] frames, or more than [`text::LONGEST_LINE`] bytes.
    pub too_long: u64,
    /// Of all counts.
    total: u64,
}

impl Imported {
    /// Reads a text in whichever form it is.
    ///
    /// # Errors
    /// When it is in none, its stacks are too long, or its counts too large.
    pub fn read(text: &str, names: Names) -> Result<Self, ImportError> {
        let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let mut imported = Imported::default();
        // Somebody may have copied it with what stands before and after it.
        if text.lines().any(is_procstat_heading) || procstat_line(first, None).is_some() {
            imported.read_procstat(text, names)?;
        } else if text.lines().any(|line| kernel_frame(line).is_some()) {
            imported.read_dump(text, names)?;
        } else {
            imported.read_folded(text)?;
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
    /// When the counts of both are too large.
    pub fn merge(&mut self, other: Imported) -> Result<(), ImportError> {
        for (stack, count) in other.stacks {
            self.add(stack, count)?;
        }
        self.unread += other.unread;
        self.too_long += other.too_long;
        Ok(())
    }

    /// Folded lines with counts: labels, then frames in this order. Sorted.
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

    /// Counts are what a file says they are, and a graph adds them all up.
    fn add(&mut self, stack: (Vec<String>, Vec<String>), times: u64) -> Result<(), ImportError> {
        self.total = self.total.checked_add(times).ok_or(ImportError::CountsTooLarge)?;
        *self.stacks.entry(stack).or_default() += times;
        Ok(())
    }

    fn read_procstat(&mut self, text: &str, names: Names) -> Result<(), ImportError> {
        let mut stack_column = None;
        for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
            if is_procstat_heading(line) {
                // Where its columns are padded, the heading tells where the stack begins.
                stack_column = line.find("KSTACK").filter(|&column| column >= 40);
                continue;
            }
            if line.len() > text::LONGEST_LINE {
                self.too_long += 1;
                continue;
            }
            let Some(thread) = procstat_line(line, stack_column) else {
                self.unread += 1;
                continue;
            };
            let labels = match names {
                Names::Nothing => Vec::new(),
                Names::Process => vec![thread.process],
                Names::Thread => vec![thread.process, thread.name],
            };
            self.count(labels, thread.frames, 1)?;
        }
        Ok(())
    }

    fn read_dump(&mut self, text: &str, names: Names) -> Result<(), ImportError> {
        let mut label = None;
        let mut frames: Vec<String> = Vec::new();
        // A line that is no frame ends a stack; it tells whose the next one is.
        for line in text.lines().chain(std::iter::once("")) {
            if let Some(frame) = kernel_frame(line) {
                // One more tells that there are too many.
                if frames.len() <= DEEPEST {
                    frames.push(frame);
                }
                continue;
            }
            if !frames.is_empty() {
                // The kernel prints the innermost one first.
                let outermost_first: Vec<String> = std::mem::take(&mut frames).into_iter().rev().collect();
                let labels = if names == Names::Nothing { Vec::new() } else { label.take().into_iter().collect() };
                self.count(labels, outermost_first, 1)?;
            }
            let heading = line.trim().trim_start_matches("==>").trim_end_matches("<==").trim();
            if !heading.is_empty() {
                label = Some(safe(heading));
            }
        }
        Ok(())
    }

    fn read_folded(&mut self, text: &str) -> Result<(), ImportError> {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.rsplit_once(' ').and_then(|(frames, count)| Some((frames, count.parse::<u64>().ok()?))) {
                Some((frames, _)) if frames.len() > text::LONGEST_LINE => self.too_long += 1,
                Some((frames, count)) => {
                    let frames = frames.split(';').take(DEEPEST + 1).map(safe).collect();
                    self.count(Vec::new(), frames, count)?;
                }
                None => self.unread += 1,
            }
        }
        Ok(())
    }
}

struct ProcstatThread {
    process: String,
    name: String,
    /// The outermost one first.
    frames: Vec<String>,
}

fn is_procstat_heading(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.first() == Some(&"PID") && words.contains(&"KSTACK")
}

/// The first frame of a FreeBSD thread that is off its CPU, or not there to be looked at.
const INNERMOST: [&str; 6] = ["mi_switch", "sched_switch", "fork_trampoline", "<running>", "<swapped", "<no"];

/// Process and thread numbers, the process's name, the thread's (may have spaces), and the stack, innermost first.
fn procstat_line(line: &str, stack_column: Option<usize>) -> Option<ProcstatThread> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [pid, tid, process, rest @ ..] = words.as_slice() else { return None };
    if pid.parse::<u32>().is_err() || tid.parse::<u32>().is_err() {
        return None;
    }
    let (name, frames) = match stack_column.and_then(|column| Some((line.get(..column)?, line.get(column..)?))) {
        Some((before, stack)) => {
            // The padded columns before the stack: process and thread, with spaces of their own.
            let name = after_word(after_word(after_word(before)?)?)?;
            (name.trim().to_owned(), stack.split_whitespace().collect::<Vec<_>>())
        }
        None => {
            // In text whose columns are not padded any more, the first frame is known by its name.
            let at = rest.iter().position(|word| INNERMOST.contains(word))?;
            (rest[..at].join(" "), rest[at..].to_vec())
        }
    };
    let frames = frames.into_iter().rev().map(safe).collect();
    Some(ProcstatThread { process: safe(process), name: safe(&name), frames })
}

/// What follows a text's first word.
fn after_word(text: &str) -> Option<&str> {
    let text = text.trim_start();
    text.get(text.find(char::is_whitespace)?..)
}

/// A line of proc_pid_stack(5), `[<0>] function+0x12/0x34 [module]`, without what follows the function's name.
pub fn kernel_frame(line: &str) -> Option<String> {
    let (_, frame) = line.trim().strip_prefix("[<")?.split_once(">]")?;
    let name = frame.split_whitespace().next()?;
    let name = name.split_once("+0x").map_or(name, |(name, _)| name);
    Some(safe(name))
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
    fn counts_beyond_all_numbers_are_refused() {
        let read = |text: String| Imported::read(&text, Names::Thread);
        let mut most = read(format!("a;b {}\na;c 1\n", u64::MAX - 1)).expect("as much as there can be");
        assert_eq!(most.merge(most.clone()), Err(ImportError::CountsTooLarge));
        for twice in ["a", "b"].map(|other| format!("a {0}\n{other} {0}\n", u64::MAX)) {
            assert_eq!(read(twice), Err(ImportError::CountsTooLarge));
        }
    }

    #[test]
    fn stacks_that_nobody_can_look_at_are_left_out_and_counted() {
        let deep = |frames: usize| format!("{}f 1\n", "f;".repeat(frames - 1));
        let read = |text: &str| Imported::read(text, Names::Thread).map(|read| (read.stacks.len(), read.too_long));
        assert_eq!(read(&format!("{}{}", deep(DEEPEST), deep(DEEPEST + 1))), Ok((1, 1)));
        assert_eq!(read(&deep(2_000_000)), Err(ImportError::TooLong));
        assert_eq!(read(&format!("{} 1\na 1\n", "f".repeat(text::LONGEST_LINE + 1))), Ok((1, 1)));
        assert_eq!(read(&format!("==> a <==\n{}\n==> b <==\n[<0>] g\n", "[<0>] f\n".repeat(DEEPEST + 1))), Ok((1, 1)));
        assert_eq!(read(&format!("0 1 kernel swapper mi_switch{}\n", " f".repeat(DEEPEST))), Err(ImportError::TooLong));
    }

    #[test]
    fn long_names_are_cut() {
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
    fn a_name_that_ends_in_a_number_has_no_count_of_its_own() {
        let read = Imported::read("a;worker 9223372036854775808 1\n", Names::Thread).expect("folded lines");
        assert_eq!(read.lines(Order::RootFirst), ["a;worker_9223372036854775808 1"]);
    }

    #[test]
    fn procstat_gives_the_lines_of_the_shell_that_is_in_use_for_it() {
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
    fn text_around_it_is_left_out_and_counted() {
        let text = format!("My threads:\n\nprocstat -ka\n\n{}[...]\n1.27 real\n", squeezed(PADDED));
        let read = Imported::read(&text, Names::Process).expect("it is procstat's");
        assert_eq!((read.stacks.values().sum::<u64>(), read.unread), (4, 4));
    }

    #[test]
    fn each_file_is_a_sample() {
        let mut all = Imported::read(PADDED, Names::Process).expect("it is procstat's");
        all.merge(Imported::read(PADDED, Names::Process).expect("it is procstat's")).expect("small counts");
        assert!(
            all.lines(Order::RootFirst)
                .contains(&"kernel;btext;swapper;_sleep;sleepq_timedwait;mi_switch 2".to_owned())
        );
    }

    #[test]
    fn the_outermost_frame_comes_first_in_every_form() {
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
    fn dumps_of_linux_have_a_stack_after_each_heading() {
        let text = "==> /proc/1/stack <==\n[<0>] do_epoll_wait+0x6c/0x90\n[<0>] f+0x1/0x2 [ext4]\n\n\
                    [<0>] pipe_read+0x1/0x2\n";
        let read = |names| Imported::read(text, names).expect("it is a dump").lines(Order::RootFirst);
        assert_eq!(read(Names::Process), ["/proc/1/stack;f;do_epoll_wait 1", "pipe_read 1"]);
        assert_eq!(read(Names::Nothing), ["f;do_epoll_wait 1", "pipe_read 1"]);
    }

    #[test]
    fn folded_lines_stay_as_they_are() {
        let read = Imported::read("a;b c;d 3\n# comment\na;b c;d 4\nbroken\n", Names::Process).expect("folded");
        assert_eq!((read.lines(Order::RootFirst), read.unread), (vec!["a;b c;d 7".to_owned()], 1));
    }

    #[test]
    fn anything_else_is_refused() {
        assert_eq!(Imported::read("hello\nworld\n", Names::Process), Err(ImportError::UnknownForm));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail(text in "(?s).*") {
            if let Ok(read) = Imported::read(&text, Names::Thread) {
                prop_assert!(read.lines(Order::RootFirst).iter().all(|line| !line.contains('\n')));
            }
        }

        #[test]
        fn no_procstat_line_makes_it_fail(rest in "[ -~]*", column in 0_usize..80) {
            procstat_line(&format!("1 2 {rest}"), Some(column));
            procstat_line(&format!("1 2 {rest}"), None);
        }
    }
}
