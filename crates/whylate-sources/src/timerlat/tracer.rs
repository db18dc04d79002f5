// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's timerlat tracer, in instances of our own (kernel/trace/trace_osnoise.c). Its threads, or processes that
//! read its files, sleep until the next period; it samples their latencies, and stops at configured thresholds.

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;
mod readers;
mod recording;
mod samples;

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::fs::OFlags;

pub use self::recording::{Record, TraceEvent};

use self::readers::Reader;
use self::recording::Recording;
use self::samples::{Activations, Context, Rules, SampleFormat, TimedSample};
use super::tally::{TakenCounts, Tally};
use super::threads::{Policy, Stop, set_policy};
use super::{Threads, TimerlatOptions};
use crate::kernel::clock;
use crate::kernel::proc;
use crate::kernel::restore::Restore;
use crate::kernel::tracefs;
use crate::kernel::tracefs::instance::Instance;
use crate::kernel::tracefs::ring_page::Page;
use crate::source::AttachError;

/// Name of the tracer, and prefix of its threads' names.
pub(super) const TRACER: &str = "timerlat";
/// File with the offset between the activations of consecutive threads, on kernels that can align them.
const ALIGN: &str = "timerlat_align_us";
const CANNOT_ALIGN: &str =
    "this kernel's timerlat tracer cannot align its threads (measure with --backend bpf, or leave -A out)";
/// The largest page that the kernel returns at a time (`buffer_subbuf_size_kb`, since 6.8).
const LARGEST_PAGE: usize = 64 << 10;
/// Timeout of the late event of a stop: the thread may not have run yet.
const LATE_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The running tracer. Dropping it restores its settings.
pub(super) struct Tracer {
    /// Dropped first, before the files that they read: the tracer kills them when it ends.
    readers: Vec<Reader>,
    /// Open pages, which keep the tracer from being changed.
    cpus: Vec<Traced>,
    recording: Option<Recording>,
    instance: Instance,
    _settings: Restore,
    sample: SampleFormat,
    period_ns: u64,
    stop: Stop,
    policy: Policy,
    /// Whether tracing was off at the last poll without a sample that explains it.
    was_off: bool,
    pub has_user: bool,
    /// Whether other programs' threads are measured, which may pause between two activations.
    may_pause: bool,
    /// TIDs of the tracer's kernel threads, if those are measured.
    pub threads: Vec<u32>,
    hit: Option<Hit>,
    /// Samples of activations due before this do not count.
    counts_from_ns: u64,
    lost: u64,
    page: Vec<u8>,
}

/// A CPU that the tracer samples.
struct Traced {
    cpu: u32,
    tally: Tally,
    activations: Activations,
    /// Samples that are not counted yet.
    samples: VecDeque<Arrival>,
    pages: File,
}

#[derive(Clone, Copy, Debug)]
enum Arrival {
    Sample(TimedSample),
    /// Samples were lost here.
    Gap,
}

/// The activation that stopped measurement.
#[derive(Clone, Copy, Debug)]
struct Hit {
    cpu: u32,
    at_ns: u64,
    due_ns: u64,
    /// The return to user space was late: its late event, if there is one, came before.
    is_return: bool,
    noticed: Instant,
}

