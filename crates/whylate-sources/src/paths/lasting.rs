// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the objects of long waits while the timeline is recorded: when the path is built, they no longer exist.
//!
//! A separate thread walks over all threads every 50 ms. If a thread has not run since the previous walk, it reads the object
//! of the wait. If the wait goes on, it reads which processes could end the wait. The walk itself yields the kernel lock that a
//! thread waits for, and its holder, even if only one walk finds the wait. Threads of the program or command come first.
//! Walks and reads take at most 5 % of a CPU for them; other threads are read only while the total is below 1 %. With very many
//! threads, walks are less frequent.
//!
//! If the thread stalls in `/proc`, its earlier results stay, and the rest counts as unread.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::asleep::{Asleep, Sleeper, Sleepers};
use super::object_reader::{ObjectReader, Reading};
use super::read_objects::{ReadObject, ReadObjects};
use crate::kernel::{clock, syscalls};

/// Time between two walks over all threads.
const PERIOD: Duration = Duration::from_millis(50);
/// Minimum ratio of that time to the CPU time of the walk before.
const PERIODS_A_WALK: u64 = 40;
/// Number of walks that must find a thread in the same wait until its object is read, and until the peers are.
const WALKS_FOR_OBJECT: u32 = 2;
const WALKS_FOR_PEERS: u32 = 4;
/// Number of walks between two scans of the descriptors of all processes.
const WALKS_A_SCAN: u64 = 5;
/// Maximum share of a CPU, in percent, up to which threads of the program or command are read, and up to which others are
/// read too; and the CPU time that may be used at once.
const MAX_CPU_PERCENT: u64 = 5;
const MAX_CPU_PERCENT_WITH_OTHERS: u64 = 1;
const BURST_CPU_NS: u64 = 100_000_000;
/// Maximum number of objects that are read after one walk, and of walks that try to read one.
const MAX_A_WALK: usize = 64;
const MAX_TRIES: u32 = 8;
/// Maximum time to wait for the first walk, and for the last one.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Reads objects on a separate thread until it is dropped.
pub(super) struct LastingWaits {
    shared: Arc<Mutex<Shared>>,
    /// Ends the thread when it is dropped.
    going: Option<Sender<()>>,
    /// Gets a message when the thread has ended as requested.
    ended: Receiver<()>,
    is_complete: bool,
}

#[derive(Default)]
struct Shared {
    objects: ReadObjects,
    /// Threads of the program. Of these, waits that began before the first walk are read too.
    wanted: HashSet<u32>,
    /// Number of waits of the program or command that are being read.
    being_read: u64,
}

impl LastingWaits {
    /// Starts the thread, and returns the threads that are asleep now.
    pub(super) fn start() -> (Self, Asleep) {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (going, goes_on) = mpsc::channel();
        let (first, first_walk) = mpsc::channel();
        let (ends, ended) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let started = thread::Builder::new().name("whylate-waits".to_owned()).spawn(move || {
            let Ok(sleepers) = Sleepers::load() else { return };
            let began_ns = clock::monotonic_ns();
            let Ok(walk) = sleepers.walk() else { return };
            let _ = first.send(Asleep::new(began_ns, &walk.found));
            let (mut walker, mut period, mut cut) = (Walker::new(&walk.found), PERIOD, 0);
            while goes_on.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let (began_ns, began_cpu_ns) = (clock::monotonic_ns(), clock::thread_cpu_ns());
                let Ok(walk) = sleepers.walk() else { return };
                period = period_after(clock::thread_cpu_ns().saturating_sub(began_cpu_ns));
                lock(&of_thread).objects.unread += walk.cut.saturating_sub(cut);
                cut = cut.max(walk.cut);
                walker.look_at(&walk.found, (began_ns, clock::monotonic_ns()), &of_thread);
            }
            let _ = ends.send(());
        });
        // Without these threads, their waits are shown as waits that began earlier.
        let asleep = started.ok().and_then(|_| first_walk.recv_timeout(MAX_WAIT).ok()).unwrap_or_default();
        (LastingWaits { shared, going: Some(going), ended, is_complete: false }, asleep)
    }

    /// Also reads waits of these threads that began earlier.
    pub(super) fn want(&self, threads: impl Iterator<Item = u32>) {
        lock(&self.shared).wanted.extend(threads);
    }

    /// Reads no more. Returns whether the thread has ended as it should: it may have stalled in `/proc`, or failed.
    pub(super) fn end(&mut self) -> bool {
        if self.going.take().is_some() {
            self.is_complete = self.ended.recv_timeout(MAX_WAIT).is_ok();
        }
        self.is_complete
    }

    /// Returns what was read.
    pub(super) fn take(mut self) -> ReadObjects {
        let is_complete = self.end();
        let mut shared = lock(&self.shared);
        let mut objects = std::mem::take(&mut shared.objects);
        if !is_complete {
            // How many waits followed is not known.
            objects.unread += shared.being_read.max(1);
        }
        objects
    }
}

