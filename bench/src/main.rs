// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of whylate against the tools people use today. Each one measures both in the same run.

mod child;
mod floor;
mod kernel;
mod machine;
mod programs;
mod results;
mod wq;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of whylate. Exit status: 0 every figure is within its limit, or it was skipped; 1 a limit is missed; 2 an error.
#[derive(Debug, Parser)]
#[command(name = "whylate-bench")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Wq(wq::Arguments),
}

fn main() -> ExitCode {
    let What::Wq(arguments) = Arguments::parse().what;
    match wq::run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("whylate-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
