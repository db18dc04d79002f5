// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate run` on commands with a known critical path.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[path = "run/credentials.rs"]
mod credentials;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/fixtures/loop_disk.rs"]
mod loop_disk;
#[path = "running/quota.rs"]
mod quota;
mod running;
#[path = "running/terminal.rs"]
mod terminal;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use chance::in_rounds;
use lock::{lock_machine, share_machine};
use loop_disk::Loop;
use quota::Quota;
use running::{Running, copied, whylate};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use rustix::thread::{MembarrierCommand, membarrier};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;
use terminal::{CTRL_C, typed};
use whylate_model::CauseKind;
use whylate_model::path::PathSegment;
use whylate_model::path::command::Explained;

const MS: u64 = 1_000_000;
/// Selects the workload that the test program runs as a command.
const PLAYED: &str = "WHYLATE_PLAYED";

#[derive(Debug, Deserialize)]
struct Report {
    #[serde(flatten)]
    explained: Explained,
    lost: BTreeMap<String, u64>,
}

impl Report {
    fn sum(&self, is_it: impl Fn(&PathSegment) -> bool) -> u64 {
        self.explained.path.iter().filter(|segment| is_it(segment)).map(|segment| segment.ns).sum()
    }

    fn timer_ns(&self) -> u64 {
        self.sum(|segment| segment.kind == CauseKind::Timer)
    }

    /// Returns the CPU time of the threads of this name, including interrupts that the kernel charges to them.
    fn worked_ns(&self, name: &str) -> u64 {
        self.sum(|segment| segment.kind == CauseKind::Running && segment.who.to_string().starts_with(name))
    }

    fn ensure_sums(&self) -> Result<()> {
        let Report { explained, .. } = self;
        let sum = self.sum(|_| true);
        ensure!(sum == explained.elapsed_ns, "the parts add up to {sum} of {} ns", explained.elapsed_ns);
        for wait in &explained.longest {
            let sum: u64 = wait.path.iter().map(|segment| segment.ns).sum();
            ensure!(sum == wait.ns, "the parts of a wait add up to {sum} of {} ns", wait.ns);
        }
        let unknown_ns = self.sum(|segment| segment.kind == CauseKind::Unknown);
        let has_gaps = self.lost.contains_key("unseen_switches");
        // The command's first wait may be for a CPU that has not switched yet.
        let first_wait = explained.path.get(1).filter(|part| !explained.is_folded && part.kind == CauseKind::Unknown);
        let unknown_ns = unknown_ns - first_wait.map_or(0, |part| part.ns.min(5 * MS));
        ensure!(has_gaps || unknown_ns * 100 <= explained.elapsed_ns, "{unknown_ns} ns are unknown: {self:?}");
        Ok(())
    }

    /// Returns whether the virtual machine hid switches: a timer interrupt on a CPU that runs one of its hidden threads
    /// makes no event, and the wait then ends in `unknown`.
    fn is_hidden(&self) -> bool {
        let unknown_ns = self.sum(|segment| segment.kind == CauseKind::Unknown);
        self.lost.contains_key("unseen_switches") && unknown_ns * 1000 > self.explained.elapsed_ns
    }
}

/// Maximum number of runs of a command whose switches were hidden.
const TRIES: usize = 20;

/// Runs an idempotent command until no switches are hidden and returns its report.
fn report(command: &mut Command) -> Result<Report> {
    for _ in 0..TRIES {
        let report = parse_report(&command.output()?)?;
        if !report.is_hidden() {
            return Ok(report);
        }
        println!("another try: the machine hid switches");
    }
    bail!("the machine hid switches in each of {TRIES} tries")
}

fn parse_report(output: &Output) -> Result<Report> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {stderr}", output.status);
    let report: Report = serde_json::from_str(stderr.lines().last().context("nothing is told")?)?;
    report.ensure_sums()?;
    Ok(report)
}

fn run_json(command: &[&str]) -> Command {
    let mut run = whylate(&["run", "--json", "--"]);
    run.args(command);
    run
}

