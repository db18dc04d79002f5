// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate -p`, `--comm` and `--cgroup`: the overview of one program.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "running/quota.rs"]
mod quota;
mod running;

use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lock::lock_machine;
use quota::Quota;
use running::whylate;
use serde::Deserialize;
use whylate_model::CauseKind;
use whylate_model::path::PathSegment;
use whylate_model::path::budget::{Budget, Waits};
use whylate_model::units::format_ns;

/// A helper that answers each request after 10 ms of CPU time and 20 ms of sleep.
const SERVICE: &str = r#"
import os, sys, threading, time
ask, answer = os.pipe(), os.pipe()
if os.fork() == 0:
    # So that it ends with whoever asks.
    os.close(ask[1])
    open("/proc/self/comm", "w").write("whylate-helper")
    while os.read(ask[0], 1):
        until = time.thread_time() + 0.010
        while time.thread_time() < until: pass
        time.sleep(0.020)
        os.write(answer[1], b"x")
    os._exit(0)
open("/proc/self/comm", "w").write("whylate-service")
print("ready", flush=True)
for _ in range(int(sys.argv[1])):
    os.write(ask[1], b"x")
    os.read(answer[0], 1)
"#;

#[derive(Debug, Deserialize)]
struct Report {
    name: String,
    processes: u64,
    span_ns: u64,
    #[serde(flatten)]
    budget: Budget,
}

/// The service, stopped on drop; its helper exits when its pipes close.
struct Service(Child);

impl Service {
    /// Returns `None` and prints why if the service cannot run.
    fn start() -> Result<Option<Self>> {
        Self::play(SERVICE)
    }

    fn play(script: &str) -> Result<Option<Self>> {
        if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
            println!("skipped: there is no python3");
            return Ok(None);
        }
        let mut command = Command::new("python3");
        command.args(["-c", script, "5000"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut service = Service(command.spawn()?);
        let mut line = String::new();
        BufReader::new(service.0.stdout.take().context("a pipe")?).read_line(&mut line)?;
        Ok(Some(service))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn reports_what_a_services_helper_does() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(service) = Service::start()? else { return Ok(()) };
    let pid = service.0.id().to_string();
    let looks = thread::scope(|scope| {
        let look = |selector: [&'static str; 2]| {
            let [option, value] = selector;
            let value = if value.is_empty() { pid.clone() } else { value.to_owned() };
            scope.spawn(move || whylate(&[option, &value, "-d", "1s", "--json"]).output())
        };
        let rank = |by: &'static str| {
            scope.spawn(move || whylate(&["--comm", "whylate-service", "-d", "1s", "-v", "--rank-by", by]).output())
        };
        let looks = [["--comm", "whylate-service"], ["-p", ""]].map(look);
        let ranked = ["name", "cgroup"].map(rank);
        let joined = |look: ScopedJoinHandle<'_, io::Result<Output>>| look.join().expect("it does not panic");
        (looks.map(joined), ranked.map(joined))
    });
    drop(service);
    let (looks, [by_name, by_cgroup]) = looks;
    // The helper works and sleeps, and is in the service's cgroup.
    for (output, culprit) in [(by_name?, "thread whylate-helper:"), (by_cgroup?, " (itself) sleeping")] {
        let text = String::from_utf8_lossy(&output.stdout);
        let culprits = text.split("\nCULPRITS, ").nth(1).and_then(|rest| rest.split("\n\n").next());
        ensure!(culprits.is_some_and(|culprits| culprits.contains(culprit)), "{culprit}: {text}");
    }
    for (output, name) in looks.into_iter().zip(["whylate-service".to_owned(), format!("whylate-service:{pid}")]) {
        ensure_helped(&output?, &name)?;
    }
    Ok(())
}

/// The report names the program and its helper's work.
fn ensure_helped(output: &Output, called: &str) -> Result<()> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Report { name, processes, span_ns, budget } = serde_json::from_slice(&output.stdout)?;
    ensure!((name.as_str(), processes, budget.threads) == (called, 1, 1), "{name}: {processes}");
    let waited_ns: u64 = budget.waits.iter().map(|waits| waits.ns).sum();
    let sum = budget.on_cpu_ns + budget.own_sleep_ns + budget.ready.ns + waited_ns;
    ensure!(sum == budget.total_ns && sum == span_ns, "{sum} ns of {} in {span_ns}", budget.total_ns);
    let reads = budget.waits.iter().find(|waits| waits.via == "read").context("it reads from a pipe")?;
    let of = |is_it: &dyn Fn(&PathSegment) -> bool| -> u64 {
        reads.path.iter().filter(|segment| is_it(segment)).map(|segment| segment.ns).sum()
    };
    // Each wait is 20 ms of the helper's sleep and 10 ms of its CPU time; the waits at both ends are partly outside the
    // span.
    let whole = reads.latency.count().saturating_sub(2);
    let sleeps_ns = of(&|segment| segment.kind == CauseKind::Timer);
    let works_ns =
        of(&|segment| segment.kind == CauseKind::Running && segment.who.to_string().starts_with("whylate-helper:"));
    ensure!(whole >= 3, "{whole} waits");
    ensure!(sleeps_ns >= whole * 20_000_000, "{sleeps_ns} ns of sleep in {whole} waits");
    ensure!(works_ns >= whole * 9_000_000, "{works_ns} ns of work in {whole} waits");
    Ok(())
}

