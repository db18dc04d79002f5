// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate serve` on this machine as it is, of a scrape, and of clients that are stuck.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::child::{self, Tool, wait_until};
use crate::recordings::cpu_ns;
use crate::results::{self, Section};
use crate::table::Figure;

/// Number of scrapes of which the CPU time is measured.
const SCRAPES: u32 = 500;
/// Number of clients that are stuck.
const STUCK: usize = 100;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// How long each is measured.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(20..))]
    seconds: u64,
}

struct Round {
    cpu_percent: f64,
    resident_mb: f64,
    anonymous_mb: f64,
    maps_mb: f64,
    descriptors: f64,
    text_kb: f64,
    protobuf_kb: f64,
    scrape_cpu_ms: f64,
    longest_scrape_ms: f64,
    stuck_cpu_percent: f64,
    longest_stuck_ms: f64,
    /// Seconds of intervals that ended while clients were stuck, by their real length.
    stuck_intervals: f64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let Some(program) = arguments.results.prepare("bench-serve", &[])? else { return Ok(true) };
    let (rounds, seconds) = (arguments.results.rounds, arguments.seconds);
    let all = (0..rounds).map(|_| round(&program, Duration::from_secs(seconds))).collect::<Result<Vec<_>>>()?;
    Section::new(&arguments.results, "serve")
        .values(&[("seconds", &seconds), ("scrapes", &SCRAPES), ("stuck", &STUCK)])
        .figures([
            Figure::median("CPU, all sources, an interval of 10 s (%)", 2, &all, |round| round.cpu_percent)
                .at_most(1.0),
            Figure::median("CPU of a scrape (ms)", 2, &all, |round| round.scrape_cpu_ms).at_most(5.0),
            Figure::median("a scrape as text (KB)", 1, &all, |round| round.text_kb).at_most(300.0),
            Figure::median("a scrape as protobuf (KB)", 1, &all, |round| round.protobuf_kb).at_most(300.0),
            Figure::median("allocated memory (MB)", 1, &all, |round| round.anonymous_mb).at_most(64.0),
            Figure::median("resident memory, with mapped BPF maps (MB)", 1, &all, |round| round.resident_mb),
            Figure::median("BPF maps (MB)", 1, &all, |round| round.maps_mb),
            Figure::median("descriptors", 0, &all, |round| round.descriptors),
            Figure::median("longest of the scrapes (ms)", 1, &all, |round| round.longest_scrape_ms),
            Figure::median("longest scrape beside stuck clients (ms)", 1, &all, |round| round.longest_stuck_ms)
                .at_most(1_000.0),
            Figure::median("CPU beside stuck clients (%)", 2, &all, |round| round.stuck_cpu_percent),
            Figure::median("time of intervals beside stuck clients, of the time that passed", 2, &all, |round| {
                round.stuck_intervals
            }),
        ])
        .publish()
}

