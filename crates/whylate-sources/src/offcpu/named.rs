// SPDX-License-Identifier: MIT OR Apache-2.0
//! Places with their names: whose they are, functions, and what is waited for there.
//!
//! Most places of a snapshot are those of the one before, as threads sleep where they slept a second ago. They keep their
//! names for as long as what they were taken from stays the same.

use std::collections::{BTreeSet, HashMap};
use std::mem::{replace, take};
use std::sync::Arc;

use whylate_model::name::cut;
use whylate_model::wait::Classes;
use whylate_model::{Stack, Waker, WokenBy};

use super::INFO;
use super::attached::{labels_of, plain, stack_of, user_frames};
use super::names::{Frames, Names};
use super::places::{Place, Sum, Woken};
use super::process::Process;
use super::sampler::Gathered;
use super::skel::types::place_key;
use crate::cgroups::{Cgroups, is_unknown};
use crate::symbols::KernelSymbols;

pub(super) struct Named {
    names: Names,
    classes: Classes,
    cgroups: Cgroups,
    /// The tables of which `known` has the numbers.
    generation: u32,
    /// That of the kernel's symbols which have named `known`.
    symbols: u64,
    /// Those of the last snapshot, by the number of the place.
    known: HashMap<u32, Known>,
}

struct Known {
    /// The memory of whoever waits, and of whoever ended the waits.
    memory: [Option<Arc<Process>>; 2],
    stack: Stack,
}

/// The bytes that long names may take in a snapshot. Stacks share no names, and a program can have thousands of stacks of
/// hundreds of long names.
const MAX_LONG_NAMES: usize = 8 << 20;
/// Longer names are long.
const USUAL_NAME: usize = 256;

/// Cuts long names that do not fit.
fn shorten(stack: &mut Stack, room: &mut usize) {
    let of_waker = stack.waker.iter_mut().flat_map(|waker| [&mut waker.kernel, &mut waker.user]);
    for name in [&mut stack.kernel, &mut stack.user].into_iter().chain(of_waker).flatten() {
        if name.len() <= USUAL_NAME {
            continue;
        }
        match room.checked_sub(name.len()) {
            Some(left) => *room = left,
            None => *name = cut(take(name), USUAL_NAME),
        }
    }
}

/// That of whoever waits, and of whoever ended the waits.
fn memory_of<'a>(place: &Place, gathered: &'a Gathered) -> [Option<&'a Arc<Process>>; 2] {
    let of = |key: &place_key| gathered.memory.get(&key.process);
    [of(&place.key), place.waker().and_then(of)]
}

impl Known {
    fn holds(&self, place: &Place, gathered: &Gathered) -> bool {
        // Whoever changes one that is kept here makes another one of it.
        let is_same = |(known, now): (&Option<Arc<Process>>, Option<&Arc<Process>>)| match (known, now) {
            (Some(known), Some(now)) => Arc::ptr_eq(known, now),
            (known, now) => known.is_none() && now.is_none(),
        };
        self.memory.iter().zip(memory_of(place, gathered)).all(is_same)
    }

    /// A cgroup that is found only later has its path next time.
    fn is_lasting(&self) -> bool {
        self.stack.labels.get("cgroup").is_none_or(|told| !is_unknown(told))
    }
}

impl Named {
    pub(super) fn new(lines: bool, kernel: KernelSymbols, classes: Classes) -> Self {
        let (names, cgroups) = (Names::new(lines, kernel), Cgroups::default());
        Named { names, classes, cgroups, generation: 0, symbols: 0, known: HashMap::new() }
    }

    pub(super) fn kernel(&mut self) -> &mut KernelSymbols {
        &mut self.names.kernel
    }

    /// In the order of the places.
    pub(super) fn stacks(&mut self, gathered: &Gathered) -> Vec<Stack> {
        let mut before = take(&mut self.known);
        if replace(&mut self.generation, gathered.generation) != gathered.generation {
            before.clear();
        }
        let frames = |stack: u32| gathered.stacks.get(&stack).map_or(&[][..], |frames| frames);
        let symbols = &self.names.kernel;
        symbols.span_ended(INFO.card.name, gathered.began_ns);
        let generation = symbols.generation();
        let is_other = replace(&mut self.symbols, generation) != generation;
        // Code may have been loaded where other code was.
        let has_names = |place: &Place| {
            !is_other
                || place.keys().all(|key| frames(key.kernel_stack).iter().all(|&address| symbols.is_known(address)))
        };
        let mut keep = |place: &Place| {
            before.remove(&place.number).filter(|known| known.holds(place, gathered) && has_names(place))
        };
        let known: Vec<Option<Known>> = gathered.places.iter().map(&mut keep).collect();
        let new = || gathered.places.iter().zip(&known).filter(|(_, known)| known.is_none()).map(|(place, _)| place);
        let wanted: BTreeSet<(u32, u64, bool)> = new()
            .flat_map(Place::keys)
            .flat_map(|key| {
                frames(key.user_stack).iter().enumerate().map(|(depth, &address)| (key.process, address, depth == 0))
            })
            .collect();
        let (user, is_whole) = self.names.user(&wanted, &gathered.memory);
        let addresses: BTreeSet<u64> =
            new().flat_map(Place::keys).flat_map(|key| frames(key.kernel_stack)).copied().collect();
        self.names.kernel.look_up_all(&addresses);
        let mut stacks = Vec::with_capacity(known.len());
        let mut room = MAX_LONG_NAMES;
        for (place, known) in gathered.places.iter().zip(known) {
            let is_new = known.is_none();
            let mut known = known.unwrap_or_else(|| self.name(place, gathered, &user));
            shorten(&mut known.stack, &mut room);
            let Sum { ns, samples, waits } = place.sum;
            stacks.push(Stack { samples, weight_ns: ns, waits, ..known.stack.clone() });
            if known.is_lasting() && (is_whole || !is_new) {
                self.known.insert(place.number, known);
            }
        }
        stacks
    }

