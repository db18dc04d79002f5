// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached BPF programs and their counts.

use std::collections::HashMap;
use std::fs;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use libbpf_rs::skel::SkelBuilder;
use libbpf_rs::{Link, ProgramMut};
use whylate_model::snapshot::Unexplained;
use whylate_model::{LateEvent, Snapshot};

use super::gather::SeriesCounts;
use super::late::{self, Cpus, KEEP_NS, RecordedRequests};
use super::names::{RequestNames, number_of};
use super::skel::types::{bss, done_request, lost_reason, request_limits, series_key, series_limits, signaled_by};
use super::skel::{BlockSkel, BlockSkelBuilder, OpenBlockSkel};
use super::{BlockOptions, By, FEXIT, INFO, INSERT};
use crate::cpu_account::{Account, Timers, Wakeups};
use crate::kernel::attach::{self, Loading, Meter};
use crate::kernel::cpus;
use crate::kernel::distribution::{BucketPages, MAX_PAGES};
use crate::kernel::mapped::MappedArray;
use crate::kernel::percpu::PreemptCount;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::source::session::{Session, Span};
use crate::source::{AttachError, Attached};

/// Total size of the rings of completed requests, and the minimum per CPU.
const MAX_DONE: u32 = 1 << 16;
const MIN_DONE_PER_CPU: u32 = 1 << 9;
/// The maximum per CPU beside other sources, which are read five times a second: 80,000 requests per second.
const MAX_SHARED_DONE_PER_CPU: u32 = 1 << 14;
/// Pages of histogram buckets per series: six per phase, and eight for the latency alone.
const PAGES_PER_SERIES: u32 = 32;
const PAGES_WITHOUT_PHASES: u32 = 8;
/// Bits of the number of sets of requests in progress on one CPU.
const SET_BITS_OF_ONE_CPU: u32 = 10;

/// Time that explaining late events may take per call, while the caller waits for the events.
const BUDGET: Duration = Duration::from_millis(50);

/// Number of a CPU's occupancy intervals before a completion interrupt that are searched for one with interrupts off.
const INTERVALS_BEFORE_SIGNAL: usize = 16;
/// Maximum number of occupancy intervals from the completion interrupt to the completion.
const MAX_INTERVALS_UNTIL_DONE: usize = 1_024;

/// Every reason for a lost event, with its name in the output. The enum in `settings.bpf.h` explains them.
const LOST: [(lost_reason, &str); 9] = [
    (lost_reason::LOST_UNMATCHED, "unmatched"),
    (lost_reason::LOST_REUSED, "reused"),
    (lost_reason::LOST_REQUESTS_FULL, "in_progress_full"),
    (lost_reason::LOST_SERIES_FULL, "series_full"),
    (lost_reason::LOST_BUCKETS_FULL, "buckets_full"),
    (lost_reason::LOST_LATE_EVENTS, "late_events"),
    (lost_reason::LOST_OWN, "own"),
    (lost_reason::LOST_SUBMISSION, "unseen_submissions"),
    (lost_reason::LOST_HELD_FULL, "held_full"),
];

/// The attached source. Dropping the links detaches the programs.
pub(super) struct AttachedBlock {
    /// Dropped first, so that no program runs while the rest is dropped.
    _links: Vec<Link>,
    skeleton: BlockSkel<'static>,
    backend: &'static str,
    by: By,
    counts: SeriesCounts,
    names: RequestNames,
    lost: MappedArray,
    /// Late requests.
    records: Option<Records>,
    recorded: Option<RecordedRequests>,
    /// CPU account, to explain delays of the CPUs that complete requests.
    account: Option<Account>,
    keep_evidence: bool,
    explain_over_ns: Option<u64>,
    /// Late requests beyond the budget, which stay unexplained.
    unexplained: Unexplained,
    span: Span,
    meter: Meter,
}

/// The BPF object, which is being loaded before the source is attached.
pub(super) struct LoadingBlock {
    backend: &'static str,
    loading: Loading<BlockSkel<'static>>,
}

