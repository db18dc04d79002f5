// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that is migrated during its run-queue wait, in a process other than the observer's (this program again).

use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::ops::RangeInclusive;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use whylate_model::blame::Evidence;
use whylate_model::{Cause, CauseKind, LateEvent};
use whylate_sources::kernel::clock::monotonic_ns;
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::support::is_emulated;
use crate::support::machine::cpus::{TestCpus, pin_to};
use crate::support::machine::lock::lock_machine;
use crate::support::machine::real_time::become_fifo_on;
use crate::support::oracles::chance::in_rounds;

/// Environment: the CPU to which the thread is migrated, and the one from which.
const TO: &str = "WHYLATE_MOVED_TO";
const FROM: &str = "WHYLATE_MOVED_FROM";
/// Environment: the thread is migrated back to the first CPU.
const BACK: &str = "WHYLATE_MOVED_BACK";
const THREAD: &str = "test-moved";
const ROUNDS: usize = 40;
/// How long the thread waits in each run queue.
const EACH: Duration = Duration::from_millis(5);
/// How long a thread that is migrated twice waits in each of its three run queues.
const EACH_OF_THREE: Duration = Duration::from_millis(3);
const LATE_NS: u64 = 4_000_000;
/// Maximum time from a wakeup until the thread is in the other CPU's run queue, and from a switch-in until it reads a
/// clock.
const SLACK_NS: u64 = 200_000;

/// One wait as its process knows it: the clock before and after the wakeup, before and after the migrations, and when
/// the thread ran.
#[derive(Debug)]
struct Truth {
    woken: RangeInclusive<u64>,
    moved: RangeInclusive<u64>,
    moved_back: Option<RangeInclusive<u64>>,
    ran_ns: RangeInclusive<u64>,
}

impl Truth {
    fn parse(line: &str) -> Option<Self> {
        // The first line starts with the name of the test.
        let times: Vec<u64> = line.split_once("moved: ")?.1.split(' ').map_while(|time| time.parse().ok()).collect();
        let (&[woken, woken_by, moved, moved_by, over, ran], rest) = times.split_first_chunk()?;
        let moved_back = match *rest {
            [] => None,
            [back, back_by] => Some(back..=back_by),
            _ => return None,
        };
        Some(Truth { woken: woken..=woken_by, moved: moved..=moved_by, moved_back, ran_ns: over..=ran })
    }

    /// Returns whether the event is this wait: the thread has only one in that time.
    fn is_of(&self, event: &LateEvent) -> bool {
        let Some(Evidence::Runnable(seen)) = event.evidence.as_deref() else { return false };
        (*self.woken.start()..=*self.ran_ns.end()).contains(&seen.running_ns)
    }
}

fn is_within(time_ns: u64, range: &RangeInclusive<u64>, slack_ns: u64) -> bool {
    (range.start().saturating_sub(slack_ns)..=range.end() + slack_ns).contains(&time_ns)
}

