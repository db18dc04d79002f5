// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads an ELF file's information about its code: how to unwind each of its functions, and where their symbols are.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use gimli::{
    BaseAddresses, CfaRule, EhFrameHdr, EhFrameOffset, EndianSlice, LittleEndian, Operation, Register, RegisterRule,
    UnwindContext, UnwindSection, UnwindTableRow,
};
use object::Endianness;
use object::elf::{ProgramHeader64, SectionHeader64};
use object::read::elf::{FileHeader as _, ProgramHeader as _, SectionHeader as _};
use rustix::fs::{MemfdFlags, memfd_create};

use super::eh_frame::{EhFrame, Function};
use super::nesting::{Section, is_moderate};
use super::rules::{BP_KEPT, Rule};
use super::skel::types::rule_base;

/// DWARF numbers of x86-64's registers (System V ABI, figure 3.36).
const BP: Register = Register(6);
const SP: Register = Register(7);
const RETURN_ADDRESS: Register = Register(16);

/// Sections that refer to another file with debug information.
const DEBUG_LINKS: [&str; 3] = [".gnu_debuglink", ".gnu_debugaltlink", ".debug_sup"];
/// Sections with the names of functions, and those needed to find them.
const SYMBOL_SECTIONS: [&str; 5] = [".symtab", ".strtab", ".dynsym", ".dynstr", ".shstrtab"];
/// Maximum compression ratio of deflate.
const MAX_DEFLATE_RATIO: u64 = 1_100;
/// Maximum bytes of headers and unwind table: far above what compilers write.
const MAX_HEADERS: u64 = 8 << 20;
const MAX_TABLE: u64 = 8 << 20;
/// Maximum bytes read of a file's symbols, and with line information.
const MAX_NAMES: u64 = 32 << 20;
const MAX_LINES: u64 = 256 << 20;
/// Compression level of zstd: symbols shrink to a fifth, at 1 GB/s.
const ZSTD_LEVEL: i32 = -5;
/// Bytes read at once of symbols.
const CHUNK_BYTES: usize = 64 << 10;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;
type Header = object::elf::FileHeader64<Endianness>;

/// Data read of an executable file. The file is neither mapped nor kept open: its owner may truncate it at any
/// time.
pub(super) struct Elf {
    /// Length of the file, in bytes.
    length: u64,
    /// File offset, length and address of each PT_LOAD segment.
    segments: Vec<(u64, u64, u64)>,
    unwind: Unwind,
    /// The distribution's debug file, in which symbols are found by address instead of by file offset.
    debug_path: Option<PathBuf>,
    /// Sections with symbols, and lines; `None` if they could not be read, or are too large.
    names: Option<Compressed>,
    /// Debug information and its abbreviations, if lines are read.
    debug: Option<[Section; 2]>,
}

/// Parts of a file, compressed: symbols take a tenth of their size.
#[derive(Default)]
struct Compressed {
    /// File offset and length of each part.
    parts: Vec<(u64, u64)>,
    bytes: Vec<u8>,
}

/// Unwind information of a file.
enum Unwind {
    /// No unwind information, as in Go programs, which keep frame pointers.
    ByFramePointers,
    By(UnwindSections),
}

/// `.eh_frame_hdr` and `.eh_frame` with their addresses, and the address of `.text`.
struct UnwindSections {
    table: (Vec<u8>, u64),
    frames: (EhFrame, u64),
    text: u64,
}

/// Reads a part of a file; `None` if the file is shorter, or the part longer than `max`.
fn read(file: &File, offset: u64, bytes: u64, max: u64) -> Option<Vec<u8>> {
    let mut part = vec![0; usize::try_from(bytes).ok().filter(|_| bytes <= max)?];
    file.read_exact_at(&mut part, offset).ok()?;
    Some(part)
}

