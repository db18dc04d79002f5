// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that are stopped for a known time, and resumed by a known thread.
#![allow(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use whylate_model::wait::Stop;

use super::*;

/// Minimum length of each stop.
const STOPPED: Duration = Duration::from_millis(20);
const ROUNDS: usize = 10;
/// Maximum time from a stop's start to when its process is seen in that state: threads wait for CPUs.
const NEAR_NS: u64 = 15_000_000;

/// A process that sleeps until it is dropped.
struct Napper(Child);

impl Napper {
    fn start() -> Result<Self> {
        let napper = Napper(Command::new("sleep").arg("100").spawn()?);
        napper.wait_for("S")?;
        Ok(napper)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until the process sleeps in one of these states.
    fn wait_for(&self, states: &str) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", self.pid()));
            let (stat, call) = (of("stat")?, of("syscall").unwrap_or_default());
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).context("a state")?;
            if states.contains(state) && !call.starts_with("running") {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "it is in state {state}, and not in {states}");
            sleep(Duration::from_millis(1));
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid() as i32).context("it has a number")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Napper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Stops and resumes a process [`ROUNDS`] times; returns each stop's start and end as this thread sees them.
fn stop_and_resume(stop: &dyn Fn() -> Result<()>, resume: &dyn Fn() -> Result<()>) -> Result<Vec<(u64, u64)>> {
    let mut stops = Vec::new();
    for _ in 0..ROUNDS {
        stop()?;
        let began_ns = monotonic_ns();
        sleep(STOPPED);
        let ended_ns = monotonic_ns();
        resume()?;
        stops.push((began_ns, ended_ns));
    }
    Ok(stops)
}

/// Compares the process's stays on CPUs with its stops.
fn ensure_stopped(what: &str, napper: u32, edges: &Edges, stops: &[(u64, u64)], stop: Stop) -> Result<()> {
    let stays = stays_of(&recorded(edges)?, napper);
    let mut wrong = Vec::new();
    for &(began_ns, ended_ns) in stops {
        // Stopped by then, and resumed after.
        let is_it = |pair: &&[CpuStay]| match (pair[0].exit, pair[1].entry) {
            (SwitchOut::Blocked(_), SwitchIn::Woken { at_ns, .. }) => pair[0].end_ns <= ended_ns && at_ns >= ended_ns,
            _ => false,
        };
        let Some([before, after]) = stays.windows(2).find(is_it) else {
            wrong.push(format!("none from {began_ns} to {ended_ns}"));
            continue;
        };
        let is_by_this = matches!(after.entry, SwitchIn::Woken { by: Waker::Thread(by), .. } if by == tid());
        let is_as_long = before.end_ns <= began_ns && began_ns - before.end_ns <= NEAR_NS;
        // Freezing a thread that sleeps does not wake it.
        let began = matches!(before.exit, SwitchOut::Blocked(Blocked { stop: Some(reported), .. }) if reported == stop);
        if after.stopped != Some(stop) || !is_by_this || !(began && is_as_long || stop == Stop::Freezer) {
            wrong.push(format!("{before:?} {after:?}"));
        }
    }
    println!("{what}: {} stops, {} are reported otherwise", stops.len(), wrong.len());
    ensure!(wrong.len() <= by_chance(stops.len(), MAX_OTHER_WAKERS), "{what}: {wrong:?}");
    // No other wait of the process is a stop.
    let reported = stays.iter().filter(|stay| stay.stopped.is_some()).count();
    ensure!(reported <= stops.len(), "{reported} stops of {}", stops.len());
    Ok(())
}

#[test]
fn signal_stop_names_process_that_continued_it() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (edges, napper) = (attach()?, Napper::start()?);
    let stops = stop_and_resume(&|| napper.signal(Signal::STOP).and_then(|()| napper.wait_for("T")), &|| {
        napper.signal(Signal::CONT).and_then(|()| napper.wait_for("S"))
    })?;
    ensure_stopped("signal", napper.pid(), &edges, &stops, Stop::Signal)
}

#[test]
fn ptrace_stop_names_tracer() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (edges, napper) = (attach()?, Napper::start()?);
    let pid = napper.pid() as i32;
    let ptrace = |request: libc::c_uint| -> Result<()> {
        // SAFETY: these requests take no address of this process's memory.
        let result = unsafe { libc::ptrace(request, pid, 0, 0) };
        ensure!(result == 0, "ptrace {request}: {}", std::io::Error::last_os_error());
        Ok(())
    };
    ptrace(libc::PTRACE_SEIZE)?;
    let stops = stop_and_resume(&|| ptrace(libc::PTRACE_INTERRUPT).and_then(|()| napper.wait_for("t")), &|| {
        ptrace(libc::PTRACE_CONT).and_then(|()| napper.wait_for("S"))
    })?;
    ensure_stopped("tracer", napper.pid(), &edges, &stops, Stop::Tracer)
}

/// A mounted hierarchy of cgroups of version 2, and a cgroup in it with a process; both are removed on drop.
struct Frozen {
    root: tempfile::TempDir,
    cgroup: PathBuf,
}

