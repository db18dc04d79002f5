// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines of a tool's output as people paste them: quoted, wrapped by a mail program, logged behind stamps, copied from a
//! web page. Each importer reads its lines through here.
//!
//! The head of a file shows what was done to it. A transformation is undone only where the head proves it: the records
//! of the form all have the same kind of text in front of them, or are whole only once it is undone. Where two ways to
//! join wrapped lines are equally good, the file is refused. What is undone is listed in [`Lines::undone`].

mod encoding;
mod prefix;
mod wrap;

use std::collections::VecDeque;
use std::io::{self, BufRead, Cursor, Read};

use thiserror::Error;

use self::encoding::Encoding;
use self::prefix::Prefix;
use self::wrap::{Wrap, Wrapped};
use crate::text::{self, BINARY};

/// How much of a file is searched for what was done to it, in bytes.
const HEAD: usize = 64 << 10;
/// A line that goes on for longer is given out in parts, in bytes: it may have no end.
const ENDLESS: usize = 65 << 20;
/// Transformations that are undone one after the other: a quoted mail of a log of a mail.
const LAYERS: usize = 6;
/// Stand for the rest of a line that was left out.
pub(crate) const ELLIPSES: [&str; 2] = ["\u{2026}", "..."];

/// What a line is to the form that an importer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A record that lacks nothing.
    Whole,
    /// A record that lacks its end, as far as the form shows.
    Begins,
    /// A heading, a comment, a stack frame: a line of the form that never goes on in the next one.
    Own,
    /// None of these.
    Other,
}

impl Piece {
    fn is_record(self) -> bool {
        matches!(self, Piece::Whole | Piece::Begins)
    }
}

/// The form that an importer reads.
pub trait Form {
    /// Classifies a line.
    fn piece(&self, line: &str) -> Piece;

    /// Whose record the line is, e.g. a thread's name.
    fn subject<'a>(&self, line: &'a str) -> Option<&'a str>;

    /// Whether a line of [`Piece::Other`] may be the rest of a record.
    fn can_continue(&self, line: &str) -> bool;

    /// Whether it is sure that a line of [`Piece::Begins`] lacks its end.
    fn lacks_end(&self, _line: &str) -> bool {
        true
    }

    /// Whether a record that seems whole may lack the end of the last thing that is read of it; `is_at_edge` where all
    /// longer lines of the file were cut in the column in which it ends.
    fn has_open_end(&self, _line: &str, _is_at_edge: bool) -> bool {
        false
    }

    /// Whether two lines are the same record.
    fn is_same(&self, one: &str, other: &str) -> bool {
        one == other
    }

    /// Whether the rest of a record may look like a record: it is then only where the line before it is full.
    fn is_rest_alike(&self) -> bool {
        false
    }
}

/// Why a file cannot be read, whatever its form is.
#[derive(Debug, Error)]
pub enum PasteError {
    /// Reading failed.
    #[error("cannot read it")]
    Io(#[from] io::Error),
    /// It is no text.
    #[error("{BINARY}")]
    Binary,
    /// Wrapped lines can be joined in two ways that differ.
    #[error(
        "its lines are wrapped or cut off, and joining them with or without a space gives different names: give the \
         lines as they were"
    )]
    Wrapped,
    /// It has the events of several machines or files.
    #[error(
        "it has the traces of several machines or files ({}): give one of them, e.g. grep '{}' FILE",
        .0.join(", "), .0.first().map_or("", String::as_str)
    )]
    SeveralMachines(Vec<String>),
}

/// One transformation, undone.
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

    /// Undoes it in a line; false where the line goes on in the next one.
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

/// The lines of a file.
pub struct Lines<R, F> {
    input: io::Chain<Cursor<Vec<u8>>, R>,
    form: F,
    longest: usize,
    taken: u64,
    /// From the outermost transformation on, each with the part of a line that waits for its rest.
    layers: Vec<(Layer, String)>,
    wrapped: Option<Wrapped>,
    ready: VecDeque<String>,
    bytes: Vec<u8>,
    has_records: bool,
    /// The file ends without the end of a line, and that line was given out.
    is_at_end: bool,
    /// The line that was taken last goes on.
    is_endless: bool,
    /// The column in which lines were cut off, in characters.
    edge: Option<usize>,
}

