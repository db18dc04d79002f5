// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file with the figures of the last run of each benchmark.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::machine;

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
    /// Prints the results, and writes them to the file if one is given.
    pub fn publish(&self, section: &str, text: &str) -> Result<()> {
        print!("{text}");
        match &self.write {
            Some(path) => write(path, section, text).with_context(|| format!("cannot write {}", path.display())),
            None => Ok(()),
        }
    }
}

/// Returns the beginning of a section: what was measured, how, and where.
pub fn heading(title: &str, target: &str, arguments: &str) -> String {
    let command = format!("`make {target}` (`cargo run --release -p whylate-bench -- {arguments}`)");
    format!("## {title}\n\nCommand: {command}\n\n{}", machine::describe())
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

    #[test]
    fn only_the_named_section_changes() {
        let old = "a\n<!-- x -->\n1\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n";
        assert_eq!(replace(old, "x", "3\n"), "a\n<!-- x -->\n3\n<!-- /x -->\n<!-- y -->\n2\n<!-- /y -->\nb\n");
        assert_eq!(replace("a\n", "x", "3\n"), "a\n\n<!-- x -->\n3\n<!-- /x -->\n");
    }
}
