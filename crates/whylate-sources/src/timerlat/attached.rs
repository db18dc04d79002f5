// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source `timerlat` while it measures.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Link, RingBuffer, RingBufferBuilder};
use whylate_model::blame::{self, TimerEvidence};
use whylate_model::{LateEvent, Series, Snapshot};

use super::activation::Activation;
use super::floors::Floors;
use super::skel::types::{activation, interrupted_stack, late_activation, timerlat_lost};
use super::skel::{TimerlatSkel, TimerlatSkelBuilder};
use super::threads::{self, Measured, Orders, Stopped};
use super::{BPF, INFO, TimerlatOptions};
use crate::attach::{self, Meter};
use crate::mapped::MappedArray;
use crate::occupancy::{Account, Timers, WAKEUP_FUNCTION};
use crate::source::{AttachError, Attached, Backend};
use crate::symbols::{KernelSymbols, address_of};
use crate::{clock, cpus};

/// Room for late events with their windows, in bytes.
const LATE_BYTES: u32 = 4 << 20;

/// How long threads run before their activations count, unless ten of them are over sooner.
const SETTLING: Duration = Duration::from_millis(50);

/// Records as the kernel wrote them, in order.
type Records = Rc<RefCell<VecDeque<Box<[u8]>>>>;

/// Measures until it is dropped.
pub struct AttachedTimerlat {
    /// First, so that they end while the programs still run.
    measured: Vec<Measured>,
    _links: Vec<Link>,
    ring: Option<RingBuffer<'static>>,
    records: Records,
    account: Option<Account>,
    map: Arc<MappedArray>,
    stopped: Arc<Stopped>,
    /// Where only the worst activations are asked for.
    floors: Option<Floors>,
    symbols: KernelSymbols,
    keep_evidence: bool,
    host: String,
    since_unix_ns: u64,
    since_monotonic_ns: u64,
    /// Late events before are of no measurement.
    counts_from_ns: u64,
    /// Late events whose records were.
    cut_short: u64,
    explain_over_ns: u64,
    explain_irq_over_ns: u64,
    weaker: Option<String>,
    meter: Meter,
    skeleton: TimerlatSkel<'static>,
}

impl AttachedTimerlat {
    pub(super) fn new(options: &TimerlatOptions) -> Result<Self, AttachError> {
        let online = cpus::online().context("cannot tell which CPUs are online")?;
        let wanted = if options.cpus.is_empty() { online.clone() } else { options.cpus.clone() };
        if let Some(cpu) = wanted.iter().find(|cpu| !online.contains(cpu)) {
            return Err(AttachError::Unsupported(format!("CPU {cpu} is not online: choose others")));
        }
        let mut account = match options.explains() {
            true => Some(Account::load(Timers::OwnThreadsToo)?),
            false => None,
        };
        let mut open = TimerlatSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        // Without it, whose timer it is is told by when it is due alone.
        settings.wakeup_function = address_of(WAKEUP_FUNCTION).unwrap_or(0);
        settings.with_events = options.explains();
        settings.with_stacks = options.stacks;
        let entries = cpus::highest_possible().context("cannot tell which CPUs there are")? + 1;
        open.maps.activation_by_cpu.set_max_entries(entries)?;
        if let Some(account) = &account {
            let [accounts, intervals, _] = account.shared();
            open.maps.account_by_cpu.reuse_fd(accounts)?;
            open.maps.intervals_by_position.reuse_fd(intervals)?;
            open.maps.late_activations.set_max_entries(LATE_BYTES)?;
        }
        let skeleton = open.load()?;
        let map = MappedArray::new(skeleton.maps.activation_by_cpu.as_fd(), entries as usize, size_of::<activation>())
            .context("cannot map the activations")?;
        let map = Arc::new(map);
        let records = Records::default();
        let ring = options.explains().then(|| ring_of(&skeleton, &records)).transpose()?;
        let links = vec![skeleton.progs.on_sched_switch.attach()?, skeleton.progs.on_hrtimer_expire_entry.attach()?];
        if let Some(account) = &mut account {
            account.attach()?;
        }
        // Without the privilege a page may have to be fetched, and that is then part of what is measured.
        let _ = threads::lock_memory();
        let tasks = account.as_ref().map(Account::threads).transpose().context("cannot map the accounts of CPUs")?;
        let stopped = Arc::new(Stopped::new(tasks.map(|threads| Box::new(move || threads.now()) as _)));
        let floors = options.explain_worst.map(Floors::new);
        for &cpu in &wanted {
            Activation { map: &map, cpu }.explain_from(u64::MAX, u64::MAX);
        }
        let measured = wanted
            .iter()
            .map(|&cpu| {
                Measured::start(Orders {
                    cpu,
                    period_ns: options.period_ns,
                    policy: options.policy,
                    map: Arc::clone(&map),
                    width: options.steps,
                    stop: options.stop,
                    stopped: Arc::clone(&stopped),
                })
            })
            .collect::<anyhow::Result<_>>()?;
        std::thread::sleep(SETTLING.min(Duration::from_nanos(options.period_ns.saturating_mul(10))));
        let mut attached = AttachedTimerlat {
            measured,
            _links: links,
            ring,
            records,
            account,
            map,
            stopped,
            floors,
            symbols: KernelSymbols::default(),
            keep_evidence: options.keep_evidence,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            since_unix_ns: 0,
            since_monotonic_ns: 0,
            counts_from_ns: 0,
            cut_short: 0,
            weaker: None,
            explain_over_ns: options.explain_over_ns.unwrap_or(u64::MAX),
            explain_irq_over_ns: options.explain_irq_over_ns.unwrap_or(u64::MAX),
            meter: Meter::default(),
            skeleton,
        };
        attached.since_monotonic_ns = clock::monotonic_ns();
        attached.since_unix_ns = clock::unix_ns();
        attached.weaker = weaker(attached.account.as_ref(), &wanted);
        attached.resume();
        Ok(attached)
    }
}

