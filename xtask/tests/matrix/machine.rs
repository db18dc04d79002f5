// SPDX-License-Identifier: MIT OR Apache-2.0
//! A virtual machine with one kernel, in which a command or a test program runs.

use std::cell::{Cell, RefCell};
use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Far more than a kernel needs, also on a busy machine.
const PATIENCE_S: &str = "1500";
/// Programs that make work items.
const LOADS: [&str; 2] = ["script", "unshare"];

/// The status of a machine in which the kernel ended before the command.
const NO_ANSWER: i32 = 125;
/// A kernel changes its code under a breakpoint, tells all CPUs, and forgets the breakpoint. A CPU that QEMU 7.2 emulates
/// in a thread of its own can run the translated breakpoint once more after that, rarely, and its kernel panics. (QEMU 8.1 and later
/// locks a page while it translates from it.) Or that CPU runs it again and again, where kprobes take it for one that was just removed, and
/// the kernel ends when RCU has waited for that CPU for too long.
const EMULATOR_FAULTS: [&str; 2] = ["Oops: int3: ", ":asm_exc_int3+"];
const TOLERATED_FAULTS: u32 = 8;
/// An emulated CPU stops at any time, for longer than what a part allows, rarely.
const TOLERATED_TRIES: u32 = 5;
/// Of time that an emulated CPU did not get, as a kernel says it; it ends by itself after the last of them.
const TOO_LATE: [&str; 3] = ["soft lockup", "workqueue lockup", "RCU Stall"];
/// Lines at the end of what a machine printed that tell why a part has failed, if it is tried again.
const TOLD_OF_TRY: usize = 40;

/// Two machines at once would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a program while the code at its tracepoints does not change.
pub const KEEP_ENABLED: &str = concat!(include_str!("../../keep-enabled.sh"), "exec \"$@\"\n");

/// What has nothing to do with how fast the machine is, and is no better the next time.
#[derive(Debug)]
struct KernelComplains(String);

impl Display for KernelComplains {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for KernelComplains {}

pub struct Machine<'a> {
    kernel: &'a str,
    console: tempfile::NamedTempFile,
    /// All that the machines with this kernel print.
    log: RefCell<File>,
    /// What they print during the part that goes on.
    said: RefCell<String>,
    faults: Cell<u32>,
    tries: Cell<u32>,
    _turn: MutexGuard<'static, ()>,
}

impl<'a> Machine<'a> {
    /// `None`, and a line that says why, where there can be none.
    pub fn new(kernel: &'a str) -> Result<Option<Self>> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(reason) = can_run(kernel) {
            // CI installs what is needed: what is missing there is a failure.
            ensure!(env::var_os("CI").is_none(), "{reason}");
            println!("skipped: {reason}");
            return Ok(None);
        }
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("matrix-{kernel}.log"));
        Ok(Some(Self {
            kernel,
            console: tempfile::NamedTempFile::new()?,
            log: RefCell::new(File::create(log)?),
            said: RefCell::default(),
            faults: Cell::new(0),
            tries: Cell::new(0),
            _turn: turn,
        }))
    }

    /// Tries something, and again if it fails, unless too much did. What was said is told of what failed only; the rest is in the log.
    pub fn part(&self, name: &str, part: impl Fn() -> Result<()>) -> Result<()> {
        loop {
            self.said.borrow_mut().clear();
            let began = Instant::now();
            let Err(error) = part() else {
                println!("{}: {name} is right after {:.0?}", self.kernel, began.elapsed());
                return Ok(());
            };
            if error.is::<KernelComplains>() || self.tries.get() == TOLERATED_TRIES {
                print!("{}", self.said.borrow());
                return Err(error.context(format!("{name} on {}", self.kernel)));
            }
            self.tries.set(self.tries.get() + 1);
            let said = self.said.borrow();
            let last: Vec<&str> = said.lines().rev().take(TOLD_OF_TRY).collect();
            last.iter().rev().for_each(|line| println!("{line}"));
            // A kernel's console comes after the first line.
            let reason = format!("{error:#}");
            println!("{}: another try of {name}: {}", self.kernel, reason.lines().next().unwrap_or_default());
        }
    }

    /// What a command printed that succeeded; the kernel has to be content as well.
    pub fn run(&self, with: &[PathBuf], command: &[OsString]) -> Result<String> {
        loop {
            let (status, text) = self.once(with, command)?;
            if !self.is_fault_of_emulator(status)? {
                return self.judge(command, status, text);
            }
        }
    }

    /// What all tests of a test program printed. After a fault of the emulator those go on that had not passed yet.
    pub fn run_tests(&self, name: &str) -> Result<String> {
        let tests = test_program(name)?;
        let mut passed: Vec<String> = Vec::new();
        let mut output = String::new();
        loop {
            let mut command = words(&["WHYLATE_EMULATED=1", "sh", "-ec", KEEP_ENABLED, "sh"]);
            command.push(tests.clone().into());
            // Without capturing, what a test said is there also if the kernel ends in a later one.
            command.extend(words(&["--test-threads=1", "--nocapture", "--exact"]));
            command.extend(passed.iter().flat_map(|name| ["--skip".into(), name.into()]));
            let (status, text) = self.once(slice::from_ref(&tests), &command)?;
            passed.extend(passed_tests(&text).map(str::to_owned));
            output += &without_names(&text);
            if !self.is_fault_of_emulator(status)? {
                return self.judge(&command, status, output);
            }
        }
    }

    fn is_fault_of_emulator(&self, status: i32) -> Result<bool> {
        let console = self.console()?;
        if status != NO_ANSWER || !EMULATOR_FAULTS.iter().any(|fault| console.contains(fault)) {
            return Ok(false);
        }
        self.say(&format!("{}: another try: the emulator ran an instruction that was gone", self.kernel))?;
        self.faults.set(self.faults.get() + 1);
        ensure!(self.faults.get() <= TOLERATED_FAULTS, "the emulator fails too often");
        Ok(true)
    }

    fn judge(&self, command: &[OsString], status: i32, text: String) -> Result<String> {
        let console = self.console()?;
        let complaint = complaint(&console);
        let is_too_late = TOO_LATE.iter().any(|late| console.contains(late));
        if complaint.is_some() || (status == NO_ANSWER && !is_too_late) {
            let said = complaint.unwrap_or("its end");
            return Err(KernelComplains(format!("the kernel {} complains: {said}\n{console}", self.kernel)).into());
        }
        ensure!(status == 0 && !is_too_late, "{command:?} failed on {}: status {status}\n{console}", self.kernel);
        Ok(text)
    }

    fn console(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(self.console.path())?).into_owned())
    }

    fn say(&self, line: &str) -> Result<()> {
        writeln!(self.log.borrow_mut(), "{line}")?;
        self.said.borrow_mut().extend([line, "\n"]);
        Ok(())
    }

    /// Boots and runs; the status and what was printed.
    fn once(&self, with: &[PathBuf], command: &[OsString]) -> Result<(i32, String)> {
        let began = Instant::now();
        let mut vm = xtask();
        vm.args(["vm", self.kernel, "--no-tools", "--timeout", PATIENCE_S, "--console"]).arg(self.console.path());
        for name in LOADS.iter().filter(|name| installed(name)) {
            vm.args(["--with", name]);
        }
        for path in with {
            vm.arg("--with").arg(path);
        }
        let output = vm.arg("--").args(command).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // In front of each line the kernel, so that nobody takes its results for those of this run.
        for line in text.lines() {
            self.say(&format!("{}| {line}", self.kernel))?;
        }
        self.say(&format!("{}: {} after {:.0?}", self.kernel, output.status, began.elapsed()))?;
        Ok((output.status.code().context("xtask was killed")?, text))
    }
}

