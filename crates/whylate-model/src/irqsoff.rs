// SPDX-License-Identifier: MIT OR Apache-2.0
//! Advice on disabled interrupts and preemption, and threads that kept a CPU despite a reschedule request.

mod advice;
mod kept;

pub use advice::advice;
pub use kept::{LateReschedule, NO_RESCHEDULE_POINT};
