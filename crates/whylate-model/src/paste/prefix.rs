// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prefixes of lines: quotation signs, log timestamps, line numbers, file names.

use std::collections::BTreeSet;

use super::{Form, MAX_LAYERS, Piece, is_fence};

/// Maximum number of file names; more prefixes are not file names.
const MAX_FILES: usize = 16;
/// Minimum number of numbered lines of a listing, whatever is in them.
const MIN_LISTING: usize = 8;
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Prefix of the records of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    /// `>`, `>>`, `|`, `JD>`: one level; `is_spaced` if a space follows in each line.
    Quote { sign: char, is_spaced: bool },
    /// `+ ` or `- ` of a patch.
    Patch,
    /// `[   12.345678] `, `2026-11-28T15:39:22+0000 `; `Nov 28 15:39:22 host kernel: ` with `has_program`.
    Log { has_program: bool },
    /// `12:`, `12|` and similar; `is_spaced` if a space follows in each line, `has_all` if each line has one, blank lines
    /// perhaps the number alone.
    Number { is_spaced: bool, has_all: bool },
    /// Consecutive numbers followed by spaces.
    Counted,
    /// `trace.dat: `: one file name on each line.
    File(String),
    /// Equal blanks. They matter if a line continues on the next one.
    Indent(String),
}

impl Prefix {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Prefix::Quote { .. } => "quoting",
            Prefix::Patch => "signs of a patch",
            Prefix::Log { .. } => "stamps of a log",
            Prefix::Number { .. } | Prefix::Counted => "line numbers",
            Prefix::File(_) => "the name of a file in front of each line",
            Prefix::Indent(_) => "indentation",
        }
    }

    /// Returns the rest of a line after the prefix; `None` without it.
    pub(super) fn strip<'a>(&self, line: &'a str) -> Option<&'a str> {
        match self {
            Prefix::Quote { sign, is_spaced } => {
                quote(line, *sign).map(|rest| if *is_spaced { without_space(rest) } else { rest })
            }
            Prefix::Patch => line.strip_prefix('+'),
            Prefix::Log { has_program } => log(line, *has_program),
            Prefix::Number { is_spaced, has_all } => {
                let rest = number(line).map(|(_, rest)| if *is_spaced { without_space(rest) } else { rest });
                rest.or_else(|| after_number_alone(line).filter(|_| *has_all))
            }
            Prefix::Counted => counted(line).map(|(_, rest)| rest).or_else(|| after_number_alone(line)),
            Prefix::Indent(blanks) => line.strip_prefix(blanks.as_str()),
            Prefix::File(name) => line.trim_start().strip_prefix(name.as_str())?.strip_prefix(':').map(without_space),
        }
    }
}

/// Detects the prefix of the records; fails with the names if there are several file names.
pub(super) fn detect(lines: &[String], form: &impl Form) -> Result<Option<Prefix>, Vec<String>> {
    let is_spaced = |rest_of: &dyn for<'a> Fn(&'a str) -> Option<&'a str>| {
        lines.iter().filter_map(|line| rest_of(line)).all(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    let dated = || lines.iter().filter_map(|line| dated(line));
    let has_program = dated().filter(|rest| program(rest).is_some()).count() * 2 > dated().count();
    let quoted = |sign| Prefix::Quote { sign, is_spaced: is_spaced(&|line| quote(line, sign)) };
    for prefix in [quoted('>'), quoted('|'), Prefix::Log { has_program }, Prefix::Patch] {
        if is_evident(&prefix, lines, form) {
            return Ok(Some(prefix));
        }
    }
    let is_spaced = is_spaced(&|line| number(line).map(|(_, rest)| rest));
    let numbers = Prefix::Number { is_spaced, has_all: are_consecutive(lines, number) };
    let is_listing = || {
        let records = |lines: &mut dyn Iterator<Item = &str>| lines.filter(|line| form.piece(line).is_record()).count();
        let with = records(&mut lines.iter().filter_map(|line| numbers.strip(line)));
        // Few names start with consecutive numbers.
        let is_long = lines.iter().filter(|line| number(line).is_some()).count() >= MIN_LISTING;
        are_consecutive(lines, number) && (is_long || with >= records(&mut lines.iter().map(String::as_str)))
    };
    if is_listing() || are_numbered(lines, form) && is_evident(&numbers, lines, form) {
        return Ok(Some(numbers));
    }
    if are_consecutive(lines, counted) && is_evident(&Prefix::Counted, lines, form) {
        return Ok(Some(Prefix::Counted));
    }
    let files = files(lines, form);
    match files.len() {
        1 => Ok(files.into_iter().next().map(Prefix::File)),
        0 => Ok(None),
        _ => Err(files.into_iter().collect()),
    }
}

