// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the objects of waits that a walk over all threads has found, while they last.
//!
//! Of a process in execve(2), files that need `exec_update_lock` are not read: a user can hold this lock for ever. A process
//! that calls execve(2) after the walk may still stall the thread.

use std::collections::HashSet;

use whylate_model::object::{Object, ObjectKind, Peer};

use super::asleep::{Sleeper, WaitedLock};
use crate::kernel::pid_namespace;
use crate::objects::{self, ProcessNow, Waiter, waiter};

/// Reads objects on the thread that walks.
pub(super) struct ObjectReader {
    /// Processes that execute a program.
    in_exec: HashSet<u32>,
    /// TIDs of the threads of these.
    threads_in_exec: HashSet<u32>,
    has_proc: bool,
    /// CPU time that other threads took for this one.
    pub other_cpu_ns: u64,
}

/// Result of reading one wait.
pub(super) struct Reading {
    pub tid: u32,
    /// The wait lasted until it was read, even if it has no object.
    pub is_read: bool,
    /// Name of the system call.
    pub via: String,
    pub object: Option<Object>,
}

impl ObjectReader {
    pub(super) fn new() -> Self {
        ObjectReader {
            in_exec: HashSet::new(),
            threads_in_exec: HashSet::new(),
            has_proc: pid_namespace::has_proc(),
            other_cpu_ns: 0,
        }
    }

    /// Notes which processes execute a program, by the threads that a walk has found.
    pub(super) fn take_in(&mut self, found: &[Sleeper]) {
        self.in_exec = found.iter().filter(|of| of.in_exec).map(|of| of.process).collect();
        let threads = found.iter().filter(|of| self.in_exec.contains(&of.process)).map(|of| of.tid);
        self.threads_in_exec = threads.collect();
    }

    /// Returns whether waits of a thread are read at all: those of whylate are not.
    pub(super) fn reads_of(&self, of: &Sleeper) -> bool {
        self.has_proc && of.process != std::process::id()
    }

    /// Returns whether the arguments of the thread's system call may show an object that the walk did not.
    pub(super) fn may_read_more(&self, of: &Sleeper) -> bool {
        // The walk has read kernel locks already. Only the file of an inode lock may be missing.
        let may_have = of.lock.is_none_or(|lock| lock.kind == ObjectKind::InodeLock);
        may_have && of.syscall >= 0 && !self.in_exec.contains(&of.process)
    }

    /// Reads the objects of these waits; `with_peers`, also the processes that could end them, for which the descriptors of
    /// all processes may be scanned.
    pub(super) fn read(&mut self, due: &[&Sleeper], with_peers: bool) -> Vec<Reading> {
        let waiters: Vec<(&Sleeper, Waiter)> =
            due.iter().filter_map(|of| Some((*of, waiter(of.process, of.tid, of.switches.into())?))).collect();
        let of_waiters: Vec<Waiter> = waiters.iter().map(|(_, waiter)| waiter.clone()).collect();
        let objects = objects::read_here(&of_waiters, with_peers, &self.in_exec);
        self.other_cpu_ns += objects.other_cpu_ns;
        let found = waiters.into_iter().zip(objects.found).zip(objects.is_read);
        let reading = |(((of, waiter), object), is_read): (((&Sleeper, Waiter), Option<Object>), bool)| {
            let object = match (of.lock, object) {
                (None, Some(object)) => Some(without_waiter(object, of.tid)),
                (Some(waited), Some(Object { kind: ObjectKind::File, path, .. })) => {
                    Some(Object { path, ..self.lock_object(of.tid, waited) })
                }
                _ => None,
            };
            Reading { tid: of.tid, is_read, via: waiter.syscall, object }
        };
        found.map(reading).collect()
    }

    /// Returns the lock of the kernel that a thread waits for, with what its holder does now.
    pub(super) fn lock_object(&self, waiter: u32, of: WaitedLock) -> Object {
        // A thread that has just got the lock waits no more.
        let holder = of.holder.filter(|&tid| tid != waiter);
        let holder = holder.map(|tid| ProcessNow::of_thread(tid, tid, !self.threads_in_exec.contains(&tid)));
        let peers = holder.into_iter().map(|process| Peer { process, others: 0 }).collect();
        Object { lock: Some(of.lock), peers, ..Object::new(of.kind) }
    }
}

/// Returns a mutex without an owner that is the waiter, which has just got it.
fn without_waiter(mut object: Object, tid: u32) -> Object {
    if object.kind == ObjectKind::Mutex {
        let is_waiter = |peer: &Peer| peer.process.who.rsplit_once(':').is_some_and(|(_, of)| of == tid.to_string());
        object.peers.retain(|peer| !is_waiter(peer));
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiter_is_not_the_owner_of_its_mutex() {
        let who = |tid: u32| whylate_model::holders::Holder { who: format!("a:b:{tid}"), ..Default::default() };
        let peers = [7, 8].map(|tid| Peer { process: who(tid), others: 0 }).to_vec();
        let mutex = Object { peers, ..Object::new(ObjectKind::Mutex) };
        assert_eq!(without_waiter(mutex.clone(), 7).peers, mutex.peers[1..]);
        assert_eq!(without_waiter(Object { kind: ObjectKind::Pipe, ..mutex.clone() }, 7).peers, mutex.peers);
    }
}
