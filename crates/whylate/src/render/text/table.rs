// SPDX-License-Identifier: MIT OR Apache-2.0
//! Aligned columns of text.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::Range;

use whylate_model::units::printable;

use super::pad::{Left, Right};
use crate::render::color;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Align {
    /// Names.
    Left,
    /// Figures.
    Right,
}

/// A heading and rows with the same number of cells.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
    /// Cells of what is late, by row and column.
    late: BTreeSet<(usize, usize)>,
}

impl Table {
    /// Creates a table without rows. Commas separate the headings; `<` marks columns of names, which are left-aligned.
    pub fn new(columns: &str) -> Self {
        let columns = columns.split(',').map(str::trim).map(|column| match column.strip_prefix('<') {
            Some(names) => (names.to_owned(), Align::Left),
            None => (column.to_owned(), Align::Right),
        });
        Table { columns: columns.collect(), rows: Vec::new(), late: BTreeSet::new() }
    }

    /// Adds a row; cells beyond the last column are ignored.
    pub fn row(&mut self, cells: Vec<String>) {
        // Names come from the kernel and from processes.
        self.rows.push(cells.iter().map(printable).collect());
    }

    /// Adds a row with something late in these columns.
    pub fn late_row(&mut self, cells: Vec<String>, late: &[usize]) {
        self.late.extend(late.iter().map(|&column| (self.rows.len(), column)));
        self.row(cells);
    }

    /// Writes heading and rows, with two spaces between columns and no trailing blanks. If the terminal is too narrow,
    /// first names are shortened in their middle, then columns in the middle are left out.
    pub fn write(&self, out: &mut dyn Write, terminal_columns: Option<usize>) -> io::Result<()> {
        let mut widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, (name, _))| {
                let cells = self.rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
                cells.max().unwrap_or(0).max(name.len())
            })
            .collect();
        let terminal_columns = terminal_columns.unwrap_or(usize::MAX);
        self.narrow(&mut widths, terminal_columns);
        let left_out = left_out(&widths, terminal_columns);
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        for (number, row) in std::iter::once(&heading).chain(&self.rows).enumerate() {
            let (mut line, mut colored) = (String::new(), String::new());
            for (index, ((cell, &width), (_, align))) in row.iter().zip(&widths).zip(&self.columns).enumerate() {
                if left_out.contains(&index) {
                    let dots = if index == left_out.start { "  .." } else { "" };
                    line.push_str(dots);
                    colored.push_str(dots);
                    continue;
                }
                if !line.is_empty() {
                    line.push_str("  ");
                    colored.push_str("  ");
                }
                let cell = without_middle(cell, width);
                // One long cell does not make all rows long.
                let width = width.min(MAX_PADDING);
                let padded = match align {
                    Align::Left => Left(&cell, width).to_string(),
                    Align::Right => Right(&cell, width).to_string(),
                };
                let is_late = number > 0 && self.late.contains(&(number - 1, index));
                colored.push_str(&if is_late { padded.replace(&cell, &color::late(&cell)) } else { padded.clone() });
                line.push_str(&padded);
            }
            // A line that is cut off has no color, which may not be turned off again.
            let fits = line.trim_end().chars().count() <= terminal_columns;
            let shown: String = if fits { colored } else { line.chars().take(terminal_columns).collect() };
            writeln!(out, "{}", shown.trim_end())?;
        }
        Ok(())
    }

    /// Narrows the widest columns of names until the table fits, or all of them have the minimum width.
    fn narrow(&self, widths: &mut [usize], terminal_columns: usize) {
        while width_of(widths) > terminal_columns {
            let names = widths.iter_mut().zip(&self.columns).filter(|(_, (_, align))| *align == Align::Left);
            match names.map(|(width, _)| width).max_by_key(|width| **width).filter(|width| **width > MIN_NAME_WIDTH) {
                Some(widest) => *widest -= 1,
                None => return,
            }
        }
    }
}

/// Maximum width that a cell is padded to.
const MAX_PADDING: usize = 300;

/// Minimum width of a column of names.
const MIN_NAME_WIDTH: usize = 10;

/// Returns the width of a row, with two spaces between columns.
fn width_of(widths: &[usize]) -> usize {
    widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(2)
}

/// Returns the columns in the middle to leave out so that the table fits; empty if not even the outer ones fit.
fn left_out(widths: &[usize], terminal_columns: usize) -> Range<usize> {
    if width_of(widths) <= terminal_columns {
        return 0..0;
    }
    let (mut begin, mut end) = (0, widths.len());
    // Two spaces and two dots.
    let mut used = 2;
    while begin < end {
        let from_end = widths.len() - end < begin;
        used += widths[if from_end { end - 1 } else { begin }] + 2;
        if used > terminal_columns {
            break;
        }
        if from_end { end -= 1 } else { begin += 1 }
    }
    if end == widths.len() { 0..0 } else { begin..end }
}

/// Shortens a text to `room` characters by cutting out its middle.
pub fn without_middle(text: &str, room: usize) -> String {
    let length = text.chars().count();
    if length <= room {
        return text.to_owned();
    }
    let kept = room.saturating_sub(2);
    let begin: String = text.chars().take(kept / 2).collect();
    let end: String = text.chars().skip(length - (kept - kept / 2)).collect();
    format!("{begin}..{end}")
}

/// Returns the width of the terminal on standard output; `None` if it is not a terminal.
pub fn terminal_columns() -> Option<usize> {
    let stdout = io::stdout();
    // Only a terminal has a size.
    rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::text::text_of;

    fn written(terminal_columns: Option<usize>) -> String {
        let mut table = Table::new("<NAME, COUNT, <WHERE");
        table.row(vec!["a\x1b[2Jname".to_owned(), "7".to_owned(), "somewhere far away".to_owned()]);
        table.row(vec!["b".to_owned(), "1234567".to_owned(), String::new()]);
        text_of(|out| table.write(out, terminal_columns))
    }

    #[test]
    fn aligns_columns_and_escapes_control_characters() {
        assert_eq!(
            written(None),
            "NAME         COUNT  WHERE\na?[2Jname        7  somewhere far away\nb          1234567\n"
        );
    }

    #[test]
    fn long_cell_does_not_widen_other_rows() {
        let mut table = Table::new("<NAME, COUNT");
        let long = "f".repeat(70_000);
        table.row(vec![long.clone(), "7".to_owned()]);
        table.row(vec!["b".to_owned(), "8".to_owned()]);
        let lines: Vec<String> = text_of(|out| table.write(out, None)).lines().map(str::to_owned).collect();
        assert_eq!(lines[1], format!("{long}      7"));
        assert!(lines[2].len() < 400 && lines[2].ends_with("  8"), "{}", lines[2].len());
    }

    #[test]
    fn a_narrow_terminal_cuts_lines_off() {
        assert!(written(Some(24)).lines().all(|line| line.len() <= 24));
    }

    #[test]
    fn names_lose_their_middle_before_columns_are_left_out() {
        assert_eq!(
            written(Some(37)),
            "NAME         COUNT  WHERE\na?[2Jname        7  somewhe..far away\nb          1234567\n"
        );
        assert_eq!(written(Some(28)), "NAME       ..  WHERE\na?[2Jname  ..  some..away\nb          ..\n");
    }

    #[test]
    fn text_keeps_both_ends() {
        let cut: Vec<String> = [6, 5, 4, 3, 2].into_iter().map(|room| without_middle("abcdef", room)).collect();
        assert_eq!(cut, ["abcdef", "a..ef", "a..f", "..f", ".."]);
    }
}
