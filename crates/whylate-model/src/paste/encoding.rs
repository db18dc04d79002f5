// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodings of text within text: UTF-16, quoted-printable, HTML, a terminal's colors, tabs.

use super::Form;

/// Tags that stand around text in pages; `<idle>` is none of them.
const TAGS: [&str; 16] =
    ["a", "br", "code", "div", "font", "li", "p", "pre", "samp", "span", "table", "tbody", "td", "tr", "tt", "ul"];
const ENTITIES: [(&str, char); 8] = [
    ("&lt;", '<'),
    ("&gt;", '>'),
    ("&amp;", '&'),
    ("&nbsp;", ' '),
    ("&quot;", '"'),
    ("&#39;", '\''),
    ("&#x27;", '\''),
    ("&apos;", '\''),
];
const TAB: usize = 8;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// RFC 2045, as mail is sent: `=3D` is `=`, and a line that ends in `=` goes on in the next one.
    QuotedPrintable,
    /// `&lt;idle&gt;` is `<idle>`.
    Html,
    /// ECMA-48 sequences that begin with ESC and `[`.
    Colors,
    /// Tabs in place of spaces.
    Tabs,
}

impl Encoding {
    pub(super) fn name(self) -> &'static str {
        match self {
            Encoding::QuotedPrintable => "quoted-printable",
            Encoding::Html => "HTML",
            Encoding::Colors => "colors of a terminal",
            Encoding::Tabs => "tabs",
        }
    }

    /// The one that the lines of a head are in.
    pub(super) fn of(lines: &[String], form: &impl Form) -> Option<Self> {
        let records = |lines: &mut dyn Iterator<Item = String>| {
            lines.filter(|line| form.piece(line) == super::Piece::Whole).count()
        };
        let gains = |encoding: Encoding| {
            let undone = |line: &String| {
                let mut line = line.clone();
                encoding.undo(&mut line, &mut String::new());
                line
            };
            records(&mut lines.iter().map(undone)) > records(&mut lines.iter().cloned())
        };
        if is_quoted_printable(lines) {
            return Some(Encoding::QuotedPrintable);
        }
        if lines.iter().any(|line| line.contains("\x1b[")) {
            let has_reset = |line: &String| ["\x1b[0m", "\x1b[m", "\x1b[K"].iter().any(|reset| line.contains(reset));
            if lines.iter().any(has_reset) || gains(Encoding::Colors) {
                return Some(Encoding::Colors);
            }
        }
        let has_entities = lines.iter().any(|line| ENTITIES.iter().any(|(entity, _)| line.contains(entity)));
        if has_entities {
            // A page that has escaped them has no bare ones but in its tags, and in front of quoted lines.
            let is_bare = |line: &String| without_tags(line).trim_start_matches(['>', ' ', '|']).contains(['<', '>']);
            let has_brackets = lines.iter().any(|line| {
                // Escaped twice, it is `&amp;lt;`.
                ["&lt;", "&gt;", "&amp;lt;", "&amp;gt;"].iter().any(|entity| line.contains(entity))
            });
            if has_brackets && !lines.iter().any(is_bare) || gains(Encoding::Html) {
                return Some(Encoding::Html);
            }
        }
        (lines.iter().any(|line| line.contains('\t')) && gains(Encoding::Tabs)).then_some(Encoding::Tabs)
    }

    /// Undoes it in a line; false where the line goes on in the next one.
    pub(super) fn undo(self, line: &mut String, pending: &mut String) -> bool {
        match self {
            Encoding::QuotedPrintable => {
                // Blanks at the end of a line were added on the way.
                let text = line.trim_end();
                let goes_on = text.strip_suffix('=');
                pending.push_str(goes_on.unwrap_or(text));
                if goes_on.is_some() && pending.len() < crate::text::LONGEST_LINE {
                    return false;
                }
                *line = from_quoted_printable(pending);
                pending.clear();
            }
            Encoding::Html => {
                let mut text = without_tags(line);
                // What an entity stands for is none.
                for (entity, c) in ENTITIES.iter().filter(|(_, c)| *c != '&') {
                    text = text.replace(entity, &c.to_string());
                }
                *line = text.replace("&amp;", "&");
            }
            Encoding::Colors => *line = without_colors(line),
            Encoding::Tabs => *line = without_tabs(line),
        }
        true
    }
}

