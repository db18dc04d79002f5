// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of processes: which file each piece of code is from, kept so that it is known when the process has ended.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::CallGraph;
use super::elf::Elf;
use super::far_files::FarFiles;
use super::patience::Reader;
use super::perf_map::{CompiledCode, PerfMaps};
use super::rules::{INNERMOST, Rule, Rules};
use super::skel::types::{offcpu_limits, rule_base, unknown_frame};

/// Where a piece of a file lies in a process.
#[derive(Clone)]
pub(super) struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    /// `None` for memory without a file of code, such as that of a just-in-time compiler.
    pub(super) elf: Option<Arc<Elf>>,
    /// There may be such a file, which cannot be opened.
    is_closed: bool,
    /// The file's path as the process sees it.
    pub(super) path: String,
}

/// A process whose user stacks were read.
#[derive(Clone, Default)]
pub(super) struct Process {
    pub(super) tgid: u32,
    /// Executable ones, in order of their addresses.
    mappings: Vec<Mapping>,
    /// The names of what a just-in-time compiler has made.
    pub(super) compiled: Arc<CompiledCode>,
    /// The walk in which the mappings were read last.
    read_in: u64,
}

impl Process {
    /// How many of its files could not be read since somebody asked about each.
    pub(super) fn take_unread(&self) -> u64 {
        let elfs = self.mappings.iter().filter_map(|mapping| mapping.elf.as_ref());
        elfs.map(|elf| u64::from(elf.take_failure())).sum()
    }

    /// Drops what was named in its files, each of which is named again when it is asked for.
    pub(super) fn forget_names(&self) {
        self.mappings.iter().filter_map(|mapping| mapping.elf.as_ref()).for_each(|elf| elf.known().clear());
    }

    fn has_compiled_code(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.path.is_empty())
    }

    /// Where an address lies.
    pub(super) fn mapping_of(&self, address: u64) -> Option<&Mapping> {
        let after = self.mappings.partition_point(|mapping| mapping.start <= address);
        self.mappings[..after].last().filter(|mapping| address < mapping.end)
    }
}

impl Mapping {
    pub(super) fn offset_of(&self, address: u64) -> u64 {
        address - self.start + self.offset
    }
}

/// Answers the program's questions.
#[derive(Default)]
pub(super) struct Processes {
    by_id: HashMap<u32, Arc<Process>>,
    /// Each file once, by what tells it from others.
    elf_by_file: HashMap<String, Option<Option<Arc<Elf>>>>,
    /// Files that could not be opened since they were told.
    closed: u64,
    walk: u64,
    call_graph: CallGraph,
    reader: Reader,
    files: FarFiles,
    perf_maps: PerfMaps,
    /// Processes whose memory did not answer, and how often that was met since it was told.
    held_up: HashSet<u32>,
    unread: u64,
}

/// Files stay open while their names may be needed; so many are enough, and far from what a process may have open.
const FILES: usize = 400;

impl Processes {
    pub(super) fn new(call_graph: CallGraph) -> Self {
        Processes { call_graph, ..Processes::default() }
    }

    /// Begins a walk: mappings that do not hold an address may be read again.
    pub(super) fn begin_walk(&mut self) {
        let walk = self.walk;
        let new = self.with_compiled_code(|process| process.read_in == walk);
        if !new.is_empty() {
            // They are read while the processes go on, and may be there when names are asked for.
            self.perf_maps.read(new);
        }
        self.walk += 1;
    }

    fn with_compiled_code(&self, is_wanted: impl Fn(&Process) -> bool) -> Vec<(u32, u32)> {
        let processes = self.by_id.iter().filter(|(_, process)| is_wanted(process) && process.has_compiled_code());
        processes.map(|(id, process)| (*id, process.tgid)).collect()
    }

    /// What is known of processes by their number.
    pub(super) fn known(&self) -> HashMap<u32, Arc<Process>> {
        self.by_id.clone()
    }

