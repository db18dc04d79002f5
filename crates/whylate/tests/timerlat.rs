// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate timerlat`: each option that changes what is measured, shown or done. They need root.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::collections::BTreeSet;
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use whylate_model::{Series, Snapshot};

use lock::{lock_machine, share_machine};
use running::{Running, whylate};

/// A threshold that every activation exceeds.
const ALWAYS: &str = "1";
/// Number of concurrent command lines.
const LANES: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

fn timerlat(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(&[&["timerlat"], arguments].concat()).output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the standard output of a run that succeeds.
fn shown(arguments: &[&str]) -> Result<String> {
    let output = timerlat(arguments)?;
    ensure!(output.status.success(), "{arguments:?}: {}, {}", output.status, text(&output.stderr));
    Ok(text(&output.stdout))
}

/// Returns the standard output of a run that a threshold ends.
fn hit(arguments: &[&str]) -> Result<String> {
    let output = timerlat(arguments)?;
    ensure!(output.status.code() == Some(2), "{arguments:?}: {}, {}", output.status, text(&output.stderr));
    Ok(text(&output.stdout))
}

/// Returns the exit status and the one line on standard error.
fn refused(arguments: &[&str]) -> Result<(i32, String)> {
    let output = timerlat(arguments)?;
    let stderr = text(&output.stderr);
    ensure!(output.stdout.is_empty(), "{arguments:?} printed {}", text(&output.stdout));
    ensure!(stderr.lines().count() == 1, "{arguments:?}: {stderr}");
    Ok((output.status.code().context("it was killed")?, stderr))
}

fn snapshots(json: &str) -> Result<Vec<Snapshot>> {
    json.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn counts(series: &Series) -> u64 {
    series.histograms["user"].count() + series.values["missed"] as u64
}

#[test]
fn rejects_unavailable_features_in_one_line() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let mut cases: Vec<(&[&str], i32, &str)> = vec![
        (&["-c", "4095", "-d", "1"], 1, "CPU 4095 is not online"),
        (&["-C=no/such/group", "-d", "1"], 1, "cgroup"),
        (&["-C=../etc", "-d", "1"], 1, "cgroup"),
        (&["-k", "--backend", "bpf", "-d", "1"], 1, "leave --backend bpf out"),
        (&["--backend", "magic", "-d", "1"], 1, "no backend is named magic"),
        (
            &["--bpf-action", "action.o", "-T", "1"],
            1,
            "--bpf-action is not supported: run a command with --on-threshold",
        ),
    ];
    let tracers = fs::read_to_string("/sys/kernel/tracing/available_tracers").unwrap_or_default();
    if !tracers.split_whitespace().any(|tracer| tracer == "timerlat") {
        let message = "tracer timerlat is not in this kernel";
        cases.extend([
            (&["-U", "-d", "1"][..], 3, message),
            (&["-k", "-d", "1"], 3, message),
            (&["-e", "sched:sched_switch", "-t", "-d", "1"], 3, message),
            (&["--backend", "tracer", "-d", "1"], 3, message),
        ]);
    }
    for (arguments, status, message) in cases {
        let (found, line) = refused(arguments)?;
        ensure!((found, line.contains(message)) == (status, true), "{arguments:?}: {found}, {line}");
    }
    // Status 2 would mean a threshold.
    ensure!(timerlat(&["-p", "5"])?.status.code() == Some(1), "a period that is too short has another status");
    Ok(())
}

#[test]
fn counts_activations_missed_while_stopped() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let mut running = Running::start(&["timerlat", "hist", "--json", "-d", "4"])?;
    running.wait_until_it_measures()?;
    thread::sleep(Duration::from_millis(500));
    let stopping = Instant::now();
    running.signal(Signal::STOP)?;
    let stopped = Instant::now();
    thread::sleep(Duration::from_secs(1));
    let at_least_ms = stopped.elapsed().as_secs_f64() * 1e3;
    running.signal(Signal::CONT)?;
    let stopped_ms = stopping.elapsed().as_secs_f64() * 1e3;
    let mut out = String::new();
    std::io::Read::read_to_string(&mut running.stdout()?, &mut out)?;
    ensure!(running.end()?.0.success(), "{out}");
    for series in &snapshots(&out)?.first().context("nothing was printed")?.series {
        let missed = series.values["missed"];
        ensure!(missed >= at_least_ms - 10.0, "{missed} missed in {at_least_ms} ms");
        // The missed activations are late by 1 ms, 2 ms and so on, to the length of the stop: a hundredth of all
        // activations is later than the p99.
        let corrected = &series.histograms["thread_corrected"];
        let expected_ns = (stopped_ms - corrected.count() as f64 / 100.0) * 1e6;
        let corrected_ns = corrected.quantile_ns(0.99) as f64;
        ensure!((corrected_ns / expected_ns - 1.0).abs() <= 0.05, "corrected p99: {corrected_ns} of {expected_ns}");
        // No interrupt was late: the thread did not run.
        let irq_ns = series.histograms["irq"].max_ns();
        ensure!(irq_ns < 500_000_000, "an interrupt is said to be {irq_ns} ns late");
    }
    Ok(())
}

