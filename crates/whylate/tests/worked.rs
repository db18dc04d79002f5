// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions in which programs work, compared with the CPU time that the program itself measures for each of them.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use chance::{Unjudged, by_chance, in_rounds};
use lock::lock_machine;
use running::whylate;
use serde::Deserialize;
use tempfile::TempDir;
use whylate_model::work::{Work, WorkKind, WorkPart};

/// CPU time of the program, in milliseconds: at least a hundred samples.
const TOTAL_MS: &str = "2500";
/// Minimum number of samples that are judged.
const MIN_SAMPLES: u64 = 50;
/// Share of samples beside the function that runs: reads of the clock, and interrupts.
const BESIDE: f64 = 0.02;

#[derive(Debug, Deserialize)]
struct Report {
    /// Time to which the parts of the flame graph add up: of a command, and of a program.
    elapsed_ns: Option<u64>,
    total_ns: Option<u64>,
    on_cpu_ns: Option<u64>,
    work: Option<Work>,
    limitation: Option<String>,
    #[serde(default)]
    weaker: Vec<String>,
}

impl Report {
    /// Compares the sum of the flame graph with the time, and the part below "on CPU" with the program's time on CPUs.
    /// Each line is rounded to a microsecond.
    fn assert_sums(&self, folded: &str) -> Result<()> {
        let sum = |is_counted: &dyn Fn(&str) -> bool| -> Result<u64> {
            let lines = folded.lines().filter(|line| is_counted(line));
            lines.map(|line| Ok(line.rsplit_once(' ').context("a number")?.1.parse::<u64>()?)).sum()
        };
        let error_us = folded.lines().count() as u64;
        let all_ns = self.elapsed_ns.or(self.total_ns).context("no time")?;
        let all = [(sum(&|_| true)?, Some(all_ns)), (sum(&|line| line.starts_with("on CPU"))?, self.on_cpu_ns)];
        for (sum_us, ns) in all.into_iter().filter_map(|(sum_us, ns)| Some((sum_us, ns?))) {
            assert!(sum_us.abs_diff(ns / 1000) <= error_us, "{sum_us} us are not {ns} ns: {folded}");
        }
        Ok(())
    }

    fn work(self) -> Result<Work> {
        self.work.with_context(|| format!("no samples: {:?} {:?}", self.limitation, self.weaker))
    }
}

/// Compiles a C program under a name.
fn compiled(directory: &TempDir, source: &str, name: &str, options: &[&str]) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/worked").join(source);
    let program = directory.path().join(name);
    let status = Command::new("gcc").args(options).arg("-o").arg(&program).arg(source).status()?;
    ensure!(status.success(), "gcc cannot compile {name}");
    Ok(program)
}

/// Parses what the program prints: the CPU time of each part, in nanoseconds.
fn times(printed: &str) -> Result<BTreeMap<&str, f64>> {
    let mut ns: BTreeMap<&str, f64> = BTreeMap::new();
    for line in printed.lines() {
        let (name, time) = line.split_once(' ').context("a name and a time")?;
        *ns.entry(name).or_default() += time.parse::<f64>()?;
    }
    Ok(ns)
}

fn is_part(part: &WorkPart, name: &str) -> bool {
    let kind = if name == "read" { WorkKind::Syscall } else { WorkKind::User };
    let (name, is_caller) = name.strip_prefix("called by ").map_or((name, false), |name| (name, true));
    part.kind == kind && part.name.as_deref() == Some(name) && part.is_caller == is_caller
}

