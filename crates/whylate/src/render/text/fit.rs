// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fits lines into a terminal: a longer line is broken at spaces, below the text that it continues.

use std::io::{self, Write};

use super::pad::Spaces;
use crate::terminal::{columns_of, wrapped};

/// Separate a function and its caller, and a caller and its function.
const CALLS: [&str; 2] = [" < ", " > "];
/// Minimum width of a column of names, and of names in the first columns.
pub(super) const MIN_NAME_WIDTH: usize = 20;
/// Minimum width of the text of a continued line.
const MIN_TEXT: usize = 24;

/// Shortens a text to `room` characters by cutting out its middle; of a function and its caller, the middles of both.
pub fn without_middle(text: &str, room: usize) -> String {
    let length = text.chars().count();
    if length <= room {
        return text.to_owned();
    }
    let functions = CALLS.into_iter().find_map(|calls| Some((text.split_once(calls)?, calls)));
    if let Some(((one, other), calls)) = functions.filter(|_| room >= MIN_NAME_WIDTH) {
        let (room, second) = (room - calls.len(), other.chars().count());
        let first = one.chars().count().min((room / 2).max(room.saturating_sub(second)));
        return format!("{}{calls}{}", without_middle(one, first), without_middle(other, room - first));
    }
    let kept = room.saturating_sub(2);
    let begin: String = text.chars().take(kept / 2).collect();
    let end: String = text.chars().skip(length - (kept - kept / 2)).collect();
    format!("{begin}..{end}")
}

/// Returns the width of the terminal on standard output; `None` if it is not a terminal.
pub fn terminal_columns() -> Option<usize> {
    columns_of(&io::stdout())
}

/// Returns the width of a text without color.
pub fn width(text: &str) -> usize {
    let mut in_escape = false;
    let is_shown = |c: &char| {
        let is_escape = in_escape || *c == '\x1b';
        in_escape = is_escape && *c != 'm';
        !is_escape
    };
    text.chars().filter(is_shown).count()
}

/// Returns where the text of a line begins: after its last gap of two or more spaces in the first half of the terminal,
/// and in an indented line without figures two columns further in.
fn text_column(line: &str, columns: usize) -> usize {
    let indent = line.len() - line.trim_start_matches(' ').len();
    let (mut column, mut spaces) = (0, 0);
    for (at, c) in line.chars().enumerate().take(columns / 2) {
        match c {
            ' ' => spaces += 1,
            _ => {
                if spaces >= 2 && at > indent {
                    column = at;
                }
                spaces = 0;
            }
        }
    }
    match (column, indent) {
        (0, 0) => 0,
        (0, indent) => indent + 2,
        (column, _) => column,
    }
    .min(columns.saturating_sub(MIN_TEXT))
}

/// Breaks a line at spaces into lines of at most this width. A longer word loses its middle.
pub fn fitted(line: &str, columns: usize) -> Vec<String> {
    if width(line) <= columns {
        return vec![line.to_owned()];
    }
    let column = text_column(line, columns);
    let (mut lines, mut last, mut used) = (Vec::new(), String::new(), 0);
    for word in line.split(' ') {
        let length = width(word);
        if length > 0 && used > column && used + length > columns {
            lines.push(last.trim_end().to_owned());
            last = Spaces(column).to_string();
            used = column;
        }
        let room = columns - used.min(column);
        last.push_str(&if length > room { without_middle(word, room) } else { word.to_owned() });
        last.push(' ');
        used += length.min(room) + 1;
    }
    lines.push(last.trim_end().to_owned());
    lines
}

/// Breaks a command line at spaces outside quotes into lines of at most this width. A backslash at the end of a line makes
/// the shell join it with the next one, so that the lines can be pasted. A longer word has a line of its own.
pub fn command_lines(command: &str, indent: usize, columns: usize) -> Vec<String> {
    let whole = format!("{}{command}", Spaces(indent));
    if width(&whole) <= columns {
        return vec![whole];
    }
    let mut is_quoted = false;
    let held = command.chars().map(|c| {
        is_quoted ^= c == '\'';
        if is_quoted && c == ' ' { QUOTED_SPACE } else { c }
    });
    let held: String = held.collect();
    let more = indent + 2;
    let mut lines = wrapped(&held, columns.saturating_sub(more + CONTINUED.len()).max(1));
    let last = lines.len() - 1;
    lines[..last].iter_mut().for_each(|line| line.push_str(CONTINUED));
    let indents = std::iter::once(indent).chain(std::iter::repeat(more));
    let lines = lines.iter().map(|line| line.replace(QUOTED_SPACE, " "));
    indents.zip(lines).map(|(indent, line)| format!("{}{line}", Spaces(indent))).collect()
}

