// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an ELF file tells of its code: how to unwind each of its functions, and where their names are.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, LittleEndian, Operation, Register, RegisterRule,
    UnwindContext, UnwindSection, UnwindTableRow,
};
use memmap2::Mmap;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSection};

use super::rules::{BP_KEPT, Rule};
use super::skel::types::rule_base;

/// DWARF numbers of x86-64's registers (System V ABI, figure 3.36).
const BP: Register = Register(6);
const SP: Register = Register(7);
const RETURN_ADDRESS: Register = Register(16);

/// Sections that name a file with more debug information.
const ELSEWHERE: [&str; 3] = [".gnu_debuglink", ".gnu_debugaltlink", ".debug_sup"];
/// How much smaller deflate makes anything, at most.
const MOST_PACKED: u64 = 1_100;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

pub(super) struct Elf {
    bytes: Mmap,
    /// File offset, length and address of what is loaded.
    segments: Vec<(u64, u64, u64)>,
    unwind: Option<UnwindSections>,
    /// Kept open for its names.
    _file: File,
    /// It names no other file for its debug information, and what is packed in it cannot be larger than it says.
    pub(super) is_self_contained: bool,
    /// Where the names of its functions are, and whether they are found there by address rather than by file offset.
    pub(super) names: Option<(PathBuf, bool)>,
}

struct UnwindSections {
    header: (Range<usize>, u64),
    frames: (Range<usize>, u64),
    text: u64,
}

impl Elf {
    /// Opens a file; `None` when it is none of this kind.
    pub(super) fn open(path: &Path) -> Option<Self> {
        let file = File::open(path).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        // SAFETY: the mapping is private and read only, and nothing relies on its content staying the same: writing to
        // the file gives wrong unwind rules at worst. Cutting it short ends this process, as it ends those that run it;
        // the kernel does not let running programs be written to (ETXTBSY).
        let bytes = unsafe { Mmap::map(&file) }.ok()?;
        let elf = ElfFile64::<Endianness>::parse(&*bytes).ok()?;
        let endian = elf.endian();
        let loaded = elf.elf_header().program_headers(endian, &*bytes).ok()?;
        let segments = loaded
            .iter()
            .filter(|segment| segment.p_type(endian) == object::elf::PT_LOAD)
            .map(|segment| (segment.p_offset(endian), segment.p_filesz(endian), segment.p_vaddr(endian)))
            .collect();
        let range_of = |name: &str| {
            let section = elf.section_by_name(name)?;
            let (offset, size) = section.file_range()?;
            Some((offset as usize..offset.checked_add(size)? as usize, section.address()))
        };
        let unwind = (|| {
            Some(UnwindSections {
                header: range_of(".eh_frame_hdr")?,
                frames: range_of(".eh_frame")?,
                text: range_of(".text")?.1,
            })
        })();
        let names = names_of(&elf, &file);
        let is_self_contained = elf.sections().all(|section| {
            let names_another = section.name().is_ok_and(|name| ELSEWHERE.contains(&name));
            let is_plausible = section
                .compressed_file_range()
                .is_ok_and(|range| range.uncompressed_size / MOST_PACKED <= range.compressed_size);
            !names_another && is_plausible
        });
        Some(Elf { segments, unwind, names, is_self_contained, _file: file, bytes })
    }

    /// The address that the file gives to what lies at this offset.
    pub(super) fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments
            .iter()
            .find(|(at, length, _)| (*at..at.saturating_add(*length)).contains(&offset))
            .map(|(at, _, address)| offset - at + address)
    }

    /// How to unwind the frame of an instruction at this file offset.
    pub(super) fn rule_at(&self, offset: u64) -> Rule {
        match &self.unwind {
            // Code that comes without this, such as Go's, keeps frame pointers.
            None => Rule::plain(rule_base::RULE_CHAIN),
            Some(sections) => self.unwound(sections, offset).unwrap_or_else(|| Rule::plain(rule_base::RULE_BROKEN)),
        }
    }

    fn unwound(&self, sections: &UnwindSections, offset: u64) -> Option<Rule> {
        let address = self.address_of(offset)?;
        let (header, header_at) = &sections.header;
        let (frames, frames_at) = &sections.frames;
        let bases =
            BaseAddresses::default().set_eh_frame_hdr(*header_at).set_eh_frame(*frames_at).set_text(sections.text);
        let header = EhFrameHdr::new(self.bytes.get(header.clone())?, LittleEndian).parse(&bases, 8).ok()?;
        let frames = EhFrame::new(self.bytes.get(frames.clone())?, LittleEndian);
        let mut context = UnwindContext::new();
        let row =
            header.table()?.unwind_info_for_address(&frames, &bases, &mut context, address, EhFrame::cie_from_offset);
        rule_of(row.ok()?, &frames)
    }
}

