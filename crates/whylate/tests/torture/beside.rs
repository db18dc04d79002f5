// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each command beside threads and cgroups that come and go.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::COMMANDS;
use crate::exercise::{Exercise, is_whole, part};
use crate::lock::lock_machine;

/// Minimum rate of threads per second.
const MIN_THREADS_PER_S: f64 = 5_000.0;

/// Runs the commands while threads call `disturb` repeatedly. Returns the calls per second.
pub fn beside(
    exercise: &mut Exercise,
    commands: &[&[&str]],
    threads: usize,
    disturb: impl Fn(u64) + Sync,
) -> Result<f64> {
    let (stop, rounds, began) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    disturb(rounds.fetch_add(1, Ordering::Relaxed));
                }
            });
        }
        let ended = commands.iter().try_for_each(|command| exercise.run(command, ""));
        stop.store(true, Ordering::Relaxed);
        ended
    })?;
    Ok(rounds.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64())
}

/// Starts one thread that exits at once.
pub fn short_lived_thread() {
    let _ = thread::Builder::new().stack_size(16 << 10).spawn(|| ()).map(thread::JoinHandle::join);
}

#[test]
fn survives_thread_churn() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Exercise::skipped("births", "no source measures here") };
    let mut exercise = Exercise::begin("births")?;
    let parents = 2 * thread::available_parallelism()?.get();
    let rate = beside(&mut exercise, part(&COMMANDS, 1), parents, |_| short_lived_thread())?;
    exercise.note(format!("{rate:.0} births and deaths a second"));
    // In `make test` other programs may use the machine.
    if is_whole() && rate < MIN_THREADS_PER_S {
        if std::env::var_os("WHYLATE_EMULATED").is_some() {
            println!("skipped: an emulated CPU makes {rate:.0} threads a second");
        } else {
            exercise.wrong(&format!("{rate:.0} births a second, of {MIN_THREADS_PER_S}"));
        }
    }
    exercise.end()
}

/// Directory in which a controller's cgroups can be created.
fn hierarchy(controller: &str) -> Option<&'static str> {
    let directories: &[&str] = match controller {
        "cpu" => &["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"],
        _ => &["/sys/fs/cgroup/pids", "/sys/fs/cgroup"],
    };
    directories.iter().copied().find(|directory| Path::new(directory).join("cgroup.procs").exists())
}

#[test]
fn removed_cgroups_are_named_or_unknown() -> Result<()> {
    const NAME: &str = "cgroups";
    let Some(_lock) = lock_machine() else { return Exercise::skipped(NAME, "no source measures here") };
    let Some(directory) = hierarchy("cpu") else { return Exercise::skipped(NAME, "no cgroup can be made here") };
    let mut exercise = Exercise::begin(NAME)?;
    let made = format!("{directory}/whylate-torture-{}", std::process::id());
    let rate = beside(&mut exercise, part(&COMMANDS, 1), 1, |_| {
        let _ = fs::create_dir(&made);
        let mut enter = Command::new("sh");
        enter.args(["-c", &format!("echo $$ >{made}/cgroup.procs; :")]);
        let in_it = enter.stderr(Stdio::null()).status();
        sleep(Duration::from_millis(if in_it.is_ok() { 1 } else { 100 }));
        let _ = fs::remove_dir(&made);
    })?;
    let _ = fs::remove_dir(&made);
    exercise.note(format!("{rate:.0} made and removed a second"));
    exercise.end()
}

#[test]
fn survives_fork_bomb_in_cgroup() -> Result<()> {
    const NAME: &str = "fork bomb";
    if !is_whole() {
        return Exercise::skipped(NAME, "only make torture does it");
    }
    let Some(_lock) = lock_machine() else { return Exercise::skipped(NAME, "no source measures here") };
    let Some(directory) = hierarchy("pids") else { return Exercise::skipped(NAME, "processes cannot be limited here") };
    let mut exercise = Exercise::begin(NAME)?;
    let made = format!("{directory}/whylate-bomb-{}", std::process::id());
    fs::create_dir(&made)?;
    let bomb = fs::write(format!("{made}/pids.max"), "60").map_err(anyhow::Error::from).and_then(|()| {
        // A shell whose fork fails exits, so the next bomb follows it; the process that starts them is not limited. A
        // bomb that cannot enter its cgroup does not start.
        let one = format!("echo $$ >{made}/cgroup.procs || exit; b() {{ b & b & }}; while :; do b; done");
        let bomb = format!("while [ -d {made} ]; do sh -c '{one}'; done");
        Ok(Command::new("sh").args(["-c", &bomb]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
    });
    let looked = bomb.and_then(|mut bomb| {
        let looked = beside(&mut exercise, &COMMANDS, 0, |_| ());
        let _ = bomb.kill();
        let _ = bomb.wait();
        looked
    });
    // `max N`: the number of forks that the limit refused.
    let refused = fs::read_to_string(format!("{made}/pids.events")).unwrap_or_default();
    let is_gone = end_all_in(&made)?;
    looked?;
    if !is_gone {
        exercise.wrong(&format!("{made} cannot be removed"));
    }
    exercise
        .note(format!("at most 60 processes at once, {} births refused", refused.trim().trim_start_matches("max ")));
    exercise.end()
}

/// Kills all processes while new ones appear. Returns true if the cgroup could be removed.
fn end_all_in(cgroup: &str) -> Result<bool> {
    for _ in 0..2_000 {
        let mut text = String::new();
        File::open(format!("{cgroup}/cgroup.procs"))?.read_to_string(&mut text)?;
        text.lines().filter_map(|pid| pid.parse().ok().and_then(rustix::process::Pid::from_raw)).for_each(|pid| {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        });
        if fs::remove_dir(cgroup).is_ok() {
            return Ok(true);
        }
        sleep(Duration::from_millis(5));
    }
    Ok(false)
}