impl LoadingBlock {
    pub(super) fn begin(options: &BlockOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let (options, pages) = (options.clone(), session.pages(pages_for(options))?);
        let is_shared = session.has_several();
        let loading = Loading::begin(move || load_programs(&options, &pages, backend, is_shared));
        Ok(LoadingBlock { backend, loading: loading.context("cannot start a thread")? })
    }
}

fn possible_cpus() -> Result<u32, AttachError> {
    Ok(cpus::highest_possible().context("cannot list the CPUs")? + 1)
}

/// Returns the size of the ring of completed requests of each CPU.
fn done_by(cpus: u32, is_shared: bool) -> u32 {
    let most = if is_shared { MAX_SHARED_DONE_PER_CPU } else { MAX_DONE };
    (MAX_DONE / cpus).clamp(MIN_DONE_PER_CPU, most).next_power_of_two()
}

fn load_programs(
    options: &BlockOptions,
    pages: &BucketPages,
    backend: &str,
    is_shared: bool,
) -> Result<BlockSkel<'static>, AttachError> {
    let mut open = BlockSkelBuilder::default().open(attach::open_object())?;
    configure(&mut open, options, pages, backend)?;
    if options.explain_over_ns.is_some() {
        let cpus = possible_cpus()?;
        open.maps.count_by_cpu.set_max_entries(cpus)?;
        let done_by_cpu = done_by(cpus, is_shared);
        open.maps.done_by_position.set_max_entries(cpus * done_by_cpu)?;
        open.maps.rodata_data.as_mut().context("the BPF object has no settings")?.done_by_cpu = done_by_cpu;
    }
    Ok(attach::load(open)?)
}

impl AttachedBlock {
    pub(super) fn new(options: &BlockOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let (cpus, is_shared) = (possible_cpus()?, session.has_several());
        let load = || Account::load(session.account(), Timers::Heartbeats, Wakeups::ForLater);
        let mut account = options.explain_over_ns.map(|_| load()).transpose()?;
        let mut skeleton = match session.take_prepared().filter(|of: &LoadingBlock| of.backend == backend) {
            Some(LoadingBlock { loading, .. }) => loading.wait()?,
            None => load_programs(options, &session.pages(pages_for(options))?, backend, is_shared)?,
        };
        let counts = SeriesCounts::new(&skeleton, options.by, series_limit(options))?;
        let lost = MappedArray::inside(
            skeleton.maps.bss.as_fd(),
            offset_of!(bss, lost_by_reason),
            LOST.len(),
            size_of::<u64>(),
        )
        .context("cannot map the counts of lost events")?;
        let recorded = options
            .explain_over_ns
            .map(|_| RecordedRequests::new(&skeleton, cpus, done_by(cpus, is_shared)))
            .transpose()?;
        let has_late = options.late_over_ns.or(options.explain_over_ns).is_some();
        let records = has_late.then(|| Records::new(&skeleton.maps.late_requests)).transpose()?;
        // Attached first: its interrupt programs then run before those of this source, and have earlier timestamps.
        account.iter_mut().try_for_each(Account::attach)?;
        let links = attach_programs(&skeleton)?;
        let data = skeleton.maps.bss_data.as_mut().context("the BPF object has no variables")?;
        // Right before counting starts, so that nothing from before the span is counted.
        let span = Span::begin(INFO.card, session);
        data.enabled = true;
        Ok(AttachedBlock {
            _links: links,
            backend,
            by: options.by,
            counts,
            names: RequestNames::new(session.symbols()),
            lost,
            records,
            recorded,
            account,
            keep_evidence: options.keep_evidence,
            explain_over_ns: options.explain_over_ns,
            unexplained: Unexplained::default(),
            span,
            meter: Meter::default(),
            skeleton,
        })
    }

