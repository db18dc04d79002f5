// SPDX-License-Identifier: MIT OR Apache-2.0
//! Views of stacks from the outermost frame: an icicle graph, and an outline of frames that can be opened.

use std::ops::Range;

use unicode_width::UnicodeWidthStr as _;
use whylate_model::folded::{Frame, Root};
use whylate_model::tree::Node;
use whylate_model::units::{format_ns, printable};
use whylate_model::{Card, Stack};

use super::late;
use crate::render::text::offcpu::chains::parts_of;
use crate::render::text::pad::Spaces;
use crate::top::panel::cut;
use crate::top::panel::{Cell, Glyphs, Panel, Row};
use crate::top::program_filter::{ProgramFilter, Stacks};
use crate::top::view_kind::ViewKind;
use crate::top::window::Window;

/// Frames below this share of the total time have no row.
const SMALL: f64 = 0.005;
/// Maximum number of rows of an outline.
const MAX_ROWS: usize = 5_000;
const BAR: usize = 12;
/// Maximum depth of an icicle graph.
const MAX_DEPTH: usize = 40;
/// Minimum width of a frame with a name, in columns.
const MIN_WIDTH: usize = 3;

/// Builds panels of the selected stacks; none if no stack is selected.
pub fn panels(window: &Window, card: &'static Card, stacks: &[Stack], shown: &Stacks, columns: usize) -> Vec<Panel> {
    let tree = Node::of(stacks.iter().filter(|stack| shown.matches(&stack.labels)), Root::Process);
    if tree.children.is_empty() {
        return Vec::new();
    }
    panels_of(&Zoom { card, shown, path: "", glyphs: window.glyphs }, &tree, columns)
}

/// Builds an outline of a program's wait chains: where it waited, for which waker, and where the waker waited in turn.
pub fn chains(window: &Window, card: &'static Card, program: &ProgramFilter) -> Option<Panel> {
    let shown = Stacks::Chains(program.clone());
    let tree = chain_tree(window, card, program);
    (!tree.children.is_empty()).then(|| outline(&Zoom { card, shown: &shown, path: "", glyphs: window.glyphs }, &tree))
}

fn chain_tree(window: &Window, card: &Card, program: &ProgramFilter) -> Node {
    let own = late::events(window).filter(|(of, .., event)| of.name == card.name && program.matches(&event.labels));
    Node::of_parts(own.flat_map(|(.., event)| parts_of(event, Root::Process)))
}

/// Builds panels of one frame and its callees.
pub fn zoomed(window: &Window, card: &'static Card, shown: &Stacks, path: &str, columns: usize) -> Vec<Panel> {
    let tree = match shown {
        Stacks::Chains(program) => chain_tree(window, card, program),
        _ => {
            let snapshot = window.merged(card);
            let stacks = snapshot.iter().flat_map(|snapshot| &snapshot.stacks);
            Node::of(stacks.filter(|stack| shown.matches(&stack.labels)), Root::Process)
        }
    };
    let (mut node, mut frames) = (&tree, 0);
    // Names have no newline, as in folded stacks.
    for key in path.split_terminator('\n') {
        let Some((_, child)) = node.children.iter().find(|(frame, _)| key_of(frame) == key) else {
            return vec![Panel::text("outline", card.name, "Not seen in this span.")];
        };
        (node, frames) = (child, frames + 1);
    }
    let mut panels = panels_of(&Zoom { card, shown, path, glyphs: window.glyphs }, node, columns);
    if let Some(name) = path.split_terminator('\n').next_back().and_then(|key| key.split_once(' '))
        && let Some(panel) = panels.first_mut()
    {
        panel.title = format!("{}, {frames} frames deep: {}", name.1, panel.title);
    }
    panels
}

/// Frame of a source's stacks that a view starts from.
struct Zoom<'a> {
    card: &'static Card,
    shown: &'a Stacks,
    /// Keys of the frame and its callers, from the outermost on.
    path: &'a str,
    glyphs: Glyphs,
}

fn panels_of(zoom: &Zoom<'_>, node: &Node, columns: usize) -> Vec<Panel> {
    vec![outline(zoom, node), Panel::text("icicle", "Icicle graph", &icicle(node, columns.saturating_sub(2)))]
}

