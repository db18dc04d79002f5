// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions in which threads worked, by samples of the threads that ran.
//!
//! A sample stands for the time since the timer of its CPU expired before. So the times of a thread's samples are
//! expected to add up to the time that it worked, which is known without samples. If those of the threads of a name do
//! within the sampling error, they are scaled to it. Otherwise the difference is work that was not sampled, such as
//! that on an isolated CPU. The work of a thread without a sample was not sampled either, if it is ten times what a
//! sample stands for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Frame of work that was not sampled.
const NOT_SAMPLED: &str = "[not sampled]";
/// Difference between the sampled and the known time, in standard deviations, up to which it is by chance.
const MAX_DEVIATIONS: f64 = 3.0;
/// Work of a thread without a sample, in times of samples, up to which that is by chance: it is in one of 20,000 cases.
const MAX_WITHOUT_SAMPLE: f64 = 10.0;

/// Maximum number of parts in JSON; the others are the difference to the whole.
const MAX_PARTS: usize = 100;

/// A sample of a running thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSample {
    /// TID as shown.
    pub tid: u32,
    /// Time (CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// Time that the sample stands for.
    pub ns: u64,
    /// Index of its stack.
    pub stack: u32,
}

/// Stack of a running thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningStack {
    /// System call, if the thread was in one.
    pub syscall: Option<String>,
    /// Kernel frames, innermost first; empty if user code ran.
    pub kernel: Vec<Arc<str>>,
    /// User frames, innermost first.
    pub user: Vec<Arc<str>>,
}

/// Samples of threads, by thread and time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSamples {
    samples: Vec<CpuSample>,
    stacks: Vec<Arc<RunningStack>>,
}

impl RunningStack {
    /// Returns whether the thread was interrupted in a softirq, or in another interrupt than that of the timer: these
    /// have their own parts of the time.
    pub fn is_in_interrupt(&self) -> bool {
        let has = |prefixes: &[&str], name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        let mut is_at_exit = false;
        self.kernel.iter().any(|name| {
            // The handler has returned: the thread runs its own kernel code, such as the scheduler.
            is_at_exit |= has(&INTERRUPT_EXITS, name);
            let is_timer = name.starts_with("sysvec_apic_timer");
            has(&SOFTIRQS, name) || !is_at_exit && !is_timer && has(&INTERRUPTS, name)
        })
    }
}

/// Kernel functions of softirqs, of interrupts, and of the way back from interrupts, with the prefixes of their names.
const SOFTIRQS: [&str; 4] = ["handle_softirqs", "__do_softirq", "do_softirq", "__softirqentry_text_start"];
const INTERRUPTS: [&str; 4] = ["common_interrupt", "sysvec_", "handle_irq_event", "__handle_irq_event"];
const INTERRUPT_EXITS: [&str; 3] = ["irqentry_exit", "exit_to_user_mode", "exit_to_kernel_mode"];

impl CpuSamples {
    /// Sorts samples.
    pub fn new(mut samples: Vec<CpuSample>, stacks: Vec<Arc<RunningStack>>) -> Self {
        samples.sort_unstable_by_key(|sample| (sample.tid, sample.at_ns));
        CpuSamples { samples, stacks }
    }

    /// Returns the samples of a thread in a span of time.
    fn of(&self, tid: u32, span: Range<u64>) -> &[CpuSample] {
        let from = self.samples.partition_point(|sample| (sample.tid, sample.at_ns) < (tid, span.start));
        let after = &self.samples[from..];
        &after[..after.partition_point(|sample| (sample.tid, sample.at_ns) < (tid, span.end))]
    }
}

/// What a thread did while it ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WorkKind {
    /// Code of the program.
    #[default]
    User,
    /// A system call.
    Syscall,
    /// A page fault.
    PageFault,
    /// The creation of a thread or process.
    Fork,
    /// The execution of a program.
    Exec,
    /// The end of a thread or process.
    Exit,
    /// Reclaim or compaction of memory, whatever needed the memory.
    Reclaim,
    /// Other kernel code.
    Kernel,
    /// Work without samples, such as that on isolated CPUs.
    NotSampled,
}

