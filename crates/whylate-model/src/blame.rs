// SPDX-License-Identifier: MIT OR Apache-2.0
//! From what was seen of a late event to the causes of its latency, which add up to it.
//!
//! A source's rules ([`causes`] for work items) cut the window of a late event into parts and say how each is explained;
//! `window` does the arithmetic, in whole nanoseconds, and what no rule explains is [`CauseKind::Unknown`](crate::CauseKind::Unknown).

mod frames;
mod held;
mod sum;
mod timeline;
mod window;
mod wq;

pub use wq::{HeldSlot, PoolClass, Wakeup, WorkEvidence, causes};
