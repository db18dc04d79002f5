// SPDX-License-Identifier: MIT OR Apache-2.0
//! BPF programs of `ticks` and the maps that they count in.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
#[cfg(test)]
use libbpf_rs::{MapCore as _, MapFlags};
use whylate_model::blame::{self, Keeper, keeper};
use whylate_model::{Histogram, Occupancy, Snapshot};

use self::types::{bucket_page, culprit, culprit_key, interrupted_stack, tick, tick_limits};
use super::culprits;
use super::sampler::NmiSampler;
use crate::cpu_account::{Account, LATE_BYTES, StepGuard, Timers, Wakeups, disable_missing_tracepoints, vectors};
use crate::irqsoff::IrqsoffOptions;
use crate::kernel::attach::{self, PlainData, ProgramStatistics};
use crate::kernel::distribution::{DistributionOffsets, Distributions};
use crate::kernel::elements::Elements;
use crate::kernel::mapped::MappedArray;
use crate::kernel::percpu::PerCpu;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::kernel::symbols::{KernelSymbols, address_of};
use crate::kernel::{cpus, heartbeat};
use crate::source::AttachError;
use crate::source::session::Session;

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/irqsoff/ticks.skel.rs"));
}
pub(super) use skel::types;

/// Program that samples inside sections. Attached to perf events of its own.
const SAMPLER_PROGRAM: &str = "on_kernel_cycles";
/// Pages of histogram buckets for each culprit: its lengths are similar.
const PAGES_PER_CULPRIT: u32 = 8;
/// Minimum size of the table of culprits.
const MIN_CULPRITS: u32 = 1_024;
/// Longest interval between reads of the table, in nanoseconds.
const READ_EVERY_NS: u64 = 200_000_000;

/// Returns the size of the table of culprits. Each tick adds at most one, and the table is emptied once it is half full.
fn culprits_for(cpus: u32, period_ns: u64) -> u32 {
    let per_cpu = u32::try_from(2 * READ_EVERY_NS / period_ns.max(1)).unwrap_or(u32::MAX);
    let most = tick_limits::MAX_CULPRITS.0;
    cpus.saturating_mul(per_cpu).clamp(MIN_CULPRITS, most).next_power_of_two().min(most)
}

pub(super) struct Programs {
    _links: Vec<Link>,
    /// Programs that the account calls.
    _called: Vec<StepGuard>,
    records: Records,
    /// Account of the CPU; present if causes are requested.
    account: Option<Account>,
    ticks: MappedArray,
    culprits: Elements,
    /// Culprits without a late tick in the last call of `take_lengths`; all of them if hardly any room was left.
    unused: Vec<usize>,
    lengths: Distributions,
    lateness: Distributions,
    /// Culprits by ID, each with the interrupted stack.
    names: HashMap<usize, (Keeper, Vec<String>)>,
    /// Generation of the symbols that `names` was built from.
    generation: u64,
    skeleton: skel::TicksSkel<'static>,
}

/// Lengths of one culprit.
#[derive(Clone, Debug)]
pub(super) struct CulpritLengths {
    pub culprit: Keeper,
    /// Interrupted stack, innermost function first; empty if irrelevant.
    pub stack: Vec<String>,
    pub length: Histogram,
}

// SAFETY: integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for culprit_key {}

// SAFETY: integers and arrays of integers only.
#[cfg(test)]
#[allow(unsafe_code)]
unsafe impl PlainData for types::inside {}

