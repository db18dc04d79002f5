// SPDX-License-Identifier: MIT OR Apache-2.0
//! Long run-queue waits: threads that were runnable without a CPU, and what occupied the CPU.
//!
#![doc = include_str!("how.md")]

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod limits;
mod programs;
mod sleeps;

use std::cell::RefCell;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use whylate_model::blame::{self, Evidence, RunnableEvidence};
use whylate_model::late::{CGROUP, ROLE, SUBMISSION_THREAD, WORKER};
use whylate_model::path::history::{Move, Moves};
use whylate_model::thread::{self, ActorName};
use whylate_model::{Labels, LateEvent, Occupancy, Snapshot};

use self::programs::ProgramShares;
use self::skel::RunnableSkelBuilder;
use self::skel::types::{bss, runnable_wait, thread_role};
use self::sleeps::BlockedWaits;
use crate::cpu_account::{Account, Step, StepGuard, Timers, Wakeups, Windows};
use crate::kernel::attach::{self, PlainData, ProgramStatistics, text};
use crate::kernel::cgroups;
use crate::kernel::clock;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::kernel::symbols::KernelSymbols;
use crate::paths::{ContendedLocks, LoadingLocks, LockWaits, without_locks};
use crate::source::explain_budget::ExplainBudget;
use crate::source::session::Session;
use crate::source::{AttachError, Threads};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/runnable/runnable.skel.rs"));
}

/// Maximum number of intervals that are read of the CPU that a thread was migrated from.
const MAX_INTERVALS_BEFORE: usize = 1024;
/// Time for which the lock of a wait is kept: by then it should be explained.
const LOCKS_KEPT_FOR_NS: u64 = 10_000_000_000;
const FORGET_LOCKS_EVERY: Duration = Duration::from_secs(1);
/// Maximum time from a migration to a late interrupt that shows that interrupts were off until it.
const LATE_INTERRUPT_NS: u64 = 1_000_000;
// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for runnable_wait {}

/// Threads to explain waits of, and minimum lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitSelection {
    pub explain_over_ns: u64,
    /// Minimum length of blocked waits, in nanoseconds; `None`: they are not explained.
    pub explain_sleeps_over_ns: Option<u64>,
    /// Include blocked waits of threads that are idle by design.
    pub idle: bool,
    /// Explain only blocked waits that something on this machine held up.
    pub held_up_alone: bool,
    /// Add to late events the evidence that their causes were derived from.
    pub keep_evidence: bool,
    pub threads: Threads,
    /// Include kernel threads.
    pub kernel_threads: bool,
    /// Include user threads.
    pub user_threads: bool,
}

/// Explains long waits until dropped.
pub(crate) struct Waits {
    /// Dropped first, so that no program runs while the rest is dropped.
    _called: StepGuard,
    records: Records,
    account: Account,
    symbols: KernelSymbols,
    keep_evidence: bool,
    budget: ExplainBudget,
    /// Truncated records since the last report.
    cut_short: u64,
    /// Waits with an unseen start, as far as reported.
    unseen_reported: u64,
    /// Kernel locks of blocked waits, if these are explained and the kernel shows them.
    locks: Option<LiveLocks>,
    /// Blocked waits, if they are explained.
    sleeps: Option<BlockedWaits>,
    /// Programs by the share of time that they are held up, in the overview.
    programs: Option<ProgramShares>,
    /// Blocked waits dropped by the programs, as far as reported.
    sleeps_lost_reported: u64,
    /// Events that were explained before a drain.
    explained: Vec<LateEvent>,
    skeleton: skel::RunnableSkel<'static>,
    limitations: Option<String>,
}

/// Kernel locks for which threads waited recently.
struct LiveLocks {
    contended: ContendedLocks,
    waits: Rc<RefCell<LockWaits>>,
    forgot: Instant,
}

impl LiveLocks {
    fn take_in(&mut self) {
        self.contended.take_in();
        if self.forgot.elapsed() > FORGET_LOCKS_EVERY {
            self.forgot = Instant::now();
            self.waits.borrow_mut().forget_before(clock::monotonic_ns().saturating_sub(LOCKS_KEPT_FOR_NS));
        }
    }
}

