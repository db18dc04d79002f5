// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate offcpu` with files that change: a program replaced in place, and a frozen file system.

#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
#[allow(dead_code)]
mod lock;
#[path = "../../whylate-sources/tests/support/fixtures/loop_disk.rs"]
#[allow(dead_code)]
mod loop_disk;
mod running;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lock::lock_machine;
use loop_disk::Loop;
use running::{Running, whylate};
use rustix::process::Signal;
use serde_json::Value;

/// A program with sleeping functions named after its release; the later release has more functions before them.
const PROGRAM: &str = r#"
#include <time.h>
#define NAMED_(a, b) a##b
#define NAMED(a, b) NAMED_(a, b)
#ifdef LATER
__attribute__((noinline)) int added(int x) { for (int i = 0; i < x; i++) x += x * 3 ^ i; return x; }
__attribute__((noinline)) int also_added(int x) { for (int i = 0; i < x; i++) x ^= x * 7 + i; return x; }
#endif
__attribute__((noinline)) void NAMED(NAME, _sleep)(void) {
    struct timespec time = { 0, 20000000 };
    nanosleep(&time, 0);
    __asm__ volatile("" ::: "memory");
}
__attribute__((noinline)) void NAMED(NAME, _loop)(void) { for (;;) NAMED(NAME, _sleep)(); }
int main(int n, char **words) {
#ifdef LATER
    if (n > 5) return added(n) + also_added(n);
#endif
    NAMED(NAME, _loop)();
}
"#;

/// How long each release runs.
const RELEASE_RUNS: Duration = Duration::from_millis(1_200);

/// `cp` writes a release into the file of the former one, which keeps its inode.
#[test]
fn redeployed_program_has_names_of_each_release() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name);
    fs::write(at("program.c"), PROGRAM)?;
    for (name, later) in [("alpha", None), ("bravo", Some("-DLATER"))] {
        let mut compile = Command::new("gcc");
        compile.arg("-O1").arg(format!("-DNAME={name}")).args(later).arg("-o").arg(at(name)).arg(at("program.c"));
        ensure!(compile.status()?.success(), "gcc cannot compile {name}");
    }
    let folded = at("x.folded");
    let file = folded.to_str().context("a name in UTF-8")?;
    let mut measuring = Running::start(&["offcpu", "--comm", "deployed", "-o", file])?;
    measuring.wait_until_it_measures()?;
    let (mut inodes, mut ran) = (Vec::new(), Vec::new());
    for name in ["alpha", "bravo"] {
        ensure!(Command::new("cp").arg(at(name)).arg(at("deployed")).status()?.success(), "cp cannot copy {name}");
        inodes.push(fs::metadata(at("deployed"))?.ino());
        let started = Instant::now();
        let mut release = Command::new(at("deployed")).spawn()?;
        sleep(RELEASE_RUNS);
        release.kill()?;
        release.wait()?;
        ran.push(started.elapsed());
    }
    ensure!(inodes[0] == inodes[1], "the later release has a file of its own");
    measuring.signal(Signal::INT)?;
    let (status, stderr) = measuring.end()?;
    ensure!(status.success(), "{status}: {stderr}");
    let stacks = fs::read_to_string(&folded)?;
    for (name, ran) in ["alpha", "bravo"].into_iter().zip(ran) {
        let frames = format!("{name}_loop;{name}_sleep");
        let of_release = stacks.lines().filter(|line| line.contains(&frames));
        let us: u64 = of_release.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum();
        // Both start and end while it is measured.
        let ran_us = ran.as_micros() as u64;
        ensure!(us <= ran_us && us * 2 >= ran_us, "{name} slept for {us} us of {ran_us}:\n{stacks}");
    }
    Ok(())
}

/// A mounted file system, thawed and unmounted on drop.
struct FileSystem {
    directory: tempfile::TempDir,
    _disk: Loop,
}

