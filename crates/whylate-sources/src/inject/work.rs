// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known work items, queued by BPF (`bpf_wq`): number, time and length are given.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use libbpf_rs::Btf;
use libbpf_rs::btf::types::Func;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use super::reserve::Reserve;
use super::threads::{self, Load, Urgent};
use super::{Timestamp, call, read_shared};
use crate::AttachError;
use crate::kernel::attach::{require_btf, silence_libbpf};
use crate::kernel::priority::run_on;

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/inject/work.skel.rs"));
}

/// Name of the handler function of every item.
pub const HANDLER: &str = "bpf_wq_work";
/// Maximum number of items of one run.
pub const MAX_ITEMS: u64 = 1_000_000;
/// Maximum busy time of an item, in nanoseconds.
pub const MAX_BUSY_NS: u64 = 50_000_000;
/// Maximum total busy time of a run.
const MAX_BUSY_TOTAL_NS: u64 = 60_000_000_000;
/// Maximum delay before queueing.
const MAX_DELAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum number of items that can be pending at a time; they are reused for the rest.
pub const MAX_AT_ONCE: u64 = 16_384;
/// A BPF program cannot wait for memory: an allocation fails now and then until the kernel refills its reserves. After
/// this many failures in a row, with this pause, a [`Reserve`] is made for the rest; after as many again, allocation
/// ends.
const ALLOCATION_TRIES: u32 = 5;
const ALLOCATION_PAUSE: Duration = Duration::from_millis(2);
/// Poll period for items that can be queued again.
const REFILL: Duration = Duration::from_millis(1);
/// Poll period of other waits.
const POLL: Duration = Duration::from_millis(10);
/// Time limit for items that are cut short to end.
const DRAIN: Duration = Duration::from_secs(2);

/// Work items to queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Number of executions.
    pub items: u64,
    /// Number of items that may be pending at a time; the rest follow in batches, a millisecond apart.
    pub at_once: u64,
    /// Delay before the first item is queued.
    pub delay: Duration,
    /// Time for which each item keeps its worker's CPU busy, in nanoseconds.
    pub busy_ns: u64,
    /// The CPU to queue on; `None` is the current one.
    pub cpu: Option<u32>,
    /// Keep every CPU busy with a normal thread during the run.
    pub load: bool,
}

impl Plan {
    /// Checks the limits.
    ///
    /// # Errors
    /// Fails if the plan is empty, or would overload the machine.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.items == 0 || self.items > MAX_ITEMS {
            return Err(anyhow!("ask for 1 to {MAX_ITEMS} items"));
        }
        if self.at_once == 0 || self.at_once > MAX_AT_ONCE {
            return Err(anyhow!("let 1 to {MAX_AT_ONCE} items wait at once"));
        }
        if self.busy_ns > MAX_BUSY_NS {
            return Err(anyhow!("an item may be busy for {} ms at most", MAX_BUSY_NS / 1_000_000));
        }
        let total_ns = self.items * self.busy_ns;
        if total_ns > MAX_BUSY_TOTAL_NS {
            return Err(anyhow!(
                "that would keep a CPU busy for {:.1} s, and {} s is the limit: ask for fewer or shorter items",
                total_ns as f64 / 1e9,
                MAX_BUSY_TOTAL_NS / 1_000_000_000
            ));
        }
        if self.delay > MAX_DELAY {
            return Err(anyhow!("the delay may be {} hours at most", MAX_DELAY.as_secs() / 3600));
        }
        Ok(())
    }

    fn slots(&self) -> u64 {
        self.items.min(self.at_once)
    }

    /// Returns the time limit of the items, many times their expected duration.
    fn timeout(&self) -> Duration {
        let busy = Duration::from_nanos(self.items.saturating_mul(self.busy_ns));
        let batches = self.items.div_ceil(self.at_once.max(1));
        Duration::from_secs(10)
            + 4 * busy
            + Duration::from_micros(20 * self.items)
            + 5 * REFILL * u32::try_from(batches).unwrap_or(u32::MAX)
    }
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Number of items queued.
    pub queued: u64,
    /// Number of items executed.
    pub executed: u64,
    /// CPU that the items were queued on.
    pub cpu: u32,
    /// Maximum number of items that were pending at a time.
    pub at_once: u64,
    /// Total time from the queueing of each item to the start of its handler, as the handlers measured it.
    pub wait_total_ns: u64,
    /// Total run time of the handlers, as they measured it.
    pub busy_total_ns: u64,
    /// Longest run time of a handler, as it measured it.
    pub busy_max_ns: u64,
    /// Time just before the first item was queued; `None` if none was.
    pub first_queue: Option<Timestamp>,
    /// Time just after the last item was queued.
    pub last_queue: Option<Timestamp>,
    /// Start of the first handler.
    pub first_start: Option<Timestamp>,
    /// End of the last handler.
    pub last_end: Option<Timestamp>,
    /// Whether all were queued and have run, and none was cut short.
    pub complete: bool,
}

