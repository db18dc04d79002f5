// SPDX-License-Identifier: MIT OR Apache-2.0
//! What whylate measures on other kernels than the running one, each in a virtual machine: the kernel tests of the
//! sources, which compare with raw trace lines of the same run, and the static program.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::machine::{KEEP_ENABLED, Machine, words};

#[path = "matrix/irqsoff.rs"]
mod irqsoff;
#[path = "matrix/machine.rs"]
mod machine;
#[path = "matrix/tracer.rs"]
mod tracer;

/// So many executions have to be compared for their share to mean anything.
const ENOUGH: u64 = 3_000;

#[test]
fn debian_6_1_cloud() -> Result<()> {
    // It enters process_one_work() for items that it does not run, so `fentry` cannot be used, and has no bpf_wq.
    matrix(
        "6.1-cloud",
        &Expected {
            backend: "tracepoint",
            injects: false,
            cannot_disturb: &[NO_TIMES, NO_IRQS_OFF, "bpf_wq"],
            tells_preemption: false,
            of_tracer: &[],
            sqpoll: Some("samples"),
        },
    )
}

#[test]
fn debian_6_12_cloud() -> Result<()> {
    matrix(
        "6.12-cloud",
        &Expected {
            backend: "fentry",
            injects: true,
            cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
            tells_preemption: false,
            of_tracer: &[],
            sqpoll: Some("rounds"),
        },
    )
}

#[test]
fn debian_6_12_rt() -> Result<()> {
    matrix(
        "6.12-rt",
        &Expected {
            backend: "fentry",
            injects: true,
            cannot_disturb: &[NO_TIMES, NO_IRQS_OFF, NO_TIMER],
            tells_preemption: false,
            of_tracer: &["threads", "readers", "trace", "others", "killed"],
            sqpoll: None,
        },
    )
}

#[test]
fn built_6_12_tracers() -> Result<()> {
    // It is built without histograms of events, which the other parts ask for.
    matrix(
        "6.12-tracers",
        &Expected {
            backend: "fentry",
            injects: true,
            cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
            tells_preemption: true,
            of_tracer: &["threads", "readers", "others"],
            sqpoll: None,
        },
    )
}

#[test]
fn built_6_12_tracers_sees_a_delay_that_its_module_makes() -> Result<()> {
    let Some(machine) = Machine::new("6.12-tracers")? else { return Ok(()) };
    machine.part("the kernel's own tracer", || {
        let output = machine.run(&[], &words(&["sh", "-ec", DELAY]))?;
        let max_us: u64 = output.trim().parse().with_context(|| format!("it printed {output}"))?;
        ensure!(max_us >= 20_000, "interrupts were off for 20 ms, and the tracer saw {max_us} us");
        Ok(())
    })
}

#[test]
fn built_6_12_tracers_blames_who_keeps_interrupts_off() -> Result<()> {
    let Some(machine) = Machine::new("6.12-tracers")? else { return Ok(()) };
    tracer::interrupts_off_are_blamed(&machine)
}

#[test]
fn built_6_12_tracers_tells_who_keeps_interrupts_off() -> Result<()> {
    let Some(machine) = Machine::new("6.12-tracers")? else { return Ok(()) };
    machine.part("delays", || irqsoff::delays_are_told(&machine))?;
    let parts = ["hotplug", "killed", "in_use", "no_tracefs"];
    irqsoff::nothing_is_left_or_made_up(&machine, &parts, &["events", "ticks", "tracer"])?;
    irqsoff::nothing_is_left_or_made_up(&machine, &["console"], &["events", "ticks"])
}

#[test]
fn debian_6_12_cloud_blames_a_slow_console() -> Result<()> {
    let Some(machine) = Machine::new("6.12-cloud")? else { return Ok(()) };
    irqsoff::nothing_is_left_or_made_up(&machine, &["console"], &["ticks"])
}

