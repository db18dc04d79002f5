// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who has each CPU: the account that explains late events, kept by BPF programs while somebody asks for causes.
//!
#![doc = include_str!("how.md")]

mod decode;
mod edges;
mod history;
mod lately;
mod rings;
mod slices;
mod steps;
mod stream;
mod unexplained;

use std::cell::{RefCell, RefMut};
use std::collections::BTreeSet;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Link, MapCore as _, MapFlags, OpenObject, Program};
use whylate_model::path::timer::TimerKind;
use whylate_model::thread;

use self::decode::spread_steal;
pub(crate) use self::decode::{Windows, vector};
pub use self::edges::Edges;
pub use self::history::History;
use self::rings::Rings;
use self::skel::types::{account, disk_request, interval, late_stack, occupancy_limits, run_queue_move, wakeup_limits};
use self::skel::{OccupancySkel, OccupancySkelBuilder};
pub(crate) use self::slices::stop;
pub(crate) use self::steps::{Called, Step};
pub use self::stream::Stream;
use self::unexplained::Unexplained;
use crate::attach::{self, PlainData, ProgramStatistics};
use crate::cgroups;
use crate::cpus::{self, Choice, Machine};
use crate::heartbeat::{self, Heartbeats};
use crate::mapped::MappedArray;
use crate::percpu::{PerCpu, PreemptCount};
use crate::pid_namespace;
use crate::session::Session;
use crate::source::{AttachError, Need};
use crate::symbols::{address_of, addresses_of};

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/occupancy/occupancy.skel.rs"));
}

/// What the account needs of a kernel.
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
/// The kernel's function of a CPU's tick (kernel/time/tick-sched.c): the second since 6.9, another one's name before.
const TICK_FUNCTIONS: [&str; 2] = ["tick_sched_timer", "tick_nohz_handler"];
/// What is weaker without a timer of its own on each CPU.
pub(crate) const WITHOUT_HEARTBEAT: &str = "interrupts that are off cannot be told from running threads";

/// From which lateness on interrupts count as having been off where a source's own threads are watched closely.
const OWN_LATE_FROM_NS: u64 = 5_000;

/// The same on an emulated CPU, where every interrupt is late by some hundred microseconds, and a few by milliseconds.
const EMULATED_LATE_FROM_NS: u64 = 10_000_000;

/// The kernel's function of timers that wake a thread (kernel/time/hrtimer.c).
pub(crate) const WAKEUP_FUNCTION: &str = "hrtimer_wakeup";
/// Of those of the timerlat tracer (kernel/trace/trace_osnoise.c).
pub(crate) const TRACER_FUNCTION: &str = "timerlat_irq";

/// Timers whose lateness tells that interrupts were off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timers {
    /// The ticks that CPUs have anyway.
    Ticks,
    /// And one of each CPU that is there for this.
    Heartbeats,
    /// And those of this process's threads.
    OwnThreadsToo,
    /// And those of the kernel's timerlat tracer.
    TracersToo,
    /// The heartbeats that a source has started itself. Interrupts that are off for so long are told, in nanoseconds.
    HeartbeatsOfSource {
        /// From which lateness on.
        late_from_ns: u64,
    },
}

/// Programs that hand a CPU over and call none of a source. The kernel runs programs in the order of attaching, so they
/// come after those of sources at the same event, which still find who had the CPU before.
const HAND_OVER: [&str; 1] = ["on_workqueue_execute_start"];
/// What goes on after the program of a source, which calls it.
const AFTER_STEP: &str = "on_sched_switch_after_step";

/// Programs that run only where it is kept who woke whom; also [`BEFORE_START`].
const OF_EDGES: [&str; 9] = [
    "on_balance_dirty_pages",
    "on_sched_wakeup_new",
    "on_timer_expire_entry",
    "on_sched_process_exec",
    "on_softirq_raise",
    "on_workqueue_queue_work",
    AT_START,
    "on_block_rq_issue",
    "on_block_rq_complete",
];
/// Tells who submits a request.
const AT_START: &str = "on_block_io_start";
/// The same before 6.5, which lacks that event.
const BEFORE_START: [&str; 2] = ["on_block_rq_insert", "on_block_getrq"];

