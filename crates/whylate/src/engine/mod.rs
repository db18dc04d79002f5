// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loops that take ticks from live sources or a recording and pass them to sinks.

pub mod progress;
pub mod runner;
pub mod sources;
pub mod watch;
