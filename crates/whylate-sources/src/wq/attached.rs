// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached BPF programs and their counts.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, RingBuffer, RingBufferBuilder};
use whylate_model::{LateEvent, Snapshot};

use super::gather::{self, SeriesCounts, per_cpu};
use super::skel::types::{bss, explain_limits, item_limits, late_item, lost_reason, series_key, stack_limits};
use super::skel::{OpenWqSkel, WqSkel, WqSkelBuilder};
use super::{By, FENTRY, INFO, WqOptions, explain, late};
use crate::cpu_account::{Account, Timers, Wakeups};
use crate::kernel::attach::{self, Meter};
use crate::kernel::cpus;
use crate::kernel::distribution::{BucketPages, MAX_PAGES};
use crate::kernel::mapped::MappedArray;
use crate::kernel::percpu::PreemptCount;
use crate::kernel::pid_namespace;
use crate::kernel::symbols::KernelSymbols;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

/// Every reason for a lost event, with its name in the output. The enum in `settings.bpf.h` explains them.
const LOST: [(lost_reason, &str); 12] = [
    (lost_reason::LOST_UNMATCHED, "unmatched"),
    (lost_reason::LOST_CANCELLED, "cancelled"),
    (lost_reason::LOST_REUSED, "reused"),
    (lost_reason::LOST_ITEMS_FULL, "items_full"),
    (lost_reason::LOST_EVICTED, "evicted"),
    (lost_reason::LOST_SERIES_FULL, "series_full"),
    (lost_reason::LOST_BUCKETS_FULL, "buckets_full"),
    (lost_reason::LOST_END_UNMATCHED, "end_unmatched"),
    (lost_reason::LOST_RUNNING_FULL, "running_full"),
    (lost_reason::LOST_LATE_EVENTS, "late_events"),
    (lost_reason::LOST_STACKS, "stacks"),
    (lost_reason::LOST_HOLDERS, "holders"),
];

/// Records of late items, in order.
type LateRecords = Rc<RefCell<VecDeque<LateRecord>>>;

/// The BPF programs' record of a late item.
enum LateRecord {
    Plain(Box<late_item>),
    /// An `explained_item` with its window of the CPU account.
    Explained(Box<[u8]>),
}

/// The attached source. Dropping the links detaches the programs.
pub(super) struct AttachedWq {
    /// Dropped first, so that no program runs while the rest is dropped.
    _links: Vec<Link>,
    skeleton: WqSkel<'static>,
    backend: &'static str,
    counts: SeriesCounts,
    lost: MappedArray,
    ring: Option<RingBuffer<'static>>,
    late: LateRecords,
    account: Option<Account>,
    keep_evidence: bool,
    symbols: KernelSymbols,
    span: Span,
    meter: Meter,
}

impl AttachedWq {
    pub(super) fn new(options: &WqOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let load = || Account::load(session.account(), Timers::Heartbeats, Wakeups::OfWorkers);
        let mut account = options.explain_over_ns.map(|_| load()).transpose()?;
        let mut open = WqSkelBuilder::default().open(attach::open_object())?;
        configure(&mut open, options, session, backend)?;
        if let Some(account) = &mut account {
            prepare_to_explain(&mut open, account)?;
        }
        let mut skeleton = attach::load(open)?;
        if let Some(account) = &mut account {
            account.watch_unexplained(skeleton.maps.bss.as_fd(), offset_of!(bss, unexplained_events))?;
        }
        let counts = SeriesCounts::new(&skeleton, options)?;
        let lost = MappedArray::inside(
            skeleton.maps.bss.as_fd(),
            offset_of!(bss, lost_by_reason),
            LOST.len(),
            size_of::<u64>(),
        )
        .context("cannot map the counts of lost events")?;
        let late = Rc::new(RefCell::new(VecDeque::new()));
        let ring = options
            .late_over_ns
            .or(options.explain_over_ns)
            .map(|_| late_ring(&skeleton, options, &late))
            .transpose()?;
        let links = attach_programs(&skeleton, options, backend)?;
        // Attached last, so that its programs run last: when an item starts, the account still has the occupant before it.
        account.iter_mut().try_for_each(Account::attach)?;
        let data = skeleton.maps.bss_data.as_mut().context("the BPF object has no variables")?;
        // Right before counting starts, so that nothing from before the span is counted.
        let span = Span::begin(INFO.card, session);
        data.enabled = true;
        Ok(AttachedWq {
            _links: links,
            backend,
            counts,
            lost,
            ring,
            late,
            account,
            keep_evidence: options.keep_evidence,
            symbols: session.symbols(),
            span,
            meter: Meter::default(),
            skeleton,
        })
    }
}