impl Waits {
    pub(crate) fn attach(wanted: &WaitSelection, session: &Session) -> Result<Self, AttachError> {
        let locks = wanted.explain_sleeps_over_ns.map(|_| LoadingLocks::begin());
        let mut account = Account::load(session.account(), Timers::Heartbeats, Wakeups::OfAll)?;
        let mut open = RunnableSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.explain_over_ns = wanted.explain_over_ns;
        settings.explain_sleeps_over_ns = wanted.explain_sleeps_over_ns.unwrap_or(0);
        settings.explain_held_up_alone = wanted.held_up_alone;
        settings.own_namespace = pid_namespace::as_setting();
        settings.own_process = pid_namespace::kernels_own_number()?;
        settings.is_called_by_account = true;
        settings.wanted_process = wanted.threads.process.map_or(Ok(0), pid_namespace::kernels_number)?;
        settings.has_cgroups_of_v1 = cgroups::are_of_v1();
        settings.wanted_cgroup = wanted.threads.cgroup.unwrap_or(0);
        settings.take_kernel_threads = wanted.kernel_threads;
        settings.take_user_threads = wanted.user_threads;
        if let Some(name) = &wanted.threads.name {
            (settings.wanted_thread_name, settings.has_wanted_thread_name) = (attach::kept_name(name), true);
        }
        if let Some(name) = &wanted.threads.process_name {
            (settings.wanted_process_name, settings.has_wanted_process_name) = (attach::kept_name(name), true);
        }
        account.share_with(open.open_object_mut())?;
        open.maps.runnable_waits.set_max_entries(account.late_thread_bytes())?;
        let skeleton = attach::load(open)?;
        account.watch_unexplained(skeleton.maps.bss.as_fd(), offset_of!(bss, unexplained_events))?;
        let records = Records::new(&skeleton.maps.runnable_waits)?;
        let step = Step::RunnableSwitch { over_ns: wanted.explain_over_ns };
        let called = account.call(step, &skeleton.progs.on_sched_switch)?;
        account.attach()?;
        let lock_waits = Rc::<RefCell<LockWaits>>::default();
        let locks = locks.map(|loading| loading.attach(&lock_waits)).transpose();
        let without_locks = locks.as_ref().err().map(without_locks);
        let limitations: Vec<String> =
            account.limitations().map(str::to_owned).into_iter().chain(without_locks).collect();
        let live = |contended| LiveLocks { contended, waits: Rc::clone(&lock_waits), forgot: Instant::now() };
        Ok(Waits {
            _called: called,
            records,
            account,
            symbols: session.symbols(),
            keep_evidence: wanted.keep_evidence,
            budget: session.explain_budget(),
            cut_short: 0,
            unseen_reported: 0,
            locks: locks.ok().flatten().map(live),
            sleeps: wanted
                .explain_sleeps_over_ns
                .map(|over_ns| BlockedWaits::new(over_ns, wanted, session.symbols(), Rc::clone(&lock_waits))),
            programs: wanted.held_up_alone.then(|| ProgramShares::new(&session.symbols(), lock_waits)),
            sleeps_lost_reported: 0,
            explained: Vec::new(),
            skeleton,
            limitations: (!limitations.is_empty()).then(|| limitations.join("; ")),
        })
    }

    /// Passes the waits that have come in to `each`. Waits for at most `wait` until the first one.
    pub(crate) fn drain(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.explained.drain(..).for_each(&mut *each);
        self.records.poll(wait)?;
        self.locks.iter_mut().for_each(LiveLocks::take_in);
        while let Some(record) = self.records.next() {
            let Some(_spending) = self.budget.spend() else {
                self.leave_unexplained(&record);
                continue;
            };
            if let Some(sleeps) = &mut self.sleeps
                && sleeps.add_record(&record, &self.account)
            {
                continue;
            }
            match event_of(&record, &self.account, &mut self.symbols, self.keep_evidence) {
                Some(event) => each(event),
                None => self.cut_short += 1,
            }
        }
        if let Some(sleeps) = &mut self.sleeps
            && let Some(_spending) = self.budget.spend()
        {
            sleeps.explain_within_budget(&self.account, each);
        }
        // Reading has a separate budget.
        if let Some(programs) = &mut self.programs {
            programs.read(&self.account);
        }
        Ok(())
    }

