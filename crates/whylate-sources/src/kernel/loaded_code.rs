// SPDX-License-Identifier: MIT OR Apache-2.0
//! Address ranges of kernel code loaded after boot: modules and BPF programs. The kernel's symbol list has no lengths:
//! an address in unloaded code would be taken for the preceding function, whichever that is.
//!
//! Code is often loaded at the address of earlier code. Each piece therefore has an epoch, and names belong to an epoch
//! ([`crate::kernel::symbols`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use libbpf_rs::libbpf_sys;

/// Maximum length of a function; the gaps between the kernel's own code and that of modules are longer.
const MAX_FUNCTION_BYTES: u64 = 1 << 20;
/// Size of a trampoline, which the kernel allocates by pages (kernel/bpf/trampoline.c).
const TRAMPOLINE_BYTES: u64 = 4096;
/// Maximum number of unloaded pieces of code that are kept.
const MAX_FORMER: usize = 16_384;

/// A loaded module. When it is loaded again, it has another directory in /sys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    pub name: String,
    /// 0 if hidden.
    pub inode: u64,
    pub range: Range<u64>,
}

/// Code that is loaded at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listed {
    pub modules: Vec<Module>,
    /// IDs of all BPF programs, which are not reused.
    pub programs: BTreeSet<u32>,
    /// Functions of the requested programs.
    pub functions: BTreeMap<u32, Vec<Range<u64>>>,
}

