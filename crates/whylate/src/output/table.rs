// SPDX-License-Identifier: MIT OR Apache-2.0
//! Aligned columns of text.

use std::io::{self, Write};

use whylate_model::units::printable;

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Names.
    Left,
    /// Figures.
    Right,
}

/// A heading and rows of equally many cells.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; cells beyond the last column are ignored.
    pub fn row(&mut self, cells: Vec<String>) {
        // Names come from the kernel and from processes.
        self.rows.push(cells.iter().map(|cell| printable(cell)).collect());
    }

    /// Writes heading and rows, two spaces between columns, nothing after the last. What is wider than the terminal, if there is one, is
    /// cut off.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, out: &mut dyn Write, terminal_columns: Option<usize>) -> io::Result<()> {
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, (name, _))| {
                let cells = self.rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
                cells.max().unwrap_or(0).max(name.len())
            })
            .collect();
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        for row in std::iter::once(&heading).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, &width), (_, align)) in row.iter().zip(&widths).zip(&self.columns) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                match align {
                    Align::Left => line.push_str(&format!("{cell:<width$}")),
                    Align::Right => line.push_str(&format!("{cell:>width$}")),
                }
            }
            let shown: String = line.chars().take(terminal_columns.unwrap_or(usize::MAX)).collect();
            writeln!(out, "{}", shown.trim_end())?;
        }
        Ok(())
    }
}

/// How wide the terminal is that standard output goes to; `None` when it goes elsewhere, and programs may read it whole.
pub fn terminal_columns() -> Option<usize> {
    let stdout = io::stdout();
    // Only a terminal has a size.
    rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(terminal_columns: Option<usize>) -> String {
        let mut table = Table::new(&[("NAME", Align::Left), ("COUNT", Align::Right), ("WHERE", Align::Left)]);
        table.row(vec!["a\x1b[2Jname".to_owned(), "7".to_owned(), "somewhere far away".to_owned()]);
        table.row(vec!["b".to_owned(), "1234567".to_owned(), String::new()]);
        let mut out = Vec::new();
        table.write(&mut out, terminal_columns).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn columns_are_aligned_and_names_cannot_move_the_cursor() {
        assert_eq!(
            written(None),
            "NAME         COUNT  WHERE\na?[2Jname        7  somewhere far away\nb          1234567\n"
        );
    }

    #[test]
    fn a_narrow_terminal_cuts_lines_off() {
        assert!(written(Some(24)).lines().all(|line| line.len() <= 24));
    }
}