/// A part of the work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct WorkPart {
    /// Name of the threads.
    pub thread: String,
    /// What they did.
    pub kind: WorkKind,
    /// The innermost function of the program, or the system call. None if the code has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The function has no name, as in a stripped program: `name` has called it, perhaps through others without names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_caller: bool,
    /// Number of samples.
    pub samples: u64,
    /// Estimated time, in nanoseconds.
    pub ns: u64,
}

/// Work of threads, by function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Work {
    /// Time for which the threads worked, in nanoseconds.
    pub ns: u64,
    /// Number of samples in that time.
    pub samples: u64,
    /// Effective number of samples: as many with equal times would be as accurate.
    #[serde(default)]
    pub equal_samples: u64,
    /// Time without samples, where that is not by chance: on CPUs or of processes that are not sampled, or when samples
    /// were lost. Also the time of all threads of a name that have no sample.
    #[serde(default)]
    pub not_sampled_ns: u64,
    /// Estimated time of the work that has a name, in nanoseconds: of a function or the nearest caller that has one, of
    /// a system call, or of another kind of kernel work than `kernel`.
    #[serde(default)]
    pub named_ns: u64,
    /// Parts of the work, the longest first; at most a hundred. They add up to at most `ns`.
    pub parts: Vec<WorkPart>,
    /// The other parts.
    #[serde(skip)]
    pub further: Vec<WorkPart>,
    /// Names of threads, and their stacks with estimated times, for flame graphs.
    #[serde(skip)]
    pub stacks: Vec<(String, Arc<RunningStack>, u64)>,
}

/// Time of the threads of a name.
#[derive(Debug, Default)]
struct OfName {
    worked_ns: u64,
    sampled_ns: u64,
    /// Sum of the squares of the times of samples.
    squares: f64,
    /// By TID, the time that threads without samples worked; 0: it has samples.
    without_samples: HashMap<u32, u64>,
}

impl OfName {
    fn add(&mut self, tid: u32, worked_ns: u64, samples: &[CpuSample]) {
        self.worked_ns += worked_ns;
        for sample in samples {
            self.sampled_ns += sample.ns;
            self.squares += (sample.ns as f64).powi(2);
        }
        let entry = self.without_samples.entry(tid);
        if samples.is_empty() {
            entry.and_modify(|ns| *ns += if *ns > 0 { worked_ns } else { 0 }).or_insert(worked_ns);
        } else {
            entry.insert_entry(0);
        }
    }

    /// Returns what the samples' times are multiplied by, as a fraction, and the time that was not sampled.
    fn scale(&self) -> ((u64, u64), u64) {
        if self.sampled_ns == 0 {
            return ((0, 1), self.worked_ns);
        }
        // Samples are taken at random: the variance of their sum is the expected sum of squares.
        let mean_ns = self.squares / self.sampled_ns as f64;
        let is_by_chance = |ns: u64| ns as f64 <= MAX_WITHOUT_SAMPLE * mean_ns;
        let not_sampled_ns: u64 = self.without_samples.values().copied().filter(|&ns| !is_by_chance(ns)).sum();
        let left_ns = self.worked_ns - not_sampled_ns;
        let error_ns = MAX_DEVIATIONS * (left_ns as f64 * mean_ns).sqrt() + mean_ns;
        if left_ns as f64 - self.sampled_ns as f64 > error_ns {
            return ((1, 1), self.worked_ns - self.sampled_ns);
        }
        ((left_ns, self.sampled_ns), not_sampled_ns)
    }
}

/// Collects the samples of the time that threads worked.
#[derive(Debug)]
pub(crate) struct WorkCounter<'a> {
    samples: &'a CpuSamples,
    count: u64,
    by_name: HashMap<String, OfName>,
    /// Number and time of samples, by name of the thread and stack.
    by_stack: HashMap<(String, u32), (u64, u64)>,
}