impl Programs {
    /// Attaches the programs. Sampling starts as soon as this returns.
    pub(super) fn attach(
        options: &IrqsoffOptions,
        session: &Session,
        period_ns: u64,
        sampler: &NmiSampler,
    ) -> Result<Self, AttachError> {
        let timers = Timers::HeartbeatsOfSource { late_from_ns: options.from_ns };
        let mut account = options
            .explain_over_ns
            .map(|_| Account::load(session.account(), timers, Wakeups::OfWorkers))
            .transpose()?;
        let mut open = skel::TicksSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.own_namespace = pid_namespace::as_setting();
        settings.timer_function = address_of(heartbeat::FUNCTION).map_err(|error| {
            // Without the right to load programs, report that first.
            if !attach::may_load_programs() {
                return AttachError::NotPermitted;
            }
            AttachError::Unsupported(format!("cannot distinguish timers: {error}"))
        })?;
        settings.period_ns = period_ns;
        settings.from_ns = options.from_ns;
        settings.counts_all = options.timer_test;
        settings.with_causes = options.explain_over_ns.is_some();
        settings.looks_inside = !sampler.is_empty();
        settings.proves_inside = sampler.requires_irqs_off();
        let entries = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        let culprits = culprits_for(entries, period_ns);
        let pages = session.pages(PAGES_PER_CULPRIT * culprits)?.set(&mut open.maps.bucket_pages)?;
        settings.page_limit = pages;
        let culprit_limit = options.most_culprits.unwrap_or(u32::MAX).min(culprits);
        settings.culprit_limit = culprit_limit;
        let variables = PerCpu::new()?;
        settings.steal_time_distance = variables.distance("hrtimer_bases", "steal_time").unwrap_or(0);
        settings.irq_registers_distance = variables.distance("hrtimer_bases", "__irq_regs").unwrap_or(0);
        open.maps.tick_by_cpu.set_max_entries(entries)?;
        open.maps.inside_by_cpu.set_max_entries(entries)?;
        open.maps.culprit_by_id.set_max_entries(culprits)?;
        open.maps.culprit_id_by_key.set_max_entries(culprits)?;
        if let Some(account) = &account {
            account.share_with(open.open_object_mut())?;
        }
        if account.is_some() || !sampler.is_empty() {
            let bytes = account.as_ref().map_or(LATE_BYTES, Account::late_bytes);
            open.maps.late_ticks.set_max_entries(bytes)?;
        }
        disable_missing_tracepoints(open.open_object_mut())?;
        open.progs.on_kernel_cycles.set_autoload(!sampler.is_empty());
        let skeleton = attach::load(open)?;
        if let Some(account) = &mut account {
            account.watch_unexplained(skeleton.maps.bss.as_fd(), offset_of!(types::bss, unexplained_events))?;
        }
        let map =
            |map: &libbpf_rs::MapMut<'_>, entries: u32, bytes| MappedArray::new(map.as_fd(), entries as usize, bytes);
        let maps = &skeleton.maps;
        let ticks = map(&maps.tick_by_cpu, entries, size_of::<tick>()).context("cannot map the ticks")?;
        let culprits = map(&maps.culprit_by_id, culprits, size_of::<culprit>());
        let culprits = culprits.context("cannot map the culprits")?;
        let key = offset_of!(culprit, key)..offset_of!(culprit, key) + size_of::<culprit_key>();
        let culprits = Elements::new(culprits, key, culprit_limit, &maps.culprit_id_by_key);
        let pages = map(&maps.bucket_pages, pages, size_of::<bucket_page>()).context("cannot map the histograms")?;
        let pages = Rc::new(pages);
        let culprits = culprits.context("cannot open the table of culprits")?.with_pages(Rc::clone(&pages));
        let lengths = Distributions::new(Rc::clone(&pages), DistributionOffsets::new(offset_of!(culprit, length)));
        let lateness = Distributions::new(pages, DistributionOffsets::new(offset_of!(tick, lateness)));
        let records = Records::new(&skeleton.maps.late_ticks)?;
        // Before our own programs, so that the account has seen a late timer when its window is copied.
        account.iter_mut().try_for_each(Account::attach)?;
        let has_event = |name: &OsStr| name != SAMPLER_PROGRAM;
        let programs = skeleton.object().progs_mut();
        let mut programs: Vec<_> = programs.filter(|program| program.autoload() && has_event(program.name())).collect();
        // Exit programs first, so that the end of each handler is seen.
        programs.sort_by_key(|program| !program.name().to_string_lossy().ends_with("_exit"));
        let (mut links, mut called) = (Vec::new(), Vec::new());
        for program in &programs {
            // The account is at the same tracepoints, and calls the program when it is done.
            match (&account, vectors::step_of(program)) {
                (Some(account), Some(step)) => called.push(account.call(step, program)?),
                _ => links.extend(vectors::attach(program)?),
            }
        }
        sampler.start(skeleton.progs.on_kernel_cycles.as_fd())?;
        Ok(Programs {
            _called: called,
            _links: links,
            records,
            account,
            ticks,
            culprits,
            unused: Vec::new(),
            lengths,
            lateness,
            names: HashMap::new(),
            generation: 0,
            skeleton,
        })
    }

