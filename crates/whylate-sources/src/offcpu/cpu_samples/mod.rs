// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples the running threads of a program, to show in which functions they work.
//!
//! A timer on each CPU interrupts whatever runs there, and a BPF program sends the stacks of the program's threads. A
//! separate thread unwinds them at once, as processes may be short: with the mappings, files and unwind information
//! that serve for sleeping threads too. The period is chosen so that all of it takes 0.5 % of one CPU (`rate.rs`). That
//! is no bound: files are read when they are first seen, until that takes much more than the budget. Names are looked
//! up at the end and, at normal priority, whenever many are pending. Samples that name less than they could are counted
//! by reason.

mod gather;
mod rate;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::skel::SkelBuilder as _;
use rustix::event::{EventfdFlags, eventfd};
use whylate_model::work::CpuSamples;

use self::gather::Gathered;
use self::rate::Rate;
use self::skel::types::{cpu_sample, cpu_sample_limits, lost_sample, rodata};
use self::skel::{CpuSamplesSkel, CpuSamplesSkelBuilder};
use super::watchdog::{Beginning, Worker};
use crate::kernel::attach::{self, PlainData};
use crate::kernel::cpu_choice::Choice;
use crate::kernel::heartbeat::Period;
use crate::kernel::mapped::MappedArray;
use crate::kernel::perf_event::{EVERY_THREAD, run_at, set_period, start_timer};
use crate::kernel::records::Records;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::{cgroups, clock, pid_namespace, priority};
use crate::source::{AttachError, Threads};

#[allow(missing_docs, unsafe_code, clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/cpu_samples/cpu_samples.skel.rs"));
}

/// Maximum time until samples are read. The first ones of a process are read at once.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time between two updates of the period.
const RATE_INTERVAL_NS: u64 = 500_000_000;
/// Size of the ring buffer for each CPU: the timers of all CPUs may expire at once, twice until samples are read.
const RING_BYTES_OF_CPU: u32 = 1 << 16;
const MAX_RING_BYTES: u32 = 1 << 24;
/// CPU time of a timer interrupt if it cannot be measured.
const PRESUMED_INTERRUPT_NS: u64 = 5_000;

/// Selects the threads to sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampledThreads {
    /// Those of processes that this process has created, and their descendants.
    OfOwnChildren,
    /// Those that the kernel finds by these criteria.
    Of(Threads),
}

/// Samples of threads.
#[derive(Clone, Debug, Default)]
pub struct Sampled {
    /// The samples.
    pub samples: CpuSamples,
    /// CPUs that were not sampled, and why.
    pub left_out: Option<String>,
}

/// What the sampling thread returns: samples, and CPUs that were not sampled.
type Answer = (Gathered, Option<String>);

/// Samples threads until dropped or finished.
pub struct CpuSampler {
    worker: Worker<anyhow::Result<Answer>>,
    /// Wakes the sampling thread.
    waking: Arc<OwnedFd>,
}

/// A sampler that begins: the programs are loaded on its own thread.
pub struct BeginningCpuSampler {
    worker: Beginning<anyhow::Result<Answer>>,
    waking: Arc<OwnedFd>,
}

impl BeginningCpuSampler {
    /// Waits until threads are sampled.
    ///
    /// # Errors
    /// Fails if the kernel or the caller's privileges do not allow it.
    pub fn wait(self) -> Result<CpuSampler, AttachError> {
        Ok(CpuSampler { worker: self.worker.wait()?, waking: self.waking })
    }
}

impl CpuSampler {
    /// Begins to sample threads.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn begin(selected: SampledThreads) -> Result<BeginningCpuSampler, AttachError> {
        attach::silence_libbpf();
        let waking = eventfd(0, EventfdFlags::CLOEXEC).context("cannot create an eventfd")?;
        let waking = Arc::new(waking);
        let woken = Arc::clone(&waking);
        let worker = Worker::begin(move || Sampling::new(&selected, woken), Sampling::run)?;
        Ok(BeginningCpuSampler { worker, waking })
    }

    /// Stops sampling. Returns the samples, and adds what was lost to `lost`.
    ///
    /// # Errors
    /// Fails if the sampling thread has failed.
    pub fn finish(self, kernel: &mut KernelSymbols, lost: &mut BTreeMap<String, u64>) -> anyhow::Result<Sampled> {
        rustix::io::write(&self.waking, &1_u64.to_ne_bytes())?;
        let (gathered, left_out) = self.worker.ask()??;
        for (reason, count) in &gathered.lost {
            *lost.entry((*reason).to_owned()).or_default() += count;
        }
        let (samples, in_interrupts) = gathered.named(kernel);
        *lost.entry("samples_in_interrupts".to_owned()).or_default() += in_interrupts;
        Ok(Sampled { samples, left_out })
    }
}