/// Detects the blanks at the start of each line, if some lines may be continuations.
pub(super) fn indent(lines: &[String], form: &impl Form) -> Option<Prefix> {
    let blanks = |line: &'_ String| line.len() - line.trim_start_matches([' ', '\t']).len();
    let is_indented = |line: &String| line.starts_with("  ") || line.starts_with('\t');
    let is_blank = |line: &String| line.trim().is_empty() || is_fence(line);
    // Surrounding text need not be indented.
    let is_rim = |two: &[String]| !two.iter().any(is_blank) && is_indented(&two[0]) != is_indented(&two[1]);
    if lines.windows(2).any(is_rim) {
        return None;
    }
    let texts = || lines.iter().filter(|line| is_indented(line) && !is_blank(line));
    let first = texts().next()?;
    let common = |line: &String| first.bytes().zip(line.bytes()).take_while(|(one, other)| one == other).count();
    let width = texts().map(|line| common(line).min(blanks(line))).min()?;
    let has_others = || texts().any(|line| form.piece(line) == Piece::Other);
    let are_quoted = || ['>', '|'].iter().any(|sign| texts().all(|line| line[width..].starts_with(*sign)));
    let have_soft_breaks = || texts().any(|line| line.trim_end().ends_with('='));
    (width > 0 && (has_others() || are_quoted() || have_soft_breaks()))
        .then(|| Prefix::Indent(first[..width].to_owned()))
}

/// Returns whether lines were wrapped after the prefix was added: continuation lines lack the prefix. How many blanks were
/// at the break is unknown then, and a continuation line may look like a record.
pub(super) fn is_broken(prefix: &Prefix, lines: &[String]) -> bool {
    if !matches!(prefix, Prefix::Quote { .. } | Prefix::Log { .. }) {
        return false;
    }
    let has_prefix = |line: &String| prefix.strip(line).is_some();
    // journalctl(1) prints such lines between others.
    let is_text = |line: &String| !line.trim().is_empty() && !line.starts_with("--");
    let first = lines.iter().position(has_prefix).unwrap_or(lines.len());
    let last = lines.iter().rposition(has_prefix).unwrap_or(0);
    let between = lines.get(first..=last).unwrap_or_default();
    // The soft breaks of quoted-printable are certain.
    let is_soft = |line: &String| line.trim_end().ends_with('=');
    between.windows(2).any(|two| has_prefix(&two[0]) && !is_soft(&two[0]) && !has_prefix(&two[1]) && is_text(&two[1]))
}

/// Returns whether the prefix is certain: all records have it, or those with it are of several threads or are no lines
/// of the format otherwise. A single thread may have such a name.
fn is_evident(prefix: &Prefix, lines: &[String], form: &impl Form) -> bool {
    let mut subjects = BTreeSet::new();
    let (mut with, mut without, mut gained) = (0, 0, 0);
    for line in lines {
        match prefix.strip(line) {
            Some(rest) => {
                gained += usize::from(form.piece(line) == Piece::Other && form.piece(rest) != Piece::Other);
                if let Some(record) = after_prefixes(rest, form, MAX_LAYERS) {
                    with += 1;
                    subjects.extend(form.subject(record));
                }
            }
            None => without += usize::from(form.piece(line).is_record()),
        }
    }
    // No name starts with a date.
    let is_dated = matches!(prefix, Prefix::Log { .. });
    let is_quote = matches!(prefix, Prefix::Quote { .. });
    // If all text lines have it, records may be wrapped.
    let mut texts = lines.iter().filter(|line| !line.trim().is_empty());
    // A log line that was wrapped has its timestamp only on its first part.
    let (dated, others): (Vec<_>, Vec<_>) =
        lines.iter().filter(|line| is_dated && !line.trim().is_empty()).partition(|line| {
            prefix.strip(line).is_some_and(|rest| !rest.trim().is_empty()) && form.piece(line) == Piece::Other
        });
    let are_wrapped =
        dated.len() >= 2 && others.len() <= dated.len() * 3 && others.iter().all(|line| prefix.strip(line).is_none());
    let all_have = (is_dated || is_quote) && lines.len() >= 3 && texts.all(|line| prefix.strip(line).is_some());
    all_have
        || are_wrapped
        || gained >= 2
        || with > 0 && (is_dated || without == 0 || gained > 0 || with >= 3 && subjects.len() >= 2)
}

