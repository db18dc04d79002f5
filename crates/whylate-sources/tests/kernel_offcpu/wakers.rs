// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares wakers with known ones.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use whylate_model::{Snapshot, Stack, WokenBy};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::lost;
use crate::sleepers::Sleepers;
use crate::sleepers::wakers::Waited;
use crate::support::is_emulated;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::in_rounds;

/// Returns the share of a thread's blocked time with a hidden wakeup. A virtual machine's kernel may hide a few.
fn unseen_share(shares: &BTreeMap<String, f64>) -> Result<f64> {
    let unseen = shares.get("[waker not seen]").copied().unwrap_or(0.0);
    ensure!(unseen < 0.03, "{shares:?}");
    Ok(unseen)
}

/// Returns the shares of a thread's blocked time by waker: a known frame of the waker's stack, or else the waker's
/// name. Run-queue waits have no waker.
fn by_waker(snapshot: &Snapshot, thread: &str, functions: &[&str]) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    let mut whole = 0.0;
    for stack in snapshot.stacks.iter().filter(|stack| stack.labels["thread"] == thread) {
        let Some(waker) = &stack.waker else { continue };
        let function = functions.iter().find(|function| waker.user.iter().any(|frame| frame.contains(**function)));
        let name = function.map_or_else(|| waker.name().to_owned(), |function| (*function).to_owned());
        *sums.entry(name).or_default() += stack.weight_ns as f64;
        whole += stack.weight_ns as f64;
    }
    sums.values_mut().for_each(|sum| *sum /= whole);
    sums
}

fn is_by(stack: &Stack, by: WokenBy) -> bool {
    stack.waker.as_ref().is_some_and(|waker| waker.by == by)
}

const WAKING: [&str; 2] = ["wake_after_long", "wake_soon"];

#[test]
fn blocked_wait_has_wakers_stack() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let sleepers = Sleepers::start_with("woken", 1, Some(tempfile::NamedTempFile::new()?))?;
    let file = sleepers.file().context("there is no file")?;
    let options =
        OffcpuOptions { threads: Threads::of_process(sleepers.pid()), wakers: true, ..OffcpuOptions::default() };
    in_rounds(|| {
        let mut source = options.attach(&Session::of_one())?;
        ensure!(source.backend == "trace", "{} has no wakers", source.backend);
        source.snapshot()?;
        let before = Waited::read(file)?;
        sleep(Duration::from_secs(4));
        let (snapshot, after) = (source.snapshot()?, Waited::read(file)?);
        // A wakeup at which the kernel runs no BPF program has an unseen waker.
        let unseen = snapshot.lost["unseen_wakers"];
        let waits: u64 = snapshot.stacks.iter().filter(|stack| stack.waker.is_some()).map(|stack| stack.waits).sum();
        ensure!(lost(&snapshot) == unseen && unseen * 100 <= waits, "of {waits} waits lost: {:?}", snapshot.lost);
        let reported_unseen: u64 =
            snapshot.stacks.iter().filter(|stack| is_by(stack, WokenBy::Unseen)).map(|stack| stack.waits).sum();
        ensure!(reported_unseen == unseen, "{reported_unseen} waits have no waker, and {unseen} are counted");
        let [for_long, shortly] = [after.for_long - before.for_long, after.shortly - before.shortly];
        let truth = for_long as f64 / (for_long + shortly) as f64;
        // The thread's own clock includes run-queue waits, which take milliseconds on an emulator.
        let most_off = if is_emulated() { 0.1 } else { 0.01 };
        for (thread, wait, wakes) in
            [("at the pipe", "pipe_read", "pipe_write"), ("at the lock", "futex_wait", "futex_wake")]
        {
            let shares = by_waker(&snapshot, thread, &WAKING);
            let shares_by_function = WAKING.map(|function| shares.get(function).copied().unwrap_or(0.0));
            println!("{thread}: {shares:?}; by its own clock the thread at the pipe has {truth} of the first");
            ensure!(
                truth > 0.5 && (shares_by_function[0] - truth).abs() < most_off,
                "{thread}: {shares:?}, and {truth} is true"
            );
            // The rest is the start of a wait that goes on at the end, and wakeups that the kernel hides.
            let unseen = unseen_share(&shares)?;
            ensure!(shares_by_function[0] + shares_by_function[1] + unseen > 0.99, "{thread}: {shares:?}");
            for stack in snapshot.stacks.iter().filter(|stack| stack.labels["thread"] == thread) {
                let Some(waker) = stack.waker.as_ref().filter(|waker| waker.by == WokenBy::Thread) else { continue };
                ensure!(waker.labels["thread"] == "the waker", "{waker:?}");
                ensure!(waker.labels["pid"] == sleepers.pid().to_string(), "{waker:?}");
                let has = |frames: &[String], function: &str| frames.iter().any(|frame| frame.contains(function));
                // Taking the mutex of the condition variable may block too, while the waker holds it.
                let by_lock = thread == "at the lock" && !has(&stack.user, "wait_while");
                ensure!(by_lock || (has(&stack.kernel, wait) && has(&waker.kernel, wakes)), "{stack:?}");
                ensure!(
                    !waker.kernel.iter().any(|frame| frame.contains("bpf_") || frame.contains("trace")),
                    "{waker:?}"
                );
                ensure!(waker.kernel[0].starts_with("try_to_wake_up"), "{:?}", waker.kernel);
            }
        }
        for thread in ["at the timer", "the waker"] {
            let shares = by_waker(&snapshot, thread, &WAKING);
            println!("{thread}: {shares:?}");
            // With PREEMPT_RT, kernel threads run timers (ktimers/CPU).
            let is_timer = |name: &str| name == "[interrupt]" || name.starts_with("ktimers/");
            let by_timer: f64 = shares.iter().filter(|(name, _)| is_timer(name)).map(|(_, share)| share).sum();
            let rest = shares.get("[not woken yet]").copied().unwrap_or(0.0);
            // A thread that loses the race for its mutex is woken by the other thread.
            let unseen = unseen_share(&shares)?;
            let others = 1.0 - by_timer - rest - unseen;
            ensure!(by_timer + unseen > 0.98 && others < 0.01, "{thread}: {shares:?}");
        }
        Ok(())
    })
}
