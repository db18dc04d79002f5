// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a tool's output as people paste it: quoted, wrapped by mail software, prefixed with log timestamps, copied
//! from a web page. All importers read their lines through this module.
//!
//! The head of a file shows how its lines were altered. An alteration is undone only if the head proves it: all records
//! of the format have a prefix of one kind, or are complete only after it is undone. If two ways to join wrapped lines
//! are equally good, the file is refused. [`Lines::undone`] lists what was undone.

mod encoding;
mod prefix;
mod wrap;

use std::collections::VecDeque;
use std::io::{self, BufRead, Cursor, Read};

use thiserror::Error;

use self::encoding::Encoding;
use self::prefix::Prefix;
use self::wrap::{Joiner, Wrap};
use crate::text::{self, BINARY};

/// Bytes at the start of a file that are searched for alterations.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes after which a line is split: it may never end.
const MAX_RAW_BYTES: usize = 65 << 20;
/// Maximum number of nested alterations: a quoted mail of a log of a mail.
const MAX_LAYERS: usize = 6;
/// Marks in place of the omitted rest of a line.
pub(crate) const ELLIPSES: [&str; 2] = ["\u{2026}", "..."];

/// Class of a line in a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A complete record.
    Whole,
    /// A record that lacks its end, as far as its text shows.
    Begins,
    /// A header, a comment or a stack frame: a line of the format that never continues on the next line.
    Own,
    /// Any other line.
    Other,
}

impl Piece {
    fn is_record(self) -> bool {
        matches!(self, Piece::Whole | Piece::Begins)
    }
}

/// A text format that an importer parses.
pub trait Form {
    /// Classifies a line.
    fn piece(&self, line: &str) -> Piece;

    /// Returns the subject of the record, e.g. a thread's name.
    fn subject<'a>(&self, line: &'a str) -> Option<&'a str>;

    /// Returns whether a line of [`Piece::Other`] may be the rest of a record.
    fn can_continue(&self, line: &str) -> bool;

    /// Returns whether a line of [`Piece::Begins`] certainly lacks its end.
    fn lacks_end(&self, _line: &str) -> bool {
        true
    }

    /// Returns whether a seemingly complete record may lack the end of its last field. `is_at_edge`: all longer lines
    /// of the file were cut in the column where it ends.
    fn has_open_end(&self, _line: &str, _is_at_edge: bool) -> bool {
        false
    }

    /// Returns whether two lines are the same record.
    fn is_same(&self, one: &str, other: &str) -> bool {
        one == other
    }

    /// Returns whether a blank line ends a group of records, so that trailing spaces wrapped by a terminal would split a
    /// group.
    fn is_ended_by_blanks(&self) -> bool {
        false
    }

    /// Returns whether the rest of a record may look like a record; it is a rest only if the previous line is full.
    fn is_rest_alike(&self) -> bool {
        false
    }
}

/// Why a file of any format cannot be read.
#[derive(Debug, Error)]
pub enum PasteError {
    /// Reading failed.
    #[error("cannot read it")]
    Io(#[from] io::Error),
    /// The file is binary.
    #[error("{BINARY}")]
    Binary,
    /// The file is in a binary format that another program turns into text.
    #[error("{0}")]
    Container(&'static str),
    /// Wrapped lines can be joined in two ways with different results.
    #[error(
        "its lines are wrapped or cut off, and joining them with or without a space gives different names: give the \
         lines as they were"
    )]
    Wrapped,
    /// The file has the events of several machines or files.
    #[error(
        "it has the traces of several machines or files ({}): give one of them, e.g. grep '{}' FILE",
        .0.join(", "), .0.first().map_or("", String::as_str)
    )]
    SeveralMachines(Vec<String>),
}

