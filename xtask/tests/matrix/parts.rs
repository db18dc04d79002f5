// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts that run on another kernel, and the judges of their output.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::kernels::Expected;
use crate::machine::Part;

/// Minimum number of compared executions for a meaningful share.
const MIN_EXECUTIONS: u64 = 3_000;

/// Tests of what may differ on another kernel: its events, and BPF programs at them. Counters and the grouping of
/// series are the same everywhere, and are tested on the running kernel.
const WORK_ITEMS: &[&str] = &[
    "dropped_source_leaves_no_programs",
    "counts_and_maxima_per_handler_match_trace",
    "item_waits_for_busy_items_before_it",
    "each_item_over_threshold_is_a_late_event",
    "items_beyond_max_active_wait_for_activation",
    "counts_each_of_ten_thousand_items_once",
    "ten_thousand_late_events_are_all_reported_or_counted_as_lost",
];

/// Like [`WORK_ITEMS`]: grouping of stacks, names, code files and filters are the same everywhere.
const WAITS: &[&str] = &[
    "trace_accounts_for_all_time_of_a_thread",
    "deadline::deadline_budget_is_the_only_cause",
    "flood::late_events_beyond_budget_count_without_causes",
    "reset_run_times::thread_migrated_while_blocking_has_correct_age",
    "gdb::user_frames_match_gdb",
    "preempted_blocking::thread_preempted_while_blocking_is_runnable",
    "holders::waiter_names_lock_holder",
    "holders::flush_waiter_names_worker",
    "migrated::migrated_thread_waits_since_its_wakeup",
    "run_queue::thread_preempted_by_sampler_counts_as_running",
    "run_queue::run_queue_wait_matches_schedstat",
    "roles::role_does_not_depend_on_thread_name",
    "sampling_agrees_with_tracing_and_a_regular_sleeper_does_not_alias",
    "wait_age_counts_from_its_start",
    "short_lived_threads_are_counted_or_lost",
    "threads_have_expected_shares_names_and_time",
    "exited_threads_do_not_count_as_unreadable",
    "throttled::wakeup_in_throttled_cgroup_waits_for_quota",
    "throttled::throttled_wait_is_attributed_to_quota_on_busy_cpu",
    "throttled::culprits_and_victims_have_their_cgroups",
    "throttled::throttled_waits_blame_no_other_thread",
    "throttled::queued_threads_are_throttled_with_their_cgroup",
    "wakers::blocked_wait_has_wakers_stack",
    "proc_backend_has_same_kernel_frames_as_bpf",
];

/// Reasons why a test does not apply on some kernels, or on any emulated one.
pub const NO_IRQS_OFF: &str = "bpf_local_irq_save";
const NO_PREEMPTION: &str = "sched_set_need_resched_tp";
pub const NO_TIMER: &str = "PREEMPT_RT";
pub const NO_TIMES: &str = "an emulated CPU stops at any time";
const LATE: &str = "an emulated CPU is late all the time";
const NO_WORK: &str = "this kernel has no bpf_wq";
const NO_DISK: &str = "is on a disk with direct I/O: run";
const NOT_ON_DISK: &str = "is on no disk";
pub const NO_NULL_DISK: &str = "this kernel has no null_blk";
const NO_ZRAM: &str = "there is no zram0";
const NO_SCSI_DISK: &str = "this kernel has no scsi_debug";
pub const NO_LIMITS: &str = "block:block_io_start";

/// Returns the static program's parts, and one comparison with another record for two sources.
pub fn short(expected: &'static Expected) -> Vec<Part> {
    let mut parts = of_program(expected);
    parts.push(Part::tests("kernel_wq", &["counts_and_maxima_per_handler_match_trace"], wq_agrees));
    parts.push(Part::tests("kernel_trace_lines", &[], move |said| is_skipped_for(said, expected.no_trace_lines)));
    parts
}

