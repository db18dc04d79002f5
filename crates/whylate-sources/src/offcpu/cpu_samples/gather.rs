// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples as they arrive: unwound at once, named when many stacks are pending and at the end, and kept in bounded
//! memory.

use std::collections::{BTreeSet, HashMap};
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use whylate_model::name::cut;
use whylate_model::work::{CpuSample, CpuSamples, RunningStack};

use super::skel::types::{cpu_sample, user_code};
use crate::kernel::attach::read_plain;
use crate::kernel::pid_namespace;
use crate::kernel::priority;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::syscalls;
use crate::offcpu::names::{EXITED, FrameNames, UNREADABLE, UNWOUND_PARTLY};
use crate::offcpu::process::{ExecutedProgram, Processes};
use crate::offcpu::rules::Rule;
use crate::offcpu::skel::types::unknown_frame;
use crate::offcpu::stack::plain;

/// Number of samples, and of distinct stacks, from which a random half of the samples is dropped, and the others count
/// for two.
const MAX_SAMPLES: usize = 1 << 18;
const MAX_STACKS: usize = 1 << 14;
/// Minimum time between two budgets for reading files.
const BETWEEN_BUDGETS: Duration = Duration::from_millis(200);
/// If there is no more room for files, frames are named after this time: files used later are not evicted.
const BEFORE_EVICTION: Duration = Duration::from_secs(2);
/// Number of pending stacks, and of processes, from which their frames are named and the processes forgotten.
const MAX_PENDING: usize = 4_096;
const MAX_PROCESSES: usize = 2_048;
/// CPU time for reading symbols at once during the measurement, after which no other file is read. Names of files that
/// were not read are missing, and counted.
const MAX_NAMING_NS: u64 = 400_000_000;
/// Maximum number of rules of instructions.
const MAX_RULES: usize = 1 << 17;
/// Maximum length of a name, and of all names.
const MAX_NAME: usize = 256;
const MAX_NAMES_BYTES: usize = 16 << 20;
/// Stands for the user frames of a process that was not read.
const NOT_READ: &str = "[not read]";
/// Stands for names that found no room.
const NO_ROOM: &str = "[no room for the name]";

/// A stack, by the addresses of kernel functions and the numbers of the names of user functions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NumberedStack {
    syscall: i32,
    kernel: Vec<u64>,
    user: Vec<u32>,
}

/// A stack with user frames that have no names yet, and its sample.
struct PendingStack {
    sample: usize,
    process: u32,
    syscall: i32,
    kernel: Vec<u64>,
    user: Vec<u64>,
    /// Shown in place of the frames that are missing.
    end: Option<&'static str>,
}

/// Number of samples that name less than they could, by reason.
#[derive(Debug, Default)]
struct Lost {
    /// Names for which there was no room.
    names_full: u64,
    /// Files of which not all names could be read.
    unread_files: u64,
    /// Samples of processes that were not read, as reading had taken too long already.
    over_budget: u64,
    /// User code of processes that exited, or executed another program, before their mappings were read.
    exited: u64,
    /// Stacks without their outer frames.
    unwound_partly: u64,
}

impl Lost {
    /// Returns the numbers with their reasons.
    fn take_lost(self) -> [(&'static str, u64); 5] {
        [
            ("unread_files", self.unread_files),
            ("names_full", self.names_full),
            ("samples_over_budget", self.over_budget),
            ("exited", self.exited),
            ("unwound_partly", self.unwound_partly),
        ]
    }
}

/// Unwinds and collects samples.
pub(super) struct Gather {
    processes: Processes,
    rules: HashMap<(u32, u64), Rule>,
    /// Numbers of processes, by start time, PID and number of executed programs.
    ids: HashMap<(u64, u32, u32), u32>,
    next_id: u32,
    names: FrameNames,
    numbers: HashMap<String, u32>,
    names_bytes: usize,
    lost: Lost,
    stacks: HashMap<NumberedStack, u32>,
    samples: Vec<CpuSample>,
    pending: Vec<PendingStack>,
    /// Number of times that half of the samples was dropped.
    halvings: u32,
    /// Time of the last budget for reading files.
    budgeted: Option<Instant>,
    /// Time at which frames were last named.
    named: Instant,
    reads_processes: bool,
    has_proc: bool,
}

/// The collected samples. Kernel functions are named where they are used.
pub(super) struct Gathered {
    samples: Vec<CpuSample>,
    stacks: Vec<NumberedStack>,
    names: Vec<Arc<str>>,
    pub(super) lost: Vec<(&'static str, u64)>,
}

impl Gather {
    pub(super) fn new() -> Self {
        Gather {
            processes: Processes::of_samples(),
            rules: HashMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            names: FrameNames::strict(),
            numbers: HashMap::new(),
            names_bytes: 0,
            lost: Lost::default(),
            stacks: HashMap::new(),
            samples: Vec::new(),
            pending: Vec::new(),
            halvings: 0,
            budgeted: None,
            named: Instant::now(),
            reads_processes: true,
            has_proc: pid_namespace::has_proc(),
        }
    }

