// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPU accounting: what occupies each CPU. BPF programs record it while causes of late events are requested.
//!
#![doc = include_str!("how.md")]

mod decode;
mod edges;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod history;
mod recent;
mod rings;
mod shared;
mod slices;
mod steps;
mod stream;
mod unexplained;
pub(crate) mod vectors;

use std::cell::{RefCell, RefMut};
use std::collections::BTreeSet;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags, OpenObject};
use whylate_model::ActorName;
use whylate_model::Snapshot;
use whylate_model::path::timer::TimerKind;

pub(crate) use self::decode::Windows;
use self::decode::spread_steal;
pub use self::edges::Edges;
pub use self::history::History;
use self::rings::Rings;
pub(crate) use self::shared::SharedAccount;
use self::skel::types::{account, disk_request, interval, late_stack, occupancy_limits, run_queue_move, wakeup_limits};
use self::skel::{OccupancySkel, OccupancySkelBuilder};
pub(crate) use self::slices::stop;
pub(crate) use self::steps::{Step, StepGuard};
pub use self::stream::Stream;
use self::unexplained::Unexplained;
use crate::kernel::attach::{self, PlainData, ProgramStatistics};
use crate::kernel::cgroups;
use crate::kernel::cpu_choice::Choice;
use crate::kernel::cpus::{self, Machine};
use crate::kernel::error::AttachError;
use crate::kernel::heartbeat::{self, Heartbeats};
use crate::kernel::mapped::MappedArray;
use crate::kernel::need::Need;
use crate::kernel::percpu::{PerCpu, PreemptCount};
use crate::kernel::pid_namespace;
use crate::kernel::symbols::{ReadOnce, address_of, addresses_of};
use crate::kernel::thread_iterator::iterate;

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/cpu_account/occupancy.skel.rs"));
}

/// Kernel features that the account needs.
pub(crate) const NEEDS: &[Need] = &[
    Need::TpBtfPrograms,
    Need::Tracepoint("sched:sched_switch"),
    Need::Tracepoint("sched:sched_waking"),
    Need::Tracepoint("sched:sched_migrate_task"),
    Need::Tracepoint("irq:irq_handler_entry"),
    Need::Tracepoint("irq:softirq_entry"),
    Need::Tracepoint("workqueue:workqueue_execute_start"),
    Need::Tracepoint("timer:hrtimer_expire_entry"),
];
/// Kernel functions of a CPU's tick (kernel/time/tick-sched.c): the second since 6.9, the first before.
const TICK_FUNCTIONS: [&str; 2] = ["tick_sched_timer", "tick_nohz_handler"];
/// Limitation without a heartbeat timer on each CPU.
pub(crate) const WITHOUT_HEARTBEAT: &str = "disabled interrupts cannot be distinguished from running threads";

/// Minimum timer lateness, in nanoseconds, that counts as disabled interrupts where the source's own threads are
/// measured.
const OWN_LATE_FROM_NS: u64 = 5_000;

/// Minimum timer lateness, in nanoseconds, on an emulated CPU, where every interrupt is some 100 us late and a few are
/// late by milliseconds.
const EMULATED_LATE_FROM_NS: u64 = 10_000_000;

/// Kernel function of timers that wake a thread (kernel/time/hrtimer.c).
pub(crate) const WAKEUP_FUNCTION: &str = "hrtimer_wakeup";
/// Kernel function of the timerlat tracer's timers (kernel/trace/trace_osnoise.c).
pub(crate) const TRACER_FUNCTION: &str = "timerlat_irq";

/// Timers that reveal disabled interrupts by their lateness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timers {
    /// Only the CPUs' own ticks.
    Ticks,
    /// Also a heartbeat timer on each CPU.
    Heartbeats,
    /// Also the timers of this process's threads.
    OwnThreadsToo,
    /// Also the timers of the kernel's timerlat tracer.
    TracersToo,
    /// Heartbeat timers that the source itself has started.
    HeartbeatsOfSource {
        /// Minimum lateness, in nanoseconds, that is reported.
        late_from_ns: u64,
    },
}

