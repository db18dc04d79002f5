// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file with the figures of the last run of each benchmark, and its sections.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::machine;
use crate::table::{self, Figure};

/// The texts of all sections.
const TEMPLATES: &str = include_str!("../sections.md");
const HEADING: &str = "# Benchmark results\n\nEach section is written by the command it names.\n";

/// Arguments of every benchmark.
#[derive(Debug, Args)]
#[group(skip)]
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

/// A section of the file: a text of `sections.md` with figures and limits, tables and other values in it.
pub struct Section<'a> {
    arguments: &'a Arguments,
    name: &'a str,
    template: &'static str,
    figures: Vec<Figure>,
    values: BTreeMap<&'static str, String>,
}

impl<'a> Section<'a> {
    /// Begins a section after its measurements.
    pub fn new(arguments: &'a Arguments, name: &'a str) -> Self {
        Self::with_template(arguments, name, name)
    }

    /// Begins a section with the text of another one.
    pub fn with_template(arguments: &'a Arguments, name: &'a str, template: &str) -> Self {
        let template = find(TEMPLATES, template).map_or("", |(_, template, _)| template.trim());
        let section = Self { arguments, name, template, figures: Vec::new(), values: BTreeMap::new() };
        section.add("rounds", arguments.rounds).add("machine", machine::describe())
    }

    /// Adds a value, or a paragraph to those that a name already stands for.
    pub fn add(mut self, name: &'static str, value: impl Display) -> Self {
        let values = self.values.entry(name).or_default();
        *values += if values.is_empty() { "" } else { "\n\n" };
        *values += value.to_string().trim_end();
        self
    }

    pub fn values(self, values: &[(&'static str, &dyn Display)]) -> Self {
        values.iter().fold(self, |section, (name, value)| section.add(name, value))
    }

    /// Adds a fact about the measurement to those about the machine, or a row to a table.
    pub fn line(mut self, name: &'static str, line: &str) -> Self {
        self.values.entry(name).or_default().push_str(&format!("\n{line}"));
        self
    }

    pub fn figures(mut self, figures: impl IntoIterator<Item = Figure>) -> Self {
        self.figures.extend(figures);
        self
    }

    fn markdown(&self) -> String {
        let figures = table::figures(&self.figures);
        let mut parts = self.template.split('{');
        let mut text = parts.next().unwrap_or_default().to_owned();
        for (name, rest) in parts.filter_map(|part| part.split_once('}')) {
            let value = if name == "figures" { Some(&figures) } else { self.values.get(name) };
            text += value.map_or("", |value| value.trim_end());
            text += rest;
        }
        format!("{}\n", text.trim_end())
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

fn write(path: &Path, section: &str, text: &str) -> io::Result<()> {
    let old = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => HEADING.to_owned(),
        other => other?,
    };
    fs::write(path, replace(&old, section, text))
}

/// Replaces the section between `<!-- name -->` and `<!-- /name -->`, or appends it.
fn replace(old: &str, section: &str, text: &str) -> String {
    match find(old, section) {
        Some((before, _, after)) => format!("{before}\n{text}{after}"),
        None => format!("{old}\n<!-- {section} -->\n{text}<!-- /{section} -->\n"),
    }
}

/// Returns what is before, in and after the section between `<!-- name -->` and `<!-- /name -->`.
fn find<'a>(text: &'a str, section: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let (begin, end) = (format!("<!-- {section} -->"), format!("<!-- /{section} -->"));
    let from = text.find(&begin)? + begin.len();
    let to = from + text[from..].find(&end)?;
    Some((&text[..from], &text[from..to], &text[to..]))
}

#[cfg(test)]
#[path = "../unit/results.rs"]
mod tests;
