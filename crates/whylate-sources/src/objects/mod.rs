// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of waits while they last: what a thread waits for, and who could end the wait.
//!
//! The arguments of the thread's system call designate a descriptor, an address or an ID. Only `/proc` and netlink are read:
//! no file, device or FIFO of another process is opened, and no `fdinfo` that could block (that of epoll takes a mutex which
//! a user can hold for ever). All that is read on a thread of its own, with a deadline.
//!
//! A wrong name is worse than none. The thread must not have run since it was sampled, by the number of its switches, and
//! its kernel stack must fit the kind of the object.

mod budget;
mod call;
mod children;
mod descriptor;
mod file_locks;
mod fuse;
mod futex;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod lead;
mod memory;
mod peers;
mod process_now;
mod program;
mod sockets;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use whylate_model::name::into_bounded;
use whylate_model::object::{MAX_OBJECTS, Object, ObjectKind, Peer};
use whylate_model::wait::is_for_file_lock;

use crate::kernel::{pid_namespace, proc};
use budget::Budget;
use call::{Call, Direction, Target};
pub(crate) use file_locks::FileLocks;
use lead::Lead;
use memory::{Memory, Polled};
use peers::{States, Wanted};
pub(crate) use process_now::ProcessNow;
pub use program::SwitchCounts;
pub(crate) use program::waiter;
use sockets::Networks;

/// Maximum number of waits whose objects are read.
pub(crate) const MAX_WAITERS: usize = 2_000;
/// Maximum time for which a snapshot waits for all objects.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// Maximum number of network namespaces that are listed.
const MAX_NAMESPACES: usize = 8;

/// A thread that waits.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    /// PID and TID in this PID namespace.
    pub pid: u32,
    pub tid: u32,
    /// The lower half of its number of switches, voluntary and involuntary, while it waits.
    pub switches: u32,
    /// Name of its system call.
    pub syscall: String,
    /// Its kernel frames, innermost first.
    pub kernel: Vec<String>,
}

/// The objects of waits.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// In the order of the waiters.
    pub found: Vec<Option<Object>>,
    /// Number of waits for which no object was read in time, or after which the thread has run.
    pub unread: u64,
    /// For each waiter, whether it was looked at while it waited, even if its wait has no object.
    pub is_read: Vec<bool>,
    /// CPU time that other threads took for that.
    pub other_cpu_ns: u64,
}

impl Objects {
    fn none_of(waiters: usize) -> Self {
        let (found, is_read) = (vec![None; waiters], vec![false; waiters]);
        Objects { found, is_read, unread: waiters as u64, other_cpu_ns: 0 }
    }
}