    /// Explains the blocked waits that a drain has left for later, within the budget of causes.
    pub(crate) fn explain_pending(&mut self, each: &mut dyn FnMut(LateEvent)) {
        self.explained.drain(..).for_each(&mut *each);
        self.locks.iter_mut().for_each(LiveLocks::take_in);
        if let Some(sleeps) = &mut self.sleeps {
            let _spending = self.budget.spend();
            sleeps.explain(&self.account, each);
        }
    }

    /// Adds what programs did since the last call; `stacks` were sampled at the same time.
    pub(crate) fn report_programs(&mut self, snapshot: &mut Snapshot) {
        if let Some(programs) = &mut self.programs {
            snapshot.programs = programs.take(&self.account, &snapshot.stacks);
            *snapshot.lost.entry("programs_full".to_owned()).or_default() += programs.take_unjudged();
        }
    }

    /// Counts a record that is not explained, because the budget is spent.
    fn leave_unexplained(&mut self, record: &[u8]) {
        let late_for_cpu_ns = padded_record(record).filter(|record| record.window.count > 0);
        match (late_for_cpu_ns, &mut self.sleeps) {
            (Some(late), _) => self.account.leave_unexplained(late.running_ns.saturating_sub(late.runnable_ns)),
            // Only its explanation shows whether a blocked wait is late.
            (None, Some(sleeps)) => sleeps.leave_unseen(),
            (None, None) => self.cut_short += 1,
        }
    }

    /// Returns the number of waits lost since the last call, by reason.
    pub(crate) fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        let late = std::mem::take(&mut self.cut_short);
        let counts = self.skeleton.maps.bss_data.as_deref();
        let (unseen, sleeps) = counts.map_or((0, 0), |counts| (counts.lost_wakeups, counts.lost_sleeps));
        let before = std::mem::replace(&mut self.unseen_reported, unseen);
        let sleeps_before = std::mem::replace(&mut self.sleeps_lost_reported, sleeps);
        // An unseen start: the wakeup came while the program ran, or by a thread that the kernel hides.
        let mut lost = vec![("late_events", late), ("unseen_wakeups", unseen.saturating_sub(before))];
        self.locks.iter_mut().for_each(LiveLocks::take_in);
        if let Some(of) = &mut self.sleeps {
            // Waits not explained by now would fall out of this span.
            let _spending = self.budget.spend();
            of.explain(&self.account, &mut |event| self.explained.push(event));
            lost.push(("unseen_sleeps", of.take_unseen() + sleeps.saturating_sub(sleeps_before)));
        }
        let unread = self.locks.as_mut().map_or(0, |locks| locks.contended.take_lost());
        lost.push(("lock_waits_unread", unread));
        lost.extend(self.account.take_lost());
        lost
    }

    pub(crate) fn report_unexplained(&self, snapshot: &mut Snapshot) {
        self.account.report_unexplained(snapshot);
    }

    pub(crate) fn limitations(&self) -> Option<&str> {
        self.limitations.as_deref()
    }

    pub(crate) fn statistics(&self) -> ProgramStatistics {
        // They include the runs of the program that the account calls.
        let mut statistics = self.account.statistics();
        if let Some(locks) = &self.locks {
            statistics += locks.contended.statistics();
        }
        statistics
    }
}

