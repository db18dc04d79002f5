// SPDX-License-Identifier: MIT OR Apache-2.0
//! Holders of file locks (flock(2), fcntl(2)), from proc_locks(5) and the `fdinfo` of open files (proc_pid_fdinfo(5)).
//!
//! The `fdinfo` of some descriptors takes a mutex that a user can hold for ever (epoll) or that is held for long (tun,
//! GPUs). Only that of descriptors with a path is read, and on a thread of its own, as a descriptor may become another one
//! in between.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use whylate_model::holders::{Chain, End, Holder, Link, Lock, MAX_LINKS};
use whylate_model::name::into_bounded;

use super::ProcessNow;
use crate::kernel::{clock, pid_namespace, proc};

/// Maximum number of bytes of `/proc/locks`, which the kernel writes under a lock that all lockers take, and of the
/// `fdinfo` of a descriptor, which lists each lock of the process on its file.
const MAX_LOCKS_BYTES: u64 = 256 << 10;
const MAX_ABOUT_BYTES: u64 = 64 << 10;
/// Maximum number of descriptors that are looked at for one snapshot, and CPU time for that, in nanoseconds.
const MAX_DESCRIPTORS: usize = 1 << 15;
const MAX_CPU_NS: u64 = 100_000_000;
/// Maximum time for which a snapshot waits for all that.
const MAX_WAIT: Duration = Duration::from_millis(500);
/// Maximum number of links of all chains of a snapshot, with paths of up to 4 KiB. Further chains have one link without a
/// path.
const MAX_LINKS_OF_SNAPSHOT: usize = 1_000;

/// Processes that wait for file locks, and the processes that hold them.
#[derive(Debug, Default)]
pub(crate) struct FileLocks {
    /// Index of the lock that each process waits for, by PID; without processes that wait for several locks: which of their
    /// threads waits for which is not known.
    waits: HashMap<u32, usize>,
    /// Indexes of the locks that each process waits for.
    all_waits: HashMap<u32, Vec<usize>>,
    held: Vec<Held>,
    holders: HashMap<u32, ProcessNow>,
    /// Number of links of all chains so far.
    links: usize,
    /// CPU time that reading took, on another thread than that of the caller.
    pub(super) cpu_ns: u64,
}

/// A lock, the process that holds it, and the path of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    holder: u32,
    path: String,
}

/// What is left for looking at descriptors.
struct Room {
    descriptors: usize,
    /// End by the CPU clock of this thread.
    until_ns: u64,
}

impl Room {
    /// Takes room for one descriptor; returns false if there is none.
    fn take(&mut self) -> bool {
        let has_room = self.descriptors > 0 && clock::thread_cpu_ns() < self.until_ns;
        self.descriptors = self.descriptors.saturating_sub(1);
        has_room
    }
}

/// A line of `/proc/locks`, or of `fdinfo` after `lock:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LockLine<'a> {
    /// Number of the held lock, which its waiters share.
    number: &'a str,
    is_waiter: bool,
    /// The process that took the lock or waits for it; `None` for a lock of an open file description, and outside of this
    /// PID namespace.
    pid: Option<u32>,
    /// Kind, access, PID, file and range, alike in both files.
    text: &'a str,
}

impl<'a> LockLine<'a> {
    /// Parses `1: FLOCK  ADVISORY  WRITE 812 fe:00:1234 0 EOF`; a waiter has `->` behind the number.
    fn parse(line: &'a str) -> Option<Self> {
        let (number, text) = line.trim().split_once(':')?;
        let text = text.trim_start();
        let waiter = text.strip_prefix("->").map(str::trim_start);
        let text = waiter.unwrap_or(text);
        let mut words = text.split_whitespace();
        let is_lock = matches!(words.next()?, "FLOCK" | "POSIX" | "OFDLCK");
        let pid = words.nth(2)?.parse().ok().filter(|&pid| pid > 0);
        is_lock.then_some(LockLine { number, is_waiter: waiter.is_some(), pid, text })
    }
}