impl Listed {
    /// Lists the code that is loaded now, with the functions of programs that are not `known`.
    ///
    /// Unless it is `thorough`, programs are enumerated only if there is a new one: it may be where an unloaded one was.
    /// IDs rise until they wrap around, so one system call finds out (kernel/bpf/syscall.c, `bpf_prog_alloc_id`).
    pub(crate) fn now(known: &BTreeSet<u32>, thorough: bool) -> Self {
        // A kernel without modules has no such file.
        let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
        let is_new = thorough || known.last().is_none_or(|&last| next_program(last).is_some());
        let programs = if is_new { programs() } else { known.clone() };
        let functions = programs.difference(known).map(|&id| (id, functions_of(id).unwrap_or_default())).collect();
        Listed { modules: modules.lines().filter_map(module).map(with_inode).collect(), programs, functions }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Key {
    Module(Module),
    Program(u32),
}

#[derive(Clone, Debug)]
struct Piece {
    key: Key,
    range: Range<u64>,
    /// First epoch in which the code was seen.
    epoch: u64,
}

/// Unloaded code, with the symbols that named it.
#[derive(Debug)]
pub(crate) struct Former<Names> {
    piece: Piece,
    /// Time at which the code was found unloaded; it may have run until shortly before.
    gone_ns: u64,
    /// Symbols that were read while the code was loaded.
    pub names: Option<Names>,
}

impl<Names> Former<Names> {
    /// Tests whether the function that starts at this address belongs to this code.
    pub(crate) fn has(&self, begins: u64) -> bool {
        self.piece.range.contains(&begins)
    }
}

/// Loaded code, as far as the kernel lists it to this process.
#[derive(Debug)]
pub(crate) struct LoadedCode<Names> {
    /// Number of changes of the loaded code.
    epoch: u64,
    /// Sorted by address, as `programs` is.
    modules: Vec<Piece>,
    programs: Vec<Piece>,
    known: BTreeSet<u32>,
    former: VecDeque<Former<Names>>,
}

impl<Names> Default for LoadedCode<Names> {
    fn default() -> Self {
        let (modules, programs) = (Vec::new(), Vec::new());
        LoadedCode { epoch: 0, modules, programs, known: BTreeSet::new(), former: VecDeque::new() }
    }
}

impl<Names: Clone> LoadedCode<Names> {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn known(&self) -> &BTreeSet<u32> {
        &self.known
    }

    /// Updates the list. `names` are the symbols that were read last, and in which epoch.
    pub(crate) fn update(&mut self, mut listed: Listed, now_ns: u64, names: Option<(&Names, u64)>) {
        let gone = |piece: &Piece| match &piece.key {
            Key::Module(module) => !listed.modules.contains(module),
            Key::Program(id) => !listed.programs.contains(id),
        };
        let former: Vec<Piece> = self
            .modules
            .extract_if(.., |piece| gone(piece))
            .chain(self.programs.extract_if(.., |piece| gone(piece)))
            .collect();
        let modules: Vec<Module> = listed.modules.into_iter().filter(|module| !self.has_module(module)).collect();
        listed.functions.retain(|id, _| !self.known.contains(id));
        self.known = listed.programs;
        if former.is_empty() && modules.is_empty() && listed.functions.is_empty() && self.epoch > 0 {
            return;
        }
        self.epoch += 1;
        let epoch = self.epoch;
        self.modules.extend(modules.into_iter().map(|module| Piece {
            range: module.range.clone(),
            key: Key::Module(module),
            epoch,
        }));
        let functions =
            listed.functions.into_iter().flat_map(|(id, ranges)| ranges.into_iter().map(move |range| (id, range)));
        self.programs.extend(functions.map(|(id, range)| Piece { key: Key::Program(id), range, epoch }));
        for pieces in [&mut self.modules, &mut self.programs] {
            pieces.sort_by_key(|piece| piece.range.start);
        }
        for piece in former {
            let names = names.filter(|(_, read)| *read >= piece.epoch).map(|(names, _)| names.clone());
            self.former.push_back(Former { piece, gone_ns: now_ns, names });
        }
        let beyond = self.former.len().saturating_sub(MAX_FORMER);
        self.former.drain(..beyond);
    }

    fn has_module(&self, module: &Module) -> bool {
        self.modules.iter().any(|piece| matches!(&piece.key, Key::Module(known) if known == module))
    }

    /// Forgets code unloaded before `since_ns`.
    pub(crate) fn forget_former(&mut self, since_ns: u64) {
        self.former.retain(|former| former.gone_ns > since_ns);
    }

    /// Drops the names of unloaded code, except those of the last symbols read, when other symbols are read.
    pub(crate) fn keep_names(&mut self, is_last: impl Fn(&Names) -> bool) {
        self.former.iter_mut().for_each(|former| former.names = former.names.take().filter(&is_last));
    }

    /// Returns code that has run at the address before it was unloaded.
    pub(crate) fn former_at(&self, address: u64) -> impl Iterator<Item = &Former<Names>> {
        self.former.iter().filter(move |former| former.piece.range.contains(&address))
    }

    pub(crate) fn has_former(&self) -> bool {
        !self.former.is_empty()
    }

    /// Returns since which epoch the address belongs to the same code. Unlisted code, such as a trampoline, may change
    /// with each epoch.
    pub(crate) fn epoch_of(&self, address: u64) -> u64 {
        self.piece_at(address).map_or(self.epoch, |piece| piece.epoch)
    }

    /// Tests whether a module or a program contains the address.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.piece_at(address).is_some()
    }

    fn piece_at(&self, address: u64) -> Option<&Piece> {
        // A module's size covers all its parts, the first of which is the code: some may seem to overlap.
        self.program_at(address).or_else(|| last_with(&self.modules, address, usize::MAX))
    }

    fn program_at(&self, address: u64) -> Option<&Piece> {
        // A return address may be just behind a function, where the next one starts.
        last_with(&self.programs, address, 2)
    }

    /// Tests whether the function that starts at `begins`, by the kernel's symbol list, contains the address.
    pub(crate) fn belongs(&self, address: u64, function: &str, begins: u64) -> bool {
        let mut modules = self.modules.iter().filter(|module| module.range.contains(&begins)).peekable();
        match function {
            // Without the privilege to list programs, there are none. A program that was loaded since the symbols were read
            // is not the one before it.
            _ if is_program(function) => {
                let is_same = |program: &Piece| program.range.contains(&begins);
                self.programs.is_empty() || self.program_at(address).is_some_and(is_same)
            }
            _ if function.starts_with("bpf_trampoline_") => address.abs_diff(begins) < TRAMPOLINE_BYTES,
            _ if address.abs_diff(begins) >= MAX_FUNCTION_BYTES => false,
            _ => modules.peek().is_none() || modules.any(|module| module.range.contains(&address)),
        }
    }
}

/// Returns the last piece that contains the address, among the last `among` pieces that start before it.
fn last_with(pieces: &[Piece], address: u64, among: usize) -> Option<&Piece> {
    let after = pieces.partition_point(|piece| piece.range.start <= address);
    pieces[..after].iter().rev().take(among).find(|piece| piece.range.contains(&address))
}

/// Tests for the kernel's name of a BPF program: `bpf_prog_`, 16 digits of tag, its own name (kernel/bpf/core.c).
fn is_program(function: &str) -> bool {
    let tag = function.strip_prefix("bpf_prog_").and_then(|rest| rest.get(..16));
    tag.is_some_and(|tag| tag.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Parses a line `name size users dependents state address`.
fn module(line: &str) -> Option<Module> {
    let mut words = line.split_ascii_whitespace();
    let name = words.next()?.to_owned();
    let size: u64 = words.next()?.parse().ok()?;
    let begins = u64::from_str_radix(words.nth(3)?.strip_prefix("0x")?, 16).ok()?;
    // All zeros if addresses are hidden.
    (begins != 0).then(|| Module { name, inode: 0, range: begins..begins.saturating_add(size) })
}

fn with_inode(module: Module) -> Module {
    let inode = fs::metadata(format!("/sys/module/{}", module.name)).map_or(0, |about| about.ino());
    Module { inode, ..module }
}

/// Returns the IDs of all programs; none without CAP_SYS_ADMIN.
fn programs() -> BTreeSet<u32> {
    std::iter::successors(next_program(0), |&id| next_program(id)).collect()
}

/// Returns the lowest ID above `id`.
#[allow(unsafe_code)]
fn next_program(id: u32) -> Option<u32> {
    let mut next = 0;
    // SAFETY: the kernel writes one number.
    (unsafe { libbpf_sys::bpf_prog_get_next_id(id, &raw mut next) } == 0).then_some(next)
}

/// Returns the address ranges of a program's functions; `None` if it is gone.
#[allow(unsafe_code)]
fn functions_of(id: u32) -> Option<Vec<Range<u64>>> {
    // SAFETY: takes a number, and returns a descriptor or a negative number.
    let raw = unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) };
    if raw < 0 {
        return None;
    }
    // SAFETY: the descriptor was opened for this.
    let program = unsafe { OwnedFd::from_raw_fd(raw) };
    let mut info = libbpf_sys::bpf_prog_info::default();
    let about = (&raw mut info).cast();
    let mut length = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    // SAFETY: the kernel writes `length` bytes of numbers into `info`, which has no room for anything else.
    let ret = unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), about, &raw mut length) };
    let functions = info.nr_jited_ksyms.min(info.nr_jited_func_lens);
    let (mut begins, mut lengths) = (vec![0u64; functions as usize], vec![0u32; functions as usize]);
    info = libbpf_sys::bpf_prog_info {
        nr_jited_ksyms: functions,
        jited_ksyms: begins.as_mut_ptr() as u64,
        nr_jited_func_lens: functions,
        jited_func_lens: lengths.as_mut_ptr() as u64,
        ..Default::default()
    };
    let about = (&raw mut info).cast();
    // SAFETY: as above, and `info` points to as many numbers as the kernel writes.
    if ret != 0 || unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), about, &raw mut length) } != 0 {
        return None;
    }
    // A return address may lie just behind a function that ends with a call.
    let range = |(begins, length): (u64, u32)| begins..begins.saturating_add(length.into()).saturating_add(1);
    Some(begins.into_iter().zip(lengths).map(range).filter(|range| range.start != 0).collect())
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Listed, LoadedCode};

    /// Parses /proc/modules, and looks up code in its modules.
    pub(crate) fn modules(text: &str) {
        let modules: Vec<_> = text.lines().filter_map(super::module).collect();
        let begins: Vec<u64> = modules.iter().map(|module| module.range.start).take(4).collect();
        let mut code = LoadedCode::<()>::default();
        code.update(Listed { modules, ..Listed::default() }, 1, None);
        for begins in begins {
            code.belongs(begins, text, begins);
            code.epoch_of(begins);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "bpf_prog_960b39305044d69d_on_x";

    fn listed<'a>(modules: impl IntoIterator<Item = &'a str>, programs: &[(u32, &[Range<u64>])]) -> Listed {
        Listed {
            modules: modules.into_iter().filter_map(module).collect(),
            programs: programs.iter().map(|(id, _)| *id).collect(),
            functions: programs.iter().map(|(id, ranges)| (*id, ranges.to_vec())).collect(),
        }
    }

    #[test]
    fn gap_belongs_to_no_code() {
        let lines = [
            "ext4 983040 2 - Live 0xffffffffc0400000",
            "crc16 12288 1 ext4, Live 0xffffffffc0300000 (E)",
            "hidden 1 0 - Live 0x0000000000000000",
            "rubbish",
        ];
        let begins = 0xffff_ffff_c000_1000;
        let mut code = LoadedCode::<()>::default();
        code.update(listed(lines, &[(7, &[begins..begins + 0x100, begins + 0x300..begins + 0x400])]), 1, None);
        assert_eq!(code.modules.len(), 2);
        assert!(code.belongs(0xffff_ffff_8100_0010, "schedule", 0xffff_ffff_8100_0000));
        assert!(code.belongs(0xffff_ffff_c030_0210, "crc16", 0xffff_ffff_c030_0200));
        assert!(!code.belongs(0xffff_ffff_c030_3210, "crc16", 0xffff_ffff_c030_0200));
        assert!(code.belongs(0xffff_ffff_c000_1010, PROGRAM, 0xffff_ffff_c000_1000));
        assert!(!code.belongs(0xffff_ffff_c000_1210, PROGRAM, 0xffff_ffff_c000_1000));
        // A function of the kernel itself.
        assert!(code.belongs(0xffff_ffff_8100_1210, "bpf_prog_test_run_syscall", 0xffff_ffff_8100_1200));
        assert!(!code.belongs(0xffff_ffff_c000_1210, "_end", 0xffff_ffff_8300_0000));
    }

    #[test]
    fn code_at_same_address_has_another_epoch() {
        let range = 0x1000..0x1100;
        let program = |id| listed(["ext4 4096 2 - Live 0x9000"], &[(id, std::slice::from_ref(&range))]);
        let mut code = LoadedCode::<u8>::default();
        code.update(program(7), 10, None);
        let (first, module, gap) = (code.epoch_of(0x1010), code.epoch_of(0x9010), code.epoch_of(0x5000));
        // Nothing has changed.
        code.update(program(7), 20, Some((&1, 1)));
        assert_eq!([first, module, gap], [0x1010, 0x9010, 0x5000].map(|address| code.epoch_of(address)));
        assert!(!code.has_former());
        code.update(program(8), 30, Some((&1, 1)));
        assert!(code.epoch_of(0x1010) > first && code.epoch_of(0x5000) > gap);
        assert_eq!(code.epoch_of(0x9010), module, "the module is the same");
        let former: Vec<_> = code.former_at(0x1010).map(|former| (former.gone_ns, former.names)).collect();
        assert_eq!(former, [(30, Some(1))]);
        assert_eq!(code.former_at(0x9010).count(), 0);
        // Symbols older than the code do not name it.
        code.update(program(9), 40, Some((&1, 1)));
        assert_eq!(code.former_at(0x1010).map(|former| former.names).collect::<Vec<_>>(), [Some(1), None]);
        code.forget_former(30);
        assert_eq!(code.former_at(0x1010).map(|former| former.gone_ns).collect::<Vec<_>>(), [40]);
        code.forget_former(40);
        assert!(!code.has_former());
    }

    #[test]
    fn reloaded_module_is_another_one() {
        let with = |inode| {
            let mut listed = listed(["ext4 4096 2 - Live 0x9000"], &[]);
            listed.modules.iter_mut().for_each(|module| module.inode = inode);
            listed
        };
        let mut code = LoadedCode::<u8>::default();
        code.update(with(5), 10, None);
        let first = code.epoch_of(0x9010);
        code.update(with(6), 20, Some((&1, 1)));
        assert!(code.epoch_of(0x9010) > first);
        assert_eq!(code.former_at(0x9010).map(|former| former.names).collect::<Vec<_>>(), [Some(1)]);
    }

    #[test]
    fn unloaded_code_is_bounded() {
        let mut code = LoadedCode::<u8>::default();
        let ranges: Vec<Range<u64>> = (0..MAX_FORMER as u64 + 10).map(|at| at * 64..at * 64 + 32).collect();
        code.update(listed([], &[(1, &ranges)]), 10, None);
        code.update(listed([], &[]), 20, None);
        assert_eq!(code.former.len(), MAX_FORMER);
    }
}
