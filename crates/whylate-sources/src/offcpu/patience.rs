// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading what may never answer: another process's memory is held while one of its threads waits for a file system
//! that is gone. It is read on a thread of its own, which is given up once it is held up.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};

use crate::source::AttachError;

/// How long a thread that reads may be held up without running once. Disks answer within a tenth of it. While others
/// are held up, what holds them up is likely at work here too, and half of it is enough for each: whoever waits for the
/// end of all this waits for less than twice as long as for the first.
const PATIENCE: Duration = Duration::from_millis(150);
/// How long where the system does not tell whether a thread runs; a busy machine makes it wait too.
const BLIND_PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// So many threads that were given up may wait at a time; then nothing more is read that may not answer.
const MOST_GIVEN_UP: usize = 4;

/// Why a thread of ours gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("the thread that looks at all others has ended: try again")]
    Ended,
    /// Something that it waits for does not come.
    #[error(
        "some process's memory does not answer, and holds up the walk over all threads: try again, or look at one with -p"
    )]
    HeldUp,
    /// Nothing tells whether it waits, or has much to do.
    #[error(
        "the walk over all threads does not finish, and without /proc whylate cannot tell why: mount it (mount -t proc proc /proc)"
    )]
    Unknown,
}

/// Where /proc tells of the calling thread. It may be mounted for another PID namespace, where the thread has another
/// number; `None` where it is not mounted.
type Told = Option<PathBuf>;

fn own_place() -> Told {
    let thread = fs::read_link("/proc/thread-self").ok()?;
    Some(Path::new("/proc").join(thread).join("status"))
}

/// What a thread of ours has done so far; `None` where that is not told, and `Some(None)` while it can run.
fn runs(told: &Told) -> Option<Option<Vec<String>>> {
    let status = fs::read_to_string(told.as_ref()?).ok()?;
    let is_told = |line: &&str| line.starts_with("State:") || line.contains("_ctxt_switches:");
    let told: Vec<String> = status.lines().filter(is_told).map(str::to_owned).collect();
    Some((!told.first()?.contains('R')).then_some(told))
}

/// Waits for a thread's answer for as long as it gets on: until it has been held up for so long.
fn answer_of<T>(told: &Told, answers: &Receiver<T>, held_up_for: Duration) -> Result<T, NoAnswer> {
    // Most answers come before anything need be known of the thread.
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

/// How long what looks at all threads may be held up without running once: nothing that it does takes so long, unless
/// memory has begun to wait between the moment at which it answered and that at which it was read.
const WALKS_PATIENCE: Duration = Duration::from_millis(700);

/// A thread of ours that looks at all threads, and tells whoever asks.
pub(super) struct Worker<T> {
    told: Told,
    /// `None` once it has been told to end.
    ask: Option<Sender<Sender<T>>>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts it. What `begin` makes belongs to the thread, which hands it to `run`.
    ///
    /// # Errors
    /// Those of `begin`; when the thread cannot be started, or is held up.
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
                // Whoever started it may have given up.
                Ok(state) => tell.send(Ok(())).map_or((), |()| run(state, &asked)),
                Err(error) => drop(tell.send(Err(error))),
            }
        };
        thread::Builder::new().name("whylate-offcpu".to_owned()).spawn(work).context("cannot start a thread")?;
        let place = place.recv().map_err(|_| anyhow!(NoAnswer::Ended))?;
        answer_of(&place, &told, WALKS_PATIENCE).map_err(anyhow::Error::from)??;
        Ok(Worker { told: place, ask: Some(ask), ended })
    }

    /// Asks it.
    ///
    /// # Errors
    /// When it has ended, or is held up.
    pub(super) fn ask(&self) -> anyhow::Result<T> {
        let (answer, answered) = mpsc::channel();
        let ask = self.ask.as_ref().ok_or(NoAnswer::Ended)?;
        ask.send(answer).map_err(|_| NoAnswer::Ended)?;
        Ok(answer_of(&self.told, &answered, WALKS_PATIENCE)?)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        // It ends when nobody can ask it any more, and is waited for: its programs are gone then.
        self.ask = None;
        let _ = answer_of(&self.told, &self.ended, WALKS_PATIENCE);
    }
}

/// Has things read that may never answer.
#[derive(Default)]
pub(super) struct Reader {
    thread: Option<(Told, Sender<Read>)>,
    /// One for each thread, with those that were given up, and this one.
    threads: Arc<()>,
}

type Read = Box<dyn FnOnce() + Send>;

impl Reader {
    /// What is read; `None` where that does not answer.
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
        // Whoever asked may have given up.
        jobs.send(Box::new(move || drop(tell.send(read())))).ok()?;
        let answer = answer_of(&place, &told, PATIENCE / (1 << given_up.min(MOST_GIVEN_UP)));
        if answer.is_ok() {
            self.thread = Some((place, jobs));
        }
        answer.ok()
    }
}

/// A thread that reads until nobody asks any more.
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
