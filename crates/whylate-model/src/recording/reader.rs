// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes the lines of a recording, even of one that was cut off or damaged.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};

use thiserror::Error;
use zstd::stream::read::Decoder;

use super::frame::{INDEX_BEGINS, INDEX_BYTES, Index, is_skippable};
use super::line::{FORMAT, Header, Line};
use super::long_names::bounded;
use super::repeats::{Repeated, Repeating, Repeats};
use crate::Stack;
use crate::snapshot::SCHEMA;
use crate::units::printable;

/// Maximum size of a compressed frame: one frame at a time is kept in memory.
const MAX_FRAME_BYTES: u64 = 256 << 20;
/// Maximum length of a line.
pub const MAX_LINE_BYTES: u64 = 64 << 20;
/// Maximum unpacked size of a frame: a few bytes may unpack to more than any disk holds.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;
/// Maximum window of the decoder, as the exponent of a power of two: 8 MiB.
const WINDOW_LOG: u32 = 23;
/// Read size where the required size is unknown.
const CHUNK_BYTES: u64 = 64 << 10;
/// Magic number of a frame with data (RFC 8878).
const ZSTD_MAGIC: u32 = 0xFD2F_B528;

/// Why a file cannot be read as a recording.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file is something else.
    #[error("it is not a whylate recording (name a file that `whylate record` or -o has written)")]
    NoRecording,
    /// The file is empty.
    #[error("it is empty: recording ended before anything was measured")]
    Empty,
    /// A later version has written it.
    #[error("whylate {} wrote it in a newer format (use that version, or a newer one)", printable(.whylate))]
    Newer {
        /// Version that wrote the file.
        whylate: String,
    },
    /// The system cannot read the file.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Parts of a file that could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Damaged frames; their readable lines were returned.
    pub frames: u64,
    /// Lines that could not be read, by the frames' indices.
    pub lines: u64,
    /// The file ends in the middle of a frame: its writer was cut off.
    pub is_cut: bool,
}

/// Iterates over the lines of a recording, in order.
pub struct Reader<R> {
    input: R,
    header: Header,
    span_unix_ns: (u64, u64),
    /// Offset of the next frame.
    at: u64,
    bytes: u64,
    lines: Option<Box<dyn BufRead>>,
    /// Number of lines in the current frame, by its index.
    expected: Option<u32>,
    given: u32,
    /// Buffer of the last line, reused for the next one.
    text: Vec<u8>,
    damage: Damage,
    repeats: Option<Repeats>,
    repeated: Option<Vec<Repeated>>,
    /// Line of the last snapshot returned with repeated stacks, by source.
    repeated_lines: BTreeMap<String, Vec<u8>>,
}

