// SPDX-License-Identifier: MIT OR Apache-2.0
//! Symbolizes and labels stacks, and classifies their waits.
//!
//! Most stacks of a snapshot were in the previous one, as threads block where they blocked a second ago. They keep
//! their symbols for as long as their mappings and the kernel's symbols do not change.

use std::collections::{BTreeSet, HashMap};
use std::mem::{replace, take};
use std::sync::Arc;

use whylate_model::name::{CUT, cut};
use whylate_model::wait::Classes;
use whylate_model::{Stack, Waker, WokenBy};

use super::INFO;
use super::code_files::Frames;
use super::names::FrameNames;
use super::places::{PlaceDelta, Sum, Woken};
use super::process::Process;
use super::sampler::SampledInterval;
use super::skel::types::place_key;
use super::stack::{labels_of, plain, stack_of, user_frames};
use crate::kernel::cgroups::{Cgroups, is_unknown};
use crate::kernel::symbols::KernelSymbols;

pub(super) struct StackNamer {
    names: FrameNames,
    classes: Classes,
    cgroups: Cgroups,
    /// Generation of the BPF tables, of which `cache` has the indexes as keys.
    generation: u32,
    /// Generation of the kernel's symbols that named `cache`.
    symbols: u64,
    /// Number of stacks without some outer frames, since it was taken.
    cut: u64,
    /// Stacks of the last snapshot, by index in the BPF table.
    cache: HashMap<u32, CachedStack>,
}

struct CachedStack {
    /// Memory of the waiter's process, and of the waker's.
    memory: [Option<Arc<Process>>; 2],
    stack: Stack,
}

/// Total bytes that long names may take in a snapshot. Stacks do not share names, and a program can have thousands of
/// stacks of hundreds of long names.
const MAX_LONG_NAMES: usize = 8 << 20;
/// Names longer than this count as long.
const LONG_NAME: usize = 256;

/// Cuts long names that exceed the remaining `room`.
fn shorten(stack: &mut Stack, room: &mut usize) {
    let of_waker = stack.waker.iter_mut().flat_map(|waker| [&mut waker.kernel, &mut waker.user]);
    for name in [&mut stack.kernel, &mut stack.user].into_iter().chain(of_waker).flatten() {
        if name.len() <= LONG_NAME {
            continue;
        }
        match room.checked_sub(name.len()) {
            Some(left) => *room = left,
            None => *name = cut(take(name), LONG_NAME),
        }
    }
}

/// Bytes that the names of all stacks of a snapshot may take.
const MAX_NAMES: usize = 24 << 20;

/// Drops outer frames that exceed the remaining `room`. Returns whether there were any.
fn fit(stack: &mut Stack, room: &mut usize) -> bool {
    let of_waker = stack.waker.iter_mut().flat_map(|waker| [&mut waker.kernel, &mut waker.user]);
    let mut is_cut = false;
    for frames in [&mut stack.kernel, &mut stack.user].into_iter().chain(of_waker) {
        let mut kept = 0;
        for name in frames.iter() {
            let Some(left) = room.checked_sub(size_of::<String>() + name.len()) else { break };
            (*room, kept) = (left, kept + 1);
        }
        if kept < frames.len() {
            frames.truncate(kept);
            frames.push(CUT.to_owned());
            is_cut = true;
        }
    }
    is_cut
}

/// Returns the memory of the waiter's process, and of the waker's.
fn memory_of<'a>(place: &PlaceDelta, interval: &'a SampledInterval) -> [Option<&'a Arc<Process>>; 2] {
    let of = |key: &place_key| interval.memory.get(&key.process);
    [of(&place.key), place.waker().and_then(of)]
}

impl CachedStack {
    fn holds(&self, place: &PlaceDelta, interval: &SampledInterval) -> bool {
        // A process that is shared with this is cloned before it is changed.
        let is_same = |(known, now): (&Option<Arc<Process>>, Option<&Arc<Process>>)| match (known, now) {
            (Some(known), Some(now)) => Arc::ptr_eq(known, now),
            (known, now) => known.is_none() && now.is_none(),
        };
        self.memory.iter().zip(memory_of(place, interval)).all(is_same)
    }

