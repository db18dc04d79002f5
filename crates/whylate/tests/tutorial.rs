// SPDX-License-Identifier: MIT OR Apache-2.0
//! docs/tutorial.md: the command lines of each exercise, run as they are written, name the culprit that the page names.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::io::Read as _;
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::thread::{CpuSet, sched_getaffinity};

use chance::{Unjudged, in_rounds};
use lock::{hooks, lock_machine};
use running::{Running, whylate};

const PAGE: &str = include_str!("../../../docs/tutorial.md");
const EXERCISES: usize = 4;

/// An exercise of the page.
struct Exercise {
    /// Command lines of terminal A, which measures, and of terminal B, which injects.
    measure: String,
    inject: String,
    /// Command line of a program that is delayed, if the exercise starts one.
    victim: Option<String>,
}

impl Exercise {
    /// Reads an exercise, and checks that its output names the culprit.
    fn read(number: usize, culprit: &str) -> Result<Self> {
        let sections: Vec<&str> =
            PAGE.split("\n## ").filter(|section| section.starts_with(|c: char| c.is_ascii_digit())).collect();
        ensure!(sections.len() == EXERCISES, "{} exercises", sections.len());
        let section = sections[number - 1];
        let blocks: Vec<&str> = section.split("```\n").skip(1).step_by(2).collect();
        let [commands, output] = blocks[..] else {
            return Err(anyhow!("exercise {number} has {} blocks", blocks.len()));
        };
        ensure!(output.contains(culprit), "the page does not name {culprit}: {output}");
        let line = |prompt: &str| {
            let line = commands.lines().find_map(|line| line.strip_prefix(prompt));
            line.map(here).with_context(|| format!("no line begins with {prompt}: {commands}"))
        };
        let victim = section.split('`').find(|span| span.starts_with("taskset "));
        let victim = victim.map(|line| here(line.trim_end_matches(" &")));
        Ok(Exercise { measure: line("A# whylate ")?, inject: line("B# whylate ")?, victim })
    }
}

/// Changes a command line for a machine on which CPU 1 cannot be used.
fn here(line: &str) -> String {
    let usable = sched_getaffinity(None).unwrap_or_default();
    if usable.is_set(1) {
        return line.to_owned();
    }
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| usable.is_set(cpu)).unwrap_or(0);
    line.replace("--cpu 1", &format!("--cpu {cpu}")).replace("taskset -c 1 ", &format!("taskset -c {cpu} "))
}

/// Measures while the delay is injected. Returns what the measuring command prints; `None` if this kernel cannot inject it.
fn output_of(exercise: &Exercise, can_inject: bool) -> Result<Option<String>> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let started = |line: &String| Running::of(Command::new("sh").args(["-c", &format!("exec {line}")]));
    let _victim = exercise.victim.as_ref().map(started).transpose()?;
    let measure = words(&exercise.measure);
    let mut measuring = Running::start(&measure.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut stdout = measuring.stdout()?;
    let reading = thread::spawn(move || {
        let mut printed = String::new();
        stdout.read_to_string(&mut printed).map(|_| printed)
    });
    measuring.wait_until_it_measures()?;
    let inject = words(&exercise.inject);
    let injected = whylate(&inject.iter().map(String::as_str).collect::<Vec<_>>()).output()?;
    let said = String::from_utf8_lossy(&injected.stderr);
    if injected.status.code() == Some(3) && !can_inject {
        println!("skipped: {}", said.trim_end());
        return Ok(None);
    }
    ensure!(injected.status.success(), "whylate {}: {said}", exercise.inject);
    let (status, stderr) = measuring.end()?;
    ensure!(status.success(), "whylate {}: {stderr}", exercise.measure);
    Ok(Some(reading.join().map_err(|_| anyhow!("reading panics"))??))
}

/// Does an exercise until its verdict is clear: the output has the culprit.
fn ensure_named(number: usize, culprit: &str, can_inject: bool) -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let exercise = Exercise::read(number, culprit)?;
    in_rounds(|| {
        let Some(output) = output_of(&exercise, can_inject)? else { return Ok(()) };
        if number == 4 && !output.contains("late request") {
            return Err(Unjudged("this disk completes each request in time".to_owned()).into());
        }
        ensure!(output.contains(culprit), "whylate {} does not name {culprit}: {output}", exercise.measure);
        Ok(())
    })
}

#[test]
fn real_time_thread_is_named() -> Result<()> {
    ensure_named(1, "thread whylate-hog:", true)
}

#[test]
fn function_that_keeps_interrupts_off_is_named() -> Result<()> {
    ensure_named(2, "keep_interrupts_off", hooks::can_call(&["bpf_local_irq_save"]))
}

#[test]
fn busy_work_item_is_named() -> Result<()> {
    ensure_named(3, "bpf_wq_work", hooks::can_call(&["bpf_wq_init", "bpf_wq_start"]))
}

#[test]
fn writer_that_delays_reads_is_named() -> Result<()> {
    // Some disks queue requests themselves.
    ensure_named(4, "whylate-hog:", true)
}
