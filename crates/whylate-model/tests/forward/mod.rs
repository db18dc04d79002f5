// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward oracle for the walk back: replays a recorded history in order of time and keeps one account per thread of
//! what its time went into. A woken thread takes over its waker's account for the time that it slept. Disk requests are
//! not followed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use whylate_model::CauseKind;
use whylate_model::path::history::{Holder, Recorded, RunSlice, SwitchIn, SwitchOut, Waker};
use whylate_model::path::{Actor, Finding, Query, Segment, walk};

/// Nanoseconds by label.
pub type Totals = BTreeMap<String, u64>;

/// A wait, from when its thread blocked until it ran again.
#[derive(Clone, Debug)]
pub struct Wait {
    pub tid: u32,
    pub from_ns: u64,
    pub to_ns: u64,
    pub totals: Totals,
}

/// Start, end and label index.
type Part = (u64, u64, usize);

#[derive(Clone, Debug, Default)]
struct Follower {
    /// Its account, in order of time.
    parts: Vec<Part>,
    /// End of the account while the thread is running.
    mark_ns: u64,
    /// When it last switched out; `None` if not seen.
    left_ns: Option<u64>,
    /// Whether it has blocked since then and has not run again.
    sleeps: bool,
    /// When it was woken, which is the end of its account.
    woken_ns: Option<u64>,
}

/// An event, in order of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EventKind {
    Waking {
        tid: u32,
        cpu: usize,
        index: usize,
    },
    /// The item that starts with this slice is queued.
    Queuing {
        cpu: usize,
        index: usize,
    },
    Begin {
        cpu: usize,
        index: usize,
    },
}

struct Forward<'a> {
    past: &'a Recorded,
    threads: HashMap<u32, Follower>,
    /// The thread on each CPU, even below an interrupt.
    current: Vec<Option<u32>>,
    /// The open slice of each CPU.
    open: Vec<Option<usize>>,
    labels: Vec<String>,
    number_by_label: HashMap<String, usize>,
    waits: Vec<Wait>,
    /// By the slice that starts the item: when it was queued, and its queuer's account up to then.
    queuers: HashMap<(usize, usize), (u64, Vec<Part>)>,
}

/// Label of time that nothing is known of.
const UNKNOWN: &str = "Unknown ";

fn label(kind: CauseKind, who: &str) -> String {
    format!("{kind:?} {who}")
}

/// Returns all waits that start and end within a history.
pub fn waits(past: &Recorded) -> Vec<Wait> {
    let mut events: Vec<(u64, EventKind)> = Vec::new();
    for (cpu, slices) in past.cpus.iter().enumerate() {
        for (index, slice) in slices.iter().enumerate() {
            events.push((slice.start_ns, EventKind::Begin { cpu, index }));
            if let (Some(tid), SwitchIn::Woken { at_ns, .. }) = (slice.holder.tid(), slice.entry) {
                events.push((at_ns, EventKind::Waking { tid, cpu, index }));
            }
            if let SwitchIn::Queued { at_ns, .. } = slice.entry {
                events.push((at_ns, EventKind::Queuing { cpu, index }));
            }
        }
    }
    events.sort_unstable();
    let mut forward = Forward {
        past,
        threads: HashMap::new(),
        current: vec![None; past.cpus.len()],
        open: vec![None; past.cpus.len()],
        labels: Vec::new(),
        number_by_label: HashMap::new(),
        waits: Vec::new(),
        queuers: HashMap::new(),
    };
    for (at_ns, what) in events {
        match what {
            EventKind::Waking { tid, cpu, index } => forward.waking(at_ns, tid, past.cpus[cpu][index].entry),
            EventKind::Queuing { cpu, index } => forward.queuing(at_ns, cpu, index),
            EventKind::Begin { cpu, index } => forward.begin(at_ns, cpu, index),
        }
    }
    forward.waits
}

