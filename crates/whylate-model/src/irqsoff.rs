// SPDX-License-Identifier: MIT OR Apache-2.0
//! What to do about interrupts and preemption that are off, and who kept a CPU that another thread was to have.

mod advice;
mod kept;

pub use advice::advice;
pub use kept::{Kept, NO_RESCHEDULE_POINT};