    /// Takes the names of compiled code that have changed.
    pub(super) fn read_compiled(&mut self) {
        let all = self.with_compiled_code(|_| true);
        for (id, compiled) in self.perf_maps.changed(all) {
            // A process keeps its names for as long as nothing has changed.
            if let Some(process) = self.by_id.get_mut(&id) {
                Arc::make_mut(process).compiled = compiled;
            }
        }
    }

    /// What could not be read since the last call, by reason.
    pub(super) fn take_lost(&mut self) -> [(&'static str, u64); 3] {
        [
            ("unread", std::mem::take(&mut self.unread)),
            ("unread_files", std::mem::take(&mut self.closed)),
            ("unread_perf_maps", self.perf_maps.take_unread()),
        ]
    }

    /// Forgets processes, whose numbers are given out anew.
    pub(super) fn clear(&mut self) {
        self.by_id.clear();
        self.held_up.clear();
    }

    /// Finds the rule for a frame, and for those of its callers, as far as they are not known.
    pub(super) fn answer(&mut self, unknown: &unknown_frame, rules: &Rules) {
        let (id, mut stack) = (unknown.process, Words::of(unknown.tid));
        let (mut ip, mut sp, mut bp) = (unknown.ip, unknown.sp, unknown.bp);
        let mut innermost = unknown.innermost != 0;
        for _ in 0..offcpu_limits::MAX_FRAMES.0 {
            let key = if innermost { ip | INNERMOST } else { ip };
            let rule = rules.find(unknown.process, key).unwrap_or_else(|| {
                let rule = self.rule_for(unknown, ip, innermost);
                rules.insert(unknown.process, key, rule);
                rule
            });
            let Some(caller) =
                caller_of(rule, sp, bp, |at| self.of_process(id, |reader| stack.word(at, reader)).flatten())
            else {
                return;
            };
            (ip, sp, bp) = caller;
            innermost = false;
        }
    }

    /// What is read of a process's memory, as long as it answers: then the rest of the machine is looked at.
    fn of_process<T>(&mut self, id: u32, read: impl FnOnce(&mut Reader) -> Result<T, HeldUp>) -> Option<T> {
        if self.held_up.contains(&id) {
            return None;
        }
        let told = read(&mut self.reader);
        if told.is_err() {
            self.held_up.insert(id);
            self.unread += 1;
        }
        told.ok()
    }

    fn rule_for(&mut self, unknown: &unknown_frame, ip: u64, innermost: bool) -> Rule {
        // A return address is behind the call, which may be the last instruction of its function.
        let at = if innermost { ip } else { ip.wrapping_sub(1) };
        let by_frame_pointer = !innermost && self.call_graph == CallGraph::FramePointers;
        let process = self.process(unknown.process, unknown.tgid, at);
        match process.mapping_of(at) {
            None | Some(Mapping { is_closed: true, .. }) => Rule::plain(rule_base::RULE_BROKEN),
            Some(mapping) => match &mapping.elf {
                Some(elf) => {
                    let rule = elf.rule_at(mapping.offset_of(at));
                    // The first function of a thread has no caller, however it is told.
                    let is_told = !by_frame_pointer || rule.base == rule_base::RULE_ROOT;
                    if is_told { rule } else { Rule::plain(rule_base::RULE_CHAIN) }
                }
                None => Rule::plain(rule_base::RULE_CHAIN),
            },
        }
    }

    /// The process, with mappings that are read again where they do not hold the address.
    fn process(&mut self, id: u32, tgid: u32, address: u64) -> &Process {
        let is_stale =
            self.by_id.get(&id).is_none_or(|known| known.mapping_of(address).is_none() && known.read_in != self.walk);
        if is_stale {
            let mappings = self.read_mappings(id, tgid);
            let new = || Arc::new(Process { tgid, ..Process::default() });
            let known = Arc::make_mut(self.by_id.entry(id).or_insert_with(new));
            known.read_in = self.walk;
            // Of a process that has ended meanwhile nothing is left to read.
            if !mappings.is_empty() {
                known.mappings = mappings;
            }
        }
        self.by_id.entry(id).or_default()
    }

    fn read_mappings(&mut self, id: u32, tgid: u32) -> Vec<Mapping> {
        let read = move || fs::read(format!("/proc/{tgid}/maps")).unwrap_or_default();
        let text = self.of_process(id, |reader| reader.read(read).ok_or(HeldUp)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        text.lines().filter_map(|line| self.mapping(tgid, line)).collect()
    }

    fn mapping(&mut self, tgid: u32, line: &str) -> Option<Mapping> {
        let CodeMapped { range, start, end, offset, device, inode, path } = CodeMapped::parse(line)?;
        let found = (inode != "0").then(|| self.elf(tgid, range, [device, inode], path));
        let (elf, is_closed) = found.map_or((None, false), |found| (found.clone().flatten(), found.is_none()));
        Some(Mapping { start, end, offset, elf, is_closed, path: path.to_owned() })
    }

    /// `None` where it cannot be opened.
    fn elf(&mut self, tgid: u32, range: &str, [device, inode]: [&str; 2], path: &str) -> Option<Option<Arc<Elf>>> {
        let file = format!("{device} {inode}");
        if let Some(known) = self.elf_by_file.get(&file) {
            return known.clone();
        }
        if self.elf_by_file.len() >= FILES {
            self.elf_by_file.retain(|_, elf| elf.iter().flatten().any(|elf| Arc::strong_count(elf) > 1));
        }
        // By its mapping a file is found in other mount namespaces, and when deleted; that takes a privilege.
        let candidates =
            [format!("/proc/{tgid}/map_files/{range}"), format!("/proc/{tgid}/root{path}"), path.to_owned()];
        let elf = self.files.open(tgid, device, &candidates).and_then(Elf::of).ok();
        let elf = elf.map(|elf| elf.map(Arc::new));
        // A process that has ended meanwhile is told as such.
        self.closed += u64::from(elf.is_none() && Path::new(&format!("/proc/{tgid}")).exists());
        self.elf_by_file.insert(file, elf.clone());
        elf
    }
}

/// A line of proc_pid_maps(5) about code.
pub(super) struct CodeMapped<'a> {
    /// As it stands there.
    range: &'a str,
    start: u64,
    end: u64,
    offset: u64,
    device: &'a str,
    inode: &'a str,
    path: &'a str,
}

impl<'a> CodeMapped<'a> {
    /// `None` where it is not executable.
    pub(super) fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let range = words.next()?;
        let (start, end) = range.split_once('-')?;
        if !words.next()?.contains('x') {
            return None;
        }
        Some(CodeMapped {
            range,
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            offset: u64::from_str_radix(words.next()?, 16).ok()?,
            device: words.next()?,
            inode: words.next()?,
            path: words.next().unwrap_or_default().trim_start(),
        })
    }
}