/// Programs that start a new occupant and call no source's program. The kernel runs programs in attach order, so they
/// are attached after those of sources, which still see the previous occupant.
const SWITCHING_PROGRAMS: [&str; 1] = ["on_workqueue_execute_start"];
/// Tail-called by a source's program to continue with the account's own.
const AFTER_STEP: &str = "on_sched_switch_after_step";
/// Iterator that finds submission threads.
const FIND_SQ_THREAD: &str = "find_sq_thread";

/// Programs needed only for wakeup edges, besides [`OLD_SUBMIT_PROGRAMS`].
const EDGE_PROGRAMS: [&str; 9] = [
    "on_balance_dirty_pages",
    "on_sched_wakeup_new",
    "on_timer_expire_entry",
    "on_sched_process_exec",
    "on_softirq_raise",
    "on_workqueue_queue_work",
    SUBMIT_PROGRAM,
    "on_block_rq_issue",
    "on_block_rq_complete",
];
/// Records the submitter of a disk request.
const SUBMIT_PROGRAM: &str = "on_block_io_start";
/// Record the submitter before 6.5, which lacks `block_io_start`.
const OLD_SUBMIT_PROGRAMS: [&str; 2] = ["on_block_rq_insert", "on_block_getrq"];

/// Size of the ring of late events of a single source, in bytes.
pub(crate) const LATE_BYTES: u32 = 4 << 20;

/// Threads for which wakeups, and migrations while waiting for a CPU, are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wakeups {
    /// Workqueue workers only.
    OfWorkers,
    /// Workqueue workers only, in a larger ring: [`Account::recent_intervals`] reads it after the event.
    ForLater,
    /// All threads, with their wakers and how each left its CPU.
    OfAll,
}

/// A source's handle to the CPU account. Several sources may share one, which ends with the last handle.
pub(crate) struct Account {
    state: Rc<RefCell<AccountState>>,
    limitation: Option<String>,
    /// Whether this source reports the account's costs and losses. A source that shares the account does not.
    is_own: bool,
    /// Late events of this source without causes.
    unexplained: Option<Unexplained>,
}

/// State of an account, shared by its handles.
pub(crate) struct AccountState {
    links: Vec<Link>,
    /// Names of the attached programs.
    attached: Vec<String>,
    /// Whether all programs are attached.
    is_complete: bool,
    skeleton: OccupancySkel<'static>,
    heartbeats: Option<Heartbeats>,
    /// The CPUs with a heartbeat.
    choice: Rc<Choice>,
    /// Sources' programs that the account calls.
    steps: BTreeSet<Step>,
    limitation: Option<String>,
    cpus: u32,
    windows: Windows,
    /// Rings that user space reads in place.
    rings: Rc<Rings>,
    wakeups: Wakeups,
    /// Counters already reported.
    lost: Lost,
}

/// The thread that runs on each CPU, readable at any time.
pub(crate) struct Threads {
    accounts: MappedArray,
    /// Offset in `account` of the TID in our PID namespace.
    tid_at: usize,
}

impl Threads {
    /// Returns CPU numbers and thread labels (name and TID). Idle CPUs are left out.
    pub(crate) fn now(&self) -> Vec<(u32, String)> {
        let tid = |cpu| self.accounts.u32_at(cpu, self.tid_at).load(Ordering::Relaxed);
        let name = |cpu| {
            let bytes =
                (0..16).map(|at| self.accounts.u8_at(cpu, offset_of!(account, name) + at).load(Ordering::Relaxed));
            String::from_utf8_lossy(&bytes.take_while(|&byte| byte != 0).collect::<Vec<_>>()).into_owned()
        };
        let busy = (0..self.accounts.entries()).filter(|&cpu| tid(cpu) != 0);
        busy.map(|cpu| (cpu as u32, ActorName::thread(name(cpu), tid(cpu)).to_string())).collect()
    }
}

