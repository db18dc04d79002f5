// SPDX-License-Identifier: MIT OR Apache-2.0
//! One boot of a virtual machine for many parts: each is a command or a test program, whose output is judged here.

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

use crate::record::{self, Record, complaint, faults_of_emulator, is_too_late, passed_tests};

/// Far more than all parts need, also on a busy machine.
const PATIENCE_S: &str = "2400";
/// Of the disk on which tests write.
const DISK_MEBIBYTES: &str = "64";
/// Far more than any part needs.
const PATIENCE_OF_PART_S: u32 = 900;
/// Programs that make work items.
const LOADS: [&str; 2] = ["script", "unshare"];
/// What tells of a disk by itself.
const DISK_TRACERS: [&str; 2] = ["blktrace", "blkparse"];
/// What makes something of a disk: a file system with a journal, and a device on it.
const DISK_MAKERS: [&str; 2] = ["mkfs.ext4", "dmsetup"];

/// The status of a machine in which the kernel ended before the command.
const NO_ANSWER: i32 = 125;
const TOLERATED_FAULTS: u32 = 8;
/// What the kernel says when it ends by itself.
const PANIC: &str = "Kernel panic";
/// An emulated CPU stops at any time, for longer than what a part allows: in one of ten runs of a part, at most. A part
/// is wrong where it fails so often, which happens by chance in one of 10,000 runs.
const FAILURES: u32 = 4;
/// Lines at the end of what a part printed that tell why it has failed.
const TOLD_OF_FAILURE: usize = 40;

/// Two machines at once would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Keeps the code at tracepoints from changing, in the shell that runs all parts.
const KEEP_ENABLED: &str = include_str!("../../keep-enabled.sh");

/// Tells where each part begins and ends, on the line of commands and on the kernel's console.
const RUN_PARTS: &str = r#"
part() {
    name=$1
    shift
    echo "<1>whylate-part: $name" >/dev/kmsg
    printf '\n%s begin %s\n' "$mark" "$name"
    timeout -s KILL "$patience" "$@"
    printf '\n%s end %d %s %s\n' "$mark" $? "$(cut -d ' ' -f 1 /proc/uptime)" "$name"
    # What a part that failed has left behind must not run beside the next one.
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! readlink "$process/exe" >/dev/null 2>&1 || kill -9 "$pid" 2>/dev/null
    done
}
"#;

/// Where tests write: to a disk, where the kernel has its driver.
const MOUNT_DISK: &str = r#"
mkdir -p "$folder"
[ ! -b /dev/nvme0n1 ] || { mke2fs /dev/nvme0n1 >/dev/null && mount -t ext4 /dev/nvme0n1 "$folder"; }
"#;

type Judge = Box<dyn Fn(&str) -> Result<()>>;