/// Returns the objects of waits, as far as they are read in time.
pub(crate) fn read(mut waiters: Vec<Waiter>) -> Objects {
    // A thread that hangs stays alone.
    static IS_READING: AtomicBool = AtomicBool::new(false);
    let all = waiters.len();
    waiters.truncate(MAX_WAITERS);
    if waiters.is_empty() || !pid_namespace::has_proc() || IS_READING.swap(true, Ordering::AcqRel) {
        return Objects::none_of(all);
    }
    let shared = Arc::new(Mutex::new(Objects::none_of(all)));
    let (sender, receiver) = mpsc::channel();
    let of_reader = Arc::clone(&shared);
    let reader = thread::Builder::new().name("whylate-objects".to_owned()).spawn(move || {
        Reader::new(&waiters, &of_reader, &HashSet::new()).read(true);
        IS_READING.store(false, Ordering::Release);
        let _ = sender.send(());
    });
    if reader.is_err() {
        IS_READING.store(false, Ordering::Release);
    }
    let _ = receiver.recv_timeout(MAX_WAIT);
    std::mem::take(&mut *shared.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Reads and returns the objects of waits on this thread, which may hang if a file system has a bug. Without `with_peers`,
/// reads of no other process. System calls of processes that are `in_exec` are not read, as that would wait for them.
pub(crate) fn read_here(waiters: &[Waiter], with_peers: bool, in_exec: &HashSet<u32>) -> Objects {
    let shared = Mutex::new(Objects::none_of(waiters.len()));
    Reader::new(waiters, &shared, in_exec).read(with_peers);
    shared.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// An object of a waiter, or one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    waiter: usize,
    /// Index within `any_of`.
    within: Option<usize>,
}

struct Reader<'a> {
    waiters: &'a [Waiter],
    shared: &'a Mutex<Objects>,
    in_exec: &'a HashSet<u32>,
    leads: Vec<(Slot, Lead)>,
    budget: Budget,
}

impl<'a> Reader<'a> {
    fn new(waiters: &'a [Waiter], shared: &'a Mutex<Objects>, in_exec: &'a HashSet<u32>) -> Self {
        Reader { waiters, shared, in_exec, leads: Vec::new(), budget: Budget::new() }
    }

    fn read(&mut self, with_peers: bool) {
        let mut in_memory = Vec::new();
        for (at, waiter) in self.waiters.iter().enumerate() {
            if !self.budget.has_time() {
                return;
            }
            match waiter.target() {
                Some((call, target)) if target.is_in_memory() => in_memory.push((at, call, target)),
                Some((call, target)) => self.read_one(at, &call, &target),
                None => self.store(at, None),
            }
        }
        // Memory of a process cannot be read while a thread of it holds the lock of its memory map.
        let in_faults: HashSet<u32> =
            self.waiters.iter().filter(|waiter| waiter.waits_in_memory()).map(|waiter| waiter.pid).collect();
        for (at, call, target) in in_memory {
            if !self.budget.has_time() {
                return;
            }
            if !in_faults.contains(&self.waiters[at].pid) {
                self.read_one(at, &call, &target);
            }
        }
        self.describe_sockets();
        if with_peers {
            self.find_peers();
        }
    }

    /// Reads the object of a wait, unless its thread has run.
    fn read_one(&mut self, at: usize, call: &Call, target: &Target) {
        let waiter = &self.waiters[at];
        let Some((object, leads)) = waiter.object(call, target) else { return self.store(at, None) };
        if !waiter.is_same_wait() {
            return;
        }
        self.leads.extend(leads.into_iter().map(|(within, lead)| (Slot { waiter: at, within }, lead)));
        self.store(at, Some(object));
    }

    fn store(&self, at: usize, object: Option<Object>) {
        let mut objects = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        // After the deadline the list is empty.
        if let Some(found) = objects.found.get_mut(at) {
            *found = object;
            objects.unread -= 1;
            objects.is_read[at] = true;
        }
    }

    /// Changes an object, unless the deadline is over.
    fn change(&self, slot: Slot, change: impl FnOnce(&mut Object)) {
        let mut objects = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(object)) = objects.found.get_mut(slot.waiter) else { return };
        match slot.within {
            None => change(object),
            Some(within) => {
                if let Some(object) = object.any_of.get_mut(within) {
                    change(object);
                }
            }
        }
    }

    fn take_back(&self, at: usize) {
        let mut objects = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(object) = objects.found.get_mut(at) {
            *object = None;
        }
    }

    /// Replaces sockets by what the kernel knows of them.
    fn describe_sockets(&mut self) {
        let is_socket = |lead: &Lead| matches!(lead, Lead::Socket { .. } | Lead::Listener { .. });
        let has_sockets = self.leads.iter().any(|(_, lead)| is_socket(lead));
        if !has_sockets {
            return;
        }
        let (mut networks, others) = (Networks::default(), namespaces(&self.budget));
        let mut leads = std::mem::take(&mut self.leads);
        leads.retain_mut(|(slot, lead)| {
            let waiter = &self.waiters[slot.waiter];
            if is_socket(lead) && !self.budget.has_time() {
                return false;
            }
            let described = match lead {
                Lead::Socket { inode } => networks.describe(waiter.pid, *inode, &others, &self.budget),
                Lead::Listener { inode, name } => networks.describe_connecting(waiter.pid, *inode, name),
                _ => return true,
            };
            let Some((described, peer)) = described else { return false };
            if !descriptor::agrees(described.kind, &waiter.kernel) {
                self.take_back(slot.waiter);
                return false;
            }
            self.change(*slot, |object| *object = Object { timeout_ns: object.timeout_ns, ..described });
            peer.map(|peer| *lead = peer).is_some()
        });
        self.leads = leads;
    }

    /// Finds the processes that have the other ends open.
    fn find_peers(&mut self) {
        let mut found = peers::Found::new();
        let wanted = Wanted::new(self.leads.iter().map(|(_, lead)| lead));
        // Without all descriptors, those that were seen are still right.
        wanted.scan(&mut found, &mut self.budget);
        let mut states = States::new(&self.budget, self.in_exec);
        let mut locks = None;
        for (at, (slot, lead)) in self.leads.iter().enumerate() {
            let own = self.waiters[slot.waiter].pid;
            let (peers, others) = match lead {
                Lead::LockHolder { path } => {
                    let locks = locks.get_or_insert_with(FileLocks::read);
                    (locks.holder_of(own, path).map(|process| Peer { process, others: 0 }).into_iter().collect(), 0)
                }
                Lead::Thread(tid) => {
                    let process = ProcessNow::of_thread(own, *tid, true);
                    (vec![Peer { process, others: 0 }], 0)
                }
                Lead::Processes(pids) => states.peers_of(&pids.iter().copied().collect(), own),
                _ => found.get(&at).map(|processes| states.peers_of(processes, own)).unwrap_or_default(),
            };
            self.change(*slot, |object| (object.peers, object.other_peers) = (peers, others));
        }
        let other_cpu_ns = locks.map_or(0, |locks| locks.cpu_ns);
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).other_cpu_ns += other_cpu_ns;
    }
}

