// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples as they arrive: unwound at once, named when many stacks are pending and at the end, and kept in bounded memory.

use std::collections::{BTreeSet, HashMap};
use std::mem::take;
use std::sync::Arc;

use whylate_model::name::cut;
use whylate_model::work::{CpuSample, CpuSamples, RunningStack};

use super::skel::types::{cpu_sample, user_code};
use crate::kernel::attach::read_plain;
use crate::kernel::pid_namespace;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::syscalls;
use crate::offcpu::CallGraph;
use crate::offcpu::names::{EXITED, FrameNames, UNREADABLE, UNWOUND_PARTLY};
use crate::offcpu::process::{ExecutedProgram, Processes};
use crate::offcpu::rules::Rule;
use crate::offcpu::skel::types::unknown_frame;
use crate::offcpu::stack::plain;

/// Number of samples from which every second one is dropped, and the others count for two.
const MAX_SAMPLES: usize = 1 << 18;
/// Number of pending stacks, and of processes, from which their frames are named and the processes forgotten.
const MAX_PENDING: usize = 16_384;
const MAX_PROCESSES: usize = 2_048;
/// Maximum number of rules of instructions.
const MAX_RULES: usize = 1 << 17;
/// Maximum number of distinct stacks; of more, only the kernel's frames and the innermost function are kept.
const MAX_STACKS: usize = 1 << 14;
/// Maximum length of a name, and of all names.
const MAX_NAME: usize = 256;
const MAX_NAMES_BYTES: usize = 16 << 20;
/// Stands for names that found no room.
const NO_ROOM: &str = "[no room for the name]";

/// A stack, by the addresses of kernel functions and the numbers of the names of user functions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NumberedStack {
    syscall: i32,
    kernel: Vec<u64>,
    user: Vec<u32>,
}

/// A stack whose user frames have no names yet, and its sample.
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
    /// Stacks for which there was no room: the innermost frames are kept.
    stacks_full: u64,
    /// User code of processes that exited, or executed another program, before their mappings were read.
    exited: u64,
    /// Stacks without their outer frames.
    unwound_partly: u64,
}