/// Returns whether a line has a record, possibly after prefixes.
pub(super) fn has_record(line: &str, form: &impl Form) -> bool {
    after_prefixes(line, form, MAX_LAYERS).is_some()
}

/// Returns the record after any further prefixes.
fn after_prefixes<'a>(line: &'a str, form: &impl Form, layers: usize) -> Option<&'a str> {
    if form.piece(line).is_record() {
        return Some(line);
    }
    let kinds = [
        Prefix::Quote { sign: '>', is_spaced: true },
        Prefix::Quote { sign: '|', is_spaced: true },
        Prefix::Log { has_program: true },
        Prefix::Log { has_program: false },
        Prefix::Patch,
        Prefix::Number { is_spaced: true, has_all: false },
    ];
    let mut rests = kinds.iter().filter_map(|kind| kind.strip(line));
    if layers > 0 { rests.find_map(|rest| after_prefixes(rest, form, layers - 1)) } else { None }
}

/// Returns the file names before the records. A thread's name may contain a colon: a file name is followed by padding,
/// or is too long for a part of a thread's name, and all records have one.
fn files(lines: &[String], form: &impl Form) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    let mut are_padded = false;
    for line in lines {
        let trimmed = line.trim_start();
        let named = trimmed.split_once(':').filter(|(name, rest)| {
            !name.is_empty() && !name.contains(char::is_whitespace) && form.piece(rest).is_record()
        });
        match named {
            Some((name, rest)) => {
                are_padded |= rest.starts_with("   ") || !form.piece(line).is_record();
                files.insert(name.to_owned());
            }
            None if form.piece(line).is_record() => return BTreeSet::new(),
            None => {}
        }
    }
    if are_padded && files.len() <= MAX_FILES { files } else { BTreeSet::new() }
}

fn without_space(rest: &str) -> &str {
    rest.strip_prefix(' ').unwrap_or(rest)
}

fn quote(line: &str, sign: char) -> Option<&str> {
    let trimmed = line.trim_start();
    // Deeper indented signs are text.
    if line.len() - trimmed.len() > 3 {
        return None;
    }
    let initials = trimmed.find(|c: char| !c.is_ascii_uppercase()).filter(|&end| end <= 3).unwrap_or(0);
    let rest = trimmed.get(initials..)?;
    rest.strip_prefix(sign).filter(|_| initials == 0 || sign == '>')
}

/// Returns the text after a date or time of day.
pub(super) fn dated(line: &str) -> Option<&str> {
    let line = line.trim_start();
    date(line).or_else(|| bracketed_time(line))
}

/// Returns the text after the timestamps of a log line.
pub(super) fn log(line: &str, has_program: bool) -> Option<&str> {
    // Priority of a kernel message.
    let mut rest = line.trim_start();
    if let Some((level, after)) = rest.strip_prefix('<').and_then(|rest| rest.split_once('>'))
        && !level.is_empty()
        && level.len() <= 3
        && level.bytes().all(|byte| byte.is_ascii_digit())
    {
        rest = after;
    }
    let after_date = dated(rest);
    let mut is_any = after_date.is_some();
    rest = after_date.unwrap_or(rest);
    if is_any && has_program {
        rest = program(rest).unwrap_or(rest);
    }
    while let Some(after) = bracketed_stamp(rest, is_any) {
        (rest, is_any) = (after, true);
    }
    is_any.then(|| without_space(rest))
}

/// Parses `Nov 28 15:39:22`, `2026-11-28T15:39:22.123+00:00`, `2026-11-28 15:39:22`, or `15:39:22`.
fn date(text: &str) -> Option<&str> {
    if MONTHS.iter().any(|month| text.starts_with(month)) {
        let (_, rest) = text.split_at_checked(3)?;
        let rest = rest.trim_start();
        let day = rest.find(|c: char| !c.is_ascii_digit()).filter(|day| (1..=2).contains(day))?;
        return time(rest[day..].trim_start());
    }
    let is_day = |day: &str| {
        let parts: Vec<&str> = day.split('-').collect();
        (2..=3).contains(&parts.len())
            && parts.iter().all(|part| (2..=4).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match text.split_once(['T', ' ']) {
        Some((day, rest)) if is_day(day) => time(rest),
        _ => time(text),
    }
}

/// Parses `15:39:22` with an optional fraction and zone.
fn time(text: &str) -> Option<&str> {
    let (word, rest) = text.split_at(text.find(' ').unwrap_or(text.len()));
    is_time(word).then_some(rest)
}

fn is_time(word: &str) -> bool {
    let bytes = word.as_bytes();
    let is_clock = bytes.len() >= 8
        && bytes[..8].iter().enumerate().all(|(at, byte)| match at {
            2 | 5 => *byte == b':',
            _ => byte.is_ascii_digit(),
        });
    is_clock && bytes[8..].iter().all(|byte| byte.is_ascii_digit() || b".,:+-Z".contains(byte))
}

/// Parses `[15:39:22]`.
fn bracketed_time(text: &str) -> Option<&str> {
    let (inner, rest) = text.strip_prefix('[')?.split_once(']')?;
    let clock = inner.rsplit([' ', 'T']).next().unwrap_or_default();
    is_time(clock).then_some(rest)
}

/// Parses `host kernel:`, `kernel:`, or `host program[12]:`.
fn program(text: &str) -> Option<&str> {
    let mut rest = text.trim_start();
    for _ in 0..2 {
        let (word, after) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
        if let Some(name) = word.strip_suffix(':') {
            let name = name.split('[').next().unwrap_or_default();
            return (!name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)))
            .then_some(after);
        }
        rest = after.trim_start();
    }
    None
}

