// SPDX-License-Identifier: MIT OR Apache-2.0
//! The attached source with its sampling thread, and snapshots of the collected data.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use whylate_model::snapshot::Sleeper;
use whylate_model::wait::is_for_file_lock;
use whylate_model::{ActorName, LateEvent, Series, Snapshot, Stack, WaitClass};

use super::holders::{self, Holders};
use super::named::StackNamer;
use super::sampler::{Met, SampledInterval, Sampler};
use super::skel::types::{thread_now, thread_state};
use super::walk_timer::WalkTimer;
use super::watchdog::{Beginning, Worker};
use super::{INFO, OffcpuOptions, TRACE, tracers};
use crate::kernel::attach::{Meter, PlainData};
use crate::kernel::clock;
use crate::kernel::pid_namespace;
use crate::objects::{self, FileLocks, Waiter};
use crate::source::session::Session;
use crate::source::{AttachError, Attached};

/// Maximum number of threads in uninterruptible sleep that are named.
const SLEEPERS: usize = 5;

/// The attached source, which samples on a thread of its own. Dropping it detaches the programs.
pub struct AttachedOffcpu {
    sampler: Worker<anyhow::Result<SampledInterval>>,
    namer: StackNamer,
    host: String,
    meter: Meter,
    met: Met,
    /// `None` if a CPU budget sets the rate.
    rate_hz: Option<u32>,
    backend: &'static str,
    /// Whether holders are looked up.
    has_holders: bool,
    /// Shortest wait of which the object is looked up.
    objects_over_ns: Option<u64>,
    /// Limitations of this backend on this machine.
    limitations: Option<String>,
}

/// The sampling thread, which loads the programs and walks over all threads before the source is attached.
pub(super) struct BeginningSampler(Beginning<anyhow::Result<SampledInterval>>);

impl BeginningSampler {
    pub(super) fn new(options: &OffcpuOptions, backend: &'static str) -> Result<Self, AttachError> {
        let timer = WalkTimer::new(options, clock::monotonic_ns());
        let options = options.clone();
        let beginning = Worker::begin(
            move || Sampler::new(&options, backend == TRACE),
            move |sampler, asked| if backend == TRACE { sampler.trace(asked) } else { sampler.run(asked, timer) },
        );
        beginning.map(BeginningSampler)
    }
}

impl AttachedOffcpu {
    pub(super) fn new(options: &OffcpuOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        // Registers are read as x86-64 has them (`unwind_user()`).
        let lacks_user_frames = options.user_stacks && !cfg!(target_arch = "x86_64");
        let unwind_limitation =
            lacks_user_frames.then_some("user frames are read on x86-64 only: stacks have kernel frames only");
        let holder_limitation = if options.holders { holders::recorded_owners()?.limitation() } else { None };
        let limitations: Vec<&str> = unwind_limitation.into_iter().chain(holder_limitation).collect();
        let beginning = session.take_prepared().map_or_else(|| BeginningSampler::new(options, backend), Ok);
        let sampler = beginning?.0.wait()?;
        Ok(AttachedOffcpu {
            sampler,
            namer: StackNamer::new(options.lines, session.symbols(), options.classes.clone()),
            host: session.host().to_owned(),
            meter: Meter::default(),
            met: Met::default(),
            rate_hz: options.budget_ppm.is_none().then_some(options.rate_hz),
            backend,
            has_holders: options.holders,
            objects_over_ns: options.objects_over_ns,
            limitations: (!limitations.is_empty()).then(|| limitations.join("; ")),
        })
    }

    /// Counters of the last walk before the last snapshot.
    pub fn met(&self) -> Met {
        self.met
    }

