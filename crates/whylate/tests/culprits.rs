// SPDX-License-Identifier: MIT OR Apache-2.0
//! A culprit has one name in every view.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;
use rustix::process::Signal;
use serde_json::Value;
use whylate_model::overview::Overview;

use lock::lock_machine;
use running::{Running, whylate};

/// The waiter for the lock waits until its holder's sleep is over.
const HOLDERS: &str = "for i in 1 2 3 4 5 6; do flock $0 sleep 0.3 & sleep 0.05; flock $0 true; wait; done";

fn printed(arguments: &[&str]) -> Result<String> {
    let output = whylate(arguments).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn holders(lock: &Path) -> Result<Child> {
    Ok(Command::new("sh").args(["-c", HOLDERS]).arg(lock).spawn()?)
}

/// Names of culprits that are threads called `sleep`; no other culprit may be an unnamed timer.
fn sleepers<'a>(all: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Vec<String>> {
    let timers: Vec<&str> = all.filter(|(kind, _)| *kind == "timer").map(|(_, who)| who).collect();
    ensure!(!timers.contains(&"timer"), "a culprit has no name: {timers:?}");
    Ok(timers.into_iter().filter(|who| who.starts_with("sleep:")).map(str::to_owned).collect())
}

#[test]
fn sleeping_lock_holder_is_culprit_in_each_view() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let (recording, page) = (path("a.whylate"), path("a.html"));
    let mut looking = Running::start(&["-d", "1m", "-o", &recording])?;
    looking.wait_until_it_measures()?;
    holders(&directory.path().join("lock"))?.wait()?;
    looking.signal(Signal::INT)?;
    let (status, stderr) = looking.end()?;
    ensure!(status.success(), "{stderr}");
    let look: Overview = serde_json::from_str(&printed(&["replay", &recording, "--json"])?)?;
    let culprits: Vec<_> = look.culprits.iter().map(|culprit| (culprit.kind.name(), culprit.who.to_string())).collect();
    let who = sleepers(culprits.iter().map(|(kind, who)| (*kind, who.as_str())))?;
    let longest = who.first().with_context(|| format!("no sleeper is among {:?}", look.culprits))?;
    let text = printed(&["replay", &recording, "--rank-by", "culprit"])?;
    // On a busy machine other threads may have delayed more.
    let is_told = text.lines().any(|line| line.contains(&format!("  {longest} sleeping: ")));
    ensure!(is_told || culprits.iter().take(8).all(|(_, who)| who != longest), "{text}");
    printed(&["report", &recording, "-o", &page])?;
    let page = fs::read_to_string(page)?;
    let bare = ["due to timer", "<li>timer: ", "<td>timer</td><td>timer<"].into_iter().find(|bare| page.contains(bare));
    ensure!(page.contains(&format!("{longest} sleeping")) && bare.is_none(), "the report has {bare:?}");
    let csv = path("csv");
    printed(&["export", &recording, "--csv", &csv])?;
    let causes = fs::read_to_string(Path::new(&csv).join("causes.csv"))?;
    ensure!(causes.contains(longest.as_str()) && !causes.contains(",timer,timer,"), "{causes}");
    Ok(())
}

/// The parent of a vfork(2) sleeps uninterruptibly until its child executes a program; the child first opens a FIFO
/// that has no writer.
const VFORK: &str = "import os, sys
os.posix_spawn('/bin/true', ['true'], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])";

/// A process whose only thread is in uninterruptible sleep; released on drop.
struct Uninterruptible {
    process: Child,
    pipe: PathBuf,
}

impl Uninterruptible {
    fn start(directory: &Path) -> Result<Self> {
        let pipe = directory.join("pipe");
        ensure!(Command::new("mkfifo").arg(&pipe).status()?.success(), "no pipe");
        let process = Command::new("python3").args(["-c", VFORK]).arg(&pipe).spawn()?;
        let sleeper = Uninterruptible { process, pipe };
        let stat = format!("/proc/{}/stat", sleeper.process.id());
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fs::read_to_string(&stat)?.contains(") D ") {
            ensure!(Instant::now() < deadline, "it does not fall asleep");
            sleep(Duration::from_millis(10));
        }
        Ok(sleeper)
    }
}

impl Drop for Uninterruptible {
    fn drop(&mut self) {
        // Unblocks the child.
        let _ = OpenOptions::new().write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&self.pipe);
        let _ = self.process.wait();
    }
}

#[test]
fn names_thread_in_uninterruptible_sleep() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let sleeper = Uninterruptible::start(directory.path())?;
    let who = format!("python3:{}", sleeper.process.id());
    sleep(Duration::from_secs(1));
    let recording = directory.path().join("a.whylate").to_string_lossy().into_owned();
    let text = printed(&["-d", "1s", "-o", &recording])?;
    let row = text.lines().find(|line| line.contains("D state: age at the end")).context("no row")?;
    ensure!(row.starts_with("offcpu ") && row.contains(" LATE "), "{text}");
    let worst = text.lines().find(|line| line.contains("still in D state")).context("it is not named")?;
    ensure!(worst.contains(&format!(" {who}")) && text.contains("\n  whylate offcpu --blocked 1s\n"), "{text}");
    let look: Overview = serde_json::from_str(&printed(&["replay", &recording, "--json"])?)?;
    let offcpu = look.sources.iter().find(|source| source.source == "offcpu").context("no offcpu")?;
    ensure!(offcpu.late_figures >= 1 && offcpu.sleepers.iter().any(|of| of.who == who), "{:?}", offcpu.sleepers);
    // The command that the overview suggests.
    for command in [&["offcpu", "--blocked", "1s"][..], &["replay", &recording, "offcpu", "--blocked", "1s"]] {
        let blocked = printed(command)?;
        let first = blocked.lines().skip_while(|line| !line.starts_with("S  CLASS")).nth(1).context("no rows")?;
        ensure!(first.starts_with("D ") && !blocked.contains("  idle by design  "), "{blocked}");
        let number = sleeper.process.id().to_string();
        let is_it = |line: &str| line.starts_with("D ") && line.split_whitespace().any(|word| word == number);
        ensure!(blocked.lines().any(is_it), "{blocked}");
    }
    Ok(())
}

#[test]
fn late_events_have_the_overviews_culprits() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let mut looking = Running::start(&["offcpu", "--why", "100ms", "--worst", "1000", "--json", "-d", "1m"])?;
    let output = looking.stdout()?;
    looking.wait_until_it_measures()?;
    holders(&directory.path().join("lock"))?.wait()?;
    looking.signal(Signal::INT)?;
    let snapshot: Value = serde_json::from_reader(output)?;
    let late = snapshot["late"].as_array().context("nothing is late")?;
    let causes = late.iter().flat_map(|event| event["causes"].as_array().into_iter().flatten());
    let who = sleepers(causes.filter_map(|cause| Some((cause["kind"].as_str()?, cause["who"].as_str()?))))?;
    ensure!(!who.is_empty(), "{late:?}");
    Ok(())
}
