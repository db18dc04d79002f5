// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tree of stacks, merged from their outermost frames or from the functions that wait.

use std::collections::BTreeMap;

use crate::folded::{Frame, Root, frames, innermost_first};
use crate::wait::WaitClass;
use crate::{Histogram, Stack};

/// Sums over the stacks that start with the same frames.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// Time off CPU, in nanoseconds.
    pub weight_ns: u64,
    /// Time on CPU, which has no frames, in nanoseconds.
    pub on_cpu_ns: u64,
    /// Number of waits.
    pub waits: u64,
    /// Age of the waits still in progress at the end.
    pub age: Histogram,
    /// Time off CPU by class of wait, in nanoseconds.
    pub classes: BTreeMap<WaitClass, u64>,
}

impl Sums {
    /// Adds a stack.
    pub fn add(&mut self, stack: &Stack) {
        match stack.wait.as_ref().map(|wait| wait.class) {
            Some(WaitClass::OnCpu) => self.on_cpu_ns += stack.weight_ns,
            class => {
                self.weight_ns += stack.weight_ns;
                self.waits += stack.waits;
                self.age.merge(&stack.age);
                if let Some(class) = class {
                    *self.classes.entry(class).or_default() += stack.weight_ns;
                }
            }
        }
    }

    fn merge(&mut self, other: &Sums) {
        self.weight_ns += other.weight_ns;
        self.on_cpu_ns += other.on_cpu_ns;
        self.waits += other.waits;
        self.age.merge(&other.age);
        for (&class, ns) in &other.classes {
            *self.classes.entry(class).or_default() += ns;
        }
    }

    fn has_time(&self) -> bool {
        self.weight_ns > 0 || self.on_cpu_ns > 0
    }

    /// Returns the class of most of the time, and whether it covers all of it.
    pub fn class(&self) -> Option<(WaitClass, bool)> {
        let (&class, &ns) = self.classes.iter().max_by_key(|&(_, ns)| *ns)?;
        Some((class, ns == self.weight_ns))
    }
}

/// A frame with its callees, or with its callers in a tree of waits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Sums of all stacks through this frame.
    pub all: Sums,
    /// Sums of the stacks that end here.
    pub own: Sums,
    /// Callees or callers by frame.
    pub children: BTreeMap<Frame, Node>,
}

/// Parts of a node: those shown, and the others merged. Their times add up to the node's.
#[derive(Debug, Default, PartialEq)]
pub struct Parts<'a> {
    /// Shown children, widest first.
    pub children: Vec<(&'a Frame, &'a Node)>,
    /// Stacks that end at the node, if others continue.
    pub own: Option<&'a Sums>,
    /// Number of parts not shown.
    pub others: usize,
    /// Sums of the parts not shown.
    pub rest: Sums,
}