impl<'a> WorkCounter<'a> {
    pub(crate) fn new(samples: &'a CpuSamples) -> Self {
        WorkCounter { samples, count: 0, by_name: HashMap::new(), by_stack: HashMap::new() }
    }

    /// Adds time for which a thread worked, with its samples in a span.
    pub(crate) fn add(&mut self, tid: u32, name: impl Fn() -> String, ns: u64, span: Range<u64>) {
        if self.samples.samples.is_empty() {
            return;
        }
        let samples = self.samples.of(tid, span);
        self.by_name.entry(name()).or_default().add(tid, ns, samples);
        self.count += samples.len() as u64;
        for sample in samples {
            let (count, ns) = self.by_stack.entry((name(), sample.stack)).or_default();
            (*count, *ns) = (*count + 1, *ns + sample.ns);
        }
    }

    /// Returns the work; `None` if there is no sample.
    pub(crate) fn finish(self) -> Option<Work> {
        let WorkCounter { samples, count, by_name, by_stack } = self;
        if count == 0 {
            return None;
        }
        let unknown = Arc::<RunningStack>::default();
        let scales: HashMap<&str, _> = by_name.iter().map(|(name, of)| (name.as_str(), of.scale())).collect();
        let mut named_ns = 0;
        let mut parts: BTreeMap<(String, Activity), (u64, u64)> = BTreeMap::new();
        let mut stacks = Vec::with_capacity(by_stack.len());
        for ((thread, stack), (count, of_ns)) in by_stack {
            let (times, by) = scales.get(thread.as_str()).map_or((1, 1), |(scale, _)| *scale);
            let ns = (u128::from(of_ns) * u128::from(times) / u128::from(by)) as u64;
            let stack = samples.stacks.get(stack as usize).unwrap_or(&unknown);
            let activity = activity(stack);
            named_ns += if activity.is_named() { ns } else { 0 };
            let part = parts.entry((thread.clone(), activity)).or_default();
            *part = (part.0 + count, part.1 + ns);
            stacks.push((thread, Arc::clone(stack), ns));
        }
        let not_sampled_ns = scales.values().map(|(_, ns)| ns).sum();
        let not_sampled = Arc::new(RunningStack { user: vec![NOT_SAMPLED.into()], ..RunningStack::default() });
        for (&thread, &(_, ns)) in scales.iter().filter(|(_, (_, ns))| *ns > 0) {
            let activity = Activity { kind: WorkKind::NotSampled, ..Activity::default() };
            parts.insert((thread.to_owned(), activity), (0, ns));
            stacks.push((thread.to_owned(), Arc::clone(&not_sampled), ns));
        }
        let part = |((thread, of), (samples, ns)): ((String, Activity), (u64, u64))| {
            let Activity { kind, name, is_caller } = of;
            WorkPart { thread, kind, name, is_caller, samples, ns }
        };
        let mut parts: Vec<WorkPart> = parts.into_iter().map(part).collect();
        parts.sort_by_key(|part| Reverse(part.ns));
        let further = parts.split_off(parts.len().min(MAX_PARTS));
        stacks.sort_by(|(a, of_a, a_ns), (b, of_b, b_ns)| (b_ns, a, &of_a.user).cmp(&(a_ns, b, &of_b.user)));
        let ns = by_name.values().map(|of| of.worked_ns).sum();
        let sampled_ns: f64 = by_name.values().map(|of| of.sampled_ns as f64).sum();
        let squares: f64 = by_name.values().map(|of| of.squares).sum();
        let equal_samples = if squares > 0.0 { (sampled_ns.powi(2) / squares) as u64 } else { 0 };
        Some(Work { ns, samples: count, equal_samples, not_sampled_ns, named_ns, parts, further, stacks })
    }
}

