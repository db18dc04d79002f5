// SPDX-License-Identifier: MIT OR Apache-2.0
//! Workloads in processes of their own, which are this program with other arguments: two threads that take turns,
//! threads that sleep at known call sites, and many idle processes.

use std::env;
use std::ffi::c_void;
use std::fs::File;
use std::hint::black_box;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use rustix::thread::futex;

use crate::child::{KilledOnDrop, spawn};
use crate::{kernel, machine};

/// Returns a command that runs this program with these words as arguments.
pub fn command(words: &str) -> Result<Vec<String>> {
    let ours = env::current_exe().context("the path of this program is unknown")?;
    Ok([ours.to_string_lossy().as_ref()].into_iter().chain(words.split(' ')).map(str::to_owned).collect())
}

/// A running workload, which prints a line when it has started, and again for each line of input that it has carried
/// out.
pub struct Workload {
    child: KilledOnDrop,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Workload {
    pub fn start(words: &str) -> Result<Self> {
        let ours = command(words)?;
        let mut child = spawn(Command::new(&ours[0]).args(&ours[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let input = child.0.stdin.take().context("the workload has no input")?;
        let output = BufReader::new(child.0.stdout.take().context("the workload has no output")?);
        let mut workload = Self { child, input, output };
        workload.wait()?;
        Ok(workload)
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Has it carry out its work once more, and waits until that is done.
    pub fn repeat(&mut self) -> Result<()> {
        self.input.write_all(b"\n").context("the workload has ended")?;
        self.wait()
    }

    fn wait(&mut self) -> Result<()> {
        ensure!(self.output.read_line(&mut String::new())? > 0, "the workload has ended");
        Ok(())
    }
}

fn report_ready() -> Result<()> {
    println!("ready");
    Ok(io::stdout().flush()?)
}

/// Takes turns on one CPU with a second thread, and prints how many seconds that took.
#[derive(Debug, Args)]
pub struct Paced {
    #[arg(long)]
    cpu: usize,
    #[arg(long)]
    rounds: u64,
    #[arg(long)]
    steps: u64,
}

pub fn take_turns(arguments: &Paced) -> Result<bool> {
    machine::pin_to(arguments.cpu)?;
    let (mut from_second, mut to_first) = io::pipe()?;
    let (mut from_first, mut to_second) = io::pipe()?;
    let (rounds, steps) = (arguments.rounds, arguments.steps);
    let work = move || {
        for step in 0..steps {
            black_box(step);
        }
    };
    let began = Instant::now();
    // A new thread inherits the affinity.
    let second = thread::spawn(move || -> io::Result<()> {
        for _ in 0..rounds {
            from_first.read_exact(&mut [0])?;
            work();
            to_first.write_all(&[0])?;
        }
        Ok(())
    });
    for _ in 0..rounds {
        work();
        to_second.write_all(&[0])?;
        from_second.read_exact(&mut [0])?;
    }
    let elapsed_s = began.elapsed().as_secs_f64();
    second.join().map_err(|_| anyhow!("the second thread panicked"))??;
    println!("{elapsed_s:.6}");
    Ok(true)
}

/// Forks idle processes, which end with this one, when the standard input is closed.
#[derive(Debug, Args)]
pub struct Crowd {
    #[arg(long)]
    processes: u32,
    #[arg(long)]
    descriptors: u32,
}

pub fn be_crowd(arguments: &Crowd) -> Result<bool> {
    let _descriptors = descriptors(arguments.descriptors)?;
    for _ in 0..arguments.processes {
        kernel::fork_sleeper().context("cannot start a process")?;
    }
    report_ready()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(true)
}

pub fn descriptors(count: u32) -> Result<Vec<OwnedFd>> {
    let null = File::open("/dev/null")?;
    let made = (0..count).map(|_| Ok(null.try_clone()?.into())).collect::<io::Result<_>>();
    made.with_context(|| format!("cannot have {count} descriptors"))
}

/// Has threads sleep at a known depth and number of call sites, and wakes them for each line of standard input.
#[derive(Debug, Args)]
pub struct Sleepers {
    #[arg(long)]
    threads: u32,
    /// Depth, in functions of the process's own.
    #[arg(long)]
    descents: u32,
    #[arg(long)]
    call_sites: u32,
}

/// Bits of a path's encoding that hold its length.
const BITS: u32 = 8;
/// Little of it is ever used, and untouched pages take no memory.
const STACK_BYTES: usize = 32 << 10;
/// Futex: threads sleep as long as it has the value that they saw.
static WORD: AtomicU32 = AtomicU32::new(0);
static READY: AtomicU32 = AtomicU32::new(0);

impl Sleepers {
    /// Starts the process; each repetition wakes all threads, and waits until they sleep again.
    pub fn start(threads: u32, descents: u32, call_sites: u32) -> Result<Workload> {
        Workload::start(&format!("sleepers --threads {threads} --descents {descents} --call-sites {call_sites}"))
    }

    fn report_when_asleep(&self) -> Result<()> {
        while READY.load(SeqCst) < self.threads {
            thread::sleep(Duration::from_millis(1));
        }
        // The last thread has counted itself, and blocks soon.
        thread::sleep(Duration::from_millis(100));
        report_ready()
    }
}

pub fn be_sleepers(arguments: &Sleepers) -> Result<bool> {
    for number in 0..arguments.threads {
        let path = (number % arguments.call_sites) << BITS | arguments.descents;
        kernel::begin_thread(begin, path as usize, STACK_BYTES)
            .with_context(|| format!("cannot start thread {number}"))?;
    }
    arguments.report_when_asleep()?;
    for line in io::stdin().lines() {
        line?;
        READY.store(0, SeqCst);
        WORD.fetch_add(1, SeqCst);
        futex::wake(&WORD, futex::Flags::PRIVATE, i32::MAX as u32)?;
        arguments.report_when_asleep()?;
    }
    Ok(true)
}

extern "C" fn begin(path: *mut c_void) -> *mut c_void {
    let path = path as usize as u32;
    descend(path >> BITS, path & ((1 << BITS) - 1));
    black_box(std::ptr::null_mut())
}

/// Descends by one bit of the call site's number per step, so that each has its own stack.
fn descend(call_site: u32, descents: u32) {
    match (descents, call_site & 1) {
        (0, _) => sleep(),
        (_, 0) => left(call_site >> 1, descents - 1),
        _ => right(call_site >> 1, descents - 1),
    }
}

#[inline(never)]
fn left(call_site: u32, descents: u32) {
    descend(call_site, descents);
    black_box(1);
}

#[inline(never)]
fn right(call_site: u32, descents: u32) {
    descend(call_site, descents);
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