impl Tracer {
    pub(super) fn new(options: &TimerlatOptions, cpus: &[u32]) -> Result<Self, AttachError> {
        let directory = tracefs::find().map_err(|error| AttachError::Unsupported(format!("tracefs is {error}")))?;
        match fs::read_to_string(directory.join("available_tracers")) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(AttachError::NotPermitted),
            Ok(tracers) if tracers.split_whitespace().any(|tracer| tracer == TRACER) => {}
            _ => return Err(AttachError::Unsupported(format!("tracer {TRACER} is not in this kernel"))),
        }
        let can_align = directory.join("osnoise").join(ALIGN).exists();
        if options.aligned_ns.is_some() && !can_align {
            return Err(AttachError::Unsupported(CANNOT_ALIGN.to_owned()));
        }
        if let Some(other) = other_user(&directory) {
            return Err(AttachError::Unsupported(format!(
                "{} uses the timerlat tracer, and its settings are shared by all users: end that first",
                other.display()
            )));
        }
        let has_files = directory.join("osnoise/per_cpu/cpu0/timerlat_fd").exists();
        let threads = match options.threads {
            Threads::Any if has_files => Threads::User,
            Threads::Any => Threads::Kernel,
            Threads::User | Threads::Others if !has_files => {
                let message = "this kernel's timerlat tracer measures no threads in user space (boot Linux 6.5 or later, or use -k)";
                return Err(AttachError::Unsupported(message.to_owned()));
            }
            threads => threads,
        };
        Ok(Self::start(&directory, options, threads, cpus)?)
    }

    fn start(directory: &Path, options: &TimerlatOptions, threads: Threads, cpus: &[u32]) -> Result<Self> {
        // Dropped in reverse order of dependency if anything fails: readers, pages, instances, settings.
        let mut settings = Restore::default();
        set_up(&mut settings, &directory.join("osnoise"), options, threads, cpus)?;
        let instance = Instance::new(directory, "")?;
        instance.write("trace_clock", "mono")?;
        let sample = SampleFormat::parse(&instance.read("events/ftrace/timerlat/format").or_else(|_| {
            // Instances have no format files of ftrace's own events before 6.13.
            let path = directory.join("events/ftrace/timerlat/format");
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        })?);
        let sample = sample.context("the format of timerlat's samples is another one")?;
        let recording = options.record.as_ref().map(|record| Recording::new(directory, record)).transpose()?;
        // The tracer cannot be changed once a file is being read.
        instance.write("current_tracer", TRACER)?;
        recording.as_ref().map(Recording::start).transpose()?;
        let traced = cpus.iter().map(|&cpu| Traced::new(&instance, cpu, options)).collect::<Result<_>>()?;
        let mut tracer = Tracer {
            readers: Vec::new(),
            cpus: traced,
            recording,
            instance,
            _settings: settings,
            sample,
            period_ns: options.period_ns,
            stop: options.stop,
            policy: options.policy,
            was_off: false,
            has_user: threads != Threads::Kernel,
            may_pause: threads == Threads::Others,
            threads: Vec::new(),
            hit: None,
            counts_from_ns: u64::MAX,
            lost: 0,
            page: vec![0; LARGEST_PAGE],
        };
        match threads {
            Threads::Kernel => {
                tracer.threads = cpus.iter().map(|&cpu| kernel_thread_of(cpu)).collect::<Result<_>>()?;
            }
            Threads::Others => {}
            Threads::User | Threads::Any => {
                let file = |cpu| directory.join(format!("osnoise/per_cpu/cpu{cpu}/timerlat_fd"));
                let start = |&cpu| Reader::start(cpu, &file(cpu), options.policy);
                tracer.readers = cpus.iter().map(start).collect::<Result<_>>()?;
            }
        }
        Ok(tracer)
    }

    /// Sets the policy of the tracer's kernel threads. Call after they have run: they start with a policy of their own.
    pub(super) fn set_policy(&self) -> Result<()> {
        self.threads
            .iter()
            .try_for_each(|&tid| set_policy(tid, self.policy))
            .context("cannot give the tracer's threads their priority")
    }

    pub(super) fn cpus(&self) -> Vec<u32> {
        self.cpus.iter().map(|traced| traced.cpu).collect()
    }

    /// Reads available samples, and counts those of activations due until `until_ns`.
    pub(super) fn collect(&mut self, until_ns: u64) -> Result<()> {
        let mut page = std::mem::take(&mut self.page);
        let collected = (0..self.cpus.len()).try_for_each(|index| {
            loop {
                match self.cpus[index].pages.read(&mut page) {
                    Ok(0) => return Ok(()),
                    Ok(length) => self.take_in(index, &page[..length]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error).context("cannot read the tracer's samples"),
                }
            }
        });
        self.page = page;
        collected?;
        let hit = self.count(until_ns);
        // The kernel stops at the first threshold, but another CPU may reach one before tracing is off.
        if let (None, Some(_)) = (self.hit, hit) {
            self.hit = hit.into_iter().chain(self.count(u64::MAX)).min_by_key(|hit| hit.at_ns);
            // No more samples of activations in flight will arrive.
            for traced in &mut self.cpus {
                let caused_stop = self.hit.is_some_and(|hit| hit.cpu == traced.cpu);
                traced.activations.cut_off(caused_stop, &traced.tally);
            }
        }
        self.readers.iter_mut().try_for_each(Reader::is_alive)?;
        self.resume_after_stale_stop()
    }

    /// Returns the number of activations and periods due until then that have not arrived, per CPU: a thread is late.
    pub(super) fn overdue(&self, until_ns: u64) -> Vec<(u32, u64)> {
        let rules = self.rules(until_ns);
        let of_cpu = |traced: &Traced| match traced.samples.front() {
            _ if self.hit.is_some() || self.may_pause => 0,
            // The next sample is of an activation due later; samples are in order.
            Some(_) => 0,
            None => traced.activations.overdue(&rules),
        };
        self.cpus.iter().map(|traced| (traced.cpu, of_cpu(traced))).collect()
    }

    fn rules(&self, until_ns: u64) -> Rules {
        let (has_user, may_pause) = (self.has_user, self.may_pause);
        Rules { period_ns: self.period_ns, has_user, may_pause, from_ns: self.counts_from_ns, until_ns }
    }

    /// Resumes tracing if the kernel stopped at an activation due before counting started.
    fn resume_after_stale_stop(&mut self) -> Result<()> {
        let is_on = |instance: &Instance| Ok::<_, anyhow::Error>(instance.read("tracing_on")?.trim() == "1");
        let recording_is_on = self.recording.as_ref().map_or(Ok(true), |recording| is_on(&recording.instance))?;
        let is_off = self.hit.is_none() && !(recording_is_on && is_on(&self.instance)?);
        // The sample that explains the stop may have arrived since samples were read: act at the second poll.
        if is_off && self.was_off {
            self.start_tracing()?;
        }
        self.was_off = is_off && !self.was_off;
        Ok(())
    }

    fn start_tracing(&self) -> Result<()> {
        self.recording.as_ref().map_or(Ok(()), Recording::resume)?;
        self.instance.write("tracing_on", "1")
    }

    fn take_in(&mut self, index: usize, bytes: &[u8]) {
        let traced = &mut self.cpus[index];
        let Some(page) = Page::new(bytes) else {
            self.lost += 1;
            traced.samples.push_back(Arrival::Gap);
            return;
        };
        if page.missed > 0 {
            self.lost += page.missed;
            traced.samples.push_back(Arrival::Gap);
        }
        for record in page {
            if let Some(sample) = self.sample.read(record.data) {
                traced.samples.push_back(Arrival::Sample(TimedSample { sample, time_ns: record.time_ns }));
            }
        }
    }

    /// Counts samples of activations due until then. Returns the first one that stops measurement.
    fn count(&mut self, until_ns: u64) -> Option<Hit> {
        let (rules, stop) = (self.rules(until_ns), self.stop);
        let hits = self.cpus.iter_mut().filter_map(|traced| traced.count(&rules, stop));
        hits.min_by_key(|hit| hit.at_ns)
    }

    /// Takes the counts since the last call, per CPU.
    pub(super) fn take(&mut self) -> Vec<(u32, TakenCounts)> {
        self.cpus.iter().map(|traced| (traced.cpu, traced.tally.take(self.has_user))).collect()
    }

    /// Returns the number of samples that the kernel overwrote before they were read, since the last call.
    pub(super) fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    pub(super) fn stopped_by(&self) -> Option<u32> {
        self.hit.map(|hit| hit.cpu)
    }

    /// Returns whether the late event of the stop is not worth waiting for any longer.
    pub(super) fn is_overdue(&self) -> bool {
        self.hit.is_some_and(|hit| hit.is_return || hit.noticed.elapsed() >= LATE_EVENT_TIMEOUT)
    }

    /// Returns whether this activation stopped measurement.
    pub(super) fn is_hit(&self, cpu: u32, due_ns: u64) -> bool {
        self.hit.is_some_and(|hit| hit.cpu == cpu && hit.due_ns.abs_diff(due_ns) < self.period_ns / 2)
    }

    /// Returns whether this activation counts.
    pub(super) fn counts(&self, cpu: u32, due_ns: u64) -> bool {
        due_ns >= self.counts_from_ns && (self.is_hit(cpu, due_ns) || self.hit.is_none_or(|hit| due_ns <= hit.at_ns))
    }

    /// Resumes measurement. Returns the time since when activations count, by their due time.
    pub(super) fn resume(&mut self) -> Result<u64> {
        self.take();
        (self.hit, self.was_off) = (None, false);
        for traced in &mut self.cpus {
            traced.activations = Activations::default();
        }
        self.start_tracing()?;
        // All three samples of an activation due from now on will arrive.
        self.counts_from_ns = clock::monotonic_ns();
        Ok(self.counts_from_ns)
    }

    pub(super) fn records(&self) -> bool {
        self.recording.is_some()
    }

    /// Writes the recording as text; `false` if there is none.
    pub(super) fn save(&self, out: &mut dyn Write) -> Result<bool> {
        self.recording.as_ref().map(|recording| recording.save(out)).transpose().map(|saved| saved.is_some())
    }

    pub(super) fn histograms(&self) -> Result<Vec<(String, String)>> {
        self.recording.as_ref().map_or_else(|| Ok(Vec::new()), Recording::histograms)
    }
}

