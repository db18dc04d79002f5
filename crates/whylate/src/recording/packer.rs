// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording made of lines that are there already, frame by frame: unpacked, all of it may be far more than there is
//! memory.

use std::io::{self, Write};

use whylate_model::recording::{End, Frame, Index, Line};

use super::frames;

/// Writes a recording.
pub struct Packer<W> {
    out: W,
    frame: Frame,
    moments: u32,
    bytes: usize,
}

impl<W: Write> Packer<W> {
    /// Begins it with a frame of these lines, the header first.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn begin(out: W, head: &[Line]) -> io::Result<Self> {
        let mut packer = Packer { out, frame: Frame::new()?, moments: 0, bytes: 0 };
        let (index, bytes) = frames::of(head)?;
        packer.write(index, &bytes)?;
        Ok(packer)
    }

    /// Adds the lines of a moment.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn moment(&mut self, lines: &[Line]) -> io::Result<()> {
        self.bytes += frames::add(&mut self.frame, lines)?;
        self.moments += 1;
        if self.moments >= frames::TICKS || self.bytes >= frames::BYTES { self.end_frame() } else { Ok(()) }
    }

    /// What was written so far goes there, but for the frame that is not ended.
    pub fn written(&self) -> &W {
        &self.out
    }

    /// Ends it, at that time.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn end(mut self, at_unix_ns: u64) -> io::Result<W> {
        self.end_frame()?;
        let (index, bytes) = frames::of(&[Line::End(End { at_unix_ns })])?;
        self.write(index, &bytes)?;
        Ok(self.out)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.moments == 0 {
            return Ok(());
        }
        let (bytes, index) = std::mem::replace(&mut self.frame, Frame::new()?).finish()?;
        (self.moments, self.bytes) = (0, 0);
        self.write(index, &bytes)
    }

    fn write(&mut self, index: Index, frame: &[u8]) -> io::Result<()> {
        self.out.write_all(&index.to_bytes())?;
        self.out.write_all(frame)
    }
}
