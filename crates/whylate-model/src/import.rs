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
use crate::paste::{ELLIPSES, Form, Lines, PasteError, Piece, has_timestamp};
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
        if procstat.has_records() || text.lines().any(Header::is_in) {
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
            let is_cut = lines.is_cut(&line) || thread.is_cut_in_first_frame();
            if let Some(last) = thread.frames.last_mut().filter(|_| is_cut) {
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
        let mut file = String::new();
        let mut frames: Vec<String> = Vec::new();
        let mut line = String::new();
        loop {
            let is_any = lines.next(&mut line).map_err(PasteError::Io)?;
            if let Some((other, _)) = dump::file(&line).filter(|(of, _)| is_any && *of != file) {
                self.count_dump(&mut frames, &mut label, names)?;
                other.clone_into(&mut file);
                label = Some(safe(other));
            }
            match if is_any { Row::parse(&line) } else { Row::End } {
                // One frame above the limit shows that the stack is too deep.
                Row::Frame(frame) => {
                    let is_whole = !has_offsets || line.contains("+0x") || frame.starts_with("0x");
                    let is_cut = !is_whole || lines.is_cut(&line);
                    self.cut += u64::from(is_cut);
                    if file.is_empty() && frames.last().is_some_and(|before| dump::starts_next(&frame, before)) {
                        self.count_dump(&mut frames, &mut label, names)?;
                    }
                    let frame = if is_cut { cut(&frame) } else { frame };
                    // One [`CUT`] stands for one or more frames.
                    if frames.len() <= DEEPEST && (frame != CUT || frames.last().is_none_or(|last| last != CUT)) {
                        frames.push(frame);
                    }
                    continue;
                }
                Row::Address => {
                    self.cut += 1;
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
            self.count_dump(&mut frames, &mut label, names)?;
            if !is_any {
                break;
            }
            // A line that is no frame ends a stack, and names the thread of the next one.
            let header = line.trim().trim_start_matches("==>").trim_end_matches("<==").trim();
            if !header.is_empty() && Row::parse(&line) != Row::End {
                // The next thread is named by its path, or in a header of tail(1); other text may be a part of a line.
                let is_tail = line.trim_start().starts_with("==>");
                let has_tail_end = line.trim_end().ends_with("<==");
                let is_whole_tail = is_tail && has_tail_end;
                self.unread += u64::from(!is_tail && !line.contains("/proc/"));
                let path =
                    header.split_whitespace().find(|word| word.starts_with("/proc/") && word.ends_with("/stack"));
                // A truncated name could be that of another thread.
                let has_ellipsis = ELLIPSES.iter().any(|ellipsis| header.ends_with(ellipsis));
                let is_bare_path = header.starts_with("/proc/") && !header.contains([' ', ':']);
                let may_lack_part =
                    is_tail != has_tail_end || header == "==" || !is_prose(header) && (has_ellipsis || is_bare_path);
                label = match path {
                    None if may_lack_part && !is_whole_tail => {
                        self.cut += 1;
                        Some(CUT.to_owned())
                    }
                    path => path.or(Some(header).filter(|header| is_whole_tail || !is_prose(header))).map(safe),
                };
            }
        }
        self.undone = lines.undone();
        Ok(())
    }

    /// Counts the stack of a dump, if there is one. The kernel prints the innermost frame first.
    fn count_dump(
        &mut self,
        frames: &mut Vec<String>,
        label: &mut Option<String>,
        names: Names,
    ) -> Result<(), ImportError> {
        if frames.is_empty() {
            return Ok(());
        }
        let outermost_first: Vec<String> = std::mem::take(frames).into_iter().rev().collect();
        let labels = if names == Names::Nothing { Vec::new() } else { label.take().into_iter().collect() };
        self.count(labels, outermost_first, 1)
    }

    fn read_folded(&mut self, mut lines: Lines<&[u8], Folded>) -> Result<(), ImportError> {
        let mut line = String::new();
        // Minimum number of counts at the end of each line with frames, and the number of these lines.
        let (mut counts, mut with_frames, mut others) = (usize::MAX, 0, 0);
        let mut after_part = false;
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
                    if frames.contains(';') {
                        let numbers = frames.split_whitespace().rev().take_while(|word| word.parse::<u64>().is_ok());
                        counts = counts.min(1 + numbers.count());
                        with_frames += 1;
                    } else {
                        others += 1;
                    }
                    let frames = frames.split(';').take(DEEPEST + 1).map(safe).collect();
                    self.count(Vec::new(), frames, count)?;
                }
                None => self.unread += 1,
            }
        }
        // A name may end in a number if the lines have no frames that delimit it. A line without frames may be a sum.
        if counts >= 2 && (with_frames >= 2 || with_frames == 1 && others == 0) {
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
    frames.starts_with(['>', '|']) || has_timestamp(frames) || frames.contains('\t') || frames.contains("=\"")
}

/// Returns whether a line, or the text before its count, is a shell command or a sentence.
fn is_prose(text: &str) -> bool {
    let words = || text.split_whitespace();
    let has_prompt = || words().count() > 1 && words().take(8).any(|word| word.ends_with(['$', '#', '%']));
    // A sentence may end in a colon, and a log prefix contains colons.
    let has_colon = text.trim_end_matches(':').contains(':');
    let is_sentence = || words().count() > if has_colon { 6 } else { 3 } && !text.contains('(');
    !text.contains(';') && (is_sentence() || has_prompt())
}

/// Parses a folded line into its frames and count. Refuses a line of numbers: it may be the rest of a wrapped line.
fn folded(line: &str) -> Option<(&str, u64)> {
    let (frames, count) = line.rsplit_once(' ')?;
    let (frames, count) = (frames.trim_end(), count.parse().ok()?);
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let has_name = frames.contains(';') || !frames.split_whitespace().all(is_number);
    has_name.then_some((frames, count))
}

/// Marks a name with its end missing.
fn cut(name: &str) -> String {
    let start = ELLIPSES.iter().find_map(|ellipsis| name.strip_suffix(ellipsis)).unwrap_or(name);
    // No function name contains the sign of an offset.
    format!("{}{CUT}", start.split('+').next().unwrap_or_default())
}

/// Returns a name as a line may have it, of bounded length.
fn safe(name: &str) -> String {
    crate::folded::safe(&bounded(name))
}

#[cfg(test)]
mod tests;