impl Forward<'_> {
    fn number(&mut self, kind: CauseKind, who: &str) -> usize {
        let label = label(kind, who);
        if let Some(&number) = self.number_by_label.get(&label) {
            return number;
        }
        let number = self.labels.len();
        self.labels.push(label.clone());
        self.number_by_label.insert(label, number);
        number
    }

    /// Forward and backward walks have unknown time for different reasons.
    fn unknown(&mut self) -> usize {
        self.number(CauseKind::Unknown, "")
    }

    /// Returns the label of a slice for the thread that runs in it, or for a runnable thread that waits.
    fn label_of_slice(&mut self, slice: &RunSlice, cpu: usize, ready: Option<u32>) -> usize {
        let (kind, who) = match slice.holder {
            Holder::Irq { .. } => (CauseKind::Irq, slice.name.text()),
            Holder::Softirq => (CauseKind::Softirq, slice.name.text()),
            Holder::Work { handler, .. } => (CauseKind::Work, handler.to_string()),
            Holder::Idle => (CauseKind::IdleExit, format!("CPU {cpu}")),
            Holder::Unrecorded => return self.unknown(),
            Holder::Thread(tid) => {
                let kind = match ready {
                    None => CauseKind::Running,
                    Some(ready) if ready == tid => CauseKind::Wakeup,
                    Some(_) => CauseKind::Thread,
                };
                // Its name may change.
                (kind, tid.to_string())
            }
        };
        self.number(kind, &who)
    }

    /// Returns what happened on a CPU in a span, for the thread that ran there or waited to run.
    fn cpu_parts(&mut self, cpu: usize, from_ns: u64, to_ns: u64, ready: Option<u32>) -> Vec<Part> {
        let past = self.past;
        let slices = &past.cpus[cpu];
        let first = slices.partition_point(|slice| slice.end_ns <= from_ns);
        let mut parts = Vec::new();
        let mut covered_ns = from_ns;
        for slice in slices[first..].iter().take_while(|slice| slice.start_ns < to_ns) {
            if slice.start_ns > covered_ns {
                parts.push((covered_ns, slice.start_ns, self.unknown()));
            }
            let (start_ns, end_ns) = (slice.start_ns.max(from_ns), slice.end_ns.min(to_ns));
            parts.push((start_ns, end_ns, self.label_of_slice(slice, cpu, ready)));
            covered_ns = end_ns;
        }
        if covered_ns < to_ns {
            parts.push((covered_ns, to_ns, self.unknown()));
        }
        parts
    }

    /// Charges a running thread's account up to now.
    fn settle(&mut self, tid: u32, cpu: usize, now_ns: u64) {
        let mark_ns = self.threads.get(&tid).map_or(now_ns, |thread| thread.mark_ns);
        if mark_ns < now_ns {
            let parts = self.cpu_parts(cpu, mark_ns, now_ns, None);
            let thread = self.threads.entry(tid).or_default();
            thread.parts.extend(parts);
            thread.mark_ns = now_ns;
        }
    }

    /// Returns the account of a thread that wakes another one, or the label that stands for it.
    fn waker_account(&mut self, now_ns: u64, by: Waker, waking_cpu: u32) -> Result<Vec<Part>, usize> {
        let waking_cpu = waking_cpu as usize;
        let there = self.open.get(waking_cpu).copied().flatten().map(|index| self.past.cpus[waking_cpu][index]);
        let is_interrupt = there.is_some_and(|slice| matches!(slice.holder, Holder::Irq { .. } | Holder::Softirq));
        if let Waker::Thread(waker) | Waker::Parent(waker) = by {
            let has_cpu = |slice: &RunSlice| slice.holder.tid() == Some(waker);
            let open = self.open.iter().enumerate().filter_map(|(cpu, index)| Some((cpu, (*index)?)));
            let own = open.into_iter().find(|&(cpu, index)| has_cpu(&self.past.cpus[cpu][index])).map(|(cpu, _)| cpu);
            if let Some(cpu) = own.or_else(|| is_interrupt.then_some(waking_cpu))
                && let Some(current) = self.current[cpu]
            {
                self.settle(current, cpu, now_ns);
                return Ok(self.threads.get(&current).map(|thread| thread.parts.clone()).unwrap_or_default());
            }
        }
        Err(match by {
            Waker::Timer(_) => self.number(CauseKind::Timer, "timer"),
            Waker::Network => self.number(CauseKind::Network, "network"),
            Waker::Rcu => self.number(CauseKind::Rcu, "grace period"),
            Waker::Irq | Waker::Softirq if is_interrupt => {
                let name = there.map(|slice| slice.name.text()).unwrap_or_default();
                self.number(CauseKind::Interrupt, &name)
            }
            Waker::Irq | Waker::Softirq => self.number(CauseKind::Interrupt, "interrupt"),
            Waker::Thread(_) | Waker::Parent(_) | Waker::Disk(_) => self.unknown(),
        })
    }

    fn queuing(&mut self, now_ns: u64, cpu: usize, index: usize) {
        let SwitchIn::Queued { by, cpu: queuing_cpu, .. } = self.past.cpus[cpu][index].entry else { return };
        let parts = self.waker_account(now_ns, by, queuing_cpu).unwrap_or_else(|leaf| vec![(0, now_ns, leaf)]);
        self.queuers.insert((cpu, index), (now_ns, parts));
    }

    fn waking(&mut self, now_ns: u64, tid: u32, entry: SwitchIn) {
        let SwitchIn::Woken { by, cpu: waking_cpu, .. } = entry else { return };
        let waker_account = self.waker_account(now_ns, by, waking_cpu);
        let thread = self.threads.entry(tid).or_default();
        if thread.sleeps
            && let Some(from_ns) = thread.left_ns
        {
            match waker_account {
                Ok(parts) => thread.parts.extend(since(&parts, from_ns)),
                Err(leaf) => thread.parts.push((from_ns, now_ns, leaf)),
            }
        } else if let (Waker::Parent(_), Ok(parts)) = (by, waker_account) {
            // A new thread starts with its parent's account.
            thread.parts = parts;
        }
        thread.woken_ns = Some(now_ns);
        thread.mark_ns = now_ns;
    }

    fn begin(&mut self, now_ns: u64, cpu: usize, index: usize) {
        let past = self.past;
        let slice = past.cpus[cpu][index];
        let before = index.checked_sub(1).map(|before| past.cpus[cpu][before]);
        let comes = slice.holder.tid();
        if let Some(current) = self.current[cpu] {
            let has_left =
                before.is_some_and(|slice| slice.holder.tid() == Some(current) && slice.exit != SwitchOut::GoesOn);
            if has_left || comes.is_some_and(|tid| tid != current) || slice.holder == Holder::Idle {
                self.settle(current, cpu, now_ns);
                self.current[cpu] = None;
                let thread = self.threads.entry(current).or_default();
                (thread.left_ns, thread.woken_ns) = (Some(now_ns), None);
                thread.sleeps = before.is_some_and(|slice| matches!(slice.exit, SwitchOut::Blocked(_)));
            }
        }
        self.open[cpu] = Some(index);
        if let Some(tid) = comes.filter(|&tid| self.current[cpu] != Some(tid)) {
            self.enter(now_ns, cpu, tid, slice.entry);
        }
        // A worker has the account of its item's queuer up to the queueing.
        if let (Some(tid), Some((queued_ns, mut parts))) = (comes, self.queuers.remove(&(cpu, index))) {
            self.settle(tid, cpu, now_ns);
            let thread = self.threads.entry(tid).or_default();
            parts.extend(since(&thread.parts, queued_ns));
            thread.parts = parts;
        }
    }

    fn enter(&mut self, now_ns: u64, cpu: usize, tid: u32, entry: SwitchIn) {
        // If a switch was missed, it may seem to run elsewhere too.
        self.current.iter_mut().filter(|current| **current == Some(tid)).for_each(|current| *current = None);
        self.current[cpu] = Some(tid);
        let Follower { left_ns, sleeps, woken_ns, .. } = self.threads.entry(tid).or_default().clone();
        let ready_ns = match entry {
            SwitchIn::Woken { .. } => woken_ns,
            SwitchIn::Preempted { at_ns } => left_ns.filter(|&left_ns| left_ns == at_ns),
            SwitchIn::GoesOn | SwitchIn::Queued { .. } | SwitchIn::Unseen => None,
        };
        let parts = match (ready_ns, left_ns) {
            (Some(ready_ns), _) => self.cpu_parts(cpu, ready_ns, now_ns, Some(tid)),
            (None, Some(left_ns)) => vec![(left_ns, now_ns, self.unknown())],
            (None, None) => Vec::new(),
        };
        let labels = &self.labels;
        let thread = self.threads.entry(tid).or_default();
        thread.parts.extend(parts);
        thread.mark_ns = now_ns;
        if let (true, Some(from_ns)) = (sleeps, left_ns) {
            let mut totals = Totals::new();
            for (from_ns, to_ns, label) in since(&thread.parts, from_ns) {
                *totals.entry(labels[label].clone()).or_default() += to_ns - from_ns;
            }
            let covered_ns: u64 = totals.values().sum();
            *totals.entry(UNKNOWN.to_owned()).or_default() += (now_ns - from_ns).saturating_sub(covered_ns);
            self.waits.push(Wait { tid, from_ns, to_ns: now_ns, totals });
        }
        thread.sleeps = false;
    }
}

