// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of visiting a thread that has run since the last walk, or has not; by other means; and of sampling for a while.

use std::fs::{self, File};
use std::io::Read as _;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{Iter, Link};
use whylate_model::{Snapshot, Stack};
use whylate_sources::kernel::clock::{process_cpu_ns, thread_cpu_ns};
use whylate_sources::offcpu::{AttachedOffcpu, Choice, OffcpuOptions, Often};
use whylate_sources::{Attached, Measuring, Session, Threads};

use crate::child::Workload;
use crate::{floor, sleepers};

/// Numbers of threads of the process, in addition to the machine's.
pub const THREADS: [u32; 4] = [100, 1_000, 10_000, 30_000];
/// A walk over fewer threads takes less than a millisecond, so one interrupt matters: the rounds are multiplied.
const MANY: u32 = 1_000;
const ROUNDS_OF_FEW: u32 = 4;
/// Depth of the process's own functions: 12 user frames together with those that start a thread.
const DESCENTS: u32 = 8;
/// Call sites with stacks of equal shape, so that a thread's stack differs from the previous thread's.
pub const CALL_SITES: u32 = 16;
/// Maximum number of tries, as a walk of its own may come in between, and other threads run.
const MAX_TRIES: usize = 50;

/// CPU time per thread and walk, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub threads: u64,
    pub unchanged_ns: f64,
    pub changed_ns: f64,
    /// Part of `changed_ns` for the user stack.
    pub user_stack_ns: f64,
    pub user_frames: f64,
    pub plain_ns: f64,
    pub proc_ns: f64,
}

/// Returns the costs by round.
pub fn measure(threads: u32, rounds: u32) -> Result<Vec<Cost>> {
    let mut sleepers = sleepers::start(threads, DESCENTS, CALL_SITES)?;
    let plain = floor::attach_to_threads().context("cannot attach the plain iterator")?;
    let mut all = attach(None, true)?;
    let mut whole = attach(Some(sleepers.pid()), true)?;
    let mut kernel_only = attach(Some(sleepers.pid()), false)?;
    all.snapshot()?;
    let snapshot = whole.snapshot()?;
    kernel_only.snapshot()?;
    let user_frames = user_frames(&snapshot, sleepers.pid())?;
    let mut costs = Vec::new();
    for _ in 0..rounds * if threads < MANY { ROUNDS_OF_FEW } else { 1 } {
        let unchanged_ns = unchanged_ns(&mut all)?;
        let both_ns = changed_ns(&mut whole, &mut sleepers, threads, unchanged_ns)?;
        let kernel_ns = changed_ns(&mut kernel_only, &mut sleepers, threads, unchanged_ns)?;
        costs.push(Cost {
            threads: all.met().threads,
            unchanged_ns,
            changed_ns: both_ns,
            user_stack_ns: both_ns - kernel_ns,
            user_frames,
            plain_ns: plain_ns(&plain)?,
            proc_ns: proc_ns(sleepers.pid())?,
        });
    }
    Ok(costs)
}

fn attach(process: Option<u32>, user_stacks: bool) -> Result<Measuring<AttachedOffcpu>> {
    // Its own periodic walks are not counted, and are rare enough not to disturb.
    let options = OffcpuOptions {
        rate_hz: 1,
        threads: Threads { process, ..Threads::default() },
        user_stacks,
        ..OffcpuOptions::default()
    };
    options.start(&Session::of_one()).context("cannot attach offcpu")
}

/// Measures a walk in which hardly any thread has run.
fn unchanged_ns(source: &mut AttachedOffcpu) -> Result<f64> {
    for _ in 0..MAX_TRIES {
        // The first one covers what has run in between.
        source.snapshot()?;
        source.snapshot()?;
        let met = source.met();
        if met.changed * 100 < met.threads {
            return Ok(met.cpu_ns as f64 / met.threads as f64);
        }
    }
    bail!("too many other threads run on this machine");
}

