// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client that waits for a server in many ways, and prints for how long and for what. It is the test program again,
//! as `offcpu` does not explain its own waits.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, gettid, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};
use whylate_sources::kernel::clock::monotonic_ns;

use crate::support::machine::cpus::pin_to;

const WHAT: &str = "WHYLATE_PEERS";
const READY: &str = "peers are there";
const OVER: &str = "all is played";
const ROUND: &str = "round ";
const SKIPPED: &str = "skipped: ";
/// Environment: waits of each kind, as set by `make trial`.
const ROUNDS_VARIABLE: &str = "WHYLATE_ROUNDS";
const ROUNDS: usize = 12;
/// Pause between two waits.
pub const PAUSE: Duration = Duration::from_millis(2);
/// CPU time of a server before it lets its client continue.
pub const BURNT_NS: u64 = 20_000_000;

/// A wait, as its client and the threads it waited for measured it.
#[derive(Clone, Debug)]
pub struct Round {
    pub kind: String,
    pub client: u32,
    pub began_ns: u64,
    pub ended_ns: u64,
    /// Meaning depends on the kind.
    pub numbers: Vec<u64>,
}

impl Round {
    fn parse(line: &str) -> Result<Round> {
        let mut words = line.split(' ');
        let kind = words.next().context("a round has no kind")?.to_owned();
        let mut numbers = words.map(str::parse::<u64>).collect::<Result<Vec<_>, _>>()?;
        let rest = numbers.split_off(3);
        let [client, began_ns, ended_ns] = numbers[..] else { bail!("a round has three numbers at least") };
        Ok(Round { kind, client: client as u32, began_ns, ended_ns, numbers: rest })
    }
}

/// The output of the process.
#[derive(Debug, Default)]
pub struct Played {
    pub rounds: Vec<Round>,
    /// Reasons for left out kinds.
    pub skipped: Vec<String>,
    /// Whether it has finished.
    pub is_whole: bool,
}

/// The process, killed on drop.
pub struct Peers {
    child: Child,
    begin: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Peers {
    /// Starts the process, and waits until it is ready.
    pub fn start(what: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "peers_process", "--nocapture", "--test-threads=1"])
            .env(WHAT, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let begin = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().context("it has no output")?);
        let mut line = String::new();
        while !line.contains(READY) {
            line.clear();
            if output.read_line(&mut line)? == 0 {
                bail!("the process with the peers has ended");
            }
        }
        Ok(Peers { child, begin, output: Some(output) })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets the process begin. Returns a function that reads its output to the end.
    pub fn begin(&mut self) -> Result<impl FnOnce() -> Result<Played> + Send + 'static> {
        self.begin.take().context("it has already started")?.write_all(b"\n")?;
        let output = self.output.take().context("somebody reads its output")?;
        Ok(move || {
            let mut played = Played::default();
            for line in output.lines() {
                let line = line?;
                if let Some((_, reason)) = line.split_once(SKIPPED) {
                    println!("{SKIPPED}{reason}");
                    played.skipped.push(reason.to_owned());
                } else if let Some((_, round)) = line.split_once(ROUND) {
                    played.rounds.push(Round::parse(round)?);
                }
                played.is_whole |= line.contains(OVER);
            }
            Ok(played)
        })
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Plays as the environment asks, or returns at once if it does not.
pub fn run_if_asked() -> Result<()> {
    let Ok(what) = std::env::var(WHAT) else { return Ok(()) };
    println!("{READY}");
    std::io::stdin().read_line(&mut String::new())?;
    let outcome = match what.as_str() {
        "chain" => crate::chain::play(),
        "ways" => crate::wait_kinds::play(),
        "handoff" => crate::handoff::play(),
        "stolen" => crate::stolen_lock::play(),
        "flush" => crate::flush::play(),
        "queued" => crate::queued_work::play(),
        "innocent" => crate::unrelated_threads::play(),
        other => bail!("nothing plays {other}"),
    };
    if outcome.is_ok() {
        println!("{OVER}");
    }
    outcome
}

pub fn report_round(kind: &str, client: u32, began_ns: u64, ended_ns: u64, numbers: &[u64]) {
    let numbers: String = numbers.iter().map(|number| format!(" {number}")).collect();
    println!("{ROUND}{kind} {client} {began_ns} {ended_ns}{numbers}");
}

pub fn skip(reason: &str) {
    println!("{SKIPPED}{reason}");
}

/// Returns the number of waits of each kind in a trial.
pub fn trial() -> Option<usize> {
    let rounds = std::env::var(ROUNDS_VARIABLE).ok()?;
    Some(rounds.parse().ok().filter(|&rounds| rounds > 0).expect("WHYLATE_ROUNDS is a number of waits"))
}

/// Returns the number of waits of each kind.
pub fn rounds() -> usize {
    trial().unwrap_or(ROUNDS)
}

pub fn tid() -> u32 {
    gettid().as_raw_pid() as u32
}

/// Returns the CPU of the client, and the CPU of its peers.
pub fn cpus() -> Result<(u32, u32)> {
    let usable = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(|cpu| cpu as u32);
    let first = cpus.next().context("there is no CPU")?;
    Ok((first, cpus.next_back().unwrap_or(first)))
}

/// Returns the CPU time of the calling thread.
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Computes for this much CPU time.
pub fn burn(ns: u64) {
    let until_ns = cpu_ns() + ns;
    while cpu_ns() < until_ns {
        std::hint::spin_loop();
    }
}

pub fn is_asleep(process: u32, tid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/task/{tid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['S', 'D']))
}

pub fn until_asleep(process: u32, tid: u32) {
    let deadline = Instant::now() + Duration::from_millis(200);
    while !is_asleep(process, tid) && Instant::now() < deadline {
        thread::yield_now();
    }
}

/// A server's CPU time in [`burn`], and its total CPU time of a round.
type Worked = (u64, u64);

/// Plays rounds of one kind: `serve` gets a function that starts the client's wait and works, and ends the wait
/// afterwards.
pub fn play(
    kind: &str,
    mut wait: impl FnMut() -> Result<()> + Send,
    mut serve: impl FnMut(&dyn Fn()) -> Result<()> + Send,
) -> Result<()> {
    let (here, there) = cpus()?;
    let (ask, asked) = channel::<u32>();
    let (answer, answered) = channel::<()>();
    let (report, reported): (Sender<(u32, Worked)>, Receiver<_>) = channel();
    thread::scope(|scope| {
        let server = move || -> Result<()> {
            pin_to(there)?;
            for client in asked {
                let before_ns = cpu_ns();
                serve(&|| {
                    // Fails if the client has ended.
                    let _ = answer.send(());
                    until_asleep(std::process::id(), client);
                    // A waiter for an rt_mutex spins until the owner leaves its CPU.
                    thread::sleep(Duration::from_micros(500));
                    burn(BURNT_NS);
                })?;
                let _ = report.send((tid(), (BURNT_NS, cpu_ns() - before_ns)));
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            pin_to(here)?;
            for _ in 0..rounds() {
                ask.send(tid())?;
                answered.recv()?;
                let began_ns = monotonic_ns();
                wait()?;
                let ended_ns = monotonic_ns();
                let (server, (burnt_ns, all_ns)) = reported.recv()?;
                report_round(kind, tid(), began_ns, ended_ns, &[server.into(), burnt_ns, all_ns]);
                thread::sleep(PAUSE);
            }
            Ok(())
        };
        let server = thread::Builder::new().name("server".to_owned()).spawn_scoped(scope, server)?;
        let client = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, client)?;
        client.join().expect("waiting does not panic")?;
        server.join().expect("serving does not panic")
    })
}
