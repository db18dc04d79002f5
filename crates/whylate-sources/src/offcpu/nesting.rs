// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nesting of a file's debug information. blazesym follows inlined functions by recursion: a million nested entries, in a
//! file of any user, would overflow the stack.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use gimli::{DebugAbbrev, DebugInfo, LittleEndian};

/// Maximum depth of entries, far above what compilers write.
const MAX_DEPTH: isize = 500;
/// Maximum number of bytes of a section, uncompressed.
const MAX_BYTES: usize = 128 << 20;
/// `struct Elf64_Chdr`: type, size and alignment of a compressed section.
const COMPRESSION_HEADER: usize = 24;

/// A section of a file.
pub(super) struct Section {
    pub offset: u64,
    pub bytes: u64,
    pub is_compressed: bool,
}

impl Section {
    /// Returns the uncompressed bytes; `None` if they cannot be read, or are too many.
    fn data(&self, file: &File) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.bytes).ok().filter(|&bytes| bytes <= MAX_BYTES)?];
        file.read_exact_at(&mut bytes, self.offset).ok()?;
        if !self.is_compressed {
            return Some(bytes);
        }
        // Other types than zlib are unknown to blazesym as well.
        let data = bytes.get(COMPRESSION_HEADER..)?;
        miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(data, MAX_BYTES).ok()
    }
}

/// Returns whether the entries of the debug information nest as deeply as compilers write them; false if they cannot be
/// read.
pub(super) fn is_moderate(file: &File, info: &Section, abbreviations: &Section) -> bool {
    let (Some(info), Some(abbreviations)) = (info.data(file), abbreviations.data(file)) else { return false };
    is_moderate_data(&info, &abbreviations).unwrap_or(false)
}

fn is_moderate_data(info: &[u8], abbreviations: &[u8]) -> gimli::Result<bool> {
    let (info, table) = (DebugInfo::new(info, LittleEndian), DebugAbbrev::new(abbreviations, LittleEndian));
    let mut units = info.units();
    while let Some(unit) = units.next()? {
        let abbreviations = unit.abbreviations(&table)?;
        let mut entries = unit.entries_raw(&abbreviations, None)?;
        while !entries.is_empty() {
            if entries.next_depth() > MAX_DEPTH {
                return Ok(false);
            }
            if let Some(abbreviation) = entries.read_abbreviation()? {
                entries.skip_attributes(abbreviation.attributes())?;
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Abbreviation 1: a subprogram with children and without attributes.
    const ABBREVIATIONS: [u8; 6] = [1, 0x2e, 1, 0, 0, 0];

    /// A unit of DWARF 4 with entries nested `depth` times.
    fn nested(depth: usize) -> Vec<u8> {
        let entries: Vec<u8> = vec![1; depth].into_iter().chain(vec![0; depth]).collect();
        let length = u32::try_from(7 + entries.len()).expect("short");
        let mut info = length.to_le_bytes().to_vec();
        info.extend([4, 0, 0, 0, 0, 0, 8]);
        info.extend(entries);
        info
    }

    #[test]
    fn deep_nesting_is_found_and_damage_is_no_reason_to_go_on() {
        assert_eq!(is_moderate_data(&nested(400), &ABBREVIATIONS), Ok(true));
        assert_eq!(is_moderate_data(&nested(1_000_000), &ABBREVIATIONS), Ok(false));
        assert!(is_moderate_data(&nested(3)[..9], &ABBREVIATIONS).is_err());
        assert!(is_moderate_data(&nested(3), &[]).is_err());
    }

    #[test]
    fn own_debug_information_is_moderate_also_if_compressed() {
        let (info, file) = (nested(40), tempfile::tempfile().expect("a file"));
        let zlib = miniz_oxide::deflate::compress_to_vec_zlib(&info, 6);
        let mut bytes = vec![0; COMPRESSION_HEADER];
        bytes.extend(&zlib);
        bytes.extend(ABBREVIATIONS);
        file.write_all_at(&bytes, 0).expect("written");
        let end = (COMPRESSION_HEADER + zlib.len()) as u64;
        let compressed = Section { offset: 0, bytes: end, is_compressed: true };
        let table = Section { offset: end, bytes: ABBREVIATIONS.len() as u64, is_compressed: false };
        assert!(is_moderate(&file, &compressed, &table));
        assert!(!is_moderate(&file, &Section { is_compressed: false, ..compressed }, &table));
    }
}