#[test]
fn threshold_ends_it_with_an_explanation() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let trace = directory.path().join("trace.txt");
    let to_trace = format!("-t={}", trace.display());
    let auto = hit(&["-a", ALWAYS, "-c", "0", "-q", &to_trace, "--dump-tasks"])?;
    let wanted =
        ["CPU COUNT", "hit stop tracing", "## CPU 0 hit stop tracing", "IRQ handler delay:", "Thread latency:"];
    for line in wanted.into_iter().chain(["Printing CPU tasks:", "Saving trace to", "Blocking thread stacktrace"]) {
        ensure!(auto.contains(line), "no {line}: {auto}");
    }
    ensure!(fs::metadata(&trace)?.permissions().mode() & 0o777 == 0o600, "others may read the trace");
    ensure!(fs::read_to_string(&trace)?.contains("WHO HAD THE CPU"), "nothing is in the trace");

    let last = |text: &str| text.lines().last().unwrap_or_default().to_owned();
    let thread = hit(&["-T", ALWAYS, "-c", "0", "-q"])?;
    ensure!(last(&thread).starts_with("LATE: 1us reached on CPU 0: "), "{thread}");
    ensure!(thread.contains("## CPU 0") && !thread.contains("stacktrace") && !thread.contains("CPU tasks"), "{thread}");
    let irq = hit(&["-i", ALWAYS, "-c", "0", "-q", "--no-aa"])?;
    ensure!(irq.contains("hit stop tracing") && !irq.contains("##"), "{irq}");
    let only = hit(&["--aa-only", ALWAYS, "-c", "0"])?;
    ensure!(only.contains("## CPU 0") && !only.contains("CPU COUNT"), "{only}");
    // No activation is that late.
    let ok = shown(&["-T", "100s", "-c", "0", "-d", "1", "-q"])?;
    ensure!(last(&ok).starts_with("ok: none of ") && last(&ok).contains(" on 1 CPU reached 100s; worst "), "{ok}");
    for bare in [&["hist", "--no-summary"][..], &["top", "-q", "--json"]] {
        let text = shown(&[bare, &["-T", "100s", "-c", "0", "-d", "1"]].concat())?;
        ensure!(!last(&text).starts_with("ok: "), "{text}");
    }
    let never = shown(&["--aa-only", "100s", "-c", "0", "-d", "1"])?;
    ensure!(never.trim_start().starts_with("Max latency was "), "{never}");
    Ok(())
}

#[test]
fn performs_actions() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name);
    let touch = |name: &str| format!("shell,command=touch {}", path(name).display());
    hit(&["-T", ALWAYS, "-q", "--on-threshold", &touch("hit"), "--on-end", &touch("end")])?;
    ensure!(path("hit").exists() && path("end").exists(), "an action was not performed");
    let saves = format!("trace,file={}", path("trace").display());
    let on = shown(&["-T", ALWAYS, "-q", "-d", "1", "--on-threshold", &saves, "--on-threshold", "continue"])?;
    ensure!(on.matches("hit stop tracing").count() > 1 && path("trace").exists(), "{on}");
    Ok(())
}

/// Parses a saved trace: CPU and expiry of the timer, in microseconds within its second.
fn recorded(trace: &str) -> Vec<(u32, u64)> {
    let lines = trace.lines().skip_while(|line| !line.starts_with("# The latest ")).skip(2);
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let us = words.next()?.split_once('.')?.1.trim_end_matches('Z').parse().ok()?;
        Some((words.next()?.parse().ok()?, us))
    };
    lines.filter_map(line).collect()
}

