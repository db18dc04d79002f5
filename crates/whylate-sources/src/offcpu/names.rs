// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names for the addresses of stacks, each once, all of a file together.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blazesym::symbolize::source::{Elf as ElfSource, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized, Symbolizer};
use whylate_model::name::{bounded, into_bounded};

use super::elf::Elf;
use super::process::Process;
use crate::demangle::demangled;
use crate::symbols::KernelSymbols;

/// A frame whose caller could not be told.
pub(super) const UNWOUND_PARTLY: &str = "[unwound partly]";
/// A thread that ran while its stack was read.
pub(super) const TORN: &str = "[ran meanwhile]";
/// Memory that somebody holds, or that a file system is to bring.
pub(super) const UNREAD: &str = "[memory did not answer]";
/// A program that is not 64 bits wide, or another architecture.
pub(super) const UNREADABLE: &str =
    if cfg!(target_arch = "x86_64") { "[not a 64-bit program]" } else { "[user frames not read]" };
/// A process that ended before its memory was read.
const EXITED: &str = "[exited]";

/// The function at an address, and before it those that the compiler has inlined there, innermost first.
pub(super) type Frames = Vec<String>;

/// The maximum number of inlined functions at one address. A file may describe any number, and recordings reject stacks of
/// more than 4,096 frames.
const MAX_INLINED: usize = 30;
/// The bytes of copied names that the symbolizer may have mapped. It never unmaps a file, so it is replaced when it has
/// more. That is as much as all files together may have, so it keeps those that are in use.
const MAX_MAPPED_BYTES: u64 = 64 << 20;
/// The memory of the names that files keep for later snapshots.
const MAX_KEPT_BYTES: usize = 16 << 20;

#[derive(Default)]
pub(super) struct Names {
    pub(super) kernel: KernelSymbols,
    symbolizer: Option<Symbolizer>,
    /// The copies that the symbolizer has mapped, by inode, and their bytes.
    mapped: HashSet<u64>,
    mapped_bytes: u64,
    /// The memory of the names that files keep.
    kept_bytes: usize,
    /// Whether files and lines are told too.
    lines: bool,
}

/// An address in user space that is to be named: where its name is.
enum Place<'a> {
    File {
        elf: &'a Elf,
        /// What the file calls the address.
        offset: u64,
        shown: String,
        names: PathBuf,
        is_address: bool,
    },
    /// Named already.
    Name(String),
}

/// What is asked of a file with names.
struct InFile<'a> {
    elf: &'a Elf,
    is_address: bool,
    shown: String,
    offsets: BTreeSet<u64>,
}

impl Names {
    pub(super) fn new(lines: bool, kernel: KernelSymbols) -> Self {
        Names { lines, kernel, ..Names::default() }
    }

    /// Names all frames of user stacks, by the process's number and the address; the flag tells the innermost frame.
    pub(super) fn user(
        &mut self,
        wanted: &BTreeSet<(u32, u64, bool)>,
        processes: &HashMap<u32, Arc<Process>>,
    ) -> HashMap<(u32, u64, bool), Frames> {
        if self.kept_bytes > MAX_KEPT_BYTES {
            processes.values().for_each(|process| process.forget_names());
            self.kept_bytes = 0;
        }
        let mut named = HashMap::new();
        // Copies of a file may have their names in the same one.
        let mut by_file: BTreeMap<(PathBuf, usize), InFile<'_>> = BTreeMap::new();
        let mut places = Vec::new();
        for &(id, address, innermost) in wanted {
            // A return address is behind the call, which may be the last instruction of its function.
            let at = if innermost { address } else { address.wrapping_sub(1) };
            match place_of(processes.get(&id).map(Arc::as_ref), at, self.lines) {
                Place::Name(name) => {
                    named.insert((id, address, innermost), vec![name]);
                }
                Place::File { elf, offset, shown, names, is_address } => {
                    if !elf.known().contains_key(&offset) {
                        let new = || InFile { elf, is_address, shown, offsets: BTreeSet::new() };
                        let file = (names, std::ptr::from_ref(elf).addr());
                        by_file.entry(file).or_insert_with(new).offsets.insert(offset);
                    }
                    places.push(((id, address, innermost), elf, offset));
                }
            }
        }
        for ((file, _), InFile { elf, is_address, shown, offsets }) in by_file {
            let offsets: Vec<u64> = offsets.into_iter().collect();
            let names = self.in_file(&file, is_address, &shown, &offsets);
            self.kept_bytes += names.iter().flatten().map(|name| size_of::<String>() + name.len()).sum::<usize>();
            elf.known().extend(offsets.into_iter().zip(names));
        }
        for (key, elf, offset) in places {
            if let Some(name) = elf.known().get(&offset) {
                named.insert(key, name.clone());
            }
        }
        named
    }