/// Loss counters of all CPUs since the account was loaded.
#[derive(Clone, Copy, Debug, Default)]
struct Lost {
    nested: u64,
    stacks: u64,
    astray: u64,
    requests_full: u64,
    requests_unseen: u64,
    intervals_overwritten: u64,
    requests_overwritten: u64,
    moves_overwritten: u64,
    queuers_overwritten: u64,
    unseen_interrupts: u64,
}

impl Account {
    /// Loads the programs without attaching them. In a session with several sources, the first source loads them for
    /// all.
    pub(crate) fn load(shared: &SharedAccount, of: Timers, wakeups: Wakeups) -> Result<Self, AttachError> {
        attach::require_btf()?;
        let choice = shared.cpus(&[])?;
        let (state, is_own) = match shared.account(|| AccountState::load(&choice, of, Wakeups::OfAll, true))? {
            Some(state) => (state, false),
            None => (Rc::new(RefCell::new(AccountState::load(&choice, of, wakeups, false)?)), true),
        };
        let limitation = state.borrow().limitation.clone();
        Ok(Account { state, limitation, is_own, unexplained: None })
    }

    /// Attaches the programs. If sources share them, those of `SWITCHING_PROGRAMS` wait for [`SharedAccount::begin`].
    pub(crate) fn attach(&mut self) -> Result<(), AttachError> {
        self.state.borrow_mut().attach(self.is_own)
    }

    /// Maps the accounts, to read which thread runs on each CPU.
    pub(crate) fn threads(&self) -> std::io::Result<Threads> {
        let state = self.state.borrow();
        let accounts =
            MappedArray::new(&state.skeleton.maps.account_by_cpu, state.cpus as usize, size_of::<account>())?;
        let is_translated = pid_namespace::own().is_some();
        let tid_at = if is_translated { offset_of!(account, shown_tid) } else { offset_of!(account, tid) };
        Ok(Threads { accounts, tid_at })
    }

    /// Returns the window decoder, shared by all sources of the account.
    pub(crate) fn windows(&self) -> RefMut<'_, Windows> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.windows)
    }

    /// Makes a source's BPF object reuse the account's maps of the same names: its records, and the program arrays for
    /// tail calls.
    pub(crate) fn share_with(&self, open: &mut OpenObject) -> libbpf_rs::Result<()> {
        let state = self.state.borrow();
        let maps = &state.skeleton.maps;
        for mut map in open.maps_mut() {
            let shared = match map.name().to_string_lossy().as_ref() {
                "account_by_cpu" => &maps.account_by_cpu,
                "intervals_by_position" => &maps.intervals_by_position,
                "wakeup_by_tid" => &maps.wakeup_by_tid,
                "first_move_by_tid" => &maps.first_move_by_tid,
                "throttles_by_group" => &maps.throttles_by_group,
                "steps_of_switch" => &maps.steps_of_switch,
                _ => continue,
            };
            map.reuse_fd(shared.as_fd())?;
        }
        Ok(())
    }

    /// Looks for submission threads of io_uring among all threads. Needs an attached account, of a session with several
    /// sources.
    pub(crate) fn find_sq_thread(&self) -> anyhow::Result<bool> {
        let state = self.state.borrow();
        let iterator = state.skeleton.progs.find_sq_thread.attach().context("cannot look at all threads")?;
        iterate(&iterator, |_| ())?;
        drop(state);
        Ok(self.has_sq_thread())
    }

    /// Returns whether a thread was found, or has run since, that may be a submission thread.
    pub(crate) fn has_sq_thread(&self) -> bool {
        self.state.borrow().skeleton.maps.bss_data.as_deref().is_some_and(|data| data.has_sq_thread != 0)
    }

    /// Returns the size of a source's ring of late events with their windows, in bytes: beside other sources, it has room
    /// for 60 windows of all `WINDOW_INTERVALS`, or hundreds of short ones. Sources that share the account are read several times a second, and share a budget.
    pub(crate) fn late_bytes(&self) -> u32 {
        if self.is_own { LATE_BYTES } else { LATE_BYTES / 4 }
    }

    /// Returns the size of the ring of late threads, which are the most on a busy machine.
    pub(crate) fn late_thread_bytes(&self) -> u32 {
        if self.is_own { LATE_BYTES } else { LATE_BYTES / 2 }
    }

    /// Limitations of the account here.
    pub(crate) fn limitations(&self) -> Option<&str> {
        self.limitation.as_deref()
    }

    /// Returns the run time of the programs. Empty unless this source reports it.
    pub(crate) fn statistics(&self) -> ProgramStatistics {
        if self.is_own { self.state.borrow().statistics() } else { ProgramStatistics::default() }
    }

    /// Adds the events lost since the last call, and late events without causes, to the snapshot.
    pub(crate) fn report(&mut self, snapshot: &mut Snapshot) {
        snapshot.lost.extend(self.take_lost().into_iter().map(|(reason, count)| (reason.to_owned(), count)));
        self.report_unexplained(snapshot);
    }

    /// Events lost since the last call, by reason. All zero unless this source reports them.
    pub(crate) fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        if self.is_own { self.state.borrow_mut().take_lost() } else { named(Lost::default()) }
    }
}

