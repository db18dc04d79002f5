// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders what threads wait for as a table, and where they wait as a tree, widest branch first: in each process the
//! functions that wait, and their callers.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};

use whylate_model::folded::{Frame, Kind, Root, is_idle_kernel_thread, waiting};
use whylate_model::tree::{Node, Sums};
use whylate_model::units::format_ns;
use whylate_model::{ActorName, Snapshot, WaitClass};

use super::{on_cpu, percent, sets_idle_kernel_threads_apart, summary};
use crate::render::text::fit::without_middle;
use crate::render::text::pad::Spaces;
use crate::render::text::table::Table;
use crate::render::text::why;

/// Branches below this percentage are merged.
const NARROWEST_PERCENT: u64 = 1;
/// Processes are shown, however narrow, until they cover this percentage of the time.
const COVERED_PERCENT: u64 = 90;
/// Processes with this percentage of the on-CPU time are shown too.
const BUSY_PERCENT: u64 = 10;

/// Separates a process or a cgroup from what is in it.
const OWNER: &str = " > ";
/// Separates a function from its caller.
const CALLER: &str = " < ";
/// Stands for callers that are left out.
const CUT: &str = " < .. < ";
const MORE: &str = " < ...";
/// Minimum width of the frames of a line, and of those beside the class of the wait alone.
const MIN_FRAMES_WIDTH: usize = 32;
/// Minimum width of two shortened names.
const MIN_TWO_NAMES: usize = 20;
const MIN_BESIDE_CLASS: usize = 10;

/// Writes the classes of waits, and the tree. A function and its only caller share a line.
pub fn write(
    out: &mut dyn Write,
    snapshot: &Snapshot,
    root: Root,
    hide_idle: bool,
    columns: Option<usize>,
) -> io::Result<()> {
    writeln!(out, "{}\n", summary(snapshot, hide_idle))?;
    classes(snapshot, hide_idle).write(out, columns)?;
    writeln!(out)?;
    let layout = Layout::new(snapshot, root, hide_idle);
    layout.lines.iter().try_for_each(|line| writeln!(out, "{}", line.shown(layout.whole_ns, columns)))
}

/// Returns the table of what threads wait for, most of the time first, and waits that are idle by design last.
fn classes(snapshot: &Snapshot, hide_idle: bool) -> Table {
    let mut by_class: BTreeMap<Option<WaitClass>, (u64, u64)> = BTreeMap::new();
    for stack in waiting(snapshot, hide_idle) {
        let sum = by_class.entry(stack.wait.as_ref().map(|wait| wait.class)).or_default();
        *sum = (sum.0 + stack.weight_ns, sum.1 + stack.waits);
    }
    let whole_ns = by_class.values().map(|(ns, _)| ns).sum();
    let mut rows: Vec<_> = by_class.into_iter().filter(|(_, (ns, _))| *ns > 0).collect();
    rows.sort_by_key(|&(class, (ns, _))| (class == Some(WaitClass::Idle), Reverse(ns)));
    // Not every backend counts waits.
    let has_waits = rows.iter().any(|(_, (_, waits))| *waits > 0);
    let mut table = Table::new(if has_waits { "<WAIT, SHARE, TIME, WAITS" } else { "<WAIT, SHARE, TIME" });
    for (class, (ns, waits)) in rows {
        let words = class.map_or("not classified", WaitClass::words).to_owned();
        let mut cells = vec![words, percent(ns, whole_ns), format_ns(ns)];
        cells.extend(has_waits.then(|| waits.to_string()));
        table.row(cells);
    }
    table
}

/// A line of the tree: the sum of the lines one level below.
struct TreeLine {
    depth: usize,
    weight_ns: u64,
    names: Vec<String>,
    /// Facts about the threads; the first and the last are the most important.
    about: Vec<String>,
}

impl TreeLine {
    /// Returns the width of the frames, at least with the function that waits and its outermost caller.
    fn least(&self) -> usize {
        let ends = match &self.names[..] {
            [first, .., last] => first.chars().count() + CUT.len() + last.chars().count(),
            _ => usize::MAX,
        };
        self.names.join(CALLER).chars().count().min(ends)
    }