/// Whose wakeups are kept, and their moves to another CPU while they wait for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wakeups {
    /// Those of workers.
    OfWorkers,
    /// The same, with room for more of the past: [`Account::lately`] looks for it only after the event.
    ForLater,
    /// Those of all threads, with who woke whom, and how each left its CPU.
    OfAll,
}

/// The account of every CPU, which several sources may have. It ends when the last one drops it.
pub(crate) struct Account {
    kept: Rc<RefCell<Kept>>,
    weaker: Option<String>,
    /// Whether this source tells what the account costs and has lost: one that shares it does not.
    is_own: bool,
    /// Late events of this source without causes.
    unexplained: Option<Unexplained>,
}

/// What keeps it.
pub(crate) struct Kept {
    links: Vec<Link>,
    /// Names of the programs that run.
    attached: Vec<String>,
    /// All of them do.
    is_complete: bool,
    skeleton: OccupancySkel<'static>,
    heartbeats: Option<Heartbeats>,
    /// The CPUs that have one.
    choice: Rc<Choice>,
    /// Whose programs it calls.
    steps: BTreeSet<Step>,
    weaker: Option<String>,
    cpus: u32,
    windows: Windows,
    /// What is read of intervals in place.
    rings: Rc<Rings>,
    wakeups: Wakeups,
    /// What has been told already.
    lost: Lost,
}

/// Which thread has each CPU, at any time.
pub(crate) struct Threads {
    accounts: MappedArray,
    /// Where an account has the thread's number as it is shown.
    tid_at: usize,
}

impl Threads {
    /// CPU, and the thread's name and id. Idle CPUs are left out.
    pub(crate) fn now(&self) -> Vec<(u32, String)> {
        let tid = |cpu| self.accounts.u32_at(cpu, self.tid_at).load(Ordering::Relaxed);
        let name = |cpu| {
            let bytes =
                (0..16).map(|at| self.accounts.u8_at(cpu, offset_of!(account, name) + at).load(Ordering::Relaxed));
            String::from_utf8_lossy(&bytes.take_while(|&byte| byte != 0).collect::<Vec<_>>()).into_owned()
        };
        let busy = (0..self.accounts.entries()).filter(|&cpu| tid(cpu) != 0);
        busy.map(|cpu| (cpu as u32, thread::called(&name(cpu), tid(cpu)))).collect()
    }
}

/// Sums over all CPUs since the beginning.
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
    /// Loads the programs, but lets none run yet. Of a session with several sources the first one does.
    pub(crate) fn load(session: &Session, of: Timers, wakeups: Wakeups) -> Result<Self, AttachError> {
        attach::require_btf()?;
        let choice = session.cpus(&[])?;
        let (kept, is_own) = match session.account(|| Kept::load(&choice, of, Wakeups::OfAll, true))? {
            Some(kept) => (kept, false),
            None => (Rc::new(RefCell::new(Kept::load(&choice, of, wakeups, false)?)), true),
        };
        let weaker = kept.borrow().weaker.clone();
        Ok(Account { kept, weaker, is_own, unexplained: None })
    }

    /// Lets the programs run. Where other sources share them, those that hand a CPU over wait for [`Session::begin`].
    pub(crate) fn attach(&mut self) -> Result<(), AttachError> {
        self.kept.borrow_mut().attach(self.is_own)
    }

    /// Tells which thread has each CPU, as far as it was seen.
    pub(crate) fn threads(&self) -> std::io::Result<Threads> {
        let kept = self.kept.borrow();
        let accounts = MappedArray::new(&kept.skeleton.maps.account_by_cpu, kept.cpus as usize, size_of::<account>())?;
        let is_translated = pid_namespace::own().is_some();
        let tid_at = if is_translated { offset_of!(account, shown_tid) } else { offset_of!(account, tid) };
        Ok(Threads { accounts, tid_at })
    }

    /// What reads its windows, for all that share it.
    pub(crate) fn windows(&self) -> RefMut<'_, Windows> {
        RefMut::map(self.kept.borrow_mut(), |kept| &mut kept.windows)
    }

    /// Has a source's programs share its maps, by their names: what it has seen, and by which they call each other.
    pub(crate) fn share_with(&self, open: &mut OpenObject) -> libbpf_rs::Result<()> {
        let kept = self.kept.borrow();
        let maps = &kept.skeleton.maps;
        for mut map in open.maps_mut() {
            let shared = match map.name().to_string_lossy().as_ref() {
                "account_by_cpu" => &maps.account_by_cpu,
                "intervals_by_position" => &maps.intervals_by_position,
                "wakeup_by_tid" => &maps.wakeup_by_tid,
                "throttles_by_group" => &maps.throttles_by_group,
                "steps_of_switch" => &maps.steps_of_switch,
                "steps_of_waking" => &maps.steps_of_waking,
                _ => continue,
            };
            map.reuse_fd(shared.as_fd())?;
        }
        Ok(())
    }

    /// What is weaker here than it could be.
    pub(crate) fn weaker(&self) -> Option<&str> {
        self.weaker.as_deref()
    }

    /// What the programs have done, where this source tells it.
    pub(crate) fn statistics(&self) -> ProgramStatistics {
        if self.is_own { self.kept.borrow().statistics() } else { ProgramStatistics::default() }
    }

    /// Events lost since the last call, by reason, where this source tells them.
    pub(crate) fn take_lost(&mut self) -> Vec<(&'static str, u64)> {
        if self.is_own { self.kept.borrow_mut().take_lost() } else { named(Lost::default()) }
    }
}

