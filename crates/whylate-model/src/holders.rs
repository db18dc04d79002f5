// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wait chains of blocked threads, from the owner fields of the kernel's locks.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::units::{format_ns, printable};

/// Maximum number of links of a chain; a longer one is marked as cut.
pub const MAX_LINKS: usize = 32;

/// Lock or work item that a thread waits for and another thread holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    /// A kernel mutex.
    Mutex,
    /// A kernel reader-writer semaphore held by a writer.
    Rwsem,
    /// A kernel reader-writer semaphore held by readers: only the last reader is known, and it may have released it.
    RwsemReaders,
    /// A kernel semaphore: only the last taker is known, and it may have released it.
    Semaphore,
    /// A kernel mutex with priority inheritance.
    RtMutex,
    /// A kernel mutex with priority inheritance below a futex.
    PiFutex,
    /// A lock of a file: flock(2) or fcntl(2).
    FileLock,
    /// A work item that a worker runs; the thread waits for its end.
    WorkItem,
}

impl Lock {
    /// Returns whether the named thread certainly holds the lock.
    pub fn is_certain(self) -> bool {
        !matches!(self, Lock::RwsemReaders | Lock::Semaphore)
    }
}

/// A holder of a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Holder {
    /// The thread as `name:tid`.
    pub who: String,
    /// State in the letters of ps(1); empty if it is not known which thread of a process it is.
    pub state: String,
    /// Time since it left its CPU; 0 if it is running, or if the time is not known.
    pub off_cpu_ns: u64,
    /// System call that the holder is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syscall: Option<String>,
    /// Work item that the holder runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
}

impl Holder {
    /// Returns whether the holder is stopped, traced or frozen: it goes on only if somebody lets it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.state.as_str(), "T" | "t" | "F")
    }

    /// Renders what the holder does, and its time off CPU; empty if it is not known which thread of a process it is.
    pub fn activity(&self) -> String {
        let for_long = match self.off_cpu_ns {
            0 => String::new(),
            ns => format!(" for {}", format_ns(ns)),
        };
        match (self.state.as_str(), self.off_cpu_ns, &self.syscall) {
            ("", ..) => String::new(),
            ("R", 0, _) => "running".to_owned(),
            ("R", _, _) => format!("waiting for a CPU{for_long}"),
            // A stopped thread does not wait in the system call in which it was stopped.
            ("T", ..) => format!("stopped by a signal{for_long}"),
            ("t", ..) => format!("stopped by a tracer{for_long}"),
            ("F", ..) => format!("frozen{for_long}"),
            ("Z" | "X", ..) => "exited".to_owned(),
            (_, _, Some(call)) => format!("in {}{for_long}", printable(call)),
            ("D", _, None) => format!("in uninterruptible sleep{for_long}"),
            _ => format!("asleep{for_long}"),
        }
    }
}

/// One link of a chain: a lock and its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Link {
    /// The lock.
    pub lock: Lock,
    /// Path of the file, for a lock of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The current or last holder.
    #[serde(flatten)]
    pub holder: Holder,
}

/// End of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(rename = "ChainEnd"))]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// A thread that waits for no known holder.
    #[default]
    Free,
    /// A thread that is earlier in the chain or is the waiter: a deadlock.
    Cycle,
    /// A thread that is earlier in the chain, but one holder may have released its lock.
    PerhapsCycle,
    /// The maximum length was reached.
    Cut,
}

/// A chain of holders: the holder that a thread waits for, the one that it waits for in turn, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Chain {
    /// Links in order.
    pub links: Vec<Link>,
    /// End of the chain.
    pub end: End,
}

impl Chain {
    /// Returns the threads of the cycle at the chain's end, from the first one that `waiter` reaches; empty without a
    /// cycle.
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

/// A waiter or holder, all as of one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    /// Current activity of the thread.
    pub now: Holder,
    /// The lock that it waits for, and the key of the holder.
    pub waits: Option<(Lock, u64)>,
}

