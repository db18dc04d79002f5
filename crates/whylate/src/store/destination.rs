// SPDX-License-Identifier: MIT OR Apache-2.0
//! Destinations of frames.

use std::io;
use std::path::PathBuf;

use whylate_model::recording::{End, Header, Index, Line};
use whylate_sources::kernel::clock;

use super::{about, frames};

/// Reason to write a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// A late event with this latency, in nanoseconds.
    Late(u64),
    /// Pressure (PSI).
    Pressure,
    /// A person or a program that asks for it: by a signal, or over the socket.
    Request,
}

/// Receives the output of a recorder: the bytes of each frame as they come, then its index.
pub trait Store: Send {
    /// Begins a frame. A new file begins with a frame that has the header.
    fn begin_frame(&mut self, header: &Header) -> io::Result<()>;

    /// Appends bytes to the frame.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Completes the frame.
    fn end_frame(&mut self, index: &Index) -> io::Result<()>;

    /// Discards the frame after a write error. The next frame overwrites its bytes, which stay in the file until then.
    fn discard_frame(&mut self);

    /// Ends the recording.
    fn finish(&mut self) -> io::Result<()>;

    /// Notes a reason to write a file. Returns whether the recording is to state the reason: each request and each time of
    /// pressure, and the first late event since the last frame.
    fn trigger(&mut self, _by: Trigger) -> bool {
        false
    }

    /// Takes the reason why data that stays in memory was not written.
    fn take_problem(&mut self) -> Option<String> {
        None
    }

    /// Returns whether the frame should end as soon as possible.
    fn wants_end(&self) -> bool {
        false
    }

    /// Returns whether there is enough space to write. Recording pauses otherwise.
    fn has_room(&self) -> io::Result<bool> {
        Ok(true)
    }

    /// Bytes written.
    fn bytes(&self) -> u64;

    /// Returns the paths of the files that were created.
    fn files(&self) -> Vec<PathBuf>;
}

/// Returns a frame of the header and one reading of all clocks.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn head(header: &Header) -> io::Result<(Index, Vec<u8>)> {
    frames::pack(&[Line::Header(header.clone()), Line::Clock(about::now())])
}

/// Returns the frame that ends a recording.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn tail() -> io::Result<(Index, Vec<u8>)> {
    frames::pack(&[Line::End(End { at_unix_ns: clock::unix_ns() })])
}
