// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory stalls of a program in a cgroup at its memory limit, compared with the kernel's delay accounting.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "running/memory_limit.rs"]
mod memory_limit;
mod running;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use chance::{Unjudged, in_rounds};
use lock::lock_machine;
use memory_limit::MemoryLimit;
use running::whylate;
use serde::Deserialize;
use whylate_model::reclaim::{Reclaim, ReclaimKind};

/// The victim takes 8 MB at a time.
const LIMIT_BYTES: u64 = 48 << 20;
const ACCOUNTING: &str = "/proc/sys/kernel/task_delayacct";
/// Minimum stall that is compared.
const MIN_STALL_NS: u64 = 10_000_000;
/// Minimum number of charges that fail, of both programs. Each one has a thread reclaim.
const MIN_FAILED: u64 = 5_000;

#[derive(Debug, Deserialize)]
struct Report {
    #[serde(default)]
    reclaim: Vec<Reclaim>,
    /// Of a command.
    #[serde(default)]
    weaker: Vec<String>,
    #[serde(default)]
    elapsed_ns: u64,
    /// Of a program.
    limitation: Option<String>,
    #[serde(default)]
    on_cpu_ns: u64,
    #[serde(default)]
    total_ns: u64,
}

/// Delay accounting of threads that start from now on, as it was before when dropped.
struct Accounting(String);

impl Accounting {
    /// Returns `None` and prints why if the kernel has none.
    fn on() -> Result<Option<Self>> {
        let Ok(before) = fs::read_to_string(ACCOUNTING) else {
            println!("skipped: this kernel has no delay accounting");
            return Ok(None);
        };
        fs::write(ACCOUNTING, "1")?;
        Ok(Some(Accounting(before)))
    }
}

impl Drop for Accounting {
    fn drop(&mut self) {
        let _ = fs::write(ACCOUNTING, &self.0);
    }
}

/// A process that is killed on drop.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn in_cgroup(cgroup: &MemoryLimit, program: &Path, arguments: &[&str]) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{}; exec \"$0\" \"$@\"", cgroup.enter())]).arg(program).args(arguments);
    shell
}

/// Compiles the program under two names.
fn compiled(directory: &Path) -> Result<[PathBuf; 2]> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/memory_stalls/victim.c");
    let programs = ["victim", "filler"].map(|name| directory.join(name));
    for program in &programs {
        let status = Command::new("gcc").args(["-O2", "-o"]).arg(program).arg(&source).status()?;
        ensure!(status.success(), "gcc cannot compile it");
    }
    Ok(programs)
}

/// Writes a file that does not fit into the cgroup.
fn file_in(directory: &Path) -> Result<String> {
    let path = directory.join("file");
    let mut file = File::create(&path)?;
    for _ in 0..3 * (LIMIT_BYTES >> 20) {
        file.write_all(&[1; 1 << 20])?;
    }
    Ok(path.to_str().context("not text")?.to_owned())
}

/// Returns the sum for the cgroup. The process that reads the file takes pages all the time.
fn of_cgroup<'a>(report: &'a Report, cgroup: &MemoryLimit, filler: &Started) -> Result<&'a Reclaim> {
    ensure!(report.weaker.is_empty() && report.limitation.is_none(), "{:?}, {:?}", report.weaker, report.limitation);
    let found = report.reclaim.iter().find(|sum| sum.kind == ReclaimKind::Cgroup).context("nothing was reclaimed")?;
    ensure!(found.cgroup.as_deref() == Some(&*cgroup.path()), "{found:?}");
    ensure!((1..=found.ns).contains(&found.on_cpu_ns) && found.latency.count() > 0, "{found:?}");
    let filler = format!("filler:{}", filler.0.id());
    ensure!(found.reclaimers.iter().any(|reclaimer| reclaimer.who == filler), "{filler}: {found:?}");
    Ok(found)
}

#[test]
fn stalls_of_a_full_cgroup_are_those_of_delay_accounting() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(_accounting) = Accounting::on()? else { return Ok(()) };
    let Some(cgroup) = MemoryLimit::make("stalls", LIMIT_BYTES)? else { return Ok(()) };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let [victim, filler] = compiled(directory.path())?;
    let filler = Started(in_cgroup(&cgroup, &filler, &["120", &file_in(directory.path())?]).spawn()?);
    in_rounds(|| {
        let mut command = whylate(&["run", "--json", "--"]);
        let shell = in_cgroup(&cgroup, &victim, &["2"]);
        let output = command.arg(shell.get_program()).args(shell.get_args()).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{stderr}");
        let stall_ns: u64 = String::from_utf8(output.stdout)?.trim().parse()?;
        let report: Report = serde_json::from_str(stderr.lines().last().context("no report")?)?;
        if stall_ns < MIN_STALL_NS {
            return Err(Unjudged(format!("it was delayed for {stall_ns} ns only")).into());
        }
        let found = of_cgroup(&report, &cgroup, &filler)?;
        println!("{} ns of {} ns in {} ns", found.ns, stall_ns, report.elapsed_ns);
        ensure!(found.ns.abs_diff(stall_ns) * 10 <= stall_ns, "{} ns, not {stall_ns} ns", found.ns);
        ensure!(found.ns <= report.elapsed_ns, "{} ns of {} ns", found.ns, report.elapsed_ns);
        Ok(())
    })
}

/// Returns how often a charge has failed for the cgroup's limit so far.
fn failed_charges(cgroup: &MemoryLimit) -> Result<u64> {
    if let Ok(count) = fs::read_to_string(cgroup.file("memory.failcnt")) {
        return Ok(count.trim().parse()?);
    }
    let events = fs::read_to_string(cgroup.file("memory.events"))?;
    let count = events.lines().find_map(|line| line.strip_prefix("max ")).context("no count")?;
    Ok(count.trim().parse()?)
}

#[test]
fn stalls_are_part_of_a_running_programs_time() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(cgroup) = MemoryLimit::make("part", LIMIT_BYTES)? else { return Ok(()) };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let [victim, filler] = compiled(directory.path())?;
    let filler = Started(in_cgroup(&cgroup, &filler, &["120", &file_in(directory.path())?]).spawn()?);
    let victim = Started(in_cgroup(&cgroup, &victim, &["120"]).stdout(Stdio::null()).spawn()?);
    in_rounds(|| {
        let before = failed_charges(&cgroup)?;
        let output = whylate(&["-p", &victim.0.id().to_string(), "-d", "2s", "--json"]).output()?;
        let failed = failed_charges(&cgroup)? - before;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Report = serde_json::from_slice(&output.stdout)?;
        if failed < MIN_FAILED {
            return Err(Unjudged(format!("{failed} charges failed")).into());
        }
        let found = of_cgroup(&report, &cgroup, &filler)?;
        let on_cpu_ns: u64 = report.reclaim.iter().map(|sum| sum.on_cpu_ns).sum();
        ensure!(found.ns <= report.total_ns && on_cpu_ns <= report.on_cpu_ns, "{report:?}");
        Ok(())
    })
}