    fn read_requests(&mut self, has_late: bool) {
        if let Some(recorded) = &mut self.recorded {
            // Requests in progress are only needed to explain late ones. Read first: they may complete before `read`.
            if has_late {
                recorded.read_in_progress();
            }
            recorded.read(KEEP_NS);
        }
    }
}

fn configure(
    open: &mut OpenBlockSkel<'_>,
    options: &BlockOptions,
    pages: &BucketPages,
    backend: &str,
) -> Result<(), AttachError> {
    let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
    settings.own_namespace = pid_namespace::as_setting();
    settings.series_key = match options.by {
        By::Device => series_key::BY_DEVICE,
        By::Process => series_key::BY_PROCESS,
        By::Thread => series_key::BY_THREAD,
        By::Cgroup => series_key::BY_CGROUP,
    };
    settings.series_limit = series_limit(options);
    settings.page_limit = pages.set(&mut open.maps.bucket_pages)?;
    settings.set_bits = set_bits_for(possible_cpus()?);
    open.maps.set_by_hash.set_max_entries(1 << settings.set_bits)?;
    open.maps.request_by_slot.set_max_entries(request_limits::SLOTS_PER_SET.0 << settings.set_bits)?;
    open.maps.series_by_id.set_max_entries(settings.series_limit)?;
    open.maps.series_by_key.set_max_entries(settings.series_limit)?;
    settings.own_process = options.leave_out.unwrap_or(0);
    settings.has_bio_devices = has_devices_without_requests();
    settings.sees_throttling = backend == FEXIT;
    open.maps.held_by_bio.set_autocreate(settings.sees_throttling)?;
    settings.starts_by_bio = backend == INSERT;
    let over_ns = options.late_over_ns.into_iter().chain(options.explain_over_ns).min();
    settings.late_over_ns = over_ns.unwrap_or(0);
    settings.wants_phases = options.phases;
    let needs_issue_time = options.phases || over_ns.is_some();
    settings.wants_submitters = over_ns.is_some() || options.by != By::Device;
    settings.preempt_count_distance = PreemptCount::here().distance();
    settings.keep_done = options.explain_over_ns.is_some();
    if let Some(device) = &options.device {
        settings.wanted_device = number_of(device).map_err(|error| AttachError::Contradiction(error.to_string()))?;
    }
    let programs = &mut open.progs;
    programs.on_block_bio_complete.set_autoload(settings.has_bio_devices);
    programs.on_throttle_exit.set_autoload(settings.sees_throttling);
    programs.on_block_bio_backmerge.set_autoload(settings.sees_throttling || settings.has_bio_devices);
    programs.on_block_bio_frontmerge.set_autoload(settings.sees_throttling || settings.has_bio_devices);
    programs.on_block_io_start.set_autoload(backend != INSERT);
    programs.on_block_rq_insert.set_autoload(backend == INSERT);
    programs.on_block_rq_issue.set_autoload(backend == INSERT || needs_issue_time);
    programs.on_block_rq_requeue.set_autoload(backend == INSERT || needs_issue_time);
    programs.on_block_getrq.set_autoload(backend == INSERT);
    programs.on_irq_handler_entry.set_autoload(options.phases);
    programs.on_irq_handler_exit.set_autoload(options.phases);
    programs.on_softirq_raise.set_autoload(options.phases);
    programs.on_softirq_entry.set_autoload(options.phases);
    programs.on_softirq_exit.set_autoload(options.phases);
    Ok(())
}

/// Returns the bits of the number of sets of requests in progress: a device has queues for each CPU.
fn set_bits_for(cpus: u32) -> u32 {
    (SET_BITS_OF_ONE_CPU + cpus.next_power_of_two().ilog2()).min(request_limits::SET_BITS.0)
}

/// Returns the number of pages of histogram buckets that suffices.
fn pages_for(options: &BlockOptions) -> u32 {
    let pages = if options.phases { PAGES_PER_SERIES } else { PAGES_WITHOUT_PHASES };
    series_limit(options).saturating_mul(pages).min(MAX_PAGES)
}