fn possible_cpus() -> Result<u32, AttachError> {
    Ok(cpus::highest_possible().context("cannot list the CPUs")? + 1)
}

fn configure(
    open: &mut OpenWqSkel<'_>,
    options: &WqOptions,
    session: &Session,
    backend: &str,
) -> Result<(), AttachError> {
    let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
    settings.own_namespace = pid_namespace::as_setting();
    settings.series_key = match options.by {
        // The filter for a handler needs series by handler.
        By::Nothing if options.only.is_some() => series_key::BY_HANDLER,
        By::Nothing => series_key::BY_NOTHING,
        By::Handler => series_key::BY_HANDLER,
        By::Workqueue => series_key::BY_WORKQUEUE,
        By::Cpu => series_key::BY_CPU,
        By::Pool => series_key::BY_POOL,
    };
    settings.measure_phases = options.phases;
    settings.late_over_ns = options.late_over_ns.unwrap_or(0);
    settings.explain_over_ns = options.explain_over_ns.unwrap_or(0);
    settings.keep_stacks = options.stacks;
    settings.preempt_count_distance = PreemptCount::here().distance();
    settings.taken_under_lock = backend == FENTRY;
    if let Some(handler) = &options.only {
        // One byte is left for the terminator.
        if handler.is_empty() || handler.len() >= settings.wanted_handler.len() {
            return Err(AttachError::Contradiction("a handler's name has 1 to 127 characters".to_owned()));
        }
        for (to, from) in settings.wanted_handler.iter_mut().zip(handler.bytes()) {
            *to = from as _;
        }
        settings.has_wanted_handler = true;
    }

    // Allocates memory only for what is configured.
    if per_cpu(options) {
        let cpus = possible_cpus()?;
        open.maps.series_by_id.set_max_entries(cpus)?;
        open.maps.series_index.set_max_entries(1)?;
    }
    let pages = match per_cpu(options) {
        true => pages_of_cpus(possible_cpus()?),
        false => session.pages(MAX_PAGES)?,
    };
    settings.page_limit = pages.set(&mut open.maps.bucket_pages)?;
    if !options.phases {
        open.maps.running_items.set_max_entries(1)?;
    }
    if options.late_over_ns.or(options.explain_over_ns).is_some() {
        open.maps.queuer_by_entry.set_max_entries(item_limits::ENTRIES.0)?;
        if options.stacks {
            open.maps.even_queueing_stacks.set_max_entries(stack_limits::QUEUEING_STACKS.0)?;
            open.maps.odd_queueing_stacks.set_max_entries(stack_limits::QUEUEING_STACKS.0)?;
        }
    }
    open.maps.even_queueing_stacks.set_autocreate(options.stacks)?;
    open.maps.odd_queueing_stacks.set_autocreate(options.stacks)?;
    open.maps.late_items.set_autocreate(options.late_over_ns.is_some())?;

    open.progs.on_process_one_work.set_autoload(backend == FENTRY);
    open.progs.on_workqueue_execute_start.set_autoload(backend != FENTRY);
    open.progs.on_workqueue_activate_work.set_autoload(options.phases);
    open.progs.on_workqueue_execute_end.set_autoload(options.phases);
    Ok(())
}

/// Returns the pages for a series of each CPU: for every bucket of all of them, unless there are too many CPUs.
fn pages_of_cpus(cpus: u32) -> BucketPages {
    BucketPages::of_one(gather::PAGES_OF_ONE_SERIES.saturating_mul(cpus))
}

/// Attaches the programs for the end of an item first, so that no item is seen starting of which the end cannot be.
fn attach_programs(skeleton: &WqSkel<'_>, options: &WqOptions, backend: &str) -> Result<Vec<Link>, AttachError> {
    let programs = &skeleton.progs;
    let mut links = Vec::new();
    if options.phases {
        links.push(programs.on_workqueue_execute_end.attach()?);
        links.push(programs.on_workqueue_activate_work.attach()?);
    }
    links.push(if backend == FENTRY {
        programs.on_process_one_work.attach()?
    } else {
        programs.on_workqueue_execute_start.attach()?
    });
    links.push(programs.on_workqueue_queue_work.attach()?);
    Ok(links)
}

