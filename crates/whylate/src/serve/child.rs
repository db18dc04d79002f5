// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that makes a profile or a report: this program itself, so that it measures as the command does, and its
//! memory is gone afterwards.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, geteuid, getpid, kill_process, test_kill_process};
use whylate_sources::kernel::credentials::end_with_this_thread;
use whylate_sources::kernel::least_privilege::pass_capabilities_on;

/// Time for the process to start and to write, beside what it measures.
const OVERHEAD: Duration = Duration::from_secs(60);
/// Time for the process to restore settings and to end, after it was asked to.
const TO_END: Duration = Duration::from_secs(10);
/// Poll interval for the end of the process.
const POLL: Duration = Duration::from_millis(50);
/// Maximum size of a profile or a report.
const MAX_BYTES: u64 = 64 << 20;

/// What is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Stacks of waiting threads, weighted by time, in pprof's format.
    Profile,
    /// An HTML page.
    Report,
}

impl Kind {
    fn file(self) -> &'static str {
        match self {
            Kind::Profile => "profile.pb.gz",
            Kind::Report => "report.html",
        }
    }

    fn command(self) -> &'static str {
        match self {
            Kind::Profile => "offcpu",
            Kind::Report => "report",
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Kind::Profile => "application/octet-stream",
            Kind::Report => "text/html; charset=utf-8",
        }
    }
}

/// Type and bytes of what was made.
type Made = anyhow::Result<(&'static str, Vec<u8>)>;

/// A running process. Dropping it ends the process, and waits for that.
#[derive(Debug)]
pub struct Child {
    is_canceled: Arc<AtomicBool>,
    made: Mutex<Receiver<Made>>,
    deadline: Instant,
    thread: Option<JoinHandle<()>>,
}

/// A directory that only this user can read, with what the process writes. Dropping it removes the directory.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let parent = std::env::temp_dir();
        let mut last = None;
        // Others may have made a name in /tmp: `mkdir` takes none that exists.
        for _ in 0..100 {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("{SCRATCH}{}-{number}", getpid().as_raw_nonzero()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Scratch(path)),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::Other.into()))
    }
}

/// Start of the names of such directories. The PID of the server follows.
const SCRATCH: &str = "whylate-serve-";

/// Removes the directories of servers that were killed.
pub fn remove_left_behind() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(SCRATCH)?.split_once('-')?.0.parse::<i32>().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        // Another user may have chosen the name.
        let is_own = entry.metadata().is_ok_and(|of| of.is_dir() && of.uid() == geteuid().as_raw());
        if is_own && test_kill_process(pid) == Err(Errno::SRCH) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Child {
    /// Starts to measure for some seconds. A byte is written to `wake` at the end.
    ///
    /// # Errors
    /// Fails if there is no place for the file, or no thread can be started.
    pub fn start(kind: Kind, seconds: u32, wake: Arc<UnixStream>) -> anyhow::Result<Self> {
        let scratch = Scratch::new().context("cannot make a directory for the profile")?;
        let deadline = Instant::now() + Duration::from_secs(seconds.into()) + OVERHEAD;
        let is_canceled = Arc::new(AtomicBool::new(false));
        let (sender, made) = channel();
        let seen = Arc::clone(&is_canceled);
        let thread = thread::Builder::new().name("whylate-profile".to_owned()).spawn(move || {
            // The process measures, too. If the kernel refuses this, it says what it lacks.
            let _ = pass_capabilities_on();
            // This thread lives as long as the process, which ends with it.
            let _ = sender.send(make(kind, seconds, &scratch.0, &seen, deadline));
            drop(scratch);
            let _ = (&*wake).write(&[0]);
        })?;
        Ok(Child { is_canceled, made: Mutex::new(made), deadline, thread: Some(thread) })
    }

    /// Returns when it ends at the latest.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Asks the process to end.
    pub fn cancel(&self) {
        self.is_canceled.store(true, Ordering::Relaxed);
    }

    /// Returns what it has made, once it has ended.
    pub fn take(&mut self) -> Option<Made> {
        self.made.get_mut().unwrap_or_else(PoisonError::into_inner).try_recv().ok()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs the process, and returns what it has written.
fn make(kind: Kind, seconds: u32, directory: &Path, is_canceled: &AtomicBool, deadline: Instant) -> Made {
    let (file, messages) = (directory.join(kind.file()), directory.join("messages"));
    // By its path, its threads have its name; the link is there even if the file was replaced.
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(program.unwrap_or_else(|| "/proc/self/exe".into()));
    command.args([kind.command(), "-d", &format!("{seconds}s"), "-o"]).arg(&file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&messages)?);
    end_with_this_thread(&mut command);
    let mut process = command.spawn().context("cannot start a second whylate")?;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if is_canceled.load(Ordering::Relaxed) || Instant::now() >= deadline {
            end(&mut process)?;
            bail!("the profile or report took too long");
        }
        thread::sleep(POLL);
    };
    if !status.success() {
        let said = fs::read_to_string(&messages).unwrap_or_default();
        return Err(anyhow!("{}", said.lines().last().unwrap_or("whylate has failed")));
    }
    if fs::metadata(&file)?.len() > MAX_BYTES {
        bail!("the profile or report is larger than 64 MiB: request fewer seconds");
    }
    Ok((kind.content_type(), fs::read(file)?))
}

/// Ends the process: first so that it can restore what it has changed.
fn end(process: &mut Process) -> io::Result<()> {
    kill_process(Pid::from_child(process), Signal::TERM)?;
    let until = Instant::now() + TO_END;
    while process.try_wait()?.is_none() {
        if Instant::now() >= until {
            process.kill()?;
            process.wait()?;
            break;
        }
        thread::sleep(POLL);
    }
    Ok(())
}
