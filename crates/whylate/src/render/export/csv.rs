// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes tables as CSV (RFC 4180, with Unix line endings).

use std::borrow::Cow;
use std::io::{self, Write as _};

use whylate_model::units::rfc3339;

use super::tables::{Cell, Row, Sink, Table};
use crate::files::PendingFile;

/// A file for each table.
pub struct Files(Vec<PendingFile>);

impl Files {
    /// Writes the column names to the first line of each file.
    pub fn begin(mut files: Vec<PendingFile>) -> io::Result<Self> {
        for (table, file) in Table::ALL.into_iter().zip(&mut files) {
            let names: Vec<&str> = table.columns().into_iter().map(|column| column.name).collect();
            writeln!(file, "{}", names.join(","))?;
        }
        Ok(Files(files))
    }
}

impl Sink for Files {
    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()> {
        let mut line = String::new();
        for (number, (_, cell)) in row.iter().enumerate() {
            if number > 0 {
                line.push(',');
            }
            write(&mut line, cell);
        }
        line.push('\n');
        Ok(self.0[table as usize].write_all(line.as_bytes())?)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        self.0.into_iter().try_for_each(PendingFile::end)?;
        Ok(())
    }
}

/// Writes a cell. A missing value is empty; an empty text is two quotes.
fn write(line: &mut String, cell: &Cell<'_>) {
    match cell {
        Cell::Text(Some(text)) => write_text(line, text),
        Cell::Count(Some(count)) => *line += &count.to_string(),
        Cell::Number(Some(number)) => *line += &number.to_string(),
        Cell::Flag(Some(flag)) => *line += &flag.to_string(),
        Cell::Stamp(Some(unix_ns)) => *line += &rfc3339::format(*unix_ns),
        Cell::Text(None) | Cell::Count(None) | Cell::Number(None) | Cell::Flag(None) | Cell::Stamp(None) => {}
    }
}

/// Prefixes text that starts like a formula with an apostrophe: spreadsheets evaluate formulas, and a process may be
/// named `=cmd|…`.
fn write_text(line: &mut String, text: &str) {
    let text: Cow<'_, str> = match text.starts_with(['=', '+', '-', '@']) {
        true => format!("'{text}").into(),
        false => text.into(),
    };
    if text.is_empty() || text.contains(['"', ',']) || text.starts_with(' ') || text.ends_with(' ') {
        line.push('"');
        *line += &text.replace('"', "\"\"");
        line.push('"');
    } else {
        *line += &text;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_separators_quotes_and_formulas() {
        let written = |cell: Cell<'_>| {
            let mut line = String::new();
            write(&mut line, &cell);
            line
        };
        for (text, cell) in [
            ("plain", "plain"),
            ("", "\"\""),
            ("a,b", "\"a,b\""),
            ("say \"no\"", "\"say \"\"no\"\"\""),
            ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
            ("@a,b", "\"'@a,b\""),
            ("-bash:1", "'-bash:1"),
            (" a", "\" a\""),
        ] {
            assert_eq!(written(Cell::Text(Some(text.into()))), cell);
        }
        assert_eq!(written(Cell::Text(None)), "");
        assert_eq!(written(Cell::Stamp(Some(1_795_252_440_123_456_789))), "2026-11-21T09:14:00.123456Z");
        assert_eq!(written(Cell::Number(Some(0.25))), "0.25");
    }
}