impl<R: BufRead, F: Form> Lines<R, F> {
    /// Reads the head of a file; of longer lines than `longest` bytes the rest is dropped.
    ///
    /// # Errors
    /// When it cannot be read, is no text, or it cannot be decided what the lines were.
    pub fn new(mut input: R, form: F, longest: usize) -> Result<Self, PasteError> {
        let mut head = Vec::new();
        loop {
            let bytes = match input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                bytes => bytes?,
            };
            // One line at least.
            let most = if head.contains(&b'\n') { HEAD } else { longest.max(HEAD) };
            let taken = bytes.len().min(most.saturating_sub(head.len()));
            head.extend_from_slice(&bytes[..taken]);
            input.consume(taken);
            if taken == 0 {
                break;
            }
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
            wrapped: None,
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

    /// Whether the head of the file has a record of the form.
    pub fn has_records(&self) -> bool {
        self.has_records
    }

    /// Whether the line given out last is a record that was cut off: where the file ends, at the edge at which others
    /// were, or with an ellipsis.
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

    /// How many bytes were read.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// What was undone, in words.
    pub fn undone(&self) -> Vec<String> {
        // Indentation matters to no form.
        let layers = self.layers.iter().filter(|(layer, _)| !matches!(layer, Layer::Prefix(Prefix::Indent(_))));
        let layers = layers.map(|(layer, _)| layer.name().to_owned());
        let joined = self.wrapped.as_ref().map(Wrapped::joined).filter(|&joined| joined > 0);
        layers.chain(joined.map(|joined| format!("{joined} line breaks within records"))).collect()
    }

    /// Takes the next line; false at the end.
    ///
    /// # Errors
    /// When the file cannot be read.
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
            is_any = self.unlayered(line)?;
            let Some(wrapped) = &mut self.wrapped else { return Ok(is_any) };
            let given = if is_any { Some(std::mem::take(line)) } else { None };
            wrapped.take(given, &self.form, &mut self.ready);
        }
    }

    /// Finds out from the head what was done to the file.
    fn examine(&mut self) -> Result<(), PasteError> {
        let head = self.input.get_ref().0.get_ref();
        let is_cut = head.len() >= HEAD;
        let mut lines: Vec<String> = head.split(|&byte| byte == b'\n').map(cleaned).collect();
        // Behind the last end of a line is nothing, or a part of one.
        if is_cut || lines.last().is_some_and(String::is_empty) {
            lines.pop();
        }
        lines.iter_mut().filter(|line| is_fence(line)).for_each(String::clear);
        while self.layers.len() < LAYERS {
            // A line that goes on in the next one is joined without what stands in front of that.
            let encoding = Encoding::of_page(&lines).map(Layer::Encoding);
            let indent = || prefix::indent(&lines, &self.form).map(Layer::Prefix);
            let layer = match encoding.or_else(indent) {
                Some(layer) => Some(layer),
                None => {
                    let prefix = prefix::of(&lines, &self.form).map_err(PasteError::SeveralMachines)?;
                    prefix.map(Layer::Prefix).or_else(|| Encoding::of(&lines, &self.form).map(Layer::Encoding))
                }
            };
            let Some(layer) = layer else { break };
            lines = layer.undo_all(&lines, self.longest);
            self.layers.push((layer, String::new()));
        }
        lines.iter_mut().filter(|line| is_fence(line)).for_each(String::clear);
        self.has_records = lines.iter().any(|line| self.form.piece(line).is_record());
        match Wrap::of(&lines, &self.form) {
            Ok(Some(wrap)) => self.wrapped = Some(Wrapped::new(wrap, self.longest)),
            Ok(None) => self.edge = wrap::edge(&lines, &self.form),
            Err(wrap::Ambiguous) => return Err(PasteError::Wrapped),
        }
        Ok(())
    }

    /// The next line with all layers undone.
    fn unlayered(&mut self, line: &mut String) -> io::Result<bool> {
        loop {
            let mut from = 0;
            if self.raw()? {
                clean(&self.bytes, line);
            } else if let Some(at) = self.layers.iter().position(|(_, pending)| !pending.is_empty()) {
                // What waits for its rest gets none.
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

    /// Takes the next line without its end; what is beyond the longest line is dropped.
    fn raw(&mut self) -> io::Result<bool> {
        self.bytes.clear();
        let mut length = 0;
        // The rest of a line is none of its own.
        let most = if std::mem::take(&mut self.is_endless) { 0 } else { self.longest };
        loop {
            let bytes = match self.input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                bytes => bytes?,
            };
            if bytes.is_empty() || length > ENDLESS {
                self.is_endless = !bytes.is_empty();
                self.is_at_end |= bytes.is_empty() && length > 0;
                return Ok(length > 0);
            }
            let end = bytes.iter().position(|&byte| byte == b'\n');
            let part = &bytes[..end.unwrap_or(bytes.len())];
            self.bytes.extend_from_slice(&part[..part.len().min(most - self.bytes.len())]);
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

/// A line as text, without its carriage return, a byte order mark, and what web pages have in place of spaces.
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

/// Whether a line marks the start or the end of a quoted text in a report.
fn is_fence(line: &str) -> bool {
    let line = line.trim();
    ["```", "~~~", "{code", "{noformat}", "[code]", "[/code]"].iter().any(|fence| line.starts_with(fence))
        && !line.contains(' ')
}

/// Cuts a line after `longest` bytes.
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