/// Kernel functions by which work is recognized, with the prefixes of their names, in order of precedence.
const BY_FRAME: [(WorkKind, &[&str]); 5] = [
    (
        WorkKind::Reclaim,
        &[
            "try_to_free_",
            "do_try_to_free_pages",
            "shrink_node",
            "shrink_lruvec",
            "try_to_compact_pages",
            "compact_zone",
        ],
    ),
    (WorkKind::Exec, &["bprm_execve", "do_execveat_common", "begin_new_exec"]),
    (WorkKind::Fork, &["kernel_clone", "copy_process", "schedule_tail"]),
    (WorkKind::Exit, &["do_exit", "do_group_exit"]),
    (
        WorkKind::PageFault,
        &["handle_mm_fault", "do_user_addr_fault", "exc_page_fault", "asm_exc_page_fault", "do_page_fault"],
    ),
];

/// What a thread did: a [`WorkPart`] without its thread and time.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Activity {
    kind: WorkKind,
    name: Option<String>,
    is_caller: bool,
}

impl Activity {
    fn is_named(&self) -> bool {
        match self.kind {
            WorkKind::User => self.name.is_some(),
            WorkKind::Kernel | WorkKind::NotSampled => false,
            _ => true,
        }
    }
}

/// Functions from which each process, thread or system call starts, and which say nothing about a wait or work.
pub(crate) const STARTS: [&str; 17] = [
    "_start",
    "__libc_start_main_impl",
    "__libc_start_main",
    "__libc_start_call_main",
    "__clone",
    "__clone3",
    "clone",
    "clone3",
    "start_thread",
    // Rust's own stack traces end here, too.
    "std::sys::backtrace::__rust_begin_short_backtrace",
    "entry_SYSCALL_64_after_hwframe",
    "do_syscall_64",
    "x64_sys_call",
    "el0t_64_sync",
    "ret_from_fork",
    "ret_from_fork_asm",
    "kthread",
];

