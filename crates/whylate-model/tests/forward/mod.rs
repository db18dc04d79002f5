// SPDX-License-Identifier: MIT OR Apache-2.0
//! The waits of a recorded history told forward in time, as a second opinion on the walk back: at every moment each thread
//! has its own account of what its time went into, and whoever is woken takes over its waker's for the time that it slept.
//! It does not follow requests of disks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use whylate_model::CauseKind;
use whylate_model::path::history::{Entry, Exit, Holder, Recorded, Slice, Waker};
use whylate_model::path::{Asked, Finding, Party, Segment, walk};

/// How much time went into what.
pub type Totals = BTreeMap<String, u64>;

/// A wait, from when its thread fell asleep until it had a CPU again.
#[derive(Clone, Debug)]
pub struct Wait {
    pub tid: u32,
    pub from_ns: u64,
    pub to_ns: u64,
    pub totals: Totals,
}

/// From when to when, and the number of what it went into.
type Part = (u64, u64, usize);

#[derive(Clone, Debug, Default)]
struct Follower {
    /// Its account, in order of time.
    parts: Vec<Part>,
    /// Up to where that goes while it has a CPU.
    mark_ns: u64,
    /// When it last left a CPU; nothing where it was not seen.
    left_ns: Option<u64>,
    /// It has slept since then, and not had a CPU again.
    sleeps: bool,
    /// Something woke it, up to when its account goes.
    woken_ns: Option<u64>,
}

/// Something that happens, in order of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Waking {
        tid: u32,
        cpu: usize,
        index: usize,
    },
    /// An item is queued that begins with that slice.
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
    /// The thread that each CPU has, also below an interrupt.
    current: Vec<Option<u32>>,
    /// The slice of each CPU.
    open: Vec<Option<usize>>,
    labels: Vec<String>,
    number_by_label: HashMap<String, usize>,
    waits: Vec<Wait>,
    /// The account of whoever queued the item that begins with a slice, up to then.
    queuers: HashMap<(usize, usize), (u64, Vec<Part>)>,
}

/// Time of which nothing is known.
const UNKNOWN: &str = "Unknown ";

fn label(kind: CauseKind, who: &str) -> String {
    format!("{kind:?} {who}")
}