impl Frozen {
    fn make(pid: u32) -> Result<Self> {
        let root = tempfile::tempdir()?;
        mount("whylate-test", root.path(), "cgroup2", MountFlags::empty(), None)
            .context("cgroups cannot be mounted")?;
        let cgroup = root.path().join(format!("whylate-stopped-{}", std::process::id()));
        let frozen = Frozen { root, cgroup };
        fs::create_dir(&frozen.cgroup)?;
        fs::write(frozen.cgroup.join("cgroup.procs"), pid.to_string())?;
        Ok(frozen)
    }

    fn freeze(&self, is_frozen: bool) -> Result<()> {
        fs::write(self.cgroup.join("cgroup.freeze"), if is_frozen { "1" } else { "0" })?;
        let said = format!("frozen {}", u8::from(is_frozen));
        let deadline = Instant::now() + Duration::from_secs(10);
        while !fs::read_to_string(self.cgroup.join("cgroup.events"))?.contains(&said) {
            ensure!(Instant::now() < deadline, "it is not {said}");
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = self.freeze(false);
        let root_procs = self.root.path().join("cgroup.procs");
        for pid in fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&root_procs, pid);
        }
        let _ = fs::remove_dir(&self.cgroup);
        let _ = unmount(self.root.path(), UnmountFlags::DETACH);
    }
}

#[test]
fn cgroup_freeze_names_process_that_thawed_it() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (edges, napper) = (attach()?, Napper::start()?);
    let frozen = Frozen::make(napper.pid())?;
    let stops = stop_and_resume(&|| frozen.freeze(true), &|| frozen.freeze(false).and_then(|()| napper.wait_for("S")))?;
    ensure_stopped("cgroup.freeze", napper.pid(), &edges, &stops, Stop::Freezer)
}

const NAPS: &str = "WHYLATE_NAPS";

/// Runs in the process of the test below: a thread naps for 5 ms at a time.
#[test]
fn naps_process() {
    if std::env::var_os(NAPS).is_none() {
        return;
    }
    let naps = thread::Builder::new().name("napper".to_owned()).spawn(|| {
        loop {
            sleep(Duration::from_millis(5));
        }
    });
    naps.expect("a thread").join().expect("it does not end");
}

/// The freezer of version 1 changes the state of a sleeping thread without waking it: a sleep that expires while frozen
/// ends with the thread that thaws it.
#[test]
fn sleep_expired_while_frozen_ends_with_thaw() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let root = tempfile::tempdir()?;
    let freezer = c"freezer";
    if let Err(error) = mount("whylate-test", root.path(), "cgroup", MountFlags::empty(), freezer) {
        println!("skipped: this kernel has no freezer of cgroups of version 1 ({error})");
        return Ok(());
    }
    let cgroup = root.path().join(format!("whylate-stopped-{}", std::process::id()));
    fs::create_dir(&cgroup)?;
    let outcome = frozen_asleep(&cgroup);
    let _ = fs::write(cgroup.join("freezer.state"), "THAWED");
    fs::remove_dir(&cgroup)?;
    unmount(root.path(), UnmountFlags::DETACH)?;
    outcome
}

fn frozen_asleep(cgroup: &Path) -> Result<()> {
    let edges = attach()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "stopped::naps_process", "--test-threads=1"]).env(NAPS, "1");
    let process = Napper(command.stdout(std::process::Stdio::null()).spawn()?);
    let napper = thread_of(process.pid(), "napper")?;
    fs::write(cgroup.join("cgroup.procs"), process.pid().to_string())?;
    let freeze = |state: &str| -> Result<()> {
        fs::write(cgroup.join("freezer.state"), state)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while fs::read_to_string(cgroup.join("freezer.state"))?.trim() != state {
            ensure!(Instant::now() < deadline, "it is not {state}");
            sleep(Duration::from_millis(1));
        }
        Ok(())
    };
    let outcome = stop_and_resume(&|| freeze("FROZEN"), &|| freeze("THAWED"))
        .and_then(|stops| ensure_stopped("freezer.state", napper, &edges, &stops, Stop::Freezer));
    let pid = process.pid();
    // A frozen process cannot be killed.
    fs::write(cgroup.join("freezer.state"), "THAWED")?;
    drop(process);
    // The cgroup is empty only once the process has left it.
    let deadline = Instant::now() + Duration::from_secs(10);
    while fs::read_to_string(cgroup.join("cgroup.procs"))?.lines().any(|line| line == pid.to_string()) {
        ensure!(Instant::now() < deadline, "it has not left");
        sleep(Duration::from_millis(1));
    }
    outcome
}

/// Waits for the process's thread of that name, and returns its TID.
fn thread_of(pid: u32, name: &str) -> Result<u32> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
            let comm = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            if comm.trim_end() == name {
                return Ok(task.file_name().to_string_lossy().parse()?);
            }
        }
        ensure!(Instant::now() < deadline, "there is no thread {name}");
        sleep(Duration::from_millis(1));
    }
}