impl<R: Read + Seek> Reader<R> {
    /// Opens a recording and reads its header.
    ///
    /// # Errors
    /// Fails if the file is no recording, or one of a later version.
    pub fn new(mut input: R) -> Result<Self, ReadError> {
        let bytes = input.seek(SeekFrom::End(0))?;
        let mut reader = Reader {
            input,
            header: Header::default(),
            span_unix_ns: (0, u64::MAX),
            at: 0,
            bytes,
            lines: None,
            expected: None,
            given: 0,
            text: Vec::new(),
            damage: Damage::default(),
            repeats: None,
            repeated: None,
            repeated_lines: BTreeMap::new(),
        };
        if bytes == 0 {
            return Err(ReadError::Empty);
        }
        match reader.next_line()? {
            Some(Line::Header(header)) => reader.header = header,
            _ => return Err(ReadError::NoRecording),
        }
        if reader.header.recording > FORMAT || reader.header.schema > SCHEMA {
            return Err(ReadError::Newer { whylate: reader.header.whylate });
        }
        Ok(reader)
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Skips frames outside of the span, in nanoseconds since 1970. Frames that overlap it are returned completely.
    pub fn within(self, first_unix_ns: u64, last_unix_ns: u64) -> Self {
        Reader { span_unix_ns: (first_unix_ns, last_unix_ns), ..self }
    }

    /// Enables the stack cache: [`Reader::take_repeated`] then returns a snapshot's stacks, and its `stacks` has only
    /// those for which `asks_for_age(source, stack)` is true. `lost` may omit reasons with a count of 0.
    pub fn repeat(&mut self, asks_for_age: fn(&str, &Stack) -> bool) {
        self.repeats.get_or_insert_with(|| Repeats::new(asks_for_age));
    }

    /// Recycles a line that is no longer used: repeated snapshots reuse its memory.
    pub fn use_again(&mut self, line: Line) {
        if let (Some(repeats), Line::Snapshot(snapshot)) = (&mut self.repeats, line) {
            repeats.use_again(*snapshot);
        }
    }

    /// Returns all stacks of the last snapshot, without ages, if the snapshot itself has only those with ages.
    pub fn take_repeated(&mut self) -> Option<Vec<Repeated>> {
        self.repeated.take()
    }

    /// Returns the lines of the last snapshots with repeated stacks, by source.
    pub fn take_repeated_lines(&mut self) -> BTreeMap<String, Vec<u8>> {
        std::mem::take(&mut self.repeated_lines)
    }

    /// Returns the damage found so far.
    pub fn damage(&self) -> Damage {
        self.damage
    }

    /// Returns the next line; `None` at the end.
    ///
    /// # Errors
    /// Fails if the system cannot read the file. Damaged parts are skipped and counted.
    pub fn next_line(&mut self) -> Result<Option<Line>, ReadError> {
        // If the caller skips a snapshot, it skips its stacks.
        self.repeated = None;
        loop {
            if self.lines.is_none() && !self.open_frame()? {
                return Ok(None);
            }
            let Some(lines) = &mut self.lines else { return Ok(None) };
            let mut text = std::mem::take(&mut self.text);
            text.clear();
            let read = lines.as_mut().take(MAX_LINE_BYTES).read_until(b'\n', &mut text);
            match read {
                Ok(0) => self.close_frame(false),
                Ok(_) if text.ends_with(b"\n") => {
                    self.given = self.given.saturating_add(1);
                    if let Cow::Owned(bounded) = bounded(&text) {
                        text = bounded;
                    }
                    if let Some(Repeating { snapshot, stacks }) = self.repeats.as_mut().and_then(|of| of.read(&text)) {
                        // The buffer of the previous line is as large as the next one needs.
                        match self.repeated_lines.get_mut(&snapshot.source) {
                            Some(last) => std::mem::swap(last, &mut text),
                            None => {
                                self.repeated_lines.insert(snapshot.source.clone(), std::mem::take(&mut text));
                            }
                        }
                        self.text = text;
                        self.repeated = Some(stacks);
                        return Ok(Some(Line::Snapshot(snapshot)));
                    }
                    let parsed = match &mut self.repeats {
                        Some(repeats) => repeats.parse(&text),
                        None => Line::parse(&text),
                    };
                    self.text = text;
                    match parsed {
                        Ok(line) => return Ok(Some(line)),
                        // The first line of a file that is no recording.
                        Err(_) if self.header.recording == 0 => return Err(ReadError::NoRecording),
                        Err(_) => self.damage.lines += 1,
                    }
                }
                Ok(length) if length as u64 == MAX_LINE_BYTES => {
                    drop(text);
                    self.given = self.given.saturating_add(1);
                    self.damage.lines += 1;
                    if lines.skip_until(b'\n').is_err() {
                        self.close_frame(true);
                    }
                }
                Ok(_) | Err(_) => self.close_frame(true),
            }
        }
    }

    /// Handles the end of a frame and counts its missing lines.
    fn close_frame(&mut self, is_broken: bool) {
        self.lines = None;
        match self.expected.take() {
            Some(expected) => {
                let missing = u64::from(expected.saturating_sub(self.given));
                self.damage.frames += u64::from(is_broken || missing > 0);
                self.damage.lines += missing;
            }
            None if is_broken => self.damage.is_cut = true,
            None => {}
        }
        self.given = 0;
    }

    /// Opens the next frame with lines; returns false at the end of the file.
    fn open_frame(&mut self) -> Result<bool, ReadError> {
        while self.at < self.bytes {
            let left = self.bytes - self.at;
            if left < 8 {
                self.damage.is_cut = true;
                self.at = self.bytes;
                return Ok(false);
            }
            let mut head = [0; INDEX_BYTES];
            let available = left.min(INDEX_BYTES as u64) as usize;
            self.input.seek(SeekFrom::Start(self.at))?;
            self.input.read_exact(&mut head[..available])?;
            let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let (magic, length) = (number(0), u64::from(number(4)));
            if is_skippable(magic) {
                if 8 + length > left {
                    self.resync_at_index(8 + length < INDEX_BYTES as u64 * 2)?;
                    continue;
                }
                self.at += 8 + length;
                match Index::from_bytes(&head).filter(|index| index.is_closed()) {
                    Some(index) if self.open_indexed(index)? => return Ok(true),
                    // Outside of the span, made by another program, or the index of an unfinished frame.
                    Some(_) | None => {}
                }
                continue;
            }
            if magic != ZSTD_MAGIC {
                if self.header.recording == 0 {
                    return Err(ReadError::NoRecording);
                }
                self.resync_at_index(false)?;
                continue;
            }
            self.open_unindexed()?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Opens a frame by its index; returns false if it is outside of the span or damaged.
    fn open_indexed(&mut self, index: Index) -> Result<bool, ReadError> {
        let start = self.at;
        let left = self.bytes - start.min(self.bytes);
        let is_in_span = index.last_unix_ns >= self.span_unix_ns.0 && index.first_unix_ns <= self.span_unix_ns.1;
        // The first frame has the header.
        let is_first = self.header.recording == 0;
        self.at = start.saturating_add(index.bytes);
        // The last frame shows whether the recording was finished.
        if !is_in_span && !is_first && index.bytes < left {
            return Ok(false);
        }
        if index.bytes > left {
            self.damage.is_cut = true;
            self.at = self.bytes;
        }
        let mut compressed = Vec::new();
        self.input.seek(SeekFrom::Start(start))?;
        let wanted = index.bytes.min(left).min(MAX_FRAME_BYTES);
        self.input.by_ref().take(wanted).read_to_end(&mut compressed)?;
        self.expected = Some(index.lines);
        if compressed.len() as u64 == index.bytes && crc32fast::hash(&compressed) != index.crc {
            // A frame with a wrong checksum is not decoded: the result could be anything.
            self.damage.frames += 1;
            self.damage.lines += u64::from(index.lines);
            self.expected = None;
            return Ok(false);
        }
        self.lines = Some(decode_lines(Cursor::new(compressed))?);
        Ok(true)
    }

    /// Opens a frame without a valid index: an unfinished one, or one made by another program. It may be as long as the
    /// rest of the file.
    fn open_unindexed(&mut self) -> Result<(), ReadError> {
        let mut compressed = Vec::new();
        let mut wanted = CHUNK_BYTES;
        // Its compressed size gives the start of the next frame.
        let length = loop {
            self.input.seek(SeekFrom::Start(self.at + compressed.len() as u64))?;
            self.input.by_ref().take(wanted - compressed.len() as u64).read_to_end(&mut compressed)?;
            match zstd::zstd_safe::find_frame_compressed_size(&compressed) {
                Ok(length) => break length,
                Err(_) if (compressed.len() as u64) < wanted || wanted >= MAX_FRAME_BYTES => {
                    // It is cut off or damaged; another frame may follow.
                    let next = self.index_after(self.at + 1)?;
                    break next.map_or(compressed.len(), |next| (next - self.at) as usize).min(compressed.len());
                }
                Err(_) => wanted *= 2,
            }
        };
        compressed.truncate(length);
        self.at += length as u64;
        self.lines = Some(decode_lines(Cursor::new(compressed))?);
        Ok(())
    }

    /// Skips overwritten or truncated data up to the next index.
    fn resync_at_index(&mut self, is_end: bool) -> Result<(), ReadError> {
        let next = self.index_after(self.at + 1)?;
        self.damage.frames += u64::from(!is_end || next.is_some());
        self.damage.is_cut |= next.is_none();
        self.at = next.unwrap_or(self.bytes);
        Ok(())
    }

    /// Returns the offset of the next index at or after `from`.
    fn index_after(&mut self, from: u64) -> Result<Option<u64>, ReadError> {
        let mut chunk = Vec::new();
        let mut at = from;
        while at < self.bytes {
            self.input.seek(SeekFrom::Start(at))?;
            chunk.clear();
            self.input.by_ref().take(CHUNK_BYTES).read_to_end(&mut chunk)?;
            let offset = chunk.windows(INDEX_BYTES).position(|bytes| {
                bytes.starts_with(&INDEX_BEGINS)
                    && bytes.try_into().is_ok_and(|bytes| Index::from_bytes(bytes).is_some())
            });
            if let Some(offset) = offset {
                return Ok(Some(at + offset as u64));
            }
            // An index may cross the end of this chunk.
            match chunk.len().checked_sub(INDEX_BYTES - 1) {
                Some(passed) if passed > 0 => at += passed as u64,
                _ => break,
            }
        }
        Ok(None)
    }
}

fn decode_lines(compressed: Cursor<Vec<u8>>) -> io::Result<Box<dyn BufRead>> {
    let mut decoder = Decoder::with_buffer(compressed)?.single_frame();
    decoder.window_log_max(WINDOW_LOG)?;
    Ok(Box::new(BufReader::new(decoder.take(MAX_UNPACKED_BYTES))))
}