/// Returns the held locks that are waited for, with the PIDs of the waiters.
fn waited_for(text: &str) -> Vec<(LockLine<'_>, Vec<u32>)> {
    let mut locks: Vec<(LockLine<'_>, Vec<u32>)> = Vec::new();
    // The waiters follow the lock.
    for line in text.lines().filter_map(LockLine::parse) {
        match locks.last_mut().filter(|(lock, _)| lock.number == line.number && line.is_waiter) {
            Some((_, waiters)) => waiters.extend(line.pid),
            None if line.is_waiter => {}
            None => locks.push((line, Vec::new())),
        }
    }
    locks.retain(|(_, waiters)| !waiters.is_empty());
    locks
}

impl FileLocks {
    /// Reads which processes wait for which; nothing if that takes too long.
    pub(crate) fn read() -> Self {
        // A thread that hangs stays alone.
        static IS_READING: AtomicBool = AtomicBool::new(false);
        if !pid_namespace::has_proc() || IS_READING.swap(true, Ordering::AcqRel) {
            return FileLocks::default();
        }
        let (sender, receiver) = mpsc::channel();
        let reader = thread::Builder::new().name("whylate-locks".to_owned()).spawn(move || {
            let mut found = FileLocks::read_here();
            found.cpu_ns = clock::thread_cpu_ns();
            IS_READING.store(false, Ordering::Release);
            let _ = sender.send(found);
        });
        if reader.is_err() {
            IS_READING.store(false, Ordering::Release);
        }
        // One that goes on may take all that it may.
        receiver.recv_timeout(MAX_WAIT).unwrap_or(FileLocks { cpu_ns: MAX_CPU_NS, ..FileLocks::default() })
    }

    fn read_here() -> Self {
        let text = proc::text_at_most("/proc/locks", MAX_LOCKS_BYTES).unwrap_or_default();
        let locks = waited_for(&text);
        let wanted: HashSet<&str> = locks.iter().map(|(lock, _)| lock.text).collect();
        let mut room = Room { descriptors: MAX_DESCRIPTORS, until_ns: clock::thread_cpu_ns() + MAX_CPU_NS };
        let mut all = None;
        let mut files = FileLocks::default();
        let mut of_several = HashSet::new();
        for (lock, waiters) in &locks {
            let taker = lock.pid.and_then(|pid| path_of(pid, lock.text, &mut room));
            // The process that took the lock may have ended, and left the open file to its parent or its children.
            let found =
                taker.or_else(|| all.get_or_insert_with(|| openers(&wanted, &mut room)).get(lock.text).cloned());
            let Some(held) = found else { continue };
            files.holders.entry(held.holder).or_insert_with(|| ProcessNow::read(held.holder, true));
            let index = files.held.len();
            files.held.push(held);
            for &waiter in waiters {
                files.all_waits.entry(waiter).or_default().push(index);
                if files.waits.insert(waiter, index).is_some_and(|before| files.held[before] != files.held[index]) {
                    of_several.insert(waiter);
                }
            }
        }
        files.waits.retain(|waiter, _| !of_several.contains(waiter));
        files
    }

    /// Returns the holder of the lock for which a process waits, if that lock is of the file with this path.
    pub(super) fn holder_of(&self, waiter: u32, path: &str) -> Option<Holder> {
        let of_file = self.all_waits.get(&waiter)?.iter().filter_map(|&index| self.held.get(index));
        let mut of_file = of_file.filter(|held| held.path == path);
        let held = of_file.next()?;
        // Several processes may hold parts of one file.
        let is_only = of_file.all(|other| other.holder == held.holder);
        self.holders.get(&held.holder).filter(|_| is_only).map(|process| process.now.clone())
    }

    /// Returns the chain of holders that a process waits for. It ends at a process of several threads.
    pub(crate) fn chain_of(&mut self, pid: u32) -> Option<Chain> {
        let has_room = self.links < MAX_LINKS_OF_SNAPSHOT;
        let max_links = if has_room { MAX_LINKS } else { 1 };
        let (mut chain, mut visited, mut at) = (Chain::default(), vec![pid], pid);
        while let Some(held) = self.waits.get(&at).and_then(|&index| self.held.get(index)) {
            if chain.links.len() == max_links {
                chain.end = End::Cut;
                break;
            }
            let Some(holder) = self.holders.get(&held.holder) else { break };
            let file = has_room.then(|| held.path.clone());
            chain.links.push(Link { lock: Lock::FileLock, file, holder: holder.now.clone() });
            if holder.has_several_threads {
                break;
            }
            if visited.contains(&held.holder) {
                chain.end = End::Cycle;
                break;
            }
            visited.push(held.holder);
            at = held.holder;
        }
        self.links += chain.links.len();
        (!chain.links.is_empty()).then_some(chain)
    }
}

/// Returns the lock with the path of the process's file that has it.
fn path_of(pid: u32, lock: &str, room: &mut Room) -> Option<Held> {
    let mut found = None;
    each_lock(pid, room, &mut |text, path| {
        if text == lock {
            found = Some(Held { holder: pid, path: into_bounded(path.to_owned()) });
        }
    });
    found
}

/// Returns the wanted locks of open files. Of several processes that share the open file, the one that started first has
/// opened it.
fn openers(wanted: &HashSet<&str>, room: &mut Room) -> HashMap<String, Held> {
    let mut first: HashMap<String, (u64, Held)> = HashMap::new();
    for pid in proc::numbers_on_demand("/proc") {
        let mut started = None;
        let has_room = each_lock(pid, room, &mut |lock, path| {
            if !wanted.contains(lock) {
                return;
            }
            let started = *started.get_or_insert_with(|| started_at(pid));
            if first.get(lock).is_none_or(|(before, _)| started < *before) {
                let held = Held { holder: pid, path: into_bounded(path.to_owned()) };
                first.insert(lock.to_owned(), (started, held));
            }
        });
        if !has_room {
            break;
        }
    }
    first.into_iter().map(|(lock, (_, held))| (lock, held)).collect()
}

/// Calls `found` with each lock of the files of a process, and the path of the file. Returns whether there was room for all.
fn each_lock(pid: u32, room: &mut Room, found: &mut dyn FnMut(&str, &str)) -> bool {
    for fd in proc::numbers_on_demand(format!("/proc/{pid}/fd")) {
        if !room.take() {
            return false;
        }
        let Ok(path) = fs::read_link(format!("/proc/{pid}/fd/{fd}")) else { continue };
        // Others, such as `anon_inode:[eventpoll]`, have no locks.
        if !path.starts_with("/") || path.starts_with("/dev") {
            continue;
        }
        let Ok(about) = proc::text_at_most(format!("/proc/{pid}/fdinfo/{fd}"), MAX_ABOUT_BYTES) else { continue };
        let path = path.to_string_lossy();
        let locks = about.lines().filter_map(|line| LockLine::parse(line.strip_prefix("lock:")?));
        locks.filter(|lock| !lock.is_waiter).for_each(|lock| found(lock.text, &path));
    }
    true
}

/// Returns the start time of a process in clock ticks, the 22nd field of its `stat`.
fn started_at(pid: u32) -> u64 {
    let stat = proc::text(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    fields.split(' ').nth(19).and_then(|ticks| ticks.parse().ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use std::fs::File;

    use super::*;
    use rustix::fs::{FlockOperation, flock};

    const LOCKS: &str = "\
1: FLOCK  ADVISORY  WRITE 22461 fe:00:10134998 0 EOF
1: -> FLOCK  ADVISORY  WRITE 22470 fe:00:10134998 0 EOF
1:  -> FLOCK  ADVISORY  READ 22471 fe:00:10134998 0 EOF
2: POSIX  ADVISORY  READ 22461 fe:00:10051587 0 EOF
3: OFDLCK ADVISORY  WRITE -1 00:2d:11 0 9
3: -> POSIX  ADVISORY  WRITE 99 00:2d:11 0 9
4: LEASE  ACTIVE    WRITE 12 fe:00:7 0 EOF
4: -> FLOCK  ADVISORY  WRITE 13 fe:00:7 0 EOF
";

    #[test]
    fn waiters_follow_the_lock_that_they_wait_for() {
        let locks = waited_for(LOCKS);
        let locks: Vec<_> = locks.iter().map(|(lock, waiters)| (lock.pid, lock.text, waiters.as_slice())).collect();
        let first = "FLOCK  ADVISORY  WRITE 22461 fe:00:10134998 0 EOF";
        let third = "OFDLCK ADVISORY  WRITE -1 00:2d:11 0 9";
        assert_eq!(locks, [(Some(22461), first, &[22470, 22471][..]), (None, third, &[99])]);
        assert_eq!((LockLine::parse("lock:"), LockLine::parse("")), (None, None));
    }

    fn locks(several: &[u32]) -> FileLocks {
        let held = |holder: u32| Held { holder, path: format!("/lock of {holder}") };
        let process = |pid: u32| ProcessNow {
            now: Holder { who: format!("p:{pid}"), ..Holder::default() },
            has_several_threads: several.contains(&pid),
        };
        // 1 waits for 2, 2 for 3, 3 for 2.
        FileLocks {
            waits: [(1, 0), (2, 1), (3, 0)].into(),
            all_waits: [(1, vec![0]), (2, vec![1]), (4, vec![0, 1])].into(),
            held: vec![held(2), held(3)],
            holders: [2, 3].map(|pid| (pid, process(pid))).into(),
            links: 0,
            cpu_ns: 0,
        }
    }

    #[test]
    fn chain_ends_where_the_thread_is_not_known() {
        let chain = |several: &[u32], pid| {
            let chain = locks(several).chain_of(pid).expect("a chain");
            (chain.links.iter().map(|link| link.holder.who.clone()).collect::<Vec<_>>().join(" "), chain.end)
        };
        assert_eq!(chain(&[], 1), ("p:2 p:3 p:2".to_owned(), End::Cycle));
        assert_eq!(chain(&[3], 1), ("p:2 p:3".to_owned(), End::Free));
        assert_eq!(chain(&[2], 3), ("p:2".to_owned(), End::Free));
        assert!(locks(&[]).chain_of(4).is_none());
        let mut many = FileLocks { links: MAX_LINKS_OF_SNAPSHOT, ..locks(&[]) };
        let cut = many.chain_of(1).expect("a chain");
        assert_eq!((cut.links.len(), cut.links[0].file.clone(), cut.end), (1, None, End::Cut));
    }

    #[test]
    fn path_selects_one_of_several_awaited_locks() {
        let holder = |pid, path| locks(&[]).holder_of(pid, path).map(|holder| holder.who);
        assert_eq!(holder(4, "/lock of 3").as_deref(), Some("p:3"));
        assert_eq!(holder(1, "/lock of 2").as_deref(), Some("p:2"));
        assert_eq!((holder(1, "/lock of 3"), holder(9, "/lock of 3")), (None, None));
    }

    #[test]
    fn thread_that_waits_for_its_own_process_is_no_deadlock() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = fs::canonicalize(file.path()).expect("a path");
        flock(&file, FlockOperation::LockExclusive).expect("a lock");
        let other = File::open(&path).expect("opened again");
        let (chain, until) = thread::scope(|scope| {
            let waiter = scope.spawn(|| flock(&other, FlockOperation::LockExclusive));
            let until = Instant::now() + Duration::from_secs(10);
            let mut chain = None;
            while chain.is_none() && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
                chain = FileLocks::read_here().chain_of(std::process::id());
            }
            flock(&file, FlockOperation::Unlock).expect("unlocked");
            waiter.join().expect("no panic").expect("locked");
            (chain, until)
        });
        let chain = chain.unwrap_or_else(|| panic!("no chain until {until:?}"));
        let link = &chain.links[0];
        assert_eq!((chain.links.len(), chain.end, link.lock), (1, End::Free, Lock::FileLock));
        assert_eq!((link.file.as_deref(), link.holder.state.as_str()), (path.to_str(), ""));
    }
}