impl AccountState {
    /// Loads the programs. With `is_shared`, they serve every kind of source: timers of measured threads count too.
    fn load(choice: &Rc<Choice>, of: Timers, wakeups: Wakeups, is_shared: bool) -> Result<Self, AttachError> {
        let cpus = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        // Wakers are known only if programs can distinguish interrupts from threads.
        let preempt_count = PreemptCount::here();
        let of_context = if wakeups == Wakeups::OfAll { preempt_count.limitation() } else { None };
        let unseen: Vec<&str> = [cpus::unseen_interrupts(), of_context].into_iter().flatten().collect();
        let unseen = (!unseen.is_empty()).then(|| unseen.join("; "));
        let read_once = ReadOnce::begin();
        let (heartbeats, limitation) = match of {
            Timers::HeartbeatsOfSource { .. } => (None, of_context.map(str::to_owned)),
            Timers::Ticks => (None, unseen),
            _ => match Heartbeats::start(&choice.measured, heartbeat::PERIOD_NS) {
                Ok(heartbeats) => (Some(heartbeats), unseen),
                Err(error) => (None, Some(format!("{WITHOUT_HEARTBEAT}: {error}"))),
            },
        };
        // Sources with threads or timers of their own name such CPUs themselves.
        let left_out = match of {
            Timers::Heartbeats => choice.excluded().map(|cpus| format!("{WITHOUT_HEARTBEAT} on {cpus}")),
            _ => None,
        };
        let limitation: Vec<String> = limitation.into_iter().chain(left_out).collect();
        let limitation = (!limitation.is_empty()).then(|| limitation.join("; "));
        let timer_is_unannounced = cpus::unseen_interrupts().is_some();
        let mut open = OccupancySkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.heartbeat_function = heartbeats.as_ref().map_or(0, |heartbeats| heartbeats.function);
        settings.tick_function = TICK_FUNCTIONS.iter().find_map(|function| address_of(function).ok()).unwrap_or(0);
        match of {
            Timers::Ticks | Timers::Heartbeats | Timers::OwnThreadsToo => {}
            Timers::HeartbeatsOfSource { late_from_ns } => {
                settings.heartbeat_function = address_of(heartbeat::FUNCTION).unwrap_or(0);
                settings.late_from_ns = late_from_ns;
            }
            Timers::TracersToo => settings.tracer_function = address_of(TRACER_FUNCTION).unwrap_or(0),
        }
        if is_shared {
            settings.tracer_function = address_of(TRACER_FUNCTION).unwrap_or(0);
        }
        if of == Timers::OwnThreadsToo || is_shared {
            settings.wakeup_function = address_of(WAKEUP_FUNCTION).unwrap_or(0);
            settings.own_process = pid_namespace::kernels_own_number()?;
        }
        match (Machine::this(), of) {
            (_, Timers::HeartbeatsOfSource { .. }) if !is_shared => {}
            (Machine::Emulated, _) => settings.late_from_ns = EMULATED_LATE_FROM_NS,
            // Each activation has such a timer, so little is missed; a hypervisor makes many late by tens of us.
            (Machine::Bare, Timers::OwnThreadsToo | Timers::TracersToo) => settings.late_from_ns = OWN_LATE_FROM_NS,
            _ => {}
        }
        settings.timer_is_unannounced = timer_is_unannounced;
        settings.own_namespace = pid_namespace::as_setting();
        settings.has_cgroups_of_v1 = cgroups::are_of_v1();
        settings.steal_time_distance = PerCpu::new()?.distance("runqueues", "steal_time").unwrap_or(0);
        settings.preempt_count_distance = preempt_count.distance();
        settings.keeps_all_wakeups = wakeups == Wakeups::OfAll;
        if settings.keeps_all_wakeups {
            let known = addresses_of(TimerKind::FUNCTIONS.map(|(function, _)| function));
            settings.known_timers.iter_mut().zip(known).for_each(|(to, address)| *to = address);
        }
        drop(read_once);
        let late_stacks = late_stacks_for(cpus, is_shared);
        settings.late_stack_slots = late_stacks;
        open.maps.late_interrupt_stacks.set_max_entries(late_stacks)?;
        open.maps.account_by_cpu.set_max_entries(cpus)?;
        let interval_bits = match wakeups {
            Wakeups::OfWorkers => occupancy_limits::INTERVAL_BITS.0,
            Wakeups::ForLater | Wakeups::OfAll => rings::interval_bits(cpus, is_shared),
        };
        open.maps.intervals_by_position.set_max_entries(cpus << interval_bits)?;
        if wakeups == Wakeups::OfAll {
            let requests = cpus << rings::detail_bits(interval_bits);
            open.maps.requests_by_position.set_max_entries(requests)?;
            open.maps.moves_by_position.set_max_entries(requests)?;
            open.maps.requests_by_address.set_max_entries(occupancy_limits::REQUESTS.0)?;
            open.maps.queued_by_work.set_max_entries(occupancy_limits::ITEMS.0)?;
        }
        open.maps.wakeup_by_tid.set_max_entries(wakeup_limits::WAKEUPS.0)?;
        open.maps.first_move_by_tid.set_max_entries(wakeup_limits::FIRST_MOVES.0)?;
        disable_missing_tracepoints(open.open_object_mut())?;
        disable_edge_programs(open.open_object_mut(), wakeups);
        open.progs.find_sq_thread.set_autoload(is_shared);
        open.progs.on_hrtimer_expire_exit.set_autoload(timer_is_unannounced);
        let skeleton = attach::load(open)?;
        steps::register_account(&skeleton)?;
        let rings = Rc::new(rings_of(&skeleton, cpus, interval_bits).context("cannot map the accounts of CPUs")?);
        let stacks =
            MappedArray::new(&skeleton.maps.late_interrupt_stacks, late_stacks as usize, size_of::<late_stack>());
        let windows = Windows::with(stacks.context("cannot map the stacks of late interrupts")?);
        Ok(AccountState {
            links: Vec::new(),
            attached: Vec::new(),
            is_complete: false,
            skeleton,
            heartbeats,
            choice: Rc::clone(choice),
            steps: BTreeSet::new(),
            limitation,
            cpus,
            windows,
            rings,
            wakeups,
            lost: Lost::default(),
        })
    }