/// Parses `[   12.345678]`, and after it the kernel's caller info, a thread or CPU: `[  T123]`, `[C1]`.
fn bracketed_stamp(text: &str, is_any: bool) -> Option<&str> {
    let text = if is_any { text.trim_start() } else { text };
    let (inner, rest) = text.strip_prefix('[')?.split_once(']')?;
    let inner = inner.trim();
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_stamp = || {
        inner.split_once('.').is_some_and(|(seconds, rest)| is_number(seconds) && is_number(rest) && rest.len() == 6)
    };
    let is_caller = || inner.strip_prefix(['T', 'C']).is_some_and(is_number);
    (is_stamp() || is_any && is_caller()).then_some(rest)
}

/// Parses `  12: `, `12|`, or `12→`.
fn number(line: &str) -> Option<(u64, &str)> {
    let trimmed = line.trim_start();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).filter(|&digits| digits > 0)?;
    let (number, rest) = trimmed.split_at(digits);
    let rest = rest.trim_start_matches(' ');
    Some((number.parse().ok()?, rest.strip_prefix([':', '|', '\u{2192}', ')', '\t'])?))
}

/// Returns the empty rest of a line that is only a padded line number.
fn after_number_alone(line: &str) -> Option<&str> {
    (line.starts_with(' ') && line.trim().parse::<u64>().is_ok()).then_some("")
}

fn counted(line: &str) -> Option<(u64, &str)> {
    let trimmed = line.trim_start();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).filter(|&digits| digits > 0)?;
    let (number, rest) = trimmed.split_at(digits);
    Some((number.parse().ok()?, rest.strip_prefix([' ', '\t'])?))
}

/// Returns whether the numbers are line numbers: a name may start with a number as well.
fn are_numbered(lines: &[String], form: &impl Form) -> bool {
    let spoils = |(line, rest): (&str, &str)| {
        log(rest, false).is_some() || !form.piece(line).is_record() && form.piece(rest).is_record()
    };
    if lines.iter().filter_map(|line| Some((line.as_str(), number(line)?.1))).any(spoils)
        || are_consecutive(lines, number)
    {
        return true;
    }
    let is_record = |rest: &str| after_prefixes(rest, form, MAX_LAYERS).is_some();
    let records =
        lines.iter().zip(1..).filter_map(|(line, at)| Some((at, number(line).filter(|(_, rest)| is_record(rest))?.0)));
    let records: Vec<(u64, u64)> = records.collect();
    match records[..] {
        [] => false,
        [(at, number)] => at == number || number == 1,
        _ => records.windows(2).all(|two| two[0].1.checked_add(1) == Some(two[1].1)),
    }
}

/// Returns whether each number follows the previous one. Text around the numbered lines has no numbers.
fn are_consecutive(lines: &[String], number: fn(&str) -> Option<(u64, &str)>) -> bool {
    let number_of = |line: &String| number(line).map(|(number, _)| number).or_else(|| line.trim().parse().ok());
    let numbers: Vec<Option<u64>> = lines.iter().filter(|line| !line.trim().is_empty()).map(number_of).collect();
    let first = numbers.iter().position(Option::is_some).unwrap_or(0);
    let last = numbers.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    let numbers = &numbers[first..last];
    let follows = |two: &[Option<u64>]| matches!(two, [Some(one), Some(next)] if one.checked_add(1) == Some(*next));
    (numbers.len() >= 3 || numbers.len() == 2 && numbers[0] == Some(1)) && numbers.windows(2).all(follows)
}
