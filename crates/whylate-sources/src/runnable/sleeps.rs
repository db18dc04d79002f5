// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that had to wait for others for long: along who ended each wait.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use whylate_model::late::SLEEPER;
use whylate_model::path::history::{Blocked, Name, Waker};
use whylate_model::path::{Asked, Finding, Found, Hop, Limits, Names, Path, walk};
use whylate_model::wait::{Classes, InFlight, Seen, State, classify};
use whylate_model::{Cgroup, LateEvent, WaitClass, thread};

use super::skel::types::entry_kind;
use super::{Wanted, labels_of, limits};
use crate::attach::text;
use crate::clock;
use crate::occupancy::{Account, stop};
use crate::offcpu::Rings;
use crate::paths::PathNames;
use crate::symbols::KernelSymbols;

/// So many of the latest long waits are remembered, for paths on which they lie.
const REMEMBERED: usize = 4_096;
/// So many waits are explained at once; others are counted.
const AT_ONCE: usize = 1_000;
/// The scheduler's clock, by which a wait is bounded, stands still in interrupts: the bound has so much room.
const ROOM_NS: u64 = 10_000_000;
/// Where most waits are nobody's fault, going back through the past may take this part of the time.
const A_FIFTIETH: u64 = 50;

/// A CPU tells that it changes hands a moment before it does, which a virtual one draws out.
const SETTLED_NS: u64 = 20_000_000;
const PAUSE: Duration = Duration::from_millis(1);

/// What is known of a long wait beside how it went.
struct Known {
    tid: u32,
    woken_ns: u64,
    running_ns: u64,
    stack: Vec<String>,
    class: WaitClass,
    limit: Option<(u64, String)>,
}

/// A wait that is to be explained.
struct Waiting {
    asked: Asked,
    /// Without its path as yet.
    event: LateEvent,
    /// Somebody has the lock, of a file or in the kernel, that it waits for. Of a futex that is not known.
    is_for_lock: bool,
    /// The part of it that was a wait for a CPU, where that alone is long enough to be told.
    for_cpu: Option<LateEvent>,
}

/// What a walk has found of one.
#[derive(Default)]
struct Outcome {
    found: Found,
    began_ns: Option<u64>,
    /// The thread does not have a CPU yet at its end.
    is_open: bool,
    /// Nobody came: it was told to sleep for so long, or has given up.
    was_timer: bool,
    was_stopped: bool,
    is_uninterruptible: bool,
}

/// Waits that have come in and are to be explained.
pub(super) struct Sleeps {
    over_ns: u64,
    idle: bool,
    held_up_alone: bool,
    /// The next are explained from then on.
    rests_until_ns: u64,
    symbols: KernelSymbols,
    names: PathNames,
    rings: Rings,
    known: VecDeque<Known>,
    waiting: Vec<Waiting>,
    /// Waits whose beginning is not known any more, since they were told.
    unseen: u64,
}

impl Sleeps {
    pub(super) fn new(over_ns: u64, wanted: &Wanted, symbols: KernelSymbols) -> Self {
        let names = PathNames::new(symbols.shared());
        Sleeps {
            over_ns,
            idle: wanted.idle,
            held_up_alone: wanted.held_up_alone,
            rests_until_ns: 0,
            symbols,
            names,
            rings: Rings::default(),
            known: VecDeque::new(),
            waiting: Vec::new(),
            unseen: 0,
        }
    }