/// Compares the estimated time of each function with its CPU time. A sample hits a function with the probability of its
/// share, so the number of samples, each of an equal part of the time, may be off by chance in one of 10,000 runs. The
/// sum is no estimate.
fn ensure_times(work: &Work, times: &BTreeMap<&str, f64>) -> Result<()> {
    if work.equal_samples < MIN_SAMPLES {
        return Err(Unjudged(format!("{} samples: others had the CPUs", work.equal_samples)).into());
    }
    let samples = usize::try_from(work.equal_samples)?;
    let total_ns: f64 = times.values().sum();
    // The rest are interrupts on one side, and the start of programs on the other.
    ensure!((work.ns as f64 - total_ns).abs() < 0.05 * total_ns, "{} ns of work, not {total_ns}: {work:?}", work.ns);
    let ns_of_sample = total_ns / samples as f64;
    for (name, &known_ns) in times {
        let ns: u64 = work.parts.iter().filter(|part| is_part(part, name)).map(|part| part.ns).sum();
        let share = known_ns / total_ns;
        let most_ns = by_chance(samples, share + BESIDE) as f64 * ns_of_sample;
        let least_ns = total_ns - by_chance(samples, 1.0 - share + BESIDE) as f64 * ns_of_sample;
        let half_ns = 0.5 * ns_of_sample;
        let range = least_ns - half_ns..=most_ns + half_ns;
        ensure!(range.contains(&(ns as f64)), "{name}: {ns} ns, not {known_ns} ({range:?}): {work:?}");
    }
    Ok(())
}

/// Runs a command, and returns its report and what the program printed.
fn reported(mut command: Command) -> Result<(Report, String)> {
    let output = command.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{stderr}");
    let report = serde_json::from_str(stderr.lines().last().context("no report")?)?;
    Ok((report, String::from_utf8(output.stdout)?))
}

#[test]
fn functions_of_a_command_have_their_shares() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    // Without frame pointers, as programs are built by default.
    let program = compiled(&directory, "program.c", "worker", &["-O2", "-fomit-frame-pointer"])?;
    let folded = directory.path().join("path.folded");
    in_rounds(|| {
        let mut command = whylate(&["run", "--json", "-o"]);
        // A grandchild of whylate.
        command
            .arg(&folded)
            .args(["--", "nice", "-n", "-20", "sh", "-c", "\"$0\" \"$1\"; true"])
            .arg(&program)
            .arg(TOTAL_MS);
        let (report, printed) = reported(command)?;
        let folded = fs::read_to_string(&folded)?;
        report.assert_sums(&folded)?;
        ensure_times(&report.work()?, &times(&printed)?)?;
        // Callers are found in a running thread's stack as well.
        for callers in
            ["worker worked;_start;", ";main;repeat;alpha ", ";main;repeat;beta ", ";main;repeat;gamma_reads;"]
        {
            ensure!(folded.contains(callers), "no {callers}: {folded}");
        }
        Ok(())
    })
}

/// In a stripped program, a function that is not exported has the name of its caller, not that of the function beside
/// it.
#[test]
fn function_without_a_name_has_that_of_its_caller() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let program = compiled(&directory, "program.c", "worker", &["-O2", "-DMAYBE_STATIC=static", "-rdynamic", "-s"])?;
    in_rounds(|| {
        let mut command = whylate(&["run", "--json", "--", "nice", "-n", "-20"]);
        command.arg(&program).arg(TOTAL_MS);
        let (report, printed) = reported(command)?;
        let mut times = times(&printed)?;
        let of_alpha = times.remove("alpha").context("no alpha")?;
        times.insert("called by repeat", of_alpha);
        ensure_times(&report.work()?, &times)
    })
}

/// A process that executes another program keeps its PID: its earlier samples have no names of the other program.
#[test]
fn executed_programs_are_not_mixed_up() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    // At the same addresses each time.
    let options = ["-O2", "-no-pie", "-fno-toplevel-reorder"];
    let first = compiled(&directory, "executes.c", "first", &options)?;
    let second = compiled(&directory, "executes.c", "second", &[&options[..], &["-DOUTER_FIRST"]].concat())?;
    let path = directory.path().join("path.folded");
    in_rounds(|| {
        let mut command = whylate(&["run", "-o"]);
        command.arg(&path).arg("--").arg(&first).arg("2000").arg(&second);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let folded = fs::read_to_string(&path)?;
        for line in folded.lines() {
            let (stack, _) = line.rsplit_once(' ').context("a number")?;
            let frames: Vec<&str> = stack.split(';').collect();
            for pair in frames.windows(2) {
                let caller = match pair[1] {
                    "outer" => "main",
                    "inner" => "outer",
                    _ => continue,
                };
                assert_eq!(pair[0], caller, "did not call {}: {line}", pair[1]);
            }
        }
        if folded.contains(";main;outer ") && folded.contains(";main;outer;inner ") {
            return Ok(());
        }
        Err(Unjudged(format!("no process was read before it executed the next program: {folded}")).into())
    })
}

struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn functions_of_a_running_process_have_their_shares() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let program = compiled(&directory, "program.c", "worker", &["-O2", "-fno-omit-frame-pointer"])?;
    let mut worker = Command::new("nice");
    worker.args(["-n", "-20"]).arg(&program).args(["3", "again"]).stdout(Stdio::null());
    let worker = Worker(worker.spawn()?);
    // Its parts are short beside the measured time, and so are even.
    let shares = [("alpha", 0.5), ("beta", 0.3), ("read", 0.2)];
    let pid = worker.0.id().to_string();
    for program in [["-p", &pid], ["--comm", "worker"]] {
        in_rounds(|| {
            let folded = directory.path().join("time.folded");
            let mut command = whylate(&[&program[..], &["-d", "3s", "--json", "-o"]].concat());
            let output = command.arg(&folded).output()?;
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let report = serde_json::from_slice::<Report>(&output.stdout)?;
            report.assert_sums(&fs::read_to_string(&folded)?)?;
            // It is on a CPU nearly all of the time: another test compares that with the kernel's figure.
            let on_cpu_ns = report.on_cpu_ns.context("no time on a CPU")?;
            let times = shares.map(|(name, share)| (name, share * on_cpu_ns as f64)).into();
            ensure_times(&report.work()?, &times)
        })?;
    }
    Ok(())
}

/// Sums the CPU times that programs print, each a line with `read` at its end.
fn cpu_times(printed: &str) -> Result<Vec<f64>> {
    let mut times = vec![0.0];
    for line in printed.lines() {
        let (name, time) = line.split_once(' ').context("a name and a time")?;
        *times.last_mut().context("a time")? += time.parse::<f64>()?;
        if name == "read" {
            times.push(0.0);
        }
    }
    times.pop();
    Ok(times)
}

/// Shares of one thread's functions are not those of another one, which was on a CPU without a timer.
#[test]
fn work_on_a_cpu_that_is_left_out_is_not_sampled() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    if thread::available_parallelism()?.get() < 2 {
        println!("skipped: this needs two CPUs");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let program = compiled(&directory, "program.c", "worker", &["-O2"])?;
    in_rounds(|| {
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]).arg(whylate(&[]).get_program()).args(["run", "--json", "--", "nice", "-n", "-20"]);
        let both = "taskset -c 0 \"$0\" 1500; taskset -c 1 \"$0\" 1500";
        command.args(["sh", "-c", both]).arg(&program);
        let (report, printed) = reported(command)?;
        let weaker = report.weaker.join(" ");
        // With more than two CPUs, the others are left out, too.
        let is_left_out = weaker.contains("CPU 1 ") || weaker.contains("CPUs 1");
        ensure!(is_left_out && weaker.contains("affinity"), "{weaker}");
        let times = cpu_times(&printed)?;
        let &[on_0, on_1] = times.as_slice() else { anyhow::bail!("not two times: {printed}") };
        let work = report.work()?;
        if work.equal_samples < MIN_SAMPLES {
            return Err(Unjudged(format!("{} samples: others had the CPUs", work.equal_samples)).into());
        }
        let is_not_sampled = |part: &&WorkPart| part.kind == WorkKind::NotSampled;
        let not_sampled_ns: u64 = work.parts.iter().filter(is_not_sampled).map(|part| part.ns).sum();
        assert_eq!(not_sampled_ns, work.not_sampled_ns, "{work:?}");
        // The rest are interrupts on one side, and the shell and taskset on the other.
        for (seen, known) in [(work.not_sampled_ns, on_1), (work.ns - work.not_sampled_ns, on_0)] {
            ensure!((seen as f64 - known).abs() < 0.1 * known, "{seen} ns, not {known}: {work:?}");
        }
        Ok(())
    })
}