/// Returns the end of an account, from `from_ns` on.
fn since(parts: &[Part], from_ns: u64) -> Vec<Part> {
    let first = parts.partition_point(|part| part.1 <= from_ns);
    parts[first..].iter().map(|&(start_ns, end_ns, label)| (start_ns.max(from_ns), end_ns, label)).collect()
}

/// Returns the totals of the waits by the walk back.
fn backward(past: &Recorded, waits: &[Wait]) -> Vec<Totals> {
    let asked: Vec<Query> = waits
        .iter()
        .map(|&Wait { tid, from_ns, to_ns, .. }| Query { tid, from_ns, to_ns, is_wait: false, is_command: false })
        .collect();
    let mut found = vec![Totals::new(); asked.len()];
    walk(&mut past.backwards(), &asked, &(), &mut |index, finding| {
        if let Finding::Segment(segment) = finding {
            *found[index].entry(label_of(segment)).or_default() += segment.to_ns - segment.from_ns;
        }
    });
    found
}

/// Returns a segment's label as the forward walk names it.
fn label_of(segment: Segment) -> String {
    match segment.who {
        _ if segment.kind == CauseKind::Unknown => UNKNOWN.to_owned(),
        Actor::Thread { tid, .. } => label(segment.kind, &tid.to_string()),
        Actor::Interrupt(name) => label(segment.kind, &name.text()),
        Actor::Work(handler) => label(segment.kind, &handler.to_string()),
        Actor::Cpu(cpu) => label(segment.kind, &format!("CPU {cpu}")),
        Actor::Timer(_) => label(segment.kind, "timer"),
        Actor::Text(text) => label(segment.kind, text),
        other => label(segment.kind, &format!("{other:?}")),
    }
}