/// Returns everything except what has machines of its own, in the functions below.
pub fn whole(expected: &'static Expected) -> Vec<Part> {
    let mut parts = of_program(expected);
    parts.push(Part::tests("kernel_trace_lines", &[], move |said| is_skipped_for(said, expected.no_trace_lines)));
    parts.push(Part::tests("kernel_wq", WORK_ITEMS, move |said| {
        is_skipped_for(said, if expected.injects { &[] } else { &[NO_WORK] })?;
        wq_agrees(said)
    }));
    parts.push(Part::tests("kernel_wq_causes", &[], move |said| is_skipped_for(said, expected.cannot_disturb)));
    parts.push(Part::tests("kernel_timerlat", &[], move |said| timerlat_keeps_its_schedule(said, expected)));
    parts.push(Part::tests("kernel_irqsoff", &[], move |said| irqsoff_blames_no_user_code(said, expected)));
    if expected.has_preemption_events {
        parts.push(Part::shell("the kernel's own tracers", TRACERS, kernel_tracer_sees_the_delay));
        parts.push(Part::tests("kernel_irqsoff_delay", &[], delays_are_reported));
        for backend in ["tracer", "bpf"] {
            let script = DELAYS.replace("@BACKEND@", backend);
            parts.push(Part::shell(&format!("blame by {backend}"), &script, disabler_of_interrupts_is_blamed));
        }
    }
    parts.extend(expected.of_irqsoff.iter().map(|words| Part::script("irqsoff.sh", words, nothing_wrong)));
    parts
}

/// Returns the parts for submission threads, on kernels that support them.
pub fn sqpoll(expected: &'static Expected) -> Vec<Part> {
    let mut parts = Vec::new();
    if let Some(way) = expected.sqpoll {
        parts.push(Part::tests("kernel_sqpoll", &[], move |said| sqpoll_measures_work(said, way)));
        // With samples (6.1), instances have no function_graph tracer; the rest is as with rounds.
        if way == "rounds" {
            for program in ["kernel_sqpoll_namespace", "kernel_sqpoll_migrated", "kernel_sqpoll_precise"] {
                parts.push(Part::tests(program, &[], |said| is_skipped_for(said, &[])));
            }
        }
    }
    parts
}

/// Returns the parts for the latency of requests, on disks and on devices on top of them.
pub fn disks(expected: &'static Expected) -> Vec<Part> {
    let mut parts = Vec::new();
    parts.push(Part::tests("kernel_block", &[], move |said| {
        let of_disk: &[&str] = if expected.has_disk { &[] } else { &[NOT_ON_DISK] };
        is_skipped_for(said, &[of_disk, &[NO_TIMES, NO_ZRAM]].concat())
    }));
    parts.push(Part::tests("kernel_block_null", &[], move |said| is_skipped_for(said, expected.no_null_disk)));
    let has_disks = !expected.no_null_disk.contains(&NO_NULL_DISK);
    let lacking: [&[&str]; 2] = if has_disks { [&[], &[]] } else { [&[NO_NULL_DISK, NO_SCSI_DISK], &[NO_NULL_DISK]] };
    for (program, lacking) in ["kernel_block_faults", "kernel_block_submitters"].into_iter().zip(lacking) {
        parts.push(Part::tests(program, &[], move |said| is_skipped_for(said, lacking)));
    }
    parts
}

/// Returns the parts for blocked waits, holders and wakeup edges.
pub fn waits(expected: &'static Expected) -> Vec<Part> {
    let mut parts = vec![
        Part::tests("kernel_offcpu", WAITS, offcpu_tests_pass),
        Part::tests("kernel_wakeup_edges", &[], move |said| wakers_are_compared(said, expected)),
        Part::tests("kernel_paths", &[], move |said| waits_are_followed(said, expected)),
        Part::tests("kernel_contended_locks", &[], |said| is_skipped_for(said, &[])),
        Part::shell("run and -p", COMMANDS, move |said| a_command_is_explained(said, expected)),
        Part::shell("offcpu --why", CROWDED, waits_for_a_cpu_are_explained),
    ];
    // The kernel that is built from source has no memory cgroups.
    if !expected.has_preemption_events {
        parts.push(Part::shell("memory.high", OVER_LIMIT, memory_limit_is_named));
    }
    parts
}