    /// Takes a record in. False: it is late for a CPU alone, if at all.
    pub(super) fn take_in(&mut self, bytes: &[u8], account: &Account) -> bool {
        let Some(record) = super::whole(bytes) else { return false };
        if record.woken_ns == 0 {
            return false;
        }
        let off_ns = record.off_ns.saturating_add(ROOM_NS);
        if self.held_up_alone && off_ns < self.over_ns {
            return false;
        }
        let frames = record.slept_in.get(..record.frames as usize).unwrap_or_default();
        let stack: Vec<String> = frames.iter().map(|&address| self.symbols.name(address).to_owned()).collect();
        let is_late_for_cpu = record.window.count > 0;
        let for_cpu = || super::event_of(bytes, account, &mut self.symbols, false);
        let for_cpu = is_late_for_cpu.then(for_cpu).flatten();
        let windows = &mut account.windows();
        let is_of_disk = record.ended_by == entry_kind::ENTRY_DISK.0;
        let seen = Seen {
            state: stop(record.stopper).map_or(State::Sleeping, State::of_stop),
            in_iowait: record.in_iowait != 0,
            is_kernel: record.tgid == 2 || stack.iter().any(|frame| frame == "kthread"),
            syscall: None,
            kernel: &stack,
            user: &[],
            in_flight: if is_of_disk { InFlight::Disk } else { self.rings.in_flight(record.tgid, &stack) },
        };
        let class = match classify(&seen, &Classes::default()).class {
            // Of what it might have waited for, a disk has come: whoever loops over events waits for its disk so too.
            WaitClass::Idle if is_of_disk && !seen.is_kernel => WaitClass::Disk,
            class => class,
        };
        let subject = thread::called(&text(&record.thread), record.tid);
        let waited = [record.runnable_ns, record.running_ns];
        let limits = limits::throttled(&record.limits, waited, &subject, &mut windows.cgroups);
        let limit = limits.into_iter().next().filter(|limit| limit.from_ns <= record.runnable_ns);
        let mut labels = labels_of(&record, windows, &mut self.symbols);
        labels.insert("waited".to_owned(), class.words().to_owned());
        self.known.push_back(Known {
            tid: record.tid,
            woken_ns: record.woken_ns,
            running_ns: record.running_ns,
            stack: stack.clone(),
            class,
            limit: limit.map(|limit| (limit.until_ns, limit.by)),
        });
        if self.known.len() > REMEMBERED {
            self.known.pop_front();
        }
        // What a thread does by design is no lateness.
        if !self.idle && matches!(class, WaitClass::Idle | WaitClass::Timer) {
            return !is_late_for_cpu;
        }
        if self.waiting.len() >= AT_ONCE {
            self.unseen += 1;
            return !is_late_for_cpu;
        }
        let asked = Asked {
            tid: record.tid,
            from_ns: record.running_ns.saturating_sub(off_ns).max(1),
            to_ns: record.running_ns,
            is_wait: true,
            is_command: false,
        };
        let event = LateEvent {
            subject,
            labels,
            at_unix_ns: clock::unix_ns_of(record.running_ns),
            at_ns: record.running_ns,
            cpu: record.cpu,
            stack,
            ..LateEvent::default()
        };
        let is_for_lock = class == WaitClass::Lock && !event.stack.iter().any(|frame| frame.contains("futex"));
        self.waiting.push(Waiting { asked, event, is_for_lock, for_cpu });
        true
    }

    /// Explains those that have come in, unless that took too much of the time lately.
    pub(super) fn explain_at_leisure(&mut self, account: &Account, each: &mut dyn FnMut(LateEvent)) {
        let now_ns = clock::monotonic_ns();
        if self.waiting.is_empty() || now_ns < self.rests_until_ns {
            return;
        }
        self.explain(account, each);
        if self.held_up_alone {
            let ended_ns = clock::monotonic_ns();
            self.rests_until_ns = ended_ns.saturating_add(A_FIFTIETH * ended_ns.saturating_sub(now_ns));
        }
    }