    /// Attaches the remaining programs. Exit programs come first, so that no interval starts that nothing ends.
    pub(crate) fn attach(&mut self, is_complete: bool) -> Result<(), AttachError> {
        let mut programs: Vec<_> = self.skeleton.object().progs_mut().filter(|program| program.autoload()).collect();
        programs.sort_by_key(|program| !program.name().to_string_lossy().ends_with("_exit"));
        for program in programs {
            let name = program.name().to_string_lossy().into_owned();
            let waits = !is_complete && SWITCHING_PROGRAMS.contains(&name.as_str());
            if self.attached.contains(&name) || waits || name == AFTER_STEP || name == FIND_SQ_THREAD {
                continue;
            }
            self.links.extend(vectors::attach(&program)?);
            self.attached.push(name);
        }
        if is_complete && !std::mem::replace(&mut self.is_complete, true) { self.start_rate_limiter() } else { Ok(()) }
    }

    /// Detaches all programs. Afterwards, they no longer call programs of sources.
    pub(crate) fn detach(&mut self) {
        self.links.clear();
        self.steps.clear();
    }

    fn start_rate_limiter(&mut self) -> Result<(), AttachError> {
        let Some(heartbeats) = &mut self.heartbeats else { return Ok(()) };
        let accounts = MappedArray::new(&self.skeleton.maps.account_by_cpu, self.cpus as usize, size_of::<account>())
            .context("cannot map the accounts of CPUs")?;
        let written = move |cpu| accounts.u32_at(cpu as usize, offset_of!(account, written)).load(Ordering::Relaxed);
        heartbeats
            .limit_rate((*self.choice).clone(), written)
            .context("cannot start the thread that lets heartbeats rest")?;
        Ok(())
    }