impl Elf {
    /// Reads a file's parts for unwinding and symbolization, and its lines if `lines`; `None` if it is not an ELF file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is malformed.
    pub(super) fn from_file(file: &File, lines: bool) -> io::Result<Option<Self>> {
        let about = file.metadata()?;
        if !about.is_file() {
            return Ok(None);
        }
        let begin = read(file, 0, size_of::<Header>() as u64, MAX_HEADERS);
        // A file too short for a header was longer when it was mapped.
        if begin.as_ref().is_some_and(|begin| !begin.starts_with(&object::elf::ELFMAG)) {
            return Ok(None);
        }
        let elf = begin.and_then(|begin| Elf::read(file, about.len(), &begin, lines));
        elf.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn read(file: &File, length: u64, begin: &[u8], lines: bool) -> Option<Self> {
        let (header, _) = object::pod::from_bytes::<Header>(begin).ok()?;
        let endian = header.endian().ok().filter(|_| header.e_ident.class == object::elf::ELFCLASS64)?;
        let table =
            |offset: u64, count: u16, size: usize| read(file, offset, u64::from(count) * size as u64, MAX_HEADERS);
        let (count, offset) = (header.e_phnum(endian), header.e_phoff(endian));
        let loaded = table(offset, count, size_of::<ProgramHeader64<Endianness>>())?;
        let (loaded, _) = object::pod::slice_from_bytes::<ProgramHeader64<Endianness>>(&loaded, count.into()).ok()?;
        let segments = loaded
            .iter()
            .filter(|segment| segment.p_type(endian) == object::elf::PT_LOAD)
            .map(|segment| (segment.p_offset(endian), segment.p_filesz(endian), segment.p_vaddr(endian)))
            .collect();
        let (count, offset) = (header.e_shnum(endian), header.e_shoff(endian));
        let headers_bytes = table(offset, count, size_of::<SectionHeader64<Endianness>>())?;
        let (sections, _) =
            object::pod::slice_from_bytes::<SectionHeader64<Endianness>>(&headers_bytes, count.into()).ok()?;
        let Some(strings) = sections.get(usize::from(header.e_shstrndx.get(endian).0)) else {
            // Without sections there is no unwind information.
            let unwind = Unwind::ByFramePointers;
            return Some(Elf { length, segments, unwind, debug_path: None, names: None, debug: None });
        };
        let strings = read(file, strings.sh_offset(endian), strings.sh_size(endian), MAX_HEADERS)?;
        let name_of = |section: &SectionHeader64<Endianness>| {
            let name = strings.get(section.sh_name(endian) as usize..).unwrap_or_default();
            String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned()
        };
        // SHT_NOBITS sections have no bytes in the file.
        let in_file = sections.iter().filter(|section| section.sh_type(endian) != object::elf::SHT_NOBITS);
        let named: Vec<_> = in_file.map(|section| (name_of(section), section)).collect();
        let find = |name: &str| named.iter().find(|(known, _)| known == name).map(|(_, section)| *section);
        let range = |section: &SectionHeader64<Endianness>| (section.sh_offset(endian), section.sh_size(endian));
        let unwind = match (find(".eh_frame_hdr"), find(".eh_frame"), find(".text")) {
            (Some(table), Some(frames), Some(text)) => {
                let ((table_offset, table_bytes), (offset, bytes)) = (range(table), range(frames));
                Unwind::By(UnwindSections {
                    table: (read(file, table_offset, table_bytes, MAX_TABLE)?, table.sh_addr(endian)),
                    frames: (EhFrame::read(file, offset, bytes)?, frames.sh_addr(endian)),
                    text: text.sh_addr(endian),
                })
            }
            _ => Unwind::ByFramePointers,
        };
        let mut debug_path = None;
        if find(".symtab").is_none() {
            let id = find(".note.gnu.build-id").map(range);
            let id = id.and_then(|(offset, bytes)| read(file, offset, bytes, 1 << 10));
            // The note's header of 12 bytes and the name GNU precede the build ID.
            debug_path = id.and_then(|note| debug_file(note.get(16..)?));
        }
        // No section refers to another file, and no compressed section is larger than its header says.
        let is_self_contained = || {
            named.iter().all(|(name, section)| {
                let is_compressed = section.sh_flags(endian).0 & object::elf::SHF_COMPRESSED.0 != 0;
                let header = || read(file, section.sh_offset(endian), 24, 24);
                let uncompressed_size = || Some(u64::from_le_bytes(header()?[8..16].try_into().ok()?));
                let is_plausible = !is_compressed
                    || uncompressed_size().is_some_and(|bytes| bytes / MAX_DEFLATE_RATIO <= section.sh_size(endian));
                // `.zdebug` sections, of GNU tools before SHF_COMPRESSED, have no size that could be checked here.
                !DEBUG_LINKS.contains(&name.as_str()) && !name.starts_with(".zdebug") && is_plausible
            })
        };
        let headers = [(0, begin.len() as u64), (header.e_phoff(endian), size_of_val(loaded) as u64)];
        let headers = headers.into_iter().chain([(offset, headers_bytes.len() as u64)]);
        let parts = |is_wanted: fn(&str) -> bool| {
            named.iter().filter(move |(name, _)| is_wanted(name)).map(|(_, section)| range(section))
        };
        let mut names: Vec<(u64, u64)> =
            headers.chain(parts(|name| SYMBOL_SECTIONS.contains(&name) || name.starts_with(".note"))).collect();
        let with_lines = lines && is_self_contained();
        if with_lines {
            names.extend(parts(|name| name.starts_with(".debug_")));
        }
        let max = if with_lines { MAX_LINES } else { MAX_NAMES };
        let names = if debug_path.is_some() { Some(Compressed::default()) } else { Compressed::read(file, names, max) };
        let debug = with_lines.then(|| {
            [".debug_info", ".debug_abbrev"].map(|name| {
                let section = find(name)?;
                let is_compressed = section.sh_flags(endian).0 & object::elf::SHF_COMPRESSED.0 != 0;
                Some(Section { offset: section.sh_offset(endian), bytes: section.sh_size(endian), is_compressed })
            })
        });
        let debug = debug.and_then(|[info, abbreviations]| Some([info?, abbreviations?]));
        Some(Elf { length, segments, unwind, debug_path, names, debug })
    }

    /// Returns the memory that this takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let unwind = match &self.unwind {
            Unwind::By(sections) => sections.table.0.len() + sections.frames.0.memory(),
            Unwind::ByFramePointers => 0,
        };
        (size_of::<Self>() + unwind + self.names.as_ref().map_or(0, |names| names.bytes.len())) as u64
    }

    /// Returns whether the symbols could be read.
    pub(super) fn has_all_names(&self) -> bool {
        self.names.is_some()
    }

    /// Returns the size of the copy that is made to look up symbols, in bytes.
    pub(super) fn names_bytes(&self) -> u64 {
        self.names.iter().flat_map(|names| &names.parts).map(|(_, bytes)| bytes).sum()
    }

    /// Returns where symbols are looked up: in a debug file of the machine, by address, or in a copy, by file offset.
    /// No other process can change the copy.
    pub(super) fn names(&self) -> Option<SymbolSource> {
        if let Some(debug_path) = &self.debug_path {
            return Some(SymbolSource::DebugFile(debug_path.clone()));
        }
        let names = self.names.as_ref().filter(|names| !names.parts.is_empty())?;
        let copy = File::from(memfd_create("whylate-names", MemfdFlags::CLOEXEC).ok()?);
        // Parts that are not copied read as zeros.
        copy.set_len(self.length).ok()?;
        names.decompress(&copy).ok()?;
        // Its owner cannot change the copy any more.
        let has_lines =
            self.debug.as_ref().is_some_and(|[info, abbreviations]| is_moderate(&copy, info, abbreviations));
        Some(SymbolSource::Copy { copy, has_lines })
    }

    /// Returns the address of a file offset, as the file's program headers assign it.
    pub(super) fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments
            .iter()
            .find(|(at, length, _)| (*at..at.saturating_add(*length)).contains(&offset))
            .and_then(|(at, _, address)| (offset - at).checked_add(*address))
    }

    /// Lists file offset and length of each segment.
    #[cfg(feature = "fuzzing")]
    pub(super) fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.segments.iter().map(|&(at, length, _)| (at, length))
    }

    /// Returns the unwind rule of an instruction at a file offset.
    pub(super) fn rule_at(&self, offset: u64) -> Rule {
        match &self.unwind {
            Unwind::ByFramePointers => Rule::plain(rule_base::RULE_CHAIN),
            Unwind::By(sections) => {
                self.unwind_rule(sections, offset).unwrap_or_else(|| Rule::plain(rule_base::RULE_BROKEN))
            }
        }
    }

    fn unwind_rule(&self, sections: &UnwindSections, offset: u64) -> Option<Rule> {
        let address = self.address_of(offset)?;
        let ((table, table_at), (frames, frames_at)) = (&sections.table, &sections.frames);
        // All linkers write the row count as udata4. With another encoding gimli's product of count and size may
        // overflow.
        if table.get(2) != Some(&gimli::DW_EH_PE_udata4.0) {
            return None;
        }
        let bases =
            BaseAddresses::default().set_eh_frame_hdr(*table_at).set_eh_frame(*frames_at).set_text(sections.text);
        let parsed = EhFrameHdr::new(table, LittleEndian).parse(&bases, 8).ok()?;
        let table = parsed.table()?;
        // gimli's difference of these two overflows if a table points below the section.
        let frames_begin = parsed.eh_frame_ptr().direct().ok()?;
        let at = usize::try_from(table.lookup(address, &bases).ok()?.direct().ok()?.checked_sub(frames_begin)?).ok()?;
        let Function { bytes, at, moved } = frames.function(at)?;
        let bases = bases.set_eh_frame(frames_at.wrapping_add(moved));
        let frames = gimli::EhFrame::new(&bytes, LittleEndian);
        let entry = frames.fde_from_offset(&bases, EhFrameOffset(at), gimli::EhFrame::cie_from_offset).ok()?;
        let mut context = UnwindContext::new();
        rule_of(entry.unwind_info_for_address(&frames, &bases, &mut context, address).ok()?, &frames)
    }
}