/// Agreement of both walks.
#[derive(Debug)]
pub struct Agreement {
    pub waits: usize,
    /// Total time of all waits.
    pub ns: u64,
    /// Time with different labels.
    pub off_ns: u64,
    /// Time known to both walks, with equal labels or not.
    pub known_ns: u64,
    /// Time known to both walks, with different labels.
    pub contradicted_ns: u64,
    /// For the wait that differs most, the labels that differ: nanoseconds forward and backward.
    pub worst: String,
}

impl Agreement {
    /// Returns `ns` as a share of the total time.
    pub fn share(&self, ns: u64) -> f64 {
        ns as f64 / self.ns.max(1) as f64
    }
}

/// Walks all waits of a history both ways.
pub fn compare(past: &Recorded) -> Agreement {
    let waits = waits(past);
    let backward = backward(past, &waits);
    let mut agreement =
        Agreement { waits: waits.len(), ns: 0, off_ns: 0, known_ns: 0, contradicted_ns: 0, worst: String::new() };
    let mut worst_ns = 0;
    for (wait, backward) in waits.into_iter().zip(backward) {
        let ns = wait.to_ns - wait.from_ns;
        let is_known = |label: &&String| *label != UNKNOWN;
        let known_ns = |totals: &Totals| totals.keys().filter(is_known).map(|label| totals[label]).sum::<u64>();
        let both_ns = |label: &String| wait.totals[label].min(backward.get(label).copied().unwrap_or(0));
        let alike_ns: u64 = wait.totals.keys().map(both_ns).sum();
        let alike_known_ns: u64 = wait.totals.keys().filter(is_known).map(both_ns).sum();
        let off_ns = ns.saturating_sub(alike_ns);
        agreement.ns += ns;
        agreement.off_ns += off_ns;
        let both_known_ns = known_ns(&wait.totals).min(known_ns(&backward));
        agreement.known_ns += both_known_ns;
        agreement.contradicted_ns += both_known_ns - alike_known_ns;
        if off_ns > worst_ns {
            worst_ns = off_ns;
            agreement.worst = differences(&wait, &backward);
        }
    }
    agreement
}

fn differences(wait: &Wait, backward: &Totals) -> String {
    let labels: BTreeSet<&String> = wait.totals.keys().chain(backward.keys()).collect();
    let time_of = |totals: &Totals, label: &String| totals.get(label).copied().unwrap_or(0);
    let both = labels.into_iter().map(|label| (label, time_of(&wait.totals, label), time_of(backward, label)));
    let off = both.filter(|(_, forward, backward)| forward != backward);
    let off = off.map(|(label, forward, backward)| format!("{label}: {forward} and {backward}"));
    format!(
        "{wait_tid} for {ns} ns: {off}",
        wait_tid = wait.tid,
        ns = wait.to_ns - wait.from_ns,
        off = off.collect::<Vec<_>>().join(", ")
    )
}
