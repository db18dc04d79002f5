// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks `wq`, `offcpu` and `sqpoll` by work items, sleeping threads and a submission thread with known figures.

use std::io;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use rustix::io::Errno;
use whylate_model::CauseKind;
use whylate_model::selftest::{Check, Unit};
use whylate_model::sources::{OFFCPU, SQPOLL, WQ};
use whylate_model::sqpoll::is_thread;
use whylate_sources::inject::sqpoll::{Load, Plan as LoadPlan};
use whylate_sources::inject::work::{self, HANDLER, Plan as WorkPlan};
use whylate_sources::offcpu::{DEFAULT_HZ, OffcpuOptions};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::wq::{By, WqOptions};
use whylate_sources::{AttachError, Attached as _, Session, Source as _, Threads};

use super::Setup;
use super::sleepers::{NAPS, SLEEPERS, Sleepers, WAITS};

pub(super) const WORK: &str = "50 work items";
pub(super) const SLEEP: &str = "sleeping threads";
pub(super) const DUTY: &str = "an SQ thread at 37%";
const ITEMS: u64 = 50;
const BUSY_NS: u64 = 1_000_000;
const LATE_FROM_NS: u64 = 2_000_000;
const DUTY_SHARE: f64 = 0.37;
/// Tolerance of the share of work.
const OFF: f64 = 0.02;
const WINDOW: Duration = Duration::from_secs(1);
/// Delay until all threads sleep at their call sites.
const SETTLE: Duration = Duration::from_millis(300);

