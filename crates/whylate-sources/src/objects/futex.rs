// SPDX-License-Identifier: MIT OR Apache-2.0
//! Futexes: the owner of a mutex, as glibc and musl record it, and the thread that pthread_join(3) waits for.
//!
//! Any word may look like a TID. A TID is taken for an owner only if the call, the word and its
//! neighbors are those of a mutex, and a thread of the process has this TID.

use std::collections::HashMap;
use std::fs;

use whylate_model::object::{Object, ObjectKind};

use super::lead::Lead;
use super::memory::Memory;
use crate::kernel::proc;

/// Operations of futex(2), and their flags.
const FUTEX_WAIT: u64 = 0;
const FUTEX_WAIT_BITSET: u64 = 9;
const FUTEX_PRIVATE: u64 = 128;
const FUTEX_CLOCK_REALTIME: u64 = 256;
/// Bits of a word that contains the owner's TID: there are waiters, the owner has died.
const FUTEX_WAITERS: u32 = 1 << 31;
const FUTEX_TID: u32 = (1 << 30) - 1;

/// Value of a glibc mutex that is locked and has waiters.
const CONTENDED: u32 = 2;
/// Highest kind of a glibc mutex without priorities (adaptive), and flags beside it: for several processes, lock elision.
const LAST_KIND: u32 = 3;
const KIND_FLAGS: u32 = 128 | 256 | 512;
/// Maximum number of threads whose TIDs are translated from another PID namespace.
const MAX_TRANSLATED: usize = 1_024;
/// Maximum number of users of a glibc mutex: threads that own it or wait for it on a condition variable.
const MAX_USERS: u32 = 1 << 16;

/// Returns the object of a futex.
pub(super) fn object_of(
    pid: u32,
    address: u64,
    operation: u64,
    expected: u32,
    memory: &Memory,
) -> (Object, Option<Lead>) {
    let threads = Threads::of(pid);
    let is_thread = |tid: u32| threads.shown(tid).is_some();
    let found = memory.words(address).or_else(|| Some([memory.words::<1>(address)?[0], 0, 0, 0, 0]));
    let (kind, tid) = found.map_or((ObjectKind::Futex, None), |words| classify(operation, expected, words, &is_thread));
    let object = Object { address: Some(address), ..Object::new(kind) };
    (object, tid.and_then(|tid| threads.shown(tid)).map(Lead::Thread))
}

/// Threads of a process, to translate the TIDs that a futex contains: these are of the PID namespace of the process.
enum Threads {
    /// The PID namespace of `/proc` itself.
    Shown(u32),
    /// TIDs in `/proc`, by TIDs in another PID namespace.
    Inner(HashMap<u32, u32>),
}

impl Threads {
    fn of(pid: u32) -> Self {
        let numbers_of = |tid: u32| {
            let status = proc::text(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect::<Vec<u32>>()
        };
        if numbers_of(pid).len() < 2 {
            return Threads::Shown(pid);
        }
        let all = proc::numbers_on_demand(format!("/proc/{pid}/task")).take(MAX_TRANSLATED);
        Threads::Inner(all.filter_map(|tid| Some((*numbers_of(tid).last()?, tid))).collect())
    }

    /// Returns the TID in `/proc` of a thread of the process.
    fn shown(&self, tid: u32) -> Option<u32> {
        match self {
            Threads::Shown(pid) => {
                (tid != 0 && fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false)).then_some(tid)
            }
            Threads::Inner(all) => all.get(&tid).copied(),
        }
    }
}

/// Returns the kind of a futex with these words, and the owner of a mutex or the thread whose end is awaited. `words` are
/// the first fields of a glibc mutex: lock, count, owner, users, kind.
fn classify(
    operation: u64,
    expected: u32,
    words: [u32; 5],
    is_thread: &dyn Fn(u32) -> bool,
) -> (ObjectKind, Option<u32>) {
    let [word, _, owner, users, kind] = words;
    let unknown = (ObjectKind::Futex, None);
    if word != expected {
        return unknown;
    }
    match operation & !(FUTEX_PRIVATE | FUTEX_CLOCK_REALTIME) {
        FUTEX_WAIT if word & FUTEX_WAITERS != 0 && is_thread(word & FUTEX_TID) => {
            (ObjectKind::Mutex, Some(word & FUTEX_TID))
        }
        FUTEX_WAIT if word == CONTENDED => {
            let is_mutex = (1..=MAX_USERS).contains(&users) && kind & !KIND_FLAGS <= LAST_KIND && is_thread(owner);
            if is_mutex { (ObjectKind::Mutex, Some(owner)) } else { unknown }
        }
        // The kernel clears the TID of a thread that ends, and wakes as if others than its process could wait.
        FUTEX_WAIT_BITSET if operation & FUTEX_PRIVATE == 0 && is_thread(word) => (ObjectKind::Thread, Some(word)),
        _ => unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_taken_from_mutexes_alone() {
        let of = |operation, expected, words| classify(operation, expected, words, &|tid| tid == 4102);
        let private = FUTEX_WAIT | FUTEX_PRIVATE;
        let owned = (ObjectKind::Mutex, Some(4102));
        let unknown = (ObjectKind::Futex, None);
        assert_eq!(of(private, 2, [2, 0, 4102, 1, 0]), owned);
        assert_eq!(of(private, 2, [2, 1, 4102, 1, 257]), owned, "a recursive one, with elision");
        assert_eq!(of(private, 2, [2, 0, 4103, 1, 0]), unknown, "no thread of this process");
        assert_eq!(of(private, 2, [2, 0, 4102, 0, 0]), unknown, "without users");
        assert_eq!(of(private, 2, [2, 0, 4102, 1, 16]), unknown, "no such kind");
        assert_eq!(of(private, 2, [0, 0, 4102, 1, 0]), unknown, "released since");
        assert_eq!(of(FUTEX_WAIT_BITSET | FUTEX_PRIVATE, 2, [2, 0, 4102, 1, 0]), unknown, "a condition variable");
        assert_eq!(of(FUTEX_WAIT, FUTEX_WAITERS | 4102, [FUTEX_WAITERS | 4102, 0, 0, 0, 0]), owned, "a robust one");
        let joined = of(FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, 4102, [4102, 0, 0, 0, 0]);
        assert_eq!(joined, (ObjectKind::Thread, Some(4102)));
    }
}
