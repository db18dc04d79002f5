// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread whose cgroup has used up its quota waits for that, whoever has its CPU. Oracle: the kernel's count of that. And
//! culprits are told with the cgroup that they are in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use whylate_model::{CauseKind, LateEvent, thread};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::kernel::chance::{Unjudged, in_rounds};
use crate::kernel::late::Places;
use crate::kernel::turn::turn_to_measure;

/// So long of each 100 ms the process may run: it is throttled for most of them, even where it shares its CPU.
const QUOTA_US: u32 = 5_000;
const LATE_NS: u64 = 20_000_000;
const WATCHED: Duration = Duration::from_secs(1);

/// A cgroup with a quota, gone at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Where the controller is in use: hierarchies are left as they are.
    fn make() -> Result<Option<Self>> {
        let name = format!("whylate-test-{}", std::process::id());
        for parent in ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"].map(Path::new) {
            if parent.join("cgroup.procs").exists() {
                fs::create_dir(parent.join(&name))?;
                let made = Cgroup(parent.join(&name));
                // Without CONFIG_CFS_BANDWIDTH it is not there.
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

    /// So long of each so long, in microseconds.
    fn limit(&self, [quota_us, period_us]: [u32; 2]) -> Result<()> {
        if self.0.join("cpu.max").exists() {
            return Ok(fs::write(self.0.join("cpu.max"), format!("{quota_us} {period_us}"))?);
        }
        // No quota is longer than its period.
        fs::write(self.0.join("cpu.cfs_quota_us"), quota_us.to_string())?;
        Ok(fs::write(self.0.join("cpu.cfs_period_us"), period_us.to_string())?)
    }

    fn path(&self) -> String {
        format!("/{}", self.0.file_name().map(|name| name.to_string_lossy()).unwrap_or_default())
    }

    /// As causes name it.
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
        // Whoever was in it may be on its way out.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// Spins on one CPU, or runs something else there, until it is dropped.
struct Spinner(Child);

impl Spinner {
    fn start(cpu: u32) -> Result<Self> {
        Self::of("while :; do :; done", cpu)
    }

    /// Each of its threads is on that CPU from its first moment on.
    fn of(script: &str, cpu: u32) -> Result<Self> {
        let bound = ["-c", &cpu.to_string(), "sh", "-c", script];
        Ok(Spinner(Command::new("taskset").args(bound).stdin(Stdio::null()).spawn()?))
    }

    /// How long it has had a CPU (proc_pid_schedstat(5)).
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
fn a_throttled_wait_is_told_as_such_whoever_has_the_cpu() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    let other = Spinner::start(places.disturbed)?;
    let throttled = Spinner::start(places.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), throttled.0.id().to_string())?;
    let options = OffcpuOptions {
        threads: Threads::of(throttled.0.id()),
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
        // The other one has the CPU all the time.
        let told =
            events.iter().filter(|event| of_kind(event, CauseKind::Throttled) * 2 > event.latency_ns).count() as u64;
        println!("{periods} throttled periods, {} long waits, {told} of them throttled", events.len());
        ensure!(periods > 0 && told * 2 >= periods, "{told} of {periods} are told: {:?}", events.last());
        Ok(())
    })?;
    drop((other, throttled));
    Ok(())
}

/// The process that sleeps, in the environment.
const SLEEPS: &str = "WHYLATE_SLEEPS";
/// So long that it is throttled when it wakes: nobody else uses up the quota sooner than that.
const ASLEEP: Duration = Duration::from_millis(35);

/// Not a test by itself: the process.
#[test]
fn sleeping_process() {
    while std::env::var_os(SLEEPS).is_some() {
        sleep(ASLEEP);
    }
}