fn shell(script: &str) -> Result<Report> {
    report(&mut run_json(&["sh", "-c", script]))
}

fn status_of(command: &[&str]) -> Result<(ExitStatus, String)> {
    let output = whylate(&["run"]).args(command).output()?;
    Ok((output.status, String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn near(reported_ns: u64, ms: u64, off_ms: u64) -> bool {
    reported_ns.abs_diff(ms * MS) <= off_ms * MS
}

#[test]
fn attributes_sleep_to_timer() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(|| {
        let report = report(&mut run_json(&["sleep", "0.3"]))?;
        let timer_ns = report.timer_ns();
        ensure!(near(timer_ns, 300, 1), "{timer_ns} ns are a timer's: {report:?}");
        // Around its sleep, the command starts and ends: it reads its files, and works or queues for a CPU.
        let starts = [CauseKind::Running, CauseKind::Disk, CauseKind::DiskQueue];
        let is_around = |segment: &PathSegment| segment.is_member && starts.contains(&segment.kind);
        let around_ns = report.sum(|segment| is_around(segment) || segment.ready.is_some());
        let elapsed_ns = report.explained.elapsed_ns;
        println!("{timer_ns} of {elapsed_ns} ns, and {around_ns} ns around it");
        ensure!(
            (timer_ns + around_ns) * 100 >= elapsed_ns * 95,
            "{timer_ns} and {around_ns} of {elapsed_ns} ns: {report:?}"
        );
        Ok(())
    })
}

#[test]
fn attributes_cpu_time_to_both_ends_of_a_pipe() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let program = std::env::current_exe()?;
    let played = |what| format!("{PLAYED}={what} '{}' --exact played --nocapture --test-threads=1", program.display());
    in_rounds(|| {
        let report = shell(&format!("{} | {}", played("first"), played("second")))?;
        let worked = ["first:", "second:"].map(|name| report.worked_ns(name));
        println!("{worked:?} of {FIRST_MS} and {SECOND_MS} ms");
        for (worked_ns, ms) in worked.into_iter().zip([FIRST_MS, SECOND_MS]) {
            ensure!(near(worked_ns, ms, 5), "{worked_ns} ns of {ms} ms: {report:?}");
        }
        Ok(())
    })
}

const FIRST_MS: u64 = 100;
const SECOND_MS: u64 = 50;

/// Waits for RCU grace periods, then computes.
const BARRIERS: &str = "barriers";

#[test]
fn rcu_grace_period_has_only_its_own_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if thread::available_parallelism()?.get() < 2 || membarrier(MembarrierCommand::Global).is_err() {
        println!("skipped: nobody waits for a grace period here");
        return Ok(());
    }
    let program = std::env::current_exe()?;
    let script =
        format!("{PLAYED}={BARRIERS} exec '{}' --exact played --nocapture --test-threads=1", program.display());
    in_rounds(|| {
        let output = run_json(&["sh", "-c", &script]).output()?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let took = stdout.lines().find_map(|line| line.rsplit_once(&format!("{BARRIERS}: ")));
        let took_ns: u64 = took.context("the program says nothing")?.1.parse()?;
        let report: Report =
            serde_json::from_slice(output.stderr.rsplit(|&byte| byte == b'\n').nth(1).context("no JSON")?)?;
        report.ensure_sums()?;
        // Grace periods end in a softirq or in an RCU kthread, which waits for timers in turn.
        let (worked_ns, within_ns) = (report.worked_ns("second:"), report.sum(|segment| segment.depth > 0));
        println!("{took_ns} ns for grace periods, {within_ns} ns in waits; it worked for {worked_ns} ns");
        ensure!((took_ns / 2..=took_ns + 10 * MS).contains(&within_ns), "{report:?}");
        ensure!(near(worked_ns, SECOND_MS, 5), "{worked_ns} ns of {SECOND_MS} ms: {report:?}");
        Ok(())
    })
}

