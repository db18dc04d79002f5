// SPDX-License-Identifier: MIT OR Apache-2.0
//! A zstd frame of some lines, and the skippable frame before it that says what is in it.

use std::io::{self, Write};

use zstd::stream::write::Encoder;

/// The default level saves 2 to 5 % of the bytes of the lowest, this one 15 to 20 % for 0.2 ms more of each second of a
/// look; what is beyond saves hardly more and takes up to twice as long.
const LEVEL: i32 = 6;
/// Of a skippable frame (RFC 8878): any of 16 numbers.
const SKIPPABLE: u32 = 0x184D_2A5E;
/// What follows the magic number and the length of the skippable frame.
const PAYLOAD_BYTES: usize = 48;
/// An index as it stands in a file.
pub const INDEX_BYTES: usize = 8 + PAYLOAD_BYTES;
/// Which layout the payload has.
const MARK: [u8; 8] = *b"whylate1";

/// How each begins.
pub(super) const INDEX_BEGINS: [u8; 16] = *b"\x5e\x2a\x4d\x18\x30\0\0\0whylate1";

/// What is in the frame that follows. All zero while that is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// When the first line begins, in nanoseconds since 1970.
    pub first_unix_ns: u64,
    /// When the last one ends.
    pub last_unix_ns: u64,
    /// How long the compressed frame is; 0 where it has not been ended.
    pub bytes: u64,
    /// How many lines it has.
    pub lines: u32,
    /// Of the compressed bytes (CRC-32, as in gzip).
    pub crc: u32,
}

impl Index {
    /// As it stands in a file: every zstd reader passes over it.
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
        // Nobody takes one for right that is cut short or was written over.
        let own = crc32fast::hash(&bytes[8..INDEX_BYTES - 8]);
        bytes[INDEX_BYTES - 8..INDEX_BYTES - 4].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// What `to_bytes` has made; `None` for anything else.
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

    /// Whether the frame was ended.
    pub fn is_closed(&self) -> bool {
        self.bytes > 0
    }
}

/// Whether a frame with this magic number holds no data.
pub(super) fn is_skippable(magic: u32) -> bool {
    magic & 0xffff_fff0 == 0x184D_2A50
}

/// Lines that become one frame. What each call returns belongs into the file, behind the index.
pub struct Frame {
    encoder: Encoder<'static, Vec<u8>>,
    crc: crc32fast::Hasher,
    index: Index,
}

impl Frame {
    /// An empty one.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new() -> io::Result<Frame> {
        Ok(Frame { encoder: Encoder::new(Vec::new(), LEVEL)?, crc: crc32fast::Hasher::new(), index: Index::default() })
    }

    /// Adds a line, which ends with a newline character, and when what it tells of began and ended.
    ///
    /// # Errors
    /// When there is no memory.
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

    /// How many lines it has.
    pub fn lines(&self) -> u32 {
        self.index.lines
    }

    /// The bytes that make all lines so far readable.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn flush(&mut self) -> io::Result<Vec<u8>> {
        self.encoder.flush()?;
        Ok(self.take())
    }

    /// The last bytes, and what belongs before all of them.
    ///
    /// # Errors
    /// When there is no memory.
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
