// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the objects of threads that are held up again and again, in waits that may be short.
//!
//! While such threads are known, a separate thread walks over all threads every 25 ms, and less often while walks find no
//! new wait. It reads the object of a wait of these threads as soon as one walk finds the wait, until enough waits of their
//! kind were read since the last snapshot. Of a long wait there is one reading, and of many short ones a sample: the longer a
//! wait, the more likely a walk finds it. A reading counts only for the wait that was under way from its start to its end.
//!
//! The other end of a pipe or a socket, and the holder of a file's lock, are read after that, once per object: to find them,
//! the descriptors of all processes may have to be scanned. All this takes at most 1 % of a CPU.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use whylate_model::object::{Object, ObjectKind};
use whylate_model::path::WaitSpan;
use whylate_model::programs::{HeldUpThreads, Leader};

use super::asleep::{Sleeper, Sleepers};
use super::object_reader::{ObjectReader, Reading};
use super::read_objects::{ReadObject, ReadObjects};
use crate::kernel::{clock, syscalls};

/// Time between two walks, and between two looks if nothing is left to be read.
const PERIOD: Duration = Duration::from_millis(25);
const PAUSE: Duration = Duration::from_millis(200);
/// Number of walks without a new wait after which the time between two walks grows by one period, and its maximum.
const WALKS_A_PERIOD: u32 = 8;
const MAX_PERIODS: u32 = 10;
/// Minimum ratio of the time between two walks to the CPU time of a walk.
const PERIODS_A_WALK: u64 = 100;
/// Maximum number of waits of one kind between two snapshots of which nothing is known.
const MAX_UNKNOWN: u32 = 16;
/// Maximum number of attempts to find the peers of one object.
const PEER_ATTEMPTS: u32 = 4;
/// Maximum number of objects of one thread of which the peers are kept.
const MAX_OBJECTS: usize = 8;
/// Maximum number of waits that are read after one walk.
const MAX_A_WALK: usize = 16;
/// Maximum share of a CPU as a divisor, and CPU time that may be used at once.
const MAX_CPU_PART: u64 = 100;
const BURST_CPU_NS: i64 = 50_000_000;
/// Time for which a reading is kept: by then the wait should be over, and be asked for.
const KEPT_FOR_NS: u64 = 60_000_000_000;
/// Maximum number of threads of which the last reading is remembered.
const MAX_LAST: usize = 4_096;

/// Reads objects on a separate thread, which starts with the first thread to be read and ends when this is dropped.
#[derive(Default)]
pub(crate) struct HeldUpWaits {
    shared: Arc<Mutex<Shared>>,
    /// Wakes the thread, and ends it when it is dropped.
    waking: Option<Sender<()>>,
}

#[derive(Default)]
struct Shared {
    /// Waits that are to be read.
    wanted: Vec<Leader>,
    objects: ReadObjects,
    /// Number of waits of each of these since the last snapshot of which nothing was known.
    unknown: HashMap<Leader, u32>,
    /// Objects with their peers, as they were read last.
    with_peers: HashMap<HeldUpThreads, Vec<WithPeers>>,
}

struct WithPeers {
    object: Object,
    attempts: u32,
}

/// The objects that were read, locked.
pub(crate) struct LockedWaits<'a>(MutexGuard<'a, Shared>);

impl HeldUpWaits {
    /// Sets the waits that are to be read from now on.
    pub(crate) fn want(&mut self, leaders: Vec<Leader>) {
        let is_needed = !leaders.is_empty();
        let was_needed = {
            let mut shared = lock(&self.shared);
            shared.objects.forget_before(clock::monotonic_ns().saturating_sub(KEPT_FOR_NS));
            !std::mem::replace(&mut shared.wanted, leaders).is_empty()
        };
        match &self.waking {
            // A thread that has failed is not started again.
            Some(waking) if is_needed && !was_needed => drop(waking.send(())),
            None if is_needed => {
                let (waking, woken) = mpsc::channel();
                self.waking = Some(waking);
                let shared = Arc::clone(&self.shared);
                // A name by which whylate recognizes its own threads.
                let name = "whylate-waits".to_owned();
                // Without this thread, no objects are shown.
                let _ = thread::Builder::new().name(name).spawn(move || read_until_dropped(&shared, &woken));
            }
            _ => {}
        }
    }

    /// Locks what was read: the thread waits as long as the result lives.
    pub(crate) fn lock(&self) -> LockedWaits<'_> {
        LockedWaits(lock(&self.shared))
    }

    /// Forgets what is known of the waits up to a snapshot.
    pub(crate) fn start_next_span(&self) {
        let mut shared = lock(&self.shared);
        shared.unknown.clear();
        shared.with_peers.clear();
    }
}

