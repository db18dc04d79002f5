// SPDX-License-Identifier: MIT OR Apache-2.0
//! Long blocked waits of threads, explained along the wakers that ended them.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use whylate_model::late::{LateKind, SLEEPER};
use whylate_model::object::Object;
use whylate_model::path::history::{Blocked, Name, Waker};
use whylate_model::path::{Finding, Limits, Names, Path, PathBuilder, Query, WaitSpan, WakeupEdge, walk};
use whylate_model::wait::{Classes, InFlight, State, WaitEvidence, classify};
use whylate_model::{ActorName, Cgroup, LateEvent, WaitClass};

use super::skel::types::entry_kind;
use super::{WaitSelection, labels_of, limits};
use crate::cpu_account::{Account, stop};
use crate::kernel::attach::text;
use crate::kernel::clock;
use crate::kernel::in_flight::Rings;
use crate::kernel::symbols::KernelSymbols;
use crate::paths::{LockWaits, PathNames};

/// Maximum number of recent long waits that are kept, for paths that lead through them.
const MAX_RECORDED: usize = 4_096;
/// Maximum number of stacks of which the symbols are kept.
const MAX_STACKS: usize = 1_024;
/// Maximum number of waits to be explained at a time; more are dropped and counted.
const MAX_PENDING: usize = 1_000;
/// Maximum number of waits that one walk explains: each has a path of up to 150 KB until the walk ends.
const MAX_WALKED: usize = 64;
/// Slack of a wait's bound: the scheduler's clock, which bounds it, stands still in interrupts.
const CLOCK_SLACK_NS: u64 = 10_000_000;
/// Explaining waits that are mostly innocent may take at most 1/50 of wall time.
const REST_FACTOR: u64 = 50;

/// Maximum time from a switch's tracepoint to its record in the ring; long as the vCPU may be preempted in between. Most
/// sections with interrupts off have ended by then.
const SETTLED_NS: u64 = 20_000_000;
const PAUSE: Duration = Duration::from_millis(1);

/// Details of a long wait that the scheduling timeline lacks.
struct RecordedWait {
    tid: u32,
    woken_ns: u64,
    running_ns: u64,
    stack: Arc<[String]>,
    class: WaitClass,
    limit: Option<(u64, ActorName)>,
}

/// A wait that is to be explained.
struct PendingWait {
    asked: Query,
    /// Event without its path.
    event: LateEvent,
    /// Whether it waits for a held lock, of a file or in the kernel. Whether a futex is held is unknown.
    is_for_lock: bool,
    /// The run-queue wait at its end, if that alone is long enough.
    for_cpu: Option<LateEvent>,
}

/// Symbols of the stacks in which threads have waited. There are few different ones, and thousands of waits are kept.
#[derive(Default)]
struct Stacks(HashMap<Box<[u64]>, Arc<[String]>>);

impl Stacks {
    /// Returns the functions of a stack.
    fn named(&mut self, frames: &[u64], symbols: &mut KernelSymbols) -> Arc<[String]> {
        if let Some(known) = self.0.get(frames) {
            return Arc::clone(known);
        }
        // Also forgets functions of modules that were unloaded since.
        if self.0.len() >= MAX_STACKS {
            self.0.clear();
        }
        let names: Arc<[String]> = frames.iter().map(|&address| symbols.name(address).to_owned()).collect();
        self.0.insert(frames.into(), Arc::clone(&names));
        names
    }
}

/// Result of a wait's walk.
#[derive(Default)]
struct Outcome {
    found: PathBuilder,
    began_ns: Option<u64>,
    /// Whether the thread was not switched in yet at the end.
    is_open: bool,
    /// Whether a timer ended the wait: a sleep or a timeout.
    was_timer: bool,
    was_stopped: bool,
    is_uninterruptible: bool,
}