/// Returns the cost of a thread that has run, from a walk in which all threads of the process have; the cost of the
/// process's other threads is taken off. Threads of other processes are excluded: their stacks have other depths, and a
/// new call site needs a second pass, which matters with few threads.
fn changed_ns(source: &mut AttachedOffcpu, sleepers: &mut Workload, threads: u32, unchanged_ns: f64) -> Result<f64> {
    for _ in 0..MAX_TRIES {
        source.snapshot()?;
        sleepers.repeat()?;
        source.snapshot()?;
        let met = source.met();
        if met.changed >= threads.into() {
            let others_ns = unchanged_ns * (met.threads - met.changed) as f64;
            return Ok((met.cpu_ns as f64 - others_ns) / met.changed as f64);
        }
    }
    bail!("another walk always came in between")
}

/// Returns whether the stack is of a sleeping thread, and not of the process's first.
fn is_asleep(stack: &Stack) -> bool {
    stack.user.iter().any(|frame| frame.contains("sleepers::sleep"))
}

/// Returns the mean number of user frames of the process.
fn user_frames(snapshot: &Snapshot, pid: u32) -> Result<f64> {
    let pid = pid.to_string();
    let ours: Vec<f64> = snapshot
        .stacks
        .iter()
        .filter(|stack| stack.labels.get("pid") == Some(&pid) && is_asleep(stack))
        .map(|stack| stack.user.len() as f64)
        .collect();
    ensure!(!ours.is_empty(), "the threads were not seen");
    Ok(ours.iter().sum::<f64>() / ours.len() as f64)
}

fn plain_ns(link: &Link) -> Result<f64> {
    // It visits all threads of the machine.
    let threads = Choice::look(Often::RateHz(1)).context("cannot count threads")?.threads;
    let began_ns = thread_cpu_ns();
    let mut iterator = Iter::new(link)?;
    while iterator.read(&mut [0; 64])? > 0 {}
    Ok((thread_cpu_ns() - began_ns) as f64 / threads as f64)
}

fn proc_ns(pid: u32) -> Result<f64> {
    let paths: Vec<_> = fs::read_dir(format!("/proc/{pid}/task"))?
        .map(|entry| Ok(entry?.path().join("stack")))
        .collect::<Result<_>>()?;
    let mut bytes = vec![0; 64 << 10];
    let began_ns = thread_cpu_ns();
    for path in &paths {
        let _ = File::open(path)?.read(&mut bytes)?;
    }
    Ok((thread_cpu_ns() - began_ns) as f64 / paths.len() as f64)
}

/// Figures of sampling many threads at the usual rate.
#[derive(Clone, Copy, Debug)]
pub struct Steady {
    pub cpu_percent: f64,
    /// Threads of the process in the result, out of `threads`.
    pub seen: u64,
    pub threads: u64,
    pub lost: u64,
}

const STEADY_THREADS: u32 = 10_000;
const STEADY: Duration = Duration::from_secs(5);

/// Measures all CPU time of this process while it samples: nothing else runs in it.
pub fn steady() -> Result<Steady> {
    let sleepers = sleepers::start(STEADY_THREADS, DESCENTS, 1)?;
    let mut source = OffcpuOptions::default().start(&Session::of_one()).context("cannot attach offcpu")?;
    source.snapshot()?;
    let began_ns = process_cpu_ns();
    thread::sleep(STEADY);
    let cpu_percent = (process_cpu_ns() - began_ns) as f64 / STEADY.as_nanos() as f64 * 100.0;
    let snapshot = source.snapshot()?;
    let pid = sleepers.pid().to_string();
    let ours = snapshot.stacks.iter().filter(|stack| stack.labels.get("pid") == Some(&pid));
    let seen = ours.filter(|stack| is_asleep(stack)).map(|stack| stack.age.count()).sum();
    Ok(Steady { cpu_percent, seen, threads: STEADY_THREADS.into(), lost: snapshot.lost.values().sum() })
}
