// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overview (`whylate` without a command) beside disturbances of known cause.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_setaffinity};
use whylate_model::CauseKind;
use whylate_model::overview::Overview;
use whylate_sources::AttachError;
use whylate_sources::inject::disturbance::{Kind, Plan, Policy, run};

use chance::{Unjudged, in_rounds};
use lock::lock_machine;
use running::{Running, whylate};

const MS_NS: u64 = 1_000_000;

fn look(arguments: &[&str]) -> Result<Overview> {
    let output = whylate(&["--json"]).args(arguments).output()?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("it printed no look")
}

/// Takes an overview while the first CPU is disturbed; `None` if the kernel lacks this disturbance.
fn look_beside(kind: Kind, length_ns: u64) -> Result<Option<Overview>> {
    let plan = Plan { kind, length_ns, times: 20, every_ns: 5 * length_ns, cpu: Some(0) };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                run(&plan, &over, &mut |_| Ok(()))?;
            }
            anyhow::Ok(())
        });
        let look = look(&["-d", "4s"]);
        over.store(true, Ordering::Relaxed);
        match disturbing.join().expect("disturbing does not panic") {
            Err(error) if matches!(error.downcast_ref(), Some(AttachError::Unsupported(_))) => {
                println!("skipped: {error:#}");
                return Ok(None);
            }
            outcome => outcome?,
        }
        Ok(Some(look?))
    })
}

/// On a busy machine, other programs may delay each other more than the disturbance does; that is measured.
fn judged(kind: Kind, judge: &dyn Fn(&Overview) -> Result<()>) -> Result<()> {
    in_rounds(|| {
        let (before, began) = (busy_stolen_and_own_s()?, Instant::now());
        let Some(look) = look_beside(kind, 20 * MS_NS)? else { return Ok(()) };
        let all_s = thread::available_parallelism()?.get() as f64 * began.elapsed().as_secs_f64();
        let now = busy_stolen_and_own_s()?;
        let busy = (now.0 - before.0 - (now.2 - before.2)) / all_s;
        judge(&look).map_err(|error| match busy > BUSY {
            true => Unjudged(format!("others have this machine's CPUs for {:.1} % of the time: {error}", busy * 100.0))
                .into(),
            false => error,
        })
    })
}

/// The disturbance is the first culprit, and is listed once however many sources saw it.
fn ensure_blamed(look: &Overview, kind: CauseKind, who: &str) -> Result<()> {
    let order: Vec<_> = look.sources.iter().map(|source| (&source.source, source.is_late, source.late)).collect();
    println!("{order:?}, not measured: {:?}", look.unmeasured);
    let is_it =
        |culprit: &&whylate_model::culprits::Culprit| culprit.kind == kind && culprit.who.to_string().starts_with(who);
    let mut found = look.culprits.iter().filter(is_it).peekable();
    // Threads that others wait for by design, as in a build on this machine, disturb nothing.
    let mut disturbing = look.culprits.iter().filter(|culprit| culprit.kind != CauseKind::Running);
    let first = disturbing.next().context("nobody is blamed")?;
    ensure!(found.peek() == Some(&first), "the first culprit is {first:?}, then {:?}", disturbing.next());
    // Threads of one name differ by their TIDs.
    let names: std::collections::BTreeSet<_> = found.map(|culprit| &culprit.who).collect();
    let all = look.culprits.iter().filter(is_it).count();
    ensure!(names.len() == all, "one is told twice: {:?}", look.culprits);
    let timerlat = look.sources.iter().find(|source| source.source == "timerlat").context("no timerlat")?;
    ensure!(timerlat.is_late && timerlat.late > 0, "{timerlat:?}");
    let blamed_ns: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
    let late: u64 = look.sources.iter().map(|source| source.late_ns).sum();
    ensure!(blamed_ns == late, "{blamed_ns} ns are blamed on somebody, and {late} ns were late");
    Ok(())
}

#[test]
fn cpu_hog_is_first_culprit() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    judged(Kind::Hog(Policy::Fifo(98)), &|look| ensure_blamed(look, CauseKind::Thread, "whylate-hog:"))
}

#[test]
fn disabled_interrupts_are_one_culprit_of_several_sources() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    judged(Kind::IrqsOff, &interrupts_are_off)
}

fn interrupts_are_off(look: &Overview) -> Result<()> {
    ensure_blamed(look, CauseKind::IrqsOff, "whylate-irqsoff:")?;
    let off = look.culprits.iter().find(|culprit| culprit.kind == CauseKind::IrqsOff).context("it is blamed")?;
    let sources: Vec<&str> = off.victims.iter().map(|victims| victims.source.as_str()).collect();
    ensure!(sources.contains(&"timerlat") && sources.contains(&"irqsoff"), "{sources:?}");
    Ok(())
}

