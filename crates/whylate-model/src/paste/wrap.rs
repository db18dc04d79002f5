// SPDX-License-Identifier: MIT OR Apache-2.0
//! Joins records that were wrapped: between words by mail software, or at the right edge by a terminal.

use std::collections::{HashSet, VecDeque};

use super::encoding::without_tabs;
use super::prefix::has_record;
use super::{Form, Piece};

/// Maximum number of lines of a record.
const MAX_LINES: usize = 64;

/// Way in which the lines of a file were wrapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wrap {
    /// Length of the longest line, in characters.
    width: usize,
    joins: Joins,
}

/// Way in which lines are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joins {
    /// With a space between words.
    Words,
    /// Unchanged, with the blanks that were trimmed at a terminal's edge.
    Edge,
    /// Unchanged.
    Trimmed,
}

/// Evidence for wrapping between words or at an edge.
#[derive(Debug, Default)]
struct Evidence {
    /// Records that are complete in one way only.
    only_words: u64,
    only_edge: u64,
    /// Records that are complete both ways, with different names.
    differing: u64,
    /// Records that are complete in any way, and with the blanks at an edge.
    whole: u64,
    whole_by_edge: u64,
    /// Parts of words around each line break.
    ends: Vec<(String, String)>,
    /// Shortest and longest first line of records, and of their other lines, before a break.
    first: Option<(usize, usize)>,
    others: Option<(usize, usize)>,
    /// Minimum indentation of continuation lines.
    indent: Option<usize>,
    /// Minimum indentation of records and headers.
    indent_of_all: Option<usize>,
    /// Whether a record starts with blanks, so that none were trimmed.
    has_blanks: bool,
    /// Breaks with both parts occurring elsewhere as words, and breaks with the joined parts occurring as one word.
    between: u64,
    within: u64,
}

/// Maximum difference of line lengths for lines cut at an edge, if leading blanks were trimmed.
const MAX_TRIMMED_DIFFERENCE: usize = 16;
/// Minimum length of a word; a shorter one may be a part of another.
const MIN_WORD_BYTES: usize = 3;

impl Evidence {
    fn add_ends(&mut self, line: &str, next: &str, is_first: bool) {
        let length = length(line);
        let lengths = if is_first { &mut self.first } else { &mut self.others };
        let (min, max) = lengths.unwrap_or((length, length));
        *lengths = Some((min.min(length), max.max(length)));
        self.has_blanks |= is_first && line.starts_with(' ');
        let indent = next.len() - next.trim_start().len();
        self.indent = Some(self.indent.map_or(indent, |min| min.min(indent)));
        if let (Some(end), Some(start)) = (words(line).next_back(), words(next).next()) {
            self.ends.push((end.to_owned(), start.to_owned()));
        }
    }