/// Turns interrupts off for 20 ms and prints what the kernel's own tracer saw, in microseconds.
const DELAY: &str = "
    cd /sys/kernel/tracing
    for tracer in irqsoff preemptoff preemptirqsoff wakeup hwlat osnoise timerlat function_graph; do
        grep -qw $tracer available_tracers || { echo no $tracer; exit 1; }
    done
    echo irqsoff >current_tracer
    echo 0 >tracing_max_latency
    insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay=20000
    rmmod preemptirq_delay_test
    cat tracing_max_latency
";

/// What is known of a kernel.
struct Expected {
    backend: &'static str,
    injects: bool,
    /// Why some disturbances cannot be made, or compared with.
    cannot_disturb: &'static [&'static str],
    /// There are events of preemption that is off.
    tells_preemption: bool,
    /// What is tried of the timerlat tracer; nothing where there is none.
    of_tracer: &'static [&'static str],
    /// How `sqpoll` tells work there, if that is tried.
    sqpoll: Option<&'static str>,
}

const NO_IRQS_OFF: &str = "bpf_local_irq_save";
const NO_PREEMPTION: &str = "does not tell how long preemption is off";
const NO_TIMER: &str = "PREEMPT_RT";
const NO_TIMES: &str = "an emulated CPU stops at any time";

fn matrix(kernel: &str, expected: &Expected) -> Result<()> {
    let Some(machine) = Machine::new(kernel)? else { return Ok(()) };
    machine.part("the program", || program_says_what_it_uses(&machine, expected))?;
    machine.part("wq", || wq_agrees_with_the_trace(&machine, expected))?;
    machine.part("why", || why_names_what_disturbed(&machine, expected))?;
    machine.part("timerlat", || timerlat_keeps_its_schedule(&machine, expected))?;
    machine.part("irqsoff", || irqsoff_blames_no_user_code(&machine, expected))?;
    machine.part("offcpu", || offcpu_tells_where_threads_wait(&machine))?;
    if let Some(way) = expected.sqpoll {
        machine.part("sqpoll", || sqpoll_tells_work(&machine, way))?;
    }
    machine.part("all sources", || all_sources_look_at_once(&machine))?;
    machine.part("offcpu --why", || waits_for_a_cpu_are_explained(&machine))?;
    machine.part("selftest", || selftest_passes(&machine, expected))?;
    tracer::options_are_honoured(&machine, expected.of_tracer)
}

/// Three threads for two CPUs, while the static program tells who had one of them to wait.
const CROWDED: &str = "
    for number in 1 2 3; do
        while :; do :; done &
    done
    whylate offcpu --json --why 1ms --worst 50 -d 3s
    kill $(jobs -p)
";

/// On a terminal it shows its progress too.
const LOOK: &str = "whylate --json -d 3s 2>/tmp/said || { cat /tmp/said; exit 1; }";

/// Each source measures or says why it does not, all on one account of the CPUs; what is blamed on somebody adds up to what was late.
fn all_sources_look_at_once(machine: &Machine<'_>) -> Result<()> {
    let output = machine.run(&[], &words(&["sh", "-ec", KEEP_ENABLED, "sh", "sh", "-c", LOOK]))?;
    let look = output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).context("it told nothing")?;
    let list = |name: &str| look[name].as_array().cloned().unwrap_or_default();
    let names = |of: &[Value]| of.iter().filter_map(|of| of["source"].as_str().map(str::to_owned)).collect::<Vec<_>>();
    let (measured, unmeasured) = (names(&list("sources")), names(&list("unmeasured")));
    println!("{measured:?}, not measured: {:?}, weaker: {:?}", list("unmeasured"), list("weaker"));
    for source in ["wq", "irqsoff", "offcpu", "timerlat"] {
        ensure!(measured.iter().any(|name| name == source), "{source} does not measure");
    }
    ensure!(measured.len() + unmeasured.len() == 5, "there are five sources");
    let sum = |of: &[Value], field: &str| of.iter().filter_map(|of| of[field].as_u64()).sum::<u64>();
    let (late_ns, blamed_ns) = (sum(&list("sources"), "late_ns"), sum(&list("culprits"), "total_ns"));
    ensure!(late_ns == blamed_ns, "{blamed_ns} ns are blamed on somebody, and {late_ns} ns were late");
    Ok(())
}

