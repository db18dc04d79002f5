// SPDX-License-Identifier: MIT OR Apache-2.0
//! What must not hurt: whylate is killed, starved, given outputs that fail and hostile things to look at, and leaves
//! nothing behind. A part of it; `WHYLATE_TORTURE` (`make torture`) does all.

mod running;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/turn.rs"]
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};
use running::whylate;
use turn::turn_to_measure;

/// Each source, and all of them; for a moment.
const COMMANDS: [&[&str]; 8] = [
    &["-d", "1s"],
    &["wq", "--why", "1ms", "-d", "1s"],
    &["timerlat", "hist", "-d", "1s"],
    &["irqsoff", "-d", "1s"],
    &["offcpu", "--why", "1ms", "-d", "1s"],
    &["offcpu", "--backend", "trace", "-d", "1s"],
    &["offcpu", "--backend", "proc", "-d", "1s"],
    &["sqpoll", "-d", "1s"],
];
const PATIENCE: Duration = Duration::from_secs(60);

fn is_whole() -> bool {
    std::env::var_os("WHYLATE_TORTURE").is_some()
}

/// Numbers that look random and are the same in each run (Knuth's generator).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Everything that could be left behind.
#[derive(Debug)]
struct Seen(BTreeMap<&'static str, BTreeSet<String>>);

impl Seen {
    fn now() -> Self {
        let folder = |path: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let ours = |path: &str| folder(path).into_iter().filter(|name| name.contains("whylate")).collect();
        let settings = ["kernel/tracing/current_tracer", "kernel/tracing/tracing_on", "kernel/tracing/set_event"]
            .map(|file| format!("/sys/{file}"))
            .into_iter()
            .chain(
                ["bpf_stats_enabled", "sched_schedstats", "perf_event_paranoid"]
                    .map(|file| format!("/proc/sys/kernel/{file}")),
            )
            .map(|path| format!("{path}: {}", fs::read_to_string(&path).unwrap_or_default()));
        // The lock of a living one's records stays.
        let records = folder("/run/whylate").into_iter().filter(|name| !name.ends_with(".lock"));
        let processes = folder("/proc").into_iter().filter(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == "whylate")
        });
        Seen(BTreeMap::from([
            ("BPF programs", ProgInfoIter::default().map(|info| info.id.to_string()).collect()),
            ("BPF maps", MapInfoIter::default().map(|info| info.id.to_string()).collect()),
            ("BPF links", LinkInfoIter::default().map(|info| info.id.to_string()).collect()),
            ("tracing instances", folder("/sys/kernel/tracing/instances")),
            ("settings", settings.collect()),
            ("records", records.collect()),
            ("temporary files", ours("/tmp")),
            ("processes", processes.collect()),
        ]))
    }

    /// What is there that was not: the kernel frees some of it a little later.
    fn ensure_gone(&self, after: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = Seen::now();
            let left: BTreeMap<_, Vec<_>> =
                now.0.iter().map(|(what, there)| (*what, there.difference(&self.0[what]).collect())).collect();
            if left.values().all(Vec::is_empty) || Instant::now() >= deadline {
                let counts: Vec<String> = left.iter().map(|(what, left)| format!("{} {what}", left.len())).collect();
                println!("{after}: left behind {}", counts.join(", "));
                ensure!(left.values().all(Vec::is_empty), "{after}: {left:?}");
                return Ok(());
            }
            sleep(Duration::from_millis(100));
        }
    }
}

/// Its output, once it has ended by itself.
fn ended(mut child: Child, what: &str) -> Result<Output> {
    let deadline = Instant::now() + PATIENCE;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    // Whoever does not read holds it up.
    let read = move |from: &mut dyn std::io::Read| {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    };
    let stdout = thread::spawn(move || out.as_mut().map(|out| read(out)).unwrap_or_default());
    let stderr = thread::spawn(move || err.as_mut().map(|err| read(err)).unwrap_or_default());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("{what} does not end");
        }
        sleep(Duration::from_millis(10));
    };
    let joined = |thread: thread::JoinHandle<Vec<u8>>| thread.join().ok().context("its output cannot be read");
    Ok(Output { status, stdout: joined(stdout)?, stderr: joined(stderr)? })
}

