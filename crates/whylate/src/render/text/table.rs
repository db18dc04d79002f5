// SPDX-License-Identifier: MIT OR Apache-2.0
//! Aligned columns of text.

use std::collections::BTreeSet;
use std::io::{self, Write};

use whylate_model::units::printable;

use super::fit::{MIN_NAME_WIDTH, fitted, without_middle};
use super::pad::{Left, Right};
use crate::render::color;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Align {
    /// Names.
    Left,
    /// Names that are worth half of a terminal, up to `MAX_WIDE` columns.
    Wide,
    /// Sentences, which are shown whole or not at all.
    Whole,
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
    /// Columns to hide where the terminal is too narrow, the least important first.
    hidden_first: Vec<usize>,
}

impl Table {
    /// Creates a table without rows. Commas separate the headings; `<` marks columns of names, which are left-aligned,
    /// `<<` a column of names for half of a terminal, and `<=` a column of sentences, which are not cut.
    pub fn new(columns: &str) -> Self {
        let columns = columns.split(',').map(str::trim).map(|column| match column.strip_prefix('<') {
            Some(names) => match (names.strip_prefix('<'), names.strip_prefix('=')) {
                (Some(names), _) => (names.to_owned(), Align::Wide),
                (_, Some(sentences)) => (sentences.to_owned(), Align::Whole),
                (None, None) => (names.to_owned(), Align::Left),
            },
            None => (column.to_owned(), Align::Right),
        });
        let columns: Vec<(String, Align)> = columns.collect();
        // The rows are about the first two columns.
        let hidden_first = (KEY_COLUMNS..columns.len()).rev().collect();
        Table { columns, rows: Vec::new(), late: BTreeSet::new(), hidden_first }
    }

    /// Orders columns by importance: these are hidden first, the least important one before the others. Headings that
    /// the table lacks are ignored.
    pub fn hiding_first(mut self, headings: &str) -> Self {
        let place = |heading: &str| self.columns.iter().position(|(name, _)| name == heading);
        let mut hidden_first: Vec<usize> = headings.split(',').filter_map(|heading| place(heading.trim())).collect();
        self.hidden_first.retain(|column| !hidden_first.contains(column));
        hidden_first.append(&mut self.hidden_first);
        Table { hidden_first, ..self }
    }

