// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that makes a profile or a report: this program itself, so that a scrape of a profile measures as the
//! command does, and its memory is gone afterwards.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rustix::process::getpid;

/// Time for the process to start and to write, beside what it measures.
const OVERHEAD: Duration = Duration::from_secs(60);
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

/// A running process. Dropping it ends the process.
#[derive(Debug)]
pub struct Child {
    is_canceled: Arc<AtomicBool>,
    made: Mutex<Receiver<Made>>,
    deadline: Instant,
}

/// A directory that only this user can read, with what the process writes. Dropping it removes the directory.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // The first is the unit's own directory.
        let parent = std::env::var_os("RUNTIME_DIRECTORY").map_or_else(std::env::temp_dir, PathBuf::from);
        let mut last = None;
        // Others may have made a name in /tmp: `mkdir` takes none that exists.
        for _ in 0..100 {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("whylate-serve-{}-{number}", getpid().as_raw_nonzero()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Scratch(path)),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::Other.into()))
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
    /// Fails if there is no place for the file, or no process or thread can be started.
    pub fn start(kind: Kind, seconds: u32, wake: Arc<UnixStream>) -> anyhow::Result<Self> {
        let scratch = Scratch::new().context("cannot make a directory for the profile")?;
        let file = scratch.0.join(kind.file());
        let deadline = Instant::now() + Duration::from_secs(seconds.into()) + OVERHEAD;
        let process = Command::new("/proc/self/exe")
            .args([kind.command(), "-d", &format!("{seconds}s"), "-o"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start a second whylate")?;
        let is_canceled = Arc::new(AtomicBool::new(false));
        let (sender, made) = channel();
        let seen = Arc::clone(&is_canceled);
        thread::Builder::new().name("whylate-profile".to_owned()).spawn(move || {
            let _ = sender.send(wait(process, &file, kind, &seen, deadline));
            drop(scratch);
            let _ = io::Write::write(&mut &*wake, &[0]);
        })?;
        Ok(Child { is_canceled, made: Mutex::new(made), deadline })
    }

    /// Returns when it ends at the latest.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns what it has made, once it has ended.
    pub fn take(&mut self) -> Option<Made> {
        self.made.get_mut().unwrap_or_else(PoisonError::into_inner).try_recv().ok()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.is_canceled.store(true, Ordering::Relaxed);
    }
}

/// Waits for the end of the process, or ends it.
fn wait(mut process: Process, file: &Path, kind: Kind, is_canceled: &AtomicBool, deadline: Instant) -> Made {
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if is_canceled.load(Ordering::Relaxed) || Instant::now() >= deadline {
            process.kill()?;
            process.wait()?;
            bail!("it took too long");
        }
        thread::sleep(POLL);
    };
    if !status.success() {
        let said = process.stderr.take().and_then(|said| io::read_to_string(io::Read::take(said, 4 << 10)).ok());
        let said = said.unwrap_or_default();
        return Err(anyhow!("{}", said.lines().last().unwrap_or("whylate has failed")));
    }
    if fs::metadata(file)?.len() > MAX_BYTES {
        bail!("it is larger than 64 MiB: request fewer seconds");
    }
    Ok((kind.content_type(), fs::read(file)?))
}
