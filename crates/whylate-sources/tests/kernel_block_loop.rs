// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `block` on a loop device, its partition, and the disk of its backing file. Runs as root.

mod support;
#[path = "kernel_block_loop/traced.rs"]
mod traced;

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use whylate_model::LateEvent;
use whylate_sources::block::BlockOptions;

use support::fixtures::loop_disk::Loop;
use support::fixtures::null_disk::{BLOCK, Buffer};
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::{Unjudged, in_rounds};
use support::oracles::disk_counts::{attach, ensure_counts_are_the_kernels, kernel_counts, totals};

/// First sector of the partition.
const BEGIN: u64 = 2048;
const READS: u64 = 100;

#[test]
fn loop_device_time_includes_backing_disk_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(made) = Loop::make(8)? else { return Ok(()) };
    let Some(partition) = made.add_partition(BEGIN)? else { return Ok(()) };
    let partition = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(partition)?;
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    in_rounds(|| {
        let before = kernel_counts(&made.name)?;
        let mut source = attach(&BlockOptions { late_over_ns: Some(1), phases: true, ..BlockOptions::default() })?;
        let mut block = Box::new(Buffer([0; BLOCK]));
        let (mut own_ns, mut events) = (Vec::new(), Vec::new());
        for turn in 0..READS {
            let began = Instant::now();
            partition.read_exact_at(&mut block.0, turn * 7 * BLOCK as u64)?;
            own_ns.push(began.elapsed().as_nanos() as u64);
            // Other users of the disk may otherwise fill the buffer of late events.
            source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        }
        let snapshot = source.snapshot()?;
        patching(|| drop(source));
        let late_events = snapshot.lost["late_events"];
        ensure!(late_events == 0, Unjudged(format!("others do so much that {late_events} are not reported")));
        // A kernel that hides a process from BPF programs also hides interrupts that interrupt that process.
        let seen = totals(&snapshot, &made.name, "read").requests;
        ensure!(seen >= READS, Unjudged(format!("the ends of {} reads are not seen", READS - seen)));
        ensure_counts_are_the_kernels(&snapshot, &made.name, &before)?;
        events.sort_by_key(|event| event.at_ns);
        let read_of = |disk: &str| -> Vec<&LateEvent> {
            let is_asked = |event: &&LateEvent| {
                let labels = &event.labels;
                labels["device"] == disk && labels["operation"] == "read" && labels["bytes"] == BLOCK.to_string()
            };
            events.iter().filter(is_asked).collect()
        };
        let (above, below) = (read_of(&made.name), read_of(&made.disk));
        let began_ns = |event: &LateEvent| event.at_ns - event.latency_ns;
        let mut served = 0;
        for (turn, (event, own_ns)) in above.iter().zip(&own_ns).enumerate() {
            // Relative to the disk, not to the partition.
            let sector = (BEGIN + turn as u64 * 7 * BLOCK as u64 / 512).to_string();
            assert_eq!((&event.labels["submitter_tid"], &event.labels["sector"]), (&own, &sector));
            assert!(event.latency_ns <= *own_ns, "{event:?} of {own_ns} ns");
            // The backing disk's request lies within the loop device's, whichever thread submits it.
            let is_within = |below: &&&LateEvent| began_ns(event) <= began_ns(below) && below.at_ns <= event.at_ns;
            let within: Vec<_> = below.iter().filter(is_within).collect();
            served += u64::from(!within.is_empty());
            if let (0, [below, ..]) = (turn, &*within) {
                println!("{} ns, of which {} for {}", event.latency_ns, below.latency_ns, below.labels["submitter"]);
            }
        }
        println!("{served} of {} reads of {} have one of {} within", above.len(), made.name, made.disk);
        ensure!(served == READS, "{served} have one of the disk");
        Ok(())
    })
}
