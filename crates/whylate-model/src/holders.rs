// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whom threads wait for that still wait, by the words in which the kernel's locks keep who has them.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

/// A chain ends after so many links, and says so.
pub const MOST_LINKS: usize = 32;

/// What a thread waits for that another thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    /// A mutex of the kernel.
    Mutex,
    /// A reader-writer semaphore of the kernel that a writer has.
    Rwsem,
    /// One that readers have: of them the last one that has come is known, which may have let go.
    RwsemReaders,
    /// A semaphore of the kernel: who took it last is known, who may have let go.
    Semaphore,
    /// A mutex of the kernel that hands its waiters' priority on.
    RtMutex,
    /// The same below a futex.
    PiFutex,
    /// A work item that a worker runs, and at whose end the thread waits.
    WorkItem,
}

impl Lock {
    /// The thread that is named has it, and not only had it.
    pub fn is_certain(self) -> bool {
        !matches!(self, Lock::RwsemReaders | Lock::Semaphore)
    }
}

/// A thread that is waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// `name:tid`.
    pub who: String,
    /// Its state in the letters of ps(1).
    pub state: String,
    /// For how long it has been off its CPU; 0 where it has one.
    pub off_cpu_ns: u64,
    /// The system call that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syscall: Option<String>,
    /// The work item that it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
}

/// One step: what is waited for, and who has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// What is waited for.
    pub lock: Lock,
    /// Who has it, or had it last.
    #[serde(flatten)]
    pub holder: Holder,
}

/// How a chain ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// With a thread that waits for nobody who is known.
    #[default]
    Free,
    /// Its last thread stands in it before, or is the one that waits: nobody goes on by himself.
    Cycle,
    /// The same, but one of them is known only to have had a lock.
    PerhapsCycle,
    /// It goes on.
    Cut,
}

/// Whom a thread waits for, whom that one waits for, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chain {
    /// In order.
    pub links: Vec<Link>,
    /// How it ends.
    pub end: End,
}

impl Chain {
    /// The threads of the cycle that it ends in, from the first one of them that `waiter` comes to; none without one.
    pub fn cycle<'a>(&'a self, waiter: &'a str) -> Vec<&'a str> {
        if !matches!(self.end, End::Cycle | End::PerhapsCycle) {
            return Vec::new();
        }
        let all: Vec<&str> =
            [waiter].into_iter().chain(self.links.iter().map(|link| link.holder.who.as_str())).collect();
        let last = all[all.len() - 1];
        all.iter().position(|who| *who == last).map_or_else(Vec::new, |first| all[first..].to_vec())
    }
}

/// A thread that waits or is waited for, as all were at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    /// What it does.
    pub now: Holder,
    /// What it waits for, and which thread has that.
    pub waits: Option<(Lock, u64)>,
}

/// Whom the thread waits for, with at most so many links; `None` where that is not known. Threads are by any number that
/// tells them apart.
pub fn chain(threads: &HashMap<u64, Thread>, waiter: u64, most_links: usize) -> Option<Chain> {
    let mut chain = Chain::default();
    let mut met = vec![waiter];
    let mut known = HashSet::from([waiter]);
    let mut at = threads.get(&waiter)?;
    while let Some((lock, number)) = at.waits {
        // One that has ended meanwhile.
        let Some(holder) = threads.get(&number) else { break };
        if chain.links.len() == most_links {
            chain.end = End::Cut;
            break;
        }
        chain.links.push(Link { lock, holder: holder.now.clone() });
        if !known.insert(number) {
            let first = met.iter().position(|met| *met == number).unwrap_or(0);
            let is_certain = chain.links[first..].iter().all(|link| link.lock.is_certain());
            chain.end = if is_certain { End::Cycle } else { End::PerhapsCycle };
            break;
        }
        met.push(number);
        at = holder;
    }
    (!chain.links.is_empty()).then_some(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads by their number, which wait for the one behind it.
    fn threads(waits: &[(u64, Option<(Lock, u64)>)]) -> HashMap<u64, Thread> {
        let thread = |number: u64| Holder { who: format!("t:{number}"), ..Holder::default() };
        waits.iter().map(|&(number, waits)| (number, Thread { now: thread(number), waits })).collect()
    }

    fn told(waits: &[(u64, Option<(Lock, u64)>)], waiter: u64) -> Option<(String, End)> {
        let chain = chain(&threads(waits), waiter, MOST_LINKS)?;
        let who: Vec<&str> = chain.links.iter().map(|link| link.holder.who.as_str()).collect();
        Some((who.join(" "), chain.end))
    }

    #[test]
    fn a_chain_goes_to_whoever_waits_for_nobody() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::PiFutex, 3))), (3, None)];
        assert_eq!(told(&all, 1), Some(("t:2 t:3".to_owned(), End::Free)));
        assert_eq!(told(&all, 2), Some(("t:3".to_owned(), End::Free)));
        assert_eq!(told(&all, 3), None);
        assert_eq!(told(&all, 4), None);
        assert_eq!(told(&[(1, Some((Lock::Mutex, 9)))], 1), None, "its holder has ended");
    }

    #[test]
    fn a_cycle_is_told_by_those_in_it_and_by_those_behind_it() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::Rwsem, 1))), (3, Some((Lock::RwsemReaders, 2)))];
        assert_eq!(told(&all, 1), Some(("t:2 t:1".to_owned(), End::Cycle)));
        // What leads there may be a guess: the cycle is none.
        assert_eq!(told(&all, 3), Some(("t:2 t:1 t:2".to_owned(), End::Cycle)));
        let of = |waiter: u64| chain(&threads(&all), waiter, MOST_LINKS).expect("a chain");
        assert_eq!(of(1).cycle("t:1"), ["t:1", "t:2", "t:1"]);
        assert_eq!(of(3).cycle("t:3"), ["t:2", "t:1", "t:2"]);
        let itself = [(7, Some((Lock::Mutex, 7)))];
        assert_eq!(told(&itself, 7), Some(("t:7".to_owned(), End::Cycle)));
        assert_eq!(chain(&threads(&itself), 7, MOST_LINKS).expect("a chain").cycle("t:7"), ["t:7", "t:7"]);
    }

    #[test]
    fn a_cycle_over_one_that_may_have_let_go_is_none_for_sure() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::Semaphore, 1)))];
        assert_eq!(told(&all, 1), Some(("t:2 t:1".to_owned(), End::PerhapsCycle)));
    }

    #[test]
    fn a_chain_without_end_is_cut() {
        let all: Vec<_> = (0..100).map(|number| (number, Some((Lock::Mutex, number + 1)))).collect();
        let chain = chain(&threads(&all), 0, MOST_LINKS).expect("a chain");
        assert_eq!((chain.links.len(), chain.end), (MOST_LINKS, End::Cut));
        assert!(chain.cycle("t:0").is_empty());
    }

    #[test]
    fn json_has_a_line_for_each_link() {
        let all = [(1, Some((Lock::RwsemReaders, 2))), (2, None)];
        let chain = chain(&threads(&all), 1, MOST_LINKS).expect("a chain");
        let text = serde_json::to_string(&chain).expect("a chain serialises");
        assert_eq!(text, r#"{"links":[{"lock":"rwsem_readers","who":"t:2","state":"","off_cpu_ns":0}],"end":"free"}"#);
        assert_eq!(serde_json::from_str::<Chain>(&text).expect("and parses"), chain);
    }
}
