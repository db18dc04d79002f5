// SPDX-License-Identifier: MIT OR Apache-2.0
//! One exercise and its row in the table: runs, leftovers by kind, and failures.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::left::{KINDS, Leftovers};
use crate::running::whylate;

/// Timeout, far above what a run takes, also with ten busy threads per CPU.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Exit status of a Rust program that panicked.
const PANICKED: i32 = 101;
/// Exit status of a measurement that hit its threshold: no failure, and no reason is expected.
const OVER_THRESHOLD: i32 = 2;

/// Set for the full run, not for the part in `make test`: the file that takes the rows.
fn rows() -> Option<std::ffi::OsString> {
    env::var_os("WHYLATE_TORTURE")
}

/// Returns true under `make torture`.
pub fn is_whole() -> bool {
    rows().is_some()
}

/// Returns all commands, or this many of them in `make test`.
pub fn part<T>(commands: &[T], in_test: usize) -> &[T] {
    &commands[..if is_whole() { commands.len() } else { in_test.min(commands.len()) }]
}

pub struct Exercise {
    name: &'static str,
    /// Working directory of the commands.
    directory: TempDir,
    before: Leftovers,
    times: u64,
    panics: u64,
    hangs: u64,
    /// Outputs with control characters, or that are not text.
    letters: u64,
    other: u64,
    note: String,
}

impl Exercise {
    pub fn begin(name: &'static str) -> Result<Self> {
        // Not named after whylate: files that are count as leftovers.
        let directory = tempfile::Builder::new().prefix("torture-").tempdir()?;
        let before = Leftovers::now(directory.path());
        Ok(Self { name, directory, before, times: 0, panics: 0, hangs: 0, letters: 0, other: 0, note: String::new() })
    }

