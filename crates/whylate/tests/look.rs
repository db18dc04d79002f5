// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` without a command, beside disturbances of known cause.

mod running;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/turn.rs"]
mod turn;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use whylate_model::CauseKind;
use whylate_model::look::Look;
use whylate_sources::AttachError;
use whylate_sources::inject::disturbance::{Kind, Plan, Policy, run};

use running::whylate;
use turn::turn_to_measure;

const MS_NS: u64 = 1_000_000;

/// One look while somebody disturbs the first CPU all the time; `None` where the kernel has no such disturbance.
fn look_beside(kind: Kind, length_ns: u64) -> Result<Option<Look>> {
    let plan = Plan { kind, length_ns, times: 20, every_ns: 5 * length_ns, cpu: Some(0) };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let disturbing = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                run(&plan, &over, &mut |_| Ok(()))?;
            }
            anyhow::Ok(())
        });
        let output = whylate(&["--json", "-d", "4s"]).output();
        over.store(true, Ordering::Relaxed);
        match disturbing.join().expect("disturbing does not panic") {
            Err(error) if matches!(error.downcast_ref(), Some(AttachError::Unsupported(_))) => {
                println!("skipped: {error:#}");
                return Ok(None);
            }
            outcome => outcome?,
        }
        let output = output?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(0), "{stderr}");
        Ok(Some(serde_json::from_slice(&output.stdout).context("it printed no look")?))
    })
}

/// The disturbance is the first culprit, and is told once however many sources have seen it.
fn ensure_blamed(look: &Look, kind: CauseKind, who: &str) -> Result<()> {
    let order: Vec<_> = look.sources.iter().map(|source| (&source.source, source.is_late, source.late)).collect();
    println!("{order:?}, not measured: {:?}", look.unmeasured);
    let is_it = |culprit: &&whylate_model::look::Culprit| culprit.kind == kind && culprit.who.starts_with(who);
    let mut found = look.culprits.iter().filter(is_it).peekable();
    let first = look.culprits.first().context("nobody is blamed")?;
    ensure!(found.peek() == Some(&first), "the first culprit is {first:?}, then {:?}", look.culprits.get(1));
    // Threads of one name differ by their ids.
    let names: std::collections::BTreeSet<&str> = found.map(|culprit| culprit.who.as_str()).collect();
    let all = look.culprits.iter().filter(is_it).count();
    ensure!(names.len() == all, "one is told twice: {:?}", look.culprits);
    let timerlat = look.sources.iter().find(|source| source.source == "timerlat").context("no timerlat")?;
    ensure!(timerlat.is_late && timerlat.late > 0, "{timerlat:?}");
    let told: u64 = look.culprits.iter().map(|culprit| culprit.total_ns).sum();
    let late: u64 = look.sources.iter().map(|source| source.late_ns).sum();
    ensure!(told == late, "{told} ns are blamed on somebody, and {late} ns were late");
    Ok(())
}

#[test]
fn a_hog_is_the_first_culprit() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let look = look_beside(Kind::Hog(Policy::Fifo(98)), 20 * MS_NS)?.context("every kernel has threads")?;
    ensure_blamed(&look, CauseKind::Thread, "whylate-hog:")
}

#[test]
fn interrupts_off_are_one_culprit_of_several_sources() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let Some(look) = look_beside(Kind::IrqsOff, 20 * MS_NS)? else { return Ok(()) };
    ensure_blamed(&look, CauseKind::IrqsOff, "whylate-irqsoff:")?;
    let sources: Vec<&str> = look.culprits[0].victims.iter().map(|victims| victims.source.as_str()).collect();
    ensure!(sources.contains(&"timerlat") && sources.contains(&"irqsoff"), "{sources:?}");
    Ok(())
}

/// How long all CPUs were idle, and how long the host had them, in seconds (proc_stat(5)).
fn idle_and_stolen_s() -> Result<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let field =
        |number| line.split_whitespace().nth(number).context("no such time")?.parse::<f64>().context("no number");
    Ok((field(4)? / 100.0, field(8)? / 100.0))
}

/// Nothing is made, so nothing may be found, unless somebody else uses the machine or the host stops it: then one look of three has to be calm.
#[test]
fn on_an_idle_machine_everything_is_normal_and_nobody_is_blamed() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    if std::env::var_os("WHYLATE_EMULATED").is_some() {
        println!("skipped: emulated CPUs are late all the time");
        return Ok(());
    }
    let cpus = thread::available_parallelism()?.get() as f64;
    let mut was_idle = false;
    for _ in 0..3 {
        let (before, began) = (idle_and_stolen_s()?, std::time::Instant::now());
        let output = whylate(&["--json", "-d", "60s"]).output()?;
        ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let look: Look = serde_json::from_slice(&output.stdout)?;
        let (all_s, now) = (cpus * began.elapsed().as_secs_f64(), idle_and_stolen_s()?);
        let (idle, stolen) = ((now.0 - before.0) / all_s, (now.1 - before.1) / all_s);
        let late: Vec<&str> = look.sources.iter().filter(|of| of.is_late).map(|of| of.source.as_str()).collect();
        println!(
            "idle for {:.1} % of the time, stolen {stolen:.5}; late: {late:?}, {:?}, worst {:?}",
            idle * 100.0,
            look.culprits,
            look.worst
        );
        if late.is_empty() && look.culprits.is_empty() && look.worst.is_empty() {
            return Ok(());
        }
        // Once a second for a tick of the kernel's count is nothing.
        was_idle |= idle >= 0.9 && stolen < 0.001;
    }
    ensure!(!was_idle, "something was late on an idle machine");
    println!("skipped: others use this machine's CPUs all the time");
    Ok(())
}

/// What a look counts is of the time that it tells, whatever attaching takes: measured threads wake up once in a period. One look of three has
/// to have them, as a CPU that others keep busy misses periods.
#[test]
fn measured_threads_are_counted_from_the_beginning_to_the_end() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let cpus = whylate_sources::cpus::online()?.len() as f64;
    let mut shares = Vec::new();
    while shares.len() < 3 {
        let output = whylate(&["--json", "-d", "2s"]).output()?;
        ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let look: Look = serde_json::from_slice(&output.stdout)?;
        let timerlat = look.sources.iter().find(|source| source.source == "timerlat").context("no timerlat")?;
        let chosen = look.weaker.iter().find(|weaker| weaker.source == "timerlat" && weaker.reason.contains(" every "));
        let period_ms =
            chosen.and_then(|chosen| chosen.reason.split_once(" every ")?.1.split_once(" ms")?.0.parse().ok());
        let due = cpus * look.duration_ns as f64 / (period_ms.unwrap_or(1) * MS_NS) as f64;
        let share = timerlat.count as f64 / due;
        println!("{} of {due:.0} activations", timerlat.count);
        if (0.9..1.1).contains(&share) {
            return Ok(());
        }
        shares.push(share);
    }
    anyhow::bail!("of the activations in a look so many are counted: {shares:?}")
}

#[test]
fn a_screen_names_each_source_once() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let output = whylate(&["-d", "1s"]).output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(output.stderr.is_empty(), "progress is for terminals: {}", String::from_utf8_lossy(&output.stderr));
    for source in ["wq", "timerlat", "irqsoff", "offcpu"] {
        let lines = text.lines().filter(|line| line.split_whitespace().next() == Some(source));
        let of_table = lines.filter(|line| line.contains("normal") || line.contains("LATE")).count();
        ensure!(of_table == 1, "{source} stands in the table {of_table} times: {text}");
    }
    Ok(())
}
