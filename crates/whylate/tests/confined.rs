// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate` in restricted environments: in a bare root directory, and in a cgroup.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "running/quota.rs"]
mod quota;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use lock::lock_machine;
use quota::Quota;
use tempfile::TempDir;
use whylate_model::Snapshot;

/// A process outside, killed on drop.
struct Sleeping(Child);

impl Sleeping {
    fn start() -> Result<Self> {
        Ok(Sleeping(Command::new("/bin/sleep").arg("1000").stdin(Stdio::null()).spawn()?))
    }
}

impl Drop for Sleeping {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory with the program and its shared libraries only: no users, no symbols, no shell.
fn root() -> Result<TempDir> {
    let root = tempfile::tempdir()?;
    let program = Path::new(env!("CARGO_BIN_EXE_whylate"));
    fs::copy(program, root.path().join("whylate"))?;
    let needed = Command::new("ldd").arg(program).output()?;
    let needed = String::from_utf8(needed.stdout)?;
    for file in needed.split_whitespace().filter(|word| word.starts_with('/')) {
        let copy = root.path().join(file.trim_start_matches('/'));
        fs::create_dir_all(copy.parent().context("it is in no directory")?)?;
        fs::copy(file, copy)?;
    }
    for directory in ["proc", "sys", "dev"] {
        fs::create_dir(root.path().join(directory))?;
    }
    Ok(root)
}

/// Returns the output of a script in which `$IN` is that directory; its mounts vanish with it.
fn with_root(root: &Path, unshare: &[&str], script: &str) -> Result<Output> {
    let script = format!("set -e; mount --rbind /sys $IN/sys; mount --rbind /dev $IN/dev; {script}");
    let mut command = Command::new("unshare");
    command.arg("-m").args(unshare).args(["sh", "-c", &script]).env("IN", root).stdin(Stdio::null());
    Ok(command.output()?)
}

fn snapshot_of(output: &Output) -> Result<Snapshot> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).with_context(|| format!("no snapshot: {}: {stderr}", output.status))
}

#[test]
fn symbolizes_outside_code_from_a_chroot() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (root, sleeping) = (root()?, Sleeping::start()?);
    let pid = sleeping.0.id().to_string();
    let script = format!("mount --rbind /proc $IN/proc; exec chroot $IN /whylate offcpu -p {pid} -d 1s --json");
    let output = with_root(root.path(), &[], &script)?;
    let snapshot = snapshot_of(&output)?;
    println!("{:?}, lost {:?}", snapshot.stacks, snapshot.lost);
    // PIDs are the host's, as in a container with --pid=host.
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(!stderr.contains("PID namespace"), "it tells of one: {stderr}");
    ensure!(snapshot.pid_namespace.is_none() && !snapshot.stacks.is_empty(), "it was not found");
    for stack in &snapshot.stacks {
        ensure!(stack.labels["process"] == "sleep" && stack.labels["pid"] == pid, "{:?}", stack.labels);
        ensure!(stack.user.iter().any(|frame| frame.contains("nanosleep")), "{:?}", stack.user);
    }
    Ok(())
}

#[test]
fn chroot_in_pid_namespace_shows_inner_pids() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let (root, _sleeping) = (root()?, Sleeping::start()?);
    let script = "mount -t proc proc $IN/proc; sleep 1000 & chroot $IN /whylate offcpu -d 1s --json";
    let output = with_root(root.path(), &["-pf", "--kill-child"], script)?;
    ensure!(String::from_utf8_lossy(&output.stderr).contains("in a PID namespace"), "it does not say so");
    let snapshot = snapshot_of(&output)?;
    let of_sleep: Vec<_> = snapshot.stacks.iter().filter(|stack| stack.labels["process"] == "sleep").collect();
    println!("{of_sleep:?}, lost {:?}", snapshot.lost);
    // One PID is of the host, where PIDs are large.
    let is_small = |number: &str| number.parse::<u32>().is_ok_and(|number| number < 100);
    ensure!(of_sleep.len() == 1 && is_small(&of_sleep[0].labels["pid"]), "{of_sleep:?}");
    ensure!(of_sleep.iter().all(|stack| stack.user.iter().any(|frame| frame.contains("nanosleep"))), "{of_sleep:?}");
    Ok(())
}

/// Missing privileges are not the cause.
#[test]
fn names_cgroup_without_real_time_budget() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(cgroup) = Quota::make("real-time")? else { return Ok(()) };
    if cgroup.of_real_time().is_none() {
        println!("skipped: real-time threads have their time in every cgroup here");
        return Ok(());
    }
    let said = |arguments: &str| -> Result<(Option<i32>, String)> {
        let script = format!("{}; exec {} {arguments}", cgroup.enter(), env!("CARGO_BIN_EXE_whylate"));
        let output = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output()?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    for command in ["timerlat top -d 100ms", "inject hog --times 1 --for 1ms"] {
        let (status, text) = said(command)?;
        ensure!(status == Some(3) && text.contains("cpu.rt_runtime_us"), "{command}: {status:?}: {text}");
        ensure!(!text.contains("CAP_SYS_NICE"), "{command}: {text}");
    }
    Ok(())
}