/// Reads into a buffer of 24 MB, again and again, in a cgroup that should have 8 MB.
const OVER_LIMIT: &str = r#"
    cd /sys/fs/cgroup && echo +memory >cgroup.subtree_control && mkdir small && echo 8M >small/memory.high || exit 1
    cd /
    sh -c 'echo $$ >/sys/fs/cgroup/small/cgroup.procs; while :; do dd if=/dev/zero of=/dev/null bs=24M count=1 2>/dev/null; done' &
    sleep 1
    # Through a pipe: on a console, the line that shows progress would come before the JSON.
    whylate --cgroup /small --json -d 6s 2>&1 | cat
    kill $!
"#;

/// Checks that the limit is the cause, and not the program that it throttles, and that reclaim is for this cgroup.
fn memory_limit_is_named(said: &str) -> Result<()> {
    let program = json(said)?;
    let reclaim = program["reclaim"].as_array().map_or(&[][..], Vec::as_slice);
    let is_it = |sum: &Value| sum["kind"] == "cgroup" && sum["cgroup"] == "/small";
    ensure!(reclaim.iter().any(is_it), "reclaim {reclaim:?}, {}", program["limitation"]);
    let waits = program["waits"].as_array().context("it does not wait")?;
    let parts = waits.iter().flat_map(|wait| wait["path"].as_array().into_iter().flatten());
    let timers: Vec<&Value> = parts.filter(|part| part["kind"] == "timer").collect();
    let of = |is_limit: bool| {
        let is_it = |part: &&&Value| (part["who"] == "memory limit or reclaim") == is_limit;
        timers.iter().filter(is_it).filter_map(|part| part["ns"].as_u64()).sum::<u64>()
    };
    println!("{} ns for the memory limit, {} ns for other timers", of(true), of(false));
    ensure!(of(true) >= 500_000_000 && of(false) * 20 <= of(true), "{timers:?}");
    Ok(())
}

/// Returns the parts for `timerlat` with the kernel's own tracer.
pub fn tracer(expected: &'static Expected) -> Vec<Part> {
    expected.of_tracer.iter().map(|&part| Part::script("tracer.sh", &[part], nothing_wrong)).collect()
}

/// Returns the parts that stress a machine while each source measures.
pub fn torture() -> Vec<Part> {
    let judge = |said: &str| {
        // For the table of `make torture`.
        said.lines().filter(|line| line.starts_with("row: ")).for_each(|row| println!("{row}"));
        nothing_wrong(said)
    };
    ["hotplug", "clocks"].map(|part| Part::script("torture.sh", &[part], judge).switches_cpus_off()).into()
}

/// Returns the part that checks an overview's effect on a real-time thread on an isolated CPU without a tick.
pub fn isolated() -> Vec<Part> {
    vec![Part::shell("an isolated CPU", ISOLATED, isolated_cpu_is_left_alone).with("/usr/bin/chrt")]
}

/// Counts timer interrupts and involuntary switches of a SCHED_FIFO:90 thread that loops on CPU 1, for 5 s alone and
/// during an overview. Real-time throttling is off.
const ISOLATED: &str = r#"
    echo -1 >/proc/sys/kernel/sched_rt_runtime_us
    taskset 2 /usr/bin/chrt -f 90 sh -c 'while :; do :; done' &
    loop=$!
    trap 'kill $loop' EXIT
    count() {
        timers=$(awk '/LOC:/ { print $3 }' /proc/interrupts)
        switches=$(awk '/^nonvoluntary/ { print $2 }' /proc/$loop/status)
        echo "$1 $timers $switches $(cut -d ' ' -f 1 /proc/uptime)"
    }
    sleep 2
    count alone
    sleep 5
    count beside
    whylate -d 5s >/tmp/overview 2>&1 || { cat /tmp/overview; exit 1; }
    count end
    cat /tmp/overview
"#;