/// Blocked waits that are to be explained.
pub(super) struct BlockedWaits {
    over_ns: u64,
    idle: bool,
    held_up_alone: bool,
    /// Time until which no wait is explained.
    rests_until_ns: u64,
    symbols: KernelSymbols,
    stacks: Stacks,
    names: PathNames,
    rings: Rings,
    known: VecDeque<RecordedWait>,
    waiting: Vec<PendingWait>,
    /// Waits with an unknown start since the last report.
    unseen: u64,
}

impl BlockedWaits {
    pub(super) fn new(
        over_ns: u64,
        wanted: &WaitSelection,
        symbols: KernelSymbols,
        locks: Rc<RefCell<LockWaits>>,
    ) -> Self {
        let names = PathNames::new(symbols.shared(), locks);
        BlockedWaits {
            over_ns,
            idle: wanted.idle,
            held_up_alone: wanted.held_up_alone,
            rests_until_ns: 0,
            symbols,
            stacks: Stacks::default(),
            names,
            rings: Rings::default(),
            known: VecDeque::new(),
            waiting: Vec::new(),
            unseen: 0,
        }
    }

    /// Adds a record. Returns false if the record is at most a late run-queue wait.
    pub(super) fn add_record(&mut self, bytes: &[u8], account: &Account) -> bool {
        let Some(record) = super::padded_record(bytes) else { return false };
        if record.woken_ns == 0 {
            return false;
        }
        let off_ns = record.off_ns.saturating_add(CLOCK_SLACK_NS);
        if self.held_up_alone && off_ns < self.over_ns {
            return false;
        }
        let frames = record.slept_in.get(..record.frames as usize).unwrap_or_default();
        let stack = self.stacks.named(frames, &mut self.symbols);
        let is_late_for_cpu = record.window.count > 0;
        let for_cpu = || super::event_of(bytes, account, &mut self.symbols, false);
        let for_cpu = is_late_for_cpu.then(for_cpu).flatten();
        let windows = &mut account.windows();
        let is_of_disk = record.ended_by == entry_kind::ENTRY_DISK.0;
        let seen = WaitEvidence {
            state: stop(record.stopper).map_or(State::Sleeping, State::of_stop),
            in_iowait: record.in_iowait != 0,
            is_kernel: record.tgid == 2 || stack.iter().any(|frame| frame == "kthread"),
            syscall: None,
            kernel: &stack,
            user: &[],
            in_flight: if is_of_disk { InFlight::Disk } else { self.rings.in_flight(record.tgid, &stack) },
        };
        let class = match classify(&seen, &Classes::default()).class {
            // A disk ended the wait: an event loop may wait for its disk too.
            WaitClass::Idle if is_of_disk && !seen.is_kernel => WaitClass::Disk,
            class => class,
        };
        let subject = ActorName::thread(text(&record.thread), record.tid);
        let waited = [record.runnable_ns, record.running_ns];
        let limits = limits::throttled(&record.limits, waited, subject.clone(), &mut windows.cgroups);
        let limit = limits.into_iter().next().filter(|limit| limit.from_ns <= record.runnable_ns);
        let mut labels = labels_of(&record, windows, &mut self.symbols);
        labels.insert("waited".to_owned(), class.words().to_owned());
        self.known.push_back(RecordedWait {
            tid: record.tid,
            woken_ns: record.woken_ns,
            running_ns: record.running_ns,
            stack: Arc::clone(&stack),
            class,
            limit: limit.map(|limit| (limit.until_ns, limit.by)),
        });
        if self.known.len() > MAX_RECORDED {
            self.known.pop_front();
        }
        // Waits by design are not late.
        if !self.idle && matches!(class, WaitClass::Idle | WaitClass::Timer) {
            return !is_late_for_cpu;
        }
        if self.waiting.len() >= MAX_PENDING {
            self.unseen += 1;
            return !is_late_for_cpu;
        }
        let asked = Query {
            tid: record.tid,
            from_ns: record.running_ns.saturating_sub(off_ns).max(1),
            to_ns: record.running_ns,
            is_wait: true,
            is_command: false,
        };
        let event = LateEvent {
            subject: subject.to_string(),
            labels,
            at_unix_ns: clock::unix_ns_of(record.running_ns),
            at_ns: record.running_ns,
            cpu: record.cpu,
            stack: stack.to_vec(),
            ..LateEvent::default()
        };
        let is_for_lock = class == WaitClass::Lock && !event.stack.iter().any(|frame| frame.contains("futex"));
        self.waiting.push(PendingWait { asked, event, is_for_lock, for_cpu });
        true
    }