impl Kept {
    /// Loads the programs. Where sources share them, they suit each: measured threads' timers count too.
    fn load(choice: &Rc<Choice>, of: Timers, wakeups: Wakeups, is_shared: bool) -> Result<Self, AttachError> {
        let cpus = cpus::highest_possible().context("cannot tell which CPUs there are")? + 1;
        // Wakers are known only if programs can distinguish interrupts from threads.
        let preempt_count = PreemptCount::here();
        let of_context = if wakeups == Wakeups::OfAll { preempt_count.limitation() } else { None };
        let unseen: Vec<&str> = [cpus::unseen_interrupts(), of_context].into_iter().flatten().collect();
        let unseen = (!unseen.is_empty()).then(|| unseen.join("; "));
        let (heartbeats, weaker) = match of {
            Timers::HeartbeatsOfSource { .. } => (None, of_context.map(str::to_owned)),
            Timers::Ticks => (None, unseen),
            _ => match Heartbeats::start(&choice.measured, heartbeat::PERIOD_NS) {
                Ok(heartbeats) => (Some(heartbeats), unseen),
                Err(error) => (None, Some(format!("{WITHOUT_HEARTBEAT}: {error}"))),
            },
        };
        // A source with threads or timers of its own names them itself.
        let left_out = match of {
            Timers::Heartbeats => choice.named().map(|named| format!("{named}; {WITHOUT_HEARTBEAT} there")),
            _ => None,
        };
        let weaker: Vec<String> = weaker.into_iter().chain(left_out).collect();
        let weaker = (!weaker.is_empty()).then(|| weaker.join("; "));
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
        open.maps.account_by_cpu.set_max_entries(cpus)?;
        let interval_bits = match wakeups {
            Wakeups::OfWorkers => occupancy_limits::INTERVAL_BITS.0,
            Wakeups::ForLater | Wakeups::OfAll => rings::interval_bits(cpus),
        };
        open.maps.intervals_by_position.set_max_entries(cpus << interval_bits)?;
        if wakeups == Wakeups::OfAll {
            let requests = cpus << (interval_bits - occupancy_limits::INTERVALS_A_REQUEST_BITS.0);
            open.maps.requests_by_position.set_max_entries(requests)?;
            open.maps.moves_by_position.set_max_entries(requests)?;
            open.maps.requests_by_address.set_max_entries(occupancy_limits::REQUESTS.0)?;
            open.maps.queued_by_work.set_max_entries(occupancy_limits::ITEMS.0)?;
        }
        open.maps.wakeup_by_tid.set_max_entries(wakeup_limits::WAKEUPS.0)?;
        leave_out_what_the_kernel_lacks(open.open_object_mut())?;
        leave_out_edges(open.open_object_mut(), wakeups);
        open.progs.on_hrtimer_expire_exit.set_autoload(timer_is_unannounced);
        let skeleton = open.load()?;
        steps::goes_on_with(&skeleton)?;
        let rings = Rc::new(rings_of(&skeleton, cpus, interval_bits).context("cannot map the accounts of CPUs")?);
        let stacks = occupancy_limits::LATE_STACKS.0 as usize;
        let stacks = MappedArray::new(&skeleton.maps.late_interrupt_stacks, stacks, size_of::<late_stack>());
        let windows = Windows::with(stacks.context("cannot map the stacks of late interrupts")?);
        Ok(Kept {
            links: Vec::new(),
            attached: Vec::new(),
            is_complete: false,
            skeleton,
            heartbeats,
            choice: Rc::clone(choice),
            steps: BTreeSet::new(),
            weaker,
            cpus,
            windows,
            rings,
            wakeups,
            lost: Lost::default(),
        })
    }

