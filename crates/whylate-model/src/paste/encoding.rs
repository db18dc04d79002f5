// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodings of text: quoted-printable, HTML, terminal colors, tabs, interleaved blank lines.

use super::Form;
use crate::text;

/// Tags that surround text in web pages; `<idle>` is not one.
const TAGS: [&str; 16] =
    ["a", "br", "code", "div", "font", "li", "p", "pre", "samp", "span", "table", "tbody", "td", "tr", "tt", "ul"];
const ENTITIES: [(&str, char); 6] =
    [("lt", '<'), ("gt", '>'), ("amp", '&'), ("nbsp", ' '), ("quot", '"'), ("apos", '\'')];
/// Maximum length of an entity in bytes.
const MAX_ENTITY_BYTES: usize = 8;
const TAB_WIDTH: usize = 8;

/// An encoding of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// RFC 2045, as in mail: `=3D` is `=`, and a line that ends in `=` continues on the next one.
    QuotedPrintable,
    /// `&lt;idle&gt;` is `<idle>`.
    Html,
    /// ECMA-48 sequences that start with ESC and `[`.
    Colors,
    /// Tabs in place of spaces.
    Tabs,
    /// The given number of blank lines after each line.
    Doubled(usize),
}

impl Encoding {
    pub(super) fn name(self) -> &'static str {
        match self {
            Encoding::QuotedPrintable => "quoted-printable",
            Encoding::Html => "HTML",
            Encoding::Colors => "colors of a terminal",
            Encoding::Tabs => "tabs",
            Encoding::Doubled(_) => "blank lines between lines",
        }
    }

    /// Detects HTML by its tags in the head of a file.
    pub(super) fn detect_page(lines: &[String]) -> Option<Self> {
        // A page that was encoded as quoted-printable afterwards has its tags broken.
        let is_encoded = || lines.iter().any(|line| line.contains("=3D\""));
        (lines.iter().any(|line| has_closing_tag(line)) && !is_encoded()).then_some(Encoding::Html)
    }

    /// Detects quoted-printable encoding of a log: only the first part of a soft-broken line has a timestamp.
    pub(super) fn detect_around_stamps(lines: &[String], has_stamp: impl Fn(&str) -> bool) -> Option<Self> {
        let is_rest =
            |two: &[String]| two[0].trim_end().ends_with('=') && !two[1].trim().is_empty() && !has_stamp(&two[1]);
        let stamped = lines.iter().filter(|line| has_stamp(line)).count();
        let are_broken = || stamped * 8 > lines.len() && lines.windows(2).any(is_rest);
        (is_quoted_printable(lines) && are_broken()).then_some(Encoding::QuotedPrintable)
    }

    /// Detects the encoding of the head of a file.
    pub(super) fn detect(lines: &[String], form: &impl Form) -> Option<Self> {
        let records = |lines: &mut dyn Iterator<Item = String>| {
            lines.filter(|line| form.piece(line) == super::Piece::Whole).count()
        };
        let gains = |encoding: Encoding| {
            let undone = |line: &String| {
                let mut line = line.clone();
                encoding.undo(&mut line, &mut String::new(), text::LONGEST_LINE);
                line
            };
            records(&mut lines.iter().map(undone)) > records(&mut lines.iter().cloned())
        };
        if lines.iter().any(|line| line.contains("\x1b[")) {
            let has_reset = |line: &String| ["\x1b[0m", "\x1b[m", "\x1b[K"].iter().any(|reset| line.contains(reset));
            if lines.iter().any(has_reset) || gains(Encoding::Colors) {
                return Some(Encoding::Colors);
            }
        }
        // Escaped quotation signs at line starts must be decoded before soft line breaks are joined.
        let is_escaped = |line: &&String| {
            (line.starts_with("&gt;") || line.starts_with("&#")) && without_entities(line) != line.as_str()
        };
        let texts = || lines.iter().filter(|line| !line.trim().is_empty());
        if texts().next().is_some() && texts().all(|line| is_escaped(&line)) {
            return Some(Encoding::Html);
        }
        // Blank lines that were added after the encoding stand between the parts of a soft-broken line.
        let is_spaced_out = || lines.windows(2).all(|two| two.iter().any(|line| line.trim().is_empty()));
        if texts().count() >= 4 && is_quoted_printable(lines) && is_spaced_out() {
            return Some(Encoding::Doubled(1));
        }
        if is_quoted_printable(lines) {
            return Some(Encoding::QuotedPrintable);
        }
        if lines.iter().any(|line| without_entities(line) != *line) {
            // A page with escaped brackets has bare ones only in its tags and before quoted lines.
            let is_bare = |line: &String| without_tags(line).trim_start_matches(['>', ' ', '|']).contains(['<', '>']);
            let has_brackets = lines.iter().any(|line| {
                let brackets = |line: &str| line.matches(['<', '>']).count();
                // Escaped twice, `<` is `&amp;lt;`.
                let mut decoded = without_entities(line);
                for _ in 1..super::MAX_LAYERS {
                    decoded = without_entities(&decoded);
                }
                brackets(&decoded) > brackets(line)
            });
            if has_brackets && !lines.iter().any(is_bare) || gains(Encoding::Html) {
                return Some(Encoding::Html);
            }
        }
        if lines.iter().any(|line| line.contains('\t')) && gains(Encoding::Tabs) {
            return Some(Encoding::Tabs);
        }
        doubled(lines, form).map(Encoding::Doubled)
    }

    /// Decodes a line; returns false if it continues on the next one.
    pub(super) fn undo(self, line: &mut String, pending: &mut String, longest: usize) -> bool {
        match self {
            Encoding::QuotedPrintable => {
                // Blanks at the end of a line were added in transit.
                let text = line.trim_end();
                let goes_on = text.strip_suffix('=');
                pending.push_str(goes_on.unwrap_or(text));
                if goes_on.is_some() && pending.len() < longest {
                    return false;
                }
                *line = from_quoted_printable(pending);
                pending.clear();
            }
            Encoding::Html => *line = without_entities(&without_tags(line)),
            Encoding::Colors => *line = without_colors(line),
            Encoding::Tabs => *line = without_tabs(line),
            // `pending` has one newline for each blank line still to be removed.
            Encoding::Doubled(blanks) => {
                if !line.trim().is_empty() {
                    *pending = "\n".repeat(blanks);
                } else if pending.pop().is_some() {
                    return false;
                }
            }
        }
        true
    }
}