    fn blocked(&mut self, interval: &SampledInterval) -> Blocked {
        let mut stacks = self.namer.stacks(interval);
        let mut holders = Holders::new(&interval.holders, self.namer.kernel());
        let mut file_locks = None;
        let mut ages: HashMap<usize, Vec<u64>> = HashMap::new();
        let mut unseen_holders = 0;
        for (place, thread) in &interval.threads {
            ages.entry(*place).or_default().push(rounded_age_ns(interval.ended_ns.saturating_sub(thread.since_ns)));
            // With `by_thread`, a stack belongs to one thread.
            stacks[*place].waits_for = holders.chain_of(thread.tid);
            unseen_holders += u64::from(holders.is_holder_unseen(thread.tid));
            let stack = &mut stacks[*place];
            if self.has_holders && stack.waits_for.is_none() && is_for_file_lock(&stack.kernel) {
                let pid = stack.labels.get("pid").and_then(|pid| pid.parse().ok());
                let locks = file_locks.get_or_insert_with(FileLocks::read);
                stack.waits_for = pid.and_then(|pid| locks.chain_of(pid));
                unseen_holders += u64::from(stack.waits_for.is_none());
            }
        }
        let uninterruptible = uninterruptible(interval, &stacks);
        for (place, ages) in ages {
            stacks[place].age = ages.into_iter().collect();
        }
        let unread_objects = self.objects_over_ns.map_or(0, |over_ns| add_objects(interval, &mut stacks, over_ns));
        stacks.iter_mut().for_each(tracers::append_tracer);
        stacks.sort_by_key(|stack| std::cmp::Reverse(stack.weight_ns));
        Blocked { stacks, unseen_holders, unread_objects, uninterruptible }
    }
}

/// Stacks, and what their threads wait for.
struct Blocked {
    stacks: Vec<Stack>,
    /// Number of threads that wait for a holder that the walk has not seen.
    unseen_holders: u64,
    /// Number of threads with an object that was not read.
    unread_objects: u64,
    /// Threads in uninterruptible sleep.
    uninterruptible: Vec<Sleeper>,
}

/// Adds the objects of waits of at least `over_ns`, those of threads that are not idle by design first. Returns the number
/// of those that were not read.
fn add_objects(interval: &SampledInterval, stacks: &mut [Stack], over_ns: u64) -> u64 {
    let mut waits: Vec<(usize, Waiter)> = Vec::new();
    for (place, thread) in &interval.threads {
        let stack = &stacks[*place];
        if interval.ended_ns.saturating_sub(thread.since_ns) < over_ns || !may_have_object(stack) {
            continue;
        }
        let label = |name: &str| stack.labels.get(name).map(String::as_str);
        let Some(pid) = label("pid").and_then(|pid| pid.parse().ok()) else { continue };
        let Some(syscall) = label("syscall") else { continue };
        let (kernel, syscall) = (stack.kernel.clone(), syscall.to_owned());
        waits.push((*place, Waiter { pid, tid: thread.shown, switches: thread.switches, syscall, kernel }));
    }
    let is_idle = |place: usize| stacks[place].wait.as_ref().is_some_and(|wait| wait.class == WaitClass::Idle);
    waits.sort_by_key(|(place, _)| is_idle(*place));
    let (places, waiters): (Vec<usize>, Vec<Waiter>) = waits.into_iter().unzip();
    let objects = objects::read(waiters);
    for (place, object) in places.into_iter().zip(objects.found) {
        stacks[place].object = object;
    }
    objects.unread
}

/// Returns whether the system call of a thread may designate what it waits for, and no holder is known.
fn may_have_object(stack: &Stack) -> bool {
    use WaitClass::{Cpu, Memory, OnCpu, PageFault, Stopped, Throttled, Timer};
    let has_none = |class| matches!(class, Cpu | Memory | OnCpu | PageFault | Stopped | Throttled | Timer);
    stack.waits_for.is_none()
        && !stack.labels.contains_key("kernel")
        && stack.wait.as_ref().is_some_and(|wait| !has_none(wait.class))
}

