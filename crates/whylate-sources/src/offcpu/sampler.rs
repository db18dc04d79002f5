// SPDX-License-Identifier: MIT OR Apache-2.0
//! Walks over the threads, done by a thread that owns the BPF programs.

mod sampled_interval;

use std::mem::offset_of;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use libbpf_rs::skel::SkelBuilder;
use libbpf_rs::{Link, MapCore};

pub(super) use sampled_interval::SampledInterval;

use super::holders;
use super::places::{Sum, Tables};
use super::process::Processes;
use super::rules::Rules;
use super::skel::types::{bss, lost_reason, offcpu_limits, place_sum, rodata, unknown_frame};
use super::skel::{OffcpuSkel, OffcpuSkelBuilder};
use super::walk_timer::WalkTimer;
use super::{CallGraph, KernelThreads, OffcpuOptions};
use crate::kernel::attach;
use crate::kernel::cgroups;
use crate::kernel::clock;
use crate::kernel::mapped::MappedArray;
use crate::kernel::percpu::PreemptCount;
use crate::kernel::pid_namespace;
use crate::kernel::symbols;
use crate::kernel::thread_iterator::iterate;
use crate::source::AttachError;

/// Every reason for a lost sample, with its name in the output. The enum in `settings.bpf.h` explains them.
pub(super) const LOST: [(lost_reason, &str); 10] = [
    (lost_reason::LOST_TORN, "torn"),
    (lost_reason::LOST_THREADS, "threads_full"),
    (lost_reason::LOST_PROCESSES, "processes_full"),
    (lost_reason::LOST_STACKS, "stacks_full"),
    (lost_reason::LOST_PLACES, "places_full"),
    (lost_reason::LOST_RULES, "rules_full"),
    (lost_reason::LOST_UNSEEN, "unseen"),
    (lost_reason::LOST_WAKERS, "unseen_wakers"),
    (lost_reason::LOST_UNREAD, "unread"),
    (lost_reason::LOST_HOLDERS, "holders_full"),
];

/// Kernel functions on a stack only because a BPF program captures it at a switch or wakeup, in the order of their
/// calls.
const OWN_CODE: [&str; 6] = [
    "bpf_trace_run4",
    "__bpf_trace_sched_switch",
    "__traceiter_sched_switch",
    "bpf_trace_run1",
    "__bpf_trace_sched_wakeup_template",
    "__traceiter_sched_waking",
];

/// Trampolines that replace return addresses: of the function graph tracer, rethooks (since 6.0 on x86) and kretprobes.
const REPLACED_RETURNS: [&str; 3] = ["return_to_handler", "arch_rethook_trampoline", "__kretprobe_trampoline"];

/// The function that the entry code calls for a system call, at the outer end of a kernel stack.
const SYSTEM_CALL: [&str; 1] = ["do_syscall_64"];

/// Poll interval for frames without an unwind rule when switches are traced.
const QUESTION_POLL: Duration = Duration::from_millis(20);

/// Number of rounds of a walk after which a stack is captured as far as its rules are known.
const ROUNDS: u32 = 6;
/// Additional rounds, each after a pause, for threads with unresponsive memory: often its mappings are only being
/// changed.
const EXTRA_ROUNDS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(1);
/// Numbers of threads up to which the tables of places, and of rules, are smaller.
const FEW_THREADS: u32 = 4_096;
const FEWEST_THREADS: u32 = 1_024;

/// Counters of a walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met {
    /// Threads visited.
    pub threads: u64,
    /// Threads with stacks that were captured.
    pub changed: u64,
    /// Wall time of the walk, in ns.
    pub took_ns: u64,
    /// CPU time of the walk, in ns.
    pub cpu_ns: u64,
}

pub(super) struct Sampler {
    skeleton: OffcpuSkel<'static>,
    walk: Link,
    report: Link,
    /// Iterator over lock holders, if they are wanted.
    holders: Option<Link>,
    /// Tracing programs, if switches are traced.
    switches: Vec<Link>,
    records_wakers: bool,
    /// Number of answered questions of this round.
    answered: u32,
    /// Number of the current round of questions.
    round: u32,
    rules: Rules,
    unknown: MappedArray,
    sums: MappedArray,
    lost: MappedArray,
    processes: Processes,
    tables: Tables,
    /// Sums at the end of the last snapshot interval.
    reported: Vec<Sum>,
    reported_lost: [u64; LOST.len()],
    lost_rules: u64,
    /// Value of the process counter when the tables were last emptied.
    processes_before: u32,
    /// Whether emptying the tables failed halfway, so that they mix two generations.
    is_half_emptied: bool,
    since_ns: u64,
    walk_began_ns: u64,
    walks: u64,
    met: Met,
    has_proc: bool,
}