    fn shown(&self, whole_ns: u64, columns: Option<usize>) -> String {
        let indent = (2 * self.depth).min(columns.unwrap_or(usize::MAX) / 2);
        let head = format!("{:>6}  {}", percent(self.weight_ns, whole_ns), Spaces(indent));
        let all = self.about.len();
        let about = |count: usize| {
            let facts: Vec<&str> = self
                .about
                .iter()
                .take(1)
                .chain(self.about.iter().skip(all + 1 - count.max(1)))
                .take(count)
                .map(String::as_str)
                .collect();
            if facts.is_empty() { String::new() } else { format!("  [{}]", facts.join(", ")) }
        };
        let Some(columns) = columns else { return format!("{head}{}{}", self.names.join(CALLER), about(all)) };
        let room = columns.saturating_sub(head.chars().count());
        // Facts give way to frames, but are never cut.
        let for_frames = |facts: usize| room.saturating_sub(about(facts).chars().count());
        let least = self.least().min(MIN_FRAMES_WIDTH);
        let facts = (2..=all).rev().find(|&facts| for_frames(facts) >= least);
        let facts = facts.unwrap_or(usize::from(all > 0 && for_frames(1) >= least.min(MIN_BESIDE_CLASS)));
        format!("{head}{}{}", in_room(&self.names, for_frames(facts)), about(facts))
    }
}

/// Shortens a stack to `room` characters by cutting out callers before the outermost one, or with it if it is long: the
/// first functions show what is waited for.
fn in_room(names: &[String], room: usize) -> String {
    let whole = names.join(CALLER);
    let length = |name: &String| name.chars().count();
    let [first, .., last] = names else { return without_middle(&whole, room) };
    if whole.chars().count() <= room {
        return whole;
    }
    if room < MIN_TWO_NAMES {
        return without_middle(&whole, room);
    }
    let end = match length(first) + CUT.len() + length(last) {
        used if used <= room && names.len() > 2 => format!("{CUT}{last}"),
        _ => MORE.to_owned(),
    };
    let mut used = length(first) + end.chars().count();
    if used > room {
        return format!("{}{end}", without_middle(first, room.saturating_sub(end.chars().count())));
    }
    let mut shown = 1;
    while used + CALLER.len() + length(&names[shown]) <= room {
        used += CALLER.len() + length(&names[shown]);
        shown += 1;
    }
    format!("{}{end}", names[..shown].join(CALLER))
}

/// The lines of a tree.
struct Layout {
    whole_ns: u64,
    on_cpu_ns: u64,
    lines: Vec<TreeLine>,
}

impl Layout {
    fn new(snapshot: &Snapshot, root: Root, hide_idle: bool) -> Self {
        let apart = sets_idle_kernel_threads_apart(snapshot);
        let (idle, others): (Vec<_>, Vec<_>) = waiting(snapshot, hide_idle)
            .chain(on_cpu(snapshot))
            .partition(|stack| apart && is_idle_kernel_thread(stack));
        let tree = Node::of_waits(others, root);
        let mut idle_sums = Sums::default();
        idle.iter().for_each(|stack| idle_sums.add(stack));
        let whole_ns = tree.all.weight_ns + idle_sums.weight_ns;
        let mut layout = Layout { whole_ns, on_cpu_ns: tree.all.on_cpu_ns, lines: Vec::new() };
        layout.processes(&tree);
        if !idle.is_empty() {
            layout.leaf(0, vec!["[idle kernel threads]".to_owned()], &idle_sums, None);
        }
        layout
    }

    fn is_wide(&self, part: &Sums) -> bool {
        part.weight_ns > 0 && is_part(part.weight_ns, self.whole_ns, NARROWEST_PERCENT)
    }

    /// Adds the lines of processes. Many narrow processes may have most of the time together.
    fn processes(&mut self, tree: &Node) {
        let (all_ns, on_cpu_ns) = (tree.all.weight_ns, self.on_cpu_ns);
        let parts = tree.parts(|part, shown_ns| {
            let is_busy = part.on_cpu_ns > 0 && is_part(part.on_cpu_ns, on_cpu_ns, BUSY_PERCENT);
            let is_covered = is_part(shown_ns, all_ns, COVERED_PERCENT);
            is_busy || self.is_wide(part) || (part.weight_ns > 0 && !is_covered)
        });
        for (frame, child) in &parts.children {
            self.branch(frame, child, 0, None);
        }
        self.others(0, parts.others, &parts.rest, None);
    }