#[test]
fn a_thread_woken_while_its_cgroup_is_throttled_waits_for_that() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Somebody else has the CPU whenever the cgroup is throttled: that it is idle tells nothing here.
    let innocent = Spinner::of("renice -n 19 $$ >/dev/null; while :; do :; done", places.disturbed)?;
    let spinner = Spinner::start(places.disturbed)?;
    let program = std::env::current_exe()?;
    let script = format!("{SLEEPS}=1 exec '{}' --exact throttled::sleeping_process >/dev/null", program.display());
    let sleeper = Spinner::of(&script, places.disturbed)?;
    for child in [&spinner, &sleeper] {
        fs::write(cgroup.0.join("cgroup.procs"), child.0.id().to_string())?;
    }
    let options = OffcpuOptions { explain_over_ns: Some(LATE_NS), ..OffcpuOptions::default() };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED * 2);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let is_spinner = |event: &LateEvent| event.subject == thread::called("sh", spinner.0.id());
        events.retain(|event| event.labels.get("cgroup") == Some(&cgroup.path()) && !is_spinner(event));
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let told = events.iter().filter(is_of_quota).count();
        println!("{told} of {} waits are told as the quota's", events.len());
        ensure!(innocent.ran()? > Duration::ZERO, "nobody else has the CPU");
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(told * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        Ok(())
    })
}

/// So much of their CPU is the test's own threads' where nobody else uses it.
const LEFT_TO_OWN: f64 = 0.85;
/// Waits behind others of its cgroup that are this much of a wait may be anybody's.
const OF_OTHERS: f64 = 0.4;

/// Up to 6.17 a cgroup's queue is throttled, with all who wait in it.
#[test]
fn threads_behind_others_of_their_cgroup_are_throttled_with_them() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Ticks of a slow machine let it use more than it has: that is less than what comes with the next period.
    cgroup.limit([20_000, 100_000])?;
    // It has the CPU whenever the cgroup is throttled, and hardly ever else.
    let innocent = Spinner::of("renice -n 19 $$ >/dev/null; while :; do :; done", places.disturbed)?;
    let mut inside = Vec::new();
    for _ in 0..3 {
        let spinner = Spinner::start(places.disturbed)?;
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
        // Whoever waits for others has not used its quota up.
        if ran < LEFT_TO_OWN {
            return Err(Unjudged(format!("others have this CPU for {:.0} % of the time", 100.0 - ran * 100.0)).into());
        }
        let is_inside = |event: &LateEvent| inside.iter().any(|of| event.subject == thread::called("sh", of.0.id()));
        events.retain(is_inside);
        let innocent = thread::called("sh", innocent.0.id());
        let is_blamed = |event: &&LateEvent| {
            let blamed = event.causes.iter().filter(|cause| cause.who == innocent).map(|cause| cause.ns).sum::<u64>();
            blamed as f64 > event.latency_ns as f64 * OF_OTHERS
        };
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let blamed = events.iter().filter(is_blamed).count();
        let told = events.iter().filter(is_of_quota).count();
        println!("{told} of {} waits are told as the quota's, and {blamed} as somebody's else", events.len());
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(blamed * 20 <= events.len(), "{:?}", events.iter().find(is_blamed));
        ensure!(told * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        Ok(())
    })
}

/// Threads of real-time priority in it may run for so long of each so long, in microseconds.
const REAL_TIME_US: [u32; 2] = [20_000, 100_000];

#[test]
fn a_thread_that_has_used_up_a_real_time_limit_waits_for_that() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Only with CONFIG_RT_GROUP_SCHED and cgroup v1. No limit is longer than its period.
    let [runtime_us, period_us] = REAL_TIME_US.map(|us| us.to_string());
    if fs::write(cgroup.0.join("cpu.rt_period_us"), period_us).is_err() {
        println!("skipped: no cgroup has a limit of real-time priority here");
        return Ok(());
    }
    fs::write(cgroup.0.join("cpu.rt_runtime_us"), runtime_us)?;
    let spinner = Spinner::start(places.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), spinner.0.id().to_string())?;
    // The kernel leaves the mark of a used-up quota at one that is given real-time priority meanwhile (6.18).
    sleep(Duration::from_millis(50));
    let is_set = Command::new("chrt").args(["-f", "-p", "1", &spinner.0.id().to_string()]).status()?.success();
    ensure!(is_set, "the spinner cannot have real-time priority");
    let options = OffcpuOptions {
        threads: Threads::of(spinner.0.id()),
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
        let told = events.iter().filter(is_of_limit).count();
        println!("{told} of {} waits are told as the limit's", events.len());
        ensure!(events.len() >= 10, "only {} waits were late", events.len());
        ensure!(told * 100 >= events.len() * 90, "{:?}", events.iter().find(|event| !is_of_limit(event)));
        Ok(())
    })
}

