// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client that waits for a server in many ways, and says itself for how long and for what. It is the test program
//! again, as whoever explains waits does not explain its own.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, gettid, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};
use whylate_sources::clock::monotonic_ns;

use crate::kernel::late::stay_on;

const WHAT: &str = "WHYLATE_PEERS";
const READY: &str = "peers are there";
const OVER: &str = "all is played";
const ROUND: &str = "round ";
const SKIPPED: &str = "skipped: ";
/// How many waits of each kind `make trial` asks for.
const ROUNDS_VARIABLE: &str = "WHYLATE_ROUNDS";
const ROUNDS: usize = 12;
/// Between two of them.
pub const PAUSE: Duration = Duration::from_millis(2);
/// A server works for so long before it lets its client go on.
pub const BURNT_NS: u64 = 20_000_000;

/// A wait, as its client and those that it waited for have seen it.
#[derive(Clone, Debug)]
pub struct Round {
    pub kind: String,
    pub client: u32,
    pub began_ns: u64,
    pub ended_ns: u64,
    /// By kind.
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

/// What the process has told.
#[derive(Debug, Default)]
pub struct Played {
    pub rounds: Vec<Round>,
    /// Why it has left something out.
    pub skipped: Vec<String>,
    /// All that it was to play is played.
    pub is_whole: bool,
}

/// The process. It goes with this.
pub struct Peers {
    child: Child,
    begin: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Peers {
    /// Starts it, and waits until it could begin.
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

    /// Lets it begin, and has whoever calls read what it says.
    pub fn begin(&mut self) -> Result<impl FnOnce() -> Result<Played> + Send + 'static> {
        self.begin.take().context("it has begun")?.write_all(b"\n")?;
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

/// Plays what is asked for in the environment.
pub fn run_if_asked() -> Result<()> {
    let Ok(what) = std::env::var(WHAT) else { return Ok(()) };
    println!("{READY}");
    std::io::stdin().read_line(&mut String::new())?;
    let outcome = match what.as_str() {
        "chain" => crate::chain::play(),
        "ways" => crate::ways::play(),
        "handoff" => crate::handoff::play(),
        "stolen" => crate::stolen::play(),
        "flush" => crate::flush::play(),
        "queued" => crate::queued::play(),
        "innocent" => crate::innocent::play(),
        other => bail!("nobody plays {other}"),
    };
    if outcome.is_ok() {
        println!("{OVER}");
    }
    outcome
}

pub fn tell(kind: &str, client: u32, began_ns: u64, ended_ns: u64, numbers: &[u64]) {
    let numbers: String = numbers.iter().map(|number| format!(" {number}")).collect();
    println!("{ROUND}{kind} {client} {began_ns} {ended_ns}{numbers}");
}

pub fn skip(reason: &str) {
    println!("{SKIPPED}{reason}");
}

/// How many waits a trial asks for.
pub fn trial() -> Option<usize> {
    let rounds = std::env::var(ROUNDS_VARIABLE).ok()?;
    Some(rounds.parse().ok().filter(|&rounds| rounds > 0).expect("WHYLATE_ROUNDS is a number of waits"))
}

/// So many waits of each kind.
pub fn rounds() -> usize {
    trial().unwrap_or(ROUNDS)
}

pub fn tid() -> u32 {
    gettid().as_raw_pid() as u32
}

/// The CPU of whoever waits, and of those that it waits for.
pub fn cpus() -> Result<(u32, u32)> {
    let usable = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(|cpu| cpu as u32);
    let first = cpus.next().context("there is no CPU")?;
    Ok((first, cpus.next_back().unwrap_or(first)))
}

/// The CPU time of the calling thread.
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Computes for so much CPU time.
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

/// What a server has burnt, and all of its CPU time of a round.
type Worked = (u64, u64);

/// Rounds of one kind: `serve` gets what has its client wait and then works, and lets the client go on after that.
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
            stay_on(there)?;
            for client in asked {
                let before_ns = cpu_ns();
                serve(&|| {
                    // It has gone where this fails.
                    let _ = answer.send(());
                    until_asleep(std::process::id(), client);
                    // Whoever waits for an rt_mutex spins until its owner leaves its CPU.
                    thread::sleep(Duration::from_micros(500));
                    burn(BURNT_NS);
                })?;
                let _ = report.send((tid(), (BURNT_NS, cpu_ns() - before_ns)));
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            stay_on(here)?;
            for _ in 0..rounds() {
                ask.send(tid())?;
                answered.recv()?;
                let began_ns = monotonic_ns();
                wait()?;
                let ended_ns = monotonic_ns();
                let (server, (burnt_ns, all_ns)) = reported.recv()?;
                tell(kind, tid(), began_ns, ended_ns, &[server.into(), burnt_ns, all_ns]);
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
