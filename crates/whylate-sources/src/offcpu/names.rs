// SPDX-License-Identifier: MIT OR Apache-2.0
//! Symbolizes user addresses: each once, all addresses of a file together.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use blazesym::symbolize::source::{Elf as ElfSource, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized, Symbolizer};
use whylate_model::name::{bounded, into_bounded};

use super::code_files::{CodeFile, Frames};
use super::elf::{Elf, SymbolSource};
use super::process::{Code, Process};
use crate::kernel::clock;
use crate::kernel::demangle::demangled;
use crate::kernel::symbols::KernelSymbols;

/// Frame below which the stack could not be unwound.
pub(super) const UNWOUND_PARTLY: &str = "[unwound partly]";
/// Frame of a thread that ran while its stack was read.
pub(super) const TORN: &str = "[ran meanwhile]";
/// Frame of memory that is locked, or that a file system has to page in.
pub(super) const UNREAD: &str = "[memory did not answer]";
/// Frame of a program that is not 64 bits wide, or of another architecture.
pub(super) const UNREADABLE: &str =
    if cfg!(target_arch = "x86_64") { "[not a 64-bit program]" } else { "[user frames not read]" };
/// Frame of a process that exited, or executed another program, before its mappings were read.
pub(super) const EXITED: &str = "[exited]";

/// The maximum number of inlined functions at one address. A file may describe any number, and recordings reject stacks
/// of more than 4,096 frames.
const MAX_INLINED: usize = 30;
/// The memory of the names that files keep for later snapshots.
const MAX_KEPT_BYTES: usize = 8 << 20;

#[derive(Default)]
pub(super) struct FrameNames {
    pub(super) kernel: KernelSymbols,
    /// Files with an open symbolizer; the most recently used is the last.
    symbolizers: Vec<FileSymbolizer>,
    /// Memory of the names that files keep, in bytes.
    kept_bytes: usize,
    /// Whether files and lines are resolved too.
    lines: bool,
    has_symbolized: bool,
    /// Names only addresses that a symbol contains: one without a size may end anywhere.
    is_strict: bool,
    /// Time at which symbols were last looked up.
    looked_up: Option<Instant>,
}

/// Maximum number of files with an open symbolizer, and the total size of their symbols.
const MAX_OPEN: usize = 32;
const MAX_OPEN_BYTES: u64 = 64 << 20;
/// Time without use after which a symbolizer is closed.
const OPEN_FOR: Duration = Duration::from_secs(10);
/// Time between two snapshots from which each symbolizer is closed after use: open ones of large files take tens of
/// megabytes.
const CLOSED_BETWEEN: Duration = Duration::from_secs(5);
/// CPU time for symbols of one snapshot, and of the first one. Files beyond it are symbolized at the next snapshot.
const PER_SNAPSHOT_NS: u64 = 400_000_000;
const PER_FIRST_SNAPSHOT_NS: u64 = 2_000_000_000;

/// A file with an open symbolizer.
struct FileSymbolizer {
    elf: Weak<Elf>,
    bytes: u64,
    used: Instant,
    symbolizer: Symbolizer,
    /// Looks up lines and inlined functions.
    lines: bool,
    names: PathBuf,
    is_address: bool,
    /// Keeps `names`, a path below /proc/self/fd, valid.
    _copy: Option<File>,
}

/// Location of a user address: a file offset, or a name.
enum Location<'a> {
    File {
        file: &'a CodeFile,
        offset: u64,
        shown: String,
    },
    /// A name that needs no symbolizer.
    Name(String),
}

/// Offsets of one file that are to be symbolized.
struct FileOffsets<'a> {
    file: &'a CodeFile,
    elf: Option<Arc<Elf>>,
    shown: String,
    offsets: BTreeSet<u64>,
}

impl FrameNames {
    pub(super) fn new(lines: bool, kernel: KernelSymbols) -> Self {
        FrameNames { lines, kernel, ..FrameNames::default() }
    }

    /// Names only addresses that a symbol contains.
    pub(super) fn strict() -> Self {
        FrameNames { is_strict: true, ..FrameNames::default() }
    }

