// SPDX-License-Identifier: MIT OR Apache-2.0
//! Address spaces of processes: the file of each executable mapping, cached so that it is known after the process
//! exits.

mod words;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::words::{Unresponsive, Words, caller_of};
use super::CallGraph;
use super::budget::{Budget, Retry};
use super::code_files::{CodeFile, CodeFiles};
use super::mappings::{Mapping, Mappings};
use super::perf_map::{CompiledCode, PerfMaps};
use super::rules::{INNERMOST, Rule, Rules};
use super::skel::types::{offcpu_limits, rule_base, unknown_frame};
use super::watchdog::Reader;
use crate::kernel::clock;
use crate::kernel::first_thread;
use crate::kernel::proc;

/// A process of which user stacks are unwound.
#[derive(Clone, Default)]
pub(super) struct Process {
    pub(super) tgid: u32,
    /// Executable mappings; of a process with very many, only those that contain frames.
    mappings: Arc<Mappings>,
    /// Code of mappings that contain frames, by start address.
    code: BTreeMap<u64, Code>,
    /// Names of just-in-time compiled code.
    pub(super) compiled: Arc<CompiledCode>,
    /// The walk in which the mappings were last read, and the one in which a reading was last deferred.
    read_in: u64,
    deferred_in: u64,
    /// Earliest time of the next reading of the mappings.
    next_reading: Option<Instant>,
    /// Whether the address range of a file has another mapping now.
    is_stale: bool,
    /// Real UID of the process.
    user: u32,
    /// The program that it executes, if known.
    program: Option<ExecutedProgram>,
}

/// Code of a mapping.
#[derive(Clone)]
pub(super) enum Code {
    File(Arc<CodeFile>),
    /// The file is not an ELF file.
    Other,
    /// The file could not be read.
    Failed(Retry),
}

impl Process {
    /// Counts the process's files that could not be read since the last call.
    pub(super) fn take_unread(&self) -> u64 {
        let failures = self.code.values().map(|code| match code {
            Code::File(file) => u64::from(file.take_failure()),
            Code::Other | Code::Failed(_) => 0,
        });
        failures.sum()
    }

    /// Drops the symbols of the process's files, which are looked up again on demand.
    pub(super) fn forget_names(&self) {
        for code in self.code.values() {
            if let Code::File(file) = code {
                file.names().clear();
            }
        }
    }

    fn has_compiled_code(&self) -> bool {
        self.mappings.list.iter().any(|mapping| mapping.path.is_empty())
    }

    /// Returns the mapping that contains an address.
    pub(super) fn mapping_of(&self, address: u64) -> Option<&Mapping> {
        self.mappings.at(address)
    }

    /// Returns the code of a mapping, if it was read.
    pub(super) fn code_of(&self, mapping: &Mapping) -> Option<&Code> {
        self.code.get(&mapping.start)
    }
}

/// Where a program's code ends, and its stack and arguments begin: others are those of another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExecutedProgram {
    pub(super) end_code: u64,
    pub(super) start_stack: u64,
    pub(super) arg_start: u64,
}

/// Finds unwind rules for the frames that the BPF programs ask about.
pub(super) struct Processes {
    by_id: HashMap<u32, Arc<Process>>,
    code: CodeFiles,
    /// Memory of the mappings of all processes, in bytes.
    kept: usize,
    /// Files and mappings that could not be read since the last snapshot.
    unread_files: u64,
    walk: u64,
    call_graph: CallGraph,
    reader: Reader,
    perf_maps: PerfMaps,
    budget: Budget,
    /// Processes with unresponsive memory, and how often one was found since the last snapshot.
    unresponsive: HashMap<u32, Retry>,
    unresponsive_count: u64,
    /// Time at which rules for unreadable code are to be requested again, and when they last were.
    retry_at: Option<Instant>,
    retried: Option<Instant>,
    /// CPU time of the thread that reads lists of mappings.
    pub(super) reader_cpu: Duration,
    /// Rules by file and offset, for CPU samples: a build has many processes of one file, and a rule takes tens of
    /// microseconds.
    by_offset: Option<HashMap<(u64, u64), Rule>>,
}

/// Maximum number of rules by file and offset.
const MAX_BY_OFFSET: usize = 1 << 16;

/// Maximum bytes kept of the mappings of all processes, and the bytes left after dropping some.
const MAX_KEPT: usize = 8 << 20;
const KEPT_AFTER_DROPPING: usize = 6 << 20;
/// Minimum interval between retries, which scan the table of rules.
const BETWEEN_RETRIES: Duration = Duration::from_millis(100);