/// Returns the time until the next walk, after one that took this CPU time.
fn period_after(walk_cpu_ns: u64) -> Duration {
    PERIOD.max(Duration::from_nanos(walk_cpu_ns.saturating_mul(PERIODS_A_WALK)))
}

/// The waits that the last walk found.
struct Walker {
    waits: HashMap<u32, Lasting>,
    /// Descendants of this process.
    descendants: HashSet<u32>,
    /// Start of the walks, and CPU time of this thread by then.
    began_ns: u64,
    began_cpu_ns: u64,
    reader: ObjectReader,
    walks: u64,
}

/// A wait that walks have found.
#[derive(Clone, Copy, Debug, Default)]
struct Lasting {
    switches: u32,
    /// Time at which a walk first found it.
    seen_ns: u64,
    /// Number of walks that have found it.
    walks: u32,
    is_earlier: bool,
    /// The thread belongs to the program, or to a descendant of this process.
    comes_first: bool,
    read: Read,
    /// Number of times that this was tried in vain.
    tries: u32,
    /// The kernel lock that it waits for is known.
    has_lock: bool,
    /// There was no room for what was read.
    is_refused: bool,
}

/// What was read of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Read {
    #[default]
    Nothing,
    Object,
    Peers,
}

impl Walker {
    fn new(found: &[Sleeper]) -> Self {
        let earlier = |of: &Sleeper| (of.tid, Lasting { walks: 1, is_earlier: true, ..Lasting::new(of, 0) });
        Walker {
            waits: found.iter().map(earlier).collect(),
            descendants: HashSet::new(),
            began_ns: clock::monotonic_ns(),
            began_cpu_ns: clock::thread_cpu_ns(),
            reader: ObjectReader::new(),
            walks: 0,
        }
    }

    /// Returns whether there is CPU time left for threads that come first, or for others.
    fn has_time(&self, comes_first: bool) -> bool {
        let percent = if comes_first { MAX_CPU_PERCENT } else { MAX_CPU_PERCENT_WITH_OTHERS };
        let allowed_ns = clock::monotonic_ns().saturating_sub(self.began_ns) / 100 * percent + BURST_CPU_NS;
        clock::thread_cpu_ns().saturating_sub(self.began_cpu_ns) + self.reader.other_cpu_ns < allowed_ns
    }

    /// Updates the waits after a walk from `began_ns` to `ended_ns`, and reads the objects that are due.
    fn look_at(&mut self, found: &[Sleeper], (began_ns, ended_ns): (u64, u64), shared: &Mutex<Shared>) {
        let before = self.take_in(found, &lock(shared).wanted);
        self.walks += 1;
        let of_kinds: &[Read] =
            if self.walks.is_multiple_of(WALKS_A_SCAN) { &[Read::Object, Read::Peers] } else { &[Read::Object] };
        let is_read = |walker: &Self, of: &Sleeper| {
            let known = walker.waits[&of.tid];
            walker.reader.reads_of(of) && (known.comes_first || !known.is_earlier)
        };
        for (of, waited) in found.iter().filter_map(|of| Some((of, of.lock?))) {
            let Lasting { comes_first, is_earlier, seen_ns, .. } = self.waits[&of.tid];
            if is_read(self, of) && self.has_time(comes_first) {
                let (object, via) = (self.reader.lock_object(of.tid, waited), syscalls::name(of.syscall));
                let to_ns = clock::monotonic_ns().max(ended_ns);
                let read = ReadObject { from_ns: began_ns, to_ns, seen_ns, is_earlier, via, object };
                self.add(of.tid, read, shared);
                self.waits.entry(of.tid).and_modify(|known| known.has_lock = true);
            }
        }
        for comes_first in [true, false] {
            for &of_kind in of_kinds {
                let is_due = |of: &&Sleeper| {
                    let known = self.waits[&of.tid];
                    let is_of_kind = known.due() == Some(of_kind) && known.comes_first == comes_first;
                    is_of_kind && self.reader.may_read_more(of) && is_read(self, of)
                };
                let mut due: Vec<&Sleeper> = found.iter().filter(is_due).collect();
                // Those that cannot be read do not keep others from it.
                due.sort_by_key(|of| self.waits[&of.tid].tries);
                due.truncate(MAX_A_WALK);
                if !due.is_empty() && self.has_time(comes_first) {
                    lock(shared).being_read = if comes_first { due.len() as u64 } else { 0 };
                    self.read(&due, of_kind, ended_ns, shared);
                    lock(shared).being_read = 0;
                }
            }
        }
        // Waits that have ended before their object was read.
        let unread = before.iter().filter(|(tid, of)| {
            let goes_on = self.waits.get(tid).is_some_and(|now| now.switches == of.switches);
            !goes_on && of.comes_first && of.is_unread()
        });
        lock(shared).objects.unread += unread.count() as u64;
    }

