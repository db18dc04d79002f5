// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs ranked by the share of time for which they were held up: read from the account's rings at intervals, within a
//! budget.
//!
//! The BPF programs do no work for this. Run slices beyond the budget are left out: shares are of the time that was read.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use whylate_model::object::Object;
use whylate_model::path::history::{CpuTimeline as _, Holder, Name, RunSlice, SwitchIn};
use whylate_model::path::{PathBuilder, Query, WaitSpan, walk};
use whylate_model::programs::{HeldUpProgram, HeldUpThreads, Programs, Sample, Tally, WaitLookup};
use whylate_model::wait::is_user_lock;
use whylate_model::{ActorName, Stack};

use super::sleeps::PathNameSource;
use crate::cpu_account::Account;
use crate::kernel::clock;
use crate::kernel::proc;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::syscalls;
use crate::paths::{HeldUpWaits, LockWaits, LockedWaits, PathNames};

use self::relatives::is_work;

mod relatives;

/// Maximum number of slices that are read at a time, over all CPUs: 7 MB.
const MAX_SLICES: usize = 32_000;
/// Reading may take at most 1/100 of a CPU.
const REST_FACTOR: u64 = 100;
/// Maximum number of programs in a snapshot, and minimum share of the time for which each was held up.
const MAX_PROGRAMS: usize = 32;
const MIN_PART: u64 = 50;
/// Time after which all BPF programs have recorded what they saw.
const SETTLED_NS: u64 = 2_000_000;
/// Minimum time between two reads, unless a snapshot is due.
const READ_EVERY: Duration = Duration::from_millis(150);

/// Reader of run slices from the account's rings, with sums for each thread.
pub(super) struct ProgramShares {
    tally: Tally,
    names: PathNames,
    waits: HeldUpWaits,
    locks: Rc<RefCell<LockWaits>>,
    rests_until_ns: u64,
    /// Number of waits and starts that count for no program, for lack of room.
    unjudged: u64,
}

impl ProgramShares {
    pub(super) fn new(symbols: &KernelSymbols, locks: Rc<RefCell<LockWaits>>) -> Self {
        ProgramShares {
            tally: Tally::default(),
            names: PathNames::new(symbols.shared(), Rc::clone(&locks)),
            waits: HeldUpWaits::default(),
            locks,
            rests_until_ns: 0,
            unjudged: 0,
        }
    }

    /// Reads the run slices since the last read, unless recent reads took too long.
    pub(super) fn read(&mut self, account: &Account) {
        let now_ns = clock::monotonic_ns();
        if now_ns < self.rests_until_ns {
            return;
        }
        self.read_now(account, now_ns.saturating_sub(SETTLED_NS));
        let took_ns = clock::monotonic_ns().saturating_sub(now_ns);
        let rest_ns = took_ns.saturating_mul(REST_FACTOR).max(READ_EVERY.as_nanos() as u64);
        self.rests_until_ns = now_ns.saturating_add(rest_ns);
    }

    /// Reads the run slices since the last read, as far as they are kept.
    fn read_now(&mut self, account: &Account, until_ns: u64) {
        let after_ns = self.tally.read_until_ns();
        let Some(mut history) = account.history(until_ns).filter(|_| until_ns > after_ns) else { return };
        let (cpus, mut from_ns) = (history.cpus(), after_ns);
        let max_slices = (MAX_SLICES / cpus.max(1)).max(1_000);
        // Freed after each read: only a burst of context switches needs that many.
        let mut slices: Vec<RunSlice> = Vec::new();
        for cpu in 0..cpus {
            let (mut reached_ns, mut left) = (until_ns, max_slices);
            while reached_ns > after_ns
                && left > 0
                && let Some(slice) = history.previous(cpu)
            {
                (reached_ns, left) = (slice.start_ns, left - 1);
                if matches!(slice.holder, Holder::Thread(_)) {
                    slices.push(slice);
                }
            }
            // The ring of a CPU that was never seen is empty.
            if reached_ns < until_ns {
                from_ns = from_ns.max(reached_ns);
            }
        }
        slices.retain_mut(|slice| {
            if slice.start_ns < from_ns {
                (slice.start_ns, slice.entry) = (from_ns, SwitchIn::GoesOn);
            }
            slice.end_ns > from_ns
        });
        // Of two slices of a CPU that start at the same time, the first one is empty.
        slices.sort_unstable_by_key(|slice| (slice.start_ns, slice.end_ns));
        let span = (from_ns, until_ns);
        self.tally.add(span, &slices, &mut Lookup { read: self.waits.lock(), locks: &self.locks });
        drop(slices);
        let mut leaders = self.tally.leaders();
        leaders.retain(|leader| !is_own(leader.threads));
        self.waits.want(leaders);
        self.explain(account, until_ns);
    }