    /// Leaves out the columns that have no text in any row, except the first two.
    pub fn without_empty_columns(mut self) -> Self {
        let has_text =
            |column: &usize| self.rows.iter().any(|row| row.get(*column).is_some_and(|cell| !cell.is_empty()));
        let kept: Vec<usize> =
            (0..self.columns.len()).filter(|column| *column < KEY_COLUMNS || has_text(column)).collect();
        let place = |column: &usize| kept.iter().position(|one| one == column);
        self.hidden_first = self.hidden_first.iter().filter_map(place).collect();
        self.late = self.late.iter().filter_map(|(row, column)| Some((*row, place(column)?))).collect();
        self.columns = kept.iter().map(|&column| self.columns[column].clone()).collect();
        let cells = |row: &Vec<String>| kept.iter().filter_map(|&column| row.get(column).cloned()).collect();
        self.rows = self.rows.iter().map(cells).collect();
        self
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
    /// long names are shortened in their middle, except those of the first two columns; of the other columns, the most
    /// important ones that fit are shown, and the others are named below the table.
    pub fn write(&self, out: &mut dyn Write, terminal_columns: Option<usize>) -> io::Result<()> {
        let columns = terminal_columns.unwrap_or(usize::MAX);
        let (widths, hidden) = self.layout(columns);
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        for (number, row) in std::iter::once(&heading).chain(&self.rows).enumerate() {
            let (mut line, mut colored) = (String::new(), String::new());
            for (index, ((cell, &width), (_, align))) in row.iter().zip(&widths).zip(&self.columns).enumerate() {
                if hidden.contains(&index) {
                    continue;
                }
                if index > 0 {
                    line.push_str("  ");
                    colored.push_str("  ");
                }
                let cell = without_middle(cell, width);
                // One long cell does not make all rows long.
                let width = width.min(MAX_PADDING);
                let padded = match align {
                    Align::Left | Align::Wide | Align::Whole => Left(&cell, width).to_string(),
                    Align::Right => Right(&cell, width).to_string(),
                };
                let is_late = number > 0 && self.late.contains(&(number - 1, index));
                colored.push_str(&if is_late { padded.replace(&cell, &color::late(&cell)) } else { padded.clone() });
                line.push_str(&padded);
            }
            // A line that is cut off has no color, which may not be turned off again.
            let fits = line.trim_end().chars().count() <= columns;
            let shown: String = if fits { colored } else { line.chars().take(columns).collect() };
            writeln!(out, "{}", shown.trim_end())?;
        }
        let names = self.columns.iter().enumerate().filter(|(index, _)| hidden.contains(index));
        let names: Vec<&str> = names.map(|(_, (name, _))| name.as_str()).collect();
        match names.is_empty() {
            true => Ok(()),
            false => {
                let note = format!("(too narrow for: {})", names.join(", "));
                fitted(&note, columns).iter().try_for_each(|line| writeln!(out, "{line}"))
            }
        }
    }

    /// Returns the widths of the columns, and those that are hidden.
    fn layout(&self, columns: usize) -> (Vec<usize>, BTreeSet<usize>) {
        let natural: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, (name, _))| {
                let cells = self.rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
                cells.max().unwrap_or(0).max(name.chars().count())
            })
            .collect();
        let is_name = |index: usize| matches!(self.columns[index].1, Align::Left | Align::Wide);
        let half = (columns / 2).max(MIN_NAME_WIDTH);
        let least = |index: usize| match self.columns[index].1 {
            Align::Left | Align::Wide if index < KEY_COLUMNS => natural[index].min(half),
            Align::Left => natural[index].min(MIN_NAME_WIDTH),
            Align::Wide => natural[index].min(half.min(MAX_WIDE)),
            Align::Whole | Align::Right => natural[index],
        };
        // Of the columns beyond the first, the most important ones that fit are shown.
        let mut hidden: BTreeSet<usize> = self.hidden_first.iter().copied().collect();
        for next in self.hidden_first.iter().rev() {
            let shown = (0..natural.len()).filter(|index| index == next || !hidden.contains(index));
            if width_of(shown.map(least)) <= columns {
                hidden.remove(next);
            }
        }
        let mut widths = natural.clone();
        let narrow = |widths: &mut [usize], is_narrowed: &dyn Fn(usize) -> bool, least: &dyn Fn(usize) -> usize| {
            let of = |widths: &[usize]| {
                width_of(
                    widths.iter().enumerate().filter(|(index, _)| !hidden.contains(index)).map(|(_, width)| *width),
                )
            };
            while of(widths) > columns {
                let names = widths.iter_mut().enumerate().filter(|(index, _)| is_narrowed(*index));
                let names = names.filter(|(index, width)| !hidden.contains(index) && **width > least(*index));
                match names.max_by_key(|(_, width)| **width) {
                    Some((_, widest)) => *widest -= 1,
                    None => return,
                }
            }
        };
        narrow(&mut widths, &|index| index >= KEY_COLUMNS && is_name(index), &least);
        narrow(&mut widths, &is_name, &least);
        narrow(&mut widths, &is_name, &|_| MIN_KEY_WIDTH);
        (widths, hidden)
    }
}

/// Width that a column of wide names keeps on a terminal of any width.
const MAX_WIDE: usize = 50;
/// Maximum width that a cell is padded to.
const MAX_PADDING: usize = 300;
/// Number of columns at the left that are never hidden. Their names are whole up to half of the terminal.
const KEY_COLUMNS: usize = 2;
const MIN_KEY_WIDTH: usize = 10;