    fn statistics(&self) -> ProgramStatistics {
        attach::statistics(self.skeleton.object().progs().filter(attach::is_open))
    }

    pub(crate) fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        let mut now = Lost::default();
        for cpu in 0..self.cpus {
            let bytes = self.skeleton.maps.account_by_cpu.lookup(&cpu.to_ne_bytes(), MapFlags::ANY);
            if let Some(account) = bytes.ok().flatten().and_then(|bytes| attach::read_plain::<account>(&bytes)) {
                now.nested += account.nested;
                now.stacks += u64::from(account.stacks_lost);
                now.astray += account.astray;
                now.requests_full += u64::from(account.requests_full);
                now.requests_unseen += u64::from(account.requests_unseen);
                now.queuers_overwritten += u64::from(account.queuers_overwritten);
                now.unseen_interrupts += account.unseen_interrupts;
            }
        }
        now.stacks += self.windows.stacks_overwritten();
        now.intervals_overwritten = self.rings.intervals_lost.load(Ordering::Relaxed);
        now.requests_overwritten = self.rings.requests_lost.load(Ordering::Relaxed);
        now.moves_overwritten = self.rings.moves_lost.load(Ordering::Relaxed);
        let before = std::mem::replace(&mut self.lost, now);
        named(Lost {
            nested: now.nested.saturating_sub(before.nested),
            stacks: now.stacks.saturating_sub(before.stacks),
            astray: now.astray.saturating_sub(before.astray),
            requests_full: now.requests_full.saturating_sub(before.requests_full),
            requests_unseen: now.requests_unseen.saturating_sub(before.requests_unseen),
            intervals_overwritten: now.intervals_overwritten.saturating_sub(before.intervals_overwritten),
            requests_overwritten: now.requests_overwritten.saturating_sub(before.requests_overwritten),
            moves_overwritten: now.moves_overwritten.saturating_sub(before.moves_overwritten),
            queuers_overwritten: now.queuers_overwritten.saturating_sub(before.queuers_overwritten),
            unseen_interrupts: now.unseen_interrupts.saturating_sub(before.unseen_interrupts),
        })
    }
}

fn named(lost: Lost) -> Vec<(&'static str, u64)> {
    vec![
        // Events that interrupted the account's own programs.
        ("occupancy_nested", lost.nested),
        // Stacks of late interrupts that could not be taken, or were overwritten before they were read.
        ("occupancy_stacks", lost.stacks),
        // Events at which the current thread was not the one last switched in.
        ("unseen_switches", lost.astray),
        // Disk requests beyond the maximum that is tracked at a time.
        ("requests_full", lost.requests_full),
        // Disk requests submitted before recording started.
        ("unseen_requests", lost.requests_unseen),
        // Intervals and requests overwritten before a stream had read them.
        ("edges_overwritten", lost.intervals_overwritten),
        ("requests_overwritten", lost.requests_overwritten),
        ("moves_overwritten", lost.moves_overwritten),
        // Work items replaced by another item before a worker started them.
        ("queuers_overwritten", lost.queuers_overwritten),
        // Wakers, submitters and queuers in interrupts without a tracepoint.
        ("unseen_interrupts", lost.unseen_interrupts),
    ]
}

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for account {}