/// Queues the items and waits until they have run. `stop` ends it early and cuts pending ones short.
///
/// # Errors
/// Fails if the plan is invalid, or the kernel or the caller's privileges do not allow it.
pub fn run(plan: &Plan, stop: &AtomicBool) -> Result<Report, AttachError> {
    plan.check()?;
    // The caller's CPU, not that of the thread below.
    let here = threads::current_cpu()?;
    // A thread of our own, as it is moved to another CPU and becomes real-time now and then.
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("whylate-inject".to_owned());
        let thread = thread.spawn_scoped(scope, || run_here(plan, here, stop)).context("cannot start a thread")?;
        thread.join().map_err(|_| anyhow!("the thread that queues the items failed"))?
    })
}

fn run_here(plan: &Plan, here: u32, stop: &AtomicBool) -> Result<Report, AttachError> {
    let (cpu, others) = threads::move_to(plan.cpu.unwrap_or(here))?;
    let types = kernel_types()?;
    let mut object = MaybeUninit::uninit();
    let mut open = skel::WorkSkelBuilder::default().open(&mut object).context("cannot open the BPF programs")?;
    open.maps.items_by_slot.set_max_entries(plan.slots() as u32).context("cannot size the map")?;
    let settings = open.maps.rodata_data.as_deref_mut().context("the BPF programs have no settings")?;
    settings.items_wanted = plan.items;
    settings.busy_ns = plan.busy_ns;
    let mut work = Work { skel: open.load()? };

    work.allocate(plan.slots(), &types, stop)?;
    let due = Instant::now() + plan.delay;
    while let Some(left) = due.checked_duration_since(Instant::now()).filter(|_| !stop.load(Ordering::Relaxed)) {
        thread::sleep(left.min(POLL));
    }
    let timeout = plan.timeout();
    let load = match plan.load && !stop.load(Ordering::Relaxed) {
        true => Some(Load::start(&[&[cpu], others.as_slice()].concat(), timeout).context("cannot load the CPUs")?),
        false => None,
    };
    let deadline = Instant::now() + timeout;
    let over = || stop.load(Ordering::Relaxed) || Instant::now() >= deadline;
    let queued = work.queue(plan.items, &over)?;
    // A thread that wakes up often delays the workers of its CPU, on a loaded one for seconds.
    if !others.is_empty() {
        run_on(&others).context("cannot move to another CPU")?;
    }
    let complete = queued && work.wait(plan.items, &over)?;
    drop(load);
    work.drain()?;
    work.report(cpu, complete)
}

/// The loaded programs.
struct Work<'a> {
    skel: skel::WorkSkel<'a>,
}