/// It has ended by its own will, and says why in a line or two where that is an error.
fn ensure_orderly(output: &Output, what: &str) -> Result<()> {
    let err = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.signal().is_none() && !err.contains("panicked"), "{what}: {}: {err}", output.status);
    let failed = output.status.code() != Some(0);
    let says_why = err.lines().any(|line| line.starts_with("whylate: ") || line.starts_with("error: "));
    ensure!(!failed || says_why, "{what} says nothing: {err}");
    Ok(())
}

/// The next one puts back what one that was killed, or had no memory left, could not.
fn put_back() -> Result<()> {
    ended(whylate(&["wq", "-d", "100ms"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?, "wq").map(drop)
}

#[test]
fn killed_at_any_moment_it_leaves_nothing() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let (before, mut chance) = (Seen::now(), Chance(1));
    for round in 0..if is_whole() { 200 } else { COMMANDS.len() } {
        let command = COMMANDS[round % COMMANDS.len()];
        let mut child = whylate(command).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        sleep(Duration::from_millis(chance.below(1_000)));
        child.kill()?;
        child.wait()?;
    }
    put_back()?;
    before.ensure_gone("kill -9")
}

/// Where nothing can be written: the disk is full, or broken (nothing lies at address 0 of a process), or nobody reads.
fn failing_outputs() -> Result<Vec<(&'static str, OwnedFd)>> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let write = |path: &str| OpenOptions::new().write(true).open(path);
    Ok(vec![
        ("ENOSPC", write("/dev/full")?.into()),
        ("EIO", write("/proc/self/mem")?.into()),
        ("closed pipe", writer.into()),
    ])
}

#[test]
fn outputs_that_fail_end_it_in_order() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let before = Seen::now();
    for command in &COMMANDS[..if is_whole() { COMMANDS.len() } else { 2 }] {
        for (failure, out) in failing_outputs()? {
            let what = format!("{failure} of {command:?}");
            let output = ended(whylate(command).stdout(out).stderr(Stdio::piped()).spawn()?, &what)?;
            ensure_orderly(&output, &what)?;
            let expected = if failure == "closed pipe" { 0 } else { 1 };
            ensure!(output.status.code() == Some(expected), "{what}: {}", output.status);
        }
    }
    before.ensure_gone("outputs")
}

/// 64 MB, in kilobytes: less than the program with its libraries and what it reads of the kernel needs.
const SMALL_ADDRESS_SPACE: &str = "-v 65536";

#[test]
fn with_little_of_everything_it_says_what_is_missing() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let before = Seen::now();
    for limit in ["-n 64", "-l 64", SMALL_ADDRESS_SPACE] {
        for command in &COMMANDS[..if is_whole() { COMMANDS.len() } else { 2 }] {
            let what = format!("ulimit {limit}, {command:?}");
            let mut limited = Command::new("sh");
            limited.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_whylate")]);
            let child = limited.args(*command).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            ensure_orderly(&ended(child.spawn()?, &what)?, &what)?;
        }
    }
    put_back()?;
    before.ensure_gone("limits")
}

#[test]
fn two_of_each_are_in_nobodys_way() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let before = Seen::now();
    for command in &COMMANDS[..if is_whole() { COMMANDS.len() } else { 1 }] {
        let spawn = || whylate(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let what = format!("two of {command:?}");
        let (first, second) = (spawn()?, spawn()?);
        for output in [ended(first, &what)?, ended(second, &what)?] {
            ensure_orderly(&output, &what)?;
            ensure!(output.status.success(), "{what}: {}", output.status);
        }
    }
    before.ensure_gone("two of each")
}

/// Names that would move the cursor, end a line, end a field, and are no text.
const NAMES: [&[u8]; 5] = [b"\x1b[2J\x1b[H", b"a\nb\nc", b"a;b c\"d\\", b"\xff\xfe\xc0", b"\x9b31m\x07"];