fn ensure_reported(truth: &Truth, events: &[LateEvent], test_cpus: TestCpus) -> Result<()> {
    let reported: Vec<&LateEvent> = events.iter().filter(|event| truth.is_of(event)).collect();
    let [event] = reported.as_slice() else { bail!("reported {} times", reported.len()) };
    let Some(Evidence::Runnable(seen)) = event.evidence.as_deref() else { bail!("it has no evidence") };
    let last = seen.moved.context("its migration is not reported")?;
    let (moved_ns, from) = seen.first_moved.unwrap_or(last);
    ensure!(is_within(seen.runnable_ns, &truth.woken, SLACK_NS), "it was woken at {}", seen.runnable_ns);
    ensure!(is_within(moved_ns, &truth.moved, 0) && from == test_cpus.disturbed, "moved at {moved_ns} from CPU {from}");
    let moved_back_ns = match &truth.moved_back {
        Some(back) => {
            let (back_ns, from) = last;
            ensure!(is_within(back_ns, back, 0) && from == test_cpus.tool, "moved back at {back_ns} from CPU {from}");
            ensure!(!seen.has_unknown_moves, "it was moved more than twice");
            Some(back_ns)
        }
        None => None,
    };
    let ran_on = if moved_back_ns.is_some() { test_cpus.disturbed } else { test_cpus.tool };
    ensure!(is_within(seen.running_ns, &truth.ran_ns, SLACK_NS) && event.cpu == ran_on, "ran on {}", event.cpu);
    let woken_by = event.labels.get("woken_by").map_or("", String::as_str);
    ensure!(woken_by.starts_with("test-mover:"), "it was woken by {woken_by}");
    ensure!(event.latency_ns == seen.running_ns - seen.runnable_ns, "it waited for {} ns", event.latency_ns);
    let sum: u64 = event.causes.iter().map(|cause| cause.ns).sum();
    ensure!(sum == event.latency_ns, "the causes add up to {sum}");
    let by = |name: &str| -> u64 {
        let of_name = |cause: &&Cause| cause.kind == CauseKind::Thread && cause.who.to_string().starts_with(name);
        event.causes.iter().filter(of_name).map(|cause| cause.ns).sum()
    };
    // The hog and the mover have their CPUs until then; later other threads may run too.
    let over_ns = *truth.ran_ns.start();
    let queued_ns = moved_ns - seen.runnable_ns + moved_back_ns.map_or(0, |back_ns| over_ns - back_ns);
    ensure!(by("test-hog:") * 10 >= queued_ns * 9, "the hog is blamed for {} ns", by("test-hog:"));
    let mover_ns = by("test-mover:");
    let spun_ns = moved_back_ns.unwrap_or(over_ns) - moved_ns;
    ensure!(mover_ns * 10 >= spun_ns * 9, "its mover is blamed for {mover_ns} ns");
    Ok(())
}

#[test]
fn migrated_thread_waits_since_its_wakeup() -> Result<()> {
    each_run_queue_is_known(false)
}

#[test]
fn thread_that_is_migrated_twice_waited_in_three_run_queues() -> Result<()> {
    each_run_queue_is_known(true)
}

fn each_run_queue_is_known(and_back: bool) -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    let options = OffcpuOptions {
        backend: Some("sample".to_owned()),
        threads: Threads { name: Some(THREAD.to_owned()), ..Threads::default() },
        explain_over_ns: Some(LATE_NS),
        keep_evidence: true,
        ..OffcpuOptions::default()
    };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        let output = Command::new(std::env::current_exe()?)
            .args(["--exact", "migrated::moved_process", "--nocapture", "--test-threads=1"])
            .env(TO, test_cpus.tool.to_string())
            .env(FROM, test_cpus.disturbed.to_string())
            .envs(and_back.then_some((BACK, "")))
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "the process failed");
        let mut events = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let truths: Vec<Truth> = String::from_utf8(output.stdout)?.lines().filter_map(Truth::parse).collect();
        ensure!(truths.len() == ROUNDS, "it was moved {} times", truths.len());
        let mut wrong = Vec::new();
        for truth in &truths {
            if let Err(error) = ensure_reported(truth, &events, test_cpus) {
                println!("wrong: {error:#}: {truth:?}");
                wrong.push(error);
            }
        }
        let lost = source.snapshot()?.lost;
        println!("{ROUNDS} moved, {} late, {} reported wrongly, lost {lost:?}", events.len(), wrong.len());
        // An emulated CPU may stop between a clock reading and the event.
        let tolerated = if is_emulated() { ROUNDS / 2 } else { ROUNDS / 20 };
        ensure!(wrong.len() <= tolerated, "{} of {ROUNDS} are reported wrongly", wrong.len());
        Ok(())
    })
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn moved_process() -> Result<()> {
    let (Ok(to), Ok(from)) = (std::env::var(TO), std::env::var(FROM)) else { return Ok(()) };
    let (to, from) = (to.parse()?, from.parse()?);
    let (reader, writer) = std::io::pipe()?;
    let shared = &Shared::default();
    thread::scope(|scope| {
        let _ended = Ended(shared);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named(THREAD).spawn_scoped(scope, move || wait_to_be_moved(from, reader, shared))?;
        named("test-hog").spawn_scoped(scope, move || keep_busy(from, shared))?;
        let back = std::env::var_os(BACK).map(|_| from);
        let moves = named("test-mover").spawn_scoped(scope, move || move_it(to, back, writer, shared))?;
        moves.join().expect("moving does not panic")
    })
}