/// Threads that wait for a CPU beside others, with causes that add up.
fn waits_for_a_cpu_are_explained(machine: &Machine<'_>) -> Result<()> {
    let output = machine.run(&[], &words(&["sh", "-c", KEEP_ENABLED, "sh", "sh", "-c", CROWDED]))?;
    let snapshot = output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).context("no snapshot")?;
    let late = snapshot["late"].as_array().context("no thread waited for a CPU")?;
    let mut by_others = 0;
    for event in late {
        let causes = event["causes"].as_array().context("a wait has no causes")?;
        let sum: u64 = causes.iter().filter_map(|cause| cause["ns"].as_u64()).sum();
        ensure!(Some(sum) == event["latency_ns"].as_u64(), "the causes add up to {sum}: {event}");
        by_others += usize::from(causes.iter().any(|cause| cause["kind"] == "thread"));
    }
    println!("{} waits for a CPU, {by_others} of them beside other threads", late.len());
    ensure!(by_others > 0, "no thread is blamed");
    Ok(())
}

/// What can be injected there is told right by the static program; the rest says why it cannot.
fn selftest_passes(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let command = ["sh", "-ec", KEEP_ENABLED, "sh", "whylate", "selftest", "--json", "--force"];
    let output = machine.run(&[], &words(&command))?;
    let told = output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).context("it told nothing")?;
    let checks = told["checks"].as_array().context("it checked nothing")?;
    for check in checks {
        println!("{check}");
        let (verdict, reason) = (check["verdict"].as_str(), check["reason"].as_str().unwrap_or_default());
        let is_known = expected.cannot_disturb.iter().any(|known| reason.contains(known));
        ensure!(verdict == Some("pass") || (verdict == Some("skip") && is_known), "{check}");
    }
    ensure!(checks.len() >= 7, "only {} checks", checks.len());
    Ok(())
}

/// The static program measures, and names its backend and why it is not the best one.
fn program_says_what_it_uses(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let output = machine.run(&[], &words(&["whylate", "wq", "--json", "-d", "3s"]))?;
    let mut lines = output.lines();
    let snapshot = lines.find_map(|line| serde_json::from_str::<Value>(line).ok()).context("it printed no snapshot")?;
    ensure!(snapshot["backend"] == expected.backend, "the backend is {}", snapshot["backend"]);
    let reason = output.lines().find(|line| line.starts_with("whylate: wq uses the "));
    ensure!(reason.is_some() == (expected.backend != "fentry"), "the reason given is {reason:?}");
    let seen = snapshot["series"].as_array().context("the snapshot has no series")?;
    ensure!(!seen.is_empty(), "no work item was seen");
    Ok(())
}

/// The kernel tests of `wq`, all of them.
fn wq_agrees_with_the_trace(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let output = machine.run_tests("kernel_wq")?;
    let no_wq: &[&str] = &["this kernel has no bpf_wq"];
    ensure_skipped_for(&output, if expected.injects { &[] } else { no_wq })?;
    // `9913 executions, 9913 matched (100.000 %), …`: the last try is the one that counts.
    let summary = output.lines().rev().find_map(|line| {
        let (executions, rest) = line.split_once(" executions, ")?;
        let (matched, _) = rest.split_once(" matched (")?;
        Some((executions.parse::<u64>().ok()?, matched.parse::<u64>().ok()?))
    });
    let (executions, matched) = summary.context("no executions were compared with the trace")?;
    ensure!(executions >= ENOUGH, "only {executions} executions were compared with the trace");
    ensure!(matched * 100 >= executions * 99, "{matched} of {executions} executions are matched");
    Ok(())
}

