// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread waits for the quota of its throttled cgroup, whatever runs on its CPU. Oracle: the kernel's count of
//! throttled periods. And culprits have their cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::{ActorName, CauseKind, LateEvent};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::support::machine::cpus::TestCpus;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::{Unjudged, in_rounds};

/// The process's quota per 100 ms: it is throttled in most periods, even on a shared CPU.
const QUOTA_US: u32 = 5_000;
const LATE_NS: u64 = 20_000_000;
const WATCHED: Duration = Duration::from_secs(1);

/// A cgroup with a quota, removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Returns `None` if the controller is not enabled: hierarchies are left as they are.
    fn make() -> Result<Option<Self>> {
        let name = format!("whylate-test-{}", std::process::id());
        for parent in ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"].map(Path::new) {
            if parent.join("cgroup.procs").exists() {
                fs::create_dir(parent.join(&name))?;
                let made = Cgroup(parent.join(&name));
                // Missing without CONFIG_CFS_BANDWIDTH.
                return Ok(fs::write(made.0.join("cpu.cfs_quota_us"), QUOTA_US.to_string()).is_ok().then_some(made));
            }
        }
        let unified = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(unified.join("cgroup.subtree_control")).unwrap_or_default();
        if !controllers.split_whitespace().any(|name| name == "cpu") {
            return Ok(None);
        }
        fs::create_dir(unified.join(&name))?;
        let made = Cgroup(unified.join(&name));
        fs::write(made.0.join("cpu.max"), format!("{QUOTA_US} 100000"))?;
        Ok(Some(made))
    }

    /// Sets the quota and its period, in microseconds.
    fn limit(&self, [quota_us, period_us]: [u32; 2]) -> Result<()> {
        if self.0.join("cpu.max").exists() {
            return Ok(fs::write(self.0.join("cpu.max"), format!("{quota_us} {period_us}"))?);
        }
        // A quota may not be longer than its period.
        fs::write(self.0.join("cpu.cfs_quota_us"), quota_us.to_string())?;
        Ok(fs::write(self.0.join("cpu.cfs_period_us"), period_us.to_string())?)
    }

    fn path(&self) -> String {
        format!("/{}", self.0.file_name().map(|name| name.to_string_lossy()).unwrap_or_default())
    }

    /// Returns the name that causes use.
    fn name(&self) -> String {
        format!("cgroup {}", self.path())
    }

    fn throttled_periods(&self) -> Result<u64> {
        let stat = fs::read_to_string(self.0.join("cpu.stat"))?;
        let count = stat.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        Ok(count.context("the kernel counts no throttled periods")?.parse()?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process in it may still be exiting.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// A script on one CPU, such as a loop, killed on drop.
struct Spinner(Child);

impl Spinner {
    fn start(cpu: u32) -> Result<Self> {
        Self::with_script("while :; do :; done", cpu)
    }

    /// Starts the script bound to the CPU, with all of its threads.
    fn with_script(script: &str, cpu: u32) -> Result<Self> {
        let bound = ["-c", &cpu.to_string(), "sh", "-c", script];
        Ok(Spinner(Command::new("taskset").args(bound).stdin(Stdio::null()).spawn()?))
    }

    /// Returns its CPU time (proc_pid_schedstat(5)).
    fn ran(&self) -> Result<Duration> {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.0.id()))?;
        let ns = text.split_whitespace().next().context("schedstat has three fields")?.parse()?;
        Ok(Duration::from_nanos(ns))
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn throttled_wait_is_attributed_to_quota_on_busy_cpu() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    let other = Spinner::start(test_cpus.disturbed)?;
    let throttled = Spinner::start(test_cpus.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), throttled.0.id().to_string())?;
    let options = OffcpuOptions {
        threads: Threads::of_process(throttled.0.id()),
        explain_over_ns: Some(LATE_NS),
        ..OffcpuOptions::default()
    };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        let before = cgroup.throttled_periods()?;
        sleep(WATCHED);
        let periods = cgroup.throttled_periods()? - before;
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let of_kind = |event: &LateEvent, kind| -> u64 {
            event.causes.iter().filter(|cause| cause.kind == kind).map(|cause| cause.ns).sum()
        };
        for event in &events {
            let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
            ensure!(sum == event.latency_ns, "the causes of {} ns add up to {sum}", event.latency_ns);
            let mut of_quotas = event.causes.iter().filter(|cause| cause.kind == CauseKind::Throttled);
            ensure!(of_quotas.all(|cause| cause.who == cgroup.name()), "another one is blamed: {event:?}");
        }
        // The other spinner runs all the time.
        let attributed =
            events.iter().filter(|event| of_kind(event, CauseKind::Throttled) * 2 > event.latency_ns).count() as u64;
        println!("{periods} throttled periods, {} long waits, {attributed} of them throttled", events.len());
        ensure!(
            periods > 0 && attributed * 2 >= periods,
            "{attributed} of {periods} are attributed to the quota: {:?}",
            events.last()
        );
        Ok(())
    })?;
    drop((other, throttled));
    Ok(())
}

