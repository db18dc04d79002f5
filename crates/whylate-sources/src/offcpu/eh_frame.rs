// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps the `.eh_frame` section of a file: as it is, or compressed in blocks if it is large. Compilers have sections of 8 MB
//! in several libraries, and few of their functions are ever unwound.

use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// Maximum bytes of the section, and of one entry: far above what compilers write.
pub(super) const MAX_BYTES: u64 = 48 << 20;
const MAX_ENTRY: usize = 1 << 20;
/// Size from which the section is compressed, in bytes.
const COMPRESSED_FROM: u64 = 1 << 20;
/// Uncompressed bytes of a block: one entry takes one or two of them.
const BLOCK_BYTES: usize = 16 << 10;
/// Compression level of zstd: entries shrink to a third, at 230 MB/s.
const ZSTD_LEVEL: i32 = 1;

/// The section's bytes.
pub(super) enum EhFrame {
    Whole(Vec<u8>),
    Compressed(Vec<Box<[u8]>>),
}

/// The entry of a function (FDE) behind the entry that it refers to (CIE), as a section of its own.
pub(super) struct Function {
    pub(super) bytes: Vec<u8>,
    /// Offset of the FDE in `bytes`.
    pub(super) at: usize,
    /// Offset of the FDE in the section, less that in `bytes`.
    pub(super) moved: u64,
}

impl EhFrame {
    /// Reads the section from a file; `None` if the file is shorter, or the section too long.
    pub(super) fn read(file: &File, offset: u64, bytes: u64) -> Option<Self> {
        if bytes > MAX_BYTES {
            return None;
        }
        let read = |at: u64, bytes: usize| {
            let mut part = vec![0; bytes];
            file.read_exact_at(&mut part, offset.checked_add(at)?).ok()?;
            Some(part)
        };
        if bytes < COMPRESSED_FROM {
            return Some(EhFrame::Whole(read(0, bytes as usize)?));
        }
        let mut compressor = zstd::bulk::Compressor::new(ZSTD_LEVEL).ok()?;
        let blocks = (0..bytes).step_by(BLOCK_BYTES).map(|at| {
            let block = read(at, BLOCK_BYTES.min((bytes - at) as usize))?;
            Some(compressor.compress(&block).ok()?.into_boxed_slice())
        });
        Some(EhFrame::Compressed(blocks.collect::<Option<_>>()?))
    }

    /// Returns the memory that this takes, in bytes.
    pub(super) fn memory(&self) -> usize {
        match self {
            EhFrame::Whole(bytes) => bytes.len(),
            EhFrame::Compressed(blocks) => blocks.iter().map(|block| size_of_val(block) + block.len()).sum(),
        }
    }

    /// Returns up to `length` bytes from an offset of the section: fewer at its end.
    pub(super) fn part(&self, at: usize, length: usize) -> Option<Cow<'_, [u8]>> {
        let blocks = match self {
            EhFrame::Whole(bytes) => {
                let rest = bytes.get(at..)?;
                return Some(Cow::Borrowed(&rest[..rest.len().min(length)]));
            }
            EhFrame::Compressed(blocks) => blocks,
        };
        let (first, last) = (at / BLOCK_BYTES, at.checked_add(length)?.div_ceil(BLOCK_BYTES));
        let mut bytes = Vec::new();
        for block in blocks.get(first..last.min(blocks.len()))? {
            bytes.extend(zstd::bulk::decompress(block, BLOCK_BYTES).ok()?);
        }
        let mut rest = bytes.split_off((at % BLOCK_BYTES).min(bytes.len()));
        rest.truncate(length);
        Some(Cow::Owned(rest))
    }

    /// Returns an entry (CIE or FDE) with its length field; `None` if it is longer than any compiler writes.
    fn entry(&self, at: usize) -> Option<Cow<'_, [u8]>> {
        let length = u32::from_le_bytes(self.part(at, 4)?[..].try_into().ok()?) as usize;
        let length = length.checked_add(4).filter(|length| *length <= MAX_ENTRY)?;
        self.part(at, length).filter(|entry| entry.len() == length)
    }

    /// Returns the entry of a function at an offset of the section.
    pub(super) fn function(&self, at: usize) -> Option<Function> {
        let function = self.entry(at)?;
        // The CIE pointer: distance back from its own position to the CIE.
        let back = u32::from_le_bytes(function.get(4..8)?.try_into().ok()?);
        let mut bytes = self.entry((at + 4).checked_sub(usize::try_from(back).ok()?)?)?.into_owned();
        let moved_to = bytes.len();
        bytes.extend_from_slice(&function);
        bytes[moved_to + 4..moved_to + 8].copy_from_slice(&u32::try_from(moved_to + 4).ok()?.to_le_bytes());
        let moved = (at as u64).checked_sub(moved_to as u64)?;
        Some(Function { bytes, at: moved_to, moved })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn compressed_section_has_same_parts_and_takes_less_memory() {
        let mut file = tempfile::tempfile().expect("a file");
        let bytes: Vec<u8> =
            (0..COMPRESSED_FROM as u32 / 2 + 999).flat_map(|number| (number / 7).to_le_bytes()).collect();
        file.write_all(b"head").and_then(|()| file.write_all(&bytes)).expect("written");
        let compressed = EhFrame::read(&file, 4, bytes.len() as u64).expect("it is read");
        assert!(compressed.memory() < bytes.len() / 2, "{}", compressed.memory());
        let whole = EhFrame::Whole(bytes.clone());
        proptest!(|(at in 0..bytes.len() + 10, length in 0..3 * BLOCK_BYTES)| {
            let [found, known] = [&compressed, &whole].map(|section| section.part(at, length).unwrap_or_default());
            prop_assert_eq!(found, known);
        });
        assert!(EhFrame::read(&file, 4, bytes.len() as u64 + 1).is_none(), "the file ends before the section");
    }
}