    /// Explains those that have come in.
    pub(super) fn explain(&mut self, account: &Account, each: &mut dyn FnMut(LateEvent)) {
        let mut waiting = std::mem::take(&mut self.waiting);
        while !waiting.is_empty() {
            let latest_ns = waiting.iter().map(|waiting| waiting.asked.to_ns).max().unwrap_or(0);
            let until_ns = latest_ns.saturating_add(SETTLED_NS).min(clock::monotonic_ns());
            let Some(mut history) = account.history(until_ns) else {
                self.unseen += waiting.len() as u64;
                waiting.into_iter().filter_map(|waiting| waiting.for_cpu).for_each(each);
                return;
            };
            let asked: Vec<Asked> = waiting.iter().map(|waiting| waiting.asked).collect();
            let mut outcomes: Vec<Outcome> = waiting.iter().map(|_| Outcome::default()).collect();
            let limits = Known::limits(&self.known);
            walk(&mut history, &asked, &limits, &mut |number, finding| outcomes[number].add(asked[number], finding));
            let settled_ns = clock::monotonic_ns().saturating_sub(SETTLED_NS);
            let mut open = Vec::new();
            for (waiting, outcome) in waiting.into_iter().zip(outcomes) {
                if outcome.is_open && waiting.asked.to_ns > settled_ns {
                    open.push(waiting);
                } else {
                    self.tell(waiting, outcome, each);
                }
            }
            waiting = open;
            if !waiting.is_empty() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn tell(&mut self, waiting: Waiting, mut outcome: Outcome, each: &mut dyn FnMut(LateEvent)) {
        let Waiting { asked, mut event, is_for_lock, for_cpu } = waiting;
        let Some(began_ns) = outcome.began_ns else {
            self.unseen += 1;
            for_cpu.into_iter().for_each(each);
            return;
        };
        event.latency_ns = asked.to_ns.saturating_sub(began_ns);
        let is_own = outcome.was_timer && !outcome.is_uninterruptible && !outcome.was_stopped;
        let is_told_to_sleep = is_own && !self.idle;
        if is_told_to_sleep || event.latency_ns < self.over_ns {
            for_cpu.into_iter().for_each(each);
            return;
        }
        outcome.found.name(asked.tid, Name::of(event.labels.get("thread").map_or("", String::as_str)));
        let path: Path = outcome.found.finish(&mut Told { names: &mut self.names, known: &self.known });
        if let Some(via) = path.segments.iter().find(|segment| segment.depth == 1).and_then(|first| first.via.clone()) {
            event.labels.insert("waited_in".to_owned(), via);
        }
        if self.held_up_alone && !path.is_held_up(self.over_ns, is_for_lock) {
            if let Some(sleeper) = path.sleeper(self.over_ns) {
                event.labels.insert(SLEEPER.to_owned(), sleeper.to_owned());
                each(event);
            }
            for_cpu.into_iter().for_each(each);
            return;
        }
        event.path.clone_from(&path.segments);
        event.causes = path.causes();
        each(event);
    }

    pub(super) fn take_unseen(&mut self) -> u64 {
        std::mem::take(&mut self.unseen)
    }
}

impl Outcome {
    fn add(&mut self, asked: Asked, finding: Finding) {
        match finding {
            Finding::Hop(Hop { number: 0, by, woken_ns, stop, .. }) => {
                self.was_timer = matches!(by, Some(Waker::Timer(of)) if of.is_own());
                self.is_open = by.is_none() && woken_ns == asked.to_ns;
                self.was_stopped = stop.is_some();
            }
            Finding::Asleep { hop: 0, at_ns, blocked, .. } => {
                (self.began_ns, self.is_uninterruptible) = (Some(at_ns), blocked.is_uninterruptible);
            }
            _ => {}
        }
        self.found.add(finding);
    }
}

impl Known {
    /// Up to when threads were not allowed to run, and by the place of whom.
    fn limits(known: &VecDeque<Known>) -> Limited {
        let of = |(place, known): (usize, &Known)| {
            let (until_ns, _) = known.limit.as_ref()?;
            Some((known.tid, (known.running_ns, *until_ns, place as u32)))
        };
        let mut limited: HashMap<u32, Vec<(u64, u64, u32)>> = HashMap::new();
        known.iter().enumerate().filter_map(of).for_each(|(tid, limit)| limited.entry(tid).or_default().push(limit));
        Limited(limited)
    }
}

struct Limited(HashMap<u32, Vec<(u64, u64, u32)>>);

/// A thread was seen to get its CPU a moment before it had it.
const MOMENT_NS: u64 = 1_000_000;

impl Limits for Limited {
    fn of(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)> {
        let is_this = |&&(seen_ns, ..): &&(u64, u64, u32)| running_ns.abs_diff(seen_ns) < MOMENT_NS;
        self.0.get(&tid)?.iter().find(is_this).map(|&(_, until_ns, by)| (until_ns, by))
    }
}

/// Names, and what is known of the waits that are told.
struct Told<'a> {
    names: &'a mut PathNames,
    known: &'a VecDeque<Known>,
}

impl Names for Told<'_> {
    fn handler(&mut self, number: u64) -> String {
        self.names.handler(number)
    }

    fn device(&mut self, device: u32) -> String {
        self.names.device(device)
    }

    fn thread(&mut self, tid: u32) -> Option<Name> {
        // It was recorded a moment ago.
        self.names.present_thread(tid)
    }

    fn limit(&mut self, number: u32) -> String {
        let limit = self.known.get(number as usize).and_then(|known| known.limit.as_ref());
        limit.map_or_else(String::new, |(_, by)| by.clone())
    }

    fn quota(&mut self, cgroup: u64) -> String {
        self.names.quota(cgroup)
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        self.names.cgroup(number)
    }

    fn waits_in(&mut self, tid: u32, woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        let known = self.known.iter().rev().find(|known| (known.tid, known.woken_ns) == (tid, woken_ns));
        let (call, _) = self.names.waits_in(tid, woken_ns, blocked);
        let Some(known) = known else { return (call, Vec::new()) };
        // The call alone does not tell what a pipe, a socket or a file is read for.
        let via = match (call, known.class) {
            (Some(call), WaitClass::Other | WaitClass::Idle | WaitClass::Timer) => Some(call),
            (Some(call), class) if call == "futex" && class == WaitClass::Lock => Some(call),
            (Some(call), class) => Some(format!("{call} ({})", class.words())),
            (None, WaitClass::Other) => known.stack.first().cloned(),
            (None, class) => Some(match known.stack.first() {
                Some(function) => format!("{function} ({})", class.words()),
                None => class.words().to_owned(),
            }),
        };
        (via, known.stack.clone())
    }
}