    fn in_file(&mut self, file: &Path, is_address: bool, shown: &str, offsets: &[u64]) -> Vec<Frames> {
        let lines = self.lines;
        let unknown = |offset: &u64| vec![format!("{shown}+{offset:#x}")];
        // Files of the distribution are no copies: the kernel can drop their pages.
        if file.starts_with("/proc/self/fd")
            && let Ok(about) = fs::metadata(file)
            && self.mapped.insert(about.ino())
        {
            // Holes between the copied parts take no memory.
            self.mapped_bytes += about.blocks().saturating_mul(512);
            if self.mapped_bytes > MAX_MAPPED_BYTES {
                self.symbolizer = None;
                (self.mapped, self.mapped_bytes) = (HashSet::from([about.ino()]), about.blocks().saturating_mul(512));
            }
        }
        let symbolizer = self.symbolizer.get_or_insert_with(|| {
            // Lines and inlined functions take a hundred times as long.
            Symbolizer::builder().enable_code_info(lines).enable_inlined_fns(lines).enable_demangling(false).build()
        });
        let input = if is_address { Input::VirtOffset(offsets) } else { Input::FileOffset(offsets) };
        let mut elf = ElfSource::new(file);
        // Of others the copy has lines only where they can be trusted.
        elf.debug_syms = lines;
        let has_lines = elf.debug_syms;
        let mut found = symbolizer.symbolize(&Source::Elf(elf), input);
        if found.is_err() && has_lines {
            // Debug information that makes no sense, or is packed in a way that is not known, leaves the names.
            let mut elf = ElfSource::new(file);
            elf.debug_syms = false;
            found = symbolizer.symbolize(&Source::Elf(elf), input);
        }
        match found {
            Ok(found) => found
                .iter()
                .zip(offsets)
                .map(|(found, offset)| match found {
                    Symbolized::Sym(symbol) if !symbol.name.is_empty() => frames_of(symbol),
                    Symbolized::Sym(_) | Symbolized::Unknown(_) => unknown(offset),
                })
                .collect(),
            Err(_) => offsets.iter().map(unknown).collect(),
        }
    }
}

/// Inlined functions come outermost first.
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
    // glibc's own name for what it exports under the rest of it.
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

fn place_of(process: Option<&Process>, at: u64, with_lines: bool) -> Place<'_> {
    let Some(process) = process else { return Place::Name(EXITED.to_owned()) };
    let Some(mapping) = process.mapping_of(at) else { return Place::Name(EXITED.to_owned()) };
    let Some(elf) = &mapping.elf else {
        return Place::Name(match process.compiled.name_at(at) {
            Some(name) => name,
            None if mapping.path.is_empty() => "[anonymous code]".to_owned(),
            None => bounded(&mapping.path).into_owned(),
        });
    };
    let offset = mapping.offset_of(at);
    let shown = shown(Path::new(&mapping.path));
    match elf.names(with_lines) {
        Some((file, true)) => match elf.address_of(offset) {
            Some(address) => Place::File { elf, offset: address, shown, names: file, is_address: true },
            None => Place::Name(format!("{shown}+{offset:#x}")),
        },
        Some((file, false)) => Place::File { elf, offset, shown, names: file, is_address: false },
        None => Place::Name(format!("{shown}+{offset:#x}")),
    }
}