/// The kernel tests of `wq --why`, as far as disturbances can be made there.
fn why_names_what_disturbed(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let output = machine.run_tests("kernel_why")?;
    ensure_skipped_for(&output, expected.cannot_disturb)
}

/// The kernel tests of `timerlat`.
fn timerlat_keeps_its_schedule(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let output = machine.run_tests("kernel_timerlat")?;
    for threads in ["Kernel", "User"] {
        let is_measured = output.contains(&format!("tracer {threads}: "));
        ensure!(
            is_measured != expected.of_tracer.is_empty(),
            "the tracer's threads ({threads}) are measured: {is_measured}"
        );
    }
    // Only where programs may be at the exit of a function; the tracer's own samples are always taken there.
    let tells_ran = !output.contains("latency until it runs: false");
    ensure!(tells_ran, "a thread's latency ends when it has the CPU");
    // None of them is ever idle and in time; and disturbances are compared however often they stop.
    let disturbances =
        expected.cannot_disturb.iter().copied().filter(|reason| [NO_IRQS_OFF, NO_TIMER].contains(reason));
    ensure_skipped_for(&output, &disturbances.chain(["an emulated CPU is late all the time"]).collect::<Vec<_>>())
}

/// The kernel tests of `irqsoff`, but for windows of known length: its programs load, and late interrupts of user code are told as that.
fn irqsoff_blames_no_user_code(machine: &Machine<'_>, expected: &Expected) -> Result<()> {
    let output = machine.run_tests("kernel_irqsoff")?;
    ensure!(output.contains(" of them in user code"), "user code was never interrupted");
    let late = "an emulated CPU is late all the time";
    let lacking: &[&str] = if expected.tells_preemption { &[late] } else { &[late, NO_PREEMPTION] };
    ensure_skipped_for(&output, lacking)
}

/// The kernel tests of `offcpu`, but for what takes too many births of threads; there is no gdb to compare with.
fn offcpu_tells_where_threads_wait(machine: &Machine<'_>) -> Result<()> {
    let output = machine.run_tests("kernel_offcpu")?;
    ensure!(output.contains(" births a second, lost: "), "no threads were born");
    ensure_skipped_for(&output, &["so many births take too long on an emulated CPU", "gdb is not installed"])
}

/// The kernel tests of `sqpoll`, but for what a busy emulated CPU does to waits: working shares without `SqWorkTime`. Those of `--precise` are
/// compared with the kernel's own record of function calls.
fn sqpoll_tells_work(machine: &Machine<'_>, way: &str) -> Result<()> {
    let output = machine.run_tests("kernel_sqpoll")?;
    let first = output.lines().find_map(|line| line.split_once("work is told by ").map(|(_, way)| way));
    ensure!(first == Some(way), "work is told by {first:?}");
    ensure_skipped_for(&output, &["an emulated CPU is late all the time"])?;
    // Where work is told by samples (6.1) there is no function_graph tracer in instances, and the rest is as with rounds.
    if way == "rounds" {
        for tests in ["kernel_sqpoll_namespace", "kernel_sqpoll_moved", "kernel_sqpoll_precise"] {
            ensure_skipped_for(&machine.run_tests(tests)?, &[])?;
        }
    }
    Ok(())
}

/// Tests were skipped for each of these reasons, and for no other.
fn ensure_skipped_for(output: &str, reasons: &[&str]) -> Result<()> {
    let skipped: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("skipped: ")).collect();
    let other = skipped.iter().find(|skipped| !reasons.iter().any(|reason| skipped.contains(reason)));
    ensure!(other.is_none(), "a test was skipped: {other:?}");
    let unsaid = reasons.iter().find(|&reason| !skipped.iter().any(|skipped| skipped.contains(reason)));
    ensure!(unsaid.is_none(), "no test was skipped for this reason: {unsaid:?}");
    Ok(())
}