fn rule_of(row: &UnwindTableRow<usize>, frames: &EhFrame<Bytes<'_>>) -> Option<Rule> {
    match row.register(RETURN_ADDRESS) {
        Some(RegisterRule::Offset(-8)) => {}
        // The first function of a thread says so.
        Some(RegisterRule::Undefined) => return Some(Rule::plain(rule_base::RULE_ROOT)),
        _ => return None,
    }
    let bp_offset = match row.register(BP) {
        None | Some(RegisterRule::SameValue) => BP_KEPT,
        Some(RegisterRule::Offset(offset)) => i32::try_from(offset).ok()?,
        // A function that aligns its stack keeps it where it now points to.
        Some(RegisterRule::Expression(expression)) => {
            let expression = expression.get(frames).ok()?;
            match *operations(expression.0).as_slice() {
                [(BP, 0, false)] => return aligned(row, frames),
                _ => return None,
            }
        }
        Some(_) => return None,
    };
    let (base, offset) = match row.cfa() {
        CfaRule::RegisterAndOffset { register: SP, offset } => (rule_base::RULE_SP, *offset),
        CfaRule::RegisterAndOffset { register: BP, offset } => (rule_base::RULE_BP, *offset),
        _ => return None,
    };
    Some(Rule { base, cfa_offset: i32::try_from(offset).ok()?, bp_offset })
}

/// What GCC writes for functions that align their stack: the canonical frame address is below the saved frame pointer.
fn aligned(row: &UnwindTableRow<usize>, frames: &EhFrame<Bytes<'_>>) -> Option<Rule> {
    let CfaRule::Expression(expression) = row.cfa() else { return None };
    match *operations(expression.get(frames).ok()?.0).as_slice() {
        [(BP, offset, true)] => {
            Some(Rule { base: rule_base::RULE_AT_BP, cfa_offset: i32::try_from(offset).ok()?, bp_offset: BP_KEPT })
        }
        _ => None,
    }
}

/// The registers of an expression, with offsets and whether memory there is read; empty when it has anything else.
fn operations(code: Bytes<'_>) -> Vec<(Register, i64, bool)> {
    let encoding = gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 4 };
    let mut found = Vec::new();
    let mut iterator = gimli::Expression(code).operations(encoding);
    loop {
        match iterator.next() {
            Ok(Some(Operation::RegisterOffset { register, offset, .. })) => found.push((register, offset, false)),
            Ok(Some(Operation::Deref { .. })) => match found.last_mut() {
                Some(last) => last.2 = true,
                None => return Vec::new(),
            },
            Ok(None) => return found,
            _ => return Vec::new(),
        }
    }
}

/// The file's own symbols, those of its debug file, or the few of its dynamic linker.
fn names_of(elf: &ElfFile64<'_, Endianness>, file: &File) -> Option<(PathBuf, bool)> {
    if elf.section_by_name(".symtab").is_none() {
        let id = elf.build_id().ok().flatten().filter(|id| id.len() > 1);
        let debug = id.map(|id| {
            let digits: Vec<String> = id.iter().map(|byte| format!("{byte:02x}")).collect();
            PathBuf::from(format!("/usr/lib/debug/.build-id/{}/{}.debug", digits[0], digits[1..].concat()))
        });
        if let Some(debug) = debug.filter(|debug| debug.is_file()) {
            return Some((debug, true));
        }
    }
    // As long as it is open it is there, also when the process and its mount namespace have gone.
    Some((PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), false))
}