    fn count_words(&mut self, lines: &[String]) {
        // The first and last words of a line may be parts.
        let inner = |line: &'_ String| -> Vec<String> {
            let count = words(line).count();
            words(line).take(count.saturating_sub(1)).skip(1).map(str::to_owned).collect()
        };
        let known: HashSet<String> = lines.iter().flat_map(inner).collect();
        for (end, start) in &self.ends {
            let is_word = |word: &String| word.len() >= MIN_WORD_BYTES && known.contains(word);
            // No function name ends in these.
            self.within +=
                u64::from(known.contains(&format!("{end}{start}")) || end.len() > 1 && end.ends_with(['_', '+']));
            self.between += u64::from(is_word(end) && is_word(start));
        }
    }

    /// Returns whether all lines may have ended in one column, as far as their starts are unchanged.
    fn can_be_cut(&self) -> bool {
        let is_equal = |lengths: Option<(usize, usize)>, off| lengths.is_none_or(|(min, max)| max - min <= off);
        is_equal(self.first, if self.has_blanks { 1 } else { MAX_TRIMMED_DIFFERENCE }) && is_equal(self.others, 1)
    }

    /// Returns whether lines were cut at an edge; otherwise between words.
    fn decide(&self, is_edge: bool, width: usize) -> Result<bool, Ambiguous> {
        // Spaces trimmed at the edge can make a record that was cut there look complete only when joined by words.
        let is_maybe_edge = self.can_be_cut() && self.others.is_some_and(|(_, max)| max == width);
        let is_by_words_only = self.only_words > 0 && self.differing == 0 && !is_maybe_edge;
        let is_any_way = self.whole > 0 && self.differing + self.only_edge == 0;
        let is_any_way = is_any_way && (self.only_words == 0 || is_by_words_only);
        if is_any_way {
            return Ok(false);
        }
        if self.only_edge + self.within > 0 {
            // After a removed prefix, first lines are shorter than others.
            let reaches = |lengths: Option<(usize, usize)>| lengths.is_none_or(|(_, max)| max == width);
            let is_edge = is_edge && reaches(self.first) && reaches(self.others);
            let is_by_edge = is_edge && self.whole_by_edge == self.whole && self.only_words == 0;
            return if is_by_edge { Ok(true) } else { Err(Ambiguous) };
        }
        let is_by_words = !self.can_be_cut()
            || self.indent.is_some_and(|indent| indent >= 2 && self.indent != self.indent_of_all)
            || is_by_words_only
            || self.between == self.ends.len() as u64;
        if is_by_words { Ok(false) } else { Err(Ambiguous) }
    }
}

fn words(line: &str) -> impl DoubleEndedIterator<Item = &str> {
    line.split(|c: char| c.is_whitespace() || ":;=".contains(c)).filter(|word| !word.is_empty())
}

/// Both ways of joining give records, but different ones.
#[derive(Debug)]
pub(super) struct Ambiguous;

/// Returns the length in characters, as a terminal shows the line.
pub(super) fn length(line: &str) -> usize {
    let line = line.trim_end();
    if line.contains('\t') { without_tabs(line).chars().count() } else { line.chars().count() }
}

impl Wrap {
    /// Detects how the records of the head were wrapped, if at all.
    pub(super) fn detect(lines: &[String], form: &impl Form) -> Result<Option<Self>, Ambiguous> {
        let mut groups: Vec<&[String]> = Vec::new();
        let mut at = 0;
        while at < lines.len() {
            let mut end = at + 1;
            if form.piece(&lines[at]).is_record() {
                while end < lines.len() && continues(form, &lines[at..end], &lines[end]) {
                    end += 1;
                }
                groups.extend(Some(&lines[at..end]).filter(|group| group.len() > 1));
            }
            at = end;
        }
        let broken = || groups.iter().filter(|group| form.piece(&group[0]) == Piece::Begins);
        // Text around the records may be wider or narrower.
        let is_record = |line: &&String| form.piece(line).is_record();
        let all = lines.iter().filter(is_record).chain(groups.iter().flat_map(|group| group.iter()));
        let width = all.map(|line| length(line)).max().unwrap_or(0);
        let way = |joins| Wrap { width, joins };
        let (word, edge) = (way(Joins::Words), way(Joins::Edge));
        // Lines that repeatedly follow full records are their rests, even if the records need none.
        let are_full = || groups.len() >= 2 && groups.iter().all(|group| word.is_full(&group[0], &group[1]));
        let broken: Vec<&[String]> = match broken().count() {
            0 if are_full() => groups.clone(),
            0 => return Ok(None),
            _ => broken().copied().collect(),
        };
        let indents = lines.iter().filter(|line| !matches!(form.piece(line), Piece::Other));
        let indents = indents.filter(|line| !line.trim().is_empty()).map(|line| line.len() - line.trim_start().len());
        let mut evidence = Evidence { indent_of_all: indents.min(), ..Evidence::default() };
        let mut is_edge = true;
        for &group in &broken {
            let [by_word, by_edge, trimmed] = [word, edge, way(Joins::Trimmed)].map(|wrap| wrap.whole(group, form));
            match (&by_word, by_edge.as_ref().or(trimmed.as_ref())) {
                (Some(_), None) => evidence.only_words += 1,
                (None, Some(_)) => evidence.only_edge += 1,
                (Some(one), Some(other)) => evidence.differing += u64::from(!form.is_same(&one.0, &other.0)),
                (None, None) => {}
            }
            let used = [by_word.as_ref(), by_edge.as_ref(), trimmed.as_ref()]
                .into_iter()
                .flatten()
                .map(|(_, used)| *used)
                .max();
            evidence.whole += u64::from(used.is_some());
            evidence.whole_by_edge += u64::from(by_edge.is_some());
            for (at, two) in group[..=used.unwrap_or(0)].windows(2).enumerate() {
                evidence.add_ends(&two[0], &two[1], at == 0);
                // A terminal breaks each line in one column, where a blank may be trimmed.
                let (end, is_indented) = (length(&two[0]), two[1].starts_with(' '));
                is_edge &= end == width || end + 1 == width && !is_indented;
            }
        }
        if evidence.whole == 0 {
            // Without any complete record, each line must have been full.
            let pairs = || broken.iter().flat_map(|group| group.windows(2));
            if pairs().count() < 2 || !pairs().all(|two| word.is_full(&two[0], &two[1])) {
                return Ok(None);
            }
            for group in &broken {
                group.windows(2).enumerate().for_each(|(at, two)| evidence.add_ends(&two[0], &two[1], at == 0));
            }
            is_edge = pairs().all(|two| length(&two[0]) == width);
        }
        evidence.count_words(lines);
        evidence.decide(is_edge, width).map(|is_by_edge| Some(if is_by_edge { edge } else { word }))
    }

