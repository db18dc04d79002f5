// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file with the figures of the last run of each benchmark, and its sections.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::machine;
use crate::table::{self, Column, Figure};

const HEADING: &str = "# Benchmark results\n\nEach section is written by the command it names.\n";

/// Arguments of every benchmark.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Rounds; each measures every subject once.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Rewrite the benchmark's section of this file with the results.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

impl Arguments {
    /// Builds whylate, and returns its path. Prints why nothing can be measured and returns `None` without root or
    /// without one of these tools, each with the reason to print.
    pub fn prepare(&self, target: &str, tools: &[(&str, &str)]) -> Result<Option<PathBuf>> {
        if machine::is_skipped(tools) {
            return Ok(None);
        }
        if cfg!(debug_assertions) && self.write.is_some() {
            bail!("figures of a debug build are of no use: run `make {target}`");
        }
        machine::build_whylate().map(Some)
    }
}

/// A section of the file: what was measured, how and where; its figures and limits; texts and tables.
pub struct Section<'a> {
    arguments: &'a Arguments,
    name: &'a str,
    head: String,
    figures: Vec<Figure>,
    body: String,
}

impl<'a> Section<'a> {
    /// Begins a section after its measurements. `target` is empty if no `make` target writes it.
    pub fn new(arguments: &'a Arguments, name: &'a str, title: &str, target: &str, command: &str) -> Self {
        let cargo = format!("`cargo run --release -p whylate-bench -- {command}`");
        let command = if target.is_empty() { cargo } else { format!("`make {target}` ({cargo})") };
        let head = format!("## {title}\n\nCommand: {command}\n\n{}", machine::describe());
        Self { arguments, name, head, figures: Vec::new(), body: String::new() }
    }

    /// Begins a section that continues the one before it.
    pub fn subsection(arguments: &'a Arguments, name: &'a str, title: &str) -> Self {
        Self { arguments, name, head: format!("### {title}\n"), figures: Vec::new(), body: String::new() }
    }

    /// Adds a fact about the measurement to those about the machine.
    pub fn fact(mut self, fact: &str) -> Self {
        self.head += &format!("- {fact}\n");
        self
    }

    pub fn figures(mut self, figures: impl IntoIterator<Item = Figure>) -> Self {
        self.figures.extend(figures);
        self
    }

    /// Adds a paragraph, a list or a subheading.
    pub fn text(mut self, text: &str) -> Self {
        self.body += &format!("\n{}\n", text.trim_end());
        self
    }

    pub fn lines(mut self, heads: &str, rows: impl IntoIterator<Item = String>) -> Self {
        self.body += &table::lines(heads, rows);
        self
    }

    pub fn grid<'t, T: 't>(
        mut self,
        labels: &str,
        columns: &[Column<T>],
        rows: impl IntoIterator<Item = (String, Vec<&'t T>)>,
    ) -> Self {
        self.body += &table::grid(labels, columns, rows);
        self
    }

    /// Adds a row to the table before it.
    pub fn row(mut self, cells: &str) -> Self {
        self.body += &format!("| {cells} |\n");
        self
    }

    fn markdown(&self) -> String {
        let figures = if self.figures.is_empty() { String::new() } else { table::figures(&self.figures) };
        format!("{}{figures}{}", self.head, self.body)
    }

    /// Prints the section, and writes it to the file if one is given. Returns whether every figure is within its limit.
    pub fn publish(self) -> Result<bool> {
        let text = self.markdown();
        print!("{text}");
        if let Some(path) = &self.arguments.write {
            write(path, self.name, &text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(self.figures.iter().all(Figure::is_within))
    }
}

/// Rewrites one section of the file, and leaves the others.
fn write(path: &Path, section: &str, text: &str) -> io::Result<()> {
    let old = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => HEADING.to_owned(),
        other => other?,
    };
    fs::write(path, replace(&old, section, text))
}

/// Replaces the section between `<!-- name -->` and `<!-- /name -->`, or appends it.
fn replace(old: &str, section: &str, text: &str) -> String {
    let (begin, end) = (format!("<!-- {section} -->"), format!("<!-- /{section} -->"));
    let new = format!("{begin}\n{text}{end}");
    let found = old
        .split_once(&begin)
        .and_then(|(before, rest)| rest.split_once(&end).map(|(_, after)| format!("{before}{new}{after}")));
    found.unwrap_or_else(|| format!("{old}\n{new}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Show, column};

    #[test]
    fn only_the_named_section_changes() {
        let old = "a\n<!-- x -->\n1\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n";
        assert_eq!(replace(old, "x", "3\n"), "a\n<!-- x -->\n3\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n");
        assert_eq!(replace("a\n", "x", "3\n"), "a\n\n<!-- x -->\n3\n<!-- /x -->\n");
    }

    #[test]
    fn section_has_head_figures_texts_and_tables() {
        let arguments = Arguments { rounds: 3, write: None };
        let section = || Section::subsection(&arguments, "x", "A load").fact("in a virtual machine");
        let figure = |value| Figure::new("slowdown", value, 1).unit("%").at_most(2.0);
        let full = section()
            .text("Medians of 3 rounds.\n")
            .grid("subject", &[column("ns", Show::Median(0), "", |ns| *ns)], [("ours".to_owned(), vec![&7.0, &9.0])])
            .lines("cause | >stops", ["a softirq | 3".to_owned()])
            .row("others | 1")
            .figures([figure(1.5)]);
        assert_eq!(
            full.markdown(),
            "### A load\n- in a virtual machine\n\n| figure | measured | limit | result |\n|---|--:|--:|---|\n\
             | slowdown | 1.5 % | 2 % | pass |\n\nMedians of 3 rounds.\n\n| subject | ns |\n|---|--:|\n| ours | 8 |\n\
             \n| cause | stops |\n|---|--:|\n| a softirq | 3 |\n| others | 1 |\n"
        );
        assert!(full.publish().expect("printed") && !section().figures([figure(2.1)]).publish().expect("printed"));
    }

    #[test]
    fn head_names_command_and_machine() {
        let arguments = Arguments { rounds: 3, write: None };
        let text = Section::new(&arguments, "x", "Title", "bench-x", "x --rounds 3").markdown();
        let head = "## Title\n\nCommand: `make bench-x` (`cargo run --release -p whylate-bench -- x --rounds 3`)\n\n- kernel: ";
        assert!(text.starts_with(head), "{text}");
    }
}
