// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records of late ticks, of sections, and of threads that ignored a reschedule request.

pub use super::events::fuzzing::sections;
pub use super::need_resched::fuzzing::kept_cpus;
pub use super::ticks::fuzzing::late_ticks;