/// What is told less well on these CPUs than it could be.
fn weaker(account: Option<&Account>, cpus: &[u32]) -> Option<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let moves = read("/proc/sys/kernel/timer_migration").trim() == "1";
    let without_tick = cpus::numbers(&read("/sys/devices/system/cpu/nohz_full")).unwrap_or_default();
    if moves && cpus.iter().any(|cpu| without_tick.contains(cpu)) {
        // Timers of threads are not pinned (get_nohz_timer_target() in kernel/sched/core.c).
        let told = "other CPUs may serve the timers of nohz_full CPUs, whose activations are unseen then (set kernel.timer_migration=0)";
        return Some(told.to_owned());
    }
    account.and_then(Account::weaker).map(str::to_owned)
}

fn ring_of(skeleton: &TimerlatSkel<'_>, records: &Records) -> Result<RingBuffer<'static>, AttachError> {
    let mut builder = RingBufferBuilder::new();
    let records = Rc::clone(records);
    builder.add(&skeleton.maps.late_activations, move |bytes| {
        records.borrow_mut().push_back(bytes.into());
        0
    })?;
    Ok(builder.build()?)
}

impl Attached for AttachedTimerlat {
    fn backend(&self) -> Backend<'_> {
        Backend { name: BPF, fallback_reason: None }
    }

    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let (now_monotonic_ns, now_unix_ns) = (clock::monotonic_ns(), clock::unix_ns());
        let mut snapshot = Snapshot::new(INFO.name, BPF, &self.host, self.since_unix_ns);
        snapshot.duration_ns = now_monotonic_ns - self.since_monotonic_ns;
        let (mut late_events, mut unseen, mut armed_late) = (std::mem::take(&mut self.cut_short), 0, 0);
        // All at once, so that their span is the same.
        let taken: Vec<_> =
            self.measured.iter().map(|measured| (measured.cpu, measured.tallies.change_over())).collect();
        for (cpu, tally) in taken {
            let mut series = Series::default();
            series.labels.insert("cpu".to_owned(), cpu.to_string());
            let kinds = [
                ("irq", &tally.irq),
                ("thread", &tally.thread),
                ("user", &tally.user),
                ("thread_corrected", &tally.corrected),
            ];
            for (name, distribution) in kinds {
                if let Some(steps) = distribution.take_steps() {
                    series.steps.insert(name.to_owned(), steps);
                }
                series.histograms.insert(name.to_owned(), distribution.take());
                series.values.insert(format!("{name}_last_ns"), distribution.last_ns() as f64);
            }
            let missed = tally.missed.swap(0, Ordering::Relaxed);
            series.values.insert("missed".to_owned(), missed as f64);
            snapshot.series.push(series);
            unseen += tally.unseen.swap(0, Ordering::Relaxed);
            armed_late += tally.armed_late.swap(0, Ordering::Relaxed);
            let lost = offset_of!(activation, lost) + 8 * timerlat_lost::TIMERLAT_LATE_EVENTS.0 as usize;
            late_events += self.map.u64_at(cpu as usize, lost).swap(0, Ordering::Relaxed);
        }
        // Activations whose timer or thread the programs have not seen: they have a latency of the return to user space only.
        snapshot.lost.insert("unseen".to_owned(), unseen);
        // The same where the thread was stopped, or preempted on its way to sleep, until after its timer was due.
        snapshot.lost.insert("armed_late".to_owned(), armed_late);
        snapshot.lost.insert("late_events".to_owned(), late_events);
        if let Some(account) = &mut self.account {
            snapshot.lost.extend(account.take_lost().map(|(reason, count)| (reason.to_owned(), count)));
        }
        let programs = &self.skeleton.progs;
        let ours = [programs.on_hrtimer_expire_entry.as_fd(), programs.on_sched_switch.as_fd()];
        let mut statistics = attach::statistics(ours);
        if let Some(account) = &self.account {
            statistics += attach::statistics(account.programs());
        }
        self.meter.tell(statistics, &mut snapshot);
        self.since_monotonic_ns = now_monotonic_ns;
        self.since_unix_ns = now_unix_ns;
        Ok(snapshot)
    }

    fn drain_late(&mut self, wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        attach::poll(ring, wait)?;
        // Others send theirs until they notice a stop.
        let until_ns = self.stopped.until_ns();
        while let Some(bytes) = self.take_record() {
            let Some((due_ns, event)) = self.event_of(&bytes) else {
                self.cut_short += 1;
                continue;
            };
            if due_ns >= self.counts_from_ns && due_ns + event.latency_ns <= until_ns {
                self.raise_floor(&event);
                each(event);
            }
        }
        Ok(())
    }

    fn weaker(&self) -> Option<&str> {
        self.weaker.as_deref()
    }
}

