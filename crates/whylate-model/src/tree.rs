// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks merged from their outermost frames on.

use std::collections::BTreeMap;

use crate::folded::{Frame, Root, frames};
use crate::wait::WaitClass;
use crate::{Histogram, Stack};

/// A frame with everything that was called from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// All time below.
    pub weight_ns: u64,
    /// Samples below.
    pub samples: u64,
    /// For how long the threads below have been there at the end.
    pub age: Histogram,
    /// The time below by what it is waited for.
    pub classes: BTreeMap<WaitClass, u64>,
    /// What was called from here.
    pub children: BTreeMap<Frame, Node>,
}

impl Node {
    /// The tree of these stacks.
    pub fn of<'a>(stacks: impl IntoIterator<Item = &'a Stack>, root: Root) -> Self {
        let mut tree = Node::default();
        for stack in stacks {
            tree.add(stack, &frames(stack, root));
        }
        tree
    }

    fn add(&mut self, stack: &Stack, frames: &[Frame]) {
        self.weight_ns += stack.weight_ns;
        self.samples += stack.samples;
        self.age.merge(&stack.age);
        if let Some(wait) = &stack.wait {
            *self.classes.entry(wait.class).or_default() += stack.weight_ns;
        }
        if let Some((first, rest)) = frames.split_first() {
            self.children.entry(first.clone()).or_default().add(stack, rest);
        }
    }

    /// What most of the time below is waited for.
    pub fn class(&self) -> Option<WaitClass> {
        self.classes.iter().max_by_key(|&(_, ns)| *ns).map(|(&class, _)| class)
    }

    /// The children, widest first.
    pub fn widest_first(&self) -> Vec<(&Frame, &Node)> {
        let mut children: Vec<(&Frame, &Node)> = self.children.iter().collect();
        children.sort_by(|a, b| b.1.weight_ns.cmp(&a.1.weight_ns).then_with(|| a.0.cmp(b.0)));
        children
    }

    /// The time of stacks that end here.
    pub fn own_ns(&self) -> u64 {
        self.weight_ns - self.children.values().map(|child| child.weight_ns).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_node_has_the_time_of_its_children_and_its_own(
            stacks in prop::collection::vec((prop::collection::vec(0_u8..3, 0..5), 0_u64..1000), 0..20)
        ) {
            let stacks: Vec<Stack> = stacks
                .into_iter()
                .map(|(frames, weight_ns)| Stack {
                    kernel: frames.iter().map(u8::to_string).collect(),
                    weight_ns,
                    ..Stack::default()
                })
                .collect();
            let tree = Node::of(&stacks, Root::Process);
            prop_assert_eq!(tree.weight_ns, stacks.iter().map(|stack| stack.weight_ns).sum::<u64>());
            fn check(node: &Node) -> u64 {
                node.own_ns() + node.children.values().map(check).sum::<u64>()
            }
            prop_assert_eq!(check(&tree), tree.weight_ns);
            let widths: Vec<u64> = tree.widest_first().iter().map(|(_, child)| child.weight_ns).collect();
            prop_assert!(widths.is_sorted_by(|a, b| a >= b));
        }
    }
}