/// What the sampling thread has.
struct Sampling {
    skeleton: CpuSamplesSkel<'static>,
    timers: Vec<OwnedFd>,
    /// Can be read from when samples are asked for.
    woken: Arc<OwnedFd>,
    records: Records,
    lost: MappedArray,
    rate: Rate,
    /// CPU time of the thread when it began to sample.
    began_cpu_ns: u64,
    /// CPU time of the thread while no sample came.
    idle_ns: u64,
    /// CPUs that are not sampled.
    left_out: Option<String>,
    gather: gather::Gather,
}

impl Sampling {
    fn new(selected: &SampledThreads, woken: Arc<OwnedFd>) -> Result<Self, AttachError> {
        let mut open = CpuSamplesSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF object has no settings")?;
        configure(settings, selected)?;
        let choice = Choice::here(&[])?;
        let cpus = &choice.measured;
        if cpus.is_empty() {
            return Err(AttachError::Unsupported(choice.named().unwrap_or_default()));
        }
        let ring_bytes = (cpus.len() as u32).saturating_mul(RING_BYTES_OF_CPU).min(MAX_RING_BYTES).next_power_of_two();
        open.maps.cpu_samples.set_max_entries(ring_bytes.max(cpu_sample_limits::RING_BYTES.0))?;
        let mut skeleton = attach::load(open)?;
        let interrupt_ns = Period::affordable(cpus).interrupt_ns.unwrap_or(PRESUMED_INTERRUPT_NS);
        let rate = Rate::new(cpus.len(), interrupt_ns, clock::monotonic_ns());
        skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?.period_ns = rate.period_ns();
        let program = skeleton.progs.on_cpu_clock.as_fd();
        let timer = |(index, &cpu): (usize, &u32)| {
            let period_ns = of_timer(rate.period_ns(), index);
            let timer = start_timer(EVERY_THREAD, cpu as libc::c_int, period_ns)?;
            run_at(&timer, program).map(|()| timer)
        };
        // A CPU may have gone offline.
        let is_online = |timer: &std::io::Result<OwnedFd>| {
            !timer.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
        };
        let timers: std::io::Result<Vec<OwnedFd>> = cpus.iter().enumerate().map(timer).filter(is_online).collect();
        let timers = timers.map_err(|error| {
            AttachError::Unsupported(format!("running threads cannot be sampled (perf_event_open: {error})"))
        })?;
        let records = Records::new(&skeleton.maps.cpu_samples)?;
        let lost = MappedArray::new(
            skeleton.maps.lost_by_reason.as_fd(),
            lost_sample::LOST_SAMPLE_REASONS.0 as usize,
            size_of::<u64>(),
        );
        let lost = lost.context("cannot map what the programs write")?;
        // Processes may be short. Without the privilege, some of them have no names.
        let _ = priority::favour(0);
        let began_cpu_ns = clock::thread_cpu_ns();
        let gather = gather::Gather::new();
        let left_out = choice.named();
        Ok(Sampling { skeleton, timers, woken, records, lost, rate, began_cpu_ns, idle_ns: 0, left_out, gather })
    }