    /// Returns whether the labels are final: a cgroup without a path may have one by the next snapshot.
    fn is_lasting(&self) -> bool {
        self.stack.labels.get("cgroup").is_none_or(|path| !is_unknown(path))
    }
}

impl StackNamer {
    pub(super) fn new(lines: bool, kernel: KernelSymbols, classes: Classes) -> Self {
        let (names, cgroups) = (FrameNames::new(lines, kernel), Cgroups::default());
        StackNamer { names, classes, cgroups, generation: 0, symbols: 0, cut: 0, cache: HashMap::new() }
    }

    pub(super) fn kernel(&mut self) -> &mut KernelSymbols {
        &mut self.names.kernel
    }

    /// Returns the number of stacks without some outer frames, since the last call.
    pub(super) fn take_cut(&mut self) -> u64 {
        take(&mut self.cut)
    }

    /// Returns the stacks, in the order of `interval.places`.
    pub(super) fn stacks(&mut self, interval: &SampledInterval) -> Vec<Stack> {
        let mut before = take(&mut self.cache);
        if replace(&mut self.generation, interval.generation) != interval.generation {
            before.clear();
        }
        let frames = |stack: u32| interval.stacks.get(&stack).map_or(&[][..], |frames| frames);
        let symbols = &self.names.kernel;
        symbols.span_ended(INFO.card.name, interval.began_ns);
        let generation = symbols.generation();
        let is_other = replace(&mut self.symbols, generation) != generation;
        // Code may have been loaded at addresses of unloaded code.
        let has_names = |place: &PlaceDelta| {
            !is_other
                || place.keys().all(|key| frames(key.kernel_stack).iter().all(|&address| symbols.is_known(address)))
        };
        let mut keep = |place: &PlaceDelta| {
            before.remove(&place.number).filter(|known| known.holds(place, interval) && has_names(place))
        };
        let known: Vec<Option<CachedStack>> = interval.places.iter().map(&mut keep).collect();
        let new = || interval.places.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(place, _)| place);
        let wanted: BTreeSet<(u32, u64, bool)> = new()
            .flat_map(PlaceDelta::keys)
            .flat_map(|key| {
                frames(key.user_stack).iter().enumerate().map(|(depth, &address)| (key.process, address, depth == 0))
            })
            .collect();
        let (user, is_whole) = self.names.user(&wanted, &interval.memory);
        let addresses: BTreeSet<u64> =
            new().flat_map(PlaceDelta::keys).flat_map(|key| frames(key.kernel_stack)).copied().collect();
        self.names.kernel.look_up_all(&addresses);
        let mut stacks = Vec::with_capacity(known.len());
        let (mut room, mut room_of_all) = (MAX_LONG_NAMES, MAX_NAMES);
        for (place, known) in interval.places.iter().zip(known) {
            let is_new = known.is_none();
            let mut known = known.unwrap_or_else(|| self.name(place, interval, &user));
            shorten(&mut known.stack, &mut room);
            self.cut += u64::from(fit(&mut known.stack, &mut room_of_all));
            let Sum { ns, samples, waits } = place.sum;
            stacks.push(Stack { samples, weight_ns: ns, waits, ..known.stack.clone() });
            if known.is_lasting() && (is_whole || !is_new) {
                self.cache.insert(place.number, known);
            }
        }
        stacks
    }

    fn name(
        &mut self,
        place: &PlaceDelta,
        interval: &SampledInterval,
        user: &HashMap<(u32, u64, bool), Frames>,
    ) -> CachedStack {
        let frames = |stack: u32| interval.stacks.get(&stack).map_or(&[][..], |frames| frames);
        let mut frames_of = |key: &place_key| -> [Vec<String>; 2] {
            let kernel = frames(key.kernel_stack).iter().map(|&at| plain(self.names.kernel.name(at)).to_owned());
            [kernel.collect(), user_frames(key, frames(key.user_stack), user)]
        };
        let both = frames_of(&place.key);
        let waker = place.woken.map(|woken| match woken {
            Woken::By(by) => Waker { by, ..Waker::default() },
            Woken::Thread(key) => {
                let [kernel, user] = frames_of(&key);
                let labels = labels_of(&key, interval.processes.get(&key.process));
                Waker { by: WokenBy::Thread, labels, kernel, user }
            }
        });
        let process = interval.processes.get(&place.key.process);
        let stack = stack_of(place, both, process, self.cgroups.path_or_placeholder(place.key.cgroup), &self.classes);
        CachedStack { memory: memory_of(place, interval).map(|of| of.cloned()), stack: Stack { waker, ..stack } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::attach::ProgramStatistics;
    use crate::offcpu::sampler::Met;

    /// A snapshot with one stack, of a thread with this comm.
    fn interval(generation: u32, comm: &str, memory: Option<&Arc<Process>>) -> SampledInterval {
        let mut key = place_key { process: 7, ..Default::default() };
        key.comm.iter_mut().zip(comm.bytes()).for_each(|(to, from)| *to = from as _);
        let sum = Sum { ns: u64::from(generation) + 1, samples: 2, waits: 3 };
        SampledInterval {
            began_ns: 0,
            ended_ns: 1,
            places: vec![PlaceDelta { number: 4, key, woken: None, sum }],
            generation,
            stacks: HashMap::new(),
            processes: HashMap::new(),
            memory: memory.map(|memory| (7, Arc::clone(memory))).into_iter().collect(),
            threads: Vec::new(),
            holders: Vec::new(),
            disks: None,
            lost: Vec::new(),
            statistics: ProgramStatistics::default(),
            walks: 1,
            met: Met::default(),
        }
    }

    #[test]
    fn caches_names_until_memory_or_generation_changes() {
        let mut named = StackNamer::new(false, KernelSymbols::default(), Classes::default());
        // A stack that is labeled again shows by its thread's name, which does not invalidate the cache.
        let mut thread_label = |generation, comm, memory: Option<&Arc<Process>>| {
            let stacks = named.stacks(&interval(generation, comm, memory));
            assert_eq!((stacks.len(), stacks[0].weight_ns), (1, u64::from(generation) + 1));
            stacks[0].labels["thread"].clone()
        };
        let memory = Arc::new(Process::default());
        assert_eq!(thread_label(0, "a", None), "a");
        assert_eq!(thread_label(0, "b", None), "a");
        assert_eq!(thread_label(0, "c", Some(&memory)), "c", "its memory was read");
        assert_eq!(thread_label(0, "d", Some(&memory)), "c");
        assert_eq!(thread_label(0, "e", Some(&Arc::new(Process::default()))), "e", "its memory was read anew");
        assert_eq!(thread_label(1, "f", None), "f", "numbers were given out anew");
    }

    #[test]
    fn changed_process_invalidates_cache() {
        let mut process = Arc::new(Process::default());
        let known = CachedStack { memory: [Some(Arc::clone(&process)), None], stack: Stack::default() };
        let before = interval(0, "a", Some(&process));
        assert!(known.holds(&before.places[0], &before));
        Arc::make_mut(&mut process).tgid = 9;
        let after = interval(0, "a", Some(&process));
        assert!(!known.holds(&after.places[0], &after));
    }

    #[test]
    fn truncates_long_names_beyond_the_limit() {
        let stack = || Stack { user: vec!["f".repeat(4_000), "g".to_owned()], ..Stack::default() };
        let (mut first, mut second) = (stack(), stack());
        let mut room = 5_000;
        shorten(&mut first, &mut room);
        shorten(&mut second, &mut room);
        assert_eq!((first, room), (stack(), 1_000));
        assert_eq!((second.user[0].len(), second.user[0].ends_with("f[cut]")), (LONG_NAME, true));
        assert_eq!(second.user[1], "g");
    }

    #[test]
    fn looks_up_unknown_cgroup_again() {
        let is_lasting = |path: &str| {
            let labels = [("cgroup".to_owned(), path.to_owned())].into();
            CachedStack { memory: [None, None], stack: Stack { labels, ..Stack::default() } }.is_lasting()
        };
        assert_eq!(["/a.slice", "unknown:7"].map(is_lasting), [true, false]);
    }
}