impl Sampler {
    /// Loads the programs, and does the first walk: earlier time is not counted.
    pub(super) fn new(options: &OffcpuOptions, traces: bool) -> Result<Self, AttachError> {
        let mut open = OffcpuSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF object has no settings")?;
        configure(settings, options)?;
        settings.traces = traces;
        settings.records_wakers = options.wakers;
        open.progs.on_sched_switch.set_autoload(traces);
        open.progs.on_task_newtask.set_autoload(traces);
        open.progs.on_sched_waking.set_autoload(options.wakers);
        open.progs.on_each_thread_tell_holder.set_autoload(options.holders);
        if options.holders {
            holders::configure(settings)?;
        } else {
            open.maps.wait_by_thread.set_autocreate(false)?;
        }
        if traces {
            let _read_once = symbols::ReadOnce::begin();
            for (index, code) in symbols::code_of(OWN_CODE).into_iter().flatten().enumerate() {
                (settings.own_code_begin[index], settings.own_code_end[index]) = (code.start, code.end);
            }
            for (index, code) in symbols::code_of(REPLACED_RETURNS).into_iter().flatten().enumerate() {
                (settings.replaced_return_begin[index], settings.replaced_return_end[index]) = (code.start, code.end);
            }
            if let [Some(code)] = symbols::code_of(SYSTEM_CALL) {
                (settings.system_call_begin, settings.system_call_end) = (code.start, code.end);
            }
        }
        if options.wakers {
            let count = PreemptCount::here();
            if let Some(limitation) = count.limitation() {
                return Err(AttachError::Unsupported(format!("wakers are not known: {limitation}")));
            }
            settings.preempt_count_distance = count.distance();
        }
        let threads = threads();
        let records = records_for(if traces { 0 } else { threads });
        settings.records_mask = records - 1;
        open.maps.record_by_slot.set_max_entries(records)?;
        let places = places_for(threads);
        settings.most_places = places;
        open.maps.place_by_key.set_max_entries(places)?;
        open.maps.place_by_wait.set_max_entries(if options.wakers { places } else { 1 })?;
        open.maps.sum_by_place.set_max_entries(places)?;
        let rules = rules_for(threads);
        settings.rule_slots = rules;
        open.maps.rule_by_slot.set_max_entries(rules)?;
        // 400 KB per CPU, used by tracing programs only.
        open.maps.kernel_stack_by_seen.set_autocreate(traces)?;
        open.maps.user_stack_by_seen.set_autocreate(traces)?;
        open.maps.place_by_seen.set_autocreate(traces)?;
        open.maps.stack_copy_of_cpu.set_autocreate(traces)?;
        open.maps.scratch_of_cpu.set_autocreate(traces)?;
        let mut skeleton = attach::load(open)?;
        let began_ns = clock::monotonic_ns();
        skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?.began_ns = began_ns;
        let map = |map: &libbpf_rs::MapMut<'_>, entries: usize, bytes: usize| {
            use std::os::fd::AsFd;
            MappedArray::new(map.as_fd(), entries, bytes).context("cannot map what the programs write")
        };
        let maps = &skeleton.maps;
        let mut sampler = Sampler {
            walk: skeleton.progs.on_each_thread.attach()?,
            report: skeleton.progs.on_each_thread_tell.attach()?,
            holders: options.holders.then(|| skeleton.progs.on_each_thread_tell_holder.attach()).transpose()?,
            switches: Vec::new(),
            records_wakers: options.wakers,
            answered: 0,
            round: 0,
            rules: Rules::new(map(&maps.rule_by_slot, rules as usize, 24)?),
            unknown: map(&maps.unknown_frames, offcpu_limits::UNKNOWN_FRAMES.0 as usize, size_of::<unknown_frame>())?,
            sums: map(&maps.sum_by_place, places as usize, size_of::<place_sum>())?,
            lost: map(&maps.lost_by_reason, LOST.len(), size_of::<u64>())?,
            processes: Processes::new(options.call_graph, options.lines),
            tables: Tables::default(),
            reported: Vec::new(),
            reported_lost: [0; LOST.len()],
            lost_rules: 0,
            processes_before: 0,
            is_half_emptied: false,
            since_ns: began_ns,
            walk_began_ns: 0,
            walks: 0,
            met: Met::default(),
            has_proc: pid_namespace::has_proc(),
            skeleton,
        };
        // The first walk has the most rules to find, and takes longest. Snapshot intervals begin and end with the start
        // of a walk, so that each thread is visited after the same part of a walk at both ends.
        sampler.walk()?;
        if traces {
            // Switches are counted from now on; the next walk accounts for those since the first one.
            let programs = &sampler.skeleton.progs;
            sampler.switches = vec![programs.on_task_newtask.attach()?, programs.on_sched_switch.attach()?];
            if options.wakers {
                sampler.switches.push(programs.on_sched_waking.attach()?);
            }
            sampler.variables()?.is_tracing = true;
            std::thread::sleep(QUESTION_POLL);
            sampler.answer();
        }
        sampler.since_ns = clock::monotonic_ns();
        sampler.walk()?;
        sampler.reported = sampler.sums();
        sampler.reported_lost = sampler.lost_counts();
        sampler.walks = 0;
        Ok(sampler)
    }

    fn variables(&mut self) -> anyhow::Result<&mut bss> {
        self.skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")
    }

    /// Finds unwind rules for frames that have none.
    fn answer(&mut self) {
        // The upper half is the round's number.
        let asked = self.skeleton.maps.bss_data.as_deref().map_or(0, |variables| variables.questions as u32);
        while self.answered < asked.min(offcpu_limits::UNKNOWN_FRAMES.0) {
            let index = self.answered as usize;
            let asked_in = self.unknown.u32_at(index, offset_of!(unknown_frame, asked_in)).load(Acquire);
            if asked_in != self.round.wrapping_add(1) {
                // A CPU is still writing it.
                break;
            }
            let unknown = self.unknown_frame(index);
            self.processes.find_rules(&unknown, &self.rules);
            self.answered += 1;
        }
        if asked > offcpu_limits::UNKNOWN_FRAMES.0 / 2 {
            self.start_questions();
            // Request those again for which there was no room, and any that arrived in between.
            self.rules.ask_again();
        }
    }

    /// Requests rules for code that could not be read again, if that is due.
    fn retry_code(&mut self) -> bool {
        let is_due = self.processes.is_retry_due();
        if is_due {
            self.rules.retry_failed();
        }
        is_due
    }

    fn start_questions(&mut self) {
        // A question that a CPU still writes for the last round has that round's number.
        self.answered = 0;
        self.round = self.round.wrapping_add(1);
        let round = self.round;
        if let Some(variables) = self.skeleton.maps.bss_data.as_deref_mut() {
            variables.questions = u64::from(round) << 32;
        }
    }

    /// Visits every thread once, and again those with frames for which user space has to find a rule.
    pub(super) fn walk(&mut self) -> anyhow::Result<()> {
        let (began, began_cpu_ns) = (Instant::now(), clock::thread_cpu_ns());
        self.processes.begin_walk();
        let retries_code = self.retry_code();
        let variables = self.skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?;
        variables.is_calibrated = false;
        variables.retries_code = retries_code;
        (variables.last_walk_ns, self.walk_began_ns) = (self.walk_began_ns, clock::monotonic_ns());
        variables.threads_visited = 0;
        variables.threads_changed = 0;
        let mut unanswered = 0;
        for round in 0..ROUNDS + EXTRA_ROUNDS {
            if round >= ROUNDS {
                std::thread::sleep(PAUSE);
            }
            let traces = !self.switches.is_empty();
            let variables = self.variables()?;
            variables.walk_round = round;
            variables.is_last_round = round + 1 >= ROUNDS && unanswered == 0 || round + 1 == ROUNDS + EXTRA_ROUNDS;
            let is_last = variables.is_last_round;
            (variables.unresolved, variables.unanswered) = (0, 0);
            // If switches are traced, questions arrive at any time.
            if !traces {
                self.start_questions();
            }
            iterate(&self.walk, |_| {})?;
            self.answer();
            let variables = self.variables()?;
            unanswered = variables.unanswered;
            if variables.unresolved == 0 || is_last {
                break;
            }
        }
        let lost_rules = self.lost.u64_at(lost_reason::LOST_RULES.0 as usize, 0).load(Relaxed);
        if lost_rules > self.lost_rules || self.rules.is_half_full() {
            // Most rules are of exited processes.
            self.rules.clear();
            self.lost_rules = lost_rules;
        }
        let variables = self.skeleton.maps.bss_data.as_deref().context("the BPF object has no variables")?;
        self.met = Met {
            threads: variables.threads_visited,
            changed: variables.threads_changed,
            took_ns: began.elapsed().as_nanos() as u64,
            cpu_ns: clock::thread_cpu_ns() - began_cpu_ns,
        };
        self.walks += 1;
        Ok(())
    }

    fn unknown_frame(&self, index: usize) -> unknown_frame {
        let long = |offset| self.unknown.u64_at(index, offset).load(Relaxed);
        let int = |offset| self.unknown.u32_at(index, offset).load(Relaxed);
        // In a /proc of another PID namespace, this PID is that of another process.
        let number = |offset| if self.has_proc { int(offset) } else { 0 };
        unknown_frame {
            ip: long(offset_of!(unknown_frame, ip)),
            sp: long(offset_of!(unknown_frame, sp)),
            bp: long(offset_of!(unknown_frame, bp)),
            process: int(offset_of!(unknown_frame, process)),
            tgid: number(offset_of!(unknown_frame, tgid)),
            tid: number(offset_of!(unknown_frame, tid)),
            innermost: int(offset_of!(unknown_frame, innermost)),
            ..unknown_frame::default()
        }
    }

    fn places_in_use(&self) -> usize {
        self.skeleton.maps.bss_data.as_deref().map_or(0, |variables| variables.places as usize)
    }

    fn sums(&self) -> Vec<Sum> {
        (0..self.places_in_use().min(self.sums.entries()))
            .map(|place| Sum {
                ns: self.sums.u64_at(place, offset_of!(place_sum, ns)).load(Relaxed),
                samples: self.sums.u64_at(place, offset_of!(place_sum, samples)).load(Relaxed),
                waits: self.sums.u64_at(place, offset_of!(place_sum, waits)).load(Relaxed),
            })
            .collect()
    }

    fn lost_counts(&self) -> [u64; LOST.len()] {
        std::array::from_fn(|index| self.lost.u64_at(index, 0).load(Relaxed))
    }

    fn needs_room(&mut self) -> anyhow::Result<bool> {
        let (before, is_half_emptied, places) = (self.processes_before, self.is_half_emptied, self.sums.entries());
        let variables = self.variables()?;
        Ok(is_half_emptied
            || variables.places as usize >= places / 2
            || variables.stacks >= offcpu_limits::STACKS.0 / 2
            || variables.processes - before >= offcpu_limits::PROCESSES.0 / 2)
    }

    /// Empties the tables while switches are not counted. Then every thread is visited anew.
    fn make_room(&mut self) -> anyhow::Result<()> {
        let emptied = self.empty();
        if self.switches.is_empty() {
            return emptied;
        }
        // Before switches count again, every thread needs a place; the second walk accounts for switches in between.
        let (walks, met) = (self.walks, self.met);
        let walked = self.walk();
        self.variables()?.is_tracing = true;
        let walked = walked.and(self.walk());
        (self.walks, self.met) = (walks, met);
        emptied.and(walked)
    }

    fn empty(&mut self) -> anyhow::Result<()> {
        let variables = self.skeleton.maps.bss_data.as_deref_mut().context("the BPF object has no variables")?;
        self.processes_before = variables.processes;
        variables.generation += 1;
        (variables.places, variables.stacks) = (0, 0);
        self.tables = Tables::default();
        self.is_half_emptied = true;
        let maps = &self.skeleton.maps;
        for key in maps.place_by_key.keys().collect::<Vec<_>>() {
            maps.place_by_key.delete(&key)?;
        }
        for key in maps.place_by_wait.keys().collect::<Vec<_>>() {
            maps.place_by_wait.delete(&key)?;
        }
        for key in maps.stack_by_hash.keys().collect::<Vec<_>>() {
            maps.stack_by_hash.delete(&key)?;
        }
        for key in maps.process_by_key.keys().collect::<Vec<_>>() {
            maps.process_by_key.delete(&key)?;
        }
        // Both are keyed by process IDs, which are never reused.
        self.processes.clear();
        self.rules.clear();
        for place in 0..self.sums.entries() {
            for offset in [offset_of!(place_sum, ns), offset_of!(place_sum, samples), offset_of!(place_sum, waits)] {
                self.sums.u64_at(place, offset).store(0, Relaxed);
            }
            self.sums.u32_at(place, offset_of!(place_sum, ready_place)).store(0, Relaxed);
        }
        self.reported.clear();
        self.is_half_emptied = false;
        Ok(())
    }

    /// Answers questions of the tracing programs until the channel for snapshot requests is closed.
    pub(super) fn trace(mut self, asked: &Receiver<Sender<anyhow::Result<SampledInterval>>>) {
        loop {
            match asked.recv_timeout(QUESTION_POLL) {
                Ok(answer) => drop(answer.send(self.collect())),
                Err(RecvTimeoutError::Timeout) => {
                    self.processes.begin_walk();
                    self.retry_code();
                    self.answer();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Walks at jittered intervals until the channel for snapshot requests is closed.
    pub(super) fn run(mut self, asked: &Receiver<Sender<anyhow::Result<SampledInterval>>>, mut timer: WalkTimer) {
        timer.add_cost(self.met.cpu_ns);
        let mut due = Instant::now() + timer.interval();
        loop {
            match asked.recv_timeout(due.saturating_duration_since(Instant::now())) {
                // The caller may have timed out.
                Ok(answer) => drop(answer.send(self.collect())),
                Err(RecvTimeoutError::Timeout) => {
                    // An error that persists also fails the walk of the next snapshot, which reports it.
                    let _ = self.walk();
                    timer.add_cost(self.met.cpu_ns);
                    // At most half a CPU. Late walks are not made up for, as time is measured, not counted in samples.
                    let earliest = Instant::now() + Duration::from_nanos(self.met.took_ns);
                    let interval = timer.interval();
                    due = if due + timer.period() < earliest {
                        earliest + interval
                    } else {
                        (due + interval).max(earliest)
                    };
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Returns the number of threads of the machine; 0 if unknown.
fn threads() -> u32 {
    std::fs::read_to_string("/proc/loadavg").ok().and_then(|load| super::choice::threads_of(&load)).unwrap_or(0) as u32
}

/// Returns the number of record slots: four per thread, as threads that share a slot cost more to find.
fn records_for(threads: u32) -> u32 {
    let (min, max) = (offcpu_limits::MIN_RECORDS.0, offcpu_limits::MAX_RECORDS.0);
    threads.saturating_mul(4).clamp(min, max).next_power_of_two()
}

/// Returns the number of places: each thread has several, and a walk finds new ones.
fn places_for(threads: u32) -> u32 {
    if threads <= FEWEST_THREADS {
        offcpu_limits::FEWEST_PLACES.0
    } else if threads <= FEW_THREADS {
        offcpu_limits::FEW_PLACES.0
    } else {
        offcpu_limits::PLACES.0
    }
}

/// Returns the number of slots for unwind rules, of which each process has its own.
fn rules_for(threads: u32) -> u32 {
    if threads <= FEWEST_THREADS { offcpu_limits::FEWEST_RULES.0 } else { offcpu_limits::RULES.0 }
}

fn configure(settings: &mut rodata, options: &OffcpuOptions) -> Result<(), AttachError> {
    settings.by_frame_pointers = options.call_graph == CallGraph::FramePointers;
    settings.own_namespace = pid_namespace::as_setting();
    settings.own_tgid = pid_namespace::kernels_own_number()? as i32;
    settings.wanted_tgid = options.threads.process.map_or(Ok(0), pid_namespace::kernels_number)? as i32;
    settings.has_cgroups_of_v1 = cgroups::are_of_v1();
    settings.wanted_cgroup = options.threads.cgroup.unwrap_or(0);
    if let Some(name) = &options.threads.name {
        (settings.wanted_thread_name, settings.has_wanted_thread_name) = (attach::kept_name(name), true);
    }
    if let Some(name) = &options.threads.process_name {
        (settings.wanted_process_name, settings.has_wanted_process_name) = (attach::kept_name(name), true);
    }
    settings.wanted_states = super::state::mask(&options.states)?;
    settings.take_kernel_threads = options.kernel_threads != KernelThreads::No;
    settings.take_user_threads = options.kernel_threads != KernelThreads::Only;
    settings.read_user_stacks = options.user_stacks;
    settings.by_thread = options.by_thread;
    settings.max_depth = options.max_depth.clamp(1, offcpu_limits::MAX_FRAMES.0);
    Ok(())
}