/// Magic numbers of binary formats, and what to do with such a file.
const CONTAINERS: [(&[u8], &str); 6] = [
    (b"\x17\x08\x44tracing", "this is a trace.dat: import the output of `trace-cmd report -i` on it"),
    (b"PERFILE", "this is a perf.data: import the output of `perf script --show-lost-events -i` on it"),
    (b"\x5e\x2a\x4d\x18", "this is a recording of whylate: show it with `whylate replay`"),
    (b"\x1f\x8b", COMPRESSED),
    (b"\x28\xb5\x2f\xfd", COMPRESSED),
    (b"\xfd7zXZ", COMPRESSED),
];
const COMPRESSED: &str = "this is compressed: decompress it first";

/// One alteration.
#[derive(Debug)]
enum Layer {
    Encoding(Encoding),
    Prefix(Prefix),
}

impl Layer {
    fn name(&self) -> &'static str {
        match self {
            Layer::Encoding(encoding) => encoding.name(),
            Layer::Prefix(prefix) => prefix.name(),
        }
    }

    /// Undoes the alteration in a line; returns false if the line continues on the next one.
    fn undo(&self, line: &mut String, pending: &mut String, longest: usize) -> bool {
        match self {
            Layer::Encoding(encoding) => encoding.undo(line, pending, longest),
            Layer::Prefix(prefix) => {
                if let Some(rest) = prefix.strip(line) {
                    *line = rest.to_owned();
                }
                true
            }
        }
    }

    fn undo_all(&self, lines: &[String], longest: usize) -> Vec<String> {
        let mut pending = String::new();
        let mut undone = Vec::with_capacity(lines.len());
        for line in lines {
            let mut line = line.clone();
            if self.undo(&mut line, &mut pending, longest) {
                undone.push(line);
            }
        }
        undone.extend(Some(pending).filter(|pending| !pending.is_empty()));
        undone
    }
}

/// Reader of the lines of a file.
pub struct Lines<R, F> {
    input: io::Chain<Cursor<Vec<u8>>, R>,
    form: F,
    longest: usize,
    taken: u64,
    /// Alterations, outermost first, each with the part of a line that waits for its rest.
    layers: Vec<(Layer, String)>,
    joiner: Option<Joiner>,
    ready: VecDeque<String>,
    bytes: Vec<u8>,
    has_records: bool,
    /// The file does not end with a newline, and its last line was returned.
    is_at_end: bool,
    /// The last line continues beyond the part that was returned.
    is_endless: bool,
    /// Column in which lines were cut, in characters.
    edge: Option<usize>,
}

