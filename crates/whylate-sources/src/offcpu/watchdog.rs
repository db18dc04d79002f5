// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads that may block forever, done on threads of their own and abandoned on timeout: the mmap lock of a process is
//! held while one of its threads waits for a page of a dead file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::kernel::proc;
use crate::source::AttachError;

/// Timeout of a blocked reader thread that does not run once. Disks answer within a tenth of it. It is halved for each
/// abandoned reader, as the cause is likely the same: all timeouts together take less than twice the first one.
const READ_TIMEOUT: Duration = Duration::from_millis(150);
/// Timeout if the state of the thread cannot be read; a busy machine delays it too.
const BLIND_TIMEOUT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// Maximum number of abandoned reader threads; beyond it nothing is read that may block forever.
const MAX_ABANDONED: usize = 4;

/// Why a worker thread gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("the thread that looks at all others has ended: try again")]
    Ended,
    /// The worker is blocked.
    #[error(
        "some process's memory does not answer, and holds up the walk over all threads: try again, or look at one with -p"
    )]
    Stalled,
    /// The worker is blocked or busy; its state cannot be read.
    #[error(
        "the walk over all threads does not finish, and without /proc whylate cannot find out why: mount it (mount -t proc proc /proc)"
    )]
    Unknown,
}

/// Path of a thread's status file: its TID differs in /proc of another PID namespace. `None` if /proc is not mounted.
type StatusPath = Option<PathBuf>;

fn own_status_path() -> StatusPath {
    let thread = fs::read_link("/proc/thread-self").ok()?;
    Some(Path::new("/proc").join(thread).join("status"))
}

/// Reads the state and context switches of a worker; `None` if they cannot be read, `Some(None)` while it is runnable.
fn progress_of(status_path: &StatusPath) -> Option<Option<Vec<String>>> {
    let status = proc::text(status_path.as_ref()?).ok()?;
    let is_relevant = |line: &&str| line.starts_with("State:") || line.contains("_ctxt_switches:");
    let progress: Vec<String> = status.lines().filter(is_relevant).map(str::to_owned).collect();
    Some((!progress.first()?.contains('R')).then_some(progress))
}

/// Waits for a worker's answer until the worker has been blocked for `stalled_for` without running once.
fn answer_of<T>(status_path: &StatusPath, answers: &Receiver<T>, stalled_for: Duration) -> Result<T, NoAnswer> {
    // Most answers arrive before the worker's state has to be read.
    let mut known: Option<(Option<Option<Vec<String>>>, Instant)> = None;
    loop {
        match answers.recv_timeout(POLL) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(NoAnswer::Ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = progress_of(status_path);
        let limit = if now.is_none() { BLIND_TIMEOUT.max(stalled_for) } else { stalled_for };
        match &known {
            Some((before, since)) if now != Some(None) && now == *before => {
                if since.elapsed() >= limit {
                    return Err(if status_path.is_some() { NoAnswer::Stalled } else { NoAnswer::Unknown });
                }
            }
            _ => known = Some((now, Instant::now())),
        }
    }
}

/// Timeout of a blocked sampling thread that does not run once. Nothing that it does takes this long, unless memory
/// that was probed as responsive blocks when it is read.
const WALK_TIMEOUT: Duration = Duration::from_millis(700);

/// The sampling thread, which answers requests.
pub(super) struct Worker<T> {
    status_path: StatusPath,
    /// `None` once the worker has been asked to end.
    ask: Option<Sender<Sender<T>>>,
    ended: Receiver<()>,
}

/// A worker that begins. If it is dropped, the worker ends once it has started.
pub(super) struct Beginning<T> {
    worker: Worker<T>,
    started: Receiver<Result<(), AttachError>>,
}

impl<T> Beginning<T> {
    /// Waits until the worker has started.
    ///
    /// # Errors
    /// Returns the error with which it began, or fails if it is blocked.
    pub(super) fn wait(self) -> Result<Worker<T>, AttachError> {
        answer_of(&self.worker.status_path, &self.started, WALK_TIMEOUT).map_err(anyhow::Error::from)??;
        Ok(self.worker)
    }
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the worker, and waits until it has started.
    ///
    /// # Errors
    /// See [`Worker::begin`] and [`Beginning::wait`].
    pub(super) fn start<S>(
        begin: impl FnOnce() -> Result<S, AttachError> + Send + 'static,
        run: impl FnOnce(S, &Receiver<Sender<T>>) + Send + 'static,
    ) -> Result<Self, AttachError> {
        Worker::begin(begin, run)?.wait()
    }

    /// Starts the worker. `begin` runs on its thread, and its result is passed to `run`.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub(super) fn begin<S>(
        begin: impl FnOnce() -> Result<S, AttachError> + Send + 'static,
        run: impl FnOnce(S, &Receiver<Sender<T>>) + Send + 'static,
    ) -> Result<Beginning<T>, AttachError> {
        let (ask, asked) = mpsc::channel();
        let (send_path, path) = mpsc::channel();
        let (send_started, started) = mpsc::channel();
        let (at_end, ended) = mpsc::channel::<()>();
        let work = move || {
            let _at_end = at_end;
            let _ = send_path.send(own_status_path());
            match begin() {
                // The caller may have timed out.
                Ok(state) => send_started.send(Ok(())).map_or((), |()| run(state, &asked)),
                Err(error) => drop(send_started.send(Err(error))),
            }
        };
        thread::Builder::new().name("whylate-offcpu".to_owned()).spawn(work).context("cannot start a thread")?;
        let path = path.recv().map_err(|_| anyhow!(NoAnswer::Ended))?;
        Ok(Beginning { worker: Worker { status_path: path, ask: Some(ask), ended }, started })
    }

    /// Requests an answer, and waits for it.
    ///
    /// # Errors
    /// Fails if the worker has ended, or is blocked.
    pub(super) fn ask(&self) -> anyhow::Result<T> {
        let (answer, answered) = mpsc::channel();
        let ask = self.ask.as_ref().ok_or(NoAnswer::Ended)?;
        ask.send(answer).map_err(|_| NoAnswer::Ended)?;
        Ok(answer_of(&self.status_path, &answered, WALK_TIMEOUT)?)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        // The worker ends once its request channel is closed. Wait for it, so that its BPF programs are detached.
        self.ask = None;
        let _ = answer_of(&self.status_path, &self.ended, WALK_TIMEOUT);
    }
}