/// Returns one process of each network namespace, up to a limit.
fn namespaces(budget: &Budget) -> HashMap<String, u32> {
    let mut all = HashMap::new();
    for pid in proc::numbers_on_demand("/proc").take_while(|_| budget.has_time()) {
        if let Some(link) = sockets::namespace_of(pid) {
            all.entry(link).or_insert(pid);
        }
        if all.len() >= MAX_NAMESPACES {
            break;
        }
    }
    all
}

/// An object, and leads to its peers or to those of one of several objects.
type Described = (Object, Vec<(Option<usize>, Lead)>);

impl Waiter {
    fn file(&self, name: &str) -> String {
        format!("/proc/{}/task/{}/{name}", self.pid, self.tid)
    }

    /// Returns the call and what it designates.
    fn target(&self) -> Option<(Call, Target)> {
        let call = Call::parse(&fs::read_to_string(self.file("syscall")).ok()?)?;
        if call.name != self.syscall {
            return None;
        }
        let call = call.before_restart(&self.kernel);
        let target = call.target()?;
        Some((call, target))
    }

    /// Returns whether the thread has not run since it was sampled. A thread that runs has the same number of switches until
    /// it leaves its CPU, so it must be off its CPU first, which the kernel checks for this file.
    fn is_same_wait(&self) -> bool {
        let call = fs::read_to_string(self.file("syscall")).ok().and_then(|text| Call::parse(&text));
        if call.is_none_or(|call| call.name != self.syscall) {
            return false;
        }
        let status = proc::text(self.file("status")).unwrap_or_default();
        switches_in(&status).is_some_and(|switches| switches as u32 == self.switches)
    }

    /// Returns whether the thread may hold the lock of its process's memory map, or wait for it.
    fn waits_in_memory(&self) -> bool {
        let is_of_memory = |frame: &String| {
            [
                "mmap",
                "__mmap",
                "vm_mmap",
                "do_mmap",
                "handle_mm_fault",
                "lock_mm",
                "do_user_addr_fault",
                "__mm_populate",
            ]
            .iter()
            .any(|name| frame.starts_with(name))
        };
        self.kernel.iter().any(is_of_memory)
    }

    /// Returns the object of the wait, and how to find its peers.
    fn object(&self, call: &Call, target: &Target) -> Option<Described> {
        let alone =
            |(object, lead): (Object, Option<Lead>)| (object, lead.map(|lead| (None, lead)).into_iter().collect());
        let only = |kind| Some((Object::new(kind), Vec::new()));
        match *target {
            Target::Descriptor(descriptor, direction) => {
                let found = descriptor::object_of(self.pid, descriptor, direction, &self.kernel)?;
                if let (ObjectKind::File, Some(path)) = (found.0.kind, &found.0.path)
                    && is_for_file_lock(&self.kernel)
                {
                    let lead = Lead::LockHolder { path: path.clone() };
                    return Some(alone((Object { kind: ObjectKind::FileLock, ..found.0 }, Some(lead))));
                }
                descriptor::agrees(found.0.kind, &self.kernel).then(|| alone(found))
            }
            Target::Poll { array, count, timeout } => {
                let memory = Memory::open(self.pid)?;
                self.any_of(&memory.polled(array, count)?, count, memory.timeout_ns(timeout))
            }
            Target::Select { count, sets, timeout } => {
                let memory = Memory::open(self.pid)?;
                let selected = memory.selected(count, sets)?;
                self.any_of(&selected, selected.len() as u64, memory.timeout_ns(timeout))
            }
            Target::Connect { descriptor, address, length } => {
                let (object, lead) = descriptor::object_of(self.pid, descriptor, Direction::Write, &self.kernel)?;
                let name = Memory::open(self.pid)?.unix_address(address, length);
                let lead = match (lead, name) {
                    (Some(Lead::Socket { inode }), Some(name)) => Some(Lead::Listener { inode, name }),
                    (lead, _) => lead,
                };
                Some(alone((object, lead)))
            }
            Target::Futex { address, operation, expected } => {
                let memory = Memory::open(self.pid)?;
                Some(alone(futex::object_of(self.pid, address, operation, expected, &memory)))
            }
            Target::Child(child) => {
                let children = match child {
                    None => children::children_of(self.pid),
                    Some(child) => children::child_of(self.pid, child).into_iter().collect(),
                };
                let lead = (!children.is_empty()).then_some(Lead::Processes(children));
                Some(alone((Object::new(ObjectKind::Process), lead)))
            }
            Target::Queue(id) => Some((Object { id: Some(id), ..Object::new(ObjectKind::MessageQueue) }, Vec::new())),
            Target::Semaphores(id) => Some((Object { id: Some(id), ..Object::new(ObjectKind::Semaphore) }, Vec::new())),
            Target::Path { directory, at } => self.of_path(call, directory, at).map(alone),
            Target::Signal => only(ObjectKind::Signal),
        }
    }

