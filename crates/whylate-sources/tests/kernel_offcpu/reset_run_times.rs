// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads with a last run time that the scheduler has reset.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use whylate_sources::Threads;
use whylate_sources::kernel::clock::unix_ns;
use whylate_sources::offcpu::OffcpuOptions;

use crate::sampled;
use crate::sleepers::Sleepers;
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::in_rounds;

const THREADS: u64 = 40;

#[test]
fn thread_migrated_while_blocking_has_correct_age() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    in_rounds(|| {
        let before_ns = unix_ns();
        let sleepers = Sleepers::start("moved asleep", THREADS)?;
        let asleep_ns = unix_ns();
        sleep(Duration::from_millis(700));
        let options = OffcpuOptions {
            threads: Threads { name: Some("moved".to_owned()), ..Threads::of_process(sleepers.pid()) },
            by_thread: true,
            ..OffcpuOptions::default()
        };
        let snapshot = sampled(&options, Duration::from_millis(300))?;
        let end_ns = snapshot.start_unix_ns + snapshot.duration_ns;
        // None before 6.12, nor where /proc does not show it.
        let is_reset = |tid: &String| {
            let sched = fs::read_to_string(format!("/proc/{}/task/{tid}/sched", sleepers.pid())).unwrap_or_default();
            sched.lines().any(|line| line.starts_with("se.exec_start ") && line.ends_with(" 0.000000"))
        };
        println!("{} of {THREADS} are reset", sleepers.threads()?.iter().filter(|tid| is_reset(tid)).count());
        ensure!(snapshot.stacks.len() as u64 == THREADS, "{} threads: {:?}", snapshot.stacks.len(), snapshot.lost);
        // The age lacks the CPU time that interrupts and the hypervisor took.
        let least_ns = ((end_ns - asleep_ns) * 9 / 10).saturating_sub(50_000_000);
        for stack in &snapshot.stacks {
            let age_ns = stack.age.max_ns();
            ensure!(
                (least_ns..=end_ns - before_ns).contains(&age_ns),
                "{age_ns} ns, not {least_ns}: {:?}",
                stack.labels
            );
        }
        Ok(())
    })
}