    /// Returns the CPU time of the thread that reads lists of mappings.
    pub(super) fn other_cpu_ns(&self) -> u64 {
        self.processes.reader_cpu.as_nanos() as u64
    }

    /// Begins to take in what has arrived.
    pub(super) fn begin(&mut self) {
        let now = Instant::now();
        if self.budgeted.is_some_and(|before| now - before < BETWEEN_BUDGETS) {
            self.processes.look_again();
        } else {
            self.budgeted = Some(now);
            self.processes.begin_walk();
        }
    }

    /// Sets whether processes are read that were not seen before.
    pub(super) fn reads_processes(&mut self, reads_processes: bool) {
        self.reads_processes = reads_processes;
    }

    /// Takes in a sample.
    pub(super) fn add(&mut self, record: &[u8]) {
        let Some(sample) = read_plain::<cpu_sample>(record) else { return };
        // As many as are kept of the earlier ones.
        if !is_kept(sample.tid, sample.at_ns, self.halvings) {
            return;
        }
        let copy = record.get(size_of::<cpu_sample>()..).unwrap_or_default();
        let is_read = self.reads_processes || self.ids.contains_key(&(sample.started_ns, sample.tgid, sample.execs));
        let (mut process, mut user, mut end) = (0, Vec::new(), Some(UNREADABLE));
        // During execve(2), the registers are those of the previous program, and its memory is gone.
        let executes = matches!(sample.syscall.into(), libc::SYS_execve | libc::SYS_execveat);
        if executes || sample.user_code == user_code::NO_USER_CODE {
            end = None;
        } else if !is_read {
            (end, self.lost.over_budget) = (Some(NOT_READ), self.lost.over_budget + 1);
        } else if sample.user_code == user_code::UNWINDABLE_USER_CODE {
            process = self.process_of(&sample);
            let tgid = if self.has_proc { sample.tgid } else { 0 };
            let (ip, sp, bp) = (sample.ip, sample.sp, sample.bp);
            let of = unknown_frame { ip, sp, bp, process, tgid, ..unknown_frame::default() };
            let cpu_sample { end_code, start_stack, arg_start, .. } = sample;
            let program = ExecutedProgram { end_code, start_stack, arg_start };
            let word = |at: u64| word_at(copy, sp & !7, at);
            let (frames, is_whole) = self.processes.unwind(&of, program, &mut self.rules, word);
            (user, end) = (frames, (!is_whole).then_some(UNWOUND_PARTLY));
        }
        let kernel = sample.kernel.iter().copied().take(sample.kernel_frames as usize).take_while(|at| *at != 0);
        let kernel = kernel.collect();
        let (sample_index, syscall) = (self.samples.len(), sample.syscall);
        self.pending.push(PendingStack { sample: sample_index, process, syscall, kernel, user, end });
        let ns = sample.ns << self.halvings;
        self.samples.push(CpuSample { tid: sample.tid, at_ns: sample.at_ns, ns, stack: 0 });
    }

    fn process_of(&mut self, sample: &cpu_sample) -> u32 {
        let next = &mut self.next_id;
        *self.ids.entry((sample.started_ns, sample.tgid, sample.execs)).or_insert_with(|| {
            *next += 1;
            *next
        })
    }

    /// Bounds the memory.
    pub(super) fn make_room(&mut self) {
        if self.rules.len() >= MAX_RULES {
            self.rules.clear();
        }
        let is_file_at_risk = self.processes.is_nearly_full() && self.named.elapsed() >= BEFORE_EVICTION;
        if self.pending.len() >= MAX_PENDING || self.ids.len() >= MAX_PROCESSES || is_file_at_risk {
            self.name_at_normal_priority();
            if self.ids.len() >= MAX_PROCESSES {
                self.processes.clear();
                self.ids.clear();
                self.rules.clear();
            }
        }
        if self.samples.len() >= MAX_SAMPLES {
            self.name_at_normal_priority();
        }
        while self.samples.len() >= MAX_SAMPLES || self.stacks.len() >= MAX_STACKS && self.pending.is_empty() {
            self.halve();
        }
    }