    /// Joins lines to a complete record; returns it with the number of lines used after the first one.
    fn whole(self, group: &[String], form: &impl Form) -> Option<(String, usize)> {
        let mut joined = group[0].clone();
        let mut last = &group[0];
        for (used, line) in group.iter().enumerate().skip(1) {
            let is_off_edge = self.joins == Joins::Edge && length(last) + 1 < self.width;
            if is_off_edge || form.is_rest_alike() && self.joins != Joins::Trimmed && !self.is_full(last, line) {
                return None;
            }
            self.join(&mut joined, last, line);
            last = line;
            if form.piece(&joined) == Piece::Whole {
                return Some((joined, used));
            }
        }
        None
    }

    /// Appends a line to the joined ones, of which `last` is the last one.
    fn join(self, joined: &mut String, last: &str, line: &str) {
        match self.joins {
            Joins::Words => {
                joined.truncate(joined.trim_end().len());
                joined.push(' ');
                joined.push_str(line.trim());
            }
            Joins::Edge => {
                joined.truncate(joined.trim_end().len());
                joined.extend(std::iter::repeat_n(' ', self.width.saturating_sub(length(last))));
                joined.push_str(line);
            }
            Joins::Trimmed => {
                joined.truncate(joined.trim_end().len());
                joined.push_str(line);
            }
        }
    }

    /// Returns whether no word of the next line would have fit.
    fn is_full(self, line: &str, next: &str) -> bool {
        let word = next.split_whitespace().next().map_or(0, |word| word.chars().count());
        match self.joins {
            Joins::Words => length(line) + 1 + word > self.width,
            Joins::Edge | Joins::Trimmed => length(line) == self.width,
        }
    }
}

/// Returns the column in which the lines of the head were cut: several records end in the last column, and some of
/// these are incomplete.
pub(super) fn edge(lines: &[String], form: &impl Form) -> Option<usize> {
    let records = || lines.iter().filter(|line| form.piece(line).is_record());
    let edge = records().map(|line| length(line)).max()?;
    let widest = || records().filter(|line| length(line) == edge);
    let mut broken = widest().filter(|line| form.piece(line) == Piece::Begins).peekable();
    broken.peek()?;
    // In cut lines, the start of the last word varies.
    let last_word = |line: &String| line.trim_end().rfind(char::is_whitespace);
    let do_differ = widest().any(|line| last_word(line) != widest().next().and_then(last_word));
    (widest().count() >= 2 && (do_differ || broken.any(|line| form.lacks_end(line)))).then_some(edge)
}

