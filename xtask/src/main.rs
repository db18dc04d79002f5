// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs commands on other kernels than the running one, and lists what packages contain, for developers and CI.

mod embedded;
mod host;
mod initramfs;
mod kernels;
mod output;
mod picture;
mod processor;
mod vm;
mod wake;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Exit status if the virtual machine could not run the command; `git bisect run` skips on it.
const NO_ANSWER: u8 = 125;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Embedded(embedded::Arguments),
    Kernels(kernels::Arguments),
    Vm(vm::Arguments),
    Picture(picture::Arguments),
}

fn main() -> ExitCode {
    let outcome: Result<u8> = match Arguments::parse().what {
        What::Embedded(arguments) => embedded::run(&arguments).map(|()| 0),
        What::Kernels(arguments) => kernels::run(&arguments).map(|()| 0),
        What::Vm(arguments) => vm::run(&arguments),
        What::Picture(arguments) => picture::run(&arguments).map(|()| 0),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(NO_ANSWER)
        }
    }
}