    /// Drops half of the samples, and the stacks that no other sample has.
    fn halve(&mut self) {
        self.halvings += 1;
        let halvings = self.halvings;
        self.samples.retain(|sample| is_kept(sample.tid, sample.at_ns, halvings));
        let mut old: HashMap<u32, NumberedStack> =
            take(&mut self.stacks).into_iter().map(|(stack, at)| (at, stack)).collect();
        let mut renumbered: HashMap<u32, u32> = HashMap::new();
        for sample in &mut self.samples {
            sample.ns *= 2;
            let next = renumbered.len() as u32;
            sample.stack = *renumbered.entry(sample.stack).or_insert(next);
        }
        for (before, after) in renumbered {
            if let Some(stack) = old.remove(&before) {
                self.stacks.insert(stack, after);
            }
        }
    }

    /// Names frames during the measurement: this may take long, and the program has a right to its CPUs.
    fn name_at_normal_priority(&mut self) {
        priority::favour_no_more();
        self.name(MAX_NAMING_NS);
        let _ = priority::favour(0);
    }

    /// Names the frames of pending stacks, and begins with no other file after some CPU time.
    fn name(&mut self, max_ns: u64) {
        self.named = Instant::now();
        self.processes.read_compiled();
        let memory = self.processes.share();
        let pending = take(&mut self.pending);
        let frames = |stack: &PendingStack| {
            let process = stack.process;
            stack.user.iter().enumerate().map(move |(depth, &at)| (process, at, depth == 0)).collect::<Vec<_>>()
        };
        let wanted: BTreeSet<(u32, u64, bool)> = pending.iter().flat_map(frames).collect();
        let (named, _) = self.names.user_within(max_ns, &wanted, &memory);
        self.lost.unread_files += memory.values().map(|process| process.take_unread()).sum::<u64>();
        for stack in &pending {
            let mut user = Vec::with_capacity(stack.user.len());
            for frame in frames(stack) {
                let names = named.get(&frame).map_or(&[][..], Vec::as_slice);
                user.extend(names.iter().map(|name| self.number_of(name)));
            }
            let is_exited = |frame: &(u32, u64, bool)| named.get(frame).is_some_and(|names| names[0] == EXITED);
            let (is_user_code, has_exited) = (stack.kernel.is_empty(), frames(stack).first().is_some_and(is_exited));
            self.lost.exited += u64::from(is_user_code && has_exited);
            // The dynamic linker's has no unwind information.
            let begins = frames(stack).last().and_then(|frame| named.get(frame)).and_then(|names| names.last());
            let end = stack.end.filter(|_| begins.is_none_or(|begins| begins != "_start"));
            self.lost.unwound_partly += u64::from(!has_exited && end == Some(UNWOUND_PARTLY));
            user.extend(end.map(|end| self.number_of(end)));
            self.samples[stack.sample].stack = self.stack_of(stack.syscall, &stack.kernel, user);
        }
    }

    fn number_of(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let name = cut(name.to_owned(), MAX_NAME);
        let has_room = self.names_bytes + name.len() <= MAX_NAMES_BYTES;
        self.lost.names_full += u64::from(!has_room);
        let name = if has_room { name } else { NO_ROOM.to_owned() };
        let next = self.numbers.len() as u32;
        let bytes = name.len();
        *self.numbers.entry(name).or_insert_with(|| {
            self.names_bytes += bytes;
            next
        })
    }

    fn stack_of(&mut self, syscall: i32, kernel: &[u64], user: Vec<u32>) -> u32 {
        let next = self.stacks.len() as u32;
        *self.stacks.entry(NumberedStack { syscall, kernel: kernel.to_vec(), user }).or_insert(next)
    }

