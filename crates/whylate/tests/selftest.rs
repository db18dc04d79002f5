// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate selftest` on this machine.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use whylate_model::selftest::{Check, Selftest, Verdict};
use whylate_sources::AttachError;
use whylate_sources::inject::disturbance::{Kind, Plan, Policy, run};

use chance::in_rounds;
use lock::lock_machine;
use running::{Running, whylate};

#[test]
fn every_attachable_source_passes() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // Steal disturbs the injected delays, too.
    in_rounds(ensure_passes)
}

fn ensure_passes() -> Result<()> {
    // Other programs may have real-time threads.
    let output = whylate(&["selftest", "--json", "--force"]).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let result: Selftest = serde_json::from_slice(&output.stdout).with_context(|| format!("no result: {stderr}"))?;
    for check in &result.checks {
        println!("{check:?}");
        match check.verdict {
            Verdict::Skip => println!("skipped: {}: {}", check.source, check.reason),
            Verdict::Pass | Verdict::Fail => {}
        }
    }
    let failed: Vec<&Check> = result.checks.iter().filter(|check| check.verdict == Verdict::Fail).collect();
    ensure!(failed.is_empty() && output.status.code() == Some(0), "{failed:#?}: {:?}", output.status);
    ensure!(result.passed >= 5, "only {} were tried", result.passed);
    ensure!(stderr.contains("about 20 s"), "it does not say what it will do: {stderr}");
    Ok(())
}

/// Runs the selftest while a thread occupies the first CPU for `length_ns`, fifty times a second.
fn beside_a_hog(policy: Policy, length_ns: u64, arguments: &[&str]) -> Result<Output> {
    let over = AtomicBool::new(false);
    let plan = Plan { kind: Kind::Hog(policy), length_ns, times: 1_000, every_ns: 20_000_000, cpu: Some(0) };
    thread::scope(|scope| {
        let hog = scope.spawn(|| run(&plan, &over, &mut |_| Ok(())));
        // Until the thread runs.
        thread::sleep(Duration::from_millis(500));
        let output = whylate(arguments).output();
        over.store(true, Ordering::Relaxed);
        hog.join().expect("a hog does not panic").map_err(|error: AttachError| anyhow::anyhow!(error))?;
        Ok(output?)
    })
}

#[test]
fn leaves_running_real_time_threads_alone() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let output = beside_a_hog(Policy::Fifo(1), 2_000_000, &["selftest"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(3), "{said}");
    ensure!(said.lines().count() == 1 && said.contains("whylate-hog:") && said.contains("--force"), "{said}");
    Ok(())
}

#[test]
fn refuses_to_run_during_an_injection() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let output = beside_a_hog(Policy::Normal, 1_000_000, &["selftest", "--force"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{said}");
    ensure!(said.lines().count() == 1 && said.contains("disturbs a CPU already"), "{said}");
    Ok(())
}

#[test]
fn signal_ends_it() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut running = Running::start(&["selftest", "--force"])?;
    thread::sleep(Duration::from_secs(2));
    running.signal(Signal::INT)?;
    let (status, said) = running.end()?;
    ensure!(status.code() == Some(130) && said.contains("interrupted"), "{status}: {said}");
    Ok(())
}