/// All waits of a history that begin and end in it.
pub fn waits(past: &Recorded) -> Vec<Wait> {
    let mut events: Vec<(u64, What)> = Vec::new();
    for (cpu, slices) in past.cpus.iter().enumerate() {
        for (index, slice) in slices.iter().enumerate() {
            events.push((slice.start_ns, What::Begin { cpu, index }));
            if let (Some(tid), Entry::Woken { at_ns, .. }) = (slice.holder.tid(), slice.entry) {
                events.push((at_ns, What::Waking { tid, cpu, index }));
            }
            if let Entry::Queued { at_ns, .. } = slice.entry {
                events.push((at_ns, What::Queuing { cpu, index }));
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
            What::Waking { tid, cpu, index } => forward.waking(at_ns, tid, past.cpus[cpu][index].entry),
            What::Queuing { cpu, index } => forward.queuing(at_ns, cpu, index),
            What::Begin { cpu, index } => forward.begin(at_ns, cpu, index),
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

    /// Each way of counting has its own reasons not to know.
    fn unknown(&mut self) -> usize {
        self.number(CauseKind::Unknown, "")
    }

    /// What a part of a slice is to the thread that has the CPU, or to another one that could have had it.
    fn of(&mut self, slice: &Slice, cpu: usize, ready: Option<u32>) -> usize {
        let (kind, who) = match slice.holder {
            Holder::Irq { .. } => (CauseKind::Irq, slice.name.text()),
            Holder::Softirq => (CauseKind::Softirq, slice.name.text()),
            Holder::Work { handler, .. } => (CauseKind::Work, handler.to_string()),
            Holder::Idle => (CauseKind::IdleExit, format!("CPU {cpu}")),
            Holder::Nobody => return self.unknown(),
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

    /// What happened on a CPU in a time, to a thread that has it or could have had it.
    fn of_cpu(&mut self, cpu: usize, from_ns: u64, to_ns: u64, ready: Option<u32>) -> Vec<Part> {
        let past = self.past;
        let slices = &past.cpus[cpu];
        let first = slices.partition_point(|slice| slice.end_ns <= from_ns);
        let mut parts = Vec::new();
        let mut told_ns = from_ns;
        for slice in slices[first..].iter().take_while(|slice| slice.start_ns < to_ns) {
            if slice.start_ns > told_ns {
                parts.push((told_ns, slice.start_ns, self.unknown()));
            }
            let (start_ns, end_ns) = (slice.start_ns.max(from_ns), slice.end_ns.min(to_ns));
            parts.push((start_ns, end_ns, self.of(slice, cpu, ready)));
            told_ns = end_ns;
        }
        if told_ns < to_ns {
            parts.push((told_ns, to_ns, self.unknown()));
        }
        parts
    }

    /// A thread that has a CPU has used it up to now.
    fn settle(&mut self, tid: u32, cpu: usize, now_ns: u64) {
        let mark_ns = self.threads.get(&tid).map_or(now_ns, |thread| thread.mark_ns);
        if mark_ns < now_ns {
            let parts = self.of_cpu(cpu, mark_ns, now_ns, None);
            let thread = self.threads.entry(tid).or_default();
            thread.parts.extend(parts);
            thread.mark_ns = now_ns;
        }
    }

    /// The account of a thread that does something to another one, or what stands for it.
    fn of_waker(&mut self, now_ns: u64, by: Waker, waking_cpu: u32) -> Result<Vec<Part>, usize> {
        let waking_cpu = waking_cpu as usize;
        let there = self.open.get(waking_cpu).copied().flatten().map(|index| self.past.cpus[waking_cpu][index]);
        let is_interrupt = there.is_some_and(|slice| matches!(slice.holder, Holder::Irq { .. } | Holder::Softirq));
        if let Waker::Thread(waker) | Waker::Parent(waker) = by {
            let has_cpu = |slice: &Slice| slice.holder.tid() == Some(waker);
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
        let Entry::Queued { by, cpu: queuing_cpu, .. } = self.past.cpus[cpu][index].entry else { return };
        let parts = self.of_waker(now_ns, by, queuing_cpu).unwrap_or_else(|leaf| vec![(0, now_ns, leaf)]);
        self.queuers.insert((cpu, index), (now_ns, parts));
    }

    fn waking(&mut self, now_ns: u64, tid: u32, entry: Entry) {
        let Entry::Woken { by, cpu: waking_cpu, .. } = entry else { return };
        let of_waker = self.of_waker(now_ns, by, waking_cpu);
        let thread = self.threads.entry(tid).or_default();
        if thread.sleeps
            && let Some(from_ns) = thread.left_ns
        {
            match of_waker {
                Ok(parts) => thread.parts.extend(since(&parts, from_ns)),
                Err(leaf) => thread.parts.push((from_ns, now_ns, leaf)),
            }
        } else if let (Waker::Parent(_), Ok(parts)) = (by, of_waker) {
            // What is new has done all that its parent did.
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
                before.is_some_and(|slice| slice.holder.tid() == Some(current) && slice.exit != Exit::GoesOn);
            if has_left || comes.is_some_and(|tid| tid != current) || slice.holder == Holder::Idle {
                self.settle(current, cpu, now_ns);
                self.current[cpu] = None;
                let thread = self.threads.entry(current).or_default();
                (thread.left_ns, thread.woken_ns) = (Some(now_ns), None);
                thread.sleeps = before.is_some_and(|slice| matches!(slice.exit, Exit::Blocked(_)));
            }
        }
        self.open[cpu] = Some(index);
        if let Some(tid) = comes.filter(|&tid| self.current[cpu] != Some(tid)) {
            self.enter(now_ns, cpu, tid, slice.entry);
        }
        // Up to when its item was queued, a worker has done what whoever queued it did.
        if let (Some(tid), Some((queued_ns, mut parts))) = (comes, self.queuers.remove(&(cpu, index))) {
            self.settle(tid, cpu, now_ns);
            let thread = self.threads.entry(tid).or_default();
            parts.extend(since(&thread.parts, queued_ns));
            thread.parts = parts;
        }
    }

    fn enter(&mut self, now_ns: u64, cpu: usize, tid: u32, entry: Entry) {
        // Where a switch was not seen, it may seem to be elsewhere too.
        self.current.iter_mut().filter(|current| **current == Some(tid)).for_each(|current| *current = None);
        self.current[cpu] = Some(tid);
        let Follower { left_ns, sleeps, woken_ns, .. } = self.threads.entry(tid).or_default().clone();
        let ready_ns = match entry {
            Entry::Woken { .. } => woken_ns,
            Entry::Preempted { at_ns } => left_ns.filter(|&left_ns| left_ns == at_ns),
            Entry::GoesOn | Entry::Queued { .. } | Entry::Unseen => None,
        };
        let parts = match (ready_ns, left_ns) {
            (Some(ready_ns), _) => self.of_cpu(cpu, ready_ns, now_ns, Some(tid)),
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
            let told_ns: u64 = totals.values().sum();
            *totals.entry(UNKNOWN.to_owned()).or_default() += (now_ns - from_ns).saturating_sub(told_ns);
            self.waits.push(Wait { tid, from_ns, to_ns: now_ns, totals });
        }
        thread.sleeps = false;
    }
}

/// The end of an account, from a moment on.
fn since(parts: &[Part], from_ns: u64) -> Vec<Part> {
    let first = parts.partition_point(|part| part.1 <= from_ns);
    parts[first..].iter().map(|&(start_ns, end_ns, label)| (start_ns.max(from_ns), end_ns, label)).collect()
}

/// The same waits by the walk back.
fn backward(past: &Recorded, waits: &[Wait]) -> Vec<Totals> {
    let asked: Vec<Asked> = waits
        .iter()
        .map(|&Wait { tid, from_ns, to_ns, .. }| Asked { tid, from_ns, to_ns, is_wait: false, is_command: false })
        .collect();
    let mut found = vec![Totals::new(); asked.len()];
    walk(&mut past.backwards(), &asked, &(), &mut |index, finding| {
        if let Finding::Segment(segment) = finding {
            *found[index].entry(label_of(segment)).or_default() += segment.to_ns - segment.from_ns;
        }
    });
    found
}

/// As the other way names it.
fn label_of(segment: Segment) -> String {
    match segment.who {
        _ if segment.kind == CauseKind::Unknown => UNKNOWN.to_owned(),
        Party::Thread { tid, .. } => label(segment.kind, &tid.to_string()),
        Party::Interrupt(name) => label(segment.kind, &name.text()),
        Party::Work(handler) => label(segment.kind, &handler.to_string()),
        Party::Cpu(cpu) => label(segment.kind, &format!("CPU {cpu}")),
        Party::Timer(_) => label(segment.kind, "timer"),
        Party::Text(text) => label(segment.kind, text),
        other => label(segment.kind, &format!("{other:?}")),
    }
}

/// What two ways of counting have in common.
#[derive(Debug)]
pub struct Agreement {
    pub waits: usize,
    /// The time of all waits.
    pub ns: u64,
    /// How much of it has another label.
    pub off_ns: u64,
    /// How much both ways know, alike or not.
    pub known_ns: u64,
    /// How much both ways know, and tell differently.
    pub contradicted_ns: u64,
    /// Of the wait that differs most, the labels that differ: nanoseconds forward and backward.
    pub worst: String,
}

impl Agreement {
    /// A share of its time.
    pub fn share(&self, ns: u64) -> f64 {
        ns as f64 / self.ns.max(1) as f64
    }
}

/// Tells all waits of a history both ways.
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
    let of = |totals: &Totals, label: &String| totals.get(label).copied().unwrap_or(0);
    let both = labels.into_iter().map(|label| (label, of(&wait.totals, label), of(backward, label)));
    let off = both.filter(|(_, forward, backward)| forward != backward);
    let off = off.map(|(label, forward, backward)| format!("{label}: {forward} and {backward}"));
    format!(
        "{wait_tid} for {ns} ns: {off}",
        wait_tid = wait.tid,
        ns = wait.to_ns - wait.from_ns,
        off = off.collect::<Vec<_>>().join(", ")
    )
}