    /// Names what is pending, and returns all of it.
    pub(super) fn finish(mut self, lost: Vec<(&'static str, u64)>) -> Gathered {
        priority::favour_no_more();
        self.name(u64::MAX);
        let mut stacks: Vec<(u32, NumberedStack)> = self.stacks.into_iter().map(|(stack, at)| (at, stack)).collect();
        stacks.sort_unstable_by_key(|(at, _)| *at);
        let mut names: Vec<(u32, String)> = self.numbers.into_iter().map(|(name, at)| (at, name)).collect();
        names.sort_unstable_by_key(|(at, _)| *at);
        let mut lost = lost;
        lost.extend(self.processes.take_lost());
        lost.extend(self.lost.take_lost());
        Gathered {
            samples: self.samples,
            stacks: stacks.into_iter().map(|(_, stack)| stack).collect(),
            names: names.into_iter().map(|(_, name)| name.into()).collect(),
            lost,
        }
    }
}

/// Returns whether a sample is kept after a number of halvings. Random: samples of one CPU are at regular places in the
/// order of all, and a sample that is kept after a halving was kept after each one before.
fn is_kept(tid: u32, at_ns: u64, halvings: u32) -> bool {
    // The finalizer of SplitMix64.
    let mut hash = at_ns.wrapping_add(u64::from(tid).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (hash ^ hash >> 31).trailing_zeros() >= halvings
}

/// Returns the word at an address of which `copy` has the bytes from `start` on.
fn word_at(copy: &[u8], start: u64, at: u64) -> Option<u64> {
    let from = usize::try_from(at.checked_sub(start)?).ok()?;
    Some(u64::from_ne_bytes(copy.get(from..from.checked_add(8)?)?.try_into().ok()?))
}

impl Gathered {
    /// Names the kernel functions. Also returns the number of samples in interrupts, which are no work of their
    /// threads.
    pub(super) fn named(self, kernel: &mut KernelSymbols) -> (CpuSamples, u64) {
        let addresses: BTreeSet<u64> = self.stacks.iter().flat_map(|stack| &stack.kernel).copied().collect();
        kernel.look_up_all(&addresses);
        let of_kernel: HashMap<u64, Arc<str>> =
            addresses.iter().map(|&at| (at, plain(kernel.name(at)).into())).collect();
        let stacks: Vec<Arc<RunningStack>> = self
            .stacks
            .iter()
            .map(|stack| {
                Arc::new(RunningStack {
                    syscall: syscalls::name(stack.syscall),
                    kernel: stack.kernel.iter().filter_map(|at| of_kernel.get(at).cloned()).collect(),
                    user: stack.user.iter().filter_map(|&at| self.names.get(at as usize).cloned()).collect(),
                })
            })
            .collect();
        let (count, mut samples) = (self.samples.len(), self.samples);
        samples.retain(|sample| stacks.get(sample.stack as usize).is_none_or(|stack| !stack.is_in_interrupt()));
        let in_interrupts = (count - samples.len()) as u64;
        (CpuSamples::new(samples, stacks), in_interrupts)
    }
}

#[cfg(test)]
mod tests {
    use super::super::plain::as_bytes;
    use super::*;

    /// Bytes of a sample of a kernel thread.
    fn record(tid: u32, at_ns: u64, ns: u64, kernel: u64) -> Vec<u8> {
        let mut sample =
            cpu_sample { tid, at_ns, ns, syscall: -1, user_code: user_code::NO_USER_CODE, ..cpu_sample::default() };
        (sample.kernel_frames, sample.kernel[0]) = (1, kernel);
        as_bytes(&sample).to_vec()
    }

    #[test]
    fn samples_stand_for_the_period_in_which_they_were_taken() {
        let mut gather = Gather::new();
        (0..100).for_each(|at| gather.add(&record(7, at, 10, 0x10)));
        gather.make_room();
        // Half as many with the other function, with twice the period.
        (100..150).for_each(|at| gather.add(&record(7, at, 20, 0x20)));
        let gathered = gather.finish(Vec::new());
        let of = |kernel: u64| {
            let is_it = |sample: &&CpuSample| gathered.stacks[sample.stack as usize].kernel == [kernel];
            gathered.samples.iter().filter(is_it).map(|sample| sample.ns).sum::<u64>()
        };
        assert_eq!((of(0x10), of(0x20)), (1_000, 1_000));
    }

    #[test]
    fn dropped_samples_are_of_all_cpus_and_stacks() {
        let mut gather = Gather::new();
        // Two CPUs, whose samples arrive in turn. Each sample has a stack of its own.
        for at in 0..20_000_u64 {
            gather.add(&record(1, at, 1, at * 2));
            gather.add(&record(2, at, 1, at * 2 + 1));
            gather.make_room();
        }
        let gathered = gather.finish(Vec::new());
        assert!(gathered.samples.len() < MAX_STACKS + MAX_PENDING, "{} samples", gathered.samples.len());
        for tid in [1, 2] {
            let of_cpu = || gathered.samples.iter().filter(|sample| sample.tid == tid);
            let ns: u64 = of_cpu().map(|sample| sample.ns).sum();
            assert!((18_000..22_000).contains(&ns), "{ns} ns of CPU {tid}");
            for sample in of_cpu() {
                assert_eq!(gathered.stacks[sample.stack as usize].kernel, [sample.at_ns * 2 + u64::from(tid) - 1]);
            }
        }
    }
}