/// Builds the late event of a `struct runnable_wait`, which lacks the window's unused intervals; `None` if it is
/// truncated.
pub(crate) fn event_of(
    bytes: &[u8],
    account: &Account,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<LateEvent> {
    let record = padded_record(bytes)?;
    let moves = moves(&record);
    let first = moves.and_then(|moves| moves.first);
    let last = moves.filter(|moves| !moves.has_gap).map(|moves| moves.last);
    let mut queued_until = |moved: Option<Move>, from_ns: u64| {
        let Move { at_ns, from_cpu } = moved?;
        let until_ns = at_ns.saturating_add(LATE_INTERRUPT_NS).min(record.running_ns);
        account.recent_intervals(from_cpu, from_ns..until_ns, MAX_INTERVALS_BEFORE, symbols)
    };
    let at_first = queued_until(first, record.runnable_ns);
    let before = queued_until(last, first.map_or(record.runnable_ns, |first| first.at_ns));
    late_event(bytes, [at_first, before], &mut account.windows(), symbols, keep_evidence)
}

fn padded_record(bytes: &[u8]) -> Option<runnable_wait> {
    let mut padded = bytes.to_vec();
    padded.resize(size_of::<runnable_wait>().max(bytes.len()), 0);
    attach::read_plain(&padded)
}

/// Returns the migrations of the thread during the wait.
fn moves(record: &runnable_wait) -> Option<Moves> {
    let of = &record.moves;
    let moved = |at_ns, from_cpu| (at_ns != 0).then_some(Move { at_ns, from_cpu });
    Some(Moves::recorded(moved(of.last_ns, of.last_from)?, moved(of.first_ns, of.first_from), of.count))
}

/// Builds the late event, given the occupancy of the CPUs that the thread was migrated from first and last.
fn late_event(
    bytes: &[u8],
    [occupancy_at_first, occupancy_before]: [Option<Occupancy>; 2],
    windows: &mut Windows,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<LateEvent> {
    let occupancy = windows.read(bytes.get(offset_of!(runnable_wait, window)..)?, symbols)?;
    let record = padded_record(bytes)?;
    let moves = moves(&record);
    let pair = |moved: Move| (moved.at_ns, moved.from_cpu);
    let subject = ActorName::thread(text(&record.thread), record.tid);
    let labels = labels_of(&record, windows, symbols);
    let cgroups = &mut windows.cgroups;
    let evidence = RunnableEvidence {
        runnable_ns: record.runnable_ns,
        running_ns: record.running_ns,
        tid: record.tid,
        moved: moves.map(|moves| pair(moves.last)),
        first_moved: moves.and_then(|moves| moves.first).map(pair),
        has_unknown_moves: moves.is_some_and(|moves| moves.has_gap),
        throttled: limits::throttled(&record.limits, [record.runnable_ns, record.running_ns], subject.clone(), cgroups),
        kept_from_idle: limits::kept_from_idle(&record.limits, cgroups),
        occupancy,
        occupancy_before,
        occupancy_at_first,
    };
    Some(LateEvent {
        subject: subject.to_string(),
        labels,
        at_unix_ns: clock::unix_ns_of(record.running_ns),
        at_ns: record.running_ns,
        latency_ns: record.running_ns.saturating_sub(record.runnable_ns),
        cpu: record.cpu,
        causes: blame::runnable_causes(&evidence),
        evidence: keep_evidence.then(|| Box::new(Evidence::from(evidence))),
        ..LateEvent::default()
    })
}

/// Returns the labels of the waiting thread and its waker.
fn labels_of(record: &runnable_wait, windows: &mut Windows, symbols: &mut KernelSymbols) -> Labels {
    let mut labels: Labels = [
        ("process", text(&record.process)),
        ("pid", thread::number(record.tgid)),
        ("tid", thread::number(record.tid)),
        ("thread", text(&record.thread)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let role = match thread_role(record.role) {
        thread_role::ROLE_WORKER => Some(WORKER),
        thread_role::ROLE_SUBMISSION_THREAD => Some(SUBMISSION_THREAD),
        _ => None,
    };
    labels.extend(role.map(|role| (ROLE.to_owned(), role.to_owned())));
    labels.extend(windows.cgroups.path_or_placeholder(record.cgroup).map(|path| (CGROUP.to_owned(), path)));
    if record.handler != 0 {
        labels.insert("handler".to_owned(), symbols.name(record.handler).to_owned());
    }
    if record.waker_tid != 0 {
        let waker = ActorName::thread(text(&record.waker), record.waker_tid);
        labels.insert("woken_by".to_owned(), waker.to_string());
    }
    labels
}