    /// Watches the timer of the perf event `event_id` on the CPU from now on.
    pub(super) fn watch(&self, cpu: u32, event_id: u64) {
        self.counter(cpu, offset_of!(tick, timer)).store(0, Ordering::Release);
        self.counter(cpu, offset_of!(tick, due_ns)).store(0, Ordering::Release);
        self.counter(cpu, offset_of!(tick, event_id)).store(event_id, Ordering::Release);
    }

    /// Sets the minimum length of late events of the CPU; `u64::MAX` for none.
    pub(super) fn send_from(&self, cpu: u32, ns: u64) {
        self.counter(cpu, offset_of!(tick, send_from_ns)).store(ns, Ordering::Release);
    }

    /// Returns the number of the CPU's ticks so far.
    pub(super) fn ticks(&self, cpu: u32) -> u64 {
        self.counter(cpu, offset_of!(tick, ticks)).load(Ordering::Relaxed)
    }

    /// Returns the lateness of all ticks of the CPU and the periods they missed since the last call, if counted.
    pub(super) fn take_ticks(&mut self, cpu: u32) -> (Histogram, u64) {
        let overruns = self.counter(cpu, offset_of!(tick, overruns)).swap(0, Ordering::Relaxed);
        (self.lateness.take(&self.ticks, cpu as usize), overruns)
    }

