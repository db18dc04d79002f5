// SPDX-License-Identifier: MIT OR Apache-2.0
//! Zstd frame of lines, and the skippable frame before it that serves as its index.

use std::io::{self, Write};

use zstd::stream::write::Encoder;

/// Compression level. The default level is 2 to 5 % smaller than the lowest; this one is 15 to 20 % smaller, for 0.2 ms
/// more per second of an overview's snapshots. Higher levels save hardly more and take up to twice as long.
const LEVEL: i32 = 6;
/// Magic number of a skippable frame (RFC 8878): one of 16.
const SKIPPABLE: u32 = 0x184D_2A5E;
/// Length of the index after the magic number and the length field.
const PAYLOAD_BYTES: usize = 48;
/// Length of an index in a file.
pub const INDEX_BYTES: usize = 8 + PAYLOAD_BYTES;
/// Identifies the layout of the payload.
const MARK: [u8; 8] = *b"whylate1";

/// First bytes of each index.
pub(super) const INDEX_BEGINS: [u8; 16] = *b"\x5e\x2a\x4d\x18\x30\0\0\0whylate1";

/// Index of the frame that follows; all zero until that frame is finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Start of the first line, in nanoseconds since 1970.
    pub first_unix_ns: u64,
    /// End of the last line, in nanoseconds since 1970.
    pub last_unix_ns: u64,
    /// Length of the compressed frame; 0 if unfinished.
    pub bytes: u64,
    /// Number of lines in the frame.
    pub lines: u32,
    /// CRC-32 of the compressed bytes, as in gzip.
    pub crc: u32,
}

impl Index {
    /// Encodes the index as a skippable frame, which every zstd reader skips.
    pub fn to_bytes(self) -> [u8; INDEX_BYTES] {
        let mut bytes = [0; INDEX_BYTES];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(&SKIPPABLE.to_le_bytes());
        put(&(PAYLOAD_BYTES as u32).to_le_bytes());
        put(&MARK);
        for number in [self.first_unix_ns, self.last_unix_ns, self.bytes] {
            put(&number.to_le_bytes());
        }
        put(&self.lines.to_le_bytes());
        put(&self.crc.to_le_bytes());
        // A checksum of its own, so that a truncated or overwritten index is detected.
        let own = crc32fast::hash(&bytes[8..INDEX_BYTES - 8]);
        bytes[INDEX_BYTES - 8..INDEX_BYTES - 4].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// Decodes an index; `None` for anything that `to_bytes` has not encoded.
    pub fn from_bytes(bytes: &[u8; INDEX_BYTES]) -> Option<Index> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let index = Index {
            first_unix_ns: u64_at(16)?,
            last_unix_ns: u64_at(24)?,
            bytes: u64_at(32)?,
            lines: u32_at(40)?,
            crc: u32_at(44)?,
        };
        (index.to_bytes() == *bytes).then_some(index)
    }

    /// Returns whether the frame was finished.
    pub fn is_closed(&self) -> bool {
        self.bytes > 0
    }
}

/// Returns whether the magic number is that of a skippable frame.
pub(super) fn is_skippable(magic: u32) -> bool {
    magic & 0xffff_fff0 == 0x184D_2A50
}

/// Encoder of one frame. The bytes that each call returns go into the file after the index.
pub struct Frame {
    encoder: Encoder<'static, Vec<u8>>,
    crc: crc32fast::Hasher,
    index: Index,
}

impl Frame {
    /// Creates an empty frame.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn new() -> io::Result<Frame> {
        Ok(Frame { encoder: Encoder::new(Vec::new(), LEVEL)?, crc: crc32fast::Hasher::new(), index: Index::default() })
    }

    /// Adds a line, which ends with a newline, and the span of time that it covers.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn add(&mut self, line: &[u8], span_unix_ns: Option<(u64, u64)>) -> io::Result<()> {
        self.encoder.write_all(line)?;
        if let Some((first_ns, last_ns)) = span_unix_ns {
            let index = &mut self.index;
            index.first_unix_ns = if index.lines == 0 { first_ns } else { index.first_unix_ns.min(first_ns) };
            index.last_unix_ns = index.last_unix_ns.max(last_ns);
        }
        self.index.lines += 1;
        Ok(())
    }

    /// Returns the number of lines so far.
    pub fn lines(&self) -> u32 {
        self.index.lines
    }

    /// Returns the bytes that make all lines so far readable.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn flush(&mut self) -> io::Result<Vec<u8>> {
        self.encoder.flush()?;
        Ok(self.take())
    }

    /// Returns the last bytes, and the index for the start of the frame.
    ///
    /// # Errors
    /// Fails if memory is exhausted.
    pub fn finish(mut self) -> io::Result<(Vec<u8>, Index)> {
        self.encoder.do_finish()?;
        let rest = self.take();
        self.index.crc = self.crc.finalize();
        Ok((rest, self.index))
    }

    fn take(&mut self) -> Vec<u8> {
        let bytes = std::mem::take(self.encoder.get_mut());
        self.crc.update(&bytes);
        self.index.bytes += bytes.len() as u64;
        bytes
    }
}