/// Checks `wq`: items queued together run one after another, and each waits for those before it.
pub(super) fn work(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    let options =
        WqOptions { by: By::Handler, phases: true, explain_over_ns: Some(LATE_FROM_NS), ..WqOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
    let plan = WorkPlan {
        items: ITEMS,
        at_once: ITEMS,
        delay: Duration::ZERO,
        busy_ns: BUSY_NS,
        cpu: Some(setup.cpu),
        load: false,
    };
    let report = work::run(&plan, setup.stop)?;
    let mut events = Vec::new();
    source.drain_late(Duration::from_millis(100), &mut |event| events.push(event))?;
    let snapshot = source.snapshot()?;
    let backend = source.backend;
    let apart_ns = setup.apart_ns as f64;
    let is_ours = |labels: &whylate_model::Labels| labels.get("handler").is_some_and(|handler| handler == HANDLER);
    let histogram = |name: &str| {
        let ours = snapshot.series.iter().filter(|series| is_ours(&series.labels));
        let mut all = whylate_model::Histogram::default();
        ours.filter_map(|series| series.histograms.get(name)).for_each(|of| all.merge(of));
        all
    };
    events.retain(|event| is_ours(&event.labels));
    let is_true = |cause: &whylate_model::Cause| cause.kind == CauseKind::Work && cause.who == HANDLER;
    let right = events.iter().filter(|event| event.causes.first().is_some_and(is_true)).count();
    let busy_ns = report.busy_total_ns as f64 / report.executed.max(1) as f64;
    let mean_wait_ns = report.wait_total_ns as f64 / report.executed.max(1) as f64;
    Ok(vec![
        Check::new(WQ.name, backend, WORK, "items counted").compare(
            Unit::Count,
            report.executed as f64,
            histogram("latency").count() as f64,
            0.0,
        ),
        Check::new(WQ.name, backend, WORK, "mean run time").compare(
            Unit::Ns,
            busy_ns,
            histogram("runtime").mean_ns() as f64,
            apart_ns / 10.0 + busy_ns / 20.0,
        ),
        Check::new(WQ.name, backend, WORK, "mean latency")
            .compare(Unit::Ns, mean_wait_ns, histogram("latency").mean_ns() as f64, apart_ns + mean_wait_ns / 20.0)
            .blames(HANDLER, right as u64, (events.len() as u64).max(ITEMS - LATE_FROM_NS / BUSY_NS)),
    ])
}

/// Checks `offcpu`: the weight of the sleepers' stacks is the time that they slept.
pub(super) fn sleep(_setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    let sleepers = Sleepers::start()?;
    let options = OffcpuOptions { threads: Threads::of_process(sleepers.pid()), ..OffcpuOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
    thread::sleep(SETTLE);
    source.snapshot()?;
    thread::sleep(WINDOW);
    let snapshot = source.snapshot()?;
    drop(sleepers);
    let backend = source.backend;
    // Sampling is accurate to one period.
    let tolerance_ns = 1e9 / f64::from(DEFAULT_HZ);
    let check = |thread: &str, system_call: &str, threads: u64, figure: &str| {
        let of_thread =
            snapshot.stacks.iter().filter(|stack| stack.labels.get("thread").is_some_and(|name| name == thread));
        let (mut weight_ns, mut samples, mut right) = (0, 0, 0);
        for stack in of_thread {
            weight_ns += stack.weight_ns;
            samples += stack.samples;
            let is_there = stack.labels.get("syscall").is_some_and(|name| name == system_call);
            right += if is_there { stack.samples } else { 0 };
        }
        let expected = (threads * snapshot.duration_ns) as f64;
        Check::new(OFFCPU.name, backend, SLEEP, figure)
            .compare(Unit::Ns, expected, weight_ns as f64, threads as f64 * tolerance_ns)
            .blames(system_call, right, samples)
    };
    Ok(vec![
        check(NAPS, "clock_nanosleep", SLEEPERS, "time asleep"),
        check(WAITS, "futex", 1, "time waiting for a lock"),
    ])
}

/// Checks `sqpoll`: the share of work is the time with outstanding requests.
pub(super) fn duty(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    if setup.other == setup.cpu {
        return Err(AttachError::Unsupported("this needs two CPUs".to_owned()));
    }
    if setup.is_emulated {
        let reason =
            "an emulated CPU stops at any time, and requests stay outstanding in that time without being processed";
        return Err(AttachError::Unsupported(reason.to_owned()));
    }
    let mut source = SqpollOptions { threads: Threads::of_process(std::process::id()), ..SqpollOptions::default() }
        .start(&Session::of_one())?;
    let plan = LoadPlan {
        duty: DUTY_SHARE,
        sq_cpu: Some(setup.cpu),
        app_cpu: Some(setup.other),
        urgent: true,
        idle_ms: 10,
        ..LoadPlan::default()
    };
    let load = Load::start(&plan).map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSYS | Errno::PERM | Errno::INVAL | Errno::ACCESS) => {
            AttachError::Unsupported(format!("the kernel gives no submission thread: {error}"))
        }
        _ => anyhow!(error).context("cannot load a submission thread").into(),
    })?;
    thread::sleep(SETTLE);
    source.snapshot()?;
    let before = load.done().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => AttachError::Unsupported(error.to_string()),
        _ => anyhow!(error).context("the load failed").into(),
    })?;
    thread::sleep(2 * WINDOW);
    let snapshot = source.snapshot()?;
    let done = load.done().context("the load failed")?.since(&before);
    let tid = load.tid().to_string();
    let is_it = |series: &&whylate_model::Series| is_thread(series) && series.labels.get("tid") == Some(&tid);
    let series = snapshot.series.iter().find(is_it).ok_or_else(|| anyhow!("the submission thread was not seen"))?;
    let working = match series.values.get("working") {
        Some(&working) => working,
        // The fields of fdinfo depend on the kernel.
        None if source.backend == "fdinfo" => {
            let reason = "without BPF, this kernel does not distinguish work from spinning";
            return Err(AttachError::Unsupported(reason.to_owned()));
        }
        None => 0.0,
    };
    let share = |ns: u64| ns as f64 / done.at_ns.max(1) as f64;
    // If other threads ran on the load's CPU for long, the result is uncertain; the check is repeated.
    let tolerance = OFF + share(done.uncertain_ns).min(OFF);
    let check = Check::new(SQPOLL.name, source.backend, DUTY, "share of work");
    Ok(vec![check.compare(Unit::Share, share(done.busy_ns), working, tolerance)])
}
