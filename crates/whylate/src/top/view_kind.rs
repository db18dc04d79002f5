// SPDX-License-Identifier: MIT OR Apache-2.0
//! Subjects of views.

use whylate_model::{ActorName, CauseKind, Labels};

use super::program_filter::{ProgramFilter, Stacks};

/// Subject of a view.
#[derive(Clone, Debug, PartialEq)]
pub enum ViewKind {
    Overview,
    /// A source by name.
    Source(&'static str),
    /// One series of a source.
    Series(&'static str, Labels),
    /// A frame and its callees: the source, the stack filter, and the keys from the outermost frame to this one.
    Frames(&'static str, Stacks, String),
    /// A culprit. Without a TID, all threads of that name.
    Culprit(CauseKind, ActorName),
    /// A late event: source name, sequence number of the tick, index within the tick.
    Event(&'static str, u64, usize),
    /// A program, or all threads of a name.
    Program(ProgramFilter),
    Help,
}