    /// Lets programs run that do not yet: those that end an interval first, so that none begins without an end.
    pub(crate) fn attach(&mut self, is_complete: bool) -> Result<(), AttachError> {
        let mut programs: Vec<_> = self.skeleton.object().progs_mut().filter(|program| program.autoload()).collect();
        programs.sort_by_key(|program| !program.name().to_string_lossy().ends_with("_exit"));
        for program in programs {
            let name = program.name().to_string_lossy().into_owned();
            let waits = !is_complete && HAND_OVER.contains(&name.as_str());
            if self.attached.contains(&name) || waits || name == AFTER_STEP {
                continue;
            }
            self.links.push(program.attach()?);
            self.attached.push(name);
        }
        if is_complete && !std::mem::replace(&mut self.is_complete, true) { self.keep_pace() } else { Ok(()) }
    }

    fn keep_pace(&mut self) -> Result<(), AttachError> {
        let Some(heartbeats) = &mut self.heartbeats else { return Ok(()) };
        let accounts = MappedArray::new(&self.skeleton.maps.account_by_cpu, self.cpus as usize, size_of::<account>())
            .context("cannot map the accounts of CPUs")?;
        let written = move |cpu| accounts.u32_at(cpu as usize, offset_of!(account, written)).load(Ordering::Relaxed);
        heartbeats
            .keep_pace((*self.choice).clone(), written)
            .context("cannot start the thread that lets heartbeats rest")?;
        Ok(())
    }

    fn statistics(&self) -> ProgramStatistics {
        attach::statistics(self.skeleton.object().progs().filter(Program::autoload))
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
        // Times in which another thread had the CPU than the one that was seen taking it.
        ("unseen_switches", lost.astray),
        // Requests of disks beyond those that are kept at a time.
        ("requests_full", lost.requests_full),
        // Requests of disks that had begun before.
        ("unseen_requests", lost.requests_unseen),
        // Intervals and requests that were overwritten before somebody had read them who wants each.
        ("edges_overwritten", lost.intervals_overwritten),
        ("requests_overwritten", lost.requests_overwritten),
        ("moves_overwritten", lost.moves_overwritten),
        // Work items that nobody had begun when another one took their place.
        ("queuers_overwritten", lost.queuers_overwritten),
        // Wakers, submitters and queuers in interrupts without a tracepoint.
        ("unseen_interrupts", lost.unseen_interrupts),
    ]
}

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for account {}

/// Interrupt vectors depend on the architecture and on the kernel's configuration.
pub(crate) fn leave_out_what_the_kernel_lacks(open: &mut OpenObject) -> Result<(), AttachError> {
    let types = libbpf_rs::Btf::from_vmlinux()?;
    for mut program in open.progs_mut() {
        // The question mark that makes a program optional is not in the section's name any more.
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

/// Maps what the programs write, and tells them how much room there is.
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

/// What only tells who woke whom costs nothing where nobody asks for that.
fn leave_out_edges(open: &mut OpenObject, wakeups: Wakeups) {
    let is_kept = wakeups == Wakeups::OfAll;
    let tells_start = open.progs_mut().any(|program| program.name() == AT_START && program.autoload());
    for mut program in open.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        let is_wanted = match name.as_str() {
            name if BEFORE_START.contains(&name) => is_kept && !tells_start,
            name => is_kept || !OF_EDGES.contains(&name),
        };
        if !is_wanted {
            program.set_autoload(false);
        }
    }
}

#[cfg(test)]
mod unannounced;
