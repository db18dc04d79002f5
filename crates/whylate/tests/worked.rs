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
const MIN_SAMPLES: usize = 50;
/// Share of samples beside the function that runs: reads of the clock, and interrupts.
const BESIDE: f64 = 0.02;

#[derive(Debug, Deserialize)]
struct Report {
    work: Option<Work>,
    limitation: Option<String>,
    #[serde(default)]
    weaker: Vec<String>,
}

impl Report {
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

/// Parses what the program prints: the share of the CPU time that each part took.
fn shares(printed: &str) -> Result<BTreeMap<&str, f64>> {
    let mut ns: BTreeMap<&str, f64> = BTreeMap::new();
    for line in printed.lines() {
        let (name, time) = line.split_once(' ').context("a name and a time")?;
        *ns.entry(name).or_default() += time.parse::<f64>()?;
    }
    let total: f64 = ns.values().sum();
    Ok(ns.into_iter().map(|(name, ns)| (name, ns / total)).collect())
}

fn is_part(part: &WorkPart, name: &str) -> bool {
    let kind = if name == "read" { WorkKind::Syscall } else { WorkKind::User };
    part.kind == kind && part.name.as_deref() == Some(name)
}

/// Compares the samples in each function with its share of the CPU time: each may be off by chance in one of 10,000 runs.
fn ensure_shares(work: &Work, shares: &BTreeMap<&str, f64>) -> Result<()> {
    let samples = usize::try_from(work.samples)?;
    for (name, share) in shares {
        let count: u64 = work.parts.iter().filter(|part| is_part(part, name)).map(|part| part.samples).sum();
        let count = usize::try_from(count)?;
        let (at_most, missing) = (by_chance(samples, share + BESIDE), by_chance(samples, 1.0 - share + BESIDE));
        ensure!(count <= at_most && samples - count <= missing, "{name}: {count} of {samples}, not {share}: {work:?}");
    }
    Ok(())
}

#[test]
fn functions_of_a_command_have_their_shares() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    // Without frame pointers, as programs are built by default.
    let program = compiled(&directory, "program.c", "worker", &["-O2", "-fomit-frame-pointer"])?;
    let folded = directory.path().join("path.folded");
    let mut command = whylate(&["run", "--json", "-o"]);
    // A grandchild of whylate.
    command
        .arg(&folded)
        .args(["--", "nice", "-n", "-20", "sh", "-c", "\"$0\" \"$1\"; true"])
        .arg(&program)
        .arg(TOTAL_MS);
    let output = command.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{stderr}");
    let report: Report = serde_json::from_str(stderr.lines().last().context("no report")?)?;
    let printed = String::from_utf8(output.stdout)?;
    let work = report.work()?;
    ensure!(work.samples >= MIN_SAMPLES as u64, "{work:?}");
    ensure_shares(&work, &shares(&printed)?)?;
    // Callers are found in a running thread's stack as well.
    let folded = fs::read_to_string(folded)?;
    for callers in ["worker worked;_start;", ";main;repeat;alpha ", ";main;repeat;beta ", ";main;repeat;gamma_reads;"] {
        ensure!(folded.contains(callers), "no {callers}: {folded}");
    }
    Ok(())
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
    let shares = [("alpha", 0.5), ("beta", 0.3), ("read", 0.2)].into();
    in_rounds(|| {
        let output = whylate(&["-p", &worker.0.id().to_string(), "-d", "3s", "--json"]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let work = serde_json::from_slice::<Report>(&output.stdout)?.work()?;
        if work.samples < MIN_SAMPLES as u64 {
            return Err(Unjudged(format!("{} samples: others had the CPUs", work.samples)).into());
        }
        ensure_shares(&work, &shares)
    })
}