/// Runs an rtla command line, which must print a line with this start. Returns the trace, if it saves one.
fn taken(arguments: &[&str], status: i32, begins: &str) -> Result<String> {
    let directory = tempfile::tempdir()?;
    let program = whylate(&[]).get_program().to_owned();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(program).arg("timerlat").args(arguments);
    let output = command.current_dir(directory.path()).output()?;
    let text = text(&output.stdout);
    ensure!(output.status.code() == Some(status), "{arguments:?}: {}: {text}", output.status);
    ensure!(text.lines().any(|line| line.starts_with(begins)), "{arguments:?}: no line begins so: {text}");
    let Some(name) = begins.strip_prefix("  Saving trace to ") else { return Ok(String::new()) };
    let trace = fs::read_to_string(directory.path().join(name))?;
    ensure!(!recorded(&trace).is_empty(), "{arguments:?}: {trace}");
    Ok(trace)
}

#[test]
fn accepts_command_lines_of_rtla() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let hit = "whylate timerlat hit stop tracing";
    let (usual, own) = ("  Saving trace to timerlat_trace.txt", "  Saving trace to custom_filename.txt");
    let (end, fails) = ("shell,command=echo TestOutput", "shell,command=echo -n 1; false");
    let [one, two, never] = ["shell,command=echo -n 1", "shell,command=echo 2", "shell,command=echo -n 2"];
    let (at, on) = ("--on-threshold", ["--on-threshold", "continue"]);
    let cases: [(&[&str], i32, &str); 20] = [
        (&["--help"], 0, "Usage: "),
        (&["top", "-s", "1", "-T", "1", "-t"], 2, usual),
        (&["top", "-P", "F:1", "-c", "0", "-d", "1s", "-q"], 0, "CPU COUNT"),
        (&["top", "-i", "1", "-c", "0", "-n", "-d", "10s"], 2, hit),
        (&["top", "-a", "1", "--dump-tasks"], 2, "Printing CPU tasks:"),
        (&["top", "--aa-only", "1"], 2, "## CPU "),
        (&["top", "-s", "1", "-T", "1", "-t", "--no-aa"], 2, usual),
        (&["hist", "-c", "0", "-d", "1s"], 0, "Index   IRQ-000"),
        (&["hist", "-i", "1", "-c", "0", "-n", "-d", "10s"], 2, "# Time unit is nanoseconds (ns)"),
        (&["hist", "-T", "1", "-t"], 2, usual),
        (&["hist", "-T", "1", "-t", "custom_filename.txt"], 2, own),
        (&["hist", "-T", "1", at, "trace"], 2, usual),
        (&["hist", "-T", "1", at, "trace,file=custom_filename.txt"], 2, own),
        (&["hist", "-T", "1", at, end], 2, "TestOutput"),
        (&["hist", "-T", "1", at, one, at, two], 2, "12"),
        (&["hist", "-T", "1", at, fails, at, never], 2, "1# RTLA timerlat histogram"),
        // rtla continues this line with the last values.
        (&["top", "-T", "1", at, fails, at, never], 2, "1      "),
        (&["hist", "-T", "1", "-d", "500ms", at, end, on[0], on[1]], 0, "TestOutput"),
        (&["top", "-q", "-T", "1", "-d", "500ms", at, end, on[0], on[1]], 0, "TestOutput"),
        (&["hist", "-d", "500ms", "--on-end", "trace"], 0, usual),
    ];
    // In parallel: most of the time is waiting.
    let cases = &cases;
    thread::scope(|scope| {
        let of_lane = |lane| cases.iter().skip(lane).step_by(LANES);
        let lanes = [0, 1, 2].map(|lane| {
            scope.spawn(move || of_lane(lane).try_for_each(|(of, status, begins)| taken(of, *status, begins).map(drop)))
        });
        lanes.into_iter().try_for_each(|lane| lane.join().unwrap_or_else(|_| bail!("a lane panics")))
    })?;
    // Threads that are woken in step.
    let activations = recorded(&taken(&["top", "-A", "200", "-d", "1s", "--on-end", "trace"], 0, usual)?);
    let cpus: BTreeSet<u32> = activations.iter().map(|&(cpu, _)| cpu).collect();
    let place = |cpu| cpus.range(..cpu).count() as u64;
    let apart_us: BTreeSet<u64> =
        activations.iter().map(|&(cpu, us)| (us + 1_000_000 - 200 * place(cpu)) % 1_000).collect();
    // Truncated to microseconds, one time may appear as two.
    ensure!(apart_us.len() <= 2 && activations.len() > 200, "not in step: {apart_us:?}");
    Ok(())
}

