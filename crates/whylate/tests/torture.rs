// SPDX-License-Identifier: MIT OR Apache-2.0
//! Robustness: whylate is killed, starved, given failing outputs and hostile input, and leaves nothing behind. This is
//! a part; `make torture` runs all and prints a table of all exercises.

#[path = "torture/beside.rs"]
mod beside;
#[path = "torture/chance.rs"]
mod chance;
#[path = "torture/exercise.rs"]
mod exercise;
#[path = "torture/hostile.rs"]
mod hostile;
#[path = "torture/left.rs"]
mod left;
#[path = "torture/limits.rs"]
mod limits;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "torture/neighbors.rs"]
mod neighbors;
#[path = "torture/outputs.rs"]
mod outputs;
mod running;

use std::time::Duration;

use anyhow::Result;

use chance::Chance;
use exercise::{Exercise, is_whole, part};
use lock::lock_machine;

/// Each source with each backend available here, and all of them, for a short time.
const COMMANDS: [&[&str]; 9] = [
    &["-d", "1s"],
    &["wq", "--why", "1ms", "-d", "1s"],
    &["timerlat", "hist", "-d", "1s"],
    &["irqsoff", "-d", "1s"],
    &["offcpu", "--why", "1ms", "-d", "1s"],
    &["offcpu", "--backend", "trace", "-d", "1s"],
    &["offcpu", "--backend", "proc", "-d", "1s"],
    &["sqpoll", "-d", "1s"],
    &["block", "--why", "1ms", "-d", "1s"],
];
/// Commands that change settings of the machine while they measure.
const SETTING: &[&str] = &["timerlat", "hist", "--deepest-idle-state", "-1", "-d", "1s"];

/// The next run restores what a killed run, or one out of memory, left changed.
fn put_back(exercise: &mut Exercise) -> Result<()> {
    exercise.run(&["wq", "-d", "100ms"], " after them")
}

#[test]
fn leaves_nothing_behind_when_killed_at_any_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Exercise::skipped("kill -9", "no source measures here") };
    let mut exercise = Exercise::begin("kill -9")?;
    let mut chance = Chance(1);
    let all: Vec<&[&str]> = COMMANDS.into_iter().chain([SETTING]).collect();
    for round in 0..if is_whole() { 200 } else { all.len() } {
        let mut child = exercise.start(all[round % all.len()])?;
        std::thread::sleep(Duration::from_millis(chance.below(1_000)));
        child.kill()?;
        child.wait()?;
    }
    put_back(&mut exercise)?;
    exercise.end()
}

#[test]
fn two_instances_do_not_interfere() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Exercise::skipped("two copies", "no source measures here") };
    let mut exercise = Exercise::begin("two copies")?;
    let mut pairs: Vec<(&[&str], &[&str])> = COMMANDS.iter().map(|&one| (one, one)).collect();
    pairs.insert(1, (COMMANDS[1], COMMANDS[4]));
    let next = COMMANDS.iter().cycle().skip(1);
    pairs.extend(COMMANDS.iter().zip(next).map(|(&one, &other)| (one, other)));
    for (one, other) in part(&pairs, 1) {
        let (first, second) = (exercise.start(one)?, exercise.start(other)?);
        exercise.finish_well(first, &format!("{one:?} beside {other:?}"))?;
        exercise.finish_well(second, &format!("{other:?} beside {one:?}"))?;
    }
    exercise.end()
}