/// Disables optional programs without a tracepoint in this kernel.
pub(crate) fn disable_missing_tracepoints(open: &mut OpenObject) -> Result<(), AttachError> {
    let types = libbpf_rs::Btf::from_vmlinux()?;
    for mut program in open.progs_mut() {
        // libbpf strips the question mark of optional programs from the section name.
        let section = program.section().to_string_lossy().into_owned();
        let Some(event) = section.strip_prefix("tp_btf/").filter(|_| !program.autoload()) else {
            continue;
        };
        // Each tracepoint has a type of this name for its BPF programs.
        let typedef = format!("btf_trace_{event}");
        program.set_autoload(types.type_by_name::<libbpf_rs::btf::types::Typedef<'_>>(&typedef).is_some());
    }
    Ok(())
}

/// Returns the number of stacks of late interrupts that are kept. Several sources are read five times a second; one
/// alone may have shorter timers.
fn late_stacks_for(cpus: u32, is_shared: bool) -> u32 {
    if !is_shared {
        return occupancy_limits::MAX_LATE_STACKS.0;
    }
    let stacks = cpus.saturating_mul(occupancy_limits::LATE_STACKS_PER_CPU.0);
    let stacks = stacks.clamp(occupancy_limits::MIN_LATE_STACKS.0, occupancy_limits::MAX_LATE_STACKS.0);
    stacks.next_power_of_two()
}

/// Maps the memory that the programs write, and sets the ring size in each account.
fn rings_of(skeleton: &OccupancySkel<'_>, cpus: u32, interval_bits: u32) -> std::io::Result<Rings> {
    let maps = &skeleton.maps;
    let map = |map: &libbpf_rs::MapMut<'_>, bytes| MappedArray::new(map, map.max_entries() as usize, bytes);
    let accounts = map(&maps.account_by_cpu, size_of::<account>())?;
    for cpu in 0..cpus as usize {
        accounts.u8_at(cpu, offset_of!(account, interval_bits)).store(interval_bits as u8, Ordering::Relaxed);
    }
    let intervals = map(&maps.intervals_by_position, size_of::<interval>())?;
    let requests = map(&maps.requests_by_position, size_of::<disk_request>())?;
    let moves = map(&maps.moves_by_position, size_of::<run_queue_move>())?;
    Ok(Rings::new(accounts, intervals, requests, moves, interval_bits))
}

/// Disables the programs for wakeup edges unless edges are recorded, so that they cost nothing.
fn disable_edge_programs(open: &mut OpenObject, wakeups: Wakeups) {
    let is_kept = wakeups == Wakeups::OfAll;
    let has_submit_program = open.progs_mut().any(|program| program.name() == SUBMIT_PROGRAM && program.autoload());
    for mut program in open.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        let is_wanted = match name.as_str() {
            name if OLD_SUBMIT_PROGRAMS.contains(&name) => is_kept && !has_submit_program,
            name => is_kept || !EDGE_PROGRAMS.contains(&name),
        };
        if !is_wanted {
            program.set_autoload(false);
        }
    }
}

#[cfg(test)]
mod unannounced;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shared_account_keeps_fewer_stacks() {
        let cpus = [1, 2, 3, 4, 8, 9, 1_024, u32::MAX];
        assert_eq!(cpus.map(|cpus| late_stacks_for(cpus, false)), [8_192; 8]);
        let shared = [2_048, 2_048, 4_096, 4_096, 8_192, 8_192, 8_192, 8_192];
        assert_eq!(cpus.map(|cpus| late_stacks_for(cpus, true)), shared);
    }
}