impl Node {
    /// Builds the tree of these stacks, from their outermost frames.
    pub fn of<'a>(stacks: impl IntoIterator<Item = &'a Stack>, root: Root) -> Self {
        Node::of_frames(stacks, |stack| frames(stack, root))
    }

    /// Builds the tree of the functions that wait, with their callers below them.
    pub fn of_waits<'a>(stacks: impl IntoIterator<Item = &'a Stack>, root: Root) -> Self {
        Node::of_frames(stacks, |stack| innermost_first(stack, root))
    }

    fn of_frames<'a>(stacks: impl IntoIterator<Item = &'a Stack>, frames: impl Fn(&Stack) -> Vec<Frame>) -> Self {
        let mut tree = Node::default();
        stacks.into_iter().for_each(|stack| tree.add(&frames(stack), &|sums| sums.add(stack)));
        tree
    }

    /// Builds the tree of parts of waits, each with its frames and nanoseconds.
    pub fn of_parts(parts: impl IntoIterator<Item = (Vec<Frame>, u64)>) -> Self {
        let mut tree = Node::default();
        for (frames, ns) in parts {
            tree.add(&frames, &|sums| sums.weight_ns = sums.weight_ns.saturating_add(ns));
        }
        tree
    }

    fn add(&mut self, frames: &[Frame], take: &impl Fn(&mut Sums)) {
        take(&mut self.all);
        match frames.split_first() {
            Some((first, rest)) => self.children.entry(first.clone()).or_default().add(rest, take),
            None => take(&mut self.own),
        }
    }

    /// Returns the children, widest first.
    pub fn widest_first(&self) -> Vec<(&Frame, &Node)> {
        let mut children: Vec<(&Frame, &Node)> = self.children.iter().collect();
        children.sort_by(|a, b| b.1.all.weight_ns.cmp(&a.1.all.weight_ns).then_with(|| a.0.cmp(b.0)));
        children
    }

    /// Splits the node into shown parts and the rest. `is_shown` decides on each child, widest first, given the time of
    /// those shown before. A rest of one part is shown instead; if nothing is shown, there is no rest either.
    pub fn parts(&self, mut is_shown: impl FnMut(&Sums, u64) -> bool) -> Parts<'_> {
        let mut parts = Parts::default();
        let mut shown_ns = 0;
        let mut others = Vec::new();
        for (frame, child) in self.widest_first() {
            if is_shown(&child.all, shown_ns) {
                shown_ns += child.all.weight_ns;
                parts.children.push((frame, child));
            } else if child.all.has_time() {
                others.push((frame, child));
            }
        }
        let mut own = Some(&self.own).filter(|own| own.weight_ns > 0 && !self.children.is_empty());
        parts.own = own.take_if(|own| is_shown(own, shown_ns));
        if parts.children.is_empty() && parts.own.is_none() {
            return parts;
        }
        match (others.as_slice(), own) {
            (&[one], None) => parts.children.push(one),
            (&[], Some(_)) => parts.own = own,
            _ => {
                parts.others = others.len() + usize::from(own.is_some());
                others.iter().map(|(_, child)| &child.all).chain(own).for_each(|part| parts.rest.merge(part));
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wait::Wait;

    fn stacks() -> impl Strategy<Value = Vec<Stack>> {
        let stack = (prop::collection::vec(0_u8..3, 0..5), 0_u64..1000, any::<bool>());
        let stack = stack.prop_map(|(frames, weight_ns, is_on_cpu)| Stack {
            kernel: frames.iter().map(u8::to_string).collect(),
            weight_ns,
            wait: is_on_cpu.then(|| Wait { class: WaitClass::OnCpu, rule: String::new() }),
            ..Stack::default()
        });
        prop::collection::vec(stack, 0..20)
    }

    proptest! {
        #[test]
        fn node_time_is_children_plus_own(stacks in stacks(), least_ns in 0_u64..2000) {
            let tree = Node::of(&stacks, Root::Process);
            let all_ns = tree.all.weight_ns + tree.all.on_cpu_ns;
            prop_assert_eq!(all_ns, stacks.iter().map(|stack| stack.weight_ns).sum::<u64>());
            fn check(node: &Node, least_ns: u64) -> Result<(), TestCaseError> {
                let children_ns: u64 = node.children.values().map(|child| child.all.weight_ns).sum();
                prop_assert_eq!(node.own.weight_ns + children_ns, node.all.weight_ns);
                let widths: Vec<u64> = node.widest_first().iter().map(|(_, child)| child.all.weight_ns).collect();
                prop_assert!(widths.is_sorted_by(|a, b| a >= b));
                let parts = node.parts(|part, _| part.weight_ns >= least_ns);
                if parts != Parts::default() {
                    let shown_ns: u64 = parts.children.iter().map(|(_, child)| child.all.weight_ns).sum();
                    let own_ns = parts.own.map_or(0, |own| own.weight_ns);
                    prop_assert_eq!(shown_ns + own_ns + parts.rest.weight_ns, node.all.weight_ns);
                    prop_assert_eq!(parts.others > 1, parts.rest.has_time());
                    // The node's own on-CPU time is shown in its own line.
                    let on_cpu_ns: u64 = parts.children.iter().map(|(_, child)| child.all.on_cpu_ns).sum();
                    let own_ns = node.all.on_cpu_ns - on_cpu_ns - parts.rest.on_cpu_ns;
                    prop_assert!([0, node.own.on_cpu_ns].contains(&own_ns));
                }
                node.children.values().try_for_each(|child| check(child, least_ns))
            }
            check(&tree, least_ns)?;
        }
    }
}