    /// Adds the lines of a branch. `above` is the class of all waits of the line above, which is not repeated.
    fn branch(&mut self, frame: &Frame, node: &Node, depth: usize, above: Option<WaitClass>) {
        let is_own = frame.kind == Kind::Label && ActorName::program(&frame.name).is_own();
        let own = if is_own { " (whylate itself)" } else { "" };
        let mut names = vec![format!("{}{own}", frame.name)];
        let (mut end, mut last) = (node, frame.kind);
        while let Some((next, child)) = end.children.first_key_value().filter(|_| end.children.len() == 1) {
            // Labels (process, thread, cgroup) keep a line of their own.
            if end.own.weight_ns > 0 || last == Kind::Runnable || (last == Kind::Label && next.kind != Kind::Label) {
                break;
            }
            last = next.kind;
            names.push(next.name.clone());
            end = child;
        }
        if last == Kind::Label {
            // A process is no caller of its threads.
            names = vec![names.join(OWNER)];
        }
        // The stack of a runnable thread is not where it waits.
        let parts = match last {
            Kind::Runnable => Default::default(),
            _ => end.parts(|part, _| self.is_wide(part)),
        };
        if parts.children.is_empty() {
            self.leaf(depth, names, &end.all, above);
            return;
        }
        let class = node.all.class().filter(|(_, is_all)| *is_all).map(|(class, _)| class);
        let (about, below) = match last {
            Kind::Label => (figures(&end.all), None),
            _ => (about(&node.all, "", above), class.or(above)),
        };
        self.lines.push(TreeLine { depth, weight_ns: node.all.weight_ns, names, about });
        for (frame, child) in &parts.children {
            self.branch(frame, child, depth + 1, below);
        }
        if let Some(own) = parts.own {
            self.leaf(depth + 1, vec!["[no caller is known]".to_owned()], own, below);
        }
        self.others(depth + 1, parts.others, &parts.rest, below);
    }

    fn others(&mut self, depth: usize, count: usize, rest: &Sums, above: Option<WaitClass>) {
        if count > 0 {
            self.leaf(depth, vec![format!("{count} smaller branches")], rest, above);
        }
    }

    fn leaf(&mut self, depth: usize, names: Vec<String>, sums: &Sums, above: Option<WaitClass>) {
        let about = about(sums, names.last().map_or("", String::as_str), above);
        self.lines.push(TreeLine { depth, weight_ns: sums.weight_ns, names, about });
    }
}

fn is_part(ns: u64, whole_ns: u64, percent: u64) -> bool {
    u128::from(ns) * 100 >= u128::from(whole_ns) * u128::from(percent)
}

/// Renders class (unless it is the name, or that of all waits of the line above), number of waits, on-CPU time, and
/// number and age of the waiting threads.
fn about(sums: &Sums, name: &str, above: Option<WaitClass>) -> Vec<String> {
    let is_new = |(class, _): &(WaitClass, bool)| name != class.frame() && above != Some(*class);
    let class = sums.class().filter(is_new).map(|(class, is_all)| match is_all {
        true => class.words().to_owned(),
        false => format!("mostly {}", class.words()),
    });
    let threads = match sums.age.count() {
        0 => None,
        // Threads that run or are runnable do not sleep.
        threads if sums.age.max_ns() == 0 => Some(why::counted(threads, "thread")),
        1 => Some(format!("1 thread for {}", format_ns(sums.age.max_ns()))),
        threads => Some(format!("{threads} threads for up to {}", format_ns(sums.age.max_ns()))),
    };
    class.into_iter().chain(figures(sums)).chain(threads).collect()
}