/// Returns the size of the table of series.
fn series_limit(options: &BlockOptions) -> u32 {
    let most = match options.by {
        By::Device => series_limits::MAX_DEVICE_SERIES.0,
        By::Process | By::Thread | By::Cgroup => series_limits::MAX_SERIES.0,
    };
    options.most_series.map_or(most, |wanted| wanted.clamp(2, most))
}

/// Returns whether there are bio-based devices (device mapper, md, zram, …). Only request queues have a directory `mq`.
fn has_devices_without_requests() -> bool {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices.map(|device| device.path()).any(|device| device.join("queue").exists() && !device.join("mq").exists())
}

/// Returns the programs in the order of attachment: completion first, so that no request is tracked of which the
/// completion cannot be seen.
fn programs<'a>(skeleton: &'a BlockSkel<'_>) -> impl Iterator<Item = &'a ProgramMut<'a>> {
    let programs = &skeleton.progs;
    [
        &programs.on_softirq_exit,
        &programs.on_irq_handler_exit,
        &programs.on_softirq_entry,
        &programs.on_softirq_raise,
        &programs.on_irq_handler_entry,
        &programs.on_block_rq_complete,
        &programs.on_block_bio_complete,
        &programs.on_block_rq_merge,
        &programs.on_block_rq_requeue,
        &programs.on_block_rq_issue,
        &programs.on_block_io_start,
        &programs.on_block_rq_insert,
        &programs.on_block_getrq,
        &programs.on_block_split,
        &programs.on_block_bio_queue,
        &programs.on_block_bio_backmerge,
        &programs.on_block_bio_frontmerge,
        &programs.on_throttle_exit,
    ]
    .into_iter()
    // Programs that are not loaded have no descriptor.
    .filter(|program| program.autoload())
}

fn attach_programs(skeleton: &BlockSkel<'_>) -> Result<Vec<Link>, AttachError> {
    Ok(programs(skeleton).map(|program| program.attach()).collect::<Result<_, _>>()?)
}

impl Attached for AttachedBlock {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.span.end(self.backend);
        snapshot.series = self.counts.take(&mut self.names);
        for (reason, name) in LOST {
            let count = self.lost.u64_at(reason.0 as usize, 0).swap(0, Relaxed);
            snapshot.lost.insert(name.to_owned(), count);
        }
        if let Some(recorded) = &mut self.recorded {
            snapshot.lost.insert("unseen_others".to_owned(), recorded.take_lost());
            snapshot.lost.insert("over_budget".to_owned(), self.unexplained.events);
            snapshot.unexplained = std::mem::take(&mut self.unexplained);
        }
        let mut statistics = attach::statistics(programs(&self.skeleton).map(|program| program.as_fd()));
        if let Some(account) = &mut self.account {
            account.report(&mut snapshot);
            statistics += account.statistics();
        }
        self.meter.report(statistics, &mut snapshot);
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        self.counts.make_room(&mut self.names);
        let Some(records) = &self.records else {
            return Ok(());
        };
        records.poll(wait)?;
        let late = std::iter::from_fn(|| records.next());
        let late: Vec<done_request> = late.filter_map(|bytes| attach::read_plain(&bytes)).collect();
        // Read after the late requests, so that requests completed before them are known.
        self.read_requests(!late.is_empty());
        let mut events: Vec<Option<LateEvent>> = late.iter().map(|_| None).collect();
        let mut spent = Duration::ZERO;
        for at in round_robin_by(&late, |late| late.request.facts.pid) {
            let late = &late[at];
            let mut event = late::event_of(late, &mut self.names);
            let is_explained = self.explain_over_ns.is_some_and(|over_ns| event.latency_ns >= over_ns);
            if let Some(recorded) = self.recorded.as_ref().filter(|_| is_explained) {
                if spent > BUDGET {
                    self.unexplained.events += 1;
                    self.unexplained.total_ns += event.latency_ns;
                    continue;
                }
                let began = Instant::now();
                let usual_device_ns = recorded.usual_device_ns(late);
                let cpus = cpus_of(late, usual_device_ns, self.account.as_ref(), &mut self.names);
                recorded.explain(late, &mut event, &mut self.names, cpus, self.keep_evidence);
                spent += began.elapsed();
            }
            events[at] = Some(event);
        }
        // In the order of completion.
        events.into_iter().flatten().for_each(each);
        Ok(())
    }

    fn fills_between_snapshots(&self) -> bool {
        // Processes, threads and cgroups come and go; disks and operations are few.
        self.by != By::Device
    }

    fn limitations(&self) -> Option<&str> {
        let settings = self.skeleton.maps.rodata_data;
        let has_submitters = settings.is_some_and(|settings| settings.wants_submitters);
        let of_submitters = || if has_submitters { PreemptCount::here().limitation() } else { None };
        self.account.as_ref().and_then(Account::limitations).or_else(of_submitters)
    }
}