/// Returns the width of a row, with two spaces between columns.
fn width_of(widths: impl Iterator<Item = usize>) -> usize {
    widths.map(|width| width.saturating_add(2)).fold(0, usize::saturating_add).saturating_sub(2)
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
        assert!(written(Some(14)).lines().all(|line| line.len() <= 14));
    }

    #[test]
    fn names_lose_their_middle_before_columns_are_hidden() {
        let mut table = Table::new("<NAME, COUNT, MEAN, <WHERE, MAX");
        let place = "a_function_with_a_long_name";
        table.row(
            ["name".to_owned(), "7".to_owned(), "5.00us".to_owned(), place.to_owned(), "9.00us".to_owned()].into(),
        );
        let table = table.hiding_first("MEAN, NONE");
        let at = |columns| text_of(|out| table.write(out, Some(columns)));
        let name = "a_functio.._long_name";
        let row = |mean: &str| format!("name      7{mean}  {name}  9.00us\n");
        assert_eq!(at(50), format!("NAME  COUNT    MEAN  WHERE{:21}MAX\n{}", "", row("  5.00us")));
        assert_eq!(at(42), format!("NAME  COUNT  WHERE{:21}MAX\n{}(too narrow for: MEAN)\n", "", row("")));
        // What fits is shown, if it is less important than what does not.
        let narrow = "NAME  COUNT    MEAN     MAX\nname      7  5.00us  9.00us\n(too narrow for: WHERE)\n";
        assert_eq!(at(30), narrow);
    }

    #[test]
    fn first_columns_are_whole_while_there_is_room() {
        let mut table = Table::new("<HANDLER, <WORKQUEUE, COUNT, MAX");
        let names = ["wb_update_bandwidth_workfn", "events_power_efficient"];
        table.row(names.map(str::to_owned).into_iter().chain(["7", "1.00us"].map(str::to_owned)).collect());
        let text = text_of(|out| table.write(out, Some(56)));
        assert!(
            names.iter().all(|name| text.contains(name)) && text.ends_with("(too narrow for: COUNT, MAX)\n"),
            "{text}"
        );
        let text = text_of(|out| table.write(out, Some(40)));
        assert!(text.lines().all(|line| line.len() <= 40) && text.contains(".."), "{text}");
    }

    #[test]
    fn empty_columns_are_left_out_and_sentences_are_not_cut() {
        let mut table = Table::new("SHARE, <CLASS, TID, AGE, <<WHERE, <=RULE").hiding_first("TID, AGE, RULE");
        let place = "a_function_with_a_name_of_45_characters_at_all";
        let cells = ["1.0%", "lock", "", "5.00us", place, "waits in a function that waits"];
        table.late_row(cells.map(str::to_owned).to_vec(), &[3]);
        let table = table.without_empty_columns();
        let at = |columns| text_of(|out| table.write(out, Some(columns)));
        let shown = at(100);
        assert!(shown.contains("  AGE  ") || shown.contains("     AGE  "), "{shown}");
        assert!(shown.contains(place) && shown.contains(cells[5]) && !shown.contains("TID"), "{shown}");
        // The age gives way to the sentence, and the sentence to half of the terminal for the name.
        let shown = at(92);
        assert!(shown.contains(cells[5]) && shown.ends_with("(too narrow for: AGE)\n"), "{shown}");
        let shown = at(64);
        assert!(shown.contains("a_function_with_a_n") && shown.ends_with("(too narrow for: RULE)\n"), "{shown}");
    }

    #[test]
    fn text_keeps_both_ends() {
        let cut: Vec<String> = [6, 5, 4, 3, 2].into_iter().map(|room| without_middle("abcdef", room)).collect();
        assert_eq!(cut, ["abcdef", "a..ef", "a..f", "..f", ".."]);
        assert_eq!(without_middle("syscall > folio_wait_bit_common", 24), "syscall > folio_..common");
        assert_eq!(without_middle("bpf_ktime_get_ns < on_io_uring_task_work", 23), "bpf_..t_ns < on_i..work");
    }
}