    pub(super) fn sampler_program(&self) -> BorrowedFd<'_> {
        self.skeleton.progs.on_kernel_cycles.as_fd()
    }

    /// Returns the due time of the tick with the last sampled section on the CPU; 0 if none was.
    #[cfg(test)]
    pub(super) fn inside_due_ns(&self, cpu: u32) -> u64 {
        self.inside_record(cpu).map_or(0, |record| record.due_ns)
    }

    /// Returns the due time of [`inside_due_ns`](Self::inside_due_ns) with its stack.
    #[cfg(test)]
    pub(super) fn inside(&self, cpu: u32, symbols: &mut KernelSymbols) -> (u64, Vec<String>) {
        let Some(record) = self.inside_record(cpu) else { return (0, Vec::new()) };
        let frames = usize::try_from(record.stack.bytes).unwrap_or(0) / size_of::<u64>();
        (record.due_ns, culprits::inside_of(&record.stack.frames[..frames], symbols))
    }

    #[cfg(test)]
    fn inside_record(&self, cpu: u32) -> Option<types::inside> {
        let map = &self.skeleton.maps.inside_by_cpu;
        attach::read_plain(&map.lookup(&cpu.to_ne_bytes(), MapFlags::ANY).ok()??)
    }

    fn counter(&self, cpu: u32, offset: usize) -> &std::sync::atomic::AtomicU64 {
        self.ticks.u64_at(cpu as usize, offset)
    }

    /// Returns the lateness of ticks since the last call, by culprit ID.
    pub(super) fn take_lengths(&mut self) -> Vec<(usize, Histogram)> {
        let array = &self.culprits.array;
        let taken = self.culprits.counting().into_iter().map(|id| (id, self.lengths.take(array, id)));
        let mut taken: Vec<(usize, Histogram)> = taken.collect();
        let are_all_freed = self.culprits.is_nearly_full();
        self.unused =
            taken.iter().filter(|(_, length)| are_all_freed || length.is_empty()).map(|&(id, _)| id).collect();
        taken.retain(|(_, length)| !length.is_empty());
        taken
    }

    pub(super) fn needs_room(&self) -> bool {
        self.culprits.is_half_full()
    }

    /// Frees culprits without late ticks if the table is half full or half of the pages are used, and all culprits if
    /// it is nearly full. Returns their lengths until then.
    pub(super) fn free_unused(&mut self, symbols: &mut KernelSymbols) -> Vec<CulpritLengths> {
        let unused = std::mem::take(&mut self.unused);
        if !self.needs_room() {
            return Vec::new();
        }
        let mut named: HashMap<usize, _> = unused.iter().map(|&id| (id, self.culprit(id, symbols))).collect();
        let Programs { culprits, lengths, names, .. } = self;
        let mut rest = Vec::new();
        culprits.free(&unused, |array, id| {
            names.remove(&id);
            let length = lengths.release(array, id);
            if let (Some((culprit, stack)), false) = (named.remove(&id), length.is_empty()) {
                rest.push(CulpritLengths { culprit, stack, length });
            }
        });
        rest
    }

    /// Names the culprits of `lengths`. The first call reads the kernel's symbols, which takes a while.
    pub(super) fn name_lengths(
        &mut self,
        lengths: Vec<(usize, Histogram)>,
        symbols: &mut KernelSymbols,
    ) -> Vec<CulpritLengths> {
        // Other code may be loaded at the address of a culprit, which is another culprit.
        let generation = symbols.generation();
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.names.clear();
        }
        let named = lengths.into_iter().map(|(id, length)| {
            let (culprit, stack) = self.culprit(id, symbols);
            CulpritLengths { culprit, stack, length }
        });
        named.collect()
    }

    fn culprit(&mut self, id: usize, symbols: &mut KernelSymbols) -> (Keeper, Vec<String>) {
        if let Some(known) = self.names.get(&id) {
            return known.clone();
        }
        let bytes = |from: usize, length: usize| -> Vec<u8> {
            (from..from + length).map(|at| self.culprits.array.u8_at(id, at).load(Ordering::Relaxed)).collect()
        };
        let key = bytes(offset_of!(culprit, key), size_of::<culprit_key>());
        let key: culprit_key = attach::read_plain(&key).unwrap_or_default();
        let name: Vec<i8> = bytes(offset_of!(culprit, name), 16).into_iter().map(|byte| byte as i8).collect();
        let reason = culprits::reason(&key, &attach::text(&name), symbols);
        let stack = bytes(offset_of!(culprit, stack), size_of::<interrupted_stack>());
        let stack = symbols.stack(culprits::stack_of(&stack).unwrap_or_default());
        let culprit = keeper(culprits::found(&key), &reason, &stack);
        let named = (culprit, blame::interrupted_stack(&stack).to_vec());
        self.names.insert(id, named.clone());
        named
    }

    /// Decodes a window of the account; `None` if there is no account.
    pub(super) fn occupancy(&mut self, window: &[u8], symbols: &mut KernelSymbols) -> Option<Occupancy> {
        self.account.as_ref()?.windows().read(window, symbols)
    }

    /// Adds the events that the CPU account lost to the snapshot.
    pub(super) fn report_account(&mut self, snapshot: &mut Snapshot) {
        self.account.iter_mut().for_each(|account| account.report(snapshot));
    }

    pub(super) fn poll(&self, wait: Duration) -> anyhow::Result<()> {
        self.records.poll(wait)
    }

    pub(super) fn take_record(&self) -> Option<Box<[u8]>> {
        self.records.next()
    }

    pub(super) fn take_lost(&self, cpus: &[u32]) -> BTreeMap<String, u64> {
        let reasons = [
            // Ticks that were due and not seen: their lateness is not counted.
            ("unseen", offset_of!(tick, unseen)),
            ("late_events", offset_of!(tick, lost_late_events)),
            // Late ticks without the function that enabled interrupts.
            ("stacks", offset_of!(tick, lost_stacks)),
            ("culprits_full", offset_of!(tick, lost_culprits)),
            ("buckets_full", offset_of!(tick, lost_buckets)),
        ];
        let sum = |offset| cpus.iter().map(|&cpu| self.counter(cpu, offset).swap(0, Ordering::Relaxed)).sum();
        reasons.into_iter().map(|(name, offset)| (name.to_owned(), sum(offset))).collect()
    }

    pub(super) fn limitations(&self) -> Option<&str> {
        self.account.as_ref().and_then(Account::limitations)
    }

    pub(super) fn statistics(&self) -> ProgramStatistics {
        let ours = self.skeleton.object().progs().filter(attach::is_open);
        let mut statistics = attach::statistics(ours);
        self.account.iter().for_each(|account| statistics += account.statistics());
        statistics
    }
}