/// A client that sends each request in two parts over loopback and waits for the answer: TCP delays the ACK of the
/// first part by 40 ms and sends the second part after it. Another process computes concurrently.
const NAGLE: &str = r#"
import ctypes, os, socket, threading, time
def child(name, work):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 9)
        open("/proc/self/comm", "w").write(name)
        work()
        os._exit(0)
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    s, _ = listener.accept()
    while s.recv(4):
        body = b""
        while len(body) < 8: body += s.recv(8 - len(body))
        s.sendall(b"answer")
def compute():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True: pass
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
child("wl-server", serve)
child("wl-innocent", compute)
open("/proc/self/comm", "w").write("wl-client")
c = socket.create_connection(listener.getsockname())
print("ready", flush=True)
while True:
    c.send(b"head"); c.send(b"the body"); c.recv(64)
    time.sleep(0.002)
"#;

/// A server whose socket drops packets for 30 ms after each answer (SO_ATTACH_FILTER), so that the next request is
/// lost.
const LOSSY: &str = r#"
import ctypes, os, socket, struct, threading, time
listener = socket.create_server(("127.0.0.1", 0))
none = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, 9)
    s, _ = listener.accept()
    while s.recv(4):
        s.sendall(b"answer")
        s.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(none)))
        threading.Timer(0.03, lambda: s.setsockopt(socket.SOL_SOCKET, 27, 0)).start()
    os._exit(0)
c = socket.create_connection(listener.getsockname())
print("ready", flush=True)
while True:
    c.send(b"head"); c.recv(64)
    time.sleep(0.002)
"#;

#[test]
fn names_tcp_timers_without_a_culprit() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for (script, who) in [(NAGLE, "TCP's delayed acknowledgement"), (LOSSY, "TCP retransmission")] {
        let Some(client) = Service::play(script)? else { return Ok(()) };
        let output = whylate(&["-p", &client.0.id().to_string(), "-d", "2s", "--json"]).output();
        drop(client);
        ensure_waits_for_tcp(&output?, who)?;
    }
    Ok(())
}

fn ensure_waits_for_tcp(output: &Output, who: &str) -> Result<()> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Report { budget, .. } = serde_json::from_slice(&output.stdout)?;
    let waits = || budget.waits.iter().filter(|waits| waits.via.starts_with("recvfrom"));
    let total_ns: u64 = waits().map(|waits| waits.ns).sum();
    let of = |is_it: &dyn Fn(&PathSegment) -> bool| -> u64 {
        waits().flat_map(|waits| &waits.path).filter(|segment| is_it(segment)).map(|segment| segment.ns).sum()
    };
    let timer_ns = of(&|segment| segment.kind == CauseKind::Timer && segment.who == who);
    ensure!(total_ns > 500_000_000, "the client waits for {total_ns} ns: {budget:?}");
    ensure!(timer_ns >= total_ns / 2, "{timer_ns} of {total_ns} ns are for {who}: {budget:?}");
    ensure!(of(&|segment| segment.kind == CauseKind::Network) <= total_ns / 10, "{budget:?}");
    Ok(())
}

/// The cgroup has a quota that it does not use up; the helper is in another cgroup.
#[test]
fn cgroup_view_matches_its_program() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(quota) = Quota::make("program")? else { return Ok(()) };
    let mut sleeper = Service(Command::new("sh").args(["-c", &format!("{}; exec sleep 30", quota.enter())]).spawn()?);
    while fs::read_to_string(format!("/proc/{}/comm", sleeper.0.id()))?.trim() != "sleep" {
        ensure!(sleeper.0.try_wait()?.is_none(), "it has ended");
        thread::sleep(Duration::from_millis(5));
    }
    let path = quota.name().replace("cgroup ", "");
    let output = whylate(&["--cgroup", &path, "-d", "300ms", "--json"]).output()?;
    drop(sleeper);
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Report { name, processes, budget, .. } = serde_json::from_slice(&output.stdout)?;
    ensure!(name.contains(&path) && processes == 1 && budget.threads == 1, "{name}: {processes}");
    ensure!(budget.own_sleep_ns > 0 && budget.own_sleep_ns == budget.total_ns, "{budget:?}");
    Ok(())
}