    /// Symbolizes user frames, by process ID and address; the flag marks the innermost frame. The returned flag says
    /// whether all were symbolized for which there is a file: the others have to be requested again.
    pub(super) fn user(
        &mut self,
        wanted: &BTreeSet<(u32, u64, bool)>,
        processes: &HashMap<u32, Arc<Process>>,
    ) -> (HashMap<(u32, u64, bool), Frames>, bool) {
        let max_ns = if self.has_symbolized { PER_SNAPSHOT_NS } else { PER_FIRST_SNAPSHOT_NS };
        self.user_within(max_ns, wanted, processes)
    }

    /// Symbolizes user frames as above, and begins with no other file after some CPU time.
    pub(super) fn user_within(
        &mut self,
        max_ns: u64,
        wanted: &BTreeSet<(u32, u64, bool)>,
        processes: &HashMap<u32, Arc<Process>>,
    ) -> (HashMap<(u32, u64, bool), Frames>, bool) {
        if self.kept_bytes > MAX_KEPT_BYTES {
            processes.values().for_each(|process| process.forget_names());
            self.kept_bytes = 0;
        }
        let mut named = HashMap::new();
        let mut by_file: HashMap<usize, FileOffsets<'_>> = HashMap::new();
        let mut locations = Vec::new();
        for &(id, address, innermost) in wanted {
            // A return address may be the first one behind its function: the call may be the last instruction.
            let at = if innermost { address } else { address.wrapping_sub(1) };
            match locate(processes.get(&id).map(Arc::as_ref), at) {
                Location::Name(name) => {
                    named.insert((id, address, innermost), vec![name]);
                }
                Location::File { file, offset, shown } => {
                    if !file.names().contains_key(&offset) {
                        let new =
                            || FileOffsets { file, elf: file.elf(), shown: shown.clone(), offsets: BTreeSet::new() };
                        by_file.entry(std::ptr::from_ref(file).addr()).or_insert_with(new).offsets.insert(offset);
                    }
                    locations.push(((id, address, innermost), file, offset, shown));
                }
            }
        }
        let (began, began_cpu_ns) = (Instant::now(), clock::thread_cpu_ns());
        self.symbolizers.retain(|open_file| began - open_file.used < OPEN_FOR && open_file.elf.strong_count() > 0);
        let mut files: Vec<_> = by_file.into_values().collect();
        // Files with few symbols take the least time.
        files.sort_by_key(|in_file| in_file.elf.as_ref().map_or(0, |elf| elf.names_bytes()));
        let mut is_whole = true;
        let is_rare = self.looked_up.replace(began).is_some_and(|before| began - before >= CLOSED_BETWEEN);
        for FileOffsets { file, elf, shown, offsets } in files {
            let is_late = clock::thread_cpu_ns() - began_cpu_ns > max_ns;
            self.has_symbolized = true;
            match elf.filter(|_| !is_late) {
                Some(elf) => {
                    let offsets: Vec<u64> = offsets.into_iter().collect();
                    let names = self.symbolize(&elf, &shown, &offsets);
                    self.kept_bytes +=
                        names.iter().flatten().map(|name| size_of::<String>() + name.len()).sum::<usize>();
                    file.names().extend(offsets.into_iter().zip(names));
                    if is_rare {
                        self.symbolizers.clear();
                    }
                }
                None => {
                    file.fail();
                    is_whole = false;
                }
            }
        }
        for (key, file, offset, shown) in locations {
            let name = file.names().get(&offset).cloned();
            named.insert(key, name.unwrap_or_else(|| vec![format!("{shown}+{offset:#x}")]));
        }
        (named, is_whole)
    }

    /// Opens a symbolizer for a file, or returns the open one; `None` if the file has no symbols.
    fn open(&mut self, elf: &Arc<Elf>) -> Option<&FileSymbolizer> {
        let is_it = |open_file: &FileSymbolizer| open_file.elf.ptr_eq(&Arc::downgrade(elf));
        let mut open_file = match self.symbolizers.iter().position(is_it) {
            Some(index) => self.symbolizers.remove(index),
            None => {
                let (names, is_address, copy, has_lines) = match elf.names()? {
                    SymbolSource::DebugFile(path) => (path, true, None, true),
                    SymbolSource::Copy { copy, has_lines } => {
                        (format!("/proc/self/fd/{}", copy.as_raw_fd()).into(), false, Some(copy), has_lines)
                    }
                };
                let lines = self.lines && has_lines;
                // Lines and inlined functions take 100 times as long.
                let builder = Symbolizer::builder().enable_code_info(lines).enable_inlined_fns(lines);
                let symbolizer = builder.enable_demangling(false).build();
                let (elf, bytes) = (Arc::downgrade(elf), elf.names_bytes());
                FileSymbolizer { elf, bytes, used: Instant::now(), symbolizer, lines, names, is_address, _copy: copy }
            }
        };
        open_file.used = Instant::now();
        let open_bytes = |open: &[FileSymbolizer]| open.iter().map(|open_file| open_file.bytes).sum::<u64>();
        while self.symbolizers.len() >= MAX_OPEN
            || !self.symbolizers.is_empty() && open_bytes(&self.symbolizers) + open_file.bytes > MAX_OPEN_BYTES
        {
            self.symbolizers.remove(0);
        }
        self.symbolizers.push(open_file);
        self.symbolizers.last()
    }

