// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes of an unprivileged user that would take an observer's memory, descriptors or time, or have it open files of
//! their choosing: a row each.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::exercise::{Exercise, is_whole};
use crate::lock::lock_machine;
use crate::running::whylate;

/// UID of `nobody`, who has no privileges.
const USER: &str = "65534";
/// Limits of whylate beside any neighbor.
const MAX_MEMORY_KB: u64 = 200 << 10;
const MAX_DESCRIPTORS: usize = 1_024;
/// Maximum delay after the measured span: of a program's answer, and of an overview or the end of a recording.
const ANSWER: Duration = Duration::from_secs(2);
const END: Duration = Duration::from_secs(3);
/// A recording of this length has at least this many snapshots of each source.
const SPAN: &str = "8s";
const MIN_SNAPSHOTS: usize = 7;

/// The compiled processes, in a directory that all users can enter.
struct Neighbors {
    directory: TempDir,
}

/// A neighbor process, killed on drop with its perf map removed.
struct Neighbor(Child);

impl Drop for Neighbor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = fs::remove_file(format!("/tmp/perf-{}.map", self.0.id()));
    }
}

impl Neighbors {
    fn compile() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("neighbors-").tempdir_in("/var/tmp")?;
        fs::set_permissions(&directory, Permissions::from_mode(0o711))?;
        let neighbors = Neighbors { directory };
        neighbors.compile_as("neighbors", "plain")?;
        Ok(neighbors)
    }

    /// Compiles the neighbors with a function of this name.
    fn compile_as(&self, name: &str, symbol: &str) -> Result<()> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torture/neighbors.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-pthread", &format!("-DSYMBOL=\"{symbol}\""), "-o"]).arg(self.path(name)).arg(source);
        let built = compiler.status().context("there is no C compiler")?;
        ensure!(built.success(), "{source} does not compile");
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Creates a directory that the user owns.
    fn users_directory(&self, name: &str) -> Result<String> {
        let path = self.path(name);
        fs::create_dir(&path)?;
        std::os::unix::fs::chown(&path, Some(65534), Some(65534))?;
        path.into_os_string().into_string().ok().context("a temporary directory's path is text")
    }

    /// Starts a neighbor as the user and waits until it is set up.
    fn start(&self, program: &str, words: &[&str]) -> Result<Neighbor> {
        let program = self.path(program);
        let mut command = Command::new("setpriv");
        command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(program).args(words);
        ready(&mut command)
    }
}

/// Starts a process and waits for its line.
fn ready(command: &mut Command) -> Result<Neighbor> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let stdout = child.stdout.take().context("it has an output")?;
    let neighbor = Neighbor(child);
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line == "ready\n", "{command:?} cannot be set up");
    Ok(neighbor)
}

/// An exercise beside neighbors.
type Row = fn(&Neighbors) -> Result<()>;

/// Peak usage of one whylate run, and its output.
struct Run {
    memory_kb: u64,
    descriptors: usize,
    /// Time since it began to measure.
    measured: Duration,
    stdout: Vec<u8>,
}