/// Entry point of the test program when it runs as a command.
#[test]
fn played() -> Result<()> {
    let Ok(what) = std::env::var(PLAYED) else { return Ok(()) };
    let burn = |ms: u64| {
        let cpu_ns = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
        };
        let until_ns = cpu_ns() + ms * MS;
        while cpu_ns() < until_ns {
            std::hint::spin_loop();
        }
    };
    let is_first = what == "first";
    rustix::thread::set_name(if is_first { c"first" } else { c"second" })?;
    // The new name is seen at the next switch-in.
    thread::sleep(Duration::from_millis(1));
    if what == BARRIERS {
        let began = Instant::now();
        for _ in 0..3 {
            membarrier(MembarrierCommand::Global)?;
        }
        println!("{BARRIERS}: {}", began.elapsed().as_nanos());
    }
    if is_first {
        burn(FIRST_MS);
        return Ok(io::stdout().write_all(b"x")?);
    }
    if what != BARRIERS {
        io::stdin().read_to_end(&mut Vec::new())?;
    }
    burn(SECOND_MS);
    Ok(())
}

/// Throttled time matches the cgroup's counter.
#[test]
fn attributes_quota_throttling() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(quota) = Quota::make("run")? else { return Ok(()) };
    let program = std::env::current_exe()?;
    let test = "--exact played --nocapture --test-threads=1";
    let script = format!("{}; {PLAYED}=first exec '{}' {test}", quota.enter(), program.display());
    in_rounds(|| {
        let before_ns = quota.throttled_ns()?;
        let report = shell(&script)?;
        let truth_ns = quota.throttled_ns()? - before_ns;
        let throttled_ns = report.sum(|segment| segment.kind == CauseKind::Throttled);
        let idle_ns = report.sum(|segment| segment.kind == CauseKind::IdleExit);
        println!("{throttled_ns} ns, {truth_ns} as the kernel counts, and {idle_ns} while a CPU was idle");
        let mut of_quotas = report.explained.path.iter().filter(|segment| segment.kind == CauseKind::Throttled);
        ensure!(of_quotas.all(|segment| segment.who == quota.name()), "{report:?}");
        ensure!(throttled_ns * 100 >= truth_ns * 85 && truth_ns >= 100 * MS, "{report:?}");
        ensure!(throttled_ns <= truth_ns + truth_ns / 20 + 5 * MS, "{report:?}");
        ensure!(idle_ns * 20 <= report.explained.elapsed_ns, "{report:?}");
        Ok(())
    })
}

#[test]
fn path_follows_longest_concurrent_child() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(|| {
        let report = shell("sleep 0.1 & sleep 0.25 & sleep 0.05 & wait")?;
        ensure!(near(report.timer_ns(), 250, 2), "{report:?}");
        let longest = report.explained.longest.first().context("no wait is told")?;
        ensure!(near(longest.ns, 250, 2), "{report:?}");
        let waiter = longest.path.first().and_then(|segment| segment.waiter.clone()).unwrap_or_default();
        ensure!(waiter.comm() == Some("sleep"), "{report:?}");
        // In sequence, all sleeps are on the path.
        let report = shell("sleep 0.1; (sleep 0.05; sleep 0.05) & wait; sleep 0.1")?;
        ensure!(near(report.timer_ns(), 300, 4), "{report:?}");
        Ok(())
    })
}

/// A file system with a tiny dirty limit, as on a slow disk; unmounted on drop.
struct Strict {
    _disk: Loop,
    directory: tempfile::TempDir,
}

