// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tree of where threads wait, widest first, as people read it.

use std::io::{self, Write};

use whylate_model::Snapshot;
use whylate_model::folded::{Frame, Kind, Root, waiting};
use whylate_model::tree::Node;
use whylate_model::units::format_ns;

use super::{percent, summary};

/// Narrower branches are left out.
const NARROWEST_PER_MILLE: u64 = 10;

/// Writes the tree. Frames that have only one caller and one callee share a line.
///
/// # Errors
/// Those of the writer.
pub fn write(
    out: &mut dyn Write,
    snapshot: &Snapshot,
    root: Root,
    hide_idle: bool,
    columns: Option<usize>,
) -> io::Result<()> {
    writeln!(out, "{}\n", summary(snapshot, hide_idle))?;
    let tree = Node::of(waiting(snapshot, hide_idle), root);
    let mut writer = Writer { out, whole_ns: tree.weight_ns, columns, left_out_ns: 0 };
    writer.children(&tree, 0)?;
    let left_out_ns = writer.left_out_ns;
    if left_out_ns > 0 {
        writeln!(out, "{:>6}  in branches of less than 1%", percent(left_out_ns, tree.weight_ns))?;
    }
    Ok(())
}

struct Writer<'a> {
    out: &'a mut dyn Write,
    whole_ns: u64,
    columns: Option<usize>,
    left_out_ns: u64,
}

impl Writer<'_> {
    fn children(&mut self, node: &Node, depth: usize) -> io::Result<()> {
        for (frame, child) in node.widest_first() {
            if child.weight_ns * 1000 < self.whole_ns * NARROWEST_PER_MILLE {
                self.left_out_ns += child.weight_ns;
            } else {
                self.branch(frame, child, depth)?;
            }
        }
        Ok(())
    }

    fn branch(&mut self, frame: &Frame, node: &Node, depth: usize) -> io::Result<()> {
        let mut names = vec![shown(frame)];
        let (mut end, mut last) = (node, frame.kind);
        while let Some((next, child)) = end.children.first_key_value().filter(|_| end.children.len() == 1) {
            // Whose stack it is stays on a line of its own.
            if end.own_ns() > 0 || (last == Kind::Label && next.kind != Kind::Label) {
                break;
            }
            last = next.kind;
            names.push(shown(next));
            end = child;
        }
        let mut line =
            format!("{:>6}  {}{}", percent(node.weight_ns, self.whole_ns), "  ".repeat(depth), names.join(" > "));
        if end.children.is_empty() {
            let about = about(end);
            if let Some(columns) = self.columns {
                // The innermost frames say most: what is cut off is in the middle.
                let room = columns.saturating_sub(about.chars().count() + 2);
                line = shortened(&line, room, 8 + 2 * depth);
            }
            line += &format!("  {about}");
        } else if let Some(columns) = self.columns {
            line = shortened(&line, columns, 8 + 2 * depth);
        }
        writeln!(self.out, "{line}")?;
        self.children(end, depth + 1)
    }
}

fn shown(frame: &Frame) -> String {
    frame.name.clone()
}

/// What for, how many threads are there now, and for how long they have been.
fn about(node: &Node) -> String {
    let class = node.class().map_or("", |class| class.words());
    match node.age.count() {
        0 => format!("[{class}]"),
        1 => format!("[{class}, 1 thread for {}]", format_ns(node.age.max_ns())),
        threads => format!(
            "[{class}, {threads} threads, half of them for {}, the longest for {}]",
            format_ns(node.age.quantile_ns(0.5)),
            format_ns(node.age.max_ns())
        ),
    }
}

/// The line in so many columns, without its middle; what stands before `head` stays.
fn shortened(line: &str, columns: usize, head: usize) -> String {
    let characters: Vec<char> = line.chars().collect();
    if characters.len() <= columns || columns < head + 8 {
        return line.to_owned();
    }
    let begin: String = characters[..head].iter().collect();
    let end: String = characters[characters.len() - (columns - head - 2)..].iter().collect();
    format!("{begin}..{end}")
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn written(root: Root, hide_idle: bool, columns: Option<usize>) -> String {
        let mut out = Vec::new();
        write(&mut out, &sample::snapshot(), root, hide_idle, columns).expect("a vector takes everything");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn the_widest_branch_comes_first() {
        insta::assert_snapshot!(written(Root::Process, false, None));
    }

    #[test]
    fn who_ended_a_wait_stands_behind_it() {
        let mut out = Vec::new();
        write(&mut out, &sample::with_wakers(), Root::Process, false, None).expect("a vector takes everything");
        insta::assert_snapshot!(String::from_utf8(out).expect("text"));
    }

    #[test]
    fn a_terminal_gets_the_innermost_frames_and_no_escapes() {
        let text = written(Root::Thread, true, Some(90));
        insta::assert_snapshot!(text);
        assert!(!text.contains('\x1b'));
        assert!(!text.contains("do_poll"));
    }
}