#[test]
fn wait_chains_lead_from_service_to_helper() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(service) = Service::start()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("chain.folded");
    let name = file.to_str().context("a name in UTF-8")?;
    let output = whylate(&["offcpu", "--why", "15ms", "--comm", "whylate-service", "-d", "1s", "-o", name]).output();
    drop(service);
    let output = output?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (text, folded) = (String::from_utf8(output.stdout)?, fs::read_to_string(&file)?);
    let ns_of = |is_it: &dyn Fn(&str) -> bool| -> Result<u64> {
        let lines = folded.lines().filter_map(|line| line.rsplit_once(' ')).filter(|(frames, _)| is_it(frames));
        lines.map(|(_, us)| Ok(us.parse::<u64>()? * 1_000)).sum()
    };
    // Each line is rounded.
    let (total_ns, rounded_ns) = (ns_of(&|_| true)?, folded.lines().count() as u64 * 500);
    let mut totals = [total_ns - rounded_ns, total_ns, total_ns + rounded_ns].into_iter().map(format_ns);
    ensure!(
        totals.any(|total| text.contains(&format!(" took {total} in total."))),
        "{total_ns} ns in total is not what stands here: {text}{folded}"
    );
    ensure!(ns_of(&|frames| frames.starts_with("whylate-service;"))? == ns_of(&|_| true)?, "{folded}");
    // Each wait, printed or not, is 20 ms of the helper's sleep and 10 ms of its CPU time.
    let is_read = |line: &&str| line.contains(" waited ") && !line.starts_with(' ') && !line.contains(" for CPU ");
    let reads = text.lines().filter(is_read).count() as u64;
    let whole = reads.saturating_sub(2);
    let of_helper = |frames: &str| frames.contains("pipe_read;--;whylate-helper;");
    let sleeps_ns = ns_of(&|frames| of_helper(frames) && frames.ends_with(";--;until a timer expired"))?;
    let works_ns = ns_of(&|frames| of_helper(frames) && frames.ends_with(";whylate-helper;worked"))?;
    ensure!(whole >= 1, "{reads} waits: {text}");
    ensure!(sleeps_ns + rounded_ns >= whole * 20_000_000, "{sleeps_ns} ns of sleep in {reads} waits: {folded}");
    ensure!(works_ns >= whole * 9_000_000, "{works_ns} ns of work in {reads} waits: {folded}");
    Ok(())
}

/// A sleeping process that a signal stopped.
#[test]
fn stopped_process_is_no_voluntary_sleeper() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let stopped = Service(Command::new("sleep").arg("30").spawn()?);
    let pid = stopped.0.id();
    ensure!(Command::new("kill").args(["-STOP", &pid.to_string()]).status()?.success(), "it cannot be stopped");
    while !fs::read_to_string(format!("/proc/{pid}/stat"))?.contains(") T ") {
        thread::sleep(Duration::from_millis(5));
    }
    let pid = pid.to_string();
    let output = whylate(&["-p", &pid, "-d", "300ms", "--json"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Report { budget, .. } = serde_json::from_slice(&output.stdout)?;
    ensure!(budget.own_sleep_ns == 0 && budget.waits.len() == 1, "{budget:?}");
    let Waits { ns, via, path, .. } = &budget.waits[0];
    ensure!(*ns == budget.total_ns && via == "stopped by a signal", "{budget:?}");
    ensure!(path.iter().all(|segment| segment.kind == CauseKind::Stopped), "{path:?}");
    let text = String::from_utf8(whylate(&["-p", &pid, "-d", "200ms"]).output()?.stdout)?;
    ensure!(text.contains(" 100% of its time stopped by a signal (not over yet)"), "{text}");
    let blocked = String::from_utf8(whylate(&["offcpu", "--blocked", "1ns", "-p", &pid]).output()?.stdout)?;
    ensure!(blocked.contains("a signal has stopped it") && !blocked.contains("timer"), "{blocked}");
    Ok(())
}

#[test]
fn reports_missing_program() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let output = whylate(&["--comm", "no-such-program", "-d", "100ms"]).output()?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(2) && error.contains("no thread of no-such-program"), "{error}");
    let output = whylate(&["-p", "1", "--comm", "init"]).output()?;
    ensure!(output.status.code() == Some(2), "both are asked for");
    Ok(())
}