fn outline(zoom: &Zoom<'_>, node: &Node) -> Panel {
    let mut rows = Vec::new();
    add_frames(zoom, node, node.all.weight_ns, zoom.path, 0, &mut rows);
    let time = format_ns(node.all.weight_ns);
    match zoom.shown {
        Stacks::Chains(_) => {
            let title = format!("Wakeup chains of late waits, {time} in total");
            Panel::table("chains", title, "SHARE, TIME, =BAR, <FRAME", rows, "nothing was late")
        }
        _ => {
            let (first, rest) = zoom.card.stacks.split_at(zoom.card.stacks.len().min(1));
            let title = format!("{}{rest}, {time} in total", first.to_uppercase());
            Panel::table("outline", title, "SHARE, TIME, =BAR, <FRAME", rows, "no stack")
        }
    }
}

/// Identifies a frame among its siblings.
fn key_of(frame: &Frame) -> String {
    format!("{:?} {}", frame.kind, frame.name)
}

fn add_frames(zoom: &Zoom<'_>, node: &Node, all_ns: u64, path: &str, depth: usize, rows: &mut Vec<Row>) {
    for (frame, child) in node.widest_first() {
        let share = child.all.weight_ns as f64 / all_ns.max(1) as f64;
        if share < SMALL || rows.len() >= MAX_ROWS {
            break;
        }
        let key = format!("{path}{}\n", key_of(frame));
        rows.push(Row {
            key: key.clone(),
            cells: vec![
                Cell::Share(share),
                Cell::Ns(child.all.weight_ns),
                Cell::Ordered(zoom.glyphs.bar(share, BAR), child.all.weight_ns),
                Cell::Text(format!("{}{}", Spaces(depth), frame.name)),
            ],
            is_late: false,
            opens: (!child.children.is_empty())
                .then(|| ViewKind::Frames(zoom.card.name, zoom.shown.clone(), key.clone())),
        });
        add_frames(zoom, child, all_ns, &key, depth + 1, rows);
    }
}

/// Draws a line per depth, each frame as wide as its share, with the outermost frames on top.
fn icicle(node: &Node, columns: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    add_boxes(node, 0..columns, 0, &mut lines);
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn add_boxes(node: &Node, span: Range<usize>, depth: usize, lines: &mut Vec<String>) {
    if depth >= MAX_DEPTH {
        return;
    }
    let all_ns = node.all.weight_ns.max(1) as f64;
    let mut from = span.start;
    for (frame, child) in node.widest_first() {
        let width = (child.all.weight_ns as f64 / all_ns * span.len() as f64) as usize;
        let width = width.min(span.end - from);
        if width < MIN_WIDTH {
            break;
        }
        if lines.len() <= depth {
            lines.push(String::new());
        }
        let line = &mut lines[depth];
        *line += &" ".repeat(from.saturating_sub(line.width()));
        let name = cut(&printable(&frame.name), width - 1);
        *line += &format!("|{name}{}", "_".repeat(width.saturating_sub(1 + name.width())));
        add_boxes(child, from..from + width, depth + 1, lines);
        from += width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(frames: &[&str], weight_ns: u64) -> Stack {
        let user = frames.iter().rev().map(|&frame| frame.to_owned()).collect();
        let labels = [("process".to_owned(), "app".to_owned())].into();
        Stack { labels, user, weight_ns, samples: 1, ..Stack::default() }
    }

    #[test]
    fn frame_width_is_its_share_below_its_caller() {
        let stacks = [stack(&["main", "read"], 600), stack(&["main", "\u{6f22}\u{5b57}"], 300), stack(&["idle"], 100)];
        let tree = Node::of(&stacks, Root::Process);
        let picture = icicle(&tree, 40);
        let lines: Vec<&str> = picture.lines().collect();
        assert_eq!(lines[0], format!("|app{}", "_".repeat(36)));
        assert_eq!(lines[1].find("|i.."), Some(36), "{picture}");
        assert!(lines[2].starts_with("|read___") && lines[2].contains("|\u{6f22}\u{5b57}__"), "{picture}");
        assert!(lines.iter().all(|line| line.width() <= 40), "{picture}");
        // A frame too narrow for a name has no box.
        assert!(!icicle(&tree, 20).contains("|i") && icicle(&tree, 1).is_empty());
    }
}