/// Returns the chain of the thread's holders, with at most `max_links` links; `None` if it waits for no known holder.
/// Threads are keyed by any unique number.
pub fn chain(threads: &HashMap<u64, Thread>, waiter: u64, max_links: usize) -> Option<Chain> {
    let mut chain = Chain::default();
    let mut visited = vec![waiter];
    let mut known = HashSet::from([waiter]);
    let mut at = threads.get(&waiter)?;
    while let Some((lock, number)) = at.waits {
        // The holder has ended since.
        let Some(holder) = threads.get(&number) else { break };
        if chain.links.len() == max_links {
            chain.end = End::Cut;
            break;
        }
        chain.links.push(Link { lock, file: None, holder: holder.now.clone() });
        if !known.insert(number) {
            let first = visited.iter().position(|visited| *visited == number).unwrap_or(0);
            let is_certain = chain.links[first..].iter().all(|link| link.lock.is_certain());
            chain.end = if is_certain { End::Cycle } else { End::PerhapsCycle };
            break;
        }
        visited.push(number);
        at = holder;
    }
    (!chain.links.is_empty()).then_some(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns threads by number, with the given waits.
    fn threads(waits: &[(u64, Option<(Lock, u64)>)]) -> HashMap<u64, Thread> {
        let thread = |number: u64| Holder { who: format!("t:{number}"), ..Holder::default() };
        waits.iter().map(|&(number, waits)| (number, Thread { now: thread(number), waits })).collect()
    }

    fn chain_of(waits: &[(u64, Option<(Lock, u64)>)], waiter: u64) -> Option<(String, End)> {
        let chain = chain(&threads(waits), waiter, MAX_LINKS)?;
        let who: Vec<&str> = chain.links.iter().map(|link| link.holder.who.as_str()).collect();
        Some((who.join(" "), chain.end))
    }

    #[test]
    fn chain_ends_at_thread_without_wait() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::PiFutex, 3))), (3, None)];
        assert_eq!(chain_of(&all, 1), Some(("t:2 t:3".to_owned(), End::Free)));
        assert_eq!(chain_of(&all, 2), Some(("t:3".to_owned(), End::Free)));
        assert_eq!(chain_of(&all, 3), None);
        assert_eq!(chain_of(&all, 4), None);
        assert_eq!(chain_of(&[(1, Some((Lock::Mutex, 9)))], 1), None, "its holder has ended");
    }

    #[test]
    fn finds_cycle_from_inside_and_outside() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::Rwsem, 1))), (3, Some((Lock::RwsemReaders, 2)))];
        assert_eq!(chain_of(&all, 1), Some(("t:2 t:1".to_owned(), End::Cycle)));
        // A link before the cycle may be uncertain; those of the cycle are not.
        assert_eq!(chain_of(&all, 3), Some(("t:2 t:1 t:2".to_owned(), End::Cycle)));
        let chain_from = |waiter: u64| chain(&threads(&all), waiter, MAX_LINKS).expect("a chain");
        assert_eq!(chain_from(1).cycle("t:1"), ["t:1", "t:2", "t:1"]);
        assert_eq!(chain_from(3).cycle("t:3"), ["t:2", "t:1", "t:2"]);
        let itself = [(7, Some((Lock::Mutex, 7)))];
        assert_eq!(chain_of(&itself, 7), Some(("t:7".to_owned(), End::Cycle)));
        assert_eq!(chain(&threads(&itself), 7, MAX_LINKS).expect("a chain").cycle("t:7"), ["t:7", "t:7"]);
    }

    #[test]
    fn uncertain_holder_gives_possible_cycle() {
        let all = [(1, Some((Lock::Mutex, 2))), (2, Some((Lock::Semaphore, 1)))];
        assert_eq!(chain_of(&all, 1), Some(("t:2 t:1".to_owned(), End::PerhapsCycle)));
    }

    #[test]
    fn long_chain_is_cut() {
        let all: Vec<_> = (0..100).map(|number| (number, Some((Lock::Mutex, number + 1)))).collect();
        let chain = chain(&threads(&all), 0, MAX_LINKS).expect("a chain");
        assert_eq!((chain.links.len(), chain.end), (MAX_LINKS, End::Cut));
        assert!(chain.cycle("t:0").is_empty());
    }

    #[test]
    fn json_lists_each_link() {
        let all = [(1, Some((Lock::RwsemReaders, 2))), (2, None)];
        let chain = chain(&threads(&all), 1, MAX_LINKS).expect("a chain");
        let text = serde_json::to_string(&chain).expect("a chain serialises");
        assert_eq!(text, r#"{"links":[{"lock":"rwsem_readers","who":"t:2","state":"","off_cpu_ns":0}],"end":"free"}"#);
        assert_eq!(serde_json::from_str::<Chain>(&text).expect("and parses"), chain);
    }
}
