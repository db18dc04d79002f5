// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits are named also if they started before whylate did, or in no system call.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use lock::lock_machine;
use running::whylate;

const MS_NS: u64 = 1_000_000;

/// Killed with the test.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn fifo(directory: &Path) -> Result<PathBuf> {
    let path = directory.join("answers");
    ensure!(Command::new("mkfifo").arg(&path).status()?.success(), "no pipe");
    Ok(path)
}

/// Sleeps for five seconds, as attaching may take some on a busy machine, and then answers its client.
fn server(answers: &Path) -> Result<Service> {
    let server = Command::new("sh").args(["-c", "sleep 5; echo > $0"]).arg(answers).spawn()?;
    sleep(Duration::from_millis(300));
    Ok(Service(server))
}

/// The server's wait and the wait of its waker are named and take most of the path.
fn ensure_named(path: &Value) -> Result<()> {
    let parts = path.as_array().context("no path")?;
    let sleeps = parts.iter().filter(|part| {
        let is_of = |field: &str, begins: &str| part[field].as_str().is_some_and(|report| report.starts_with(begins));
        is_of("waiter", "sleep:") && is_of("via", "clock_nanosleep")
    });
    let slept_ns: u64 = sleeps.filter_map(|part| part["ns"].as_u64()).sum();
    ensure!(slept_ns > 300 * MS_NS, "it slept for {slept_ns} ns: {path}");
    Ok(())
}

#[test]
fn command_names_wait_that_started_earlier() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let answers = fifo(directory.path())?;
    let _server = server(&answers)?;
    let output = whylate(&["run", "--json", "--", "cat"]).arg(&answers).output()?;
    let report = String::from_utf8(output.stderr)?;
    let report = report.lines().find(|line| line.starts_with('{')).context("no JSON")?;
    ensure_named(&serde_json::from_str::<Value>(report)?["path"])
}

#[test]
fn program_view_names_wait_that_started_earlier() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let answers = fifo(directory.path())?;
    let client = Service(Command::new("cat").arg(&answers).stdout(Stdio::null()).spawn()?);
    let _server = server(&answers)?;
    let output = whylate(&["-p", &client.0.id().to_string(), "-d", "6s", "--json"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let waits = report["waits"].as_array().context("no waits")?;
    let opens = waits.iter().find(|waits| waits["via"] == "openat" && waits["ended_by"] == "others");
    ensure_named(&opens.with_context(|| format!("it waits in something else: {report}"))?["path"])
}

/// Reads pages of an uncached file in random order.
const FAULTS: &str = "
import mmap, os, random, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
memory.madvise(mmap.MADV_RANDOM)
end = time.time() + 30
while time.time() < end:
    memory[random.randrange(len(memory))]";
const FILE_BYTES: usize = 200 << 20;

/// Returns the major page faults of a process.
fn major_faults(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("no fields")?.1;
    fields.split_whitespace().nth(9).and_then(|count| count.parse().ok()).context("no count")
}

#[test]
fn waits_for_pages_of_a_file_are_page_faults_for_a_disk() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let path = directory.path().join("cold");
    let mut file = File::create(&path)?;
    // Random content: some file systems store equal blocks once.
    for number in 0..FILE_BYTES / 4096 {
        file.write_all(&[number.to_le_bytes(); 512].concat())?;
    }
    file.sync_all()?;
    let program = Service(Command::new("python3").args(["-c", FAULTS]).arg(&path).spawn()?);
    sleep(Duration::from_secs(1));
    let before = major_faults(program.0.id())?;
    let output = whylate(&["-p", &program.0.id().to_string(), "-d", "2s", "--json"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let faults = major_faults(program.0.id())? - before;
    if faults < 1_000 {
        println!("skipped: the build folder is in memory, or its disk is slow: {faults} major page faults");
        return Ok(());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let waits = report["waits"].as_array().context("no waits")?;
    let ns = |waits: &Value| waits["ns"].as_u64().unwrap_or(0);
    let all_ns: u64 = waits.iter().map(ns).sum();
    let for_pages: u64 = waits.iter().filter(|waits| waits["via"] == "page fault").map(ns).sum();
    println!("{faults} faults, {for_pages} of {all_ns} ns");
    ensure!(for_pages * 10 >= all_ns * 9, "{for_pages} of {all_ns} ns are page faults: {report}");
    let parts = || waits.iter().flat_map(|waits| waits["path"].as_array().into_iter().flatten());
    let at_disk: u64 = parts().filter(|part| part["kind"] == "disk" || part["kind"] == "disk_queue").map(ns).sum();
    ensure!(at_disk * 10 >= for_pages * 8, "{at_disk} of {for_pages} ns are at a disk: {report}");
    Ok(())
}