    fn name(&mut self, place: &Place, gathered: &Gathered, user: &HashMap<(u32, u64, bool), Frames>) -> Known {
        let frames = |stack: u32| gathered.stacks.get(&stack).map_or(&[][..], |frames| frames);
        let mut frames_of = |key: &place_key| -> [Vec<String>; 2] {
            let kernel = frames(key.kernel_stack).iter().map(|&at| plain(self.names.kernel.name(at)).to_owned());
            [kernel.collect(), user_frames(key, frames(key.user_stack), user)]
        };
        let both = frames_of(&place.key);
        let waker = place.woken.map(|woken| match woken {
            Woken::By(by) => Waker { by, ..Waker::default() },
            Woken::Thread(key) => {
                let [kernel, user] = frames_of(&key);
                let labels = labels_of(&key, gathered.processes.get(&key.process));
                Waker { by: WokenBy::Thread, labels, kernel, user }
            }
        });
        let process = gathered.processes.get(&place.key.process);
        let stack = stack_of(place, both, process, self.cgroups.path_or_placeholder(place.key.cgroup), &self.classes);
        Known { memory: memory_of(place, gathered).map(|of| of.cloned()), stack: Stack { waker, ..stack } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::ProgramStatistics;
    use crate::offcpu::sampler::Met;

    /// One place, of a thread of that name.
    fn gathered(generation: u32, comm: &str, memory: Option<&Arc<Process>>) -> Gathered {
        let mut key = place_key { process: 7, ..Default::default() };
        key.comm.iter_mut().zip(comm.bytes()).for_each(|(to, from)| *to = from as _);
        let sum = Sum { ns: u64::from(generation) + 1, samples: 2, waits: 3 };
        Gathered {
            began_ns: 0,
            ended_ns: 1,
            places: vec![Place { number: 4, key, woken: None, sum }],
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
    fn a_place_keeps_its_names_until_what_they_were_taken_from_changes() {
        let mut named = Named::new(false, KernelSymbols::default(), Classes::default());
        // What is told again shows by a name that a place cannot change.
        let mut told = |generation, comm, memory: Option<&Arc<Process>>| {
            let stacks = named.stacks(&gathered(generation, comm, memory));
            assert_eq!((stacks.len(), stacks[0].weight_ns), (1, u64::from(generation) + 1));
            stacks[0].labels["thread"].clone()
        };
        let memory = Arc::new(Process::default());
        assert_eq!(told(0, "a", None), "a");
        assert_eq!(told(0, "b", None), "a");
        assert_eq!(told(0, "c", Some(&memory)), "c", "its memory was read");
        assert_eq!(told(0, "d", Some(&memory)), "c");
        assert_eq!(told(0, "e", Some(&Arc::new(Process::default()))), "e", "its memory was read anew");
        assert_eq!(told(1, "f", None), "f", "numbers were given out anew");
    }

    #[test]
    fn a_process_that_is_changed_is_another_one_for_who_keeps_it() {
        let mut process = Arc::new(Process::default());
        let known = Known { memory: [Some(Arc::clone(&process)), None], stack: Stack::default() };
        let before = gathered(0, "a", Some(&process));
        assert!(known.holds(&before.places[0], &before));
        Arc::make_mut(&mut process).tgid = 9;
        let after = gathered(0, "a", Some(&process));
        assert!(!known.holds(&after.places[0], &after));
    }

    #[test]
    fn long_names_are_cut_where_there_are_many() {
        let stack = || Stack { user: vec!["f".repeat(4_000), "g".to_owned()], ..Stack::default() };
        let (mut first, mut second) = (stack(), stack());
        let mut room = 5_000;
        shorten(&mut first, &mut room);
        shorten(&mut second, &mut room);
        assert_eq!((first, room), (stack(), 1_000));
        assert_eq!((second.user[0].len(), second.user[0].ends_with("f[cut]")), (USUAL_NAME, true));
        assert_eq!(second.user[1], "g");
    }

    #[test]
    fn a_cgroup_that_was_not_found_is_looked_for_again() {
        let of = |told: &str| {
            let labels = [("cgroup".to_owned(), told.to_owned())].into();
            Known { memory: [None, None], stack: Stack { labels, ..Stack::default() } }.is_lasting()
        };
        assert_eq!(["/a.slice", "unknown:7"].map(of), [true, false]);
    }
}
