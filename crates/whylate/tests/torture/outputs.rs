// SPDX-License-Identifier: MIT OR Apache-2.0
//! Outputs that cannot be written: the disk is full or broken, or the reader is gone.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::COMMANDS;
use crate::exercise::{Exercise, is_whole, part};
use crate::lock::lock_machine;
use crate::running::whylate;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Full,
    Broken,
    Unread,
}

const FAILURES: [(Failure, &str); 3] =
    [(Failure::Full, "ENOSPC"), (Failure::Broken, "EIO"), (Failure::Unread, "closed pipe")];

/// Output that a command writes its result to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Stdout,
    /// Report beside a command's own output.
    Stderr,
    /// Output whose errors are ignored.
    Nowhere,
}

/// Trace for commands that import one.
const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests/traces/perf-sched.txt");

/// Commands without a source, and each source in JSON.
const OTHERS: [(&[&str], To); 19] = [
    (&["wq", "--why", "1ms", "--json", "-d", "200ms"], To::Stdout),
    (&["timerlat", "hist", "--json", "-d", "200ms"], To::Stdout),
    (&["timerlat", "top", "-d", "200ms"], To::Stdout),
    (&["irqsoff", "--json", "-d", "200ms"], To::Stdout),
    (&["offcpu", "--json", "-d", "200ms"], To::Stdout),
    (&["offcpu", "--blocked", "1ms", "--hide-idle"], To::Stdout),
    (&["sqpoll", "--json", "-d", "200ms"], To::Nowhere),
    (&["block", "--json", "-d", "200ms"], To::Stdout),
    (&["--json", "-d", "200ms"], To::Stdout),
    (&["-p", "1", "-d", "200ms"], To::Stdout),
    (&["-p", "1", "--json", "-d", "200ms"], To::Stdout),
    (&["run", "--", "true"], To::Stderr),
    (&["run", "--json", "--", "true"], To::Stderr),
    (&["run", "--import", TRACE], To::Stdout),
    (&["offcpu", "import", "stacks.txt"], To::Stdout),
    (&["doctor"], To::Stdout),
    (&["doctor", "--json"], To::Stdout),
    (&["--help-lost"], To::Stdout),
    (&["--help"], To::Nowhere),
];

/// Each kind of file; the last word is the file's name.
const FILES: [&[&str]; 15] = [
    &["offcpu", "-d", "200ms", "-o", "out.svg"],
    &["run", "-o", "out.svg", "--", "true"],
    &["offcpu", "-d", "200ms", "-o", "out.folded"],
    &["offcpu", "-d", "200ms", "-o", "out.pb.gz"],
    &["offcpu", "-d", "200ms", "-o", "out.json"],
    &["offcpu", "-d", "200ms", "-o", "out.speedscope.json"],
    // Some thread always sleeps this long; without a wait there is nothing to write to the second file.
    &["offcpu", "--why", "1ms", "--idle", "-d", "200ms", "-o", "out.svg"],
    &["offcpu", "--why", "1ms", "--idle", "-d", "200ms", "-o", "out.folded"],
    &["run", "-o", "out.folded", "--", "true"],
    &["run", "-o", "out.json", "--", "true"],
    &["offcpu", "import", "../stacks.txt", "-o", "out.svg"],
    &["offcpu", "import", "../stacks.txt", "-o", "out.folded"],
    &["offcpu", "--diff", "../stacks.folded", "../stacks.folded", "-o", "out.svg"],
    &["offcpu", "--diff", "../stacks.folded", "../stacks.folded", "-o", "out.folded"],
    &["timerlat", "hist", "-T", "1", "-d", "200ms", "-t", "out.txt"],
];

/// Address 0 of a process is never mapped.
fn failing(failure: Failure) -> Result<OwnedFd> {
    let write = |path: &str| OpenOptions::new().write(true).open(path);
    Ok(match failure {
        Failure::Full => write("/dev/full")?.into(),
        Failure::Broken => write("/proc/self/mem")?.into(),
        Failure::Unread => {
            let (reader, writer) = std::io::pipe()?;
            drop(reader);
            writer.into()
        }
    })
}