/// Decodes the two characters after `=` in quoted-printable.
fn escaped(bytes: &[u8]) -> Option<u8> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        // Some encoders write lower case.
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    match bytes {
        [high, low, ..] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    }
}

/// Returns whether nearly all `=` start an escape that an encoder would make, and at least one does.
fn is_quoted_printable(lines: &[String]) -> bool {
    let (mut valid, mut invalid) = (0_u64, 0_u64);
    for line in lines.iter().map(|line| line.trim_end().as_bytes()) {
        for (at, _) in line.iter().enumerate().filter(|(_, byte)| **byte == b'=') {
            let rest = &line[at + 1..];
            match escaped(rest) {
                // Encoders escape non-ASCII and control characters, `=`, blanks at the end of a line, and line starts
                // that would end or alter a mail.
                Some(b'=' | b'\t' | b'\x1b') => valid += 1,
                // A non-ASCII character in UTF-8 has several bytes.
                Some(0x80..) if rest.get(2) == Some(&b'=') || at >= 3 && line[at - 3] == b'=' => valid += 1,
                Some(b' ' | b'\r') if rest.len() == 2 => valid += 1,
                Some(b'.' | b'F') if at == 0 => valid += 1,
                _ if rest.is_empty() && at > 0 && line[at - 1] != b'=' => valid += 1,
                _ => invalid += 1,
            }
        }
    }
    valid > 0 && invalid * 4 <= valid
}

