// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks up the objects of held-up threads while they wait.

use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

use whylate_model::object::{Object, UnfinishedWait};
use whylate_model::programs::{Programs, Tally};

use super::relatives::process_of;
use crate::kernel::clock;
use crate::objects::SwitchCounts;

/// Minimum time between two lookups: each may list the descriptors of all processes.
const EVERY_NS: u64 = 1_000_000_000;
/// Maximum number of lookups of a wait: many waits have no object, or end before the lookup.
const ATTEMPTS: u32 = 5;
/// Number of attempts of a lookup, and the pause between them.
const LOOKS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(7);
/// Maximum number of waits that are kept.
const MAX_WAITS: usize = 256;

/// Objects by thread and system call.
#[derive(Default)]
pub(super) struct Lookup {
    known: HashMap<(u32, String), (u32, Option<Object>)>,
    running: Option<Receiver<Vec<UnfinishedWait>>>,
    next_ns: u64,
}

impl Lookup {
    /// Takes the result of the last lookup, and starts another one if a held-up thread waits now.
    pub(super) fn advance(&mut self, tally: &Tally) {
        match self.running.as_ref().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return,
            Some(Ok(found)) => found.into_iter().for_each(|wait| self.keep(wait)),
            Some(Err(TryRecvError::Disconnected)) | None => {}
        }
        self.running = None;
        let now_ns = clock::monotonic_ns();
        if now_ns < self.next_ns || self.known.len() >= MAX_WAITS {
            return;
        }
        let waiting = tally.held_up_now(&mut super::call_name);
        let is_new = |(tid, via): &(u32, String)| {
            let known = self.known.get(&(*tid, via.clone()));
            known.is_none_or(|(attempts, object)| object.is_none() && *attempts < ATTEMPTS)
        };
        let new: Vec<(u32, String)> = waiting.into_iter().filter(is_new).collect();
        let threads: Vec<(u32, u32)> = new
            .into_iter()
            .filter_map(|(tid, via)| {
                let pid = process_of(tid)?.pid;
                self.known.entry((tid, via)).or_default().0 += 1;
                Some((pid, tid))
            })
            .collect();
        if threads.is_empty() {
            return;
        }
        self.next_ns = now_ns + EVERY_NS;
        let (sender, receiver) = mpsc::channel();
        // A name by which whylate recognizes its own threads.
        let started = thread::Builder::new().name("whylate-reads".to_owned()).spawn(move || {
            let look = || SwitchCounts::read(threads.iter().copied()).unfinished_waits();
            let mut found = look();
            // Each wait may be short, and may have ended.
            for _ in 1..LOOKS {
                if !found.is_empty() {
                    break;
                }
                thread::sleep(PAUSE);
                found = look();
            }
            let _ = sender.send(found);
        });
        self.running = started.is_ok().then_some(receiver);
    }

    fn keep(&mut self, wait: UnfinishedWait) {
        let Some(tid) = wait.waiter.tid() else { return };
        if let Some((_, object)) = self.known.get_mut(&(tid, wait.via)) {
            *object = Some(wait.object);
        }
    }

    /// Returns the object for which the thread waited in this system call, if one was found.
    pub(super) fn object(&self, tid: u32, via: &str) -> Option<Object> {
        self.known.get(&(tid, via.to_owned()))?.1.clone()
    }

    /// Forgets threads that are no longer held up, as their TIDs may be reused.
    pub(super) fn forget_others(&mut self, programs: &Programs) {
        let is_held_up = |tid: u32| programs.held_up.iter().any(|program| program.who.tid() == Some(tid));
        self.known.retain(|(tid, _), _| is_held_up(*tid));
    }
}