/// Set in the environment of the sleeping process.
const SLEEPS: &str = "WHYLATE_SLEEPS";
/// Long enough that the cgroup is throttled at the wakeup: only the spinner uses up the quota, and sooner.
const ASLEEP: Duration = Duration::from_millis(35);

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn sleeping_process() {
    while std::env::var_os(SLEEPS).is_some() {
        sleep(ASLEEP);
    }
}

#[test]
fn wakeup_in_throttled_cgroup_waits_for_quota() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Another thread runs whenever the cgroup is throttled, so that an idle CPU gives nothing away here.
    let innocent = Spinner::with_script("renice -n 19 $$ >/dev/null; while :; do :; done", test_cpus.disturbed)?;
    let spinner = Spinner::start(test_cpus.disturbed)?;
    let program = std::env::current_exe()?;
    let script = format!("{SLEEPS}=1 exec '{}' --exact throttled::sleeping_process >/dev/null", program.display());
    let sleeper = Spinner::with_script(&script, test_cpus.disturbed)?;
    for child in [&spinner, &sleeper] {
        fs::write(cgroup.0.join("cgroup.procs"), child.0.id().to_string())?;
    }
    let options = OffcpuOptions { explain_over_ns: Some(LATE_NS), ..OffcpuOptions::default() };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED * 2);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let is_spinner = |event: &LateEvent| ActorName::thread("sh", spinner.0.id()) == event.subject;
        events.retain(|event| event.labels.get("cgroup") == Some(&cgroup.path()) && !is_spinner(event));
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let attributed = events.iter().filter(is_of_quota).count();
        println!("{attributed} of {} waits are attributed to the quota", events.len());
        ensure!(innocent.ran()? > Duration::ZERO, "no other thread runs");
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(attributed * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        Ok(())
    })
}

/// Minimum share of the CPU for the test's own threads, if no other process uses it.
const LEFT_TO_OWN: f64 = 0.85;
/// A larger share of a wait than this must not be attributed to threads outside of the cgroup.
const OF_OTHERS: f64 = 0.4;

/// Up to 6.17 throttling applies to a cgroup's queue, with all threads that wait in it.
#[test]
fn queued_threads_are_throttled_with_their_cgroup() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // At ticks of a slow machine it overruns its quota, but by less than the next period's quota.
    cgroup.limit([20_000, 100_000])?;
    // It runs whenever the cgroup is throttled, and hardly ever else.
    let innocent = Spinner::with_script("renice -n 19 $$ >/dev/null; while :; do :; done", test_cpus.disturbed)?;
    let mut inside = Vec::new();
    for _ in 0..3 {
        let spinner = Spinner::start(test_cpus.disturbed)?;
        fs::write(cgroup.0.join("cgroup.procs"), spinner.0.id().to_string())?;
        inside.push(spinner);
    }
    let options = OffcpuOptions { explain_over_ns: Some(60_000_000), ..OffcpuOptions::default() };
    let own = || inside.iter().chain([&innocent]).map(Spinner::ran).sum::<Result<Duration>>();
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        let (began, ran_before) = (Instant::now(), own()?);
        sleep(WATCHED * 2);
        let ran = (own()? - ran_before).as_secs_f64() / began.elapsed().as_secs_f64();
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        // A cgroup that waits for other threads does not use its quota up.
        if ran < LEFT_TO_OWN {
            return Err(Unjudged(format!("others have this CPU for {:.0} % of the time", 100.0 - ran * 100.0)).into());
        }
        let is_inside = |event: &LateEvent| inside.iter().any(|of| ActorName::thread("sh", of.0.id()) == event.subject);
        events.retain(is_inside);
        let innocent = ActorName::thread("sh", innocent.0.id());
        let is_blamed = |event: &&LateEvent| {
            let blamed = event.causes.iter().filter(|cause| cause.who == innocent).map(|cause| cause.ns).sum::<u64>();
            blamed as f64 > event.latency_ns as f64 * OF_OTHERS
        };
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let blamed = events.iter().filter(is_blamed).count();
        let attributed = events.iter().filter(is_of_quota).count();
        println!("{attributed} of {} waits are attributed to the quota, and {blamed} to another thread", events.len());
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(blamed * 20 <= events.len(), "{:?}", events.iter().find(is_blamed));
        ensure!(attributed * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        Ok(())
    })
}

/// Real-time runtime and period of the cgroup, in microseconds.
const REAL_TIME_US: [u32; 2] = [20_000, 100_000];