/// Each of the commands beside what a thread does until it is told to stop.
fn beside(what: &str, disturb: impl Fn(u64) + Sync) -> Result<()> {
    let before = Seen::now();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                disturb(round);
                round += 1;
            }
        });
        let looked = || -> Result<()> {
            for command in &COMMANDS[..if is_whole() { COMMANDS.len() } else { 1 }] {
                let told = format!("{command:?} beside {what}");
                let child = whylate(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
                let output = ended(child, &told)?;
                ensure_orderly(&output, &told)?;
                ensure!(output.status.success(), "{told}: {}", String::from_utf8_lossy(&output.stderr));
                let text = String::from_utf8(output.stdout).with_context(|| format!("{told} is no text"))?;
                let is_plain = |letter: char| letter == '\n' || !letter.is_control();
                ensure!(
                    text.chars().all(is_plain),
                    "{told} prints {:?}",
                    text.chars().find(|&letter| !is_plain(letter))
                );
            }
            Ok(())
        };
        let result = looked();
        stop.store(true, Ordering::Relaxed);
        result
    })?;
    before.ensure_gone(what)
}

#[test]
fn names_that_are_no_names_stay_out_of_the_screen() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    // A thread changes its own name a thousand times a second.
    beside("a process with hostile names", |round| {
        let _ = fs::write("/proc/thread-self/comm", NAMES[round as usize % NAMES.len()]);
        sleep(Duration::from_millis(1));
    })
}

#[test]
fn births_and_deaths_do_not_hurt() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    // As many as a CPU can make.
    beside("threads that are born and die", |_| {
        let _ = thread::Builder::new().stack_size(16 << 10).spawn(|| ()).map(thread::JoinHandle::join);
    })
}

/// A folder of a hierarchy in which cgroups can be made.
fn hierarchy(controller: &str) -> Option<&'static str> {
    let folders: &[&str] = match controller {
        "cpu" => &["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"],
        _ => &["/sys/fs/cgroup/pids", "/sys/fs/cgroup"],
    };
    folders.iter().copied().find(|folder| Path::new(folder).join("cgroup.procs").exists())
}

#[test]
fn cgroups_that_go_are_told_or_unknown() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let Some(folder) = hierarchy("cpu") else {
        println!("skipped: no cgroup can be made here");
        return Ok(());
    };
    let made = format!("{folder}/whylate-torture-{}", std::process::id());
    beside("cgroups that are made and removed", |_| {
        let _ = fs::create_dir(&made);
        let in_it =
            Command::new("sh").args(["-c", &format!("echo $$ >{made}/cgroup.procs; :")]).stderr(Stdio::null()).status();
        sleep(Duration::from_millis(if in_it.is_ok() { 1 } else { 100 }));
        let _ = fs::remove_dir(&made);
    })?;
    let _ = fs::remove_dir(&made);
    Ok(())
}

#[test]
fn a_fork_bomb_within_its_limit_does_not_hurt() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let Some(folder) = hierarchy("pids").filter(|_| is_whole()) else {
        println!(
            "skipped: {}",
            if is_whole() { "processes cannot be limited here" } else { "only make torture does it" }
        );
        return Ok(());
    };
    let made = format!("{folder}/whylate-bomb-{}", std::process::id());
    fs::create_dir(&made)?;
    let bomb = fs::write(format!("{made}/pids.max"), "60").map_err(anyhow::Error::from).and_then(|()| {
        let bomb = format!("echo $$ >{made}/cgroup.procs; b() {{ b 2>/dev/null & b 2>/dev/null; }}; b");
        Ok(Command::new("sh").args(["-c", &bomb]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
    });
    let result = bomb.and_then(|mut bomb| {
        let result = beside("a fork bomb", |_| sleep(Duration::from_millis(10)));
        let _ = bomb.kill();
        let _ = bomb.wait();
        result
    });
    // They are many, and new ones come.
    for _ in 0..2_000 {
        let mut text = String::new();
        File::open(format!("{made}/cgroup.procs"))?.read_to_string(&mut text)?;
        text.lines().filter_map(|pid| pid.parse().ok().and_then(rustix::process::Pid::from_raw)).for_each(|pid| {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        });
        if fs::remove_dir(&made).is_ok() {
            return result;
        }
        sleep(Duration::from_millis(5));
    }
    result.and(Err(anyhow::anyhow!("{made} cannot be removed")))
}