    /// Explains the pending waits, unless that took too much time recently.
    pub(super) fn explain_within_budget(&mut self, account: &Account, each: &mut dyn FnMut(LateEvent)) {
        let now_ns = clock::monotonic_ns();
        if now_ns < self.rests_until_ns {
            return;
        }
        // A thread that another CPU has pulled ran before it is known that interrupts were off where it had waited.
        let settled_ns = now_ns.saturating_sub(SETTLED_NS);
        let has_room = self.waiting.len() < MAX_PENDING / 2;
        let is_young = |waiting: &mut PendingWait| has_room && waiting.asked.to_ns > settled_ns;
        let young: Vec<PendingWait> = self.waiting.extract_if(.., is_young).collect();
        if !self.waiting.is_empty() {
            self.explain(account, each);
        }
        self.waiting.extend(young);
        if self.held_up_alone {
            let ended_ns = clock::monotonic_ns();
            self.rests_until_ns = ended_ns.saturating_add(REST_FACTOR * ended_ns.saturating_sub(now_ns));
        }
    }

    /// Explains the pending waits.
    pub(super) fn explain(&mut self, account: &Account, each: &mut dyn FnMut(LateEvent)) {
        let mut waiting = std::mem::take(&mut self.waiting);
        while !waiting.is_empty() {
            let later = waiting.split_off(waiting.len().min(MAX_WALKED));
            self.explain_batch(waiting, account, each);
            waiting = later;
        }
    }

