// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the processes on the path of a command as a tree: how long each worked and waited.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{self, Write};

use whylate_model::path::command::Explained;
use whylate_model::path::members::Members;
use whylate_model::units::{format_ns, printable};
use whylate_model::{ActorName, CauseKind};

use super::why;
use crate::render::text::pad::Spaces;

/// Rows for segments that belong to no thread, and for merged segments.
const OTHER: &str = "interrupts, steal, unknown";
const SMALL: &str = "small parts, thread not kept";

/// Nanoseconds on CPU, of run-queue wait, and of other waits.
type Columns = [u64; 3];

/// A row of the tree: one process.
#[derive(Debug, Default)]
struct Row {
    name: String,
    /// Rank of the thread that gave the name: the main thread first, then the one longest on the path.
    named_by: (bool, u64),
    threads: BTreeSet<u32>,
    columns: Columns,
}

/// Writes the tree of processes on the path.
pub fn write(out: &mut dyn Write, explained: &Explained, members: &Members) -> io::Result<()> {
    let mut rows: HashMap<u32, Row> = HashMap::new();
    let mut others: Vec<(ActorName, Columns)> = Vec::new();
    for (who, columns) in by_thread(explained) {
        let Some((tid, process)) = who.tid().and_then(|tid| Some((tid, members.process_of(tid)?))) else {
            others.push((who, columns));
            continue;
        };
        let (row, named_by) = (rows.entry(process).or_default(), (tid == process, columns.iter().sum()));
        if named_by >= row.named_by {
            let comm = who.comm().unwrap_or_default();
            (row.name, row.named_by) = (why::actor(&ActorName::thread(comm, process)), named_by);
        }
        row.threads.insert(tid);
        row.columns.iter_mut().zip(columns).for_each(|(sum, ns)| *sum += ns);
    }
    writeln!(out, "{:>10} {:>10} {:>10}  PROCESS ON THE PATH", "WORKED", "CPU WAIT", "OTHER WAIT")?;
    for (process, depth) in in_order(&rows, members) {
        let Row { name, threads, columns, .. } = &rows[&process];
        let threads = if threads.len() > 1 { format!(" ({} threads)", threads.len()) } else { String::new() };
        write_row(out, columns, &format!("{}{name}{threads}", Spaces(2 * depth)))?;
    }
    others.sort_by_cached_key(|(who, columns)| (Reverse(columns.iter().sum::<u64>()), who.clone()));
    others.iter().try_for_each(|(who, columns)| write_row(out, columns, &who.to_string()))
}

fn write_row(out: &mut dyn Write, columns: &Columns, who: &str) -> io::Result<()> {
    let [worked, ready, waited] = columns.map(format_ns);
    writeln!(out, "{worked:>10} {ready:>10} {waited:>10}  {}", printable(who))
}

/// Returns the processes in tree order, with their depths: each below its nearest ancestor on the path. Siblings are
/// sorted by the time of their subtrees, longest first.
fn in_order(rows: &HashMap<u32, Row>, members: &Members) -> Vec<(u32, usize)> {
    let above = |process: u32| {
        let mut met = HashSet::from([process]);
        let mut ancestors = std::iter::successors(members.parent_of(process), |&parent| members.parent_of(parent));
        // With reused PIDs, parents may form a cycle.
        ancestors.by_ref().take_while(|&parent| met.insert(parent)).find(|parent| rows.contains_key(parent))
    };
    let parents: HashMap<u32, Option<u32>> = rows.keys().map(|&process| (process, above(process))).collect();
    let mut sums: HashMap<u32, u64> = HashMap::new();
    for (&process, row) in rows {
        let all = std::iter::successors(Some(process), |process| parents[process]).take(rows.len());
        all.for_each(|process| *sums.entry(process).or_default() += row.columns.iter().sum::<u64>());
    }
    let mut below: BTreeMap<Option<u32>, Vec<u32>> = BTreeMap::new();
    for (&process, &parent) in &parents {
        below.entry(parent).or_default().push(process);
    }
    // The stack below is popped from its end, so siblings are sorted in ascending order.
    below.values_mut().for_each(|processes| processes.sort_by_key(|process| (sums[process], Reverse(*process))));
    let mut order = Vec::new();
    let mut open: Vec<(u32, usize)> = below.remove(&None).into_iter().flatten().map(|process| (process, 0)).collect();
    while let Some((process, depth)) = open.pop() {
        order.push((process, depth));
        open.extend(below.remove(&Some(process)).into_iter().flatten().map(|process| (process, depth + 1)));
    }
    // Processes in a cycle of parents come last.
    order.extend(below.into_values().flatten().map(|process| (process, 0)));
    order
}