enum What {
    /// Words, and files that they name.
    Command(Vec<String>, Vec<PathBuf>),
    /// A test program, and its tests that run; all without a name.
    Tests(&'static str, &'static [&'static str]),
}

/// Something that is tried in a machine.
pub struct Part {
    name: String,
    what: What,
    judge: Judge,
    /// Of tests that have passed before the kernel ended, and what all of them said.
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

    /// A shell's commands: the first that fails ends them.
    pub fn shell(name: &str, script: &str, judge: impl Fn(&str) -> Result<()> + 'static) -> Part {
        let words = ["sh", "-ec", script].map(str::to_owned).into();
        Part::new(name, What::Command(words, Vec::new()), judge)
    }

    /// Runs while the kernel's tracepoints are as after a boot, so that attaching changes the kernel's code.
    pub fn before_probes(mut self) -> Part {
        self.is_before_probes = true;
        self
    }

    /// The machine sleeps meanwhile, or one of its CPUs goes.
    pub fn switches_cpus_off(mut self) -> Part {
        self.switches_cpus_off = true;
        self
    }

    /// A script of this folder.
    pub fn script(file: &str, words: &[&str], judge: impl Fn(&str) -> Result<()> + 'static) -> Part {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/matrix").join(file);
        let command = ["sh".to_owned(), path.display().to_string()].into_iter();
        let command = command.chain(words.iter().map(|&word| word.to_owned())).collect();
        Part::new(&format!("{file}: {}", words[0]), What::Command(command, vec![path]), judge)
    }

    /// This program is there too.
    pub fn with(mut self, program: &str) -> Part {
        if let What::Command(_, files) = &mut self.what {
            files.push(PathBuf::from(program));
        }
        self
    }

    /// A test program's tests of these names; all of them without a name.
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

    /// Its line in the script of a boot.
    fn line(&self) -> Result<String> {
        let mut words = vec!["part".to_owned(), self.name.clone()];
        match &self.what {
            What::Command(command, _) => words.extend(command.iter().cloned()),
            What::Tests(program, only) => {
                words.extend(["env", "WHYLATE_EMULATED=1"].map(str::to_owned));
                words.push(test_program(program)?.display().to_string());
                // Without capturing, what a test said is there also if the kernel ends in a later one.
                words.extend(["--test-threads=1", "--nocapture", "--exact"].map(str::to_owned));
                words.extend(only.iter().map(|&name| name.to_owned()));
                words.extend(self.passed.iter().flat_map(|name| ["--skip".to_owned(), name.clone()]));
            }
        }
        let quoted: Vec<String> = words.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
        Ok(quoted.join(" "))
    }

    /// Takes what it printed until the kernel ended.
    fn go_on_after(&mut self, record: &Record) {
        if let What::Tests(..) = self.what {
            self.passed.extend(passed_tests(&record.text));
            self.said += &record.text;
        }
    }

    fn judge(&self, record: &Record) -> Result<()> {
        let status = record.status.context("it has not ended")?;
        ensure!(status == 0, "status {status}");
        if let What::Tests(_, only) = self.what {
            // A name that nothing bears runs nothing.
            let passed = self.passed.len() + passed_tests(&record.text).count();
            ensure!(passed >= only.len().max(1), "{passed} tests have passed, of {only:?}");
        }
        (self.judge)(&record::without_names(&format!("{}{}", self.said, record.text)))
    }
}

/// Tries all of them in one machine with this kernel, or in some more after a fault of the emulator. `None`, and a line
/// that says why, where there can be none.
pub fn try_all(kernel: &str, tier: &str, open: Vec<Part>) -> Result<()> {
    try_all_booted_with(kernel, tier, None, open)
}

/// The same with these words on the kernel's command line.
pub fn try_all_booted_with(kernel: &str, tier: &str, words: Option<&str>, mut open: Vec<Part>) -> Result<()> {
    let Some(mut machine) = Machine::new(kernel, tier, words)? else { return Ok(()) };
    while !open.is_empty() {
        let boot = machine.boot(&open)?;
        let mut wrong = Vec::new();
        for part in &mut open {
            let Some(record) = boot.records.get(&part.name) else { continue };
            let late = boot.too_late_in.as_deref() == Some(&part.name);
            let outcome = match boot.interrupted.as_deref() == Some(&part.name) {
                true if boot.is_fault => {
                    part.go_on_after(record);
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
                    let last: Vec<&str> = record.text.lines().rev().take(TOLD_OF_FAILURE).collect();
                    last.iter().rev().for_each(|line| println!("{kernel}| {line}"));
                    println!("{kernel}: {} fails: {error:#}", part.name);
                    part.failures += 1;
                    (part.passed, part.said) = (Vec::new(), String::new());
                    if part.failures == FAILURES {
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

/// What one boot has shown.
struct Boot {
    records: BTreeMap<String, Record>,
    /// The part that had begun when the machine ended.
    interrupted: Option<String>,
    is_fault: bool,
    /// The part in which the kernel said that a CPU did not get on.
    too_late_in: Option<String>,
}

struct Machine<'a> {
    kernel: &'a str,
    /// More words of the kernel's command line.
    words: Option<&'a str>,
    console: tempfile::NamedTempFile,
    /// All that the machines with this kernel print.
    log: File,
    faults: u32,
    _turn: MutexGuard<'static, ()>,
}

impl<'a> Machine<'a> {
    fn new(kernel: &'a str, tier: &str, words: Option<&'a str>) -> Result<Option<Self>> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(reason) = can_run(kernel) {
            // CI installs what is needed: what is missing there is a failure.
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
        let folder = env!("CARGO_TARGET_TMPDIR").replace('\'', r"'\''");
        let script = format!(
            "mark={mark}\npatience={PATIENCE_OF_PART_S}\nexport folder='{folder}'\n{RUN_PARTS}\n{before}\nset -e\n{MOUNT_DISK}\n\
             {KEEP_ENABLED}\nset +e\n{after}\n"
        );
        let mut vm = xtask();
        vm.args(["vm", self.kernel, "--no-tools", "--disk", DISK_MEBIBYTES, "--timeout", PATIENCE_S]);
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
            // In front of each line the kernel, so that nobody takes its results for those of this run.
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
            ensure!(self.faults <= TOLERATED_FAULTS, "the emulator fails too often");
        } else if let Some((line, part)) = complaint(&console) {
            // It has nothing to do with how fast the machine is, and is no better the next time.
            bail!("the kernel {} complains in {}: {line}\n{console}", self.kernel, part.unwrap_or("its beginning"));
        }
        let too_late_in = is_too_late(&console).map(|part| part.unwrap_or_default().to_owned());
        if !is_fault && records.is_empty() && too_late_in.is_some() {
            println!("{}: another try: a CPU did not get on before any part had begun", self.kernel);
            self.faults += 1;
            ensure!(self.faults <= TOLERATED_FAULTS, "no part begins");
            return Ok(Boot { records, interrupted, is_fault: true, too_late_in });
        }
        // Emulated CPUs that are switched off and on again may end a machine without a word: that part has failed.
        let may_end = parts.iter().any(|part| part.switches_cpus_off && interrupted.as_ref() == Some(&part.name));
        let may_end = may_end && !console.contains(PANIC);
        if status == NO_ANSWER && !is_fault && too_late_in.is_none() && !may_end {
            bail!("the kernel {} ends in {interrupted:?}\n{console}", self.kernel);
        }
        ensure!(is_fault || !records.is_empty(), "no part has begun on {}: status {status}\n{console}", self.kernel);
        Ok(Boot { records, interrupted, is_fault, too_late_in })
    }
}

/// Why there can be no virtual machine with this kernel.
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

/// Programs of this machine do not run there.
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
    let folders = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&folders).any(|folder| folder.join(name).is_file())
}

/// Builds all test programs, once, and returns where one of them is.
fn test_program(name: &str) -> Result<PathBuf> {
    static BUILT: OnceLock<Result<BTreeMap<String, PathBuf>, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| test_programs().map_err(|error| format!("{error:#}")));
    let built = built.as_ref().map_err(|error| anyhow!("{error}"))?;
    built.get(name).cloned().with_context(|| format!("cargo names no program for {name}"))
}

fn test_programs() -> Result<BTreeMap<String, PathBuf>> {
    let mut cargo = Command::new(env!("CARGO"));
    // With the features of a build of everything, which is there already.
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