/// The first line in which a kernel complains, but of time.
fn complaint(console: &str) -> Option<&str> {
    let complaints = ["WARNING: ", "BUG: ", "Oops: ", "general protection fault"];
    let is_complaint = |line: &&str| complaints.iter().any(|complaint| line.contains(complaint));
    console.lines().filter(is_complaint).find(|line| !TOO_LATE.iter().any(|late| line.contains(late)))
}

#[test]
fn complaints_of_time_alone_are_no_complaints() {
    let late =
        "[  9.1] BUG: workqueue lockup - pool cpus=1 stuck for 31s!\n[ 9.2] Kernel panic - not syncing: RCU Stall\n";
    assert_eq!(complaint(late), None);
    let oops = "[  9.3] Oops: general protection fault, 0000 [#1]";
    assert_eq!(complaint(&format!("{late}{oops}\n")), Some(oops));
    assert_eq!(
        complaint("[  9.4] WARNING: CPU: 0 PID: 1 at kernel/x.c:1\n"),
        Some("[  9.4] WARNING: CPU: 0 PID: 1 at kernel/x.c:1")
    );
}

/// Why there can be no virtual machine with this kernel.
fn can_run(kernel: &str) -> Result<()> {
    let status = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
    if !status.is_ok_and(|status| status.success()) {
        bail!("qemu-system-x86_64 is not installed (scripts/install-deps vm)");
    }
    let output = xtask().args(["kernels", "--cached", kernel]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn xtask() -> Command {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
}

pub fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn installed(name: &str) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&folders).any(|folder| folder.join(name).is_file())
}

/// Without capturing, a test's name stands before the first line that it prints, and its result in a line by itself.
const NAME_ENDS: &str = " ... ";

fn passed_tests(output: &str) -> impl Iterator<Item = &str> {
    let mut name = None;
    output.lines().filter_map(move |line| {
        let mut rest = line;
        if let Some((begun, after)) = line.strip_prefix("test ").and_then(|line| line.split_once(NAME_ENDS)) {
            (name, rest) = (Some(begun), after);
        }
        if rest == "ok" { name.take() } else { None }
    })
}

fn without_names(output: &str) -> String {
    let rest = |line: &str| match line.strip_prefix("test ").and_then(|line| line.split_once(NAME_ENDS)) {
        Some((_, rest)) => format!("{rest}\n"),
        None => format!("{line}\n"),
    };
    output.lines().map(rest).collect()
}

#[test]
fn what_tests_say_is_told_from_their_names() {
    let output = "test a ... ok\ntest b ... skipped: no\nok\ntest c ... 5 executions\nFAILED\ntest d ... ";
    assert_eq!(passed_tests(output).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(without_names(output), "ok\nskipped: no\nok\n5 executions\nFAILED\n\n");
}

/// Builds a test program and returns where it is.
fn test_program(name: &str) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the work tree has no root")?;
    let mut cargo = Command::new(env!("CARGO"));
    // With the features of a build of everything, which is there already.
    cargo.args(["test", "--workspace", "--test", name, "--no-run", "--message-format=json"]);
    let output = cargo.current_dir(root).stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "cannot build {name}: {}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout)?;
    let mut messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = messages.find(|message| message["target"]["name"] == name && message["executable"].is_string());
    let program = program.with_context(|| format!("cargo names no program for {name}"))?;
    Ok(PathBuf::from(program["executable"].as_str().unwrap_or_default()))
}