/// Returns the threads in uninterruptible sleep for longer than the limit, the longest first.
fn uninterruptible(interval: &SampledInterval, stacks: &[Stack]) -> Vec<Sleeper> {
    let is_of = |(_, thread): &&(usize, thread_now)| thread.state == thread_state::STATE_UNINTERRUPTIBLE.0;
    let asleep_ns = |thread: &thread_now| rounded_age_ns(interval.ended_ns.saturating_sub(thread.since_ns));
    let mut all: Vec<&(usize, thread_now)> = interval.threads.iter().filter(is_of).collect();
    all.retain(|(_, thread)| asleep_ns(thread) >= INFO.card.judged.late_from_ns);
    all.sort_by_key(|(_, thread)| (thread.since_ns, thread.shown));
    let sleeper = |(place, thread): &(usize, thread_now)| {
        let stack = &stacks[*place];
        let label = |name: &str| stack.labels.get(name).map_or("", String::as_str);
        let who = ActorName::thread(label("thread"), thread.shown);
        let process = format!("{}:{}", label("process"), label("pid"));
        Sleeper {
            process: (who != process).then_some(process),
            who,
            asleep_ns: asleep_ns(thread),
            waits_in: stack.kernel.first().cloned(),
            class: stack.wait.as_ref().map_or(WaitClass::Other, |wait| wait.class),
        }
    };
    all.into_iter().take(SLEEPERS).map(sleeper).collect()
}

/// Rounds ages of a second or more down to whole milliseconds: in a recording of idle threads the further digits would
/// take a sixth of all bytes.
fn rounded_age_ns(age_ns: u64) -> u64 {
    if age_ns < 1_000_000_000 { age_ns } else { age_ns - age_ns % 1_000_000 }
}

impl Attached for AttachedOffcpu {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.namer.kernel().list_code();
        let interval = self.sampler.ask()??;
        let start = clock::unix_ns_of(interval.began_ns);
        let mut snapshot = Snapshot::new(INFO.card.name, self.backend, &self.host, start);
        snapshot.duration_ns = interval.ended_ns - interval.began_ns;
        snapshot.pid_namespace = pid_namespace::own();
        snapshot.ended_ns = interval.ended_ns;
        let Blocked { stacks, unseen_holders, unread_objects, uninterruptible } = self.blocked(&interval);
        (snapshot.stacks, snapshot.uninterruptible) = (stacks, uninterruptible);
        let unread: u64 = interval.memory.values().map(|process| process.take_unread()).sum();
        for &(reason, count) in &interval.lost {
            *snapshot.lost.entry(reason.to_owned()).or_default() += count;
        }
        *snapshot.lost.entry("unread_files".to_owned()).or_default() += unread;
        snapshot.lost.insert("holders_unmet".to_owned(), unseen_holders);
        snapshot.lost.insert("objects_unread".to_owned(), unread_objects);
        snapshot.lost.insert("names_full".to_owned(), self.namer.take_cut());
        self.meter.report(interval.statistics, &mut snapshot);
        self.met = interval.met;
        let rate_hz = match self.rate_hz {
            _ if self.backend == TRACE => 0.0,
            Some(rate_hz) => f64::from(rate_hz),
            None => (interval.walks as f64 * 1e10 / snapshot.duration_ns.max(1) as f64).round() / 10.0,
        };
        let values = [
            ("walks", interval.walks as f64),
            ("rate_hz", rate_hz),
            ("threads", interval.met.threads as f64),
            ("threads_changed", interval.met.changed as f64),
            ("walk_ns", interval.met.took_ns as f64),
            ("walk_cpu_ns", interval.met.cpu_ns as f64),
        ];
        snapshot.series =
            vec![Series { values: values.map(|(name, value)| (name.to_owned(), value)).into(), ..Series::default() }];
        if let Some(disks) = interval.disks {
            snapshot.series[0].values.insert("busy_disks".to_owned(), disks.len() as f64);
            snapshot.series.extend(disks);
        }
        Ok(snapshot)
    }

    fn limitations(&self) -> Option<&str> {
        self.limitations.as_deref()
    }

    fn drain_late(&mut self, wait: Duration, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        // This source reports no late events.
        thread::sleep(wait);
        Ok(())
    }
}

#[allow(unsafe_code)]
mod plain {
    use super::super::skel::types::{place_key, process_value, stack_value, wait_key};
    use super::{PlainData, thread_now};

    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for thread_now {}
    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for place_key {}
    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for wait_key {}
    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for process_value {}
    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for stack_value {}
    // SAFETY: an integer.
    unsafe impl PlainData for u32 {}
}
