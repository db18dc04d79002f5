// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs many parts in one boot of a virtual machine: each is a command or a test program, with a judge of its output.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;

use crate::record::{self, Record, complaint, faults_of_emulator, passed_tests, stuck_cpu_part};

/// Timeout of a machine in seconds: far more than all parts need, also on a busy host.
const TIMEOUT_S: &str = "2400";
/// Size of the disk on which tests write.
const DISK_MEBIBYTES: &str = "64";
/// Timeout of a part in seconds: far more than any part needs.
const PART_TIMEOUT_S: u32 = 900;
/// Programs that make work items.
const LOADS: [&str; 2] = ["script", "unshare"];
/// Tracers of disks, to compare with.
const DISK_TRACERS: [&str; 2] = ["blktrace", "blkparse"];
/// Programs that create a file system with a journal, and a device-mapper device.
const DISK_MAKERS: [&str; 2] = ["mkfs.ext4", "dmsetup"];

/// Exit status of a machine if the kernel ended before the command.
const NO_ANSWER: i32 = 125;
const MAX_FAULTS: u32 = 8;
/// The kernel's message when it panics.
const PANIC: &str = "Kernel panic";
/// Failures at which a part counts as wrong. An emulated CPU stops at any time, for longer than a part allows, in at
/// most one of ten runs of a part: that number of failures in a row happens by chance in one of 10,000 runs.
const MAX_FAILURES: u32 = 4;
/// Number of last lines to print of a part that failed.
const LINES_OF_FAILURE: usize = 40;

/// Two machines at once would disturb each other's measurements.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Keeps tracepoints from being patched, in the shell that runs all parts.
const KEEP_ENABLED: &str = include_str!("../../keep-enabled.sh");

/// Marks where each part begins and ends, on the command's line and on the kernel's console.
const RUN_PARTS: &str = r#"
part() {
    name=$1
    shift
    echo "<1>whylate-part: $name" >/dev/kmsg
    printf '\n%s begin %s\n' "$mark" "$name"
    timeout -s KILL "$part_timeout" "$@"
    printf '\n%s end %d %s %s\n' "$mark" $? "$(cut -d ' ' -f 1 /proc/uptime)" "$name"
    # Kills what a part has left running, so that it does not disturb the next one.
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! readlink "$process/exe" >/dev/null 2>&1 || kill -9 "$pid" 2>/dev/null
    done
}
"#;

/// Mounts the directory where tests write, if the kernel has the disk's driver.
const MOUNT_DISK: &str = r#"
mkdir -p "$directory"
[ ! -b /dev/nvme0n1 ] || { mke2fs /dev/nvme0n1 >/dev/null && mount -t ext4 /dev/nvme0n1 "$directory"; }
"#;

type Judge = Box<dyn Fn(&str) -> Result<()>>;