/// Location of a file's symbols.
pub(super) enum SymbolSource {
    DebugFile(PathBuf),
    /// `has_lines`: its debug information is safe to follow.
    Copy {
        copy: File,
        has_lines: bool,
    },
}

impl Compressed {
    /// Reads and compresses parts of a file; `None` if the file is shorter, or the parts are longer than `max`.
    fn read(file: &File, mut parts: Vec<(u64, u64)>, max: u64) -> Option<Self> {
        parts.retain(|(_, bytes)| *bytes > 0);
        let bytes = parts.iter().try_fold(0_u64, |sum, (_, bytes)| sum.checked_add(*bytes))?;
        let mut compressed = zstd::stream::write::Encoder::new(Vec::new(), ZSTD_LEVEL).ok().filter(|_| bytes <= max)?;
        let mut chunk = vec![0; CHUNK_BYTES];
        for &(offset, bytes) in &parts {
            let end = offset.checked_add(bytes)?;
            for at in (offset..end).step_by(CHUNK_BYTES) {
                let chunk = &mut chunk[..CHUNK_BYTES.min((end - at) as usize)];
                file.read_exact_at(chunk, at).ok()?;
                compressed.write_all(chunk).ok()?;
            }
        }
        let mut bytes = compressed.finish().ok()?;
        bytes.shrink_to_fit();
        Some(Compressed { parts, bytes })
    }