/// Parses the times after `before`, in ticks of 10 ms, and returns seconds.
fn times_s(path: &str, after: &str) -> Result<Vec<f64>> {
    let text = std::fs::read_to_string(path)?;
    let (_, times) = text.split_once(after).with_context(|| format!("{path} has no {after:?}"))?;
    // Fields that are not numbers, such as a state, count as 0.
    Ok(times.split_whitespace().map(|field| field.parse().unwrap_or(0.0) / 100.0).collect())
}

/// Returns busy and steal time of all CPUs, steal time alone, and the CPU time of this test's processes, in seconds
/// (proc_stat(5), proc_pid_stat(5)).
fn busy_stolen_and_own_s() -> Result<(f64, f64, f64)> {
    let all = times_s("/proc/stat", "cpu ")?;
    // User, nice, system, idle, iowait, irq, softirq, steal.
    let busy = all[..3].iter().chain(&all[5..8]).sum();
    // After the name: user and system time of the process, and of its children that have exited.
    let own = times_s("/proc/self/stat", ") ")?;
    Ok((busy, all[7], own[11..=14].iter().sum()))
}

/// Tolerated CPU time of other programs and steal time, as fractions: a steal tick per second is noise.
const BUSY: f64 = 0.1;
const STOLEN: f64 = 0.001;

/// Without injected disturbance nothing may be found, unless others use the machine or the host steals time, which is
/// measured.
/// Delays of the machine itself say nothing of whylate.
const LATE_ALARM: Duration = Duration::from_millis(2);

/// Measures the maximum wakeup latency of a thread on each CPU during the run.
fn beside_alarms<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let over = AtomicBool::new(false);
    let alarm = |cpu: u32| -> Result<Duration> {
        let mut alone = CpuSet::new();
        alone.set(cpu as usize);
        sched_setaffinity(None, &alone)?;
        let (period, mut latest) = (Duration::from_millis(2), Duration::ZERO);
        while !over.load(Ordering::Relaxed) {
            let asleep = Instant::now();
            thread::sleep(period);
            latest = latest.max(asleep.elapsed().saturating_sub(period));
        }
        Ok(latest)
    };
    thread::scope(|scope| {
        let cpus = whylate_sources::kernel::cpus::online()?;
        let alarms: Vec<_> = cpus.into_iter().map(|cpu| scope.spawn(move || alarm(cpu))).collect();
        let done = work();
        over.store(true, Ordering::Relaxed);
        let mut latest = Duration::ZERO;
        for alarm in alarms {
            latest = latest.max(alarm.join().unwrap_or_else(|_| bail!("an alarm panics"))?);
        }
        Ok((done?, latest))
    })
}

#[test]
fn idle_machine_has_no_culprits() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let cpus = thread::available_parallelism()?.get() as f64;
    let duration = if std::env::var_os("WHYLATE_THOROUGH").is_some() { "60s" } else { "5s" };
    in_rounds(|| {
        let (before, began) = (busy_stolen_and_own_s()?, Instant::now());
        let (look, late_alarm) = beside_alarms(|| look(&["-d", duration]))?;
        let (all_s, now) = (cpus * began.elapsed().as_secs_f64(), busy_stolen_and_own_s()?);
        let (busy, stolen) = ((now.0 - before.0 - (now.2 - before.2)) / all_s, (now.1 - before.1) / all_s);
        let late: Vec<&str> = look.sources.iter().filter(|of| of.is_late).map(|of| of.source.as_str()).collect();
        println!("others have the CPUs for {:.1} % of the time, stolen {stolen:.5}; late: {late:?}", busy * 100.0);
        if busy > BUSY || stolen > STOLEN {
            let others = format!("others have this machine's CPUs for {:.1} % of the time", busy * 100.0);
            return Err(Unjudged(others).into());
        }
        // A hypervisor that does not report steal time.
        if late_alarm >= LATE_ALARM && !late.is_empty() {
            return Err(Unjudged(format!("a thread that wakes up by itself was {late_alarm:?} late meanwhile")).into());
        }
        let nobody = late.is_empty() && look.culprits.is_empty() && look.worst.is_empty();
        ensure!(nobody, "on an idle machine {late:?} are late: {:?}, worst {:?}", look.culprits, look.worst);
        Ok(())
    })
}