fn from_quoted_printable(line: &str) -> String {
    let mut bytes = Vec::with_capacity(line.len());
    let mut rest = line.as_bytes();
    while let [first, after @ ..] = rest {
        match escaped(after).filter(|_| *first == b'=') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    // The escaped characters may include a non-breaking space.
    super::cleaned(&bytes)
}

/// Returns whether a line has a closing tag; no C++ name contains one.
fn has_closing_tag(line: &str) -> bool {
    line.match_indices("</").any(|(at, _)| TAGS.iter().any(|tag| line[at + 2..].starts_with(&format!("{tag}>"))))
}

fn without_tags(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, tag)) = rest.split_once('<') {
        text.push_str(before);
        // A tag contains no other tag.
        let end = tag.find(['<', '>']).filter(|&end| tag[end..].starts_with('>'));
        let is_tag = |inner: &str| {
            let name = inner.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
            TAGS.contains(&name.to_ascii_lowercase().as_str())
        };
        match end.filter(|&end| is_tag(&tag[..end])) {
            Some(end) => rest = &tag[end + 1..],
            None => {
                text.push('<');
                rest = tag;
            }
        }
    }
    text.push_str(rest);
    text
}

/// Decodes entities once. An entity at the end of a truncated line may lack its semicolon.
fn without_entities(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('&') {
        text.push_str(before);
        let end = after.bytes().take(MAX_ENTITY_BYTES).position(|byte| byte == b';');
        let name = &after[..end.unwrap_or(after.len())];
        match entity(name) {
            Some(c) => {
                text.push(c);
                let tail = &after[name.len()..];
                rest = tail.strip_prefix(';').unwrap_or(tail);
            }
            None => {
                text.push('&');
                rest = after;
            }
        }
    }
    text.push_str(rest);
    text
}

/// Decodes the text between `&` and `;`: a name, `#60` or `#x3c`.
fn entity(name: &str) -> Option<char> {
    let Some(number) = name.strip_prefix('#') else {
        return ENTITIES.iter().find(|(known, _)| *known == name).map(|(_, c)| *c);
    };
    let c = match number.strip_prefix(['x', 'X']) {
        Some(digits) => u32::from_str_radix(digits, 16).ok()?,
        None => number.parse().ok()?,
    };
    match char::from_u32(c)? {
        '\u{a0}' => Some(' '),
        c => Some(c).filter(|c| !c.is_control()),
    }
}

/// Returns how many blank lines follow each line, except at the ends of the pasted text; `None` if the lines are not
/// spaced out.
fn doubled(lines: &[String], form: &impl Form) -> Option<usize> {
    let is_text = |line: &String| !line.trim().is_empty();
    let is_record = |line: &&String| form.piece(line).is_record();
    // Mail software indents the rest of a wrapped line.
    let is_rest = |two: &[String]| two[1].starts_with("  ") && !two[0].starts_with("  ") && !is_record(&&two[1]);
    let is_doubled = lines.windows(2).filter(|two| two.iter().all(is_text) && !is_rest(two)).count() <= 2
        && lines.iter().filter(is_record).count() >= 2
        && !lines.windows(2).any(|two| two.iter().all(|line| is_record(&line)) && !is_rest(two));
    let blanks = lines
        .split(|line| is_record(&line))
        .skip(1)
        .map(|between| between.iter().take_while(|line| !is_text(line)).count());
    blanks.filter(|&blanks| blanks > 0).min().filter(|_| is_doubled)
}

fn without_colors(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, sequence)) = rest.split_once("\x1b[") {
        text.push_str(before);
        let end = sequence.find(|c: char| ('\x40'..='\x7e').contains(&c));
        rest = end.map_or("", |end| &sequence[end + 1..]);
    }
    // A sequence may be cut off after its first byte.
    text.push_str(rest.trim_end_matches('\x1b'));
    text
}

pub(super) fn without_tabs(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut column = 0;
    for c in line.chars() {
        let width = if c == '\t' { TAB_WIDTH - column % TAB_WIDTH } else { 1 };
        column += width;
        if c == '\t' { text.extend(std::iter::repeat_n(' ', width)) } else { text.push(c) }
    }
    text
}
