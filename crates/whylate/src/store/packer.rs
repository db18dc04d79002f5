// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packs existing lines into a recording, frame by frame: unpacked, they may be far larger than memory.

use std::io::{self, Write};

use whylate_model::recording::{End, Frame, Index, Line};

use super::frames;

/// Writes a recording.
pub struct Packer<W> {
    out: W,
    frame: Frame,
    ticks: u32,
    bytes: usize,
}

impl<W: Write> Packer<W> {
    /// Begins a recording with a frame of these lines, the header first.
    ///
    /// # Errors
    /// Fails if the writer fails, or memory is exhausted.
    pub fn begin(out: W, head: &[Line]) -> io::Result<Self> {
        let mut packer = Packer { out, frame: Frame::new()?, ticks: 0, bytes: 0 };
        let (index, bytes) = frames::pack(head)?;
        packer.write(index, &bytes)?;
        Ok(packer)
    }

    /// Adds the lines of a tick.
    ///
    /// # Errors
    /// Fails if the writer fails, or memory is exhausted.
    pub fn tick(&mut self, lines: &[Line]) -> io::Result<()> {
        self.bytes += frames::add(&mut self.frame, lines)?;
        self.ticks += 1;
        if self.ticks >= frames::MAX_TICKS || self.bytes >= frames::MAX_BYTES { self.end_frame() } else { Ok(()) }
    }

    /// Returns the writer. It has all frames but the current one.
    pub fn written(&self) -> &W {
        &self.out
    }

    /// Ends the recording, at this time.
    ///
    /// # Errors
    /// Fails if the writer fails, or memory is exhausted.
    pub fn end(mut self, at_unix_ns: u64) -> io::Result<W> {
        self.end_frame()?;
        let (index, bytes) = frames::pack(&[Line::End(End { at_unix_ns })])?;
        self.write(index, &bytes)?;
        Ok(self.out)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.ticks == 0 {
            return Ok(());
        }
        let (bytes, index) = std::mem::replace(&mut self.frame, Frame::new()?).finish()?;
        (self.ticks, self.bytes) = (0, 0);
        self.write(index, &bytes)
    }

    fn write(&mut self, index: Index, frame: &[u8]) -> io::Result<()> {
        self.out.write_all(&index.to_bytes())?;
        self.out.write_all(frame)
    }
}