/// The overview counts over its reported span, however long attaching takes: measured threads wake once per period.
#[test]
fn counts_measured_threads_over_the_whole_span() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let cpus = whylate_sources::kernel::cpus::online()?.len() as f64;
    in_rounds(|| {
        let look = look(&["-d", "2s"])?;
        let timerlat = look.sources.iter().find(|source| source.source == "timerlat").context("no timerlat")?;
        let chosen = look.limitations.iter().find(|of| of.source == "timerlat" && of.reason.contains(" every "));
        let period_ms =
            chosen.and_then(|chosen| chosen.reason.split_once(" every ")?.1.split_once(" ms")?.0.parse().ok());
        let due = cpus * look.duration_ns as f64 / (period_ms.unwrap_or(1) * MS_NS) as f64;
        let share = timerlat.count as f64 / due;
        println!("{} of {due:.0} activations", timerlat.count);
        ensure!((0.9..1.1).contains(&share), "{} of {due:.0} activations are counted", timerlat.count);
        Ok(())
    })
}

#[test]
fn text_has_a_verdict_and_a_row_for_each_limit() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let output = whylate(&["-d", "1s"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.stderr.is_empty(), "progress is for terminals: {}", String::from_utf8_lossy(&output.stderr));
    ensure!(text.starts_with("LATE on ") || text.starts_with("Nothing was late on "), "{text}");
    for what in ["work item", "timer", "interrupt", "D state", "run queue", "wait"] {
        let is_row = |line: &&str| {
            let row = ["LATE", "ok"].iter().find_map(|verdict| line.split_once(&format!(" {verdict} ")));
            row.is_some_and(|(_, row)| row.trim_start().starts_with(&format!("{what}:")))
        };
        let rows = text.lines().filter(is_row).count();
        ensure!(rows == 1, "{what} stands in the table {rows} times: {text}");
    }
    Ok(())
}

/// A program in a sparse file of 2 GB that uses the first kilobytes, killed on drop.
struct Large {
    _directory: tempfile::TempDir,
    program: std::process::Child,
}

impl Large {
    fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("sleep");
        std::fs::copy("/bin/sleep", &path)?;
        // The rest is a hole.
        std::fs::OpenOptions::new().write(true).open(&path)?.set_len(2 << 30)?;
        let program = std::process::Command::new(&path).arg("60").spawn()?;
        Ok(Large { _directory: directory, program })
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn locks_only_memory_of_measured_threads() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let _large = Large::start()?;
    let mut look = Running::start(&["-d", "3s"])?;
    let mut most_kb = 0;
    while look.is_alive()? {
        let status = std::fs::read_to_string(format!("/proc/{}/status", look.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap_or("0 kB");
        most_kb = most_kb.max(line.trim().trim_end_matches(" kB").parse::<u64>()?);
        thread::sleep(std::time::Duration::from_millis(10));
    }
    let (status, stderr) = look.end()?;
    ensure!(status.code() == Some(0), "{stderr}");
    let limit_kb = (4 << 10) + 64 * std::thread::available_parallelism()?.get() as u64;
    println!("{most_kb} kB locked, limit {limit_kb} kB");
    ensure!(most_kb > 0, "measured threads have nothing locked");
    ensure!(most_kb < limit_kb, "{most_kb} kB are locked, more than {limit_kb}");
    Ok(())
}

/// BPF programs use the machine's clocks, whatever offsets a time namespace adds.
#[test]
fn time_namespace_does_not_change_results() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let inside = |arguments: &[&str]| {
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--time", "--fork", "--monotonic", "100000", "--boottime", "50"]).args(arguments).output()
    };
    if !inside(&["true"])?.status.success() {
        println!("skipped: no time namespace can be made here");
        return Ok(());
    }
    let output = inside(&[env!("CARGO_BIN_EXE_whylate"), "-d", "2s", "--json"])?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let look: Overview = serde_json::from_slice(&output.stdout)?;
    let timerlat = look.sources.iter().find(|source| source.source == "timerlat").context("no timerlat")?;
    println!("{timerlat:?}");
    ensure!(timerlat.count > 300, "few activations were seen: {timerlat:?}");
    ensure!(timerlat.p50_ns < 50 * MS_NS && timerlat.max_ns < 2_000 * MS_NS, "{timerlat:?}");
    let now_ns = u64::try_from(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos())?;
    ensure!(now_ns.abs_diff(look.start_unix_ns) < 60_000 * MS_NS, "it began at {}", look.start_unix_ns);
    Ok(())
}

#[test]
fn signal_during_attach_ends_it() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut looking = Running::start(&["-d", "60s"])?;
    looking.wait_until_it_catches(Signal::INT)?;
    looking.signal(Signal::INT)?;
    let mut printed = String::new();
    looking.stdout()?.read_to_string(&mut printed)?;
    let (status, said) = looking.end()?;
    ensure!(status.code() == Some(0) && said.contains("interrupted before"), "{status}: {said}");
    ensure!(printed.is_empty(), "it has looked: {printed}");
    Ok(())
}