impl Strict {
    fn make() -> Result<Option<Self>> {
        let Some(disk) = Loop::make(96)? else { return Ok(None) };
        if !Command::new("mkfs.ext4").arg("-q").arg(disk.path()).status().is_ok_and(|status| status.success()) {
            println!("skipped: there is no mkfs.ext4");
            return Ok(None);
        }
        let number = fs::read_to_string(format!("/sys/block/{}/dev", disk.name))?;
        let limits = format!("/sys/class/bdi/{}", number.trim());
        let limit = |name: &str, value: &str| fs::write(format!("{limits}/{name}"), value);
        if limit("strict_limit", "1").and_then(|()| limit("max_bytes", "1048576")).is_err() {
            println!("skipped: this kernel has no limit of its own for a disk's dirty pages");
            return Ok(None);
        }
        let directory = tempfile::tempdir()?;
        let mounted = Command::new("mount").arg(disk.path()).arg(directory.path()).status()?;
        ensure!(mounted.success(), "cannot mount a loop device");
        Ok(Some(Strict { _disk: disk, directory }))
    }
}

impl Drop for Strict {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).status();
    }
}

#[test]
fn names_dirty_page_throttling() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(strict) = Strict::make()? else { return Ok(()) };
    let file = format!("of={}", strict.directory.path().join("file").display());
    let report = report(&mut run_json(&["dd", "if=/dev/zero", &file, "bs=64k", "count=400", "status=none"]))?;
    let of_timers =
        |is_it: &dyn Fn(&PathSegment) -> bool| report.sum(|segment| segment.kind == CauseKind::Timer && is_it(segment));
    let dirty_ns = of_timers(&|segment| segment.who == "dirty throttling");
    let other_ns = of_timers(&|segment| segment.who != "dirty throttling");
    ensure!(dirty_ns >= 20 * MS && other_ns * 10 <= dirty_ns, "{dirty_ns} and {other_ns} ns: {report:?}");
    Ok(())
}

/// Workloads as shell scripts, with the sleeps on their critical paths in milliseconds.
const DESIGNS: [(&str, &str, &[u64]); 5] = [
    ("nested sleeps", "sleep 0.05; (sleep 0.06; (sleep 0.07; :); :); sleep 0.03", &[50, 60, 70, 30]),
    ("a barrier", "for round in 1 2 3; do sleep 0.03 & sleep 0.08 & sleep 0.05 & wait; done", &[80, 80, 80]),
    ("a crew", "sleep 0.04; (sleep 0.06; sleep 0.05) & sleep 0.09 & wait; sleep 0.03", &[40, 60, 50, 30]),
    ("a pipeline", "(sleep 0.1; echo) | (read line; sleep 0.06; echo) | (read line; sleep 0.04)", &[100, 60, 40]),
    (
        "a remote call",
        "mkfifo ask answer; (read line <ask; sleep 0.07; echo >answer) & sleep 0.03; echo >ask; read line <answer; sleep 0.04",
        &[30, 70, 40],
    ),
];

/// A thread other than the leader computes, then executes a program that computes too.
const EXECUTES_IN_A_THREAD: &str = r#"
import os, sys, threading, time
WORK = "import time\nuntil = time.thread_time() + 0.03\nwhile time.thread_time() < until: pass"
def execute():
    exec(WORK)
    os.execv(sys.executable, [sys.executable, "-ESc", WORK])
threading.Thread(target=execute).start()
time.sleep(30)
"#;

#[test]
fn follows_exec_from_non_leader_thread() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no python3");
        return Ok(());
    }
    let report = report(&mut run_json(&["python3", "-ESc", EXECUTES_IN_A_THREAD]))?;
    let own_ns = report.sum(|segment| segment.kind == CauseKind::Running && segment.is_member);
    ensure!(own_ns >= 58 * MS, "{own_ns} ns: {report:?}");
    Ok(())
}

#[test]
fn distinguishes_timeout_from_sleep() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no python3");
        return Ok(());
    }
    let report = report(&mut run_json(&["python3", "-ESc", "import select\nselect.poll().poll(40)"]))?;
    let of = |who: &str| report.sum(|segment| segment.kind == CauseKind::Timer && segment.who == who);
    ensure!(of("timeout of the wait") >= 39 * MS && of("timer") < MS, "{report:?}");
    Ok(())
}

