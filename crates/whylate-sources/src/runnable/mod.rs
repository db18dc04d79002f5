// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that could run and had to wait for a CPU for long: who had it meanwhile.
//!
#![doc = include_str!("how.md")]

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod limits;
mod sleeps;

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use whylate_model::blame::{self, Evidence, RunnableEvidence};
use whylate_model::late::{CGROUP, ROLE, SUBMISSION_THREAD, WORKER};
use whylate_model::{Labels, LateEvent, Occupancy, Snapshot, thread};

use self::skel::RunnableSkelBuilder;
use self::skel::types::{runnable_wait, thread_role};
use self::sleeps::Sleeps;
use crate::attach::{self, PlainData, ProgramStatistics, text};
use crate::cgroups;
use crate::clock;
use crate::occupancy::{Account, Called, Step, Timers, Wakeups, Windows};
use crate::pid_namespace;
use crate::records::Records;
use crate::session::Session;
use crate::source::{AttachError, Threads};
use crate::symbols::KernelSymbols;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/runnable/runnable.skel.rs"));
}

/// How many intervals are taken of the CPU that a thread was moved from.
const MOST_BEFORE: usize = 1024;
/// For so long after the move, an interrupt that comes in late may tell that interrupts were off until it.
const LATE_INTERRUPT_NS: u64 = 1_000_000;
/// Room for late waits with their windows, in bytes.
const LATE_BYTES: u32 = 4 << 20;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for runnable_wait {}

/// Which threads, and from which wait on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub explain_over_ns: u64,
    /// The same of waits for others; `None`: these are not told.
    pub explain_sleeps_over_ns: Option<u64>,
    /// Those of threads that are idle by design too.
    pub idle: bool,
    /// Of waits for others those alone that somebody here held up.
    pub held_up_alone: bool,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
    pub threads: Threads,
    /// The kernel's own threads.
    pub kernel_threads: bool,
    /// Those of processes.
    pub user_threads: bool,
}

/// Explains long waits until it is dropped.
pub(crate) struct Waits {
    /// First, so that no program runs while the rest goes.
    _called: Called,
    records: Records,
    account: Account,
    symbols: KernelSymbols,
    keep_evidence: bool,
    /// Late events that were cut short since they were told.
    cut_short: u64,
    /// Waits that were not seen to begin, as far as they have been told.
    unseen_told: u64,
    /// Waits for others, where they are told.
    sleeps: Option<Sleeps>,
    /// Of those too many that came at once, as far as they have been told.
    sleeps_lost_told: u64,
    /// What was explained before it was asked for.
    explained: Vec<LateEvent>,
    skeleton: skel::RunnableSkel<'static>,
}

impl Waits {
    pub(crate) fn attach(wanted: &Wanted, session: &Session) -> Result<Self, AttachError> {
        let mut account = Account::load(session, Timers::Heartbeats, Wakeups::OfAll)?;
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
        open.maps.runnable_waits.set_max_entries(LATE_BYTES)?;
        let skeleton = open.load()?;
        account.watch_unexplained(skeleton.maps.unexplained_events.as_fd())?;
        let records = Records::of(&skeleton.maps.runnable_waits)?;
        let step = Step::RunnableSwitch { over_ns: wanted.explain_over_ns };
        let called = account.call(step, skeleton.progs.on_sched_switch.as_fd())?;
        account.attach()?;
        Ok(Waits {
            _called: called,
            records,
            account,
            symbols: session.symbols(),
            keep_evidence: wanted.keep_evidence,
            cut_short: 0,
            unseen_told: 0,
            sleeps: wanted.explain_sleeps_over_ns.map(|over_ns| Sleeps::new(over_ns, wanted, session.symbols())),
            sleeps_lost_told: 0,
            explained: Vec::new(),
            skeleton,
        })
    }

    /// Hands over the waits that have come in, waiting at most so long for the first one.
    pub(crate) fn drain(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.explained.drain(..).for_each(&mut *each);
        self.records.poll(wait)?;
        while let Some(record) = self.records.next() {
            if let Some(sleeps) = &mut self.sleeps
                && sleeps.take_in(&record, &self.account)
            {
                continue;
            }
            match event_of(&record, &self.account, &mut self.symbols, self.keep_evidence) {
                Some(event) => each(event),
                None => self.cut_short += 1,
            }
        }
        if let Some(sleeps) = &mut self.sleeps {
            sleeps.explain_at_leisure(&self.account, each);
        }
        Ok(())
    }