impl AttachedTimerlat {
    /// The CPU whose latency stopped the measurement, if one did. No thread counts from then on.
    pub fn stopped_by(&self) -> Option<u32> {
        self.stopped.by()
    }

    /// The longest latency of an interrupt that found its CPU idle, and that CPU; `None` where none did.
    pub fn max_from_idle(&self) -> Option<(u32, u64)> {
        let each = self.measured.iter().map(|measured| {
            let cpu = measured.cpu;
            (cpu, Activation { map: &self.map, cpu }.max_from_idle_ns())
        });
        each.max_by_key(|&(_, ns)| ns).filter(|&(_, ns)| ns > 0)
    }

    /// Which thread had each CPU when the measurement stopped, by name and id; empty while it goes on, and where no causes are told.
    pub fn tasks_at_stop(&self) -> Vec<(u32, String)> {
        self.stopped.tasks()
    }

    /// Goes on after a stop. Late events of before do not come any more, and are not among the worst.
    pub fn resume(&mut self) {
        self.forget_worst();
        for measured in &self.measured {
            Activation { map: &self.map, cpu: measured.cpu }.forget_idle();
        }
        self.counts_from_ns = clock::monotonic_ns();
        self.stopped.resume();
    }

    /// From now on, activations are compared with later ones only to find the worst.
    pub fn forget_worst(&mut self) {
        if let Some(floors) = &mut self.floors {
            floors.forget();
        }
        // The worst so far are any at all, to begin with.
        let over_ns = if self.floors.is_some() { 0 } else { self.explain_over_ns };
        for measured in &self.measured {
            Activation { map: &self.map, cpu: measured.cpu }.explain_from(over_ns, self.explain_irq_over_ns);
        }
    }

    fn raise_floor(&mut self, event: &LateEvent) {
        let cpu = event.cpu;
        if let Some(floor_ns) = self.floors.as_mut().and_then(|floors| floors.add(cpu, event.latency_ns)) {
            Activation { map: &self.map, cpu }.explain_worse_than(floor_ns.min(self.explain_over_ns));
        }
    }

    fn take_record(&self) -> Option<Box<[u8]>> {
        self.records.borrow_mut().pop_front()
    }

    /// And when it was due.
    fn event_of(&mut self, bytes: &[u8]) -> Option<(u64, LateEvent)> {
        let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let due_ns = u64_at(offset_of!(late_activation, due_ns))?;
        let irq_ns = u64_at(offset_of!(late_activation, irq_ns))?;
        let thread_ns = u64_at(offset_of!(late_activation, thread_ns))?;
        let (tid, cpu) = (u32_at(offset_of!(late_activation, tid))?, u32_at(offset_of!(late_activation, cpu))?);
        let stack_at = offset_of!(late_activation, stack);
        let stack_bytes = u64_at(stack_at + offset_of!(interrupted_stack, bytes))? as i64;
        let frames_at = stack_at + offset_of!(interrupted_stack, frames);
        // Negative where the kernel could not take it.
        let frames = bytes.get(frames_at..frames_at + usize::try_from(stack_bytes).unwrap_or(0));
        let stack = frames.map_or_else(Vec::new, |frames| self.symbols.stack(frames));
        let window = bytes.get(offset_of!(late_activation, window)..)?;
        let occupancy = self.account.as_mut()?.window(window, &mut self.symbols)?;
        let evidence = TimerEvidence { due_ns, irq_ns, thread_ns, tid, occupancy, stack };
        let latency_ns = thread_ns.saturating_sub(due_ns);
        let mut event = LateEvent {
            at_unix_ns: clock::unix_ns_of(thread_ns),
            latency_ns,
            cpu,
            phases: vec![
                ("irq".to_owned(), irq_ns.saturating_sub(due_ns).min(latency_ns)),
                ("wakeup".to_owned(), thread_ns.saturating_sub(irq_ns.max(due_ns))),
            ],
            causes: blame::timer_causes(&evidence),
            stack: evidence.stack.clone(),
            ..LateEvent::default()
        };
        event.labels.insert("cpu".to_owned(), cpu.to_string());
        event.evidence = self.keep_evidence.then(|| Box::new(evidence.into()));
        Some((due_ns, event))
    }
}
