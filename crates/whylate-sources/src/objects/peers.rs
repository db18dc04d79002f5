// SPDX-License-Identifier: MIT OR Apache-2.0
//! Peers of objects: which processes have the other end open, by one scan of all descriptors.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use whylate_model::holders::Holder;
use whylate_model::object::{MAX_PEERS, Peer};

use super::budget::Budget;
use super::descriptor::{about, access_of, link_of, value_of};
use super::fuse;
use super::lead::{Access, Lead};
use super::process_now::ProcessNow;
use crate::kernel::proc;

/// Maximum number of processes per object that are kept, and number of those whose states are read even if no time is left.
const MAX_KEPT: usize = 256;
const ALWAYS_READ: usize = 16;

/// Device of FUSE daemons.
const FUSE_DEVICE: &str = "/dev/fuse";

/// The descriptors that are looked for, by the text of their links.
#[derive(Default)]
pub(super) struct Wanted<'a> {
    by_link: HashMap<String, Vec<Seeker<'a>>>,
}

struct Seeker<'a> {
    /// Index of the lead.
    at: usize,
    lead: &'a Lead,
}

/// Processes by index of the lead.
pub(super) type Found = HashMap<usize, BTreeSet<u32>>;

impl<'a> Wanted<'a> {
    /// Collects what these leads look for.
    pub(super) fn new(leads: impl Iterator<Item = &'a Lead>) -> Self {
        let mut wanted = Wanted::default();
        for (at, lead) in leads.enumerate() {
            let link = match lead {
                Lead::Pipe { link, .. } | Lead::Fifo { link, .. } => link.clone(),
                Lead::PeerSocket { inode } => format!("socket:[{inode}]"),
                Lead::Fuse { .. } => FUSE_DEVICE.to_owned(),
                Lead::Socket { .. }
                | Lead::Listener { .. }
                | Lead::LockHolder { .. }
                | Lead::Processes(_)
                | Lead::Thread(_) => continue,
            };
            wanted.by_link.entry(link).or_default().push(Seeker { at, lead });
        }
        wanted
    }

    /// Looks at the descriptors of all processes. Returns whether all were seen.
    pub(super) fn scan(&self, found: &mut Found, budget: &mut Budget) -> bool {
        if self.by_link.is_empty() {
            return true;
        }
        let mut daemons = Vec::new();
        for pid in proc::numbers_on_demand("/proc") {
            if !budget.has_time() {
                return false;
            }
            for descriptor in proc::numbers_on_demand(format!("/proc/{pid}/fd")) {
                if !budget.take_descriptor() {
                    return false;
                }
                let Some(link) = link_of(pid, descriptor) else { continue };
                let Some(seekers) = self.by_link.get(&link) else { continue };
                if link == FUSE_DEVICE {
                    daemons.push((pid, connection_of(pid, descriptor)));
                    continue;
                }
                for seeker in seekers.iter().filter(|seeker| seeker.accepts(pid, descriptor)) {
                    let processes = found.entry(seeker.at).or_default();
                    if processes.len() < MAX_KEPT {
                        processes.insert(pid);
                    }
                }
            }
        }
        for seeker in self.by_link.get(FUSE_DEVICE).into_iter().flatten() {
            if let Lead::Fuse { minor } = seeker.lead {
                found.entry(seeker.at).or_default().extend(daemons_of(*minor, &daemons));
            }
        }
        true
    }
}

impl Seeker<'_> {
    fn accepts(&self, pid: u32, descriptor: u32) -> bool {
        let has = |wanted: Access| access_of(pid, descriptor).is_some_and(|access| access.overlaps(wanted));
        match self.lead {
            Lead::Pipe { access, .. } => has(*access),
            // Another mount namespace may have another file at this path.
            Lead::Fifo { inode, access, .. } => {
                let number = about(pid, descriptor).and_then(|about| value_of(&about, "ino:")?.parse().ok());
                has(*access) && number == Some(*inode)
            }
            _ => true,
        }
    }
}

/// Returns the connection of a FUSE daemon's descriptor; `None` on kernels that do not show it.
fn connection_of(pid: u32, descriptor: u32) -> Option<u32> {
    value_of(&about(pid, descriptor)?, "fuse_connection:")?.parse().ok()
}

