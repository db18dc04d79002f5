// SPDX-License-Identifier: MIT OR Apache-2.0
//! Schedules the turns of the thread that reads perf maps: the user with the least CPU time of the thread is next.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use super::list::{Identity, List};
use super::{Request, Shared};
use crate::kernel::clock;
use crate::offcpu::remote_files::RemoteFiles;

/// The memory that the names of all processes may take.
const MAX_BYTES: usize = 16 << 20;
/// The CPU time of the thread: a burst, and the refill for each second.
const BURST_NS: u64 = 1_000_000_000;
const REFILL_NS: u64 = 50_000_000;
/// The pause while no CPU time is left.
const PAUSE: Duration = Duration::from_millis(100);
/// The delay before a map is read again that lost names to the bound on all of them.
const AGAIN: Duration = Duration::from_secs(60);

#[derive(Default)]
struct User {
    spent_ns: u64,
    waiting: VecDeque<u32>,
}

struct Reading {
    tgid: u32,
    process: Identity,
    list: List,
    dropped: Option<Instant>,
}

pub(super) struct Turns {
    shared: Arc<Shared>,
    files: RemoteFiles,
    known: HashMap<u32, Reading>,
    users: BTreeMap<u32, User>,
    /// The memory of all names.
    bytes: usize,
    request: u64,
    left_ns: u64,
    since: Instant,
}

impl Turns {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Turns {
            shared,
            files: RemoteFiles::default(),
            known: HashMap::new(),
            users: BTreeMap::new(),
            bytes: 0,
            request: 0,
            left_ns: BURST_NS,
            since: Instant::now(),
        }
    }

    /// Runs until the sender of requests is dropped.
    pub(super) fn run(mut self, requests: &Receiver<Request>) {
        loop {
            self.add_time();
            let request = if self.users.values().all(|user| user.waiting.is_empty()) {
                self.answer();
                requests.recv().map_err(|_| TryRecvError::Disconnected)
            } else if self.left_ns == 0 {
                requests.recv_timeout(PAUSE).map_err(|error| match error {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                })
            } else {
                requests.try_recv()
            };
            match request {
                Ok(request) => self.begin(request),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            if self.left_ns > 0 {
                self.turn();
            }
        }
    }

    fn add_time(&mut self) {
        let more_ns = self.since.elapsed().as_nanos() as u64 * REFILL_NS / 1_000_000_000;
        if more_ns > 0 {
            (self.left_ns, self.since) = ((self.left_ns + more_ns).min(BURST_NS), Instant::now());
        }
    }

    fn answer(&self) {
        self.shared.results().answered = self.request;
        self.shared.is_answered.notify_all();
    }

    fn begin(&mut self, request: Request) {
        let began_ns = clock::thread_cpu_ns();
        self.request = request.number;
        if request.are_all {
            let all: HashSet<u32> = request.processes.iter().map(|(id, _)| *id).collect();
            self.known.retain(|id, _| all.contains(id));
            self.bytes = self.known.values().map(|known| known.list.bytes()).sum();
            self.shared.results().unfinished.retain(|id| all.contains(id));
            for user in self.users.values_mut() {
                user.spent_ns /= 2;
                user.waiting.retain(|id| all.contains(id));
            }
            self.users.retain(|_, user| user.spent_ns > 0 || !user.waiting.is_empty());
        }
        let waiting: HashSet<u32> = self.users.values().flat_map(|user| &user.waiting).copied().collect();
        let has_room = self.bytes < MAX_BYTES / 2;
        for (id, tgid) in request.processes {
            if !self.known.contains_key(&id)
                && let Some(process) = Identity::read(tgid)
            {
                self.known.insert(id, Reading { tgid, process, list: List::default(), dropped: None });
            }
            let Some(known) = self.known.get_mut(&id) else { continue };
            if has_room && known.dropped.is_some_and(|at| at.elapsed() >= AGAIN) {
                known.dropped = None;
                known.list.reset();
            }
            if !waiting.contains(&id) {
                self.users.entry(known.process.user).or_default().waiting.push_back(id);
            }
        }
        self.spend(began_ns);
        if self.left_ns == 0 {
            // The snapshot must not wait for the refill.
            self.answer();
        }
    }

    fn spend(&mut self, began_ns: u64) -> u64 {
        let spent_ns = clock::thread_cpu_ns().saturating_sub(began_ns);
        self.left_ns = self.left_ns.saturating_sub(spent_ns);
        spent_ns
    }

    fn turn(&mut self) {
        let next = self.users.values_mut().filter(|user| !user.waiting.is_empty()).min_by_key(|user| user.spent_ns);
        let Some(user) = next else { return };
        let Some(id) = user.waiting.pop_front() else { return };
        let Some(known) = self.known.get_mut(&id) else { return };
        let (began_ns, before_bytes) = (clock::thread_cpu_ns(), known.list.bytes());
        let turn = known.list.read(known.tgid, &known.process, &mut self.files);
        if turn.has_more {
            user.waiting.push_back(id);
        }
        let user = known.process.user;
        {
            let mut results = self.shared.results();
            if turn.has_changed {
                results.changed.insert(id, known.list.code());
            }
            if turn.has_lost {
                results.dropped.insert(id);
            }
            if turn.has_more {
                results.unfinished.insert(id)
            } else {
                results.unfinished.remove(&id)
            };
        }
        self.bytes = (self.bytes + known.list.bytes()).saturating_sub(before_bytes);
        self.make_room();
        let spent_ns = self.spend(began_ns);
        if let Some(user) = self.users.get_mut(&user) {
            user.spent_ns += spent_ns;
        }
    }

    /// Drops names of the user with the most names, from the largest map first.
    fn make_room(&mut self) {
        while self.bytes > MAX_BYTES {
            let mut by_user: BTreeMap<u32, usize> = BTreeMap::new();
            for known in self.known.values() {
                *by_user.entry(known.process.user).or_default() += known.list.bytes();
            }
            let Some((&most, _)) = by_user.iter().max_by_key(|(_, bytes)| **bytes) else { return };
            let of_user = self.known.iter_mut().filter(|(_, known)| known.process.user == most);
            let Some((&id, known)) = of_user.max_by_key(|(_, known)| known.list.bytes()) else { return };
            let before_bytes = known.list.bytes();
            known.list.drop_older();
            self.bytes = (self.bytes + known.list.bytes()).saturating_sub(before_bytes);
            known.dropped = Some(Instant::now());
            let mut results = self.shared.results();
            results.changed.insert(id, known.list.code());
            results.dropped.insert(id);
            if before_bytes == 0 {
                return;
            }
        }
    }
}