/// The kernel's own timers come about once a second there; measuring threads or timers would come at least 100 times a
/// second.
fn isolated_cpu_is_left_alone(said: &str) -> Result<()> {
    let counts = |name: &str| -> Result<[f64; 3]> {
        let line = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let numbers = line.with_context(|| format!("no counts {name}"))?.split(' ').map(str::parse);
        let numbers: Vec<f64> = numbers.collect::<Result<_, _>>()?;
        numbers.try_into().ok().with_context(|| format!("no three counts {name}"))
    };
    let [alone, beside, end] = [counts("alone")?, counts("beside")?, counts("end")?];
    let rates = |from: [f64; 3], to: [f64; 3]| [0, 1].map(|of| (to[of] - from[of]) / (to[2] - from[2]));
    let (before, during) = (rates(alone, beside), rates(beside, end));
    println!("timer interrupts and switches a second on CPU 1: {before:.1?} alone, {during:.1?} beside an overview");
    for (alone, beside) in before.into_iter().zip(during) {
        ensure!(beside <= 2.0 * alone + 1.0, "{beside:.1} a second beside an overview, {alone:.1} alone");
    }
    // In one line for both sources, which a console may wrap.
    let left_out = "CPU 1 was left out: isolated (isolcpus); -c 1 measures it";
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let is_named = |sources: &str| words.contains(&format!("- {sources}: {left_out}"));
    ensure!(is_named("irqsoff, timerlat") || is_named("timerlat, irqsoff"), "it is not named for both sources");
    Ok(())
}

/// Returns the parts of the static program.
pub fn of_program(expected: &'static Expected) -> Vec<Part> {
    vec![
        Part::shell("the program", "whylate wq -v --json -d 3s", move |said| program_says_what_it_uses(said, expected))
            .before_probes(),
        // On a terminal it would show its progress too.
        Part::shell(
            "all sources",
            "whylate --json -d 3s 2>/tmp/said || { cat /tmp/said; exit 1; }",
            all_sources_measure,
        ),
        Part::shell("selftest", "whylate selftest --json --force", move |said| selftest_passes(said, expected)),
        Part::shell("CPU samples", SAMPLED, running_thread_is_sampled),
    ]
}

/// Loops in a shell while the static program samples it.
const SAMPLED: &str = "
    while :; do :; done &
    trap 'kill $!' EXIT
    # Through a pipe: on a console, the line that shows progress would come before the JSON.
    whylate -p $! --json -d 5s 2>&1 | cat
";

/// Checks that the BPF program is loaded, and that the samples add up to most of the time on a CPU.
fn running_thread_is_sampled(said: &str) -> Result<()> {
    let program = json(said)?;
    let work = &program["work"];
    let [on_cpu, worked, not_sampled, samples] =
        [&program["on_cpu_ns"], &work["ns"], &work["not_sampled_ns"], &work["samples"]].map(Value::as_u64);
    println!("{samples:?} samples of {worked:?} of {on_cpu:?} ns, {not_sampled:?} ns not sampled");
    ensure!(samples >= Some(20), "work {work}, {}", program["limitation"]);
    ensure!(not_sampled <= on_cpu.map(|ns| ns / 4), "{work}");
    Ok(())
}

/// Three threads for two CPUs, while the static program explains run-queue waits.
const CROWDED: &str = "
    trap 'kill $(jobs -p)' EXIT
    for number in 1 2 3; do
        while :; do :; done &
    done
    whylate offcpu --json --why 1ms --worst 50 -d 3s
";

/// A command that waits for a disk or, without one, for its child; and a program that waits for another.
const COMMANDS: &str = r#"
    whylate run --json sh -c "sleep 0.3; dd if=/dev/zero of='$directory/written' bs=4k count=20 conv=fsync; true" 2>&1
    (sleep 20 | cat) &
    sleep 1
    # Through a pipe: on a console, the progress line would come before the JSON. Not `| cat`: --comm would select that one too.
    whylate --comm cat --json -d 2s 2>&1 | grep .
    kill $!
"#;

/// Checks the last line of a script.
fn nothing_wrong(said: &str) -> Result<()> {
    ensure!(said.trim_end().ends_with("\n0 wrong") || said.trim() == "0 wrong", "something is wrong");
    Ok(())
}

/// Returns the first line that is JSON.
fn json(said: &str) -> Result<Value> {
    said.lines().find_map(|line| serde_json::from_str(line).ok()).context("it printed nothing")
}

