// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recordings: the lines of `--json` in zstd frames, as `docs/recording.md` specifies.
//!
//! This module has the format alone: [`Frame`] encodes lines, [`Reader`] decodes them. The program decides who writes
//! files and when they are synced.

mod credible;
mod frame;
mod line;
mod long_names;
mod quick;
mod reader;
mod repeats;

pub use frame::{Frame, INDEX_BYTES, Index};
pub use line::{Account, Clock, End, FORMAT, Gap, Header, Kept, Line, Measured, Unmeasured};
pub use reader::{Damage, MAX_LINE_BYTES, ReadError, Reader};
pub use repeats::{CachedStack, Repeated, Repeating, Repeats};

#[cfg(test)]
mod tests;