impl LockedWaits<'_> {
    /// Returns the object of a wait. The waits of a thread have to be asked for in order of time.
    pub(crate) fn take_object_of(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        self.0.objects.take_object_of(wait, via)
    }

    /// Adds the peers of an object of these threads, if they were found.
    pub(crate) fn add_peers(&self, threads: HeldUpThreads, object: &mut Object) {
        let known = self.0.with_peers.get(&threads).into_iter().flatten().find(|known| known.object.is_same(object));
        if let Some(known) = known.filter(|_| !object.has_peer()) {
            object.clone_peers(&known.object);
        }
    }
}

impl Shared {
    /// Returns whether the peers of an object are still to be found.
    fn wants_peers(&self, threads: HeldUpThreads, object: &Object) -> bool {
        let known = self.with_peers.get(&threads).map_or(&[][..], Vec::as_slice);
        match known.iter().find(|known| known.object.is_same(object)) {
            Some(known) => !known.object.has_peer() && known.attempts < PEER_ATTEMPTS,
            None => known.len() < MAX_OBJECTS && may_have_peers(object),
        }
    }

    /// Keeps the peers of an object, or that there are none so far.
    fn keep_peers(&mut self, threads: HeldUpThreads, object: Object) {
        let known = self.with_peers.entry(threads).or_default();
        let at = known.iter().position(|known| known.object.is_same(&object));
        let attempts = at.map_or(0, |at| known.swap_remove(at).attempts) + 1;
        known.push(WithPeers { object, attempts });
    }

    /// Returns the wanted waits to which the wait of a thread belongs.
    fn leader_of(&self, of: &Sleeper) -> Option<Leader> {
        let call = u16::try_from(of.syscall).ok();
        let is_of = |threads: HeldUpThreads| match threads {
            HeldUpThreads::One(tid) => tid == of.tid,
            HeldUpThreads::OfName(name) => name == of.name,
        };
        self.wanted.iter().find(|leader| leader.call == call && is_of(leader.threads)).copied()
    }

    /// Returns whether these waits may be known.
    fn is_due(&self, leader: &Leader) -> bool {
        self.unknown.get(leader).is_none_or(|&waits| waits < MAX_UNKNOWN)
    }

    /// Keeps what was read of a wait, or that nothing is known of it.
    fn add(&mut self, of: &Sleeper, leader: Leader, read: Option<ReadObject>) {
        match read {
            Some(read) => drop(self.objects.add(of.tid, read, true)),
            None => *self.unknown.entry(leader).or_default() += 1,
        }
    }
}

/// Returns whether processes other than the waiter may be known that could end the wait.
fn may_have_peers(object: &Object) -> bool {
    use ObjectKind::{FileLock, Fuse, Mutex, Pipe, Process, Semaphore, Tcp, Udp, UnixSocket};
    let kinds = [ObjectKind::Fifo, FileLock, Fuse, Mutex, Pipe, Process, Semaphore, Tcp, Udp, UnixSocket];
    kinds.contains(&object.kind) || object.any_of.iter().any(may_have_peers)
}

/// Walks and reads until the sender is dropped.
fn read_until_dropped(shared: &Mutex<Shared>, woken: &Receiver<()>) {
    let Ok(sleepers) = Sleepers::load() else { return };
    let mut reads = Reads::new();
    loop {
        let (is_wanted, is_due) = {
            let shared = lock(shared);
            (!shared.wanted.is_empty(), shared.wanted.iter().any(|leader| shared.is_due(leader)))
        };
        let waited = match (is_wanted, is_due) {
            (false, _) => woken.recv().map_err(|_| RecvTimeoutError::Disconnected),
            (true, false) => woken.recv_timeout(PAUSE),
            (true, true) => woken.recv_timeout(period_after(reads.idle_walks).max(reads.rest)),
        };
        if waited == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        if !is_due || !reads.has_time() {
            continue;
        }
        let (began_ns, began_cpu_ns) = (clock::monotonic_ns(), clock::thread_cpu_ns());
        let Ok(walk) = sleepers.walk() else { return };
        let walk_cpu_ns = clock::thread_cpu_ns().saturating_sub(began_cpu_ns);
        reads.rest = Duration::from_nanos(walk_cpu_ns.saturating_mul(PERIODS_A_WALK));
        reads.read(&walk.found, (began_ns, clock::monotonic_ns()), shared);
    }
}

/// What the thread keeps from one walk to the next.
struct Reads {
    reader: ObjectReader,
    allowance: Allowance,
    /// Number of switches of each thread at its last reading. Another reading of the same wait adds nothing.
    last: HashMap<u32, u32>,
    /// Minimum time until the next walk.
    rest: Duration,
    /// Number of walks since the last one that found a new wait.
    idle_walks: u32,
}

/// Returns the time until the next walk. Nothing is lost if walks are rarer while all wanted waits are long.
fn period_after(idle_walks: u32) -> Duration {
    PERIOD * (1 + idle_walks / WALKS_A_PERIOD).min(MAX_PERIODS)
}