enum What {
    /// Words, and files that they name.
    Command(Vec<String>, Vec<PathBuf>),
    /// A test program, and the tests to run; all if none is named.
    Tests(&'static str, &'static [&'static str]),
}

/// A command or test program to run in a machine.
pub struct Part {
    name: String,
    what: What,
    judge: Judge,
    /// Tests that passed before the kernel ended, and their output.
    passed: Vec<String>,
    said: String,
    failures: u32,
    is_done: bool,
    is_before_probes: bool,
    switches_cpus_off: bool,
}

impl Part {
    fn new(name: &str, what: What, judge: impl Fn(&str) -> Result<()> + 'static) -> Part {
        let judge = Box::new(judge);
        Part {
            name: name.to_owned(),
            what,
            judge,
            passed: Vec::new(),
            said: String::new(),
            failures: 0,
            is_done: false,
            is_before_probes: false,
            switches_cpus_off: false,
        }
    }

    /// Runs shell commands, up to the first that fails.
    pub fn shell(name: &str, script: &str, judge: impl Fn(&str) -> Result<()> + 'static) -> Part {
        let words = ["sh", "-ec", script].map(str::to_owned).into();
        Part::new(name, What::Command(words, Vec::new()), judge)
    }

    /// Runs the part while the kernel's tracepoints are as after boot, so that attaching patches code.
    pub fn before_probes(mut self) -> Part {
        self.is_before_probes = true;
        self
    }

    /// Marks a part during which the machine sleeps, or a CPU goes offline.
    pub fn switches_cpus_off(mut self) -> Part {
        self.switches_cpus_off = true;
        self
    }

    /// Runs a script of this directory.
    pub fn script(file: &str, words: &[&str], judge: impl Fn(&str) -> Result<()> + 'static) -> Part {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/matrix").join(file);
        let command = ["sh".to_owned(), path.display().to_string()].into_iter();
        let command = command.chain(words.iter().map(|&word| word.to_owned())).collect();
        Part::new(&format!("{file}: {}", words[0]), What::Command(command, vec![path]), judge)
    }

    /// Includes this program in the machine.
    pub fn with(mut self, program: &str) -> Part {
        if let What::Command(_, files) = &mut self.what {
            files.push(PathBuf::from(program));
        }
        self
    }

    /// Runs the tests of these names of a test program; all of them without names.
    pub fn tests(
        program: &'static str,
        only: &'static [&'static str],
        judge: impl Fn(&str) -> Result<()> + 'static,
    ) -> Part {
        Part::new(program, What::Tests(program, only), judge)
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        match &self.what {
            What::Command(_, files) => Ok(files.clone()),
            What::Tests(program, _) => Ok(vec![test_program(program)?]),
        }
    }

    /// Returns the part's line in the script of a boot.
    fn line(&self) -> Result<String> {
        let mut words = vec!["part".to_owned(), self.name.clone()];
        match &self.what {
            What::Command(command, _) => words.extend(command.iter().cloned()),
            What::Tests(program, only) => {
                words.extend(["env", "WHYLATE_EMULATED=1"].map(str::to_owned));
                words.push(test_program(program)?.display().to_string());
                // Without capturing, a test's output is there even if the kernel ends in a later one.
                words.extend(["--test-threads=1", "--nocapture", "--exact"].map(str::to_owned));
                words.extend(only.iter().map(|&name| name.to_owned()));
                words.extend(self.passed.iter().flat_map(|name| ["--skip".to_owned(), name.clone()]));
            }
        }
        let quoted: Vec<String> = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        Ok(quoted.join(" "))
    }

    /// Keeps what it printed until the kernel ended.
    fn keep_partial(&mut self, record: &Record) {
        if let What::Tests(..) = self.what {
            self.passed.extend(passed_tests(&record.text));
            self.said += &record.text;
        }
    }

    fn judge(&self, record: &Record) -> Result<()> {
        let status = record.status.context("it has not ended")?;
        ensure!(status == 0, "status {status}");
        if let What::Tests(_, only) = self.what {
            // A name without a test runs nothing.
            let passed = self.passed.len() + passed_tests(&record.text).count();
            ensure!(passed >= only.len().max(1), "{passed} tests have passed, of {only:?}");
        }
        (self.judge)(&record::without_names(&format!("{}{}", self.said, record.text)))
    }
}

/// Runs all parts in one machine with this kernel, or in more after faults of the emulator. Skips, and prints why, if
/// there can be no machine.
pub fn try_all(kernel: &str, tier: &str, open: Vec<Part>) -> Result<()> {
    try_all_booted_with(kernel, tier, None, open)
}

/// Like [`try_all`], with these words on the kernel's command line.
pub fn try_all_booted_with(kernel: &str, tier: &str, words: Option<&str>, mut open: Vec<Part>) -> Result<()> {
    let Some(mut machine) = Machine::new(kernel, tier, words)? else { return Ok(()) };
    while !open.is_empty() {
        let boot = machine.boot(&open)?;
        let mut wrong = Vec::new();
        for part in &mut open {
            let Some(record) = boot.records.get(&part.name) else { continue };
            let late = boot.stuck_in.as_deref() == Some(&part.name);
            let outcome = match boot.interrupted.as_deref() == Some(&part.name) {
                true if boot.is_fault => {
                    part.keep_partial(record);
                    continue;
                }
                true => Err(anyhow!("the machine ended within it")),
                false if late => Err(anyhow!("the kernel complains of time")),
                false => part.judge(record),
            };
            match outcome {
                Ok(()) => {
                    println!("{kernel}: {} is right after {:.0} s", part.name, record.seconds);
                    part.is_done = true;
                }
                Err(error) => {
                    let last: Vec<&str> = record.text.lines().rev().take(LINES_OF_FAILURE).collect();
                    last.iter().rev().for_each(|line| println!("{kernel}| {line}"));
                    println!("{kernel}: {} fails: {error:#}", part.name);
                    part.failures += 1;
                    (part.passed, part.said) = (Vec::new(), String::new());
                    if part.failures == MAX_FAILURES {
                        wrong.push(format!("{}: {error:#}", part.name));
                    } else {
                        println!("{kernel}: another try of {}", part.name);
                    }
                }
            }
        }
        ensure!(wrong.is_empty(), "wrong on {kernel}: {}", wrong.join("; "));
        open.retain(|part| !part.is_done);
    }
    Ok(())
}

/// Results of one boot.
struct Boot {
    records: BTreeMap<String, Record>,
    /// The part that was running when the machine ended.
    interrupted: Option<String>,
    is_fault: bool,
    /// The part in which the kernel reported a stuck CPU.
    stuck_in: Option<String>,
}

struct Machine<'a> {
    kernel: &'a str,
    /// More words for the kernel's command line.
    words: Option<&'a str>,
    console: tempfile::NamedTempFile,
    /// Log of everything that the machines with this kernel print.
    log: File,
    faults: u32,
    _turn: MutexGuard<'static, ()>,
}