#[test]
fn path_of_each_workload_matches_its_sleeps() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(|| {
        for (name, script, sleeps) in DESIGNS {
            let directory = tempfile::tempdir()?;
            let report = report(run_json(&["sh", "-c", script]).current_dir(&directory))?;
            let timers = report.explained.path.iter().filter(|segment| segment.kind == CauseKind::Timer);
            let long: Vec<u64> = timers.map(|segment| segment.ns).filter(|ns| *ns > 20 * MS).collect();
            println!("{name}: {long:?}");
            let is_like = long.len() == sleeps.len() && long.iter().zip(sleeps).all(|(&ns, &ms)| near(ns, ms, 2));
            ensure!(is_like, "{name}: {long:?}, not {sleeps:?} ms: {report:?}");
        }
        Ok(())
    })
}

const MAKEFILE: &str = "\
all: left right
left: one two
\t@sleep 0.15
right: two
\t@sleep 0.05
one:
\t@sleep 0.2
two:
\t@sleep 0.1
.PHONY: all left right one two
";

#[test]
fn path_of_a_build_matches_its_dependencies() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("Makefile");
    fs::write(&file, MAKEFILE)?;
    if !Command::new("make").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no make");
        return Ok(());
    }
    in_rounds(|| {
        let report = report(&mut run_json(&["make", "-j2", "-f", &file.to_string_lossy()]))?;
        let timers = report.explained.path.iter().filter(|segment| segment.kind == CauseKind::Timer);
        let long: Vec<u64> = timers.map(|segment| segment.ns).filter(|ns| *ns > 20 * MS).collect();
        println!("{long:?}");
        ensure!(long.len() == 2 && near(long[0], 200, 2) && near(long[1], 150, 2), "{report:?}");
        Ok(())
    })
}

#[test]
fn returns_exit_status_of_command() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    for (command, status, says) in [
        (&["true"][..], 0, "true took "),
        (&["--", "sh", "-c", "exit 7"], 7, "sh failed (exit status 7) after "),
        (&["-v", "sh", "-c", "exit 7"], 7, "sh failed (exit status 7) after "),
        (&["sh", "-c", "kill -9 $$"], 137, "sh was killed by SIGKILL after "),
        (&["/etc/passwd"], 126, "cannot run /etc/passwd"),
        (&["/nonexistent/command"], 127, "cannot run /nonexistent/command"),
    ] {
        let (ended, stderr) = status_of(command)?;
        ensure!(ended.code() == Some(status) && stderr.contains(says), "{command:?}: {ended}: {stderr}");
    }
    Ok(())
}

