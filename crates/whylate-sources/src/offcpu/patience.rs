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

use crate::source::AttachError;

/// Timeout of a blocked reader thread that does not run once. Disks answer within a tenth of it. It is halved for each
/// abandoned reader, as the cause is likely the same: all timeouts together take less than twice the first one.
const PATIENCE: Duration = Duration::from_millis(150);
/// Timeout if the state of the thread cannot be read; a busy machine delays it too.
const BLIND_PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// Maximum number of abandoned reader threads; beyond it nothing is read that may block forever.
const MOST_GIVEN_UP: usize = 4;

/// Why a worker thread gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("the thread that looks at all others has ended: try again")]
    Ended,
    /// The worker is blocked.
    #[error(
        "some process's memory does not answer, and holds up the walk over all threads: try again, or look at one with -p"
    )]
    HeldUp,
    /// The worker is blocked or busy; its state cannot be read.
    #[error(
        "the walk over all threads does not finish, and without /proc whylate cannot tell why: mount it (mount -t proc proc /proc)"
    )]
    Unknown,
}

/// Path of the status file of the calling thread, whose TID differs in /proc of another PID namespace; `None` if /proc
/// is not mounted.
type Told = Option<PathBuf>;

fn own_place() -> Told {
    let thread = fs::read_link("/proc/thread-self").ok()?;
    Some(Path::new("/proc").join(thread).join("status"))
}

/// Reads the state and context switches of a worker; `None` if they cannot be read, `Some(None)` while it is runnable.
fn runs(told: &Told) -> Option<Option<Vec<String>>> {
    let status = fs::read_to_string(told.as_ref()?).ok()?;
    let is_told = |line: &&str| line.starts_with("State:") || line.contains("_ctxt_switches:");
    let told: Vec<String> = status.lines().filter(is_told).map(str::to_owned).collect();
    Some((!told.first()?.contains('R')).then_some(told))
}

