// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws flame graphs, with the root on top. The script draws the same rows again on zoom, search, or selection of a
//! span.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use whylate_model::folded::{Frame, Kind, Root, frames};
use whylate_model::tree::Node;
use whylate_model::units::format_ns;
use whylate_model::{Stack, WaitClass};

use super::Report;
use super::markup::text;
use super::rows::Sum as _;

/// Maximum number of rows with all their frames. Others keep only their first frame.
const MAX_ROWS: usize = 1_500;
/// Maximum number of frames per row. Deeper stacks lose their middle.
const MAX_DEPTH: usize = 100;
/// Picture without scripts: its width, the height of a frame, the width of a character, and the minimum width of a
/// frame.
const WIDTH: f64 = 1_200.0;
const HEIGHT: usize = 18;
const LETTER: f64 = 7.0;
const MIN_WIDTH: f64 = 2.0;
/// Maximum number of frames in a picture.
const MAX_FRAMES: usize = 3_000;

/// A flame graph.
pub struct Graph {
    pub title: String,
    pub rows: Vec<Row>,
    /// Time of stacks beyond the limits, in nanoseconds.
    pub beyond_ns: u64,
}

/// A stack, or a chain of waits, with its nanoseconds by slot.
pub struct Row {
    pub frames: Vec<Frame>,
    /// Whether the thread waits for work, and no other thread waits for it.
    pub is_idle: bool,
    pub slots: Vec<(u32, u64)>,
}

impl Row {
    fn ns(&self) -> u64 {
        self.slots.iter().fold(0, |sum, (_, ns)| sum.saturating_add(*ns))
    }
}

/// Returns the graphs of a source: its stacks, and its chains of late waits.
pub fn graphs(report: &Report, number: usize) -> Vec<Graph> {
    let card = report.cards[number];
    let class = |stack: &Stack| stack.wait.as_ref().map(|wait| wait.class);
    let waiting = report.stacks[number].iter().filter(|(stack, _)| class(stack) != Some(WaitClass::OnCpu));
    let rows = waiting.map(|(stack, sums)| Row {
        frames: truncate_middle(frames_of(stack)),
        is_idle: class(stack) == Some(WaitClass::Idle),
        slots: sums.iter().map(|(slot, sums)| (*slot, sums.weight_ns)).collect(),
    });
    let stacks = Graph {
        title: format!("Flame graph: {}", card.stacks),
        rows: merge_smallest(rows.collect()),
        beyond_ns: report.stacks[number].beyond_ns(),
    };
    let chains = report.chains[number].iter().into_iter();
    let chains = chains.map(|(frames, slots)| Row {
        frames: truncate_middle(frames.to_vec()),
        is_idle: false,
        slots: slots.to_vec(),
    });
    let title = "Chains of late waits: waiter, wait, waker, and what the waker did in that time".to_owned();
    let chains = Graph { title, rows: merge_smallest(chains.collect()), beyond_ns: report.chains[number].beyond_ns() };
    [stacks, chains].into_iter().filter(|graph| !graph.rows.is_empty()).collect()
}

fn frames_of(stack: &Stack) -> Vec<Frame> {
    let mut all = frames(stack, Root::Process);
    if !stack.labels.contains_key("process") {
        let labels: Vec<&str> = stack.labels.values().map(String::as_str).collect();
        all[0] = Frame::new(Kind::Label, &labels.join(" "));
    }
    all
}

/// Keeps the outermost and the innermost frames.
fn truncate_middle(mut frames: Vec<Frame>) -> Vec<Frame> {
    if frames.len() > MAX_DEPTH {
        let cut = frames.len() - MAX_DEPTH;
        frames.splice(MAX_DEPTH / 2..MAX_DEPTH / 2 + cut, [Frame::new(Kind::Between, "...")]);
    }
    frames
}

/// Keeps the rows with most time, and merges the others by their first frame.
fn merge_smallest(mut rows: Vec<Row>) -> Vec<Row> {
    rows.retain(|row| row.ns() > 0);
    rows.sort_by(|a, b| Reverse(a.ns()).cmp(&Reverse(b.ns())).then_with(|| a.frames.cmp(&b.frames)));
    if rows.len() <= MAX_ROWS {
        return rows;
    }
    let mut sums: BTreeMap<(Frame, bool), BTreeMap<u32, u64>> = BTreeMap::new();
    for row in rows.split_off(MAX_ROWS) {
        let Some(first) = row.frames.into_iter().next() else { continue };
        let sum = sums.entry((first, row.is_idle)).or_default();
        row.slots.iter().for_each(|(slot, ns)| sum.entry(*slot).or_default().add(ns));
    }
    let smaller = || Frame::new(Kind::Between, "[smaller ones]");
    rows.extend(sums.into_iter().map(|((first, is_idle), slots)| Row {
        frames: vec![first, smaller()],
        is_idle,
        slots: slots.into_iter().collect(),
    }));
    rows
}