#[test]
fn leaves_standard_streams_to_command() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let bytes: Vec<u8> = (0..100_000_u32).flat_map(u32::to_ne_bytes).collect();
    let mut cat =
        whylate(&["run", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut stdin = cat.stdin.take().context("no input")?;
    let output = thread::scope(|scope| {
        scope.spawn(|| {
            let written = stdin.write_all(&bytes);
            drop(stdin);
            written
        });
        cat.wait_with_output()
    })?;
    ensure!(output.status.success() && output.stdout == bytes, "{} of {} bytes", output.stdout.len(), bytes.len());
    ensure!(String::from_utf8_lossy(&output.stderr).contains("cat took "), "{output:?}");
    Ok(())
}

/// Runs a command that announces its start, then calls `send` with whylate's PID.
fn signalled(script: &str, send: impl FnOnce(Pid) -> Result<()>) -> Result<(ExitStatus, String)> {
    let mut run = whylate(&["run", "--", "sh", "-c", script]);
    let mut child = run.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().context("no output")?).read_line(&mut line)?;
    ensure!(line.trim() == "begun", "{line:?}");
    send(Pid::from_child(&child))?;
    let output = child.wait_with_output()?;
    Ok((output.status, String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn reports_interrupted_command() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let interrupt = |pid| Ok(kill_process_group(pid, Signal::INT)?);
    let (status, stderr) = signalled("echo begun; exec sleep 30", interrupt)?;
    ensure!(status.code() == Some(130) && stderr.contains("sh was killed by SIGINT after "), "{status}: {stderr}");
    Ok(())
}

/// The command has the terminal to itself: Ctrl-C goes to it, and its reaction is the exit status.
#[test]
fn command_owns_the_terminal() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let command = "test -t 0 && test -t 1 && test -t 2 && trap 'echo caught; exit 7' INT && echo begun || exit 9; while :; do sleep 0.02; done";
    let line = format!("'{PROGRAM}' run -- sh -c \"{command}\"");
    let Some((status, printed)) = typed(&line, "begun", CTRL_C)? else { return Ok(()) };
    ensure!(status == Some(7), "{status:?}: {printed}");
    // The report follows the command's output.
    let report = printed.find("sh failed (exit status 7) after ").with_context(|| printed.clone())?;
    ensure!(printed.find("caught").is_some_and(|caught| caught < report), "{printed}");
    ensure!(!printed.contains('\x1b'), "{printed:?}");
    Ok(())
}

/// While it attaches, whylate is the only process to terminate.
#[test]
fn signal_before_command_starts_ends_it() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    for signal in [Signal::INT, Signal::TERM] {
        let ends_in_time = || -> Result<bool> {
            let mut running = Running::start(&["run", "--", "echo", "ran"])?;
            running.wait_until_it_catches(signal)?;
            running.signal(signal)?;
            let mut printed = String::new();
            running.stdout()?.read_to_string(&mut printed)?;
            let (status, _) = running.end()?;
            Ok(printed.is_empty() && status.signal() == Some(signal.as_raw()))
        };
        // The signal may arrive late.
        let mut tries = (0..5).map(|_| ends_in_time());
        ensure!(tries.any(|ended| ended.is_ok_and(|ended| ended)), "the command has run despite {signal:?}");
    }
    Ok(())
}

#[test]
fn forwards_other_signals() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let script = "trap 'exit 9' TERM HUP; echo begun; while :; do sleep 0.02; done";
    for signal in [Signal::TERM, Signal::HUP] {
        let (status, stderr) = signalled(script, |pid| Ok(kill_process(pid, signal)?))?;
        ensure!(
            status.code() == Some(9) && stderr.contains("sh failed (exit status 9) after "),
            "{signal:?}: {status}: {stderr}"
        );
    }
    Ok(())
}

#[test]
fn command_inherits_ignored_signals() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    // As nohup(1) does, and shells with background jobs.
    let script = format!("trap '' HUP INT; exec '{}' run -- sh -c 'kill -HUP $$; kill -INT $$; exit 5'", PROGRAM);
    let output = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output()?;
    ensure!(output.status.code() == Some(5), "{output:?}");
    Ok(())
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_whylate");

#[test]
fn follows_thousands_of_processes() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // `make trial` runs more.
    let count = if std::env::var_os("WHYLATE_TRIAL").is_some() { 20_000 } else { 5_000 };
    let report = shell(&format!("i=0; while [ $i -lt {count} ]; do (:); i=$((i + 1)); done"))?;
    let members_ns = report.sum(|segment| segment.is_member);
    println!("{members_ns} of {} ns are its own", report.explained.elapsed_ns);
    ensure!(report.explained.path.len() <= 800 && members_ns > 0, "{report:?}");
    // All processes share one name and keep it.
    let nameless_ns = report.sum(|segment| segment.kind == CauseKind::Running && segment.who == "others");
    ensure!(nameless_ns == 0, "{nameless_ns} ns are nobody's: {report:?}");
    Ok(())
}

