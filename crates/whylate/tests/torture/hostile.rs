// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hostile names of threads, of cgroups and of code generated at run time: control characters, line ends, field
//! separators, and bytes that are not UTF-8.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::COMMANDS;
use crate::beside::beside;
use crate::exercise::{Exercise, is_whole, part};
use crate::lock::lock_machine;
use crate::running::copied;

const NAMES: [&[u8]; 6] =
    [b"\x1b[2J\x1b[H", b"a\nb\nc", b"a;b c\"d\\", b"\xff\xfe\xc0", b"\x9b31m\x07", b"\xc2\x9b2J\xe2\x80\xae"];
/// Commands that print cgroups.
const BY_CGROUP: [&[&str]; 3] = [
    &["--by", "cgroup", "-d", "1s"],
    &["offcpu", "--why", "1ms", "--by", "cgroup", "-d", "1s"],
    &["wq", "--why", "1ms", "--by", "cgroup", "-d", "1s"],
];
/// Hierarchies whose cgroups may be printed.
const HIERARCHIES: [&str; 4] =
    ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"];
/// One file per format that offcpu writes; compressed formats are covered by the others.
const FILES: [&str; 4] = ["out.svg", "out.folded", "out.json", "out.speedscope.json"];

/// Cgroups with hostile names, each with a process that keeps a CPU busy.
struct Cgroups {
    directories: Vec<PathBuf>,
    busy: Vec<Child>,
}

impl Cgroups {
    fn make() -> Result<Self> {
        let mut made = Cgroups { directories: Vec::new(), busy: Vec::new() };
        // The kernel refuses line feeds in cgroup names.
        for (at, name) in NAMES.iter().filter(|name| !name.contains(&b'\n')).enumerate() {
            let mut busy = Command::new("nice");
            busy.args(["sh", "-c", "while :; do :; done"]).stdin(Stdio::null()).stdout(Stdio::null());
            let busy = busy.spawn()?;
            let pid = busy.id().to_string();
            made.busy.push(busy);
            for hierarchy in HIERARCHIES.map(Path::new).iter().filter(|path| path.join("cgroup.procs").exists()) {
                let unique = format!("{}-{at}-", std::process::id());
                let directory = hierarchy.join(OsStr::from_bytes(&[unique.as_bytes(), name].concat()));
                if fs::create_dir(&directory).is_ok() {
                    made.directories.push(directory.clone());
                    let _ = fs::write(directory.join("cgroup.procs"), &pid);
                }
            }
        }
        Ok(made)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for busy in &mut self.busy {
            let _ = busy.kill();
            let _ = busy.wait();
        }
        for directory in &self.directories {
            // A process that was in the cgroup may still be exiting.
            for _ in 0..200 {
                if fs::remove_dir(directory).is_ok() {
                    break;
                }
                sleep(Duration::from_millis(5));
            }
        }
    }
}

/// A process with hostile names of its own and of its code.
struct Hostile {
    process: Child,
    map: PathBuf,
}

impl Hostile {
    /// Returns `None` without a compiler.
    fn start(exercise: &Exercise) -> Result<Option<Self>> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torture/hostile.c");
        let directory = tempfile::Builder::new().prefix("hostile-").tempdir()?;
        let program = directory.path().join("hostile");
        let Ok(built) = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).status() else {
            return Ok(None);
        };
        ensure!(built.success(), "{source} does not compile");
        // A process names its perf map by its PID, which the shell has before it executes the program.
        let mut start = Command::new("sh");
        start.args(["-c", "exec \"$0\" /tmp/perf-$$.map"]).arg(&program).current_dir(exercise.directory());
        let mut process = start.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("it has an output")?).read_line(&mut line)?;
        let map = PathBuf::from(format!("/tmp/perf-{}.map", process.id()));
        let started = Hostile { process, map };
        ensure!(line == "ready\n", "the hostile process does not start");
        Ok(Some(started))
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_file(&self.map);
    }
}

/// Profiles the process in each form, also into files; the name of its code must appear, escaped.
fn look_at_it(exercise: &mut Exercise, hostile: &Hostile) -> Result<()> {
    let pid = hostile.process.id().to_string();
    exercise.run(&["-p", &pid, "-d", "1s"], " of hostile code")?;
    let words = ["offcpu", "-F", "499", "-p", &pid, "--call-graph", "fp", "-d", "1s"];
    let child = exercise.start(&words)?;
    if let Some(output) = exercise.finish(child, "offcpu of hostile code")? {
        let text = String::from_utf8_lossy(&output.stdout);
        // The generated code exists on x86-64 alone.
        if cfg!(target_arch = "x86_64") && !text.contains("jit ") {
            exercise.wrong(&format!("offcpu tells no code of a perf map: {text}"));
        }
    }
    for file in part(&FILES, 1) {
        exercise.run(&[&words[..], &["-o", file]].concat(), " of hostile code")?;
        let path = exercise.directory().join(file);
        let text = fs::read(&path)?;
        exercise.check_output(&text, file);
        fs::remove_file(path)?;
    }
    let packed = "out.pb.gz";
    exercise.run(&[&words[..], &["-o", packed]].concat(), " of hostile code")?;
    let path = exercise.directory().join(packed);
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(&path)?).read_to_end(&mut text)?;
    // Lengths and numbers are any bytes, but not as many as a name has.
    if text.windows(4).any(|bytes| bytes == b"\x1b[2J" || bytes == b"\x1b]0;") {
        exercise.wrong("out.pb.gz has an escape");
    }
    Ok(fs::remove_file(path)?)
}

#[test]
fn escapes_hostile_names_in_all_outputs() -> Result<()> {
    const NAME: &str = "renames";
    let Some(_lock) = lock_machine() else { return Exercise::skipped(NAME, "no source measures here") };
    let mut exercise = Exercise::begin(NAME)?;
    let hostile = Hostile::start(&exercise)?;
    // A thread of the test changes its own name a thousand times a second too.
    let rename = |exercise: &mut Exercise, commands: &[&[&str]]| {
        beside(exercise, commands, 1, |round| {
            let _ = fs::write("/proc/thread-self/comm", NAMES[round as usize % NAMES.len()]);
            sleep(Duration::from_micros(800));
        })
    };
    let rate = rename(&mut exercise, part(&COMMANDS, 1))?;
    let cgroups = Cgroups::make()?;
    let made = cgroups.directories.len();
    rename(&mut exercise, part(&BY_CGROUP, 1))?;
    drop(cgroups);
    match &hostile {
        Some(hostile) => look_at_it(&mut exercise, hostile)?,
        None => println!("skipped: no C compiler for a process with a perf map"),
    }
    if is_whole() {
        let directory = copied("/bin/sleep", "\x1b[2J")?;
        let program = directory.path().join("\x1b[2J");
        exercise.run(&["run", "--tree", "--", program.to_str().context("it is text")?, "0.1"], "")?;
    }
    let code = if hostile.is_some() { "code of a perf map" } else { "no code" };
    drop(hostile);
    exercise.note(format!("2 threads, one {rate:.0} times a second; {made} cgroups; {code}"));
    exercise.end()
}