fn round(program: &Path, length: Duration) -> Result<Round> {
    // A port that is free now.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let mut tool = Tool::start(program, &["serve", "--listen", &address])?;
    let pid = tool.pid();
    wait_until("it does not get ready", || Ok(get(&address, "/-/ready", "").is_ok_and(|reply| reply.is_ok())))?;
    let cpu_percent = cpu_percent(pid, length)?;
    tool.expect_running()?;
    let text = get(&address, "/metrics", "")?.body;
    let protobuf = get(&address, "/metrics", "application/vnd.google.protobuf")?.body;
    let metric = |name: &str| {
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<f64>().ok()).with_context(|| format!("there is no {name}"))
    };
    let server = server_thread(pid)?;
    let before_ns = thread_cpu_ns(&server)?;
    let scrapes = (0..SCRAPES).map(|_| scrape_ms(&address)).collect::<Result<Vec<f64>>>()?;
    let scrape_cpu_ms = (thread_cpu_ns(&server)? - before_ns) as f64 / 1e6 / f64::from(SCRAPES);
    let mut stuck = stuck_clients(&address)?;
    let (began, before) = (Instant::now(), last_interval(&address)?);
    let mut beside = Vec::new();
    let before_ns = cpu_ns(pid)?;
    while began.elapsed() < length {
        beside.push(scrape_ms(&address)?);
        thread::sleep(Duration::from_secs(1));
        // Before the exporter closes the connections.
        if beside.len() % 4 == 0 {
            stuck = stuck_clients(&address)?;
        }
    }
    let took_s = began.elapsed().as_secs_f64();
    let stuck_cpu_percent = (cpu_ns(pid)? - before_ns) as f64 / took_s / 1e7;
    let stuck_intervals = (last_interval(&address)? - before) / took_s;
    drop(stuck);
    let round = Round {
        cpu_percent,
        resident_mb: child::status_kib(pid, "VmRSS:")? / 1e3,
        anonymous_mb: child::status_kib(pid, "RssAnon:")? / 1e3,
        maps_mb: metric("whylate_map_bytes")? / 1e6,
        descriptors: metric("process_open_fds")?,
        text_kb: text.len() as f64 / 1e3,
        protobuf_kb: protobuf.len() as f64 / 1e3,
        scrape_cpu_ms,
        longest_scrape_ms: scrapes.iter().copied().fold(0.0, f64::max),
        stuck_cpu_percent,
        longest_stuck_ms: beside.iter().copied().fold(0.0, f64::max),
        stuck_intervals,
    };
    tool.end()?;
    Ok(round)
}

/// Returns the share of a CPU that all threads of a process take.
fn cpu_percent(pid: u32, length: Duration) -> Result<f64> {
    let (began, before_ns) = (Instant::now(), cpu_ns(pid)?);
    thread::sleep(length);
    Ok((cpu_ns(pid)? - before_ns) as f64 / began.elapsed().as_secs_f64() / 1e7)
}

/// Connects clients that send half a request or nothing, or do not read their reply.
fn stuck_clients(address: &str) -> Result<Vec<TcpStream>> {
    let sent: [&[u8]; 3] = [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n"];
    let connect = |number: usize| -> Result<TcpStream> {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(sent[number % sent.len()])?;
        Ok(stream)
    };
    (0..STUCK).map(connect).collect()
}

struct Reply {
    head: String,
    body: Vec<u8>,
}

impl Reply {
    fn is_ok(&self) -> bool {
        self.head.starts_with("HTTP/1.1 200 ")
    }
}

fn get(address: &str, path: &str, accept: &str) -> Result<Reply> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nAccept: {accept}\r\n\r\n").as_bytes())?;
    let mut received = Vec::new();
    stream.read_to_end(&mut received)?;
    let end = received.windows(4).position(|part| part == b"\r\n\r\n").context("it sends no reply")?;
    Ok(Reply { head: String::from_utf8_lossy(&received[..end]).into_owned(), body: received[end + 4..].to_vec() })
}

fn scrape_ms(address: &str) -> Result<f64> {
    let began = Instant::now();
    ensure!(get(address, "/metrics", "application/vnd.google.protobuf")?.is_ok(), "a scrape fails");
    Ok(began.elapsed().as_secs_f64() * 1e3)
}

/// Returns when the last interval ended, in seconds since 1970.
fn last_interval(address: &str) -> Result<f64> {
    let text = String::from_utf8_lossy(&get(address, "/metrics", "")?.body).into_owned();
    let value = text.lines().find_map(|line| line.strip_prefix("whylate_last_interval_timestamp_seconds "));
    Ok(value.context("no interval has ended")?.parse()?)
}

/// Returns the directory of the thread that serves.
fn server_thread(pid: u32) -> Result<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?.flatten().map(|task| task.path());
    let is_server =
        |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == "whylate-serve");
    tasks.into_iter().find(is_server).context("no thread serves")
}

fn thread_cpu_ns(task: &Path) -> Result<u64> {
    let text = fs::read_to_string(task.join("schedstat")).context("the kernel shows no CPU time")?;
    Ok(text.split(' ').next().context("the kernel shows no CPU time")?.parse()?)
}