#[test]
fn real_time_limit_is_attributed() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Only with CONFIG_RT_GROUP_SCHED and cgroup v1. The runtime may not be longer than the period.
    let [runtime_us, period_us] = REAL_TIME_US.map(|us| us.to_string());
    if fs::write(cgroup.0.join("cpu.rt_period_us"), period_us).is_err() {
        println!("skipped: no cgroup has a limit of real-time priority here");
        return Ok(());
    }
    fs::write(cgroup.0.join("cpu.rt_runtime_us"), runtime_us)?;
    let spinner = Spinner::start(test_cpus.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), spinner.0.id().to_string())?;
    // A thread that becomes real-time while throttled stays marked as throttled by the quota (6.18).
    sleep(Duration::from_millis(50));
    let is_set = Command::new("chrt").args(["-f", "-p", "1", &spinner.0.id().to_string()]).status()?.success();
    ensure!(is_set, "the spinner cannot have real-time priority");
    let options = OffcpuOptions {
        threads: Threads::of_process(spinner.0.id()),
        explain_over_ns: Some(40_000_000),
        ..OffcpuOptions::default()
    };
    let limit = format!("real-time limit of {}", cgroup.name());
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED * 2);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let is_of_limit = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == limit)
        };
        let attributed = events.iter().filter(is_of_limit).count();
        println!("{attributed} of {} waits are attributed to the limit", events.len());
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(attributed * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_limit(event)));
        Ok(())
    })
}

/// A fifth of a CPU, in periods that are short enough for a hundred waits.
const ALONE_US: [u32; 2] = [4_000, 20_000];
/// Minimum idle share of the CPU, if no other process uses it.
const LEFT_IDLE: f64 = 0.7;

/// Returns a CPU's idle seconds, with a resolution of 10 ms (proc_stat(5)).
fn idle_s(cpu: u32) -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let times = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{cpu} "))).context("no such CPU")?;
    // User, nice, system, idle, iowait.
    let ticks: f64 = times.split_whitespace().skip(3).take(2).filter_map(|word| word.parse::<f64>().ok()).sum();
    Ok(ticks / 100.0)
}

#[test]
fn throttled_waits_blame_no_other_thread() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    cgroup.limit(ALONE_US)?;
    let throttled = Spinner::start(test_cpus.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), throttled.0.id().to_string())?;
    let options = OffcpuOptions {
        threads: Threads::of_process(throttled.0.id()),
        explain_over_ns: Some(5_000_000),
        ..OffcpuOptions::default()
    };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        let mut events: Vec<LateEvent> = Vec::new();
        let (began, idle_before_s) = (Instant::now(), idle_s(test_cpus.disturbed)?);
        for _ in 0..60 {
            source.drain_late(Duration::from_millis(100), &mut |event| events.push(event))?;
            if events.len() >= 100 {
                break;
            }
            sleep(Duration::from_millis(50));
        }
        // A cgroup that waits for other threads does not use its quota up.
        let idle = (idle_s(test_cpus.disturbed)? - idle_before_s) / began.elapsed().as_secs_f64();
        if idle < LEFT_IDLE {
            return Err(
                Unjudged(format!("others have this CPU: it is idle for {:.0} % of the time", idle * 100.0)).into()
            );
        }
        ensure!(events.len() >= 100, "only {} waits were late", events.len());
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let attributed = events.iter().filter(is_of_quota).count();
        println!("{attributed} of {} waits are attributed to the quota", events.len());
        // Another thread may run on that CPU when the quota is refilled, which delays this one.
        ensure!(attributed * 100 >= events.len() * 95, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        for event in &events {
            let idle = event.causes.iter().find(|cause| cause.kind == CauseKind::IdleExit);
            ensure!(idle.is_none_or(|cause| cause.ns < 1_000_000), "an idle state is blamed: {event:?}");
        }
        Ok(())
    })
}

#[test]
fn culprits_and_victims_have_their_cgroups() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // A quota that never runs out.
    cgroup.limit([100_000, 100_000])?;
    let (inside, outside) = (Spinner::start(test_cpus.disturbed)?, Spinner::start(test_cpus.disturbed)?);
    fs::write(cgroup.0.join("cgroup.procs"), inside.0.id().to_string())?;
    let options = OffcpuOptions { explain_over_ns: Some(1_000_000), ..OffcpuOptions::default() };
    let called = |spinner: &Spinner| format!("sh:{}", spinner.0.id());
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        for (victim, own, culprit, culprit_cgroup) in
            [(&inside, cgroup.path(), &outside, "/".to_owned()), (&outside, "/".to_owned(), &inside, cgroup.path())]
        {
            let of_victim: Vec<_> = events.iter().filter(|event| event.subject == called(victim)).collect();
            ensure!(of_victim.iter().all(|event| event.labels.get("cgroup") == Some(&own)), "in {own}: {of_victim:?}");
            let causes = of_victim.iter().flat_map(|event| &event.causes);
            let by_culprit: Vec<_> = causes.filter(|cause| cause.who == called(culprit)).collect();
            ensure!(by_culprit.len() >= 10, "{} of {} waits name the culprit", by_culprit.len(), of_victim.len());
            let is_known = |path: &str| {
                by_culprit.iter().all(|cause| cause.cgroup.as_ref().is_some_and(|cgroup| cgroup.path == path))
            };
            ensure!(is_known(&culprit_cgroup), "the culprit is in {culprit_cgroup}: {:?}", by_culprit.first());
        }
        Ok(())
    })
}