/// Sums up the columns of each thread.
fn by_thread(explained: &Explained) -> BTreeMap<ActorName, Columns> {
    let mut sums: BTreeMap<ActorName, Columns> = BTreeMap::new();
    let mut outer = None;
    // Backwards: a wait ends with what its waker did, and what that one had waited for comes before.
    for segment in explained.path.iter().rev() {
        if segment.depth == 0 {
            outer = None;
        }
        let (who, column) = match (segment.depth, segment.kind, &segment.ready) {
            // Merged segments of threads outside the command, of any depth.
            (0, CauseKind::Running | CauseKind::Work, _) if explained.is_folded && !segment.is_member => {
                (SMALL.into(), 2)
            }
            (0, CauseKind::Running | CauseKind::Work, _) => (segment.who.clone(), 0),
            (0, _, Some(ready)) => (ready.clone(), 1),
            (0, ..) if segment.is_ready() => (SMALL.into(), 1),
            (0, CauseKind::Irq | CauseKind::Softirq | CauseKind::Steal | CauseKind::Unknown, _) => (OTHER.into(), 1),
            (0, ..) => (SMALL.into(), 2),
            (1, ..) => {
                outer = Some(segment).filter(|segment| segment.waiter.is_some());
                (segment.waiter_name(), 2)
            }
            _ => (outer.unwrap_or(segment).waiter_name(), 2),
        };
        sums.entry(who).or_default()[column] += segment.ns;
    }
    sums
}

#[cfg(test)]
mod tests {
    use whylate_model::path::PathSegment;
    use whylate_model::path::history::{Holder, RunSlice, SwitchIn, Waker};
    use whylate_model::path::members::Births;

    use super::*;
    use crate::render::text::screens_of;

    fn part(ms: u64, kind: CauseKind, who: &str) -> PathSegment {
        PathSegment { ns: ms * 1_000_000, kind, who: who.parse().expect("any text"), ..PathSegment::default() }
    }

    fn born(at_ns: u64, tid: u32, parent: u32, is_in_parents_process: bool) -> RunSlice {
        let entry = SwitchIn::Woken { at_ns, by: Waker::Parent(parent), cpu: 0 };
        RunSlice { holder: Holder::Thread(tid), entry, is_in_parents_process, ..RunSlice::default() }
    }