/// Returns the CSS class of a kind of frame.
pub fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Label => "f-label",
        Kind::Runnable => "f-runnable",
        Kind::User => "f-user",
        Kind::Between => "f-between",
        Kind::Kernel => "f-kernel",
        Kind::Waker => "f-waker",
        Kind::WhileWaiting => "f-concurrent",
    }
}

impl Graph {
    /// Returns how much of the graph's time is idle by design, and the whole time.
    pub fn idle_ns(&self) -> (u64, u64) {
        let sum = |rows: &mut dyn Iterator<Item = &Row>| rows.fold(0_u64, |sum, row| sum.saturating_add(row.ns()));
        (sum(&mut self.rows.iter().filter(|row| row.is_idle)), sum(&mut self.rows.iter()))
    }

    /// Draws the whole span. Hides what is idle by design, unless there is nothing else.
    pub fn draw(&self) -> String {
        let (idle_ns, all_ns) = self.idle_ns();
        let is_shown = |row: &&Row| !row.is_idle || idle_ns == all_ns;
        let root = Node::of_parts(self.rows.iter().filter(is_shown).map(|row| (row.frames.clone(), row.ns())));
        let all_ns = root.all.weight_ns;
        let mut drawing = Drawing { out: String::new(), whole_ns: all_ns.max(1), frames: 0, max_depth: 0 };
        drawing.frame("all", "f-label", all_ns, 0.0, 0);
        drawing.children(&root, 0.0, 1);
        let height = (drawing.max_depth + 1) * HEIGHT;
        format!(
            "<div class=\"wide\"><svg class=\"flame\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">{}</svg></div>\n",
            text(&self.title),
            drawing.out
        )
    }
}

struct Drawing {
    out: String,
    whole_ns: u64,
    frames: usize,
    max_depth: usize,
}

impl Drawing {
    fn width(&self, ns: u64) -> f64 {
        ns as f64 / self.whole_ns as f64 * WIDTH
    }

    fn frame(&mut self, name: &str, class: &str, ns: u64, x: f64, depth: usize) {
        let (width, y) = (self.width(ns), depth * HEIGHT);
        self.frames += 1;
        self.max_depth = self.max_depth.max(depth);
        let percent = ns as f64 * 100.0 / self.whole_ns as f64;
        let _ = write!(
            self.out,
            "<g><title>{}: {} ({percent:.1}%)</title><rect class=\"{class}\" x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\"/>",
            text(name),
            format_ns(ns),
            HEIGHT - 1
        );
        let max_chars = ((width - 4.0) / LETTER) as usize;
        if max_chars >= 3 {
            let name = super::markup::name(name);
            let shown: String = if name.chars().count() <= max_chars {
                name
            } else {
                name.chars().take(max_chars - 2).chain("..".chars()).collect()
            };
            let _ = write!(self.out, "<text x=\"{:.1}\" y=\"{}\">{}</text>", x + 3.0, y + 13, text(&shown));
        }
        self.out += "</g>";
    }

    fn children(&mut self, node: &Node, x: f64, depth: usize) {
        let mut x = x;
        for (frame, child) in &node.children {
            let ns = child.all.weight_ns;
            let width = self.width(ns);
            if width >= MIN_WIDTH && self.frames < MAX_FRAMES {
                self.frame(&frame.name, class(frame.kind), ns, x, depth);
                self.children(child, x, depth + 1);
            }
            x += width;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(names: &str, ns: u64, is_idle: bool) -> Row {
        let frames = names.split(' ').map(|name| Frame::new(Kind::User, name)).collect();
        Row { frames, is_idle, slots: vec![(0, ns)] }
    }

    #[test]
    fn root_is_on_top_and_spans_all() {
        let rows = vec![row("server read", 600, false), row("server wait", 300, false), row("idle", 100, true)];
        let graph = Graph { title: "x".to_owned(), rows, beyond_ns: 0 };
        let drawing = graph.draw();
        assert!(
            drawing.contains(
                "<title>all: 900ns (100.0%)</title><rect class=\"f-label\" x=\"0.0\" y=\"0\" width=\"1200.0\""
            ),
            "{drawing}"
        );
        assert!(drawing.contains("<title>wait: 300ns (33.3%)</title>") && !drawing.contains("idle"), "{drawing}");
        assert_eq!(graph.idle_ns(), (100, 1_000));
    }

    #[test]
    fn merged_rows_keep_their_time() {
        let rows: Vec<Row> = (0..MAX_ROWS as u64 + 50)
            .map(|number| row(&format!("p{} f{number}", number % 3), 10 + number, false))
            .collect();
        let all_ns: u64 = rows.iter().map(Row::ns).sum();
        let kept = merge_smallest(rows);
        assert_eq!((kept.len(), kept.iter().map(Row::ns).sum::<u64>()), (MAX_ROWS + 3, all_ns));
        assert_eq!(truncate_middle(vec![Frame::new(Kind::Kernel, "f"); 500]).len(), MAX_DEPTH + 1);
    }
}