/// Returns the processes that serve a FUSE file system. Where the kernel does not show which of them does, a process that
/// is the only one serves the only file system.
fn daemons_of(minor: u32, daemons: &[(u32, Option<u32>)]) -> Vec<u32> {
    let of_connection: Vec<u32> =
        daemons.iter().filter(|(_, connection)| *connection == Some(minor)).map(|&(pid, _)| pid).collect();
    match daemons {
        [(pid, None)] if fuse::count_of_mounts(*pid) == 1 => vec![*pid],
        _ => of_connection,
    }
}

/// The states of processes, each of which is read once.
pub(super) struct States<'a> {
    budget: &'a Budget,
    in_exec: &'a HashSet<u32>,
    read: HashMap<u32, Holder>,
}

impl<'a> States<'a> {
    pub(super) fn new(budget: &'a Budget, in_exec: &'a HashSet<u32>) -> Self {
        States { budget, in_exec, read: HashMap::new() }
    }

    /// Returns the state of a process; `None` if it is not read, as there is no time left and it `may_be_left_out`.
    fn of(&mut self, pid: u32, may_be_left_out: bool) -> Option<Holder> {
        if !self.read.contains_key(&pid) && may_be_left_out && !self.budget.has_time() {
            return None;
        }
        let read = || ProcessNow::read(pid, !self.in_exec.contains(&pid)).now;
        Some(self.read.entry(pid).or_insert_with(read).clone())
    }

    /// Returns the peers by name, stopped ones first, and the number of processes of further names. The waiter's own
    /// process counts only if it is the only one.
    pub(super) fn peers_of(&mut self, processes: &BTreeSet<u32>, own: u32) -> (Vec<Peer>, u32) {
        let has_others = processes.iter().any(|&pid| pid != own);
        let mut by_name: BTreeMap<String, Peer> = BTreeMap::new();
        let mut unread = 0;
        for (number, &pid) in processes.iter().filter(|&&pid| pid != own || !has_others).enumerate() {
            let state = if number < MAX_KEPT { self.of(pid, number >= ALWAYS_READ) } else { None };
            let Some(process) = state else {
                unread += 1;
                continue;
            };
            let name = process.who.rsplit_once(':').map_or("", |(name, _)| name).to_owned();
            // The process has ended.
            if name.is_empty() {
                continue;
            }
            match by_name.get_mut(&name) {
                None => drop(by_name.insert(name, Peer { process, others: 0 })),
                Some(known) => {
                    known.others += 1;
                    if process.is_stopped() && !known.process.is_stopped() {
                        known.process = process;
                    }
                }
            }
        }
        let mut peers: Vec<Peer> = by_name.into_values().collect();
        peers.sort_by_key(|peer| !peer.process.is_stopped());
        let left_out = peers.split_off(peers.len().min(MAX_PEERS));
        (peers, unread + left_out.iter().map(|peer| peer.others + 1).sum::<u32>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_daemon_serves_its_connection() {
        assert_eq!(daemons_of(46, &[(7, Some(45)), (8, Some(46)), (9, None)]), [8]);
        assert!(daemons_of(46, &[(7, None), (8, None)]).is_empty());
    }

    #[test]
    fn own_process_is_a_peer_only_if_it_is_alone() {
        let own = std::process::id();
        let budget = Budget::new();
        let none = HashSet::new();
        let mut states = States::new(&budget, &none);
        let (peers, others) = states.peers_of(&[own].into(), own);
        assert_eq!((peers.len(), others), (1, 0));
        assert!(peers[0].process.who.ends_with(&format!(":{own}")));
        // The number of no process.
        assert!(states.peers_of(&[own, u32::MAX].into(), own).0.is_empty());
    }

    #[test]
    fn stopped_process_comes_first_wherever_it_is() {
        let state = |pid: u32| {
            let state = if pid == 250 { "T" } else { "S" }.to_owned();
            (pid, Holder { who: format!("a{}:{pid}", pid % 2), state, ..Holder::default() })
        };
        let budget = Budget::spent();
        let none = HashSet::new();
        let mut states = States { budget: &budget, in_exec: &none, read: (1..=300).map(state).collect() };
        let (peers, others) = states.peers_of(&(1..=300).collect(), 1_000);
        let named: Vec<_> = peers.iter().map(|peer| (peer.process.who.as_str(), peer.others)).collect();
        assert_eq!((named, others), (vec![("a0:250", 127), ("a1:1", 127)], 300 - 256));
        // The numbers of no processes.
        let unknown = (u32::MAX - 299..=u32::MAX).collect();
        assert_eq!(states.peers_of(&unknown, 1_000), (Vec::new(), 300 - 16), "without time");
    }
}