    /// Updates the waits with the threads that a walk has found. Returns the waits that the previous walk had found.
    fn take_in(&mut self, found: &[Sleeper], wanted: &HashSet<u32>) -> HashMap<u32, Lasting> {
        let (own, now_ns) = (std::process::id(), clock::monotonic_ns());
        let before = std::mem::take(&mut self.waits);
        let processes: HashSet<u32> = found.iter().map(|of| of.process).collect();
        self.descendants.retain(|pid| processes.contains(pid));
        self.reader.take_in(found);
        // Parents come before their children, but for those whose PIDs have started over.
        for of in found {
            if of.parent == own || self.descendants.contains(&of.parent) {
                self.descendants.insert(of.process);
            }
        }
        for of in found {
            let known = before.get(&of.tid).filter(|known| known.switches == of.switches);
            let known = known.copied().unwrap_or_else(|| Lasting::new(of, now_ns));
            let comes_first = wanted.contains(&of.tid) || self.descendants.contains(&of.process);
            self.waits.insert(of.tid, Lasting { walks: known.walks.saturating_add(1), comes_first, ..known });
        }
        before
    }

    /// Reads the objects of these waits, which began before `since_ns`.
    fn read(&mut self, due: &[&Sleeper], of_kind: Read, since_ns: u64, shared: &Mutex<Shared>) {
        let readings = self.reader.read(due, of_kind == Read::Peers);
        let to_ns = clock::monotonic_ns();
        for of in due {
            self.waits.entry(of.tid).and_modify(|known| known.tries += 1);
        }
        for Reading { tid, is_read, via, object } in readings {
            if is_read {
                self.waits.entry(tid).and_modify(|known| (known.read, known.tries) = (of_kind, 0));
            }
            let (Some(object), Some(&Lasting { is_earlier, seen_ns, .. })) = (object, self.waits.get(&tid)) else {
                continue;
            };
            let read = ReadObject { from_ns: since_ns, to_ns, seen_ns, is_earlier, via: Some(via), object };
            self.add(tid, read, shared);
        }
    }

    /// Keeps what was read, if there is room.
    fn add(&mut self, tid: u32, read: ReadObject, shared: &Mutex<Shared>) {
        let Some(known) = self.waits.get_mut(&tid) else { return };
        known.is_refused = !lock(shared).objects.add(tid, read, known.comes_first);
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lasting {
    fn new(of: &Sleeper, seen_ns: u64) -> Self {
        Lasting { switches: of.switches, seen_ns, ..Lasting::default() }
    }

    /// Returns whether it lasted, but nothing is kept of it.
    fn is_unread(&self) -> bool {
        self.is_refused || self.read == Read::Nothing && !self.has_lock && self.walks > WALKS_FOR_OBJECT
    }

    /// Returns what is due to be read, if anything.
    fn due(&self) -> Option<Read> {
        match self.read {
            _ if self.tries >= MAX_TRIES => None,
            Read::Nothing if self.walks >= WALKS_FOR_OBJECT => Some(Read::Object),
            Read::Object if self.walks >= WALKS_FOR_PEERS => Some(Read::Peers),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_is_due_once_the_wait_lasts_and_peers_later() {
        let of = |walks, read| Lasting { walks, read, ..Lasting::default() }.due();
        assert_eq!([1, 2, 9].map(|walks| of(walks, Read::Nothing)), [None, Some(Read::Object), Some(Read::Object)]);
        assert_eq!([3, 4].map(|walks| of(walks, Read::Object)), [None, Some(Read::Peers)]);
        assert_eq!(of(9, Read::Peers), None);
    }

    #[test]
    fn wait_is_unread_unless_something_is_kept_of_it() {
        let known = Lasting { comes_first: true, walks: 9, ..Lasting::default() };
        assert!(known.is_unread() && Lasting { is_refused: true, read: Read::Object, ..known }.is_unread());
        assert!(
            !Lasting { read: Read::Object, ..known }.is_unread() && !Lasting { has_lock: true, ..known }.is_unread()
        );
    }

    #[test]
    fn walks_over_many_threads_are_rarer() {
        assert_eq!([0, 1_000_000].map(period_after), [PERIOD; 2]);
        assert_eq!(period_after(10_000_000), Duration::from_millis(400));
    }

    #[test]
    fn thread_that_fails_counts_once_and_keeps_what_was_read() {
        let shared = Arc::new(Mutex::new(Shared::default()));
        lock(&shared).objects.add(7, ReadObject::of_file(10, 1, "/a"), true);
        let (going, (ends, ended)) = (mpsc::channel().0, mpsc::channel());
        drop(ends);
        let objects = LastingWaits { shared, going: Some(going), ended, is_complete: false }.take();
        assert_eq!((objects.kept(), objects.unread), (1, 1));
    }
}
