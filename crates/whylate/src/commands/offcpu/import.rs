// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu import`: flame graphs of stacks that other tools have written.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use whylate_model::import::{Imported, Names, Order};
use whylate_model::units::printable;

use crate::commands::Senseless;
use crate::files::create;
use crate::output::offcpu::file::Form;
use crate::output::offcpu::{svg, write_lines};

/// Reads FreeBSD's `procstat -ka`, dumps of /proc/PID/stack, or folded lines; each file is a sample
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    procstat -ka > 1.txt; sleep 1; procstat -ka > 2.txt        # on FreeBSD
    whylate offcpu import 1.txt 2.txt -o sleep.svg
    whylate offcpu import --by stack --leaf-first 1.txt 2.txt -o leaves.svg
    tail -n +1 /proc/*/task/*/stack > now.txt; whylate offcpu import now.txt -o now.folded")]
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
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&bytes);
        all.merge(Imported::read(&text, names).with_context(|| format!("cannot read {}", path.display()))?);
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
    let form = Form::of(path).map_err(Senseless)?;
    let cannot = || format!("cannot write {}", path.display());
    match form {
        Form::Svg => {
            let mut out = BufWriter::new(create(path).with_context(cannot)?);
            svg::write_lines(&mut out, "Off-CPU", "samples", &lines).with_context(cannot)?;
            out.flush().with_context(cannot)?;
        }
        Form::Folded => {
            let mut out = BufWriter::new(create(path).with_context(cannot)?);
            write_lines(&mut out, &lines).with_context(cannot)?;
            out.flush().with_context(cannot)?;
        }
        _ => {
            let name = printable(&path.to_string_lossy());
            return Err(Senseless(anyhow::anyhow!("write to a file that ends in .svg or .folded, not {name}")).into());
        }
    }
    Ok(())
}