impl Traced {
    fn new(instance: &Instance, cpu: u32, options: &TimerlatOptions) -> Result<Self> {
        let path = instance.path(&format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
        let without_waiting = OFlags::NONBLOCK.bits() as i32;
        let pages = OpenOptions::new()
            .read(true)
            .custom_flags(without_waiting)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let (tally, activations) = (Tally::new(options.steps), Activations::default());
        Ok(Traced { cpu, tally, activations, samples: VecDeque::new(), pages })
    }

    fn count(&mut self, rules: &Rules, stop: Stop) -> Option<Hit> {
        self.activations.count_missed(rules, &self.tally);
        let mut first = None;
        while let Some(&arrival) = self.samples.front() {
            let is_irq = |taken: &TimedSample| taken.sample.context == Context::Irq;
            if matches!(&arrival, Arrival::Sample(taken) if is_irq(taken) && taken.due_ns() > rules.until_ns) {
                break;
            }
            self.samples.pop_front();
            let Arrival::Sample(taken) = arrival else {
                self.activations.forget();
                continue;
            };
            let counts = self.activations.add(taken, rules, &self.tally);
            let is_irq = is_irq(&taken);
            let limit_ns = if is_irq { stop.irq_ns } else { stop.thread_ns };
            // The kernel compares whole microseconds.
            let is_over = |limit_ns: u64| taken.sample.latency_ns / 1_000 >= limit_ns.div_ceil(1_000);
            if counts && first.is_none() && limit_ns.is_some_and(is_over) {
                let (at_ns, due_ns) = (taken.time_ns, taken.due_ns());
                let is_return = taken.sample.context == Context::User;
                first = Some(Hit { cpu: self.cpu, at_ns, due_ns, is_return, noticed: Instant::now() });
            }
        }
        first
    }
}

/// Sets the tracer's settings, which all its instances share.
fn set_up(
    settings: &mut Restore,
    osnoise: &Path,
    options: &TimerlatOptions,
    threads: Threads,
    cpus: &[u32],
) -> Result<()> {
    // Microseconds; 0: never.
    let us = |ns: Option<u64>| ns.map_or(0, |ns| ns.div_ceil(1_000)).to_string();
    let wanted = [
        ("stop_tracing_us", us(options.stop.irq_ns)),
        ("stop_tracing_total_us", us(options.stop.thread_ns)),
        ("print_stack", us(options.stack_over_ns.filter(|_| options.record.is_some()))),
        ("timerlat_period_us", (options.period_ns / 1_000).to_string()),
        // The kernel takes 255 characters.
        ("cpus", crate::kernel::cpus::list(cpus)),
    ];
    for (name, value) in wanted {
        settings.set(&osnoise.join(name), &value)?;
    }
    // The options file exists since 6.2; before, the workload is always kernel threads.
    let file = osnoise.join("options");
    if file.exists() {
        settings.set_flag(&file, "OSNOISE_WORKLOAD", threads == Threads::Kernel)?;
        if options.aligned_ns.is_some() {
            settings.set(&osnoise.join(ALIGN), &us(options.aligned_ns))?;
            settings.set_flag(&file, "TIMERLAT_ALIGN", true)?;
        }
    }
    Ok(())
}

/// Returns the TID of the tracer's thread on a CPU.
fn kernel_thread_of(cpu: u32) -> Result<u32> {
    let name = format!("{TRACER}/{cpu}");
    for process in fs::read_dir("/proc").context("/proc is not mounted")?.flatten() {
        let Ok(tid) = process.file_name().to_string_lossy().parse::<u32>() else { continue };
        let is_named = proc::text(process.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name);
        // A kernel thread has no executable.
        if is_named && fs::read_link(process.path().join("exe")).is_err() {
            return Ok(tid);
        }
    }
    bail!("the tracer has started no thread on CPU {cpu}")
}

/// Returns another user of the tracer: the top-level instance, or a named one.
fn other_user(directory: &Path) -> Option<PathBuf> {
    let instances = fs::read_dir(directory.join("instances")).into_iter().flatten().flatten().map(|entry| entry.path());
    let uses = |directory: &PathBuf| {
        let current = fs::read_to_string(directory.join("current_tracer")).unwrap_or_default();
        [TRACER, "osnoise"].contains(&current.trim())
    };
    std::iter::once(directory.to_owned()).chain(instances).find(uses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_threads_if_configured() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let settings =
            [("cpus", "0-1"), ("print_stack", "0"), ("stop_tracing_us", "0"), ("stop_tracing_total_us", "0")];
        for (name, value) in settings.into_iter().chain([("timerlat_period_us", "1000"), (ALIGN, "0")]) {
            fs::write(path(name), value).expect("written");
        }
        let options = "OSNOISE_WORKLOAD NO_TIMERLAT_ALIGN";
        fs::write(path("options"), options).expect("written");
        let set = |aligned_ns| {
            let mut settings = Restore::recorded_in(&path("records"));
            let options = TimerlatOptions { aligned_ns, ..TimerlatOptions::default() };
            set_up(&mut settings, directory.path(), &options, Threads::Kernel, &[0, 1]).expect("set");
            let read = |name| fs::read_to_string(path(name)).expect("read").trim().to_owned();
            (read(ALIGN), read("options"))
        };
        assert_eq!(set(None), ("0".to_owned(), options.to_owned()));
        assert_eq!(set(Some(20_000)), ("20".to_owned(), "TIMERLAT_ALIGN".to_owned()));
    }
}