    /// Adds a row that says why there are no figures.
    pub fn skipped(name: &str, reason: &str) -> Result<()> {
        println!("skipped: {reason}");
        add_row(&format!("{name}\tskipped: {reason}"))
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Counts a run of something other than a command that exits by itself.
    pub fn count(&mut self) {
        self.times += 1;
    }

    /// Counts a failure without a column of its own.
    pub fn wrong(&mut self, what: &str) {
        println!("WRONG: {}: {what}", self.name);
        self.other += 1;
    }

    /// Adds a remark to the row.
    pub fn note(&mut self, note: String) {
        self.note = note;
    }

    /// Starts whylate in the exercise's directory, with outputs that `finish` reads.
    pub fn start(&mut self, words: &[&str]) -> Result<Child> {
        let mut command = whylate(words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        self.start_as(&mut command)
    }

    /// Starts whylate with the caller's outputs, or in a shell around it.
    pub fn start_as(&mut self, command: &mut Command) -> Result<Child> {
        self.times += 1;
        Ok(command.stdin(Stdio::null()).current_dir(self.directory()).spawn()?)
    }

    /// Returns the output of a run that exits by itself; a failure must say why in one line. `None` if it did not exit.
    pub fn finish(&mut self, mut child: Child, what: &str) -> Result<Option<Output>> {
        let deadline = Instant::now() + TIMEOUT;
        // An output that is not read would block it.
        let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
        let is_heard = stderr.is_some();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() >= deadline {
                println!("WRONG: {}: {what} does not end", self.name);
                self.hangs += 1;
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            sleep(Duration::from_millis(10));
        };
        let joined = |reader: Option<JoinHandle<Vec<u8>>>| match reader {
            Some(reader) => reader.join().ok().context("its output cannot be read"),
            None => Ok(Vec::new()),
        };
        let output = Output { status, stdout: joined(stdout)?, stderr: joined(stderr)? };
        let text = String::from_utf8_lossy(&output.stderr);
        if status.signal().is_some() || status.code() == Some(PANICKED) || text.contains("panicked") {
            println!("WRONG: {}: {what}: {status}: {text}", self.name);
            self.panics += 1;
        } else if is_heard && status.code() != Some(0) && !(status.code() == Some(OVER_THRESHOLD) && text.is_empty()) {
            let says_why = text.lines().any(|line| line.starts_with("whylate: ") || line.starts_with("error: "));
            if !says_why {
                self.wrong(&format!("{what}: {status} and no reason: {text}"));
            }
        }
        self.check_output(&output.stdout, what);
        self.check_output(&output.stderr, &format!("what {what} says beside it"));
        Ok(Some(output))
    }

    /// Runs a command to its end and expects success.
    pub fn run(&mut self, words: &[&str], beside: &str) -> Result<()> {
        let what = format!("{words:?}{beside}");
        let child = self.start(words)?;
        self.finish_well(child, &what)
    }

    pub fn finish_well(&mut self, child: Child, what: &str) -> Result<()> {
        match self.finish(child, what)? {
            Some(output) if !output.status.success() => {
                self.wrong(&format!("{what}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
            }
            _ => {}
        }
        Ok(())
    }

    /// Output must be text without control characters.
    pub fn check_output(&mut self, text: &[u8], what: &str) {
        let is_plain = |letter: char| matches!(letter, '\n' | '\t') || !letter.is_control();
        let found = match std::str::from_utf8(text) {
            Ok(text) => text.chars().find(|&letter| !is_plain(letter)).map(|letter| format!("{letter:?}")),
            Err(error) => Some(format!("no text from byte {}", error.valid_up_to())),
        };
        if let Some(found) = found {
            println!("WRONG: {}: {what} has {found}", self.name);
            self.letters += 1;
        }
    }

    /// Compares the machine's state with the one before and adds the row.
    pub fn end(self) -> Result<()> {
        let left = self.before.left_behind(self.directory());
        let mut counts: Vec<u64> = left.iter().map(|left| left.len() as u64).collect();
        for (kind, left) in KINDS.iter().zip(&left).filter(|(_, left)| !left.is_empty()) {
            println!("WRONG: {}: {} {kind} are left behind: {left:?}", self.name, left.len());
        }
        counts.extend([self.panics, self.hangs, self.letters, self.other]);
        let named = KINDS.iter().chain(&["panics", "hangs", "letters", "other"]).zip(&counts);
        let text: Vec<String> = named.map(|(name, count)| format!("{count} {name}")).collect();
        println!("{}, {} times: {}; {}", self.name, self.times, text.join(", "), self.note);
        let figures: Vec<String> = counts.iter().map(u64::to_string).collect();
        add_row(&format!("{}\t{}\t{}\t{}", self.name, self.times, figures.join("\t"), self.note))?;
        ensure!(counts.iter().all(|&count| count == 0), "{}: {}", self.name, text.join(", "));
        Ok(())
    }
}

fn add_row(row: &str) -> Result<()> {
    let Some(path) = rows() else { return Ok(()) };
    Ok(writeln!(OpenOptions::new().append(true).create(true).open(path)?, "{row}")?)
}

fn read(from: Option<impl Read + Send + 'static>) -> Option<JoinHandle<Vec<u8>>> {
    let mut from = from?;
    Some(thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    }))
}

/// Waits until everything is attached: its kernel objects have not changed for a while, longer for commands that may
/// have none. Also returns after it exits.
pub fn wait_until_it_measures(pid: u32) {
    let (mut held, mut calm) = (0, 0);
    let deadline = Instant::now() + TIMEOUT;
    while calm < if held > 0 { 4 } else { 20 } && Instant::now() < deadline {
        sleep(Duration::from_millis(50));
        let Some(now) = kernel_objects(pid) else { return };
        calm = if now == held { calm + 1 } else { 0 };
        held = now;
    }
}

fn kernel_objects(pid: u32) -> Option<usize> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let links = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    Some(links.filter(|to| ["bpf", "perf_event"].iter().any(|of| to.to_string_lossy().contains(of))).count())
}

/// Returns when the process, with its kernel objects made, first waits for the end of its span, or exits.
pub fn measures_since(pid: u32) -> Instant {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        // poll(2) on x86-64; ppoll(2) there and in the generic table.
        let Ok(call) = fs::read_to_string(format!("/proc/{pid}/syscall")) else { break };
        let waits = ["7 ", "271 ", "73 "].iter().any(|poll| call.starts_with(poll));
        if waits && kernel_objects(pid).is_none_or(|objects| objects > 0) {
            break;
        }
        sleep(Duration::from_millis(10));
    }
    Instant::now()
}