impl Reads {
    fn new() -> Self {
        let allowance = Allowance::new(clock::monotonic_ns(), clock::thread_cpu_ns());
        Reads { reader: ObjectReader::new(), allowance, last: HashMap::new(), rest: Duration::ZERO, idle_walks: 0 }
    }

    fn has_time(&mut self) -> bool {
        self.allowance.has_time(clock::monotonic_ns(), clock::thread_cpu_ns() + self.reader.other_cpu_ns)
    }

    /// Reads the objects of the waits that a walk from `began_ns` to `ended_ns` has found.
    fn read(&mut self, found: &[Sleeper], (began_ns, ended_ns): (u64, u64), shared: &Mutex<Shared>) {
        self.reader.take_in(found);
        if self.last.len() >= MAX_LAST {
            self.last.clear();
        }
        let mut due: Vec<(&Sleeper, Leader)> = {
            let shared = lock(shared);
            let leader = |of: &Sleeper| shared.leader_of(of).filter(|leader| shared.is_due(leader));
            let is_new = |of: &Sleeper| self.last.get(&of.tid) != Some(&of.switches) && self.reader.reads_of(of);
            found.iter().filter(|of| is_new(of)).filter_map(|of| Some((of, leader(of)?))).collect()
        };
        self.idle_walks = if due.is_empty() { self.idle_walks.saturating_add(1) } else { 0 };
        for &(of, leader) in &due {
            let Some(waited) = of.lock else { continue };
            let (object, via) = (self.reader.lock_object(of.tid, waited), syscalls::name(of.syscall));
            let to_ns = clock::monotonic_ns().max(ended_ns);
            let read = ReadObject { from_ns: began_ns, to_ns, seen_ns: ended_ns, is_earlier: false, via, object };
            lock(shared).add(of, leader, Some(read));
            self.last.insert(of.tid, of.switches);
        }
        due.retain(|(of, _)| self.reader.may_read_more(of));
        due.truncate(MAX_A_WALK);
        if due.is_empty() || !self.has_time() {
            return;
        }
        let sleepers: Vec<&Sleeper> = due.iter().map(|(of, _)| *of).collect();
        let readings = self.reader.read(&sleepers, false);
        let to_ns = clock::monotonic_ns();
        let mut without_peers = Vec::new();
        for Reading { tid, is_read, via, object } in readings {
            let Some(&(of, leader)) = due.iter().find(|(of, _)| of.tid == tid && is_read) else { continue };
            self.last.insert(tid, of.switches);
            let mut shared = lock(shared);
            if object.as_ref().is_some_and(|object| shared.wants_peers(leader.threads, object)) {
                without_peers.push(of);
            }
            let read = object.map(|object| ReadObject {
                from_ns: ended_ns,
                to_ns,
                seen_ns: ended_ns,
                is_earlier: false,
                via: Some(via),
                object,
            });
            shared.add(of, leader, read);
        }
        if without_peers.is_empty() || !self.has_time() {
            return;
        }
        for Reading { tid, object, .. } in self.reader.read(&without_peers, true) {
            let leader = due.iter().find(|(of, _)| of.tid == tid).map(|(_, leader)| leader);
            if let (Some(leader), Some(object)) = (leader, object) {
                lock(shared).keep_peers(leader.threads, object);
            }
        }
    }
}

/// CPU time that is left: a share of the time that has passed, of which a part may be saved up.
struct Allowance {
    left_ns: i64,
    /// Time, and CPU time used, at the last look.
    at_ns: u64,
    used_ns: u64,
}

impl Allowance {
    fn new(at_ns: u64, used_ns: u64) -> Self {
        Allowance { left_ns: BURST_CPU_NS, at_ns, used_ns }
    }

