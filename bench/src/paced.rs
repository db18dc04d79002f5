// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load with work between its context switches: two threads on one CPU that take turns.

use std::hint::black_box;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Args;

use crate::machine;

/// Takes turns on one CPU and prints how many seconds that took.
#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long)]
    pub cpu: usize,
    /// How often each of the threads has its turn.
    #[arg(long)]
    pub rounds: u64,
    /// Steps of work in each turn.
    #[arg(long)]
    pub steps: u64,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    println!("{:.6}", take_turns(arguments)?.as_secs_f64());
    Ok(())
}

fn take_turns(arguments: &Arguments) -> Result<Duration> {
    machine::pin_to(arguments.cpu)?;
    let (mut from_second, mut to_first) = io::pipe()?;
    let (mut from_first, mut to_second) = io::pipe()?;
    let (rounds, steps) = (arguments.rounds, arguments.steps);
    let start = Instant::now();
    // A new thread inherits the affinity.
    let second = thread::spawn(move || -> io::Result<()> {
        for _ in 0..rounds {
            wait(&mut from_first)?;
            work(steps);
            wake_other(&mut to_first)?;
        }
        Ok(())
    });
    for _ in 0..rounds {
        work(steps);
        wake_other(&mut to_second)?;
        wait(&mut from_second)?;
    }
    let span = start.elapsed();
    second.join().map_err(|_| anyhow!("the second thread panicked"))??;
    Ok(span)
}

fn work(steps: u64) {
    for step in 0..steps {
        black_box(step);
    }
}

fn wait(from: &mut PipeReader) -> io::Result<()> {
    from.read_exact(&mut [0])
}

fn wake_other(to: &mut PipeWriter) -> io::Result<()> {
    to.write_all(&[0])
}