    /// Reads samples until they are requested, or the other end of the channel is closed.
    fn run(mut self, asked: &Receiver<Sender<anyhow::Result<Answer>>>) {
        let mut updated_ns = clock::monotonic_ns();
        let mut cpu_ns = self.began_cpu_ns;
        loop {
            match asked.try_recv() {
                // The caller may have timed out.
                Ok(answer) => return drop(answer.send(self.finish())),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            // An error that persists is reported at the end.
            if self.records.poll_with(&self.woken, POLL_INTERVAL).is_err() {
                std::thread::sleep(POLL_INTERVAL);
            }
            let has_samples = self.take_in();
            let now_cpu_ns = clock::thread_cpu_ns();
            self.idle_ns += if has_samples { 0 } else { now_cpu_ns.saturating_sub(cpu_ns) };
            cpu_ns = now_cpu_ns;
            let now_ns = clock::monotonic_ns();
            if now_ns.saturating_sub(updated_ns) >= RATE_INTERVAL_NS {
                updated_ns = now_ns;
                self.update_rate(now_ns);
            }
        }
    }

    /// Takes in what was read. Returns whether there was a sample.
    fn take_in(&mut self) -> bool {
        let Some(mut record) = self.records.next() else { return false };
        self.gather.begin();
        loop {
            self.gather.add(&record);
            match self.records.next() {
                Some(next) => record = next,
                None => break,
            }
        }
        self.gather.make_room();
        true
    }

    fn update_rate(&mut self, now_ns: u64) {
        let Some(variables) = self.skeleton.maps.bss_data.as_deref_mut() else { return };
        let own_ns = clock::thread_cpu_ns().saturating_sub(self.began_cpu_ns) + self.gather.other_cpu_ns();
        if self.rate.update(now_ns, variables.expiries, variables.spent_ns + own_ns, self.idle_ns) {
            variables.period_ns = self.rate.period_ns();
            for (index, timer) in self.timers.iter().enumerate() {
                // A timer of a CPU that is offline keeps its period.
                let _ = set_period(timer, of_timer(self.rate.period_ns(), index));
            }
        }
        self.gather.reads_processes(self.rate.may_read(now_ns));
    }

    fn finish(mut self) -> anyhow::Result<Answer> {
        // No sample comes after this.
        self.timers.clear();
        self.records.poll(Duration::ZERO)?;
        self.take_in();
        let lost = self.take_lost();
        Ok((self.gather.finish(lost.into()), self.left_out))
    }

    /// Returns the number of lost samples, by reason.
    fn take_lost(&self) -> [(&'static str, u64); 2] {
        let count = |reason: lost_sample| self.lost.u64_at(reason.0 as usize, 0).load(Relaxed);
        let (samples, stacks) = (count(lost_sample::LOST_SAMPLES), count(lost_sample::LOST_KERNEL_STACKS));
        [("samples_full", samples), ("samples_unread", stacks)]
    }
}

/// Returns the period of a timer. Timers start together; with periods that differ by up to a quarter, they soon expire
/// at different times.
fn of_timer(period_ns: u64, index: usize) -> u64 {
    // The fractions of multiples of the golden ratio are spread evenly.
    period_ns + (period_ns as f64 * 0.25 * (index as f64 * 0.618_033_988_75).fract()) as u64
}

fn configure(settings: &mut rodata, selected: &SampledThreads) -> Result<(), AttachError> {
    settings.own_namespace = pid_namespace::as_setting();
    let own_tgid = pid_namespace::kernels_own_number()? as i32;
    settings.own_tgid = own_tgid;
    settings.has_cgroups_of_v1 = cgroups::are_of_v1();
    match selected {
        SampledThreads::OfOwnChildren => settings.wanted_ancestor = own_tgid,
        SampledThreads::Of(threads) => {
            settings.wanted_tgid = threads.process.map_or(Ok(0), pid_namespace::kernels_number)? as i32;
            settings.wanted_cgroup = threads.cgroup.unwrap_or(0);
            if let Some(name) = &threads.name {
                (settings.wanted_thread_name, settings.has_wanted_thread_name) = (attach::kept_name(name), true);
            }
            if let Some(name) = &threads.process_name {
                (settings.wanted_process_name, settings.has_wanted_process_name) = (attach::kept_name(name), true);
            }
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
mod plain {
    use super::{PlainData, cpu_sample};

    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for cpu_sample {}

    /// Returns a sample as it arrives.
    #[cfg(test)]
    pub(super) fn as_bytes(sample: &cpu_sample) -> &[u8] {
        // SAFETY: the bytes are those of a live value that is made of integers.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(sample).cast(), size_of::<cpu_sample>()) }
    }
}
