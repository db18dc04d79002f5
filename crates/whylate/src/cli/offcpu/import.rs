// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu import`: flame graphs of stacks from other tools.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use whylate_model::import::{DEEPEST, Imported, Names, Order};
use whylate_model::text;
use whylate_model::units::printable;

use crate::cli::{UsageError, existing, undid};
use crate::files;
use crate::render::text::offcpu::file::Form;
use crate::render::text::offcpu::{svg, write_lines};

/// Reads FreeBSD's `procstat -ka`, dumps of /proc/PID/stack, or folded lines; each file is a sample
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # two samples of FreeBSD's `procstat -ka`, as a flame graph
    whylate offcpu import 1.txt 2.txt -o sleep.svg
    # merged by where threads wait
    whylate offcpu import --by stack --leaf-first 1.txt -o leaves.svg
    # kernel stacks of this machine, as folded lines
    tail -n +1 /proc/*/task/*/stack > now.txt; whylate offcpu import now.txt")]
pub struct Arguments {
    /// Files to read
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write to this file, .svg or .folded [default: folded, to standard output]
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// What a stack begins with
    #[arg(long, value_enum, default_value_t = By::Process)]
    by: By,
    /// Put the innermost frame first, which merges stacks by where they wait (default: outermost first, whatever the
    /// file's format)
    #[arg(long)]
    leaf_first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Nothing
    Stack,
    /// The process's name
    Process,
    /// The process's and the thread's name
    Thread,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let names = match arguments.by {
        By::Stack => Names::Nothing,
        By::Process => Names::Process,
        By::Thread => Names::Thread,
    };
    let mut all = Imported::default();
    for path in &arguments.files {
        let cannot = || format!("cannot read {}", path.display());
        let text = text::read(existing(File::open(path)).with_context(cannot)?).with_context(cannot)?;
        let read = Imported::read(&text, names).with_context(cannot)?;
        all.merge(read).with_context(|| format!("cannot add {} to the files before it", path.display()))?;
    }
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
    let lines = all.lines(if arguments.leaf_first { Order::LeafFirst } else { Order::RootFirst });
    let Some(path) = &arguments.output else {
        let mut out = io::BufWriter::new(io::stdout().lock());
        write_lines(&mut out, &lines)?;
        return Ok(out.flush()?);
    };
    let form = Form::from_path(path).map_err(UsageError)?;
    let cannot = || format!("cannot write {}", path.display());
    match form {
        Form::Svg => {
            files::write(path, |out| svg::write_lines(out, "Off-CPU", "samples", &lines)).with_context(cannot)?
        }
        Form::Folded => files::write(path, |out| write_lines(out, &lines)).with_context(cannot)?,
        _ => {
            let name = printable(&path.to_string_lossy());
            return Err(UsageError(anyhow::anyhow!("write to a file that ends in .svg or .folded, not {name}")).into());
        }
    }
    Ok(())
}
