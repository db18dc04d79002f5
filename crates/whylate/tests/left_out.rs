// SPDX-License-Identifier: MIT OR Apache-2.0
//! Excluded CPUs: outside of the affinity mask, outside of the cpuset, or with a real-time thread of another process.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::Snapshot;
use whylate_model::overview::Overview;
use whylate_sources::kernel::cpu_choice;

use lock::lock_machine;
use running::whylate;

/// Timeout, far above what attaching takes.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Timer function of perf events in /proc/timer_list.
const TIMER: &str = "perf_swevent_hrtimer";

/// A process, killed on drop.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the first usable CPU and another one.
fn two_cpus() -> Result<Option<(u32, u32)>> {
    let usable = cpu_choice::usable()?;
    let two = usable.first().copied().zip(usable.get(1).copied());
    if two.is_none() {
        println!("skipped: it needs two usable CPUs");
    }
    Ok(two)
}

/// Binds a command to a CPU.
fn bound(cpu: u32, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("taskset");
    command.arg("-c").arg(cpu.to_string()).arg(program).args(arguments).stdin(Stdio::null());
    command
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_whylate"))
}

/// Returns the CPUs of the measured threads in `timerlat`'s JSON.
fn measured(output: &Output) -> Result<Vec<String>> {
    let said = String::from_utf8_lossy(&output.stderr);
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).with_context(|| format!("no snapshot: {said}"))?;
    Ok(snapshot.series.iter().filter_map(|series| series.labels.get("cpu").cloned()).collect())
}

/// Returns the names of a process's threads that are bound to this CPU alone.
fn bound_threads(pid: u32, cpu: u32) -> Vec<String> {
    let only = format!("Cpus_allowed_list:\t{cpu}");
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let bound = statuses.filter(|status| status.lines().any(|line| line == only));
    bound.map(|status| status.lines().next().unwrap_or_default().to_owned()).collect()
}

/// Returns the number of perf timers on the CPU; `None` if the kernel does not list timers.
fn timers_of(cpu: u32) -> Option<usize> {
    let list = fs::read_to_string("/proc/timer_list").ok()?;
    let (_, of_cpu) = list.split_once(&format!("\ncpu: {cpu}\n"))?;
    Some(of_cpu.split("\ncpu: ").next()?.matches(TIMER).count())
}

#[test]
fn overview_starts_no_thread_or_timer_outside_its_affinity() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some((own, other)) = two_cpus()? else { return Ok(()) };
    let before = timers_of(other);
    let output = tempfile::NamedTempFile::new()?;
    let mut child = bound(own, program(), &["-d", "1s", "--json"]);
    let mut child = Ended(child.stdout(output.reopen()?).stderr(Stdio::inherit()).spawn()?);
    let (pid, began) = (child.0.id(), Instant::now());
    // Its threads start last.
    while !bound_threads(pid, own).iter().any(|name| name.contains(&format!("timerlat/{own}"))) {
        let is_over = began.elapsed() >= TIMEOUT || child.0.try_wait()?.is_some();
        ensure!(!is_over, "no thread of timerlat is started: {}", fs::read_to_string(output.path())?);
        thread::sleep(Duration::from_millis(20));
    }
    let (threads, timers, own_timers) = (bound_threads(pid, other), timers_of(other), timers_of(own));
    ensure!(child.0.wait()?.success(), "the overview fails");
    let text = fs::read_to_string(output.path())?;
    ensure!(threads.is_empty(), "bound to CPU {other}: {threads:?}");
    println!(
        "timers on CPU {other}: {before:?} before, {timers:?} beside an overview, which has {own_timers:?} on CPU {own}"
    );
    if before.is_some() {
        ensure!(own_timers > Some(0), "no timer is listed where they are");
        ensure!(timers <= before, "{timers:?} timers on CPU {other}, {before:?} before");
    }
    let look: Overview = serde_json::from_str(&text)?;
    let named = format!("CPU {other} was left out: not in whylate's affinity or cpuset; -c {other} measures it");
    let by: Vec<&str> = look
        .limitations
        .iter()
        .filter(|limitations| limitations.reason == named)
        .map(|limitations| limitations.source.as_str())
        .collect();
    ensure!(by == ["irqsoff", "timerlat"], "{:?}", look.limitations);
    Ok(())
}

#[test]
fn skips_cpu_of_real_time_thread_unless_requested() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some((own, other)) = two_cpus()? else { return Ok(()) };
    let script = ["-f", "1", "sh", "-c", "while :; do sleep 0.01; done"];
    let _realtime = Ended(bound(other, Path::new("chrt"), &script).stderr(Stdio::null()).spawn()?);
    thread::sleep(Duration::from_millis(300));
    let timerlat = ["timerlat", "top", "--json", "-q", "-d", "300ms"];
    let output = whylate(&timerlat).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains(&format!("CPU {other} was left out: real-time thread ")), "{said}");
    ensure!(said.contains(&format!("(fifo) runs there; -c {other} measures it")), "{said}");
    let cpus = measured(&output)?;
    ensure!(cpus.contains(&own.to_string()) && !cpus.contains(&other.to_string()), "measured: {cpus:?}");
    let asked = other.to_string();
    let output = whylate(&[&timerlat[..], &["-c", &asked]].concat()).output()?;
    ensure!(measured(&output)? == [asked], "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A cpuset of one CPU, removed on drop.
struct Cpuset(PathBuf);

impl Cpuset {
    /// Returns `None` and prints why if this would need changes to the hierarchies.
    fn make(cpu: u32) -> Result<Option<Self>> {
        let name = format!("whylate-left-out-{}", std::process::id());
        let (of_v1, unified) = (Path::new("/sys/fs/cgroup/cpuset"), Path::new("/sys/fs/cgroup"));
        let controllers = fs::read_to_string(unified.join("cgroup.subtree_control")).unwrap_or_default();
        let parent = match () {
            () if of_v1.join("cpuset.mems").exists() => of_v1,
            () if controllers.split_whitespace().any(|name| name == "cpuset") => unified,
            () => {
                println!("skipped: no cgroup may have a cpuset here");
                return Ok(None);
            }
        };
        fs::create_dir(parent.join(&name))?;
        let made = Cpuset(parent.join(name));
        fs::write(made.0.join("cpuset.cpus"), cpu.to_string())?;
        if parent == of_v1 {
            fs::write(made.0.join("cpuset.mems"), fs::read_to_string(parent.join("cpuset.mems"))?.trim())?;
        }
        Ok(Some(made))
    }

    /// Returns the output of whylate inside the cpuset.
    fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0).arg(program());
        Ok(command.args(arguments).stdin(Stdio::null()).output()?)
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn measures_cpus_of_cpuset_and_rejects_others() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some((own, other)) = two_cpus()? else { return Ok(()) };
    let Some(cpuset) = Cpuset::make(own)? else { return Ok(()) };
    let output = cpuset.output(&["timerlat", "top", "--json", "-q", "-d", "300ms"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("left out: not in whylate's affinity or cpuset"), "{said}");
    ensure!(measured(&output)? == [own.to_string()], "{said}");
    for command in ["timerlat", "irqsoff"] {
        let output = cpuset.output(&[command, "-c", &other.to_string(), "-d", "1s"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(3), "{command}: {said}");
        ensure!(
            said.contains(&format!("CPU {other} is outside of the cpuset of this process: choose others")),
            "{said}"
        );
    }
    Ok(())
}