/// Checks that each source measures or says why not, and that the time of culprits adds up to what was late.
fn all_sources_measure(said: &str) -> Result<()> {
    let overview = json(said)?;
    let list = |name: &str| overview[name].as_array().cloned().unwrap_or_default();
    let names = |of: &[Value]| of.iter().filter_map(|of| of["source"].as_str().map(str::to_owned)).collect::<Vec<_>>();
    let (measured, unmeasured) = (names(&list("sources")), names(&list("unmeasured")));
    println!("{measured:?}, not measured: {:?}, limitations: {:?}", list("unmeasured"), list("weaker"));
    for source in ["wq", "irqsoff", "offcpu", "timerlat"] {
        ensure!(measured.iter().any(|name| name == source), "{source} does not measure");
    }
    ensure!(measured.len() + unmeasured.len() == 6, "there are six sources");
    let is_named = |event: &Value| event["subject"].as_str().is_some_and(|subject| !subject.is_empty());
    ensure!(list("worst").iter().all(is_named), "what was late is not named: {:?}", list("worst"));
    let sum = |of: &[Value], field: &str| of.iter().filter_map(|of| of[field].as_u64()).sum::<u64>();
    let (late_ns, blamed_ns) = (sum(&list("sources"), "late_ns"), sum(&list("culprits"), "total_ns"));
    ensure!(late_ns == blamed_ns, "{blamed_ns} ns have culprits, and {late_ns} ns were late");
    Ok(())
}