impl<R: BufRead, F: Form> Lines<R, F> {
    /// Examines the head of a file. The rest of lines longer than `longest` bytes is dropped.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is binary, or its alterations are ambiguous.
    pub fn new(mut input: R, form: F, longest: usize) -> Result<Self, PasteError> {
        let mut head = Vec::new();
        loop {
            let bytes = match input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                bytes => bytes?,
            };
            // At least one line.
            let limit = if head.contains(&b'\n') { HEAD_BYTES } else { longest.max(HEAD_BYTES) };
            let taken = bytes.len().min(limit.saturating_sub(head.len()));
            head.extend_from_slice(&bytes[..taken]);
            input.consume(taken);
            if taken == 0 {
                break;
            }
        }
        if let Some((_, what)) = CONTAINERS.iter().find(|(magic, _)| head.starts_with(magic)) {
            return Err(PasteError::Container(what));
        }
        if text::utf16(&head).is_some() {
            input.by_ref().take(text::LONGEST + 1 - head.len() as u64).read_to_end(&mut head)?;
            head = text::decoded(head)?.into_bytes();
        } else if text::is_binary(&head) {
            return Err(PasteError::Binary);
        }
        let mut lines = Lines {
            input: Cursor::new(head).chain(input),
            form,
            longest,
            taken: 0,
            layers: Vec::new(),
            joiner: None,
            ready: VecDeque::new(),
            bytes: Vec::new(),
            has_records: false,
            is_at_end: false,
            is_endless: false,
            edge: None,
        };
        lines.examine()?;
        Ok(lines)
    }

    /// Returns whether the head of the file has a record of the format.
    pub fn has_records(&self) -> bool {
        self.has_records
    }

    /// Returns whether the last line returned is a truncated record: at the end of the file, at the column where others
    /// were cut, or with an ellipsis.
    pub fn is_cut(&self, line: &str) -> bool {
        let has_ellipsis = ELLIPSES.iter().any(|ellipsis| line.trim_end().ends_with(ellipsis));
        let is_at_edge = has_ellipsis || self.edge.is_some_and(|edge| wrap::length(line) >= edge);
        if !is_at_edge && !self.is_at_end {
            return false;
        }
        match self.form.piece(line) {
            Piece::Begins => true,
            Piece::Whole => self.form.has_open_end(line, is_at_edge),
            Piece::Own | Piece::Other => false,
        }
    }

    /// Returns the number of bytes read.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Returns descriptions of the alterations that were undone.
    pub fn undone(&self) -> Vec<String> {
        // Indentation matters to no format.
        let layers = self.layers.iter().filter(|(layer, _)| !matches!(layer, Layer::Prefix(Prefix::Indent(_))));
        let layers = layers.map(|(layer, _)| layer.name().to_owned());
        let joined = self.joiner.as_ref().map(Joiner::joined).filter(|&joined| joined > 0);
        layers.chain(joined.map(|joined| format!("{joined} line breaks within records"))).collect()
    }

    /// Returns the next line in `line`; false at the end.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn next(&mut self, line: &mut String) -> io::Result<bool> {
        let mut is_any = true;
        loop {
            if let Some(ready) = self.ready.pop_front() {
                *line = ready;
                return Ok(true);
            }
            if !is_any {
                return Ok(false);
            }
            is_any = self.next_decoded(line)?;
            let Some(joiner) = &mut self.joiner else { return Ok(is_any) };
            let given = if is_any { Some(std::mem::take(line)) } else { None };
            joiner.take(given, &self.form, &mut self.ready);
        }
    }

    /// Detects the alterations from the head of the file.
    fn examine(&mut self) -> Result<(), PasteError> {
        let head = self.input.get_ref().0.get_ref();
        let is_cut = head.len() >= HEAD_BYTES;
        let mut lines: Vec<String> = head.split(|&byte| byte == b'\n').map(cleaned).collect();
        // The text after the last newline is empty or a part of a line.
        if is_cut || lines.last().is_some_and(String::is_empty) {
            lines.pop();
        }
        if self.form.is_ended_by_blanks() && wrap::has_wrapped_blanks(&lines, &self.form) {
            return Err(PasteError::Wrapped);
        }
        lines.iter_mut().filter(|line| is_fence(line)).for_each(String::clear);
        while self.layers.len() < MAX_LAYERS {
            // A continued line is joined without the prefix of the next line.
            let stamped = || Encoding::detect_around_stamps(&lines, |line| prefix::dated(line).is_some());
            let encoding = Encoding::detect_page(&lines).map(Layer::Encoding);
            let indent = || prefix::indent(&lines, &self.form).map(Layer::Prefix);
            let layer = match encoding.or_else(indent).or_else(|| stamped().map(Layer::Encoding)) {
                Some(layer) => Some(layer),
                None => {
                    let prefix = prefix::detect(&lines, &self.form).map_err(PasteError::SeveralMachines)?;
                    prefix.map(Layer::Prefix).or_else(|| Encoding::detect(&lines, &self.form).map(Layer::Encoding))
                }
            };
            let Some(layer) = layer else { break };
            if let Layer::Prefix(prefix) = &layer
                && prefix::is_broken(prefix, &lines)
            {
                return Err(PasteError::Wrapped);
            }
            lines = layer.undo_all(&lines, self.longest);
            self.layers.push((layer, String::new()));
        }
        lines.iter_mut().filter(|line| is_fence(line)).for_each(String::clear);
        self.has_records = lines.iter().any(|line| self.form.piece(line).is_record());
        match Wrap::detect(&lines, &self.form) {
            Ok(Some(wrap)) => self.joiner = Some(Joiner::new(wrap, self.longest)),
            Ok(None) => self.edge = wrap::edge(&lines, &self.form),
            Err(wrap::Ambiguous) => return Err(PasteError::Wrapped),
        }
        Ok(())
    }

    /// Reads the next line and undoes all layers.
    fn next_decoded(&mut self, line: &mut String) -> io::Result<bool> {
        loop {
            let mut from = 0;
            if self.next_raw()? {
                clean(&self.bytes, line);
            } else if let Some(at) = self.layers.iter().position(|(_, pending)| !pending.is_empty()) {
                // At the end of the file, a part that waits for its rest gets none.
                *line = std::mem::take(&mut self.layers[at].1);
                from = at + 1;
            } else {
                return Ok(false);
            }
            let longest = self.longest;
            if self.layers[from..].iter_mut().all(|(layer, pending)| layer.undo(line, pending, longest)) {
                if is_fence(line) {
                    line.clear();
                }
                truncate(line, longest);
                return Ok(true);
            }
        }
    }

    /// Reads the next line without its end; bytes beyond `longest` are dropped.
    fn next_raw(&mut self) -> io::Result<bool> {
        self.bytes.clear();
        let mut length = 0;
        // The rest of an overlong line is dropped.
        let limit = if std::mem::take(&mut self.is_endless) { 0 } else { self.longest };
        loop {
            let bytes = match self.input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                bytes => bytes?,
            };
            if bytes.is_empty() || length > MAX_RAW_BYTES {
                self.is_endless = !bytes.is_empty();
                self.is_at_end |= bytes.is_empty() && length > 0;
                return Ok(length > 0);
            }
            let end = bytes.iter().position(|&byte| byte == b'\n');
            let part = &bytes[..end.unwrap_or(bytes.len())];
            self.bytes.extend_from_slice(&part[..part.len().min(limit - self.bytes.len())]);
            let taken = part.len() + usize::from(end.is_some());
            length += taken;
            self.taken += taken as u64;
            self.input.consume(taken);
            if end.is_some() {
                return Ok(true);
            }
        }
    }
}