    /// Returns the objects of several descriptors; that of a single one alone.
    fn any_of(&self, polled: &[Polled], count: u64, timeout_ns: Option<u64>) -> Option<Described> {
        let object_of = |polled: &Polled| {
            let direction = match (polled.reads, polled.writes) {
                (true, false) => Direction::Read,
                (false, true) => Direction::Write,
                _ => Direction::Any,
            };
            descriptor::object_of(self.pid, polled.descriptor, direction, &self.kernel)
        };
        if let ([polled], 0..=1) = (polled, count) {
            let (object, lead) = object_of(polled)?;
            return Some((Object { timeout_ns, ..object }, lead.map(|lead| (None, lead)).into_iter().collect()));
        }
        let (mut any_of, mut leads) = (Vec::new(), Vec::new());
        for polled in polled.iter().take(MAX_OBJECTS) {
            let Some((object, lead)) = object_of(polled) else { continue };
            leads.extend(lead.map(|lead| (Some(any_of.len()), lead)));
            any_of.push(object);
        }
        let others = u32::try_from(count.max(polled.len() as u64)).ok()?.saturating_sub(any_of.len() as u32);
        // Without descriptors it only sleeps.
        (!any_of.is_empty())
            .then_some((Object { any_of, other_objects: others, timeout_ns, ..Object::new(ObjectKind::AnyOf) }, leads))
    }

    /// Returns the file that a path in the memory of the process names, if the stack shows that the thread waits for it.
    fn of_path(&self, call: &Call, directory: Option<i32>, at: u64) -> Option<(Object, Option<Lead>)> {
        let path = Memory::open(self.pid)?.text(at)?;
        let is_whole = path.starts_with('/');
        let directory = match directory {
            _ if is_whole => None,
            Some(directory) => Some(descriptor::link_of(self.pid, u32::try_from(directory).ok()?)?),
            None => Some(fs::read_link(format!("/proc/{}/cwd", self.pid)).ok()?.to_string_lossy().into_owned()),
        };
        let path = directory.map_or_else(|| path.clone(), |directory| format!("{directory}/{path}"));
        let object = |kind| Object::with_path(kind, into_bounded(path.clone()));
        if fuse::waits_for_daemon(&self.kernel) {
            let (mount, minor) = fuse::mount_of_path(self.pid, &path)?;
            return Some((Object { mount: Some(mount), ..object(ObjectKind::Fuse) }, Some(Lead::Fuse { minor })));
        }
        let is_fifo = self.kernel.iter().any(|frame| descriptor::is_of_pipe(frame));
        let opens = call.name.starts_with("open") || call.name == "creat";
        Some((object(if is_fifo && opens { ObjectKind::Fifo } else { ObjectKind::File }), None))
    }
}

/// Returns the number of switches, voluntary and involuntary, in a `status` of a thread.
fn switches_in(status: &str) -> Option<u64> {
    let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    of("voluntary_ctxt_switches:")?.checked_add(of("nonvoluntary_ctxt_switches:")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_both_kinds() {
        assert_eq!(switches_in("Name:\ta\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n"), Some(42));
        assert_eq!(switches_in("voluntary_ctxt_switches:\t40\n"), None);
    }
}