/// Checks that run-queue waits have causes that add up, and that threads are among them.
fn waits_for_a_cpu_are_explained(said: &str) -> Result<()> {
    let snapshot = json(said)?;
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

/// Checks that wakers were compared with the kernel's own trace, and disk requests with their submitter's view.
fn wakers_are_compared(said: &str, expected: &Expected) -> Result<()> {
    if !expected.has_disk {
        return is_skipped_for(said, &[NOT_ON_DISK]);
    }
    ensure!(said.lines().any(|line| line.contains(" writes, ")), "no writes were compared");
    is_skipped_for(said, &[])
}

/// Allows to skip what is judged by the lengths of a wait's parts.
fn waits_are_followed(said: &str, expected: &Expected) -> Result<()> {
    let kinds = said.lines().filter(|line| line.contains(" waits, ") && line.contains(" off, ")).count();
    ensure!(kinds >= 8, "{kinds} ways to wait");
    let lacking = [(!expected.has_disk, NOT_ON_DISK), (!expected.injects, NO_WORK)];
    let lacking = lacking.into_iter().filter(|(lacks, _)| *lacks).map(|(_, reason)| reason);
    is_skipped_for(said, &lacking.chain([NO_TIMES]).collect::<Vec<_>>())
}

/// Checks that a command's path adds up to its time, ends in what it waited for, and is known almost completely.
fn a_command_is_explained(said: &str, expected: &Expected) -> Result<()> {
    let mut reported = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let command = reported.find(|reported| reported["elapsed_ns"].is_u64()).context("no command is reported")?;
    let path = command["path"].as_array().context("it has no path")?;
    let sum = |kind: &str| -> u64 {
        let parts = path.iter().filter(|part| kind.is_empty() || part["kind"] == kind);
        parts.filter_map(|part| part["ns"].as_u64()).sum()
    };
    let (slept_ns, disk_ns) = (sum("timer"), sum("disk"));
    println!("{} ns, of which {slept_ns} asleep, {disk_ns} for a disk, {} unknown", sum(""), sum("unknown"));
    ensure!(command["elapsed_ns"] == sum(""), "the path adds up to {}", sum(""));
    ensure!(slept_ns >= 290_000_000, "it slept for {slept_ns} ns");
    ensure!(disk_ns > 0 || !expected.has_disk, "it waited for no disk");
    ensure!(sum("unknown") <= sum("") / 20, "{} ns are unknown", sum("unknown"));
    let program = reported.find(|reported| reported["processes"].is_u64()).context("no program is reported")?;
    ensure!(program["processes"] == 1, "it has {} processes", program["processes"]);
    let waits = program["waits"].as_array().context("it does not wait")?;
    let waited_ns: u64 = waits.iter().chain([&program["ready"]]).filter_map(|wait| wait["ns"].as_u64()).sum();
    let had_ns = ["on_cpu_ns", "own_sleep_ns"].iter().filter_map(|part| program[part].as_u64()).sum::<u64>();
    ensure!(program["total_ns"] == waited_ns + had_ns, "the program's time adds up to {}", waited_ns + had_ns);
    ensure!(waited_ns >= 1_900_000_000, "it waited for {waited_ns} ns");
    Ok(())
}

/// Checks that each injected disturbance is reported correctly, or is skipped for a known reason.
fn selftest_passes(said: &str, expected: &Expected) -> Result<()> {
    let reported = json(said)?;
    let checks = reported["checks"].as_array().context("it checked nothing")?;
    for check in checks {
        println!("{check}");
        let (verdict, reason) = (check["verdict"].as_str(), check["reason"].as_str().unwrap_or_default());
        let is_known = expected.cannot_disturb.iter().any(|known| reason.contains(known)) || reason.contains(NO_DISK);
        ensure!(verdict == Some("pass") || (verdict == Some("skip") && is_known), "{check}");
    }
    ensure!(checks.len() >= 8, "only {} checks", checks.len());
    Ok(())
}

/// Checks that the static program measures, and names its backend and why it is not the best one.
fn program_says_what_it_uses(said: &str, expected: &Expected) -> Result<()> {
    let snapshot = json(said)?;
    ensure!(snapshot["backend"] == expected.backend, "the backend is {}", snapshot["backend"]);
    let reason = said.lines().find(|line| line.starts_with("whylate: wq uses the "));
    ensure!(reason.is_some() == (expected.backend != "fentry"), "the reason given is {reason:?}");
    let seen = snapshot["series"].as_array().context("the snapshot has no series")?;
    ensure!(!seen.is_empty(), "no work item was seen");
    Ok(())
}

/// `9913 executions, 9913 matched (100.000 %), …`: the last round counts.
fn wq_agrees(said: &str) -> Result<()> {
    let summary = said.lines().rev().find_map(|line| {
        let (executions, rest) = line.split_once(" executions, ")?;
        let (matched, _) = rest.split_once(" matched (")?;
        Some((executions.parse::<u64>().ok()?, matched.parse::<u64>().ok()?))
    });
    let (executions, matched) = summary.context("no executions were compared with the trace")?;
    ensure!(executions >= MIN_EXECUTIONS, "only {executions} executions were compared with the trace");
    ensure!(matched * 100 >= executions * 99, "{matched} of {executions} executions are matched");
    Ok(())
}

fn timerlat_keeps_its_schedule(said: &str, expected: &Expected) -> Result<()> {
    for threads in ["Kernel", "User"] {
        let is_measured = said.contains(&format!("tracer {threads}: "));
        ensure!(
            is_measured != expected.of_tracer.is_empty(),
            "the tracer's threads ({threads}) are measured: {is_measured}"
        );
    }
    // Only where programs may be at the exit of a function; the tracer's own samples are always taken there.
    let tells_ran = !said.contains("latency until it runs: false");
    ensure!(tells_ran, "a thread's latency does not end when it runs");
    // Emulated CPUs are never idle and in time; and disturbances are compared however often they stop.
    let disturbances =
        expected.cannot_disturb.iter().copied().filter(|reason| [NO_IRQS_OFF, NO_TIMER].contains(reason));
    is_skipped_for(said, &disturbances.chain([LATE]).collect::<Vec<_>>())
}

/// Allows to skip windows of known length: the programs load, and late interrupts of user code are reported as such.
fn irqsoff_blames_no_user_code(said: &str, expected: &Expected) -> Result<()> {
    ensure!(said.contains(" of them in user code"), "user code was never interrupted");
    let lacking: &[&str] = if expected.has_preemption_events { &[LATE] } else { &[LATE, NO_PREEMPTION] };
    is_skipped_for(said, lacking)
}

/// Allows to skip what needs too many thread creations or waits; there is no gdb to compare with, and no disk to write
/// to.
fn offcpu_tests_pass(said: &str) -> Result<()> {
    ensure!(said.contains(" births a second, lost: "), "no threads were born");
    let emulated = ["an emulated CPU is too slow for a flood", "it needs two CPUs that are not emulated", NO_TIMES];
    // A quota is judged if its CPU is idle otherwise, which an emulated one with PREEMPT_RT hardly is; and a kernel
    // that is built for its tracers has little else.
    let may_lack = ["others have this CPU", "this kernel has no inotify"];
    let said: Vec<&str> = said.lines().filter(|line| !may_lack.iter().any(|lacks| line.contains(lacks))).collect();
    let lacking = ["gdb is not installed", "what writes back has no disk here"];
    is_skipped_for(&said.join("\n"), &[&emulated[..], &lacking].concat())
}

/// Allows to skip what a busy emulated CPU does to waits.
fn sqpoll_measures_work(said: &str, way: &str) -> Result<()> {
    let first = said.lines().find_map(|line| line.split_once("work is measured by ").map(|(_, way)| way));
    ensure!(first == Some(way), "work is measured by {first:?}");
    is_skipped_for(said, &[LATE])
}

/// Disables interrupts for 20 ms and prints what the kernel's own tracer saw, in microseconds.
const TRACERS: &str = "
    cd /sys/kernel/tracing
    for tracer in irqsoff preemptoff preemptirqsoff wakeup hwlat osnoise timerlat function_graph; do
        grep -qw $tracer available_tracers || { echo no $tracer; exit 1; }
    done
    echo irqsoff >current_tracer
    echo 0 >tracing_max_latency
    insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay=20000
    rmmod preemptirq_delay_test
    cat tracing_max_latency
    echo nop >current_tracer
";

fn kernel_tracer_sees_the_delay(said: &str) -> Result<()> {
    let max_us: u64 = said.trim().parse().with_context(|| format!("it printed {said}"))?;
    ensure!(max_us >= 20_000, "interrupts were off for 20 ms, and the tracer saw {max_us} us");
    Ok(())
}

/// Checks that each delay of the kernel's module is reported, with its length and task.
fn delays_are_reported(said: &str) -> Result<()> {
    let rows = said.lines().filter(|line| line.starts_with("row | events | ")).count();
    // Four lengths in two modes.
    ensure!(rows >= 8, "{rows} rows");
    is_skipped_for(said, &[])
}

/// Minimum latency of a delay: an emulated CPU, and loading a module, delay others for half as long.
const LONG_NS: u64 = 45_000_000;
const DELAYS_MADE: usize = 30;
/// The kernel's own module disables interrupts. The machine's console is an emulated serial port with an interrupt that
/// would take longer than that for a long line, so nothing is printed in between.
const DELAYS: &str = "
    whylate timerlat top --backend @BACKEND@ -c 1 --json --why 10ms -d 30 >/tmp/out &
    measuring=$!
    sleep 4
    for number in $(seq 30); do
        insmod /lib/modules/preemptirq_delay_test.ko test_mode=irq delay=50000 cpu_affinity=1
        rmmod preemptirq_delay_test
        sleep 0.3
    done
    kill -INT $measuring 2>/dev/null || true
    wait $measuring || true
    cat /tmp/out
";

fn disabler_of_interrupts_is_blamed(said: &str) -> Result<()> {
    let snapshots = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
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
    println!("{right} of {events} name who kept interrupts off");
    ensure!(events >= DELAYS_MADE * 9 / 10, "only {events} activations were late of {DELAYS_MADE}");
    ensure!(right * 100 >= events * 95, "too few are right");
    Ok(())
}

/// Checks that tests were skipped for each of these reasons, and for no other.
fn is_skipped_for(said: &str, reasons: &[&str]) -> Result<()> {
    fn reason(line: &str) -> Option<&str> {
        line.strip_prefix("skipped: ").or_else(|| line.strip_prefix("inconclusive: "))
    }
    let skipped: Vec<&str> = said.lines().filter_map(reason).collect();
    let other = skipped.iter().find(|skipped| !reasons.iter().any(|reason| skipped.contains(reason)));
    ensure!(other.is_none(), "a test was skipped: {other:?}");
    let missing = reasons.iter().find(|&reason| !skipped.iter().any(|skipped| skipped.contains(reason)));
    ensure!(missing.is_none(), "no test was skipped for this reason: {missing:?}");
    Ok(())
}