/// Returns whether a line starts with the timestamp of a log, as no name does.
pub(crate) fn has_timestamp(line: &str) -> bool {
    prefix::log(line, false).is_some()
}

/// Decodes a line, and removes carriage return, byte order mark, and special spaces of web pages.
fn clean(bytes: &[u8], line: &mut String) {
    let end = bytes.iter().rposition(|&byte| byte != b'\r').map_or(0, |last| last + 1);
    let text = String::from_utf8_lossy(&bytes[..end]);
    line.clear();
    if text.is_ascii() {
        return line.push_str(&text);
    }
    let is_space = |c: char| matches!(c, '\u{a0}' | '\u{2000}'..='\u{200a}' | '\u{202f}' | '\u{205f}' | '\u{3000}');
    let has_no_width = |c: char| matches!(c, '\u{ad}' | '\u{200b}' | '\u{2060}' | '\u{feff}');
    line.extend(text.chars().filter(|&c| !has_no_width(c)).map(|c| if is_space(c) { ' ' } else { c }));
}

/// Returns whether a line opens or closes a quoted block in a report.
fn is_fence(line: &str) -> bool {
    let line = line.trim();
    ["```", "~~~", "{code", "{noformat}", "[code]", "[/code]"].iter().any(|fence| line.starts_with(fence))
        && !line.contains(' ')
}

/// Truncates a line to `longest` bytes.
fn truncate(line: &mut String, longest: usize) {
    if line.len() > longest {
        let end = (0..=longest).rev().find(|&end| line.is_char_boundary(end));
        line.truncate(end.unwrap_or(0));
    }
}

fn cleaned(bytes: &[u8]) -> String {
    let mut line = String::new();
    clean(bytes, &mut line);
    line
}

#[cfg(test)]
mod tests;