    fn written(path: Vec<PathSegment>, is_folded: bool, births: &[RunSlice]) -> String {
        let elapsed_ns = path.iter().map(|segment| segment.ns).sum();
        let explained = Explained { elapsed_ns, path, is_folded, ..Explained::default() };
        let mut all = Births::default();
        births.iter().for_each(|birth| all.add(birth));
        let mut out = Vec::new();
        write(&mut out, &explained, &all.descendants_of(1)).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn renders_process_tree_with_thread_counts() {
        let births = [
            born(1, 5, 1, false),
            born(2, 6, 5, false),
            born(3, 7, 6, false),
            born(4, 8, 7, true),
            born(5, 9, 5, false),
        ];
        let waited =
            PathSegment { waiter: Some(ActorName::thread("sh", 5)), depth: 1, ..part(3, CauseKind::Timer, "timer") };
        let ready = PathSegment { ready: Some(ActorName::thread("cc1", 7)), ..part(4, CauseKind::Thread, "hog:77") };
        // Thread 6 in between is not on the path, and the last segment is not a member's.
        let path = vec![
            part(1, CauseKind::Running, "whylate-run:1"),
            // Before execve(2), the thread has another name.
            part(1, CauseKind::Running, "zzz:5"),
            part(1, CauseKind::Running, "sh:5"),
            part(9, CauseKind::Running, "worker:8"),
            part(5, CauseKind::Running, "cc1\x1b[2J:7"),
            ready,
            part(6, CauseKind::Running, "ld:9"),
            waited,
            part(1, CauseKind::Softirq, "timer"),
        ];
        insta::assert_snapshot!(written(path, false, &births), @r"
            WORKED   CPU WAIT OTHER WAIT  PROCESS ON THE PATH
            1.00ms        0ns        0ns  whylate-run:1 (whylate itself)
            2.00ms        0ns     3.00ms    sh:5
            14.0ms     4.00ms        0ns      cc1?[2J:7 (2 threads)
            6.00ms        0ns        0ns      ld:9
               0ns     1.00ms        0ns  interrupts, steal, unknown
        ");
    }

    #[test]
    fn tree_on_a_terminal() {
        // A chain of processes is as wide as it is deep.
        let births: Vec<RunSlice> =
            (0..12).map(|number| born(1 + u64::from(number), 5 + number, 4 + number, false)).collect();
        let births = [&[born(1, 5, 1, false)], &births[1..]].concat();
        let path = (5_u32..17)
            .map(|tid| part(u64::from(tid), CauseKind::Running, &format!("a-process-of-15:{tid}")))
            .collect();
        let text = written(path, false, &births);
        insta::assert_snapshot!(screens_of(|out, _| write!(out, "{text}")));
    }

    /// The lock's holder sleeps when the wait begins, and is no member.
    #[test]
    fn wait_for_sleeping_holder_is_of_its_waiter() {
        let births = [born(1, 5, 1, false), born(2, 6, 5, false)];
        let waits = |waiter: &str, tid, depth, part| PathSegment {
            waiter: Some(ActorName::thread(waiter, tid)),
            depth,
            ..part
        };
        let path = vec![
            waits("sleep", 5, 1, part(200, CauseKind::Timer, "timer")),
            part(1, CauseKind::Running, "flock:6"),
            waits("cache-gc", 77, 2, part(980, CauseKind::Timer, "timer")),
            waits("flock", 6, 1, part(2, CauseKind::Running, "cache-gc:77")),
            part(1, CauseKind::Running, "flock:6"),
        ];
        insta::assert_snapshot!(written(path, false, &births), @r"
            WORKED   CPU WAIT OTHER WAIT  PROCESS ON THE PATH
               0ns        0ns      200ms  sleep:5
            2.00ms        0ns      982ms    flock:6
        ");
    }

    #[test]
    fn reused_pids_do_not_loop() {
        let births = [born(1, 5, 1, false), born(2, 6, 5, false), born(3, 5, 6, false)];
        let path = vec![part(1, CauseKind::Running, "a:5"), part(2, CauseKind::Running, "b:6")];
        assert_eq!(written(path, false, &births).lines().count(), 3);
    }

    /// Merged segments have no depth and no waiter, but a kind.
    #[test]
    fn merged_segments_stay_waits() {
        let own = PathSegment { is_member: true, ..part(10, CauseKind::Running, "cc1:5") };
        let path = vec![
            own,
            part(20, CauseKind::Thread, "rustc"),
            part(30, CauseKind::Timer, "others"),
            part(40, CauseKind::Running, "server"),
            part(5, CauseKind::Softirq, "others"),
        ];
        insta::assert_snapshot!(written(path, true, &[born(1, 5, 1, false)]), @r"
            WORKED   CPU WAIT OTHER WAIT  PROCESS ON THE PATH
            10.0ms        0ns        0ns  cc1:5
               0ns     20.0ms     70.0ms  small parts, thread not kept
               0ns     5.00ms        0ns  interrupts, steal, unknown
        ");
    }
}