/// Waits for a worker's answer until the worker has been blocked for `held_up_for` without running once.
fn answer_of<T>(told: &Told, answers: &Receiver<T>, held_up_for: Duration) -> Result<T, NoAnswer> {
    // Most answers arrive before the worker's state has to be read.
    let mut known: Option<(Option<Option<Vec<String>>>, Instant)> = None;
    loop {
        match answers.recv_timeout(POLL) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(NoAnswer::Ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = runs(told);
        let limit = if now.is_none() { BLIND_PATIENCE.max(held_up_for) } else { held_up_for };
        match &known {
            Some((before, since)) if now != Some(None) && now == *before => {
                if since.elapsed() >= limit {
                    return Err(if told.is_some() { NoAnswer::HeldUp } else { NoAnswer::Unknown });
                }
            }
            _ => known = Some((now, Instant::now())),
        }
    }
}

/// Timeout of a blocked sampling thread that does not run once. Nothing that it does takes this long, unless memory
/// that was probed as responsive blocks when it is read.
const WALKS_PATIENCE: Duration = Duration::from_millis(700);

/// The sampling thread, which answers requests.
pub(super) struct Worker<T> {
    told: Told,
    /// `None` once the worker has been asked to end.
    ask: Option<Sender<Sender<T>>>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the worker. `begin` runs on its thread, and its result is passed to `run`.
    ///
    /// # Errors
    /// Returns the error of `begin`, or fails if the thread cannot be started, or is blocked.
    pub(super) fn start<S>(
        begin: impl FnOnce() -> Result<S, AttachError> + Send + 'static,
        run: impl FnOnce(S, &Receiver<Sender<T>>) + Send + 'static,
    ) -> Result<Self, AttachError> {
        let (ask, asked) = mpsc::channel();
        let (tell_place, place) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let (at_end, ended) = mpsc::channel::<()>();
        let work = move || {
            let _at_end = at_end;
            let _ = tell_place.send(own_place());
            match begin() {
                // The caller may have timed out.
                Ok(state) => tell.send(Ok(())).map_or((), |()| run(state, &asked)),
                Err(error) => drop(tell.send(Err(error))),
            }
        };
        thread::Builder::new().name("whylate-offcpu".to_owned()).spawn(work).context("cannot start a thread")?;
        let place = place.recv().map_err(|_| anyhow!(NoAnswer::Ended))?;
        answer_of(&place, &told, WALKS_PATIENCE).map_err(anyhow::Error::from)??;
        Ok(Worker { told: place, ask: Some(ask), ended })
    }

    /// Requests an answer, and waits for it.
    ///
    /// # Errors
    /// Fails if the worker has ended, or is blocked.
    pub(super) fn ask(&self) -> anyhow::Result<T> {
        let (answer, answered) = mpsc::channel();
        let ask = self.ask.as_ref().ok_or(NoAnswer::Ended)?;
        ask.send(answer).map_err(|_| NoAnswer::Ended)?;
        Ok(answer_of(&self.told, &answered, WALKS_PATIENCE)?)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        // The worker ends once its request channel is closed. Wait for it, so that its BPF programs are detached.
        self.ask = None;
        let _ = answer_of(&self.told, &self.ended, WALKS_PATIENCE);
    }
}

/// Runs reads that may block forever on a thread of its own.
#[derive(Default)]
pub(super) struct Reader {
    thread: Option<(Told, Sender<Read>)>,
    /// One reference for each reader thread, abandoned ones included, and one for this.
    threads: Arc<()>,
}

type Read = Box<dyn FnOnce() + Send>;

impl Reader {
    /// Runs `read` on the reader thread; `None` if it does not finish.
    pub(super) fn read<T: Send + 'static>(&mut self, read: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let given_up = Arc::strong_count(&self.threads) - 1 - usize::from(self.thread.is_some());
        if self.thread.is_none() && given_up >= MOST_GIVEN_UP {
            return None;
        }
        let (place, jobs) = match self.thread.take() {
            Some(thread) => thread,
            None => start(Arc::clone(&self.threads))?,
        };
        let (tell, told) = mpsc::channel();
        // The caller may have timed out.
        jobs.send(Box::new(move || drop(tell.send(read())))).ok()?;
        let answer = answer_of(&place, &told, PATIENCE / (1 << given_up.min(MOST_GIVEN_UP)));
        if answer.is_ok() {
            self.thread = Some((place, jobs));
        }
        answer.ok()
    }
}

/// Starts a thread that runs reads until the channel is closed.
fn start(alive: Arc<()>) -> Option<(Told, Sender<Read>)> {
    let (jobs, asked) = mpsc::channel::<Read>();
    let (tell, told) = mpsc::channel();
    let reader = move || {
        let _alive = alive;
        if tell.send(own_place()).is_ok() {
            asked.iter().for_each(|read| read());
        }
    };
    thread::Builder::new().name("whylate-reads".to_owned()).spawn(reader).ok()?;
    Some((told.recv().ok()?, jobs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_held_up_is_given_up_and_others_are_read() {
        let mut reader = Reader::default();
        let mut held = Vec::new();
        for _ in 0..MOST_GIVEN_UP {
            let (hold, until) = mpsc::channel::<()>();
            assert_eq!(reader.read(|| 1), Some(1));
            assert_eq!(reader.read(move || until.recv().is_ok()), None);
            held.push(hold);
        }
        assert_eq!(reader.read(|| 1), None, "so many are enough");
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(20);
        while reader.read(|| 1).is_none() {
            assert!(Instant::now() < deadline, "those that have ended count no more");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn who_gets_on_is_waited_for() {
        let mut reader = Reader::default();
        let slow = || (0..30).for_each(|_| thread::sleep(POLL));
        assert_eq!(reader.read(slow), Some(()));
        let busy = || {
            let began = Instant::now();
            while began.elapsed() < 2 * PATIENCE {
                std::hint::spin_loop();
            }
        };
        assert_eq!(reader.read(busy), Some(()));
    }
}
