// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process with threads that sleep at a known depth, in a known number of call sites, and wake together on request.

use std::ffi::c_void;
use std::hint::black_box;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rustix::thread::futex;

use crate::kernel;

/// Has threads sleep, and wakes them for each line of standard input.
#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long)]
    threads: u32,
    /// How many functions deep, of the process's own.
    #[arg(long)]
    descents: u32,
    /// In how many places.
    #[arg(long)]
    places: u32,
}

const ASLEEP: &str = "asleep";
/// Time for the last thread to block after it has counted itself.
const SETTLE: Duration = Duration::from_millis(100);
/// Little of it is ever used, and untouched pages take no memory.
const STACK_BYTES: usize = 32 << 10;

/// Futex: threads sleep as long as it has the value that they saw.
static WORD: AtomicU32 = AtomicU32::new(0);
static READY: AtomicU32 = AtomicU32::new(0);

pub fn run(arguments: &Arguments) -> Result<()> {
    let (descents, places) = (arguments.descents, arguments.places);
    for number in 0..arguments.threads {
        let path = (number % places) << BITS | descents;
        kernel::begin_thread(begin, path as usize, STACK_BYTES)
            .with_context(|| format!("cannot start thread {number}"))?;
    }
    report_when_asleep(arguments.threads)?;
    for line in io::stdin().lines() {
        line?;
        READY.store(0, SeqCst);
        WORD.fetch_add(1, SeqCst);
        futex::wake(&WORD, futex::Flags::PRIVATE, i32::MAX as u32)?;
        report_when_asleep(arguments.threads)?;
    }
    Ok(())
}

/// Bits of a path's encoding that hold its length.
const BITS: u32 = 8;

extern "C" fn begin(path: *mut c_void) -> *mut c_void {
    let path = path as usize as u32;
    descend(path >> BITS, path & ((1 << BITS) - 1));
    black_box(std::ptr::null_mut())
}

fn report_when_asleep(threads: u32) -> Result<()> {
    while READY.load(SeqCst) < threads {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(SETTLE);
    println!("{ASLEEP}");
    io::stdout().flush()?;
    Ok(())
}

/// Descends by one bit of `place` per step, so that each place has its own stack.
fn descend(place: u32, descents: u32) {
    match (descents, place & 1) {
        (0, _) => sleep(),
        (_, 0) => left(place >> 1, descents - 1),
        _ => right(place >> 1, descents - 1),
    }
}

#[inline(never)]
fn left(place: u32, descents: u32) {
    descend(place, descents);
    black_box(1);
}

#[inline(never)]
fn right(place: u32, descents: u32) {
    descend(place, descents);
    black_box(2);
}

#[inline(never)]
fn sleep() {
    loop {
        let seen = WORD.load(SeqCst);
        READY.fetch_add(1, SeqCst);
        while WORD.load(SeqCst) == seen {
            // Returns at once if the word changed before the thread slept.
            let _ = futex::wait(&WORD, futex::Flags::PRIVATE, seen, None);
        }
    }
}

/// The process, killed on drop.
pub struct Sleepers {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Sleepers {
    /// Starts the process, and waits until its threads sleep.
    pub fn start(threads: u32, descents: u32, places: u32) -> Result<Self> {
        let ours = std::env::current_exe().context("the path of this program is unknown")?;
        let words = format!("sleepers --threads {threads} --descents {descents} --places {places}");
        let mut command = Command::new(ours);
        command.args(words.split(' ')).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = kernel::die_with_parent(&mut command).spawn().context("cannot start the sleeping threads")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the sleeping threads have no output")?);
        let mut sleepers = Sleepers { child, input, output };
        sleepers.until_asleep()?;
        Ok(sleepers)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Wakes all threads, and waits until they sleep again.
    pub fn wake(&mut self) -> Result<()> {
        let input = self.input.as_mut().context("the sleeping threads have no input")?;
        input.write_all(b"\n").context("the process with the sleeping threads has ended")?;
        self.until_asleep()
    }

    fn until_asleep(&mut self) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.trim() == ASLEEP, "the process with the sleeping threads has ended");
        Ok(())
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