#[test]
fn failing_outputs_end_it_cleanly() -> Result<()> {
    const NAME: &str = "outputs";
    let Some(_lock) = lock_machine() else { return Exercise::skipped(NAME, "no source measures here") };
    let mut exercise = Exercise::begin(NAME)?;
    let stacks = [exercise.directory().join("stacks.txt"), exercise.directory().join("stacks.folded")];
    fs::write(&stacks[0], "[<0>] do_nanosleep+0x1/0x2\n[<0>] __x64_sys_nanosleep+0x1/0x2\n\n")?;
    fs::write(&stacks[1], "a;b 1\na;c 2\n")?;
    let mut commands: Vec<_> = COMMANDS.iter().map(|&words| (words, To::Stdout)).collect();
    commands.extend(OTHERS);
    for (words, to) in part(&commands, 2) {
        // Short runs suffice: the output at the end is what fails.
        let words: Vec<&str> = words.iter().map(|&word| if word == "1s" { "200ms" } else { word }).collect();
        streams(&mut exercise, &words, *to)?;
    }
    for words in part(&FILES, 1) {
        for (failure, named) in FAILURES {
            let what = format!("{named} of the file of {words:?}");
            // As with rtla, a latency over the threshold exits with 2, whether or not the trace was written.
            let expected: &[i32] = match (failure, words[0]) {
                (_, "timerlat") => &[2],
                (Failure::Unread, _) => &[0, 1],
                _ => &[1],
            };
            let name = words.iter().copied().find(|word| word.starts_with("out.")).context("no file is named")?;
            file(&mut exercise, words, name, failure, &what, expected)?;
        }
    }
    if is_whole() {
        for (what, name) in [("man", "whylate.1"), ("completions", "whylate.bash")] {
            for (failure, named) in &FAILURES[..2] {
                let words = ["generate", what, "--to", "."];
                file(&mut exercise, &words, name, *failure, &format!("{named} of {words:?}"), &[1])?;
            }
        }
    }
    stacks.iter().try_for_each(fs::remove_file)?;
    exercise.note("standard output, standard error, each kind of file".to_owned());
    exercise.end()
}

/// Standard output fails, or standard error; all runs at once, as they mostly wait for the kernel.
fn streams(exercise: &mut Exercise, words: &[&str], to: To) -> Result<()> {
    let mut started = Vec::new();
    for (failure, named) in FAILURES {
        for stream in [To::Stdout, To::Stderr] {
            let failing = Stdio::from(failing(failure)?);
            let mut command = whylate(words);
            match stream {
                To::Stdout => command.stdout(failing).stderr(Stdio::piped()),
                _ => command.stdout(Stdio::piped()).stderr(failing),
            };
            let expected = i32::from(to == stream && failure != Failure::Unread);
            started.push((exercise.start_as(&mut command)?, expected, format!("{named} of {stream:?} of {words:?}")));
        }
    }
    for (child, expected, what) in started {
        let Some(output) = exercise.finish(child, &what)? else { continue };
        // A source without output succeeds, whatever its output is.
        if output.status.code() != Some(expected) && !(to == To::Nowhere && output.status.code() == Some(1)) {
            let message = String::from_utf8_lossy(&output.stderr);
            exercise.wrong(&format!("{what}: {}, not {expected}: {message}", output.status));
        }
    }
    Ok(())
}

/// A directory in which a file of that name cannot be written.
struct FailingFile {
    directory: PathBuf,
    file: PathBuf,
    reader: Option<(JoinHandle<()>, Arc<AtomicBool>)>,
}

impl FailingFile {
    fn make(directory: &Path, name: &str, failure: Failure) -> Result<Self> {
        let directory = directory.join("failing");
        fs::create_dir(&directory)?;
        // One page: a file can be created but not written.
        let full = c"size=4k";
        mount("tmpfs", &directory, "tmpfs", MountFlags::empty(), full).context("cannot mount a small tmpfs")?;
        let mut made = FailingFile { file: directory.join(name), directory, reader: None };
        match failure {
            Failure::Full => fs::write(made.directory.join("fill"), [1; 4096])?,
            Failure::Broken => {
                // A terminal whose other end is closed.
                let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
                grantpt(&terminal)?;
                unlockpt(&terminal)?;
                let other_end = ptsname(&terminal, Vec::new())?;
                File::create(&made.file)?;
                mount_bind(other_end.to_str()?, &made.file).context("cannot bind a terminal")?;
            }
            Failure::Unread => {
                mknodat(CWD, &made.file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
                // A reader that closes at once.
                let (path, stop) = (made.file.clone(), Arc::new(AtomicBool::new(false)));
                let until = Arc::clone(&stop);
                let reader = thread::spawn(move || {
                    while !until.load(Ordering::Relaxed) {
                        let _ = File::open(&path);
                    }
                });
                made.reader = Some((reader, stop));
            }
        }
        Ok(made)
    }
}

impl Drop for FailingFile {
    fn drop(&mut self) {
        if let Some((reader, stop)) = self.reader.take() {
            stop.store(true, Ordering::Relaxed);
            // Unblocks the reader if no process opened the file.
            let other_end =
                OpenOptions::new().read(true).write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&self.file);
            let _ = reader.join();
            drop(other_end);
        }
        let _ = unmount(&self.file, UnmountFlags::DETACH);
        let _ = unmount(&self.directory, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.directory);
    }
}

fn file(
    exercise: &mut Exercise,
    words: &[&str],
    name: &str,
    failure: Failure,
    what: &str,
    expected: &[i32],
) -> Result<()> {
    let failing = FailingFile::make(exercise.directory(), name, failure)?;
    let mut command = whylate(words);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).current_dir(&failing.directory);
    exercise.count();
    let child = command.spawn()?;
    if let Some(output) = exercise.finish(child, what)?
        && !output.status.code().is_some_and(|code| expected.contains(&code))
    {
        let message = String::from_utf8_lossy(&output.stderr);
        exercise.wrong(&format!("{what}: {}, not {expected:?}: {message}", output.status));
    }
    Ok(())
}