/// Code that an address belongs to.
enum AtAddress {
    Code(Arc<CodeFile>, u64),
    /// Memory without an ELF file, such as that of a just-in-time compiler.
    NoFile,
    Nothing,
    /// The code cannot be read now.
    Later,
}

impl Processes {
    pub(super) fn new(call_graph: CallGraph, lines: bool) -> Self {
        Processes {
            by_id: HashMap::new(),
            code: CodeFiles::new(lines),
            kept: 0,
            unread_files: 0,
            perf_maps: PerfMaps::default(),
            walk: 0,
            call_graph,
            reader: Reader::default(),
            budget: Budget::default(),
            unresponsive: HashMap::new(),
            unresponsive_count: 0,
            retry_at: None,
            retried: None,
            reader_cpu: Duration::ZERO,
            by_offset: None,
        }
    }

    /// For CPU samples of one program.
    pub(super) fn of_samples() -> Self {
        let (code, budget) = (CodeFiles::of_samples(), Budget::of_samples());
        Processes { code, budget, by_offset: Some(HashMap::new()), ..Processes::new(CallGraph::Rules, false) }
    }

    /// Returns whether files may soon be evicted, after which their symbols cannot be looked up.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.code.is_nearly_full()
    }

    /// Begins a walk: mappings that lack an address may be read again.
    pub(super) fn begin_walk(&mut self) {
        self.look_again();
        self.budget.begin_walk(Instant::now());
        self.code.drop_unused();
    }

    /// Lets mappings be read again, within the time that is left for this walk.
    pub(super) fn look_again(&mut self) {
        let walk = self.walk;
        let new = self.with_compiled_code(|process| process.read_in == walk);
        if !new.is_empty() {
            // Perf maps are read in the background, and may be complete when symbols are looked up.
            self.perf_maps.read(new);
        }
        self.walk += 1;
    }

    /// Returns whether rules for code that could not be read are to be requested again now.
    pub(super) fn is_retry_due(&mut self) -> bool {
        let now = Instant::now();
        let rests = self.retried.is_some_and(|retried| now - retried < BETWEEN_RETRIES);
        let is_due = !rests && self.retry_at.is_some_and(|at| at <= now);
        if is_due {
            (self.retry_at, self.retried) = (None, Some(now));
        }
        is_due
    }

    fn with_compiled_code(&self, is_wanted: impl Fn(&Process) -> bool) -> Vec<(u32, u32)> {
        let processes = self.by_id.iter().filter(|(_, process)| is_wanted(process) && process.has_compiled_code());
        processes.map(|(id, process)| (*id, process.tgid)).collect()
    }

    /// Returns all processes by their IDs in the tables, for a snapshot that looks up symbols in them.
    pub(super) fn share(&mut self) -> HashMap<u32, Arc<Process>> {
        self.code.snapshot_taken();
        self.by_id.clone()
    }

    /// Takes over changed names of just-in-time compiled code.
    pub(super) fn read_compiled(&mut self) {
        let all = self.with_compiled_code(|_| true);
        for (id, compiled) in self.perf_maps.changed(all) {
            // A process is not cloned unless its names changed.
            if let Some(process) = self.by_id.get_mut(&id) {
                Arc::make_mut(process).compiled = compiled;
            }
        }
    }

    /// Returns the numbers of failed reads since the last call, by reason.
    pub(super) fn take_lost(&mut self) -> [(&'static str, u64); 3] {
        [
            ("unread", std::mem::take(&mut self.unresponsive_count)),
            ("unread_files", std::mem::take(&mut self.unread_files)),
            ("unread_perf_maps", self.perf_maps.take_unread()),
        ]
    }

    /// Forgets all processes: their IDs in the tables are about to be reused.
    pub(super) fn clear(&mut self) {
        self.by_id.clear();
        self.unresponsive.clear();
        self.kept = 0;
    }

    /// Finds the unwind rule of a frame, and those of its callers that are missing.
    pub(super) fn find_rules(&mut self, unknown: &unknown_frame, rules: &Rules) {
        let (id, mut stack) = (unknown.process, Words::new(unknown.tid));
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
                caller_of(rule, sp, bp, |at| self.read_memory(id, |reader| stack.word(at, reader)).flatten())
            else {
                return;
            };
            (ip, sp, bp) = caller;
            innermost = false;
        }
    }

    /// Unwinds the user stack of a thread of which `word` has a copy. Returns the frames, innermost first, and whether the last
    /// one is the outermost function. `known` keeps the rules that were found. The process may have executed another
    /// program since.
    pub(super) fn unwind(
        &mut self,
        of: &unknown_frame,
        program: ExecutedProgram,
        known: &mut HashMap<(u32, u64), Rule>,
        word: impl Fn(u64) -> Option<u64>,
    ) -> (Vec<u64>, bool) {
        let (mut ip, mut sp, mut bp) = (of.ip, of.sp, of.bp);
        let mut frames = Vec::new();
        self.by_id.entry(of.process).or_insert_with(|| {
            // All belong to one program: no user takes time from another.
            let (tgid, program) = (of.tgid, Some(program));
            Arc::new(Process { tgid, program, ..Process::default() })
        });
        for depth in 0..offcpu_limits::MAX_FRAMES.0 {
            frames.push(ip);
            let innermost = depth == 0;
            let key = (of.process, if innermost { ip | INNERMOST } else { ip });
            let rule = known.get(&key).copied().unwrap_or_else(|| {
                let rule = self.rule_for(of, ip, innermost);
                // Code that cannot be read now may be read later.
                if rule.base != rule_base::RULE_FAILED {
                    known.insert(key, rule);
                }
                rule
            });
            let Some(caller) = caller_of(rule, sp, bp, &word) else {
                let is_outermost = rule.base == rule_base::RULE_ROOT || rule.base == rule_base::RULE_CHAIN && bp == 0;
                return (frames, is_outermost);
            };
            (ip, sp, bp) = caller;
        }
        (frames, false)
    }

    /// Reads memory of a process; `None` if it was unresponsive recently, or is now.
    fn read_memory<T>(&mut self, id: u32, read: impl FnOnce(&mut Reader) -> Result<T, Unresponsive>) -> Option<T> {
        let before = self.unresponsive.get(&id).copied();
        if before.is_some_and(|retry| retry.due > Instant::now()) {
            return None;
        }
        let find_rules = read(&mut self.reader);
        if find_rules.is_err() {
            self.unresponsive.insert(id, Retry::after(before, Instant::now()));
            self.unresponsive_count += 1;
        } else if before.is_some() {
            self.unresponsive.remove(&id);
        }
        find_rules.ok()
    }

    fn rule_for(&mut self, unknown: &unknown_frame, ip: u64, innermost: bool) -> Rule {
        // A return address may be the first one behind its function: the call may be the last instruction.
        let at = if innermost { ip } else { ip.wrapping_sub(1) };
        let by_frame_pointer = !innermost && self.call_graph == CallGraph::FramePointers;
        match self.find(unknown.process, unknown.tgid, at) {
            AtAddress::Nothing => Rule::plain(rule_base::RULE_BROKEN),
            AtAddress::Later => Rule::plain(rule_base::RULE_FAILED),
            AtAddress::NoFile => Rule::plain(rule_base::RULE_CHAIN),
            AtAddress::Code(file, offset) => {
                self.code.touch(&file);
                let Some(elf) = file.elf() else { return Rule::plain(rule_base::RULE_FAILED) };
                let rule = match &mut self.by_offset {
                    Some(known) => {
                        if known.len() >= MAX_BY_OFFSET {
                            known.clear();
                        }
                        *known.entry((file.id, offset)).or_insert_with(|| elf.rule_at(offset))
                    }
                    None => elf.rule_at(offset),
                };
                // The outermost function of a thread has no caller, even if callers are found by frame pointers.
                let is_by_unwinding = !by_frame_pointer || rule.base == rule_base::RULE_ROOT;
                if is_by_unwinding { rule } else { Rule::plain(rule_base::RULE_CHAIN) }
            }
        }
    }

    /// Finds the code at an address of a process. Reads its mappings again if none contains the address.
    fn find(&mut self, id: u32, tgid: u32, at: u64) -> AtAddress {
        let known = self
            .by_id
            .entry(id)
            .or_insert_with(|| Arc::new(Process { tgid, user: user_of(tgid), ..Process::default() }));
        if (known.is_stale || known.mapping_of(at).is_none()) && known.read_in != self.walk {
            let (user, now) = (known.user, Instant::now());
            let due = known.next_reading.filter(|next| *next > now);
            if due.is_some() || !self.budget.allows(user, now) {
                return self.defer(id, due.unwrap_or(now));
            }
            if let Err(failure) = self.read_mappings(id, tgid, at) {
                let due = failure.unwrap_or(now);
                return self.defer(id, due);
            }
        }
        let Some(known) = self.by_id.get(&id) else { return AtAddress::Nothing };
        let Some(mapping) = known.mapping_of(at).cloned() else {
            self.unread_files += u64::from(known.mappings.is_cut);
            return AtAddress::Nothing;
        };
        if mapping.inode == 0 {
            return self.note(id, &mapping, Code::Other);
        }
        let before = match known.code_of(&mapping) {
            Some(Code::File(file)) if file.elf().is_some() => {
                return AtAddress::Code(Arc::clone(file), mapping.offset_of(at));
            }
            Some(Code::Other) => return AtAddress::NoFile,
            Some(Code::Failed(retry)) => Some(*retry),
            Some(Code::File(_)) | None => None,
        };
        let (user, now) = (known.user, Instant::now());
        let due = before.map(|retry| retry.due).filter(|due| *due > now);
        if due.is_some() {
            self.retry_at = self.retry_at.into_iter().chain(due).min();
            return AtAddress::Later;
        }
        if !self.budget.allows(user, now) {
            return self.defer(id, now);
        }
        match self.open(id, tgid, &mapping, before) {
            Code::File(file) => AtAddress::Code(file, mapping.offset_of(at)),
            Code::Other => AtAddress::NoFile,
            Code::Failed(_) => AtAddress::Later,
        }
    }

    /// Reads the code of a mapping, and caches the result.
    fn open(&mut self, id: u32, tgid: u32, mapping: &Mapping, before: Option<Retry>) -> Code {
        let began_cpu_ns = clock::thread_cpu_ns();
        self.code.files.take_waited();
        let shown_as = first_thread::shown_as(tgid);
        let mut opened = self.code.open(shown_as, mapping);
        let known = self.by_id.get(&id);
        if known.and_then(|known| known.program).is_some_and(|program| program_of(shown_as) != Some(program)) {
            // It may have a file of another program at the same addresses.
            opened = Err(io::ErrorKind::NotFound.into());
        }
        let cpu = Duration::from_nanos(clock::thread_cpu_ns() - began_cpu_ns);
        let user = known.map_or(0, |known| known.user);
        self.budget.charge(user, cpu + self.code.files.take_waited());
        let mut is_stale = false;
        let code = match opened {
            Ok(Some(file)) => Code::File(file),
            Ok(None) => Code::Other,
            Err(error) => {
                is_stale = error.kind() == io::ErrorKind::NotFound;
                // If the process has exited since, nothing was lost.
                self.unread_files += u64::from(is_alive(tgid));
                let retry = Retry::after(before, Instant::now());
                self.retry_at = self.retry_at.into_iter().chain([retry.due]).min();
                Code::Failed(retry)
            }
        };
        if let Some(known) = self.by_id.get_mut(&id) {
            let known = Arc::make_mut(known);
            known.is_stale |= is_stale;
            known.code.insert(mapping.start, code.clone());
        }
        code
    }

    fn note(&mut self, id: u32, mapping: &Mapping, code: Code) -> AtAddress {
        if let Some(known) = self.by_id.get_mut(&id)
            && known.code_of(mapping).is_none()
        {
            Arc::make_mut(known).code.insert(mapping.start, code);
        }
        AtAddress::NoFile
    }

    /// Counts, once per walk, that a reading for a process was deferred.
    fn defer(&mut self, id: u32, until: Instant) -> AtAddress {
        self.retry_at = self.retry_at.into_iter().chain([until]).min();
        if let Some(known) = self.by_id.get_mut(&id)
            && known.deferred_in != self.walk
        {
            Arc::make_mut(known).deferred_in = self.walk;
            self.unread_files += 1;
        }
        AtAddress::Later
    }

    /// Reads the mappings of a process, to find the one that contains an address.
    ///
    /// # Errors
    /// Fails if the memory is unresponsive, with the time of the next attempt.
    fn read_mappings(&mut self, id: u32, tgid: u32, at: u64) -> Result<(), Option<Instant>> {
        let Some(known) = self.by_id.get(&id) else { return Ok(()) };
        let mut wanted: Vec<u64> = known.code.keys().copied().chain([at]).collect();
        wanted.sort_unstable();
        let (user, program) = (known.user, known.program);
        let read = move || {
            let began_cpu_ns = clock::thread_cpu_ns();
            let shown_as = first_thread::shown_as(tgid);
            let maps = File::open(format!("/proc/{shown_as}/maps"));
            let mappings = maps.and_then(|maps| Mappings::read(BufReader::new(maps), &wanted));
            let is_it = program.is_none_or(|program| program_of(shown_as) == Some(program));
            let mappings = if is_it { mappings } else { Ok(Mappings::default()) };
            (mappings, Duration::from_nanos(clock::thread_cpu_ns() - began_cpu_ns))
        };
        let began = Instant::now();
        let find_rules = self.read_memory(id, |reader| reader.read(read).ok_or(Unresponsive));
        let Some((find_rules, cpu)) = find_rules else {
            self.budget.charge(user, began.elapsed());
            return Err(self.unresponsive.get(&id).map(|retry| retry.due));
        };
        self.budget.charge(user, cpu);
        self.reader_cpu += cpu;
        let mappings = match find_rules {
            // Without the privilege, and after the process exited or executed another program, there is nothing to read.
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied && is_alive(tgid) => {
                let retry = Retry::after(self.unresponsive.get(&id).copied(), Instant::now());
                self.unresponsive.insert(id, retry);
                return Err(Some(retry.due));
            }
            mappings => mappings.unwrap_or_default(),
        };
        let replaced = self.update(id, mappings, cpu);
        // Frames in these mappings have rules already, so nothing else would read their symbols.
        for mapping in replaced {
            if self.budget.allows(user, Instant::now()) {
                self.open(id, tgid, &mapping, None);
            }
        }
        self.drop_mappings(id, at);
        Ok(())
    }

    /// Replaces the mappings of a process. Returns those that replaced a mapping of another file.
    fn update(&mut self, id: u32, mappings: Mappings, took: Duration) -> Vec<Mapping> {
        let Some(known) = self.by_id.get_mut(&id) else { return Vec::new() };
        let known = Arc::make_mut(known);
        (known.read_in, known.is_stale) = (self.walk, false);
        known.next_reading = Some(Budget::next_reading(Instant::now(), took));
        let mut replaced = Vec::new();
        // After the process exited or executed another program, its earlier mappings are kept.
        if !mappings.list.is_empty() {
            let before = std::mem::replace(&mut known.mappings, Arc::new(mappings));
            self.kept = (self.kept + known.mappings.bytes).saturating_sub(before.bytes);
            let now = &known.mappings;
            known.code.retain(|start, _| {
                let (before, now) = (before.at(*start), now.at(*start));
                if before != now {
                    replaced.extend(now.filter(|now| now.start == *start && now.inode != 0).cloned());
                }
                before == now
            });
        }
        replaced
    }

    /// Drops mappings without frames if those of all processes exceed the limit: first from the processes with the
    /// most, so that one process does not evict those of others. They are read again on demand.
    fn drop_mappings(&mut self, id: u32, at: u64) {
        if self.kept <= MAX_KEPT {
            return;
        }
        let mut largest: Vec<(usize, u32)> =
            self.by_id.iter().map(|(id, process)| (process.mappings.bytes, *id)).collect();
        largest.sort_unstable_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        for (_, each) in largest {
            if self.kept <= KEPT_AFTER_DROPPING {
                break;
            }
            let Some(process) = self.by_id.get_mut(&each) else { continue };
            let few = process
                .mappings
                .filtered(|mapping| process.code.contains_key(&mapping.start) || (each == id && mapping.holds(at)));
            self.kept = (self.kept + few.bytes).saturating_sub(process.mappings.bytes);
            Arc::make_mut(process).mappings = Arc::new(few);
        }
    }
}

fn is_alive(tgid: u32) -> bool {
    Path::new(&format!("/proc/{tgid}")).exists()
}

/// Returns the program that a thread executes (proc_pid_stat(5), fields 27, 28 and 48); `None` if it cannot be read.
fn program_of(tid: u32) -> Option<ExecutedProgram> {
    let stat = proc::text(format!("/proc/{tid}/task/{tid}/stat")).ok()?;
    // The name may contain anything. The state behind it is field 3.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(27 - 3);
    let (end_code, start_stack) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(ExecutedProgram { end_code, start_stack, arg_start: fields.nth(48 - 29)?.parse().ok()? })
}

/// UID of a process that cannot be read. No user has it, so the process takes no room from another user's processes.
const UNKNOWN_USER: u32 = u32::MAX;

/// Returns the real UID of a process; [`UNKNOWN_USER`] if it has exited.
fn user_of(tgid: u32) -> u32 {
    let status = proc::text(format!("/proc/{tgid}/status")).unwrap_or_default();
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    user.and_then(|users| users.split_whitespace().next()?.parse().ok()).unwrap_or(UNKNOWN_USER)
}

#[cfg(test)]
mod tests;
