// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where frames go.

use std::io;
use std::path::PathBuf;

use whylate_model::recording::{End, Header, Index, Line};
use whylate_sources::clock;

use super::{about, frames};

pub use super::file::FileStore;
pub use super::folder::{FolderStore, Retention};
pub use super::ring::{RingStore, When};

/// Takes what a recorder makes of its lines: for each frame its bytes as they come, and in the end its index.
pub trait Store: Send {
    /// A frame begins. What begins a file with it puts a frame with the header before it.
    fn begin_frame(&mut self, header: &Header) -> io::Result<()>;

    /// Bytes that belong to the frame.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// The frame is complete.
    fn end_frame(&mut self, index: &Index) -> io::Result<()>;

    /// The frame could not be written: the next one takes its place. What was written of it stays until then.
    fn give_up_frame(&mut self);

    /// Nothing follows.
    fn finish(&mut self) -> io::Result<()>;

    /// A late event of that latency was recorded, or, with `None`, somebody asks for a file.
    fn noticed(&mut self, _latency_ns: Option<u64>) {}

    /// Why something was not written that is kept, once.
    fn take_problem(&mut self) -> Option<String> {
        None
    }

    /// Whether the frame is to end as soon as it can.
    fn wants_end(&self) -> bool {
        false
    }

    /// Whether there is room to write: else recording waits.
    fn has_room(&self) -> io::Result<bool> {
        Ok(true)
    }

    /// How many bytes are written.
    fn bytes(&self) -> u64;

    /// Files that were made.
    fn files(&self) -> Vec<PathBuf>;
}

/// A frame with nothing but the header, and what time it is by each clock.
///
/// # Errors
/// When there is no memory.
pub fn head(header: &Header) -> io::Result<(Index, Vec<u8>)> {
    frames::of(&[Line::Header(header.clone()), Line::Clock(about::now())])
}

/// A frame that says that nothing follows.
///
/// # Errors
/// When there is no memory.
pub fn tail() -> io::Result<(Index, Vec<u8>)> {
    frames::of(&[Line::End(End { at_unix_ns: clock::unix_ns() })])
}