/// Mark at the end of a line if the command continues.
const CONTINUED: &str = " \\";
/// Stand-in for a space at which a command line is not broken.
const QUOTED_SPACE: char = '\0';

/// Writer that fits each line that is written to it.
pub struct Fit<W: Write> {
    to: W,
    columns: Option<usize>,
    /// The beginning of a line that was not written to its end yet.
    line: Vec<u8>,
}

impl<W: Write> Fit<W> {
    /// Fits lines into this number of columns; passes them on as they are without one.
    pub fn new(to: W, columns: Option<usize>) -> Self {
        Fit { to, columns, line: Vec::new() }
    }

    fn write_lines(&mut self, columns: usize) -> io::Result<()> {
        let Some(end) = self.line.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
        let rest = self.line.split_off(end + 1);
        let lines = std::mem::replace(&mut self.line, rest);
        let lines = String::from_utf8_lossy(&lines);
        for line in lines.lines() {
            fitted(line, columns).iter().try_for_each(|line| writeln!(self.to, "{line}"))?;
        }
        Ok(())
    }
}

impl Fit<io::BufWriter<io::StdoutLock<'static>>> {
    /// Fits lines of text into the terminal on standard output; passes on what is not text.
    pub fn stdout(is_text: bool) -> Self {
        Fit::new(io::BufWriter::new(io::stdout().lock()), terminal_columns().filter(|_| is_text))
    }
}

impl Fit<io::BufWriter<io::StderrLock<'static>>> {
    /// Fits lines of text into the terminal on standard error; passes on what is not text.
    pub fn stderr(is_text: bool) -> Self {
        Fit::new(io::BufWriter::new(io::stderr().lock()), columns_of(&io::stderr()).filter(|_| is_text))
    }
}

impl<W: Write> Write for Fit<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(columns) = self.columns else { return self.to.write(bytes) };
        self.line.extend_from_slice(bytes);
        self.write_lines(columns)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.write_all(&std::mem::take(&mut self.line))?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_continue_below_their_text() {
        let line = "     81.0%    1.62s  encoder:26535 waited for a CPU: behind cron-job:26536";
        assert_eq!(
            fitted(line, 50),
            ["     81.0%    1.62s  encoder:26535 waited for a", "                     CPU: behind cron-job:26536"]
        );
        assert_eq!(fitted("one two three", 8), ["one two", "three"]);
        assert_eq!(fitted("  one two three four five six seven", 30), ["  one two three four five six", "    seven"]);
        assert_eq!(fitted(line, 80), [line]);
    }

    #[test]
    fn long_word_keeps_both_ends() {
        assert_eq!(fitted("at a_function_with_a_very_long_name there", 20), ["at", "a_functio..long_name", "there"]);
        assert_eq!(fitted(&"x".repeat(100), 10), ["xxxx..xxxx"]);
    }

    #[test]
    fn command_can_be_pasted() {
        let command = "whylate replay /var/log/a.whylate wq --why 10ms";
        assert_eq!(command_lines(command, 2, 49), [format!("  {command}")]);
        let lines = ["  whylate replay /var/log/a.whylate \\", "    wq --why 10ms"];
        assert_eq!(command_lines(command, 2, 39), lines);
        let lines = ["  whylate replay \\", "    /var/log/a.whylate \\", "    wq --why 10ms"];
        assert_eq!(command_lines(command, 2, 22), lines);
        let lines = ["  whylate replay \\", "    'a b c.whylate' wq"];
        assert_eq!(command_lines("whylate replay 'a b c.whylate' wq", 2, 24), lines);
    }

    #[test]
    fn color_has_no_width() {
        let colored = "\x1b[1;31mLATE\x1b[m on web1";
        assert_eq!(width(colored), 12);
        assert_eq!(fitted(colored, 12), [colored]);
        assert_eq!(fitted(colored, 8), ["\x1b[1;31mLATE\x1b[m on", "web1"]);
    }

    #[test]
    fn writer_fits_whole_lines() {
        let mut out = Vec::new();
        let mut fit = Fit::new(&mut out, Some(8));
        write!(fit, "one ").and_then(|()| write!(fit, "two three\nfo")).and_then(|()| write!(fit, "ur")).expect("room");
        fit.flush().expect("room");
        assert_eq!(String::from_utf8_lossy(&out), "one two\nthree\nfour");
    }
}