/// Renders the number of waits, if known, and the on-CPU time.
fn figures(sums: &Sums) -> Vec<String> {
    let waits = match sums.waits {
        0 => None,
        1 => Some("1 wait".to_owned()),
        waits => Some(format!("{waits} waits")),
    };
    waits.into_iter().chain((sums.on_cpu_ns > 0).then(|| format!("{} on CPU", format_ns(sums.on_cpu_ns)))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use whylate_model::wait::{Wait, WaitClass};
    use whylate_model::{Snapshot, Stack};

    use super::super::sample;
    use super::*;

    fn text_of(snapshot: &Snapshot, root: Root, hide_idle: bool, columns: Option<usize>) -> String {
        crate::render::text::text_of(|out| write(out, snapshot, root, hide_idle, columns))
    }

    fn written(root: Root, hide_idle: bool, columns: Option<usize>) -> String {
        text_of(&sample::snapshot(), root, hide_idle, columns)
    }

    #[test]
    fn whylate_is_named_as_itself() {
        let mut snapshot = sample::snapshot();
        for stack in &mut snapshot.stacks {
            stack.labels.insert("process".to_owned(), "whylate".to_owned());
        }
        let text = text_of(&snapshot, Root::Process, false, None);
        assert!(text.contains("%  whylate (whylate itself)"), "{text}");
    }

    #[test]
    fn the_widest_branch_comes_first() {
        insta::assert_snapshot!(written(Root::Process, false, None));
    }

    #[test]
    fn waker_follows_wait() {
        insta::assert_snapshot!(text_of(&sample::with_wakers(), Root::Process, false, None));
    }

    #[test]
    fn a_terminal_gets_both_ends_of_lines_and_no_escapes() {
        let text = written(Root::Thread, true, Some(70));
        insta::assert_snapshot!(text);
        assert!(!text.contains('\x1b'));
        assert!(!text.contains("do_poll"));
        for columns in 0..200 {
            let text = written(Root::Thread, false, Some(columns));
            let longest = text.lines().skip(2).map(|line| line.chars().count()).max();
            assert!(longest.is_some_and(|longest| longest <= columns.max(16)), "{columns}\n{text}");
        }
    }

    #[test]
    fn runnable_time_has_own_branch() {
        insta::assert_snapshot!(text_of(&sample::crowd(), Root::Process, false, None));
    }

    #[test]
    fn callers_are_cut_out_before_the_outermost_one() {
        let names: Vec<String> = ["do_poll", "sys_poll", "read", "step", "run", "main"].map(str::to_owned).into();
        assert_eq!(in_room(&names, 100), "do_poll < sys_poll < read < step < run < main");
        assert_eq!(in_room(&names, 37), "do_poll < sys_poll < read < .. < main");
        assert_eq!(in_room(&names, 30), "do_poll < sys_poll < .. < main");
        assert_eq!(in_room(&names, 20), "do_poll < .. < main");
        assert_eq!(in_room(&names, 12), "do_po.. main");
        // A long outermost name does not shorten the first one.
        let long = ["do_poll", "read", "run", "a_start_of_25_characters__"].map(str::to_owned);
        assert_eq!(in_room(&long, 30), "do_poll < read < run < ...");
        assert_eq!(in_room(&["do_poll_of_many_files".to_owned(), long[3].clone()], 24), "do_poll_..ny_files < ...");
        assert_eq!(in_room(&names[..1], 4), "d..l");
    }

    /// Generates stacks of a few processes and functions in any class, including kernel threads.
    fn stacks() -> impl Strategy<Value = Vec<Stack>> {
        const CLASSES: [WaitClass; 5] =
            [WaitClass::Idle, WaitClass::Lock, WaitClass::Cpu, WaitClass::Throttled, WaitClass::OnCpu];
        let stack = (0_u8..40, 0..CLASSES.len(), prop::collection::vec(0_u8..3, 0..6), 0_u64..1_000_000, 0_u8..3);
        let stack = stack.prop_map(|(process, class, frames, weight_ns, kernel)| {
            let mut labels: whylate_model::Labels = [("process".to_owned(), format!("p{process}"))].into();
            if kernel == 0 {
                labels.insert("kernel".to_owned(), "yes".to_owned());
            }
            let is_on_cpu = CLASSES[class] == WaitClass::OnCpu;
            let kernel = if is_on_cpu { Vec::new() } else { frames.iter().map(u8::to_string).collect() };
            // Shares from 1e-8 to 1.
            let weight_ns = weight_ns.pow(3) >> 24;
            Stack {
                labels,
                weight_ns,
                wait: Some(Wait { class: CLASSES[class], rule: String::new() }),
                kernel,
                ..Stack::default()
            }
        });
        prop::collection::vec(stack, 0..200)
    }

    /// Checks that each line is the sum of the lines one level below, and that the outermost add up to the total.
    fn adds_up(lines: &[TreeLine], depth: usize, whole_ns: u64) -> Result<(), TestCaseError> {
        let sum: u64 = lines.iter().filter(|line| line.depth == depth).map(|line| line.weight_ns).sum();
        prop_assert_eq!(sum, whole_ns);
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| line.depth == depth) {
            let below = &lines[index + 1..];
            let below = &below[..below.iter().position(|line| line.depth <= depth).unwrap_or(below.len())];
            if !below.is_empty() {
                adds_up(below, depth + 1, line.weight_ns)?;
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn the_lines_below_a_line_add_up_to_it(stacks in stacks(), hide_idle: bool, by in 0..3) {
            let root = [Root::Process, Root::Thread, Root::Cgroup][by as usize];
            let mut snapshot = Snapshot::new("offcpu", "sample", "host", 0);
            snapshot.stacks = stacks;
            let layout = Layout::new(&snapshot, root, hide_idle);
            let whole_ns: u64 = waiting(&snapshot, hide_idle).map(|stack| stack.weight_ns).sum();
            prop_assert_eq!(layout.whole_ns, whole_ns);
            adds_up(&layout.lines, 0, whole_ns)?;
            // Little is merged at the outermost level.
            let unnamed = |line: &&TreeLine| line.depth == 0 && line.names[0].contains("smaller branches");
            let rest_ns: u64 = layout.lines.iter().filter(unnamed).map(|line| line.weight_ns).sum();
            prop_assert!(rest_ns * 10 <= whole_ns, "{rest_ns} of {whole_ns}");
        }
    }
}
