// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu` beside processes whose memory and files do not respond.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/fixtures/unresponsive_fuse.rs"]
mod unresponsive_fuse;

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lock::lock_machine;
use running::Running;
use rustix::process::Signal;
use unresponsive_fuse::{Kind, LENGTH, SLEEPER, SilentFiles, Unanswering};
use whylate_model::Snapshot;

const TRIES: u64 = 3;

/// Entry point of the child process, no test.
#[test]
fn unanswering_process() -> Result<()> {
    unresponsive_fuse::run_if_asked()
}

/// A process, killed on drop.
struct Sleeping(Child);

impl Sleeping {
    fn start(program: &std::path::Path) -> Result<Self> {
        Ok(Sleeping(Command::new(program).arg("1000").stdin(Stdio::null()).spawn()?))
    }
}

impl Drop for Sleeping {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// Its files are dropped last, which unblocks the processes that wait for them.
struct Silence {
    processes: Vec<Unanswering>,
    program: Sleeping,
    files: SilentFiles,
}

fn silence() -> Result<Option<Silence>> {
    let program = fs::read("/bin/sleep")?;
    let files = BTreeMap::from([("memory".to_owned(), vec![0; LENGTH]), ("program".to_owned(), program)]);
    let Some(files) = SilentFiles::mount(files)? else {
        println!("skipped: this machine does not let FUSE be mounted");
        return Ok(None);
    };
    let memory = files.path("memory");
    let mut processes = vec![Unanswering::start(&memory, Kind::Stack)?, Unanswering::start(&memory, Kind::Memory)?];
    let mut program = Sleeping::start(&files.path("program"))?;
    sleep(Duration::from_millis(500));
    ensure!(program.0.try_wait()?.is_none(), "a program in these files does not run: {:?}", program.0.try_wait()?);
    files.be_silent();
    processes[1].hold()?;
    Ok(Some(Silence { processes, program, files }))
}

/// Returns standard error; a program that does not exit is released before the test fails.
fn end(mut running: Running, silence: Silence) -> Result<String> {
    let ended = running.end();
    drop(silence.files);
    let (status, stderr) = ended?;
    ensure!(status.success(), "{status}: {stderr}");
    Ok(stderr)
}

#[test]
fn skips_unresponsive_memory_and_files() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(silence) = silence()? else { return Ok(()) };
    let answering = Sleeping::start("/bin/sleep".as_ref())?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("x.json");
    let name = file.to_str().context("a name in UTF-8")?;
    let running = Running::start(&["offcpu", "-d", "1s", "--backend", "sample", "--by", "thread", "-o", name])?;
    let pids: Vec<String> = silence.processes.iter().map(|process| process.pid().to_string()).collect();
    let program = silence.program.0.id().to_string();
    let stderr = end(running, silence)?;
    let snapshot: Snapshot = serde_json::from_slice(&fs::read(&file)?)?;
    ensure!(snapshot.lost["unread"] > 0 && snapshot.lost["unread_files"] > 0, "{:?}; {stderr}", snapshot.lost);
    let of = |pid: &str, thread: &str| {
        let is_it = |stack: &&whylate_model::Stack| {
            stack.labels.get("pid").is_some_and(|own| own == pid) && stack.labels["thread"] == thread
        };
        snapshot.stacks.iter().find(is_it).with_context(|| format!("{thread} of {pid} is missing"))
    };
    for pid in &pids {
        let stack = of(pid, SLEEPER)?;
        ensure!(stack.weight_ns > 500_000_000, "{stack:?}");
        ensure!(stack.user.last().is_some_and(|frame| frame == "[memory did not answer]"), "{stack:?}");
    }
    // Its time counts even without its stack.
    ensure!(of(&program, "program")?.weight_ns > 500_000_000);
    let whole = of(&answering.0.id().to_string(), "sleep")?;
    ensure!(whole.user.iter().any(|frame| frame.contains("nanosleep")), "{whole:?}");
    Ok(())
}

/// Returns the time from the signal to the exit, after measuring for a while. BPF programs are loaded before that, as
/// loading some of them cannot be interrupted.
fn ends_in(arguments: &[&str], measuring: Duration) -> Result<Option<Duration>> {
    let Some(silence) = silence()? else { return Ok(None) };
    let mut running = Running::start(arguments)?;
    running.wait_until_it_measures()?;
    sleep(measuring);
    let began = Instant::now();
    running.signal(Signal::INT)?;
    end(running, silence)?;
    Ok(Some(began.elapsed()))
}

#[test]
fn signal_ends_it_despite_unresponsive_process() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for arguments in [&["offcpu", "--backend", "sample"][..], &["offcpu", "--why", "5ms"], &[]] {
        // On a busy machine whylate is slow with or without the signal.
        for number in 1..=TRIES {
            let Some(took) = ends_in(arguments, Duration::from_secs(number))? else { return Ok(()) };
            println!("whylate {} ends {:.2} s after the signal", arguments.join(" "), took.as_secs_f64());
            if took < Duration::from_secs(1) {
                break;
            }
            ensure!(number < TRIES, "whylate {} does not end within a second of a signal", arguments.join(" "));
        }
    }
    Ok(())
}