#[test]
fn applies_period_unit_and_warm_up() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let json = shown(&["top", "-q", "--json", "-d", "2", "-p", "10ms", "--warm-up", "1", "-c", "0"])?;
    let all = snapshots(&json)?;
    ensure!(all.len() == 1 && all[0].series.len() == 1, "{json}");
    let periods = counts(&all[0].series[0]);
    let due = all[0].duration_ns / 10_000_000;
    ensure!(periods.abs_diff(due) <= 5, "{periods} of {due} periods of 10 ms");
    ensure!((1_900..2_500).contains(&(all[0].duration_ns / 1_000_000)), "{} ns", all[0].duration_ns);
    let nano = shown(&["top", "-q", "-n", "-d", "1", "--percentiles"])?;
    ensure!(nano.contains("IRQ Timer Latency (ns)") && nano.contains("p99.9999"), "{nano}");
    Ok(())
}

#[test]
fn json_has_a_line_per_second_with_causes_that_add_up() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let all = snapshots(&shown(&["top", "--json", "-d", "3", "-c", "0", "--why", "5us"])?)?;
    // A busy machine may merge two lines into one.
    let measured_ns: u64 = all.iter().map(|snapshot| snapshot.duration_ns).sum();
    ensure!(all.len() >= 2 && measured_ns >= 2_900_000_000, "{} lines, {measured_ns} ns", all.len());
    let late: Vec<_> = all.iter().flat_map(|snapshot| &snapshot.late).collect();
    ensure!(!late.is_empty(), "nothing was late by 5 us");
    for event in late {
        ensure!(event.causes.iter().map(|cause| cause.ns).sum::<u64>() == event.latency_ns, "{event:?}");
        ensure!(event.phases.iter().map(|phase| phase.1).sum::<u64>() == event.latency_ns, "{event:?}");
        ensure!(event.latency_ns >= 5_000 && event.evidence.is_none(), "{event:?}");
    }
    let worst = snapshots(&shown(&["top", "-q", "--json", "-d", "2", "--worst", "3"])?)?;
    ensure!(worst[0].late.len() == 3, "{} worst", worst[0].late.len());
    Ok(())
}

#[test]
fn text_has_no_escape_codes_off_a_terminal() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let views: [(&[&str], &str, RangeInclusive<usize>); 5] = [
        (&["top", "-d", "3", "-c", "0"], "Timer Latency  ", 2..=usize::MAX),
        (&["hist", "--live", "-d", "3", "-c", "0"], "# RTLA timerlat histogram", 2..=usize::MAX),
        (&["top", "-d", "3", "-c", "0", "--worst", "2"], "The worst:", 2..=usize::MAX),
        (&["top", "-d", "1", "-c", "0", "--why", "5us"], "Timer Latency  ", 1..=1),
        // A histogram is printed at the end.
        (&["hist", "-d", "2", "-c", "0"], "# RTLA", 1..=1),
    ];
    let outs = thread::scope(|scope| {
        let shown = views.clone().map(|(arguments, ..)| scope.spawn(|| shown(arguments)));
        shown.map(|out| out.join().unwrap_or_else(|_| bail!("a view panics")))
    });
    for (out, (arguments, head, times)) in outs.into_iter().zip(views) {
        let out = out?;
        ensure!(!out.contains('\x1b'), "{out:?}");
        ensure!(times.contains(&out.matches(head).count()), "not refreshed as often as {times:?}: {out}");
        if arguments.contains(&"--why") {
            ensure!(out.starts_with("TIME ") && out.contains('%'), "{out}");
        }
    }
    Ok(())
}