#[derive(Default)]
struct Shared {
    /// TID of the migrated thread.
    tid: AtomicU32,
    /// How often the thread ran for a byte, and when that was.
    ran: AtomicU64,
    ran_ns: AtomicU64,
    /// Whether the first CPU has to be kept busy, and whether it is.
    wanted: AtomicBool,
    is_busy: AtomicBool,
    over: AtomicBool,
}

/// Reads the clock on each wakeup, and returns to the first CPU by itself.
fn wait_to_be_moved(from: u32, mut reader: PipeReader, shared: &Shared) {
    pin_to(from).expect("a thread may be pinned");
    shared.tid.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Release);
    let mut byte = [0];
    while reader.read(&mut byte).is_ok_and(|read| read == 1) {
        shared.ran_ns.store(monotonic_ns(), Ordering::Release);
        pin_to(from).expect("a thread may be pinned");
        shared.ran.fetch_add(1, Ordering::Release);
    }
}

/// Occupies the first CPU at real-time priority while `wanted` is set.
fn keep_busy(cpu: u32, shared: &Shared) {
    become_fifo_on(cpu, 50).expect("root may have real-time threads");
    while !shared.over.load(Ordering::Acquire) {
        while shared.wanted.load(Ordering::Acquire) {
            shared.is_busy.store(true, Ordering::Release);
            std::hint::spin_loop();
        }
        shared.is_busy.store(false, Ordering::Release);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Ends the hog, also after a failure.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.wanted.store(false, Ordering::Release);
        self.0.over.store(true, Ordering::Release);
    }
}

/// Polls until `is_so` holds. Fails after 20 s, far longer than it takes anywhere.
fn wait_until(mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_so()? {
        ensure!(began.elapsed() < Duration::from_secs(20), "one of the threads does not go on");
        thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

fn spin_until(time_ns: u64) {
    while monotonic_ns() < time_ns {
        std::hint::spin_loop();
    }
}

/// Wakes the thread on the first CPU and migrates it to the second, while each is occupied in turn, and then `back`.
fn move_it(to: u32, back: Option<u32>, mut writer: PipeWriter, shared: &Shared) -> Result<()> {
    become_fifo_on(to, 50)?;
    let only = |cpu: u32| {
        let mut set = CpuSet::new();
        set.set(cpu as usize);
        set
    };
    let each = if back.is_some() { EACH_OF_THREE } else { EACH };
    let each_ns = each.as_nanos() as u64;
    for time in 0..ROUNDS as u64 {
        wait_until(|| Ok(shared.ran.load(Ordering::Acquire) == time && shared.tid.load(Ordering::Acquire) > 0))?;
        let tid = shared.tid.load(Ordering::Acquire);
        let status = format!("/proc/self/task/{tid}/status");
        wait_until(|| Ok(std::fs::read_to_string(&status)?.contains("State:\tS")))?;
        let tid = Pid::from_raw(tid as i32);
        shared.wanted.store(true, Ordering::Release);
        wait_until(|| Ok(shared.is_busy.load(Ordering::Acquire)))?;
        let woken = monotonic_ns();
        writer.write_all(&[0])?;
        let woken_by = monotonic_ns();
        spin_until(woken + each_ns);
        let moved = monotonic_ns();
        sched_setaffinity(tid, &only(to))?;
        let moved_by = monotonic_ns();
        // The first CPU stays busy for a thread that comes back.
        shared.wanted.store(back.is_some(), Ordering::Release);
        spin_until(moved + each_ns);
        let mut times_back = String::new();
        if let Some(back) = back {
            let moved = monotonic_ns();
            sched_setaffinity(tid, &only(back))?;
            times_back = format!(" {moved} {}", monotonic_ns());
            spin_until(moved + each_ns);
        }
        let over = monotonic_ns();
        shared.wanted.store(false, Ordering::Release);
        wait_until(|| Ok(shared.ran.load(Ordering::Acquire) > time))?;
        let ran = shared.ran_ns.load(Ordering::Acquire);
        println!("moved: {woken} {woken_by} {moved} {moved_by} {over} {ran}{times_back}");
    }
    Ok(())
}