    /// Explains some waits by one walk, and those that were not switched in yet by later ones.
    fn explain_batch(&mut self, mut waiting: Vec<PendingWait>, account: &Account, each: &mut dyn FnMut(LateEvent)) {
        while !waiting.is_empty() {
            let latest_ns = waiting.iter().map(|waiting| waiting.asked.to_ns).max().unwrap_or(0);
            let until_ns = latest_ns.saturating_add(SETTLED_NS).min(clock::monotonic_ns());
            let Some(mut history) = account.history(until_ns) else {
                self.unseen += waiting.len() as u64;
                waiting.into_iter().filter_map(|waiting| waiting.for_cpu).for_each(each);
                return;
            };
            let asked: Vec<Query> = waiting.iter().map(|waiting| waiting.asked).collect();
            let mut outcomes: Vec<Outcome> = waiting.iter().map(|_| Outcome::default()).collect();
            let limits = RecordedWait::limits(&self.known);
            walk(&mut history, &asked, &limits, &mut |number, finding| outcomes[number].add(asked[number], finding));
            let settled_ns = clock::monotonic_ns().saturating_sub(SETTLED_NS);
            let mut open = Vec::new();
            for (waiting, outcome) in waiting.into_iter().zip(outcomes) {
                if outcome.is_open && waiting.asked.to_ns > settled_ns {
                    open.push(waiting);
                } else {
                    self.emit(waiting, outcome, each);
                }
            }
            waiting = open;
            if !waiting.is_empty() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn emit(&mut self, waiting: PendingWait, mut outcome: Outcome, each: &mut dyn FnMut(LateEvent)) {
        let PendingWait { asked, mut event, is_for_lock, for_cpu } = waiting;
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
        outcome.found.name(asked.tid, Name::new(event.labels.get("thread").map_or("", String::as_str)));
        let path: Path = outcome.found.finish(&mut PathNameSource { names: &mut self.names, known: &self.known });
        if let Some(via) = path.segments.iter().find(|segment| segment.depth == 1).and_then(|first| first.via.clone()) {
            event.labels.insert("waited_in".to_owned(), via);
        }
        if self.held_up_alone && !path.is_held_up(self.over_ns, is_for_lock) {
            if let Some(sleeper) = path.sleeper(self.over_ns) {
                event.kind = LateKind::TimerWait;
                event.labels.insert(SLEEPER.to_owned(), sleeper.to_string());
                each(event);
            }
            for_cpu.into_iter().for_each(each);
            return;
        }
        event.kind = LateKind::BlockedWait;
        event.causes = path.causes();
        event.path = path.segments;
        each(event);
    }

    /// Counts a wait that is not explained.
    pub(super) fn leave_unseen(&mut self) {
        self.unseen += 1;
    }

    pub(super) fn take_unseen(&mut self) -> u64 {
        std::mem::take(&mut self.unseen)
    }
}

impl Outcome {
    fn add(&mut self, asked: Query, finding: Finding) {
        match finding {
            Finding::WakeupEdge(WakeupEdge { number: 0, by, woken_ns, stop, .. }) => {
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

impl RecordedWait {
    /// Returns until when threads were throttled, with the index of the limit in `known`.
    fn limits(known: &VecDeque<RecordedWait>) -> ThrottleLimits {
        let of = |(place, known): (usize, &RecordedWait)| {
            let (until_ns, _) = known.limit.as_ref()?;
            Some((known.tid, (known.running_ns, *until_ns, place as u32)))
        };
        let mut limited: HashMap<u32, Vec<(u64, u64, u32)>> = HashMap::new();
        known.iter().enumerate().filter_map(of).for_each(|(tid, limit)| limited.entry(tid).or_default().push(limit));
        ThrottleLimits(limited)
    }
}

struct ThrottleLimits(HashMap<u32, Vec<(u64, u64, u32)>>);

/// Tolerance between the recorded time of a switch-in and the timeline's.
const SWITCH_IN_TOLERANCE_NS: u64 = 1_000_000;

impl Limits for ThrottleLimits {
    fn next_allowed(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)> {
        let is_this = |&&(seen_ns, ..): &&(u64, u64, u32)| running_ns.abs_diff(seen_ns) < SWITCH_IN_TOLERANCE_NS;
        self.0.get(&tid)?.iter().find(is_this).map(|&(_, until_ns, by)| (until_ns, by))
    }
}

/// Resolves names for a path, from recorded waits and `/proc`.
pub(super) struct PathNameSource<'a> {
    names: &'a mut PathNames,
    known: &'a VecDeque<RecordedWait>,
}

impl<'a> PathNameSource<'a> {
    /// Resolver of names that knows no recorded waits.
    pub(super) fn of_names(names: &'a mut PathNames) -> Self {
        static NONE: VecDeque<RecordedWait> = VecDeque::new();
        PathNameSource { names, known: &NONE }
    }
}

impl Names for PathNameSource<'_> {
    fn handler(&mut self, number: u64) -> String {
        self.names.handler(number)
    }

    fn device(&mut self, device: u32) -> String {
        self.names.device(device)
    }

    fn thread(&mut self, tid: u32) -> Option<Name> {
        // It was recorded just before.
        self.names.present_thread(tid)
    }

    fn limit(&mut self, number: u32) -> ActorName {
        let limit = self.known.get(number as usize).and_then(|known| known.limit.as_ref());
        limit.map(|(_, by)| by.clone()).unwrap_or_default()
    }

    fn quota(&mut self, cgroup: u64) -> String {
        self.names.quota(cgroup)
    }

    fn cgroup(&mut self, number: u64) -> Option<Cgroup> {
        self.names.cgroup(number)
    }

    fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        self.names.object(wait, via)
    }

    fn waits_in(&mut self, tid: u32, woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        let known = self.known.iter().rev().find(|known| (known.tid, known.woken_ns) == (tid, woken_ns));
        let (call, _) = self.names.waits_in(tid, woken_ns, blocked);
        let Some(known) = known else { return (call, Vec::new()) };
        // The call alone does not show what a pipe, a socket or a file is read for.
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
        (via, known.stack.to_vec())
    }
}