    /// What could not be told since the last call, by reason.
    pub(crate) fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        let late = std::mem::take(&mut self.cut_short);
        let counts = self.skeleton.maps.bss_data.as_deref();
        let (unseen, sleeps) = counts.map_or((0, 0), |counts| (counts.lost_wakeups, counts.lost_sleeps));
        let before = std::mem::replace(&mut self.unseen_told, unseen);
        let sleeps_before = std::mem::replace(&mut self.sleeps_lost_told, sleeps);
        // Not seen to begin: the wakeup came while the program ran, or by a thread that the kernel hides.
        let mut lost = vec![("late_events", late), ("unseen_wakeups", unseen.saturating_sub(before))];
        if let Some(of) = &mut self.sleeps {
            // What is not explained by now is not of this span.
            of.explain(&self.account, &mut |event| self.explained.push(event));
            lost.push(("unseen_sleeps", of.take_unseen() + sleeps.saturating_sub(sleeps_before)));
        }
        lost.extend(self.account.take_lost());
        lost
    }

    pub(crate) fn tell_unexplained(&self, snapshot: &mut Snapshot) {
        self.account.tell_unexplained(snapshot);
    }

    pub(crate) fn weaker(&self) -> Option<&str> {
        self.account.weaker()
    }

    pub(crate) fn statistics(&self) -> ProgramStatistics {
        let mut statistics = attach::statistics([self.skeleton.progs.on_sched_switch.as_fd()]);
        statistics += self.account.statistics();
        statistics
    }
}

/// The late event of a `struct runnable_wait`, which lacks the window's unused intervals; `None` where it is cut short.
pub(crate) fn event_of(
    bytes: &[u8],
    account: &Account,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<LateEvent> {
    let record = whole(bytes)?;
    let before = match record.moved_ns {
        0 => None,
        moved_ns => {
            let until_ns = moved_ns.saturating_add(LATE_INTERRUPT_NS).min(record.running_ns);
            account.recent_intervals(record.moved_from, record.runnable_ns..until_ns, MOST_BEFORE, symbols)
        }
    };
    described(bytes, before, &mut account.windows(), symbols, keep_evidence)
}

fn whole(bytes: &[u8]) -> Option<runnable_wait> {
    let mut whole = bytes.to_vec();
    whole.resize(size_of::<runnable_wait>().max(bytes.len()), 0);
    attach::read_plain(&whole)
}

/// The same, knowing who had the CPU that the thread was moved from.
fn described(
    bytes: &[u8],
    occupancy_before: Option<Occupancy>,
    windows: &mut Windows,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<LateEvent> {
    let occupancy = windows.read(bytes.get(offset_of!(runnable_wait, window)..)?, symbols)?;
    let record = whole(bytes)?;
    let subject = thread::called(&text(&record.thread), record.tid);
    let labels = labels_of(&record, windows, symbols);
    let cgroups = &mut windows.cgroups;
    let evidence = RunnableEvidence {
        runnable_ns: record.runnable_ns,
        running_ns: record.running_ns,
        tid: record.tid,
        moved: (record.moved_ns != 0).then_some((record.moved_ns, record.moved_from)),
        throttled: limits::throttled(&record.limits, [record.runnable_ns, record.running_ns], &subject, cgroups),
        kept_from_idle: limits::kept_from_idle(&record.limits, cgroups),
        occupancy,
        occupancy_before,
    };
    Some(LateEvent {
        subject,
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

/// Whose wait it is, and who ended it.
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
    labels.extend(windows.cgroups.told(record.cgroup).map(|path| (CGROUP.to_owned(), path)));
    if record.handler != 0 {
        labels.insert("handler".to_owned(), symbols.name(record.handler).to_owned());
    }
    if record.waker_tid != 0 {
        labels.insert("woken_by".to_owned(), thread::called(&text(&record.waker), record.waker_tid));
    }
    labels
}