/// A fifth of a CPU, in periods that are short enough for a hundred waits.
const ALONE_US: [u32; 2] = [4_000, 20_000];
/// So much of its CPU is idle where nobody else uses it.
const LEFT_IDLE: f64 = 0.7;

/// How long a CPU was idle, by ticks of 10 ms (proc_stat(5)).
fn idle_s(cpu: u32) -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let times = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{cpu} "))).context("no such CPU")?;
    // User, nice, system, idle, waiting for disks.
    let ticks: f64 = times.split_whitespace().skip(3).take(2).filter_map(|word| word.parse::<f64>().ok()).sum();
    Ok(ticks / 100.0)
}

#[test]
fn nobody_innocent_is_blamed_in_a_hundred_throttled_waits() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    cgroup.limit(ALONE_US)?;
    let throttled = Spinner::start(places.disturbed)?;
    fs::write(cgroup.0.join("cgroup.procs"), throttled.0.id().to_string())?;
    let options = OffcpuOptions {
        threads: Threads::of(throttled.0.id()),
        explain_over_ns: Some(5_000_000),
        ..OffcpuOptions::default()
    };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        let mut events: Vec<LateEvent> = Vec::new();
        let (began, idle_before_s) = (Instant::now(), idle_s(places.disturbed)?);
        for _ in 0..60 {
            source.drain_late(Duration::from_millis(100), &mut |event| events.push(event))?;
            if events.len() >= 100 {
                break;
            }
            sleep(Duration::from_millis(50));
        }
        // Whoever waits for others has not used its quota up.
        let idle = (idle_s(places.disturbed)? - idle_before_s) / began.elapsed().as_secs_f64();
        if idle < LEFT_IDLE {
            return Err(
                Unjudged(format!("others have this CPU: it is idle for {:.0} % of the time", idle * 100.0)).into()
            );
        }
        ensure!(events.len() >= 100, "only {} waits were late", events.len());
        let is_of_quota = |event: &&LateEvent| {
            event.causes.first().is_some_and(|worst| worst.kind == CauseKind::Throttled && worst.who == cgroup.name())
        };
        let told = events.iter().filter(is_of_quota).count();
        println!("{told} of {} waits are told as the quota's", events.len());
        // Another thread may get that CPU once the quota is refilled, and is late itself then.
        ensure!(told * 100 >= events.len() * 95, "{:?}", events.iter().find(|event| !is_of_quota(event)));
        for event in &events {
            let idle = event.causes.iter().find(|cause| cause.kind == CauseKind::IdleExit);
            ensure!(idle.is_none_or(|cause| cause.ns < 1_000_000), "an idle state is blamed: {event:?}");
        }
        Ok(())
    })
}

#[test]
fn culprits_and_whom_they_delay_have_their_cgroups() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    let Some(cgroup) = Cgroup::make()? else {
        println!("skipped: no cgroup may have a quota of CPU time here");
        return Ok(());
    };
    // Enough for all that it can use.
    cgroup.limit([100_000, 100_000])?;
    let (inside, outside) = (Spinner::start(places.disturbed)?, Spinner::start(places.disturbed)?);
    fs::write(cgroup.0.join("cgroup.procs"), inside.0.id().to_string())?;
    let options = OffcpuOptions { explain_over_ns: Some(1_000_000), ..OffcpuOptions::default() };
    let called = |spinner: &Spinner| format!("sh:{}", spinner.0.id());
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        for (victim, own, culprit, its) in
            [(&inside, cgroup.path(), &outside, "/".to_owned()), (&outside, "/".to_owned(), &inside, cgroup.path())]
        {
            let of_victim: Vec<_> = events.iter().filter(|event| event.subject == called(victim)).collect();
            ensure!(of_victim.iter().all(|event| event.labels.get("cgroup") == Some(&own)), "in {own}: {of_victim:?}");
            let causes = of_victim.iter().flat_map(|event| &event.causes);
            let by_culprit: Vec<_> = causes.filter(|cause| cause.who == called(culprit)).collect();
            ensure!(by_culprit.len() >= 10, "{} of {} waits are its doing", by_culprit.len(), of_victim.len());
            let is_known = |path: &str| {
                by_culprit.iter().all(|cause| cause.cgroup.as_ref().is_some_and(|cgroup| cgroup.path == path))
            };
            ensure!(is_known(&its), "the culprit is in {its}: {:?}", by_culprit.first());
        }
        Ok(())
    })
}