    /// Follows a sample of the waits along their wakeup edges.
    fn explain(&mut self, account: &Account, until_ns: u64) {
        let samples: Vec<Sample> = self.tally.samples();
        let Some(mut history) = account.history(until_ns).filter(|_| !samples.is_empty()) else { return };
        let asked: Vec<Query> = samples.iter().map(|sample| sample.query).collect();
        let mut found: Vec<PathBuilder> = samples.iter().map(|_| PathBuilder::default()).collect();
        walk(&mut history, &asked, &(), &mut |number, finding| found[number].add(finding));
        for (sample, mut found) in samples.iter().zip(found) {
            found.name(sample.query.tid, sample.name);
            let path = found.finish(&mut PathNameSource::of_names(&mut self.names));
            self.tally.explain(sample, &path);
        }
    }

    /// Returns the number of waits and starts of programs that counted for no program in the snapshots since the last call.
    pub(super) fn take_unjudged(&mut self) -> u64 {
        std::mem::take(&mut self.unjudged)
    }

    /// Returns the programs since the last snapshot. `stacks` show whether a futex is a lock.
    pub(super) fn take(&mut self, account: &Account, stacks: &[Stack]) -> Programs {
        self.read_now(account, clock::monotonic_ns().saturating_sub(SETTLED_NS));
        let mut programs = self.tally.take(&is_work, &mut call_name);
        for program in &mut programs.held_up {
            let process = program.who.tid().and_then(relatives::process_of);
            let label = process.as_ref().map_or_else(|| program.who.clone(), |process| process.label.clone());
            if label != program.who {
                program.process = Some(label);
            }
            let pid = process.map(|process| process.pid);
            weigh_futex(program, pid, stacks);
            let of_name = || program.who.comm().map(|comm| HeldUpThreads::OfName(Name::new(comm)));
            if let Some(threads) = program.who.tid().map(HeldUpThreads::One).or_else(of_name) {
                let read = self.waits.lock();
                let objects = program.parts.iter_mut().filter_map(|part| part.object.as_mut());
                objects.for_each(|object| read.add_peers(threads, object));
            }
        }
        self.waits.start_next_span();
        // Threads that wait in futexes other than locks are not held up.
        programs.held_up.retain(|program| program.held_up_ns() > programs.covered_ns / MIN_PART);
        self.unjudged += programs.keep_longest(MAX_PROGRAMS) + self.tally.take_unjudged();
        programs
    }
}

/// Looks waits up among those that were read.
struct Lookup<'a> {
    read: LockedWaits<'a>,
    locks: &'a RefCell<LockWaits>,
}

impl WaitLookup for Lookup<'_> {
    fn call_name(&mut self, number: u16) -> Option<String> {
        call_name(number)
    }

    fn object(&mut self, wait: WaitSpan, via: Option<&str>) -> Option<Object> {
        let read = self.read.take_object_of(wait, via);
        self.locks.borrow_mut().object_of(wait, read)
    }
}

/// Returns whether this is one of whylate's own threads, of which no objects are read.
fn is_own(threads: HeldUpThreads) -> bool {
    matches!(threads, HeldUpThreads::One(tid) if Path::new("/proc/self/task").join(tid.to_string()).exists())
}

fn call_name(number: u16) -> Option<String> {
    syscalls::name(number.into())
}

/// Keeps the share of the thread's futex waits that, by its sampled stacks, are for a lock. The other waits are for work,
/// or for something unknown.
fn weigh_futex(program: &mut HeldUpProgram, pid: Option<u32>, stacks: &[Stack]) {
    let Some(at) =
        program.parts.iter().position(|part| part.via.as_deref().is_some_and(|via| via.starts_with("futex")))
    else {
        return;
    };
    let pid = pid.map(|pid| pid.to_string());
    let (mut all_ns, mut locks_ns) = (0_u64, 0_u64);
    for stack in stacks {
        let label = |name: &str| stack.labels.get(name).map(String::as_str);
        let is_of = label("pid") == pid.as_deref() && label("thread") == program.who.comm();
        if !is_of || !label("syscall").is_some_and(|call| call.starts_with("futex")) {
            continue;
        }
        all_ns += stack.weight_ns;
        if is_user_lock(&stack.user) {
            locks_ns += stack.weight_ns;
        }
    }
    if locks_ns == 0 {
        program.parts.remove(at);
        return;
    }
    let share = locks_ns as f64 / all_ns as f64;
    let part = &mut program.parts[at];
    part.ns = (part.ns as f64 * share) as u64;
    part.causes.iter_mut().for_each(|cause| cause.ns = (cause.ns as f64 * share) as u64);
    program.parts.sort_by_key(|part| std::cmp::Reverse(part.ns));
}

/// A process, and its label.
struct Process {
    pid: u32,
    parent: u32,
    label: ActorName,
}

/// Returns a field of a `status` file.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn status_of(tid: u32) -> Option<String> {
    proc::text(format!("/proc/{tid}/status")).ok()
}