/// Memory that does not answer.
struct HeldUp;

/// The stack of a thread, read in pieces of a page.
struct Words {
    tid: u32,
    /// The last piece, and where it begins.
    piece: Vec<u8>,
    begins: u64,
}

/// A page of memory is this large, or a multiple of it.
const PAGE_BYTES: u64 = offcpu_limits::PAGE_BYTES.0 as u64;
/// Flags of /proc/PID/pagemap (admin-guide/mm/pagemap.rst): there is memory for the page, or it was swapped out.
const PRESENT_OR_SWAPPED: u64 = 3 << 62;

impl Words {
    fn of(tid: u32) -> Self {
        Words { tid, piece: Vec::new(), begins: 0 }
    }

    /// `Ok(None)` where there is none, as the thread has ended, or has never written there: a page that was never read
    /// might have to come from a file, whose file system may not answer.
    fn word(&mut self, at: u64, reader: &mut Reader) -> Result<Option<u64>, HeldUp> {
        let known = |words: &Words| {
            let from = usize::try_from(at.checked_sub(words.begins)?).ok()?;
            Some(u64::from_ne_bytes(words.piece.get(from..from.checked_add(8)?)?.try_into().ok()?))
        };
        if let Some(word) = known(self) {
            return Ok(Some(word));
        }
        let tid = self.tid;
        let read = move || {
            // Not every kernel tells.
            let is_there = File::open(format!("/proc/{tid}/pagemap")).map_or(Some(true), |pages| {
                let mut entry = [0; 8];
                pages.read_exact_at(&mut entry, at / rustix::param::page_size() as u64 * 8).ok()?;
                Some(u64::from_ne_bytes(entry) & PRESENT_OR_SWAPPED != 0)
            })?;
            let mut piece = vec![0; (PAGE_BYTES - at % PAGE_BYTES) as usize];
            let memory = File::open(format!("/proc/{tid}/mem")).ok().filter(|_| is_there)?;
            memory.read_exact_at(&mut piece, at).ok()?;
            Some(piece)
        };
        (self.piece, self.begins) = (reader.read(read).ok_or(HeldUp)?.unwrap_or_default(), at);
        Ok(known(self))
    }
}