/// Runs whylate to its end and watches its memory and descriptors.
fn run(exercise: &mut Exercise, words: &[&str]) -> Result<Option<Run>> {
    let child = exercise.start(words)?;
    let (pid, has_ended) = (child.id(), AtomicBool::new(false));
    let (output, (memory_kb, descriptors), measured) = thread::scope(|scope| {
        let measures = scope.spawn(|| crate::exercise::measures_since(pid));
        let watched = scope.spawn(|| {
            let mut most = (0, 0);
            while !has_ended.load(Ordering::Relaxed) {
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
                let peak_kb = peak.and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
                let open = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
                most = (peak_kb.max(most.0), open.max(most.1));
                sleep(Duration::from_millis(20));
            }
            most
        });
        let output = exercise.finish(child, &format!("{words:?}"));
        has_ended.store(true, Ordering::Relaxed);
        let measured = measures.join().map_or(Duration::ZERO, |since| since.elapsed());
        (output, watched.join().unwrap_or_default(), measured)
    });
    let Some(output) = output? else { return Ok(None) };
    if !output.status.success() {
        exercise.wrong(&format!("{words:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    Ok(Some(Run { memory_kb, descriptors, measured, stdout: output.stdout }))
}

/// An overview, a recording and a program's answer stay within their bounds.
fn keeps_within_bounds(exercise: &mut Exercise, pid: u32, beside: &str) -> Result<String> {
    let (pid, recording) = (pid.to_string(), exercise.directory().join("x.whylate"));
    let path = recording.to_str().context("a temporary directory's path is text")?.to_owned();
    let (mut memory_kb, mut descriptors, mut after) = (0, 0, Duration::ZERO);
    for (words, span, limit) in [
        (&["-d", "3s"][..], 3, END),
        (&["record", "-d", SPAN, "-o", &path], 8, END),
        (&["-p", &pid, "-d", "3s"], 3, ANSWER),
    ] {
        let Some(run) = run(exercise, words)? else { continue };
        // Without this, a start that was seen too late would hide a late answer.
        if run.measured + Duration::from_millis(500) < Duration::from_secs(span) {
            exercise.wrong(&format!("{words:?} beside {beside} is not seen to measure for {span} s"));
        }
        after = run.measured.saturating_sub(Duration::from_secs(span));
        if after > limit {
            exercise.wrong(&format!("{words:?} beside {beside} ends {:.1} s after its span", after.as_secs_f64()));
        }
        memory_kb = memory_kb.max(run.memory_kb);
        descriptors = descriptors.max(run.descriptors);
    }
    if memory_kb > MAX_MEMORY_KB {
        exercise.wrong(&format!("beside {beside} whylate takes {} MB", memory_kb >> 10));
    }
    if descriptors > MAX_DESCRIPTORS {
        exercise.wrong(&format!("beside {beside} whylate has {descriptors} descriptors"));
    }
    for (source, snapshots) in snapshots_by_source(&recording)? {
        if snapshots < MIN_SNAPSHOTS {
            exercise.wrong(&format!("beside {beside} {source} has {snapshots} snapshots in {SPAN}"));
        }
    }
    fs::remove_file(recording)?;
    let seconds = after.as_secs_f64();
    Ok(format!("{beside}: {} MB, {descriptors} descriptors, -p {seconds:.1} s after its span", memory_kb >> 10))
}

/// Counts the snapshots of each source in a recording.
fn snapshots_by_source(recording: &Path) -> Result<BTreeMap<String, usize>> {
    let text = zstd::decode_all(fs::File::open(recording)?)?;
    let mut snapshots = BTreeMap::new();
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let line: serde_json::Value = serde_json::from_slice(line)?;
        if let (Some(source), Some(_)) = (line["source"].as_str(), line["duration_ns"].as_u64()) {
            *snapshots.entry(source.to_owned()).or_default() += 1;
        }
    }
    Ok(snapshots)
}

/// Returns a mangled C++ name whose demangled form grows twelvefold with each level.
fn bomb(levels: usize) -> String {
    let substitution = |number: usize| match number {
        0 => "S_".to_owned(),
        _ => format!("S{}_", char::from(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number - 1])),
    };
    let levels = (1..=levels).map(|level| format!("S_I{}E", substitution(level).repeat(12)));
    format!("_Z1f1TI{}E{}E", "i".repeat(12), levels.collect::<String>())
}

/// New processes are counted after thousands have ended.
fn series(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("series")?;
    let file = neighbors.path("pages");
    fs::write(&file, vec![1; 1 << 20])?;
    let synced = Command::new("sync").arg(&file).status()?;
    ensure!(synced.success(), "sync(1) fails");
    let child = exercise.start(&["block", "--by", "process", "--json", "-d", "12s"])?;
    crate::exercise::wait_until_it_measures(child.id());
    let words = ["readers", file.to_str().context("it is text")?, "2300", "lastreader"];
    drop(neighbors.start("neighbors", &words)?);
    if let Some(output) = exercise.finish(child, "block")? {
        let text = String::from_utf8_lossy(&output.stdout);
        if !text.contains("lastreader") {
            exercise.wrong("the last of 2,300 readers is not counted");
        }
    }
    exercise.note("2,300 processes that read a disk".to_owned());
    exercise.end()
}

/// Nothing is opened through a user's links.
fn links(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("links")?;
    let directory = neighbors.users_directory("linked")?;
    let private = neighbors.path("private");
    fs::create_dir(&private)?;
    fs::set_permissions(&private, Permissions::from_mode(0o700))?;
    let fifo = private.join("fifo");
    let made = Command::new("mkfifo").args(["-m", "600"]).arg(&fifo).status()?;
    ensure!(made.success(), "mkfifo(1) fails");
    let target = fifo.to_str().context("it is text")?.to_owned();
    for words in [&["offcpu", "-d", "3s"][..], &["-d", "3s"]] {
        let one = neighbors.start("neighbors", &["links", &directory, &target])?;
        // The neighbor's open returns once the other end is opened.
        let mut writer = Command::new("sh").args(["-c", "exec >\"$0\"", &target]).stdin(Stdio::null()).spawn()?;
        sleep(Duration::from_millis(200));
        exercise.run(words, " beside links")?;
        if writer.try_wait()?.is_some() {
            exercise.wrong(&format!("{words:?} has opened a FIFO through a user's link"));
        }
        writer.kill()?;
        writer.wait()?;
        drop(one);
        fs::remove_dir_all(&directory)?;
        fs::create_dir(&directory)?;
        std::os::unix::fs::chown(&directory, Some(65534), Some(65534))?;
    }
    exercise.note("600 mapped files become links to a FIFO".to_owned());
    exercise.end()
}

/// Names stay short, whatever a symbol says.
fn symbols(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("symbols")?;
    let mut most_kb = 0;
    for levels in [5, 8, 16] {
        let name = format!("bomb{levels}");
        neighbors.compile_as(&name, &bomb(levels))?;
        let one = neighbors.start(&name, &["symbol"])?;
        let pid = one.0.id().to_string();
        for words in [&["offcpu", "-p", &pid, "-d", "2s", "--json"][..], &["offcpu", "-p", &pid, "-d", "1s", "--flat"]]
        {
            let Some(run) = run(&mut exercise, words)? else { continue };
            most_kb = most_kb.max(run.memory_kb);
            if run.stdout.len() > 64 << 10 {
                exercise.wrong(&format!("{words:?} beside {levels} levels prints {} bytes", run.stdout.len()));
            }
        }
    }
    if most_kb > MAX_MEMORY_KB {
        exercise.wrong(&format!("beside a hostile symbol whylate takes {} MB", most_kb >> 10));
    }
    exercise.note(format!("C++ names of 12^5 to 12^16 parameters: {} MB", most_kb >> 10));
    exercise.end()
}

/// Endless lists of code, mappings and mapped files.
fn maps(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("maps")?;
    let mut notes = Vec::new();
    for kind in ["short", "long"] {
        let one = neighbors.start("neighbors", &["perf-map", "67108864", kind])?;
        notes.push(keeps_within_bounds(&mut exercise, one.0.id(), &format!("64 MiB of {kind} lines"))?);
    }
    let directory = neighbors.users_directory("mapped-once")?;
    let one = neighbors.start("neighbors", &["mappings", &directory, "60000"])?;
    notes.push(keeps_within_bounds(&mut exercise, one.0.id(), "60,000 mappings")?);
    drop(one);
    let both = ["files-1", "files-2"].map(|name| -> Result<Neighbor> {
        let directory = neighbors.users_directory(name)?;
        neighbors.start("neighbors", &["files", &directory, "10000"])
    });
    let [one, other] = both;
    let (one, other) = (one?, other?);
    notes.push(keeps_within_bounds(&mut exercise, one.0.id(), "two times 10,000 files")?);
    // A program that starts beside them still gets names.
    let plain = neighbors.start("neighbors", &["symbol"])?;
    let words = ["offcpu", "-d", "2s", "--json"];
    if let Some(run) = run(&mut exercise, &words)?
        && !String::from_utf8_lossy(&run.stdout).contains("\"plain\"")
    {
        exercise.wrong("a program beside 20,000 mapped files has no names");
    }
    drop((plain, one, other));
    exercise.note(notes.join("; "));
    exercise.end()
}

/// A program of thousands of threads is explained soon after its span.
fn crowd(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("crowd")?;
    let one = neighbors.start("neighbors", &["threads", "5000", "50000"])?;
    let note = keeps_within_bounds(&mut exercise, one.0.id(), "5,000 threads")?;
    drop(one);
    exercise.note(note);
    exercise.end()
}

/// CPUs that whylate was not given have no thread of it.
fn real_time(neighbors: &Neighbors) -> Result<()> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online")?;
    if online.trim() == "0" {
        return Exercise::skipped("real time", "there is one CPU");
    }
    let mut exercise = Exercise::begin("real time")?;
    let mut loop_there = Command::new("taskset");
    loop_there.args(["-c", "1", "chrt", "-f", "90"]).arg(neighbors.path("neighbors")).arg("busy");
    let busy = ready(&mut loop_there)?;
    for bound in [true, false] {
        let mut command = if bound {
            let mut bound = Command::new("taskset");
            bound.args(["-c", "0"]).arg(whylate(&[]).get_program());
            bound
        } else {
            whylate(&[])
        };
        command.args(["-d", "3s"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = exercise.start_as(&mut command)?;
        let pid = child.id();
        crate::exercise::wait_until_it_measures(pid);
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
        let statuses = tasks.map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default());
        let there = statuses.filter(|status| status.contains("Cpus_allowed_list:\t1\n")).count();
        if there > 0 {
            exercise.wrong(&format!("{there} threads are bound to a real-time thread's CPU"));
        }
        exercise.finish_well(child, "an overview beside a real-time thread")?;
    }
    drop(busy);
    exercise.note("SCHED_FIFO:90 on CPU 1".to_owned());
    exercise.end()
}

/// A file system can be unmounted once its program has ended.
fn unmounting(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("unmounting")?;
    let point = neighbors.path("mounted");
    fs::create_dir(&point)?;
    mount("none", &point, "tmpfs", MountFlags::empty(), None)?;
    let ended = (|| -> Result<()> {
        let program = point.join("program");
        let copied = Command::new("cp").arg("/bin/sleep").arg(&program).status()?;
        ensure!(copied.success(), "cp(1) fails");
        let recording = exercise.directory().join("x.whylate");
        let words = ["record", "-d", "30s", "-o", recording.to_str().context("it is text")?];
        let child = exercise.start(&words)?;
        crate::exercise::wait_until_it_measures(child.id());
        let slept = Command::new(&program).arg("3").status()?;
        ensure!(slept.success(), "sleep(1) fails");
        let (deadline, mut is_free) = (Instant::now() + Duration::from_secs(10), false);
        while !is_free && Instant::now() < deadline {
            sleep(Duration::from_millis(200));
            is_free = unmount(&point, UnmountFlags::empty()).is_ok();
        }
        if !is_free {
            exercise.wrong("a file system is busy 10 s after its program has ended");
        }
        kill_process(Pid::from_child(&child), Signal::INT)?;
        exercise.finish_well(child, "a recording")?;
        fs::remove_file(recording)?;
        Ok(())
    })();
    // Still mounted after a failure.
    let _ = unmount(&point, UnmountFlags::DETACH);
    ended?;
    exercise.note("a program on a file system of its own".to_owned());
    exercise.end()
}

/// Code is named by its current content: in a file that reused an inode number, and in reused memory.
fn identities(neighbors: &Neighbors) -> Result<()> {
    let mut exercise = Exercise::begin("identities")?;
    let one = neighbors.start("neighbors", &["perf-map", "0", "short"])?;
    let pid = one.0.id().to_string();
    if let Some(run) = run(&mut exercise, &["offcpu", "-p", &pid, "--call-graph", "fp", "-d", "2s", "--json"])? {
        let text = String::from_utf8_lossy(&run.stdout);
        // The generated code exists on x86-64 alone.
        if cfg!(target_arch = "x86_64") && (!text.contains("name_of_live_code") || text.contains("name_of_freed_code"))
        {
            exercise.wrong("code is named by an old line of a perf map");
        }
    }
    drop(one);
    for name in ["alpha", "beta"] {
        neighbors.compile_as(name, &format!("waits_in_{name}"))?;
    }
    let program = neighbors.path("program");
    let child = exercise.start(&["offcpu", "--json", "-d", "8s"])?;
    crate::exercise::wait_until_it_measures(child.id());
    let mut inodes = Vec::new();
    for name in ["alpha", "beta"] {
        let copied = Command::new("cp").arg(neighbors.path(name)).arg(&program).status()?;
        ensure!(copied.success(), "cp(1) fails");
        inodes.push(fs::metadata(&program)?.ino());
        let one = neighbors.start("program", &["symbol"])?;
        sleep(Duration::from_secs(2));
        drop(one);
        fs::remove_file(&program)?;
    }
    if let Some(output) = exercise.finish(child, "offcpu of two programs")? {
        let text = String::from_utf8_lossy(&output.stdout);
        for name in ["waits_in_alpha", "waits_in_beta"] {
            if !text.contains(name) {
                exercise.wrong(&format!("no stack has {name}"));
            }
        }
    }
    let reused = if inodes[0] == inodes[1] { "reused" } else { "different" };
    exercise.note(format!("two programs under one path, inode numbers {reused}"));
    exercise.end()
}

#[test]
fn stays_within_bounds_beside_hostile_neighbors() -> Result<()> {
    if !is_whole() {
        println!("skipped: only make torture does it");
        return Ok(());
    }
    let rows: [(&str, Row); 8] = [
        ("series", series),
        ("links", links),
        ("symbols", symbols),
        ("maps", maps),
        ("crowd", crowd),
        ("real time", real_time),
        ("unmounting", unmounting),
        ("identities", identities),
    ];
    let Some(_lock) = lock_machine() else {
        return rows.iter().try_for_each(|(name, _)| Exercise::skipped(name, "no source measures here"));
    };
    let neighbors = Neighbors::compile()?;
    // Each neighbor has its row, whatever the others do.
    let failed: Vec<String> =
        rows.iter().filter_map(|(_, row)| row(&neighbors).err()).map(|error| error.to_string()).collect();
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}
