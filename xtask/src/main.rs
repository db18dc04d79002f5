// SPDX-License-Identifier: MIT OR Apache-2.0
//! What developers and CI run beside cargo: commands on other kernels than the running one.

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

/// The status of a virtual machine that could not run the command, as `git bisect run` takes it for "cannot tell".
const NO_ANSWER: u8 = 125;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Kernels(kernels::Arguments),
    Vm(vm::Arguments),
    Picture(picture::Arguments),
}

fn main() -> ExitCode {
    let outcome: Result<u8> = match Arguments::parse().what {
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