    /// Writes the parts to their original offsets.
    fn decompress(&self, copy: &File) -> io::Result<()> {
        let mut compressed = zstd::stream::read::Decoder::new(self.bytes.as_slice())?;
        let mut chunk = vec![0; CHUNK_BYTES];
        for &(offset, bytes) in &self.parts {
            let end = offset + bytes;
            for at in (offset..end).step_by(CHUNK_BYTES) {
                let chunk = &mut chunk[..CHUNK_BYTES.min((end - at) as usize)];
                compressed.read_exact(chunk)?;
                copy.write_all_at(chunk, at)?;
            }
        }
        Ok(())
    }
}

/// Returns the path of a distribution's debug file for a build ID, if it exists.
fn debug_file(id: &[u8]) -> Option<PathBuf> {
    let digits: Vec<String> = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let (first, rest) = digits.split_first().filter(|(_, rest)| !rest.is_empty())?;
    let path = PathBuf::from(format!("/usr/lib/debug/.build-id/{first}/{}.debug", rest.concat()));
    path.is_file().then_some(path)
}

fn rule_of(row: &UnwindTableRow<usize>, frames: &gimli::EhFrame<Bytes<'_>>) -> Option<Rule> {
    match row.register(RETURN_ADDRESS) {
        Some(RegisterRule::Offset(-8)) => {}
        // The outermost function of a thread has an undefined return address.
        Some(RegisterRule::Undefined) => return Some(Rule::plain(rule_base::RULE_ROOT)),
        _ => return None,
    }
    let bp_offset = match row.register(BP) {
        None | Some(RegisterRule::SameValue) => BP_KEPT,
        Some(RegisterRule::Offset(offset)) => i32::try_from(offset).ok()?,
        // A function that realigns its stack saves its caller's frame pointer where its own points to.
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

/// Returns the rule of a function that realigns its stack, as GCC writes it: the CFA is stored below the saved frame
/// pointer.
fn aligned(row: &UnwindTableRow<usize>, frames: &gimli::EhFrame<Bytes<'_>>) -> Option<Rule> {
    let CfaRule::Expression(expression) = row.cfa() else { return None };
    match *operations(expression.get(frames).ok()?.0).as_slice() {
        [(BP, offset, true)] => {
            Some(Rule { base: rule_base::RULE_AT_BP, cfa_offset: i32::try_from(offset).ok()?, bp_offset: BP_KEPT })
        }
        _ => None,
    }
}

/// Parses an expression into registers with offsets, and whether memory there is read; empty if it has other
/// operations.
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

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::os::fd::AsRawFd as _;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn own_program() -> PathBuf {
        PathBuf::from("/proc/self/exe")
    }

    /// Returns the file offset of a function of this program.
    fn offset_of(function: *const (), elf: &Elf) -> u64 {
        let maps = fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
        let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let line = maps.lines().find(|line| {
            let (range, _) = line.split_once(' ').expect("a line of maps");
            let (start, end) = range.split_once('-').expect("a range");
            (hex(start)..hex(end)).contains(&(function.addr() as u64))
        });
        let mut words = line.expect("it is mapped").split_whitespace();
        let start = hex(words.next().expect("a range").split('-').next().expect("a start"));
        let offset = hex(words.nth(1).expect("an offset"));
        assert!(elf.address_of(offset).is_some());
        function.addr() as u64 - start + offset
    }

    fn opened(path: &Path) -> Elf {
        reload(path).expect("it is read").expect("it is an ELF file")
    }

    fn reload(path: &Path) -> io::Result<Option<Elf>> {
        Elf::from_file(&File::open(path)?, false)
    }

    #[test]
    fn finds_unwind_rules_of_own_program() {
        let elf = opened(&own_program());
        let offset = offset_of(opened as *const (), &elf);
        let entered = elf.rule_at(offset);
        // At the first instruction the return address is all that was pushed.
        assert_eq!((entered.base, entered.cfa_offset), (rule_base::RULE_SP, 8), "{entered:?}");
        let inside = elf.rule_at(offset + 64);
        assert!([rule_base::RULE_SP, rule_base::RULE_BP].contains(&inside.base), "{inside:?}");
    }

    #[test]
    fn compressed_section_yields_same_rules() {
        let mut elf = opened(&own_program());
        let offset = offset_of(opened as *const (), &elf);
        let rules = |elf: &Elf| -> Vec<(u32, i32, i32)> {
            let rules = (offset..offset + 400_000).step_by(99).map(|at| elf.rule_at(at));
            rules.map(|rule| (rule.base.0, rule.cfa_offset, rule.bp_offset)).collect()
        };
        let compressed = rules(&elf);
        let Unwind::By(sections) = &mut elf.unwind else { panic!("it has a table") };
        assert!(matches!(sections.frames.0, EhFrame::Compressed(_)), "it is too small");
        sections.frames.0 = EhFrame::Whole(sections.frames.0.part(0, usize::MAX).expect("valid").into_owned());
        assert_eq!(rules(&elf), compressed);
        assert!(compressed.iter().any(|(base, ..)| *base != rule_base::RULE_BROKEN.0));
    }

    #[test]
    fn rejects_unwind_table_with_overflowing_row_count() {
        // Found by fuzzing.
        let bytes = include_bytes!("../../../../fuzz/corpus/elf/many_rows");
        let file = File::from(memfd_create("whylate-test", MemfdFlags::CLOEXEC).expect("there is memory"));
        file.write_all_at(bytes, 0).expect("there is memory");
        let elf = Elf::from_file(&file, false).expect("it is read").expect("it is an ELF file");
        let places = elf.segments.iter().flat_map(|&(at, length, _)| (at..at.saturating_add(length)).step_by(16));
        let rules: Vec<_> = places.take(1_000).map(|at| elf.rule_at(at).base).collect();
        assert!(!rules.is_empty() && rules.iter().all(|&base| base == rule_base::RULE_BROKEN), "{rules:?}");
    }

    #[test]
    fn symbolizes_from_private_copy() {
        let elf = opened(&own_program());
        let Some(SymbolSource::Copy { copy, .. }) = elf.names() else { panic!("it has names of its own") };
        let program = fs::metadata(own_program()).expect("there").len();
        assert_eq!(copy.metadata().expect("there").len(), program);
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let offset = offset_of(opened as *const (), &elf);
        let mut source = blazesym::symbolize::source::Elf::new(&path);
        source.debug_syms = false;
        let source = blazesym::symbolize::source::Source::Elf(source);
        let (symbolizer, offsets) = (blazesym::symbolize::Symbolizer::new(), [offset]);
        let input = blazesym::symbolize::Input::FileOffset(offsets.as_slice());
        let found = symbolizer.symbolize(&source, input).expect("it is an ELF file");
        let name = found[0].as_sym().expect("it has a name").name.to_string();
        assert!(name.contains("opened"), "{name}");
    }

    #[test]
    fn file_truncated_after_reading_keeps_its_data_and_fails_to_reload() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        fs::copy(own_program(), &path).expect("copied");
        let elf = opened(&path);
        let offset = offset_of(opened as *const (), &elf);
        for bytes in [100, 0] {
            OpenOptions::new().write(true).open(&path).expect("there").set_len(bytes).expect("cut short");
            assert_eq!(elf.rule_at(offset).base, rule_base::RULE_SP);
            assert!(elf.names().is_some());
            // A file with truncated headers must not count as one with frame pointers.
            assert!(reload(&path).is_err());
        }
    }

    #[test]
    fn rejects_sections_beyond_size_limits() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        let mut bytes = fs::read("/bin/true").expect("there");
        let sections_at = u64::from_le_bytes(bytes[40..48].try_into().expect("eight")) as usize;
        // Each section claims to be a terabyte long.
        for section in bytes[sections_at..].chunks_exact_mut(size_of::<SectionHeader64<Endianness>>()) {
            section[32..40].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        }
        fs::write(&path, &bytes).expect("written");
        OpenOptions::new().write(true).open(&path).expect("there").set_len(1 << 41).expect("a hole");
        assert!(reload(&path).is_err());
    }

    #[test]
    fn unwind_table_pointing_below_section_is_broken() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        let mut bytes = fs::read(own_program()).expect("there");
        let whole = opened(&own_program());
        let offset = offset_of(opened as *const (), &whole);
        let Unwind::By(UnwindSections { table: (table, _), .. }) = &whole.unwind else { panic!("it has a table") };
        let at = bytes.windows(table.len()).position(|part| part == table).expect("it is in the file");
        // Four bytes of encodings and a count of four bytes precede the section's address and pairs of addresses, all
        // relative. Each function's entry is set to address 0.
        let begins = whole.segments.iter().find(|(from, length, _)| (*from..from + length).contains(&(at as u64)));
        let (from, _, address) = begins.expect("it is loaded");
        let table_at = at as u64 - from + address;
        for entry in bytes[at + 12..at + table.len()].chunks_exact_mut(8) {
            entry[4..].copy_from_slice(&(table_at as u32).wrapping_neg().to_le_bytes());
        }
        fs::write(&path, &bytes).expect("written");
        assert_eq!(opened(&path).rule_at(offset).base, rule_base::RULE_BROKEN);
    }

    #[test]
    fn reads_file_without_segments() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        let mut bytes = fs::read("/bin/true").expect("there");
        // e_phnum: the number of program headers.
        bytes[56..58].fill(0);
        fs::write(&path, &bytes).expect("written");
        let elf = opened(&path);
        assert!(elf.address_of(0).is_none() && elf.names().is_some());
    }

    proptest! {
        #[test]
        fn never_panics_on_corrupted_files(changes in prop::collection::vec((0..200_000_usize, any::<u8>()), 1..40)) {
            let mut bytes = fs::read("/bin/true").expect("there");
            for (at, byte) in changes {
                let length = bytes.len();
                // Headers at the beginning and the end matter most.
                let at = if at % 2 == 0 { at % 1_000 } else { length - 1 - at % 3_000 };
                bytes[at % length] = byte;
            }
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("program");
            fs::write(&path, &bytes).expect("written");
            if let Ok(Some(elf)) = Elf::from_file(&File::open(&path).expect("it opens"), true) {
                for offset in (0..bytes.len() as u64).step_by(97) {
                    elf.rule_at(offset);
                }
                elf.names();
            }
        }
    }
}
