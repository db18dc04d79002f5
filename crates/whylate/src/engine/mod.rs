// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes ticks from live sources or a recording, and passes them to sinks.

pub mod feed;
pub mod live;
#[cfg(test)]
mod made_up;
pub mod progress;
pub mod replay;
pub mod sources;
pub mod ticks;
pub mod watch;