#[test]
fn lists_processes_on_the_path() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let report = || -> Result<String> {
        let output = whylate(&["run", "-v", "--tree", "--", "sh", "-c", "sleep 0.05; sleep 0.06"]).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{stderr}");
        Ok(stderr)
    };
    in_rounds(|| {
        let mut stderr = report()?;
        for _ in 1..TRIES {
            if !stderr.contains("unseen switches") {
                break;
            }
            println!("another try: the machine hid switches");
            stderr = report()?;
        }
        let rows = stderr.lines().skip_while(|line| !line.ends_with(" PROCESS ON THE PATH")).skip(1);
        let rows = rows.take_while(|line| !line.is_empty());
        // The longest wait comes first, below the parent of both. Work items may follow, which have no PID.
        let rows: Vec<(Vec<&str>, &str)> = rows
            .map(|row| row.split_whitespace().collect::<Vec<_>>())
            .filter_map(|row| Some((row.clone(), row.get(3)?.rsplit_once(':')?.0)))
            .collect();
        let names: Vec<&str> = rows.iter().map(|(_, name)| *name).collect();
        ensure!(names[names.len().saturating_sub(3)..] == ["sh", "sleep", "sleep"], "{stderr}");
        for ((row, _), ms) in rows.iter().rev().zip([50.0, 60.0]) {
            let slept = row[2].strip_suffix("ms").and_then(|slept| slept.parse::<f64>().ok());
            // The timer is armed shortly before the thread leaves its CPU.
            ensure!(slept.is_some_and(|slept| (ms - 1.0..ms + 1.0).contains(&slept)), "{stderr}");
        }
        Ok(())
    })?;
    // Tests run on a thread other than the leader.
    let program = std::env::current_exe()?;
    let script = format!("{PLAYED}=first '{}' --exact played --nocapture --test-threads=1; true", program.display());
    let output = whylate(&["run", "--tree", "--", "sh", "-c", &script]).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(stderr.lines().any(|line| line.ends_with(" (2 threads)")), "{stderr}");
    Ok(())
}

#[test]
fn does_not_wait_for_background_processes() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(|| {
        let report = shell("setsid sleep 0.5 </dev/null >/dev/null 2>&1 & sleep 0.1")?;
        ensure!(near(report.timer_ns(), 100, 1), "{report:?}");
        Ok(())
    })
}

#[test]
fn files_contain_the_whole_path() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let written = |name: &str| -> Result<(Report, String)> {
        let file = directory.path().join(name);
        let report = report(whylate(&["run", "--json", "-o", &file.to_string_lossy(), "--"]).args(["sleep", "0.05"]))?;
        Ok((report, fs::read_to_string(&file)?))
    };
    let (report, folded) = written("x.folded")?;
    let sums = folded.lines().map(|line| Ok(line.rsplit_once(' ').context("no time")?.1.parse::<u64>()?));
    let rounded_us = folded.lines().count() as u64;
    ensure!(sums.sum::<Result<u64>>()?.abs_diff(report.explained.elapsed_ns / 1_000) <= rounded_us, "{folded}");
    let (report, events) = written("x.json")?;
    let events: serde_json::Value = serde_json::from_str(&events)?;
    let end_us = |event: &serde_json::Value| Some(event["ts"].as_f64()? + event["dur"].as_f64()?);
    let end_us = events["traceEvents"].as_array().context("no events")?.iter().filter_map(end_us).fold(0.0, f64::max);
    ensure!((end_us * 1e3 - report.explained.elapsed_ns as f64).abs() < 1.0, "{end_us}: {events}");
    let (_, svg) = written("x.svg")?;
    ensure!(svg.contains("Critical path") && svg.contains("clock_nanosleep"), "{svg}");
    let mut reader = quick_xml::Reader::from_str(&svg);
    while !matches!(reader.read_event()?, quick_xml::events::Event::Eof) {}
    let (status, stderr) = status_of(&["-o", "x.png", "--", "true"])?;
    ensure!(status.code() == Some(2) && stderr.contains(".folded"), "{status}: {stderr}");
    Ok(())
}

#[test]
fn fails_without_privileges_and_runs_nothing() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = copied(PROGRAM, "whylate")?;
    let program = directory.path().join("whylate");
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
    let output = command.args(["run", "--", "echo", "ran"]).stdin(Stdio::null()).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(3) && output.stdout.is_empty(), "{output:?}");
    ensure!(stderr.lines().count() == 1 && stderr.starts_with("whylate: "), "{stderr}");
    Ok(())
}