/// What an `=` in quoted-printable is followed by.
fn escaped(bytes: &[u8]) -> Option<u8> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    };
    match bytes {
        [high, low, ..] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    }
}

/// Whether nearly every `=` begins an escape that an encoder makes, and some do.
fn is_quoted_printable(lines: &[String]) -> bool {
    let (mut valid, mut invalid) = (0_u64, 0_u64);
    for line in lines.iter().map(|line| line.trim_end().as_bytes()) {
        for (at, _) in line.iter().enumerate().filter(|(_, byte)| **byte == b'=') {
            let rest = &line[at + 1..];
            match escaped(rest) {
                // Encoders escape what is no printable ASCII, the sign itself, blanks at the end of a line, and the
                // start of lines that would end or change a mail.
                Some(byte) if byte == b'=' || byte == b'\t' || byte >= 0x80 => valid += 1,
                Some(b' ') if rest.len() == 2 => valid += 1,
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
    // Among what was escaped may be a space that does not break.
    super::cleaned(&bytes)
}

fn without_tags(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, tag)) = rest.split_once('<') {
        text.push_str(before);
        let is_tag = tag.split_once('>').is_some_and(|(inner, _)| {
            let name = inner.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
            TAGS.contains(&name.to_ascii_lowercase().as_str())
        });
        match tag.split_once('>').filter(|_| is_tag) {
            Some((_, after)) => rest = after,
            None => {
                text.push('<');
                rest = tag;
            }
        }
    }
    text.push_str(rest);
    text
}

fn without_colors(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, sequence)) = rest.split_once("\x1b[") {
        text.push_str(before);
        let end = sequence.find(|c: char| ('\x40'..='\x7e').contains(&c));
        rest = end.map_or("", |end| &sequence[end + 1..]);
    }
    text.push_str(rest);
    text
}

pub(super) fn without_tabs(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut column = 0;
    for c in line.chars() {
        let width = if c == '\t' { TAB - column % TAB } else { 1 };
        column += width;
        if c == '\t' { text.extend(std::iter::repeat_n(' ', width)) } else { text.push(c) }
    }
    text
}

/// Whether a file is UTF-16, and whether the upper byte comes first: by its byte order mark, or as every other byte of
/// its start is zero.
pub(super) fn utf16(head: &[u8]) -> Option<bool> {
    match head {
        [0xff, 0xfe, ..] => return head.iter().skip(3).step_by(2).take(64).any(|&byte| byte == 0).then_some(false),
        [0xfe, 0xff, ..] => return head.iter().skip(2).step_by(2).take(64).any(|&byte| byte == 0).then_some(true),
        _ => {}
    }
    let start = &head[..head.len().min(512) & !1];
    let zeros = |at: usize| start.iter().skip(at).step_by(2).filter(|&&byte| byte == 0).count();
    let (even, odd, half) = (zeros(0), zeros(1), start.len() / 2);
    match (even, odd) {
        _ if half < 8 => None,
        (0, odd) if odd * 10 >= half * 9 => Some(false),
        (even, 0) if even * 10 >= half * 9 => Some(true),
        _ => None,
    }
}

pub(super) fn from_utf16(bytes: &[u8], is_big_endian: bool) -> String {
    let unit = |two: &[u8; 2]| if is_big_endian { u16::from_be_bytes(*two) } else { u16::from_le_bytes(*two) };
    let units = bytes.as_chunks::<2>().0.iter().map(unit);
    char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}
