// SPDX-License-Identifier: MIT OR Apache-2.0
//! The exporter on this machine. Runs as root.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::client::{Served, get};
use crate::lock::{lock_machine, lock_machine_to_inject};
use crate::running::whylate;

pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the sum of a metric's samples with this text in their labels.
fn sum(served: &Served, metric: &str, labels: &str) -> Result<f64> {
    let text = get(served, "/metrics", "")?.text();
    let samples = text.lines().filter(|line| line.starts_with(metric) && line.contains(labels));
    let values = samples.map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<f64>());
    Ok(values.sum::<Result<f64, _>>()?)
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_there()? {
        ensure!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

pub fn recordings(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "whylate")).collect()
}

#[test]
fn injected_culprit_is_counted_and_kept() -> Result<()> {
    let Some(_lock) = lock_machine_to_inject() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let (socket, flights) = (directory.path().join("serve.sock"), directory.path().join("flights"));
    let (address, into) = (format!("unix:{}", socket.display()), format!("{}/", flights.display()));
    let mut served = Served::start(&[
        "serve",
        "--every",
        "500ms",
        "--sources",
        "wq",
        "--why",
        "3ms",
        "--listen",
        &address,
        "--record",
        &into,
        "--ring",
        "1m",
        "--after",
        "1s",
    ])?;
    wait_for("it is ready", || Ok(get(&served, "/-/ready", "")?.status == 200))?;
    let before = sum(&served, "whylate_caused_seconds_total", "bpf_wq_work")?;
    let injected = whylate(&["inject", "work", "--items", "5", "--busy", "5ms"]).output()?;
    ensure!(injected.status.success(), "{}", String::from_utf8_lossy(&injected.stderr));
    // Items wait behind earlier ones: 5, 10, 15 and 20 ms.
    wait_for("the work item is no culprit", || {
        Ok(sum(&served, "whylate_caused_seconds_total", "bpf_wq_work")? - before >= 0.015)
    })?;
    ensure!(sum(&served, "whylate_attached", "source=\"wq\"")? == 1.0);
    let mut stream = UnixStream::connect(&socket)?;
    stream.write_all(b"POST /-/keep HTTP/1.1\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    ensure!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
    wait_for("a file", || Ok(!recordings(&flights).is_empty()))?;
    // The file is whole once it has ended.
    served.stop()?;
    let file = recordings(&flights).pop().context("a file")?;
    let shown = whylate(&["replay", &file.to_string_lossy(), "wq", "--why", "3ms"]).output()?;
    let shown = String::from_utf8_lossy(&shown.stdout);
    ensure!(shown.contains("bpf_wq_work"), "{shown}");
    Ok(())
}

#[test]
fn go_reads_the_profile() -> Result<()> {
    let has_go = Command::new("go").arg("version").output().is_ok_and(|output| output.status.success());
    if !has_go {
        println!("skipped: there is no go");
        return Ok(());
    }
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let served = Served::start(&["serve", "--sources", "wq"])?;
    let profile = get(&served, "/debug/pprof/offcpu?seconds=1", "")?;
    ensure!(profile.status == 200, "{profile:?}");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("offcpu.pb.gz");
    fs::write(&file, &profile.body)?;
    let mut go = Command::new("go");
    go.args(["tool", "pprof", "-top"]).arg(&file).env("PPROF_TMPDIR", directory.path());
    let output = go.stdin(Stdio::null()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    // A table of functions, of which every sleeping thread has this one.
    ensure!(printed.contains("flat%") && printed.contains("schedule"), "{printed}");
    Ok(())
}

#[test]
fn profile_and_report_are_made_one_at_a_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let served = Served::start(&["serve", "--sources", "wq"])?;
    // It is there before the second one.
    let mut first = TcpStream::connect(&served.address)?;
    first.write_all(b"GET /debug/pprof/offcpu?seconds=3 HTTP/1.1\r\n\r\n")?;
    let second = get(&served, "/debug/report?seconds=1", "")?;
    ensure!(second.status == 503, "{second:?}");
    let mut profile = Vec::new();
    first.read_to_end(&mut profile)?;
    let body = profile.windows(4).position(|part| part == b"\r\n\r\n").context("a reply")? + 4;
    ensure!(profile.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&profile));
    ensure!(profile[body..].starts_with(&[0x1f, 0x8b]), "it is no compressed profile");
    let report = get(&served, "/debug/report?seconds=1", "")?;
    ensure!(report.status == 200 && report.text().starts_with("<!"), "{:.200}", report.text());
    Ok(())
}

/// Returns a set of capabilities of each thread of the exporter that measures, and of the one that serves.
fn capabilities(served: &Served, set: &str) -> Result<(Vec<u64>, u64)> {
    let (mut all, mut server) = (Vec::new(), None);
    for entry in fs::read_dir(format!("/proc/{}/task", served.running.pid()))? {
        let status = fs::read_to_string(entry?.path().join("status"))?;
        let mask = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(':')).context(set.to_owned())?;
        let mask = u64::from_str_radix(mask.trim(), 16)?;
        if status.starts_with("Name:\twhylate-serve\n") { server = Some(mask) } else { all.push(mask) }
    }
    ensure!(all.len() > 3, "it has more threads");
    Ok((all, server.context("a thread serves")?))
}

/// Bits of capabilities(7).
const SYS_ADMIN: u64 = 1 << 21;
const SYS_MODULE: u64 = 1 << 16;
const SYS_NICE: u64 = 1 << 23;
const DAC_OVERRIDE: u64 = 1 << 1;
const BPF: u64 = 1 << 39;

#[test]
fn capabilities_that_are_not_needed_are_given_up() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // As a unit of systemd: the second process gets no more than this one permits.
    let mut command = Command::new("setpriv");
    command.args(["--no-new-privs", env!("CARGO_BIN_EXE_whylate"), "serve", "--every", "500ms"]);
    let served = Served::of(&mut command)?;
    wait_for("it is ready", || Ok(get(&served, "/-/ready", "")?.status == 200))?;
    let (measuring, serving) = capabilities(&served, "CapEff")?;
    ensure!(serving == 0, "{serving:#x}");
    for effective in measuring {
        ensure!(effective & (SYS_ADMIN | SYS_NICE | SYS_MODULE | DAC_OVERRIDE) == 0, "{effective:#x}");
        ensure!(effective & BPF != 0, "{effective:#x}");
    }
    let (measuring, serving) = capabilities(&served, "CapPrm")?;
    for permitted in measuring.into_iter().chain([serving]) {
        ensure!(permitted & (SYS_MODULE | DAC_OVERRIDE) == 0 && permitted & SYS_ADMIN != 0, "{permitted:#x}");
    }
    let before = sum(&served, "whylate_wait_seconds_count", "timerlat")?;
    wait_for("nothing is measured", || Ok(sum(&served, "whylate_wait_seconds_count", "timerlat")? > before))?;
    ensure!(sum(&served, "whylate_attached", "")? >= 4.0, "sources have failed");
    // It has what it needs, all the same.
    let report = get(&served, "/debug/report?seconds=1", "")?;
    ensure!(report.status == 200 && report.text().contains("timerlat"), "{:.200}", report.text());
    drop(served);
    // Without profiles, the thread that serves needs none, ever.
    let served =
        Served::of(Command::new(env!("CARGO_BIN_EXE_whylate")).args(["serve", "--every", "500ms", "--no-debug"]))?;
    wait_for("it is ready", || Ok(get(&served, "/-/ready", "")?.status == 200))?;
    ensure!(capabilities(&served, "CapPrm")?.1 == 0, "it keeps capabilities");
    Ok(())
}
