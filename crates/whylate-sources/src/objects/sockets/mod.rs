// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sockets: their addresses, and the socket at the other end.

mod inet;
mod unix;

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use whylate_model::name::into_bounded;
use whylate_model::object::{Object, ObjectKind};

use super::budget::Budget;
use super::lead::Lead;
use inet::Inet;
pub(super) use unix::name_of as unix_name;
use unix::{UnixDiag, UnixSocket};

#[cfg(feature = "fuzzing")]
pub(super) use {inet::check as check_inet, unix::check as check_unix};

/// Maximum number of network namespaces that are looked into.
const MAX_NAMESPACES: usize = 8;

/// The network namespaces of waiters, and of processes that could be at the other end.
#[derive(Default)]
pub(super) struct Networks {
    /// By the text of the link to the namespace.
    by_link: HashMap<String, Network>,
}

/// A network namespace.
struct Network {
    inet: Inet,
    diag: Option<UnixDiag>,
    /// The listening Unix sockets, once they are asked for.
    listening: Option<Vec<UnixSocket>>,
}

impl Network {
    fn of_process(pid: u32, is_own: bool) -> Self {
        let diag = if is_own { UnixDiag::open() } else { diag_in_namespace_of(pid) };
        Network { inet: Inet::of_process(pid), diag, listening: None }
    }

    /// Returns the first listener for which this holds.
    fn listener(&mut self, is_it: impl Fn(&UnixSocket) -> bool) -> Option<&UnixSocket> {
        let diag = self.diag.as_ref()?;
        let listening = self.listening.get_or_insert_with(|| diag.listening());
        listening.iter().find(|listener| is_it(listener))
    }
}

/// Opens a netlink socket in the network namespace of a process, on a thread that enters it and ends.
fn diag_in_namespace_of(pid: u32) -> Option<UnixDiag> {
    let namespace = File::open(format!("/proc/{pid}/ns/net")).ok()?;
    let open = move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).ok()?;
        UnixDiag::open()
    };
    thread::Builder::new().name("whylate-network".to_owned()).spawn(open).ok()?.join().ok()?
}

/// Returns the text of the link to the network namespace of a process.
pub(super) fn namespace_of(pid: u32) -> Option<String> {
    Some(fs::read_link(format!("/proc/{pid}/ns/net")).ok()?.to_string_lossy().into_owned())
}

impl Networks {
    /// Reads the namespace, unless it is known or there are too many.
    fn network(&mut self, pid: u32, link: &str) -> Option<&mut Network> {
        if !self.by_link.contains_key(link) {
            if self.by_link.len() >= MAX_NAMESPACES {
                return None;
            }
            let is_own = namespace_of(std::process::id()).is_some_and(|own| own == link);
            self.by_link.insert(link.to_owned(), Network::of_process(pid, is_own));
        }
        self.by_link.get_mut(link)
    }

    /// Describes a Unix socket that is being connected to a listener, whose queue is full.
    pub(super) fn describe_connecting(&mut self, pid: u32, inode: u64, name: &str) -> Option<(Object, Option<Lead>)> {
        let link = namespace_of(pid)?;
        let listener = self.network(pid, &link)?.listener(|listener| listener.name.as_deref() == Some(name));
        let lead = listener.map(|listener| Lead::PeerSocket { inode: listener.inode.into() });
        let object = Object::with_path(ObjectKind::UnixSocket, into_bounded(name.to_owned()));
        Some((Object { inode: Some(inode), ..object }, lead))
    }

    /// Describes a socket of a process, and how to find its peer. `others` are a process each of other namespaces.
    pub(super) fn describe(
        &mut self,
        pid: u32,
        inode: u64,
        others: &HashMap<String, u32>,
        budget: &Budget,
    ) -> Option<(Object, Option<Lead>)> {
        let link = namespace_of(pid)?;
        let network = self.network(pid, &link)?;
        if let Some(socket) = u32::try_from(inode).ok().and_then(|inode| network.diag.as_ref()?.find(inode)) {
            return Some(network.describe_unix(socket));
        }
        let row = network.inet.find(inode)?;
        let mut peer = network.inet.peer_of(&row);
        if peer.is_none() {
            // The lists of a namespace are long where it has many sockets.
            let others = others.iter().filter(|(other, _)| **other != link && budget.has_time());
            let found = others.filter_map(|(other, &pid)| self.network(pid, other)?.inet.peer_of_other(&row));
            let found: Vec<u64> = found.collect();
            // Addresses of private networks may be used twice.
            peer = found.first().copied().filter(|_| found.len() == 1);
        }
        Some((row.object(), peer.map(|inode| Lead::PeerSocket { inode })))
    }
}

impl Network {
    fn describe_unix(&mut self, socket: UnixSocket) -> (Object, Option<Lead>) {
        let (inode, is_listening) = (socket.inode, socket.is_listening);
        let peer = match socket.peer {
            // It is in the queue of a listener, and no process has accepted it.
            Some(0) => self.listener(|listener| listener.pending.contains(&inode)).cloned(),
            Some(peer) => self.diag.as_ref().and_then(|diag| diag.find(peer)),
            None => None,
        };
        // An accepted socket has the name of its listener.
        let name = socket.name.or_else(|| peer.as_ref()?.name.clone());
        let object = Object {
            inode: Some(inode.into()),
            path: name.map(into_bounded),
            state: is_listening.then(|| "listening".to_owned()),
            ..Object::new(ObjectKind::UnixSocket)
        };
        (object, peer.map(|peer| Lead::PeerSocket { inode: peer.inode.into() }))
    }
}