/// The caller's instruction, stack and frame pointer; the same in BPF: `step()`.
fn caller_of(rule: Rule, sp: u64, bp: u64, mut word: impl FnMut(u64) -> Option<u64>) -> Option<(u64, u64, u64)> {
    let from_bp = || bp.checked_add_signed(rule.cfa_offset.into());
    let cfa = match rule.base {
        rule_base::RULE_SP => sp.checked_add_signed(rule.cfa_offset.into())?,
        rule_base::RULE_BP => from_bp()?,
        rule_base::RULE_AT_BP => word(from_bp()?)?,
        rule_base::RULE_CHAIN if bp != 0 => bp.checked_add(16)?,
        _ => return None,
    };
    if cfa <= sp {
        return None;
    }
    let caller = word(cfa.checked_sub(8)?)?;
    let callers_bp = match rule.base {
        rule_base::RULE_CHAIN | rule_base::RULE_AT_BP => word(bp)?,
        _ if rule.bp_offset == super::rules::BP_KEPT => bp,
        _ => word(cfa.checked_add_signed(rule.bp_offset.into())?)?,
    };
    (caller != 0).then_some((caller, cfa, callers_bp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_found_by_each_kind_of_rule() {
        // At 0x100: the canonical frame address is 0x120, with the return address below it, then the frame pointer.
        let word = |at: u64| [(0x118, 0xabc), (0x110, 0x200), (0x108, 0x120)].iter().find(|w| w.0 == at).map(|w| w.1);
        let rule = |base, cfa_offset, bp_offset| Rule { base, cfa_offset, bp_offset };
        let kept = super::super::rules::BP_KEPT;
        for (rule, bp, callers_bp) in [
            (rule(rule_base::RULE_SP, 0x20, kept), 7, 7),
            (rule(rule_base::RULE_SP, 0x20, -16), 7, 0x200),
            (rule(rule_base::RULE_BP, 0x10, -16), 0x110, 0x200),
            (rule(rule_base::RULE_AT_BP, -8, kept), 0x110, 0x200),
            (rule(rule_base::RULE_CHAIN, 0, kept), 0x110, 0x200),
        ] {
            assert_eq!(caller_of(rule, 0x100, bp, word), Some((0xabc, 0x120, callers_bp)), "{rule:?}");
        }
        for base in [rule_base::RULE_ROOT, rule_base::RULE_BROKEN] {
            assert_eq!(caller_of(Rule::plain(base), 0x100, 0x110, word), None);
        }
        // Never downwards.
        assert_eq!(caller_of(rule(rule_base::RULE_BP, 0x10, kept), 0x120, 0x110, word), None);
    }
}