impl Work<'_> {
    fn account(&self) -> anyhow::Result<skel::types::account> {
        let shared = self.skel.maps.bss_data.as_deref().context("the BPF programs have no account")?;
        Ok(read_shared(&shared.account))
    }

    /// Allocates as many items as the kernel gives, at most `wanted`.
    fn allocate(&mut self, wanted: u64, types: &Btf<'_>, stop: &AtomicBool) -> Result<(), AttachError> {
        let mut reserve = None;
        let mut failures = 0;
        while !stop.load(Ordering::Relaxed) {
            let before = self.account()?.allocated;
            call(&mut self.skel.progs.prepare)?;
            let allocated = self.account()?.allocated;
            if allocated >= wanted {
                break;
            }
            failures = if allocated > before { 0 } else { failures + 1 };
            if failures >= ALLOCATION_TRIES {
                match reserve {
                    // If it fails, fewer items can be pending at a time.
                    None => reserve = Some(Reserve::new(types, wanted - allocated)),
                    Some(_) if allocated > 0 => break,
                    Some(_) => return Err(anyhow!("the kernel has no memory for a work item: try again later").into()),
                }
                failures = 0;
            } else {
                thread::sleep(ALLOCATION_PAUSE);
            }
        }
        Ok(())
    }

    /// Queues in batches as large as there are idle items. Returns whether all are queued.
    fn queue(&mut self, wanted: u64, over: &impl Fn() -> bool) -> Result<bool, AttachError> {
        let _urgent = Urgent::new();
        while !over() {
            call(&mut self.skel.progs.queue_items)?;
            if self.account()?.queued >= wanted {
                return Ok(true);
            }
            thread::sleep(REFILL);
        }
        Ok(false)
    }

    /// Returns whether all items have run.
    fn wait(&self, wanted: u64, over: &impl Fn() -> bool) -> anyhow::Result<bool> {
        while !over() {
            if self.account()?.executed >= wanted {
                return Ok(true);
            }
            thread::sleep(POLL);
        }
        Ok(false)
    }

    /// Lets pending items run without being busy, so that all queued items are executed.
    fn drain(&mut self) -> anyhow::Result<()> {
        let shared = self.skel.maps.bss_stopping_data.as_deref_mut().context("the BPF programs cannot be stopped")?;
        shared.stopping = 1;
        let deadline = Instant::now() + DRAIN;
        loop {
            let account = self.account()?;
            if account.executed >= account.queued || Instant::now() >= deadline {
                return Ok(());
            }
            thread::sleep(POLL);
        }
    }

    fn report(&self, cpu: u32, complete: bool) -> Result<Report, AttachError> {
        let account = self.account()?;
        // The clock was far from 0 when the first item was queued: 0 is "never".
        let timestamp = |monotonic_ns: u64| (monotonic_ns > 0).then(|| Timestamp::at(monotonic_ns));
        Ok(Report {
            queued: account.queued,
            executed: account.executed,
            cpu,
            at_once: account.at_once,
            wait_total_ns: account.wait_total_ns,
            busy_total_ns: account.busy_total_ns,
            busy_max_ns: account.busy_max_ns,
            first_queue: timestamp(account.first_queue_ns),
            last_queue: timestamp(account.last_queue_ns),
            first_start: timestamp(account.first_start_ns),
            last_end: timestamp(account.last_end_ns),
            complete,
        })
    }
}

/// Returns the kernel's BTF, if it has `bpf_wq`.
fn kernel_types() -> Result<Btf<'static>, AttachError> {
    silence_libbpf();
    require_btf()?;
    let types = Btf::from_vmlinux()?;
    match types.type_by_name::<Func<'_>>("bpf_wq_set_callback_impl") {
        Some(_) => Ok(types),
        None => Err(AttachError::Unsupported("this kernel has no bpf_wq (Linux 6.10 and later)".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(items: u64, busy_ns: u64) -> Plan {
        Plan { items, at_once: MAX_AT_ONCE, delay: Duration::ZERO, busy_ns, cpu: None, load: false }
    }

    #[test]
    fn accepts_valid_plans() {
        for plan in [plan(1, 0), plan(MAX_ITEMS, 60_000), plan(1_200, MAX_BUSY_NS), plan(12_000, 5_000_000)] {
            assert!(plan.check().is_ok(), "{plan:?}");
        }
    }

    #[test]
    fn rejects_plans_out_of_limits() {
        for plan in [
            plan(0, 0),
            plan(MAX_ITEMS + 1, 0),
            plan(u64::MAX, u64::MAX),
            plan(1, MAX_BUSY_NS + 1),
            plan(1_201, MAX_BUSY_NS),
            plan(MAX_ITEMS, 60_001),
            Plan { at_once: 0, ..plan(1, 0) },
            Plan { at_once: MAX_AT_ONCE + 1, ..plan(1, 0) },
            Plan { delay: MAX_DELAY + Duration::from_nanos(1), ..plan(1, 0) },
        ] {
            assert!(plan.check().is_err(), "{plan:?}");
        }
    }

    #[test]
    fn invalid_plan_does_not_reach_kernel() {
        let outcome = run(&plan(2_000, MAX_BUSY_NS), &AtomicBool::new(false)).map_err(|error| error.to_string());
        let message = "that would keep a CPU busy for 100.0 s, and 60 s is the limit: ask for fewer or shorter items";
        assert_eq!(outcome, Err(message.to_owned()));
    }

    #[test]
    fn timeout_is_bounded_and_exceeds_busy_time() {
        for plan in [plan(1, 0), plan(12_000, 5_000_000), plan(MAX_ITEMS, 60_000)] {
            let busy = Duration::from_nanos(plan.items * plan.busy_ns);
            assert!(plan.timeout() > 2 * busy && plan.timeout() < Duration::from_secs(300), "{plan:?}");
        }
    }
}