/// Runs reads that may block forever on a thread of its own.
#[derive(Default)]
pub(super) struct Reader {
    thread: Option<(StatusPath, Sender<Read>)>,
    /// One reference for each reader thread, abandoned ones included, and one for this.
    threads: Arc<()>,
}

type Read = Box<dyn FnOnce() + Send>;

impl Reader {
    /// Runs `read` on the reader thread; `None` if it does not finish.
    pub(super) fn read<T: Send + 'static>(&mut self, read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let abandoned = Arc::strong_count(&self.threads) - 1 - usize::from(self.thread.is_some());
        if self.thread.is_none() && abandoned >= MAX_ABANDONED {
            return None;
        }
        let (path, jobs) = match self.thread.take() {
            Some(thread) => thread,
            None => start(Arc::clone(&self.threads))?,
        };
        let (send_result, result) = mpsc::channel();
        // The caller may have timed out.
        jobs.send(Box::new(move || drop(send_result.send(read())))).ok()?;
        let answer = answer_of(&path, &result, READ_TIMEOUT / (1 << abandoned.min(MAX_ABANDONED)));
        if answer.is_ok() {
            self.thread = Some((path, jobs));
        }
        answer.ok()
    }
}

/// Starts a thread that runs reads until the channel is closed.
fn start(alive: Arc<()>) -> Option<(StatusPath, Sender<Read>)> {
    let (jobs, asked) = mpsc::channel::<Read>();
    let (send_path, path) = mpsc::channel();
    let reader = move || {
        let _alive = alive;
        if send_path.send(own_status_path()).is_ok() {
            asked.iter().for_each(|read| read());
        }
    };
    thread::Builder::new().name("whylate-reads".to_owned()).spawn(reader).ok()?;
    Some((path.recv().ok()?, jobs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abandons_stalled_reader_and_starts_another() {
        let mut reader = Reader::default();
        let mut held = Vec::new();
        for _ in 0..MAX_ABANDONED {
            let (hold, until) = mpsc::channel::<()>();
            assert_eq!(reader.read(|| 1), Some(1));
            assert_eq!(reader.read(move || until.recv().is_ok()), None);
            held.push(hold);
        }
        assert_eq!(reader.read(|| 1), None, "the maximum number of readers is abandoned");
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(20);
        while reader.read(|| 1).is_none() {
            assert!(Instant::now() < deadline, "readers that have ended no longer count");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn waits_for_reader_that_makes_progress() {
        let mut reader = Reader::default();
        let slow = || (0..30).for_each(|_| thread::sleep(POLL));
        // A CPU that the hypervisor takes away makes no progress.
        assert!((0..3).any(|_| Reader::default().read(slow) == Some(())));
        let busy = || {
            let began = Instant::now();
            while began.elapsed() < 2 * READ_TIMEOUT {
                std::hint::spin_loop();
            }
        };
        assert_eq!(reader.read(busy), Some(()));
    }
}
