// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws stacks of waiting threads that other tools have printed: `procstat -ka` of FreeBSD, dumps of /proc/PID/stack,
//! and folded stacks.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use whylate_model::import::{DEEPEST, Imported, Names, Order};
use whylate_model::text;

use super::undid;
use crate::render::extension::report_written;
use crate::render::text::offcpu::{file, write_lines};

/// `whylate offcpu import`, the former name of `whylate import` for stacks
#[derive(Debug, Args)]
pub struct Arguments {
    /// Files to read
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write to this file, .svg or .folded [default: folded, to standard output]
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    #[command(flatten)]
    layout: Layout,
}

/// How stacks are printed.
#[derive(Clone, Debug, Args)]
pub struct Layout {
    /// What a stack begins with (stacks only) [default: process]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Put the innermost frame first, which merges stacks by where they wait (stacks only) [default: outermost first,
    /// whatever the file's format]
    #[arg(long)]
    pub leaf_first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Nothing
    Stack,
    /// The process's name
    Process,
    /// The process's and the thread's name
    Thread,
}

/// Stacks of all files so far.
#[derive(Debug)]
pub struct Files {
    names: Names,
    order: Order,
    all: Imported,
    has_any: bool,
}

impl Files {
    /// Creates an empty sum.
    pub fn new(layout: &Layout) -> Self {
        let names = match layout.by {
            Some(By::Stack) => Names::Nothing,
            Some(By::Process) | None => Names::Process,
            Some(By::Thread) => Names::Thread,
        };
        let order = if layout.leaf_first { Order::LeafFirst } else { Order::RootFirst };
        Files { names, order, all: Imported::default(), has_any: false }
    }

    /// Adds the stacks of a file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, has no stacks, or too large counts.
    pub fn add(&mut self, input: impl Read) -> anyhow::Result<()> {
        let text = text::read(input)?;
        self.has_any = true;
        let read = Imported::read(&text, self.names)?;
        self.all.merge(read).context("cannot add it to the files before it")
    }

    /// Prints the stacks of all files, or writes them to a file. Without files, prints nothing.
    ///
    /// # Errors
    /// Fails if the output cannot be written.
    pub fn print(self, output: Option<&Path>) -> anyhow::Result<()> {
        let Files { all, order, has_any: true, .. } = self else { return Ok(()) };
        undid(&all.undone);
        if all.too_long > 0 {
            say!("whylate: skipped {} stacks of more than {DEEPEST} frames or 1 MiB", all.too_long);
        }
        if all.cut > 0 {
            say!("whylate: {} stacks may lack frames: they were cut off, or end in an unknown function", all.cut);
        }
        if all.unread > 0 {
            say!("whylate: skipped {} lines that are not stacks", all.unread);
        }
        let lines = all.lines(order);
        let Some(path) = output else {
            let mut out = io::BufWriter::new(io::stdout().lock());
            write_lines(&mut out, &lines)?;
            return Ok(out.flush()?);
        };
        file::write_folded(path, "Off-CPU", "samples", &lines)?;
        report_written(path);
        Ok(())
    }
}

/// Reads files of stacks, and prints them.
///
/// # Errors
/// Fails as the methods of [`Files`] do.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut all = Files::new(&arguments.layout);
    for file in &arguments.files {
        super::read(file, |input| all.add(input))?;
    }
    all.print(arguments.output.as_deref())
}