/// Returns what a thread with this stack did, and in which function or system call.
fn activity(stack: &RunningStack) -> Activity {
    if stack.kernel.is_empty() {
        let called = stack.user.iter().position(|name| is_named(name));
        let Some(at) = called.filter(|&at| at == 0 || !STARTS.contains(&&*stack.user[at])) else {
            return Activity::default();
        };
        return Activity { kind: WorkKind::User, name: Some(stack.user[at].to_string()), is_caller: at > 0 };
    }
    let of = |kind| Activity { kind, ..Activity::default() };
    let has =
        |prefixes: &[&str]| stack.kernel.iter().any(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
    if let Some((kind, _)) = BY_FRAME.iter().find(|(_, prefixes)| has(prefixes)) {
        return of(*kind);
    }
    match stack.syscall.as_deref() {
        Some("execve" | "execveat") => of(WorkKind::Exec),
        Some("clone" | "clone3" | "fork" | "vfork") => of(WorkKind::Fork),
        Some("exit" | "exit_group") => of(WorkKind::Exit),
        Some(call) => Activity { name: Some(call.to_owned()), ..of(WorkKind::Syscall) },
        None => of(WorkKind::Kernel),
    }
}

/// Returns whether a frame is a function's name, rather than an address or a remark in brackets.
fn is_named(frame: &str) -> bool {
    let is_address = frame.starts_with("0x") || frame.rsplit_once("+0x").is_some_and(|(_, at)| is_hexadecimal(at));
    !is_address && (!frame.starts_with('[') || frame == "[vdso]")
}

fn is_hexadecimal(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(syscall: Option<&str>, kernel: &[&str], user: &[&str]) -> RunningStack {
        let owned = |frames: &[&str]| frames.iter().map(|&frame| frame.into()).collect();
        RunningStack { syscall: syscall.map(str::to_owned), kernel: owned(kernel), user: owned(user) }
    }

    #[test]
    fn kernel_work_has_its_kind() {
        let kind = |syscall, kernel: &[&str]| {
            let Activity { kind, name, is_caller } = activity(&stack(syscall, kernel, &["main"]));
            assert!(!is_caller);
            (kind, name)
        };
        let fault = ["clear_page_erms", "handle_mm_fault", "do_user_addr_fault", "asm_exc_page_fault"];
        assert_eq!(kind(None, &fault), (WorkKind::PageFault, None));
        // In a system call that reads user memory.
        assert_eq!(kind(Some("write"), &fault), (WorkKind::PageFault, None));
        assert_eq!(kind(Some("write"), &["copy_page", "vfs_write"]), (WorkKind::Syscall, Some("write".to_owned())));
        assert_eq!(
            kind(Some("execve"), &["handle_mm_fault", "copy_strings", "do_execveat_common.isra.0"]),
            (WorkKind::Exec, None)
        );
        assert_eq!(kind(Some("vfork"), &["copy_mm", "kernel_clone"]), (WorkKind::Fork, None));
        assert_eq!(kind(Some("clone"), &["_raw_spin_unlock"]), (WorkKind::Fork, None));
        assert_eq!(kind(Some("exit_group"), &["unmap_vmas", "do_exit"]), (WorkKind::Exit, None));
        let reclaim = ["shrink_lruvec", "shrink_node", "try_to_free_mem_cgroup_pages", "handle_mm_fault"];
        assert_eq!(kind(None, &reclaim), (WorkKind::Reclaim, None));
        assert_eq!(kind(None, &["irqentry_exit", "asm_sysvec_apic_timer_interrupt"]), (WorkKind::Kernel, None));
    }

    #[test]
    fn code_without_a_name_has_that_of_its_caller() {
        let name = |user: &[&str]| {
            let Activity { kind, name, is_caller } = activity(&stack(None, &[], user));
            assert_eq!(kind, WorkKind::User);
            name.map(|name| (name, is_caller))
        };
        assert_eq!(name(&["alpha", "main"]), Some(("alpha".to_owned(), false)));
        assert_eq!(name(&["x+0x10", "x+0x2f", "expand", "main"]), Some(("expand".to_owned(), true)));
        // Every function is called by these.
        assert_eq!(name(&["x+0x10", "__libc_start_call_main", "_start"]), None);
        assert_eq!(name(&["_start"]), Some(("_start".to_owned(), false)));
        assert_eq!(name(&["x+0x10", "[unwound partly]"]), None);
    }

    #[test]
    fn addresses_are_no_names() {
        for name in ["main", "operator+", "a+0x", "[vdso]", "f (a.c:7)", "x+0xyz"] {
            assert!(is_named(name), "{name}");
        }
        for name in ["0x7f00", "cc1+0x1a2b", "[exited]", "[anonymous code]"] {
            assert!(!is_named(name), "{name}");
        }
    }

    #[test]
    fn samples_count_where_their_thread_worked() {
        let sample = |tid, at_ns, stack| CpuSample { tid, at_ns, ns: 10, stack };
        let stacks = vec![
            stack(None, &[], &["alpha", "main"]),
            stack(Some("read"), &["vfs_read"], &["main"]),
            stack(None, &[], &["x+0x10"]),
        ];
        let stacks: Vec<Arc<RunningStack>> = stacks.into_iter().map(Arc::new).collect();
        let mut taken = vec![sample(8, 50, 0), sample(7, 99, 1), sample(7, 10, 0), sample(7, 20, 0)];
        taken.extend([sample(7, 30, 1), sample(7, 60, 2)]);
        let samples = CpuSamples::new(taken, stacks);
        let mut work = WorkCounter::new(&samples);
        work.add(7, || "cc1".to_owned(), 20, 10..30);
        work.add(7, || "as".to_owned(), 69, 30..99);
        let work = work.finish().expect("samples");
        let part = |thread: &str, kind, name: Option<&str>, samples, ns| {
            let (thread, name) = (thread.to_owned(), name.map(str::to_owned));
            WorkPart { thread, kind, name, is_caller: false, samples, ns }
        };
        // 89 ns of work, four samples, three of them with names.
        assert_eq!((work.ns, work.samples, work.equal_samples, work.named_ns), (89, 4, 4, 54));
        let parts = [
            part("as", WorkKind::User, None, 1, 34),
            part("as", WorkKind::Syscall, Some("read"), 1, 34),
            part("cc1", WorkKind::User, Some("alpha"), 2, 20),
        ];
        assert_eq!(work.parts, parts);
        assert_eq!(work.stacks.iter().map(|(_, _, ns)| ns).sum::<u64>(), 88);
        assert_eq!(WorkCounter::new(&samples).finish(), None);
    }

    #[test]
    fn work_of_threads_without_samples_is_not_sampled() {
        let taken = (0..100).map(|at| CpuSample { tid: 7, at_ns: at * 10, ns: 10, stack: 0 }).collect();
        let samples = CpuSamples::new(taken, vec![Arc::new(stack(None, &[], &["alpha", "main"]))]);
        let mut work = WorkCounter::new(&samples);
        // Sampled, but not where it ran since; on an isolated CPU; and too short for a sample.
        work.add(7, || "control".to_owned(), 1_100, 0..1_000);
        work.add(7, || "control".to_owned(), 4_000, 1_000..5_000);
        work.add(8, || "worker".to_owned(), 9_000, 0..9_000);
        work.add(9, || "short".to_owned(), 5, 0..5);
        let work = work.finish().expect("samples");
        let parts: Vec<_> = work.parts.iter().map(|part| (part.thread.as_str(), part.kind, part.ns)).collect();
        let not_sampled = |thread, ns| (thread, WorkKind::NotSampled, ns);
        let control = [not_sampled("control", 4_100), ("control", WorkKind::User, 1_000)];
        assert_eq!(parts, [&[not_sampled("worker", 9_000)], &control[..], &[not_sampled("short", 5)]].concat());
        assert_eq!((work.ns, work.not_sampled_ns, work.named_ns), (14_105, 13_105, 1_000));
        assert_eq!(work.stacks.iter().map(|(_, _, ns)| ns).sum::<u64>(), work.ns);
        // Within the sampling error it is all of the work.
        let mut work = WorkCounter::new(&samples);
        work.add(7, || "control".to_owned(), 1_100, 0..1_000);
        work.add(8, || "control".to_owned(), 50, 0..50);
        assert_eq!(work.finish().map(|work| work.named_ns), Some(1_150));
        // A thread of the same name that would have had a sample, even if both together are within the error.
        let mut work = WorkCounter::new(&samples);
        work.add(7, || "control".to_owned(), 1_000, 0..1_000);
        work.add(8, || "control".to_owned(), 60, 0..60);
        work.add(8, || "control".to_owned(), 60, 60..120);
        assert_eq!(work.finish().map(|work| (work.named_ns, work.not_sampled_ns)), Some((1_000, 120)));
    }

    #[test]
    fn interrupts_are_no_work_of_the_thread() {
        let is_in = |kernel: &[&str]| stack(Some("write"), kernel, &["main"]).is_in_interrupt();
        let softirq = ["net_rx_action", "handle_softirqs", "irq_exit_rcu", "sysvec_apic_timer_interrupt"];
        assert!(is_in(&softirq));
        assert!(is_in(&["irqentry_exit", "asm_sysvec_apic_timer_interrupt", "__do_softirq", "do_softirq"]));
        assert!(is_in(&["vring_interrupt", "__handle_irq_event_percpu", "common_interrupt"]));
        assert!(is_in(&["flush_tlb_func", "sysvec_call_function"]));
        // The thread returns from interrupts.
        assert!(!is_in(&["finish_task_switch", "schedule", "irqentry_exit", "sysvec_reschedule_ipi"]));
        assert!(!is_in(&["irqentry_exit", "asm_sysvec_apic_timer_interrupt"]));
        assert!(!is_in(&["copy_page", "vfs_write", "do_syscall_64"]));
        assert!(!is_in(&[]));
    }
}