/// Returns the loaded programs: the others have no descriptor.
fn loaded_programs<'a>(skeleton: &'a WqSkel<'_>) -> impl Iterator<Item = BorrowedFd<'a>> {
    let programs = &skeleton.progs;
    [
        &programs.on_workqueue_queue_work,
        &programs.on_workqueue_activate_work,
        &programs.on_process_one_work,
        &programs.on_workqueue_execute_start,
        &programs.on_workqueue_execute_end,
    ]
    .into_iter()
    .filter(|program| program.autoload())
    .map(|program| program.as_fd())
}

/// Lets the programs read the CPU account, and record other evidence for late items.
fn prepare_to_explain(open: &mut OpenWqSkel<'_>, account: &Account) -> Result<(), AttachError> {
    account.share_with(open.open_object_mut())?;
    open.maps.held_slots_by_quota.set_max_entries(explain_limits::HELD_SLOT_RINGS.0)?;
    open.maps.last_item_by_worker.set_max_entries(explain_limits::LAST_ITEMS.0)?;
    open.maps.explained_items.set_max_entries(account.late_bytes())?;
    Ok(())
}

fn late_ring(
    skeleton: &WqSkel<'_>,
    options: &WqOptions,
    late: &LateRecords,
) -> Result<RingBuffer<'static>, AttachError> {
    let mut builder = RingBufferBuilder::new();
    if options.late_over_ns.is_some() {
        let plain = Rc::clone(late);
        builder.add(&skeleton.maps.late_items, move |bytes| {
            if let Some(item) = attach::read_plain::<late_item>(bytes) {
                plain.borrow_mut().push_back(LateRecord::Plain(Box::new(item)));
            }
            0
        })?;
    }
    let explained = Rc::clone(late);
    builder.add(&skeleton.maps.explained_items, move |bytes| {
        explained.borrow_mut().push_back(LateRecord::Explained(bytes.into()));
        0
    })?;
    Ok(builder.build()?)
}