impl Lost {
    fn take_lost(&self) -> [(&'static str, u64); 5] {
        [
            ("unread_files", self.unread_files),
            ("names_full", self.names_full),
            ("stacks_full", self.stacks_full),
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
    /// Number of times that every second sample was dropped.
    halvings: u32,
    arrived: u64,
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
            processes: Processes::new(CallGraph::Rules, false),
            rules: HashMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            names: FrameNames::patient(),
            numbers: HashMap::new(),
            names_bytes: 0,
            lost: Lost::default(),
            stacks: HashMap::new(),
            samples: Vec::new(),
            pending: Vec::new(),
            halvings: 0,
            arrived: 0,
            has_proc: pid_namespace::has_proc(),
        }
    }

    /// Returns the CPU time of the thread that reads lists of mappings.
    pub(super) fn other_cpu_ns(&self) -> u64 {
        self.processes.reader_cpu.as_nanos() as u64
    }

    /// Begins to take in what has arrived.
    pub(super) fn begin(&mut self) {
        self.processes.begin_walk();
    }

    /// Takes in a sample, which stands for the period of its timer.
    pub(super) fn add(&mut self, record: &[u8]) {
        let Some(sample) = read_plain::<cpu_sample>(record) else { return };
        self.arrived += 1;
        // As many as are kept of the earlier ones.
        if !self.arrived.is_multiple_of(1 << self.halvings) {
            return;
        }
        let copy = record.get(size_of::<cpu_sample>()..).unwrap_or_default();
        let process = self.process_of(&sample);
        let (mut user, mut end) = (Vec::new(), Some(UNREADABLE));
        // The registers of a thread that executes a program are those of the program before, whose memory is gone.
        let executes = matches!(sample.syscall.into(), libc::SYS_execve | libc::SYS_execveat);
        if executes || sample.user_code == user_code::NO_USER_CODE {
            end = None;
        } else if sample.user_code == user_code::UNWINDABLE_USER_CODE {
            let tgid = if self.has_proc { sample.tgid } else { 0 };
            let (ip, sp, bp) = (sample.ip, sample.sp, sample.bp);
            let of = unknown_frame { ip, sp, bp, process, tgid, ..unknown_frame::default() };
            let program = ExecutedProgram { end_code: sample.end_code, start_stack: sample.start_stack };
            let word = |at: u64| word_at(copy, sp & !7, at);
            let (frames, is_whole) = self.processes.unwind(&of, program, &mut self.rules, word);
            (user, end) = (frames, (!is_whole).then_some(UNWOUND_PARTLY));
        }
        let kernel = sample.kernel.iter().copied().take(sample.kernel_frames as usize).take_while(|at| *at != 0);
        let kernel = kernel.collect();
        let (sample_index, syscall) = (self.samples.len(), sample.syscall);
        self.pending.push(PendingStack { sample: sample_index, process, syscall, kernel, user, end });
        let ns = sample.period_ns << self.halvings;
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
        if self.pending.len() >= MAX_PENDING || self.ids.len() >= MAX_PROCESSES {
            self.name();
            if self.ids.len() >= MAX_PROCESSES {
                self.processes.clear();
                self.ids.clear();
                self.rules.clear();
            }
        }
        if self.samples.len() >= MAX_SAMPLES {
            self.name();
            let mut number = 0_usize;
            self.samples.retain(|_| {
                number += 1;
                number.is_multiple_of(2)
            });
            self.samples.iter_mut().for_each(|sample| sample.ns *= 2);
            self.halvings += 1;
        }
    }

    /// Names the frames of pending stacks.
    fn name(&mut self) {
        self.processes.read_compiled();
        let memory = self.processes.share();
        let pending = take(&mut self.pending);
        let frames = |stack: &PendingStack| {
            let process = stack.process;
            stack.user.iter().enumerate().map(move |(depth, &at)| (process, at, depth == 0)).collect::<Vec<_>>()
        };
        let wanted: BTreeSet<(u32, u64, bool)> = pending.iter().flat_map(frames).collect();
        let (named, _) = self.names.user(&wanted, &memory);
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
        let mut stack = NumberedStack { syscall, kernel: kernel.to_vec(), user };
        if self.stacks.len() >= MAX_STACKS && !self.stacks.contains_key(&stack) {
            stack.user.truncate(1);
            self.lost.stacks_full += 1;
        }
        let next = self.stacks.len() as u32;
        *self.stacks.entry(stack).or_insert(next)
    }

    /// Names what is pending, and returns all of it.
    pub(super) fn finish(mut self, lost: Vec<(&'static str, u64)>) -> Gathered {
        self.name();
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

/// Returns the word at an address of which `copy` has the bytes from `start` on.
fn word_at(copy: &[u8], start: u64, at: u64) -> Option<u64> {
    let from = usize::try_from(at.checked_sub(start)?).ok()?;
    Some(u64::from_ne_bytes(copy.get(from..from.checked_add(8)?)?.try_into().ok()?))
}

impl Gathered {
    /// Names the kernel functions. Also returns the number of samples in interrupts, which are not the work of the threads
    /// that they came into.
    pub(super) fn named(mut self, kernel: &mut KernelSymbols) -> (CpuSamples, u64) {
        let addresses: BTreeSet<u64> = self.stacks.iter().flat_map(|stack| &stack.kernel).copied().collect();
        kernel.look_up_all(&addresses);
        let of_kernel: HashMap<u64, Arc<str>> =
            addresses.iter().map(|&at| (at, plain(kernel.name(at)).into())).collect();
        let stacks = self.stacks.iter().map(|stack| {
            Arc::new(RunningStack {
                syscall: syscalls::name(stack.syscall),
                kernel: stack.kernel.iter().filter_map(|at| of_kernel.get(at).cloned()).collect(),
                user: stack.user.iter().filter_map(|&at| self.names.get(at as usize).cloned()).collect(),
            })
        });
        let stacks: Vec<Arc<RunningStack>> = stacks.collect();
        let before = self.samples.len();
        self.samples.retain(|sample| !stacks.get(sample.stack as usize).is_some_and(|stack| stack.is_in_interrupt()));
        let in_interrupts = (before - self.samples.len()) as u64;
        (CpuSamples::new(self.samples, stacks), in_interrupts)
    }
}