impl<'a> Machine<'a> {
    fn new(kernel: &'a str, tier: &str, words: Option<&'a str>) -> Result<Option<Self>> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(reason) = can_run(kernel) {
            // CI installs what is needed: a missing program is a failure there.
            ensure!(env::var_os("CI").is_none(), "{reason}");
            println!("skipped: {reason}");
            return Ok(None);
        }
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("matrix-{tier}-{kernel}.log"));
        let (console, log) = (tempfile::NamedTempFile::new()?, File::create(log)?);
        Ok(Some(Self { kernel, words, console, log, faults: 0, _turn: turn }))
    }

    fn boot(&mut self, parts: &[Part]) -> Result<Boot> {
        let mark = format!("whylate-matrix-{}", std::process::id());
        let (before, after): (Vec<&Part>, Vec<&Part>) = parts.iter().partition(|part| part.is_before_probes);
        let lines = |parts: Vec<&Part>| -> Result<String> {
            Ok(parts.into_iter().map(Part::line).collect::<Result<Vec<_>>>()?.join("\n"))
        };
        let (before, after) = (lines(before)?, lines(after)?);
        let directory = env!("CARGO_TARGET_TMPDIR").replace('\'', r"'\''");
        let script = format!(
            "mark={mark}\npart_timeout={PART_TIMEOUT_S}\nexport directory='{directory}'\n{RUN_PARTS}\n{before}\nset -e\n{MOUNT_DISK}\n\
             {KEEP_ENABLED}\nset +e\n{after}\n"
        );
        let mut vm = xtask();
        vm.args(["vm", self.kernel, "--no-tools", "--disk", DISK_MEBIBYTES, "--timeout", TIMEOUT_S]);
        vm.arg("--console").arg(self.console.path());
        if let Some(words) = self.words {
            vm.args(["--append", words]);
        }
        for name in LOADS.iter().chain(&DISK_TRACERS).chain(&DISK_MAKERS) {
            if is_arm64(self.kernel) || !installed(name) {
                continue;
            }
            vm.args(["--with", name]);
        }
        let mut with: Vec<PathBuf> = Vec::new();
        for part in parts {
            with.extend(part.files()?);
        }
        with.sort();
        with.dedup();
        for path in &with {
            vm.arg("--with").arg(path);
        }
        let words = ["--", "sh", "-c", &script].map(OsString::from);
        let mut running = vm.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut text = String::new();
        for line in BufReader::new(running.stdout.take().context("it has an output")?).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            // With the kernel's name in front, so that its results are not taken for those of this run.
            writeln!(self.log, "{}| {line}", self.kernel)?;
            text.extend([line.as_str(), "\n"]);
        }
        let status = running.wait()?.code().context("xtask was killed")?;
        writeln!(self.log, "{}: status {status}", self.kernel)?;
        let console = String::from_utf8_lossy(&fs::read(self.console.path())?).into_owned();
        let records = record::of_parts(&text, &mark);
        let interrupted = records.iter().find(|(_, record)| record.status.is_none()).map(|(name, _)| name.clone());
        let is_fault = status == NO_ANSWER && faults_of_emulator(&console);
        if is_fault {
            println!("{}: another try: the emulator ran an instruction that was gone", self.kernel);
            self.faults += 1;
            ensure!(self.faults <= MAX_FAULTS, "the emulator fails too often");
        } else if let Some((line, part)) = complaint(&console) {
            // It does not depend on the machine's speed, and will not be better the next time.
            bail!("the kernel {} complains in {}: {line}\n{console}", self.kernel, part.unwrap_or("its beginning"));
        }
        let stuck_in = stuck_cpu_part(&console).map(|part| part.unwrap_or_default().to_owned());
        if !is_fault && records.is_empty() && stuck_in.is_some() {
            println!("{}: another try: a CPU did not get on before any part had started", self.kernel);
            self.faults += 1;
            ensure!(self.faults <= MAX_FAULTS, "no part begins");
            return Ok(Boot { records, interrupted, is_fault: true, stuck_in });
        }
        // Emulated CPUs that go offline and online may end a machine silently: then the part has failed.
        let may_end = parts.iter().any(|part| part.switches_cpus_off && interrupted.as_ref() == Some(&part.name));
        let may_end = may_end && !console.contains(PANIC);
        if status == NO_ANSWER && !is_fault && stuck_in.is_none() && !may_end {
            bail!("the kernel {} ends in {interrupted:?}\n{console}", self.kernel);
        }
        ensure!(is_fault || !records.is_empty(), "no part has started on {}: status {status}\n{console}", self.kernel);
        Ok(Boot { records, interrupted, is_fault, stuck_in })
    }
}