impl FileSystem {
    fn make() -> Result<Option<Self>> {
        let Some(disk) = Loop::make(16)? else { return Ok(None) };
        if !Command::new("mkfs.ext4").arg("-q").arg(disk.path()).status().is_ok_and(|status| status.success()) {
            println!("skipped: there is no mkfs.ext4");
            return Ok(None);
        }
        let directory = tempfile::tempdir()?;
        let mounted = Command::new("mount").arg(disk.path()).arg(directory.path()).status()?;
        ensure!(mounted.success(), "cannot mount a loop device");
        Ok(Some(FileSystem { directory, _disk: disk }))
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Runs fsfreeze(8) on the mount point: `-f` freezes, `-u` thaws.
    fn fsfreeze(&self, option: &str) -> Result<()> {
        let status = Command::new("fsfreeze").arg(option).arg(self.path()).stderr(Stdio::null()).status()?;
        ensure!(status.success(), "fsfreeze {option} fails");
        Ok(())
    }

    /// Starts a program that writes a new file.
    fn write(&self, name: &str) -> Result<std::process::Child> {
        let file = format!("of={}", self.path().join(name).display());
        Ok(Command::new("dd").args(["if=/dev/zero", &file, "bs=4096", "count=1", "status=none"]).spawn()?)
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = self.fsfreeze("-u");
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

fn blocked_writers() -> Result<String> {
    let output = whylate(&["offcpu", "--blocked", "200ms", "--comm", "dd"]).output()?;
    Ok(String::from_utf8(output.stdout)?)
}

/// A writer sleeps in D state without a disk request in flight, until a thread thaws the file system.
#[test]
fn frozen_file_system_and_thawing_thread_are_named() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(files) = FileSystem::make()? else { return Ok(()) };
    let mut measuring = Running::start(&["offcpu", "--comm", "dd", "--why", "300ms", "--json"])?;
    measuring.wait_until_it_measures()?;
    for name in ["a", "b", "c"] {
        files.fsfreeze("-f")?;
        let mut writer = files.write(name)?;
        sleep(Duration::from_millis(600));
        let blocked = if name == "a" { Some(blocked_writers()?) } else { None };
        files.fsfreeze("-u")?;
        ensure!(writer.wait()?.success(), "the writer fails");
        let Some(blocked) = blocked else { continue };
        ensure!(blocked.contains("dd:") && blocked.contains("a file system that is frozen"), "{blocked}");
        ensure!(!blocked.contains("held by") && !blocked.contains("in flight"), "a cause is made up: {blocked}");
    }
    measuring.signal(Signal::INT)?;
    let mut json = String::new();
    std::io::Read::read_to_string(&mut measuring.stdout()?, &mut json)?;
    let (status, stderr) = measuring.end()?;
    ensure!(status.success(), "{status}: {stderr}");
    let snapshots = json.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let late: Vec<Value> = snapshots.flat_map(|of| of["late"].as_array().cloned().unwrap_or_default()).collect();
    let late = late.last().with_context(|| format!("no wait of more than 300 ms: {json}"))?;
    let path = late["path"].as_array().context("it has no path")?;
    let ns = |is_it: &dyn Fn(&Value) -> bool| -> u64 {
        path.iter().filter(|part| is_it(part)).filter_map(|part| part["ns"].as_u64()).sum()
    };
    let latency_ns = late["latency_ns"].as_u64().context("it has no length")?;
    ensure!(ns(&|_| true) == latency_ns && latency_ns >= 500_000_000, "{path:?} of {latency_ns} ns");
    ensure!(path.iter().any(|part| part.to_string().contains("fsfreeze")), "{path:?}");
    let of_disks = ns(&|part| part["kind"].as_str().is_some_and(|kind| kind.starts_with("disk")));
    ensure!(of_disks * 20 <= latency_ns, "{of_disks} ns for a disk: {path:?}");
    Ok(())
}