/// Returns the order of explanation, round-robin over processes, those with the fewest late requests first: a process
/// with hundreds of late requests leaves time to explain those of its victims.
fn round_robin_by<T>(late: &[T], owner: impl Fn(&T) -> u32) -> Vec<usize> {
    let mut count_by_owner: HashMap<u32, usize> = HashMap::new();
    let mut turns = Vec::with_capacity(late.len());
    for one in late {
        let count = count_by_owner.entry(owner(one)).or_default();
        turns.push(*count);
        *count += 1;
    }
    let mut order: Vec<usize> = (0..late.len()).collect();
    order.sort_by_key(|&at| (turns[at], count_by_owner[&owner(&late[at])]));
    order
}

/// Returns the occupancy of the completing CPU since the completion interrupt, and of the interrupted CPU since the
/// issue.
fn cpus_of(late: &done_request, usual_device_ns: u64, account: Option<&Account>, names: &mut RequestNames) -> Cpus {
    let Some(account) = account else { return Cpus { usual_device_ns, ..Cpus::default() } };
    // Without a completion interrupt in sight, the request was completed in it, if in any.
    let signaled_ns =
        if late.signaled_by == signaled_by::SIGNALED_BY_NONE.0 { late.completed_ns } else { late.signaled_ns };
    let may_be_sent = late.signaled_by == signaled_by::SIGNALED_BY_SOFTIRQ.0;
    // At most an eighth slower than usual: no interrupt delay worth reporting.
    let device_ns = signaled_ns.saturating_sub(late.request.issued_ns);
    let is_slow = usual_device_ns > 0 && device_ns > usual_device_ns.saturating_add(usual_device_ns / 8);
    let interrupted = if is_slow { account.interrupted(late.cpu, signaled_ns, may_be_sent) } else { None };
    let before = late.request.issued_ns..signaled_ns;
    Cpus {
        usual_device_ns,
        interrupted: interrupted
            .and_then(|cpu| account.recent_if_irq_late(cpu, before, INTERVALS_BEFORE_SIGNAL, names.symbols())),
        ended_on: account.recent_intervals(
            late.cpu,
            signaled_ns..late.completed_ns,
            MAX_INTERVALS_UNTIL_DONE,
            names.symbols(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{done_by, round_robin_by};

    #[test]
    fn only_beside_other_sources_rings_of_completed_requests_are_short() {
        let cpus = [1, 2, 3, 4, 8, 128, 256];
        assert_eq!(cpus.map(|cpus| done_by(cpus, false)), [65_536, 32_768, 32_768, 16_384, 8_192, 512, 512]);
        assert_eq!(cpus.map(|cpus| done_by(cpus, true)), [16_384, 16_384, 16_384, 16_384, 8_192, 512, 512]);
    }

    #[test]
    fn explains_round_robin_by_process() {
        let late = [7, 7, 8, 7, 9, 8];
        let order: Vec<u32> = round_robin_by(&late, |&pid| pid).into_iter().map(|at| late[at]).collect();
        assert_eq!(order, [9, 8, 7, 8, 7, 7]);
    }
}