/// Minimum width of a terminal that wraps lines, in columns.
const MIN_EDGE: usize = 60;

/// Returns whether every line of only spaces follows a record of full width: a terminal wrapped trailing spaces.
pub(super) fn has_wrapped_blanks(lines: &[String], form: &impl Form) -> bool {
    let width = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let is_blank = |line: &String| !line.is_empty() && line.chars().all(|c| c == ' ');
    let before: Vec<&String> = lines.windows(2).filter(|two| is_blank(&two[1])).map(|two| &two[0]).collect();
    // The record may be behind a prefix.
    let is_full = |line: &&String| line.chars().count() == width && has_record(line, form);
    width >= MIN_EDGE && !before.is_empty() && before.iter().all(is_full)
}

/// Returns whether a line may continue the record of the group.
fn continues(form: &impl Form, group: &[String], line: &str) -> bool {
    let (Some(first), Some(last)) = (group.first(), group.last()) else { return false };
    if group.len() > MAX_LINES || line.trim().is_empty() {
        return false;
    }
    match form.piece(line) {
        Piece::Other => form.can_continue(line),
        Piece::Own => false,
        _ => form.is_rest_alike() && [first, last].iter().all(|line| form.piece(line) != Piece::Whole),
    }
}

/// Joins the lines of a file.
#[derive(Debug)]
pub(super) struct Joiner {
    wrap: Wrap,
    /// Maximum length of a record in bytes.
    longest: usize,
    /// A record and the lines that may continue it.
    group: Vec<String>,
    joined: u64,
}

impl Joiner {
    pub(super) fn new(wrap: Wrap, longest: usize) -> Self {
        Joiner { wrap, longest, group: Vec::new(), joined: 0 }
    }

    /// Returns the number of undone line breaks.
    pub(super) fn joined(&self) -> u64 {
        self.joined
    }

    /// Adds a line, or `None` at the end of the file, and moves complete lines to `ready`.
    pub(super) fn take(&mut self, line: Option<String>, form: &impl Form, ready: &mut VecDeque<String>) {
        let Some(line) = line else { return self.end_group(form, ready) };
        let is_short = self.group.iter().map(String::len).sum::<usize>() + line.len() < self.longest;
        if is_short && continues(form, &self.group, &line) {
            return self.group.push(line);
        }
        self.end_group(form, ready);
        if form.piece(&line).is_record() {
            self.group.push(line);
        } else {
            ready.push_back(line);
        }
    }

    fn end_group(&mut self, form: &impl Form, ready: &mut VecDeque<String>) {
        let group = std::mem::take(&mut self.group);
        let Some(first) = group.first() else { return };
        let piece = form.piece(first);
        let (mut record, mut used) = match piece {
            Piece::Begins => self.wrap.whole(&group, form).unwrap_or_else(|| (first.clone(), 0)),
            _ => (first.clone(), 0),
        };
        // Optional rests of a record, or those of a format without visible record ends.
        let is_rest =
            |used: usize, line: &String| self.wrap.is_full(&group[used], line) && !form.piece(line).is_record();
        while let Some(line) = group.get(used + 1).filter(|line| is_rest(used, line)) {
            let mut longer = record.clone();
            self.wrap.join(&mut longer, &group[used], line);
            let is_better = match form.piece(&longer) {
                Piece::Whole => true,
                Piece::Begins => form.piece(&record) == Piece::Begins,
                _ => false,
            };
            if !is_better {
                break;
            }
            (record, used) = (longer, used + 1);
        }
        self.joined += used as u64;
        super::truncate(&mut record, self.longest);
        ready.push_back(record);
        ready.extend(group.into_iter().skip(used + 1));
    }
}