/// Returns why there can be no virtual machine with this kernel.
fn can_run(kernel: &str) -> Result<()> {
    let succeeds = |command: &mut Command| -> Result<()> {
        let output = command.stdin(Stdio::null()).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    };
    if is_arm64(kernel) {
        succeeds(Command::new(root()?.join("scripts/install-deps")).args(["--check", "static", "arm64"]))?;
    } else {
        let status = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
        if !status.is_ok_and(|status| status.success()) {
            bail!("qemu-system-x86_64 is not installed (scripts/install-deps vm)");
        }
    }
    succeeds(xtask().args(["kernels", "--cached", kernel]))
}

/// The host's programs do not run there.
fn is_arm64(kernel: &str) -> bool {
    kernel.ends_with("arm64")
}

fn root() -> Result<&'static Path> {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the work tree has no root")
}

fn xtask() -> Command {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
}

fn installed(name: &str) -> bool {
    let paths = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&paths).any(|directory| directory.join(name).is_file())
}

/// Returns the path of a test program; builds all of them on the first call.
fn test_program(name: &str) -> Result<PathBuf> {
    static BUILT: OnceLock<Result<BTreeMap<String, PathBuf>, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| test_programs().map_err(|error| format!("{error:#}")));
    let built = built.as_ref().map_err(|error| anyhow!("{error}"))?;
    built.get(name).cloned().with_context(|| format!("cargo names no program for {name}"))
}

fn test_programs() -> Result<BTreeMap<String, PathBuf>> {
    let mut cargo = Command::new(env!("CARGO"));
    // With the features of a build of the workspace, which exists already.
    cargo.args(["test", "--workspace", "--no-run", "--message-format=json"]);
    let output = cargo.current_dir(root()?).stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "cannot build the tests: {}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = |message: Value| {
        let name = message["target"]["name"].as_str()?.to_owned();
        Some((name, PathBuf::from(message["executable"].as_str()?)))
    };
    Ok(messages.filter_map(program).collect())
}
