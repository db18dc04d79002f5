// SPDX-License-Identifier: MIT OR Apache-2.0
//! From what was seen of a late event to the causes of its latency, which add up to it.

mod wq;

pub use wq::{HeldSlot, PoolClass, Wakeup, WorkEvidence};
