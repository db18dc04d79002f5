// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's timerlat tracer, where there is one: its options, and what is left of a run that is killed.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::machine::{KEEP_ENABLED, Machine, words};

const SCRIPT: &str = include_str!("tracer.sh");

/// Every option that is for the tracer does what it says, and nothing is left behind.
pub fn options_are_honoured(machine: &Machine<'_>, parts: &[&str]) -> Result<()> {
    for &part in parts {
        machine.part(&format!("the tracer: {part}"), || {
            let output =
                machine.run(&[], &words(&["sh", "-ec", KEEP_ENABLED, "sh", "sh", "-c", SCRIPT, "sh", part]))?;
            ensure!(output.lines().last() == Some("0 wrong"), "something is wrong");
            Ok(())
        })?;
    }
    Ok(())
}

/// Whoever keeps interrupts off for 50 ms is blamed for late activations, by both backends. An emulated CPU may stop for as long by itself,
/// more than once in a run.
pub fn interrupts_off_are_blamed(machine: &Machine<'_>) -> Result<()> {
    for backend in ["tracer", "bpf"] {
        machine.part(&format!("blame by {backend}"), || interrupts_off_are_blamed_by(backend, machine))?;
    }
    Ok(())
}

fn interrupts_off_are_blamed_by(backend: &str, machine: &Machine<'_>) -> Result<()> {
    let words = words(&["sh", "-ec", KEEP_ENABLED, "sh", "sh", "-c", DELAYS, "sh", backend]);
    let output = machine.run(&[], &words)?;
    let snapshots = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let late: Vec<Value> =
        snapshots.flat_map(|snapshot| snapshot["late"].as_array().cloned().unwrap_or_default()).collect();
    let long = late.iter().filter(|event| event["latency_ns"].as_u64() >= Some(LONG_NS));
    let (mut events, mut right) = (0, 0);
    for event in long {
        let causes = event["causes"].as_array().map_or(&[][..], Vec::as_slice);
        let sum: u64 = causes.iter().filter_map(|cause| cause["ns"].as_u64()).sum();
        ensure!(event["latency_ns"] == sum, "the causes add up to {sum}: {event}");
        let first = causes.first().unwrap_or(&Value::Null);
        let who = first["who"].as_str().unwrap_or_default();
        events += 1;
        if first["kind"] == "irqs_off" && who.starts_with("irq_test:") {
            right += 1;
        } else {
            println!("another cause: {event}");
        }
    }
    println!("{backend}: {right} of {events} name who kept interrupts off");
    ensure!(events >= DELAYS_MADE * 9 / 10, "only {events} activations were late of {DELAYS_MADE}");
    ensure!(right * 100 >= events * 95, "too few are right");
    Ok(())
}

/// An emulated CPU, and loading a module, keep others waiting for half as long.
const LONG_NS: u64 = 45_000_000;
const DELAYS_MADE: usize = 30;
/// A kernel's own module keeps interrupts off. The machine's output goes through an emulated serial port, whose interrupt takes longer than
/// that for a long line: there is none meanwhile.
const DELAYS: &str = "
    whylate timerlat top --backend $1 -c 1 --json --why 10ms -d 30 >/tmp/out &
    measuring=$!
    sleep 4
    for number in $(seq 30); do
        insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay=50000 cpu_affinity=1
        rmmod preemptirq_delay_test
        sleep 0.3
    done
    wait $measuring
    cat /tmp/out
";