    /// Symbolizes offsets of a file.
    fn symbolize(&mut self, elf: &Arc<Elf>, shown: &str, offsets: &[u64]) -> Vec<Frames> {
        let unknown = |offset: &u64| vec![format!("{shown}+{offset:#x}")];
        let is_strict = self.is_strict;
        let is_within = |symbol: &Sym<'_>| !is_strict || symbol.size.is_some() || symbol.offset == 0;
        let Some(&FileSymbolizer { ref symbolizer, lines, names: ref file, is_address, .. }) = self.open(elf) else {
            return offsets.iter().map(unknown).collect();
        };
        // An offset without an address is in no function.
        let addresses: Vec<u64>;
        let input = if is_address {
            addresses = offsets.iter().map(|&offset| elf.address_of(offset).unwrap_or(0)).collect();
            Input::VirtOffset(addresses.as_slice())
        } else {
            Input::FileOffset(offsets)
        };
        let mut source = ElfSource::new(file);
        // The copy has line information only if it can be trusted.
        source.debug_syms = lines;
        let mut found = symbolizer.symbolize(&Source::Elf(source), input);
        if found.is_err() && lines {
            // Without debug information, which may be malformed or compressed in an unsupported way, there are still
            // names.
            let mut source = ElfSource::new(file);
            source.debug_syms = false;
            found = symbolizer.symbolize(&Source::Elf(source), input);
        }
        match found {
            Ok(found) => found
                .iter()
                .zip(offsets)
                .map(|(found, offset)| match found {
                    Symbolized::Sym(symbol) if !symbol.name.is_empty() && is_within(symbol) => frames_of(symbol),
                    Symbolized::Sym(_) | Symbolized::Unknown(_) => unknown(offset),
                })
                .collect(),
            Err(_) => offsets.iter().map(unknown).collect(),
        }
    }
}

/// Returns the frames of a symbol, innermost first; `inlined` has the outermost function first.
fn frames_of(symbol: &Sym<'_>) -> Frames {
    let inlined = symbol
        .inlined
        .iter()
        .rev()
        .take(MAX_INLINED)
        .map(|function| frame(&function.name, function.code_info.as_ref()));
    inlined.chain([frame(&symbol.name, symbol.code_info.as_deref())]).collect()
}

fn frame(name: &str, code: Option<&CodeInfo<'_>>) -> String {
    // glibc's internal alias of an exported function.
    let name = demangled(name.strip_prefix("__GI_").unwrap_or(name));
    match code {
        Some(CodeInfo { file, line: Some(line), .. }) => {
            into_bounded(format!("{name} ({}:{line})", file.to_string_lossy()))
        }
        _ => name.into_owned(),
    }
}

fn shown(file: &Path) -> String {
    into_bounded(file.file_name().map_or_else(|| "?".into(), |name| name.to_string_lossy()).into_owned())
}

fn locate(process: Option<&Process>, at: u64) -> Location<'_> {
    let Some(process) = process else { return Location::Name(EXITED.to_owned()) };
    let Some(mapping) = process.mapping_of(at) else { return Location::Name(EXITED.to_owned()) };
    let shown = || shown(Path::new(&*mapping.path));
    match process.code_of(mapping) {
        Some(Code::File(file)) => Location::File { file, offset: mapping.offset_of(at), shown: shown() },
        Some(Code::Failed(_)) => Location::Name(format!("{}+{:#x}", shown(), mapping.offset_of(at))),
        Some(Code::Other) | None => Location::Name(match process.compiled.name_at(at) {
            Some(name) => name,
            None if mapping.path.is_empty() => "[anonymous code]".to_owned(),
            None => bounded(&mapping.path).into_owned(),
        }),
    }
}