impl Attached for AttachedWq {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.span.end(self.backend);
        snapshot.series = self.counts.take_series(self.span.began_ns());
        for (reason, name) in LOST {
            let count = self.lost.u64_at(reason.0 as usize, 0).swap(0, Ordering::Relaxed);
            snapshot.lost.insert(name.to_owned(), count);
            if reason == lost_reason::LOST_STACKS && count > 0 {
                self.start_stack_generation()?;
            }
        }
        if let Some(account) = &mut self.account {
            account.report(&mut snapshot);
        }
        let mut statistics = attach::statistics(loaded_programs(&self.skeleton));
        self.account.iter().for_each(|account| statistics += account.statistics());
        self.meter.report(statistics, &mut snapshot);
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        attach::poll(ring, wait)?;
        // Taken one by one: `each` may take long, and more may arrive during it.
        while let Some(record) = self.take_late() {
            match self.event_of(record) {
                Some(event) => each(event),
                // Truncated.
                None => {
                    self.lost.u64_at(lost_reason::LOST_LATE_EVENTS.0 as usize, 0).fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn limitations(&self) -> Option<&str> {
        let queuer_limitation = || if self.ring.is_some() { PreemptCount::here().limitation() } else { None };
        self.account.as_ref().and_then(Account::limitations).or_else(queuer_limitation)
    }
}

impl AttachedWq {
    fn take_late(&self) -> Option<LateRecord> {
        self.late.borrow_mut().pop_front()
    }

    fn event_of(&mut self, record: LateRecord) -> Option<LateEvent> {
        let (mut event, stack) = match (record, &self.account) {
            (LateRecord::Plain(item), _) => (late::event_of(&item, Vec::new()), item.stack),
            (LateRecord::Explained(bytes), Some(account)) => {
                explain::event_of(&bytes, &mut account.windows(), &mut self.symbols, self.keep_evidence)?
            }
            (LateRecord::Explained(_), None) => return None,
        };
        event.stack = self.stack_of(stack);
        Some(event)
    }

    /// Returns the stack that queued the item, innermost frame first.
    fn stack_of(&mut self, number: i32) -> Vec<String> {
        let Ok(number) = u32::try_from(number) else {
            return Vec::new();
        };
        let now = self.skeleton.maps.bss_data.as_ref().map_or(0, |data| data.stack_generation);
        let index = number % stack_limits::QUEUEING_STACKS.0;
        let bytes = match generations_ago(number, now) {
            0 | 1 => self
                .queueing_stacks(number >> stack_limits::QUEUEING_STACK_BITS.0)
                .lookup(&index.to_ne_bytes(), MapFlags::ANY),
            _ => Ok(None),
        };
        if let Ok(Some(bytes)) = bytes {
            return self.symbols.stack(&bytes);
        }
        self.lost.u64_at(lost_reason::LOST_STACKS.0 as usize, 0).fetch_add(1, Ordering::Relaxed);
        Vec::new()
    }

    /// Returns the stack map of a generation.
    fn queueing_stacks(&self, generation: u32) -> &libbpf_rs::MapMut<'static> {
        let maps = &self.skeleton.maps;
        if generation.is_multiple_of(2) { &maps.even_queueing_stacks } else { &maps.odd_queueing_stacks }
    }

    /// Empties the stack map of the previous generation, and makes programs use it for the next one.
    fn start_stack_generation(&mut self) -> anyhow::Result<()> {
        let now = self.skeleton.maps.bss_data.as_ref().map_or(0, |data| data.stack_generation);
        // Waits for programs that were interrupted in an earlier generation, which would still add to the map.
        attach::wait_for_programs();
        let stacks = self.queueing_stacks(now.wrapping_add(1));
        for index in stacks.keys().collect::<Vec<_>>() {
            stacks.delete(&index).context("cannot forget old stacks")?;
        }
        let data = self.skeleton.maps.bss_data.as_mut().context("the BPF object has no variables")?;
        data.stack_generation = now.wrapping_add(1);
        Ok(())
    }
}

/// Returns how many generations a stack ID is old.
fn generations_ago(number: u32, now: u32) -> u32 {
    let then = number >> stack_limits::QUEUEING_STACK_BITS.0;
    now.wrapping_sub(then) % stack_limits::STACK_GENERATIONS.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_stacks_for_two_generations() {
        let options = WqOptions { late_over_ns: Some(u64::MAX), stacks: true, by: By::Handler, ..WqOptions::default() };
        let mut attached = match AttachedWq::new(&options, &Session::of_one(), crate::wq::TRACEPOINT) {
            Ok(attached) => attached,
            Err(AttachError::NotPermitted) => {
                println!("skipped: BPF programs cannot be loaded here (run as root)");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let lost = |attached: &AttachedWq| {
            attached.lost.u64_at(lost_reason::LOST_STACKS.0 as usize, 0).load(Ordering::Relaxed)
        };
        // Returns a stack of a generation, once an item is queued.
        let stack = |attached: &AttachedWq, generation: u32| {
            for _ in 0..300 {
                rustix::fs::sync();
                if let Some(index) = attached.queueing_stacks(generation).keys().next() {
                    let index = u32::from_ne_bytes(index.try_into().expect("an index is a u32"));
                    return (generation << stack_limits::QUEUEING_STACK_BITS.0 | index) as i32;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            panic!("no item is queued");
        };
        let first = stack(&attached, 0);
        assert!(!attached.stack_of(first).is_empty());
        attached.start_stack_generation().expect("a map is emptied");
        let second = stack(&attached, 1);
        assert!(!attached.stack_of(first).is_empty() && !attached.stack_of(second).is_empty());
        let before = lost(&attached);
        attached.start_stack_generation().expect("a map is emptied");
        assert!(attached.stack_of(first).is_empty() && !attached.stack_of(second).is_empty());
        assert!(lost(&attached) > before);
    }

    #[test]
    fn pages_of_many_cpus_have_numbers_of_16_bits() {
        let limits = [1, 2, 234, 256, 1_024, u32::MAX].map(|cpus| pages_of_cpus(cpus).limit());
        assert_eq!(limits, [280, 560, 65_520, 65_536, 65_536, 65_536]);
    }

    #[test]
    fn stack_id_contains_generation() {
        let number = |generation: u32, index: u32| {
            (generation % stack_limits::STACK_GENERATIONS.0) << stack_limits::QUEUEING_STACK_BITS.0 | index
        };
        let last = stack_limits::STACK_GENERATIONS.0 - 1;
        for (then, now) in [(0, 0), (0, 1), (last, last + 1), (7, 9), (u32::MAX, 0)] {
            assert_eq!(generations_ago(number(then, 16_383), now), now.wrapping_sub(then), "{then} {now}");
            assert!(number(then, 16_383) <= i32::MAX as u32);
        }
    }
}