    fn has_time(&mut self, at_ns: u64, used_ns: u64) -> bool {
        let gained_ns = i64::try_from(at_ns.saturating_sub(self.at_ns) / MAX_CPU_PART).unwrap_or(BURST_CPU_NS);
        let spent_ns = i64::try_from(used_ns.saturating_sub(self.used_ns)).unwrap_or(i64::MAX);
        self.left_ns = self.left_ns.saturating_add(gained_ns).min(BURST_CPU_NS).saturating_sub(spent_ns);
        (self.at_ns, self.used_ns) = (at_ns, used_ns);
        self.left_ns > 0
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use whylate_model::path::history::Name;

    use super::*;

    #[test]
    fn cpu_time_is_a_share_of_the_time() {
        const S_NS: u64 = 1_000_000_000;
        let mut allowance = Allowance::new(S_NS, 5);
        assert!(allowance.has_time(S_NS, 5), "some may be used at once");
        // 60 ms beyond what was saved up take 6 s.
        assert!(!allowance.has_time(S_NS, 5 + 110_000_000));
        assert!(!allowance.has_time(6 * S_NS, 5 + 110_000_000) && allowance.has_time(8 * S_NS, 5 + 110_000_000));
        // No more than the burst is saved up.
        assert!(!allowance.has_time(1_000 * S_NS, 5 + 170_000_000));
    }

    #[test]
    fn walks_are_rare_while_they_find_nothing_new() {
        assert_eq!((period_after(0), period_after(WALKS_A_PERIOD - 1)), (PERIOD, PERIOD));
        assert_eq!(period_after(WALKS_A_PERIOD), PERIOD * 2);
        assert_eq!(period_after(u32::MAX), PERIOD * MAX_PERIODS);
    }

    fn leader(tid: u32, call: u16) -> Leader {
        Leader { threads: HeldUpThreads::One(tid), call: Some(call) }
    }

    fn sleeper() -> Sleeper {
        Sleeper {
            tid: 7,
            name: Name::new("service"),
            process: 7,
            parent: 1,
            switches: 3,
            syscall: 0,
            lock: None,
            in_exec: false,
        }
    }

    #[test]
    fn waits_are_wanted_by_thread_or_name_and_call() {
        let leader_of =
            |wanted: &[Leader]| Shared { wanted: wanted.to_vec(), ..Shared::default() }.leader_of(&sleeper());
        assert_eq!(leader_of(&[leader(7, 1), leader(8, 0)]), None);
        assert_eq!(leader_of(&[leader(7, 1), leader(7, 0)]), Some(leader(7, 0)));
        let of_name = |name: &str| Leader { threads: HeldUpThreads::OfName(Name::new(name)), call: Some(0) };
        assert_eq!(leader_of(&[of_name("other"), of_name("service")]), Some(of_name("service")));
        let in_no_call = Sleeper { syscall: -1, ..sleeper() };
        let wanted = Leader { call: None, ..leader(7, 0) };
        let shared = Shared { wanted: vec![wanted], ..Shared::default() };
        assert_eq!([shared.leader_of(&in_no_call), shared.leader_of(&sleeper())], [Some(wanted), None]);
    }

    #[test]
    fn waits_are_read_unless_nothing_is_known_of_them() {
        let now_ns = clock::monotonic_ns();
        let via = Some("read".to_owned());
        let object = Object::new(ObjectKind::Pipe);
        let read = ReadObject {
            from_ns: now_ns,
            to_ns: now_ns,
            seen_ns: now_ns,
            is_earlier: false,
            via,
            object: object.clone(),
        };
        let wanted = leader(7, 0);
        let mut shared = Shared { wanted: vec![wanted], ..Shared::default() };
        shared.add(&sleeper(), wanted, Some(read));
        assert!(shared.is_due(&wanted));
        (0..MAX_UNKNOWN).for_each(|_| shared.add(&sleeper(), wanted, None));
        assert!(!shared.is_due(&wanted));
        let mut waits = HeldUpWaits { shared: Arc::new(Mutex::new(shared)), waking: Some(mpsc::channel().0) };
        waits.start_next_span();
        assert!(lock(&waits.shared).is_due(&wanted));
        waits.want(Vec::new());
        assert!(lock(&waits.shared).wanted.is_empty());
        let wait = WaitSpan { tid: 7, from_ns: Some(now_ns - 1), woken_ns: now_ns + 1, waker: None };
        assert_eq!(waits.lock().take_object_of(wait, Some("read")), Some(object));
    }

    #[test]
    fn peers_are_found_once_per_object() {
        let pipe = |inode| Object { inode: Some(inode), ..Object::new(ObjectKind::Pipe) };
        let (mut shared, one) = (Shared::default(), HeldUpThreads::One(7));
        assert!(!shared.wants_peers(one, &Object::new(ObjectKind::File)), "a file has none");
        for _ in 0..PEER_ATTEMPTS {
            assert!(shared.wants_peers(one, &pipe(1)));
            shared.keep_peers(one, pipe(1));
        }
        assert!(!shared.wants_peers(one, &pipe(1)) && shared.wants_peers(one, &pipe(2)));
        let process = whylate_model::holders::Holder { who: "gzip:88".to_owned(), ..Default::default() };
        let peers = vec![whylate_model::object::Peer { process, others: 0 }];
        shared.keep_peers(one, Object { peers: peers.clone(), ..pipe(2) });
        assert!(!shared.wants_peers(one, &pipe(2)));
        let waits = HeldUpWaits { shared: Arc::new(Mutex::new(shared)), waking: None };
        let with_peers = |mut object: Object| {
            waits.lock().add_peers(one, &mut object);
            object.peers
        };
        assert_eq!((with_peers(pipe(2)), with_peers(pipe(1)), with_peers(pipe(3))), (peers, Vec::new(), Vec::new()));
    }
}