/// State of a running program before it is stopped.
fn while_running<T>(arguments: &[&str], look: impl FnOnce(u32) -> Result<T>) -> Result<T> {
    let mut running = Running::start(&[&["timerlat", "-q"], arguments].concat())?;
    let began = Instant::now();
    while measured_threads(running.pid())?.is_empty() {
        ensure!(began.elapsed() < TIMEOUT && running.is_alive()?, "{arguments:?}: nothing is measured");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(Duration::from_millis(300));
    let seen = look(running.pid());
    running.signal(Signal::INT)?;
    let mut out = String::new();
    std::io::Read::read_to_string(&mut running.stdout()?, &mut out)?;
    let (status, stderr) = running.end()?;
    ensure!(status.success() && out.contains("CPU COUNT"), "{arguments:?}: {status}, {out}, {stderr}");
    seen
}

/// Returns the measured threads with scheduling priority and policy from `/proc`.
fn measured_threads(pid: u32) -> Result<Vec<(String, String, String)>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        let name = stat.split(['(', ')']).nth(1).unwrap_or_default().to_owned();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        if name.starts_with("timerlat/") {
            // Fields 40 and 41 of proc_pid_stat(5); the first one after the name is field 3.
            threads.push((name, fields[37].to_owned(), fields[38].to_owned()));
        }
    }
    threads.sort();
    Ok(threads)
}

#[test]
fn threads_have_requested_cpus_and_policy() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    // Policy 1 is SCHED_FIFO, 2 SCHED_RR, 0 SCHED_OTHER.
    for (arguments, priority, policy) in [(&[][..], "95", "1"), (&["-P", "r:7"], "7", "2"), (&["-P", "o:5"], "0", "0")]
    {
        let threads = while_running(&[&["-c", "0"], arguments].concat(), measured_threads)?;
        ensure!(threads == [("timerlat/0".to_owned(), priority.to_owned(), policy.to_owned())], "{threads:?}");
    }
    let deadline = timerlat(&["-P", "d:200us:1ms", "-q", "-d", "1"])?;
    ensure!(deadline.status.success() || text(&deadline.stderr).contains("deadline"), "{deadline:?}");
    let other = snapshots(&shown(&["-P", "o:0", "-q", "--json", "-d", "1"])?)?;
    ensure!(other[0].total("thread").count() >= 500, "timers of normal threads are not seen: {:?}", other[0].lost);
    let allowed = |pid: u32| -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        Ok(line.context("no list of CPUs")?.trim().to_owned())
    };
    ensure!(while_running(&["-H", "0"], allowed)? == "0", "house keeping is elsewhere");
    ensure!(while_running(&["-c", "0"], allowed)? != "0", "house keeping is on the measured CPU");
    Ok(())
}

#[test]
fn applies_idle_states_and_cgroups() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let files = |pid: u32| -> Result<Vec<PathBuf>> {
        fs::read_dir(format!("/proc/{pid}/fd"))?.map(|entry| Ok(fs::read_link(entry?.path())?)).collect()
    };
    let device = PathBuf::from("/dev/cpu_dma_latency");
    if device.exists() {
        ensure!(while_running(&["--dma-latency", "0"], files)?.contains(&device), "no latency is asked for");
    } else {
        ensure!(refused(&["--dma-latency", "0", "-d", "1"])?.1.contains("--dma-latency"), "it is not told");
    }
    ensure!(!while_running(&[], files)?.contains(&device), "a latency is asked for");

    let group = PathBuf::from("/sys/fs/cgroup").join(format!("whylate-test-{}", std::process::id()));
    if fs::metadata("/sys/fs/cgroup/cgroup.procs").is_err() || fs::create_dir(&group).is_err() {
        println!("skipped: no cgroup of version 2 can be made here");
        return Ok(());
    }
    let name = group.file_name().context("a name")?.to_string_lossy().into_owned();
    let of = |pid: u32| Ok(fs::read_to_string(format!("/proc/{pid}/cgroup"))?);
    let found = while_running(&[&format!("-C={name}")], of);
    fs::remove_dir(&group)?;
    let found = found?;
    ensure!(found.trim().ends_with(&name), "{found}");
    ensure!(while_running(&["-C"], of).is_ok(), "its own cgroup is refused");
    Ok(())
}

#[test]
fn debug_option_logs_steps() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let output = timerlat(&["-D", "-q", "-d", "1", "-p", "2000"])?;
    ensure!(text(&output.stderr).contains("backend bpf") && text(&output.stderr).contains("2000000"), "{output:?}");
    ensure!(timerlat(&["-q", "-d", "1"])?.stderr.is_empty(), "it says too much");
    Ok(())
}
