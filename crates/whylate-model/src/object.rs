// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of waits: the file, pipe, socket or other thing that a thread waits or waited for, and who could end the wait.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

use crate::ActorName;
use crate::holders::{Holder, Lock};
use crate::units::{format_ns, printable};

/// Maximum number of peers of an object, and of objects that one call waits for.
pub const MAX_PEERS: usize = 4;
/// See [`MAX_PEERS`].
pub const MAX_OBJECTS: usize = 8;
/// Maximum depth of objects within objects.
const DEEPEST: usize = 3;

/// Kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ObjectKind {
    /// A file or directory.
    File,
    /// A file or directory of a FUSE file system, whose daemon is the peer.
    Fuse,
    /// A lock of a file: flock(2) or fcntl(2); its peer is the process that holds it.
    FileLock,
    /// The lock of the memory map of a process (`mmap_lock`); its peer is the thread that holds it.
    MemoryLock,
    /// The lock of the inode of a file; its peer is the thread that holds it.
    InodeLock,
    /// The mutex of a pipe; its peer is the thread that holds it.
    PipeLock,
    /// The lock of the position of an open file; its peer is the thread that holds it.
    PositionLock,
    /// Another kernel lock; its peer is the thread that holds it.
    KernelLock,
    /// A pipe; its peers have the other end open.
    Pipe,
    /// A pipe with a path (mkfifo(3)).
    Fifo,
    /// A Unix socket; its peers have the other end of the connection open.
    UnixSocket,
    /// A TCP socket; its peers have the other end of the connection open on this machine.
    Tcp,
    /// A UDP socket; its peers have the other end open, on this machine.
    Udp,
    /// A socket of another kind.
    Socket,
    /// A futex whose owner is not known, such as that of a condition variable.
    Futex,
    /// A mutex of the C library; its peer is the thread that owns it.
    Mutex,
    /// The end of a thread of the same process (pthread_join(3)).
    Thread,
    /// The end of a child, or of the process of a pidfd.
    Process,
    /// An eventfd.
    Eventfd,
    /// A timerfd.
    Timerfd,
    /// An epoll instance.
    Epoll,
    /// An inotify or fanotify group.
    Inotify,
    /// A signalfd.
    Signalfd,
    /// A signal.
    Signal,
    /// An io_uring.
    IoUring,
    /// A message queue, POSIX (with a path) or System V (with an ID).
    MessageQueue,
    /// A set of System V semaphores; its peer is the last process that changed one.
    Semaphore,
    /// A terminal.
    Terminal,
    /// A device.
    Device,
    /// The first of several objects (poll, select).
    AnyOf,
    /// Another kind of descriptor; the path names it.
    Other,
}

/// A process or thread that could end the wait, for example by writing into the pipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Peer {
    /// The process, and what it does now.
    #[serde(flatten)]
    pub process: Holder,
    /// Number of further processes of the same name.
    #[serde(default, skip_serializing_if = "is_none")]
    pub others: u32,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Object {
    /// Kind of the object.
    pub kind: ObjectKind,
    /// Path of a file, FIFO, Unix socket, message queue or device; `@name` for an abstract socket. A path in the arguments of
    /// a call is the one that the program passed, made absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The file has been deleted, or never had a path (memfd).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_deleted: bool,
    /// Inode of a pipe or socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inode: Option<u64>,
    /// Local address of a TCP or UDP socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
    /// Remote address of a TCP or UDP socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// State of a TCP socket, such as `established`, and `listening` of a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Address of a futex in the memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// ID of a System V message queue or set of semaphores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
    /// Process of a memory map, as `name:pid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// Symbol of a static kernel lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symbol: Option<String>,
    /// Kind of a kernel lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<Lock>,
    /// Mount point of a FUSE file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Time until a timerfd expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_ns: Option<u64>,
    /// Timeout of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ns: Option<u64>,
    /// Processes or threads that could end the wait, as far as they are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Peer>,
    /// Number of further such processes, of other names.
    #[serde(default, skip_serializing_if = "is_none")]
    pub other_peers: u32,
    /// Objects of which the first that is ready ends the wait.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub any_of: Vec<Object>,
    /// Number of further such objects.
    #[serde(default, skip_serializing_if = "is_none")]
    pub other_objects: u32,
}

impl Object {
    /// Creates an object of which only the kind is known.
    pub fn new(kind: ObjectKind) -> Self {
        Object {
            kind,
            path: None,
            is_deleted: false,
            inode: None,
            local: None,
            remote: None,
            state: None,
            address: None,
            id: None,
            process: None,
            symbol: None,
            lock: None,
            mount: None,
            expires_in_ns: None,
            timeout_ns: None,
            peers: Vec::new(),
            other_peers: 0,
            any_of: Vec::new(),
            other_objects: 0,
        }
    }

    /// Creates an object with a path.
    pub fn with_path(kind: ObjectKind, path: impl Into<String>) -> Self {
        Object { path: Some(path.into()), ..Object::new(kind) }
    }

    /// Returns whether a peer of it, or of one of several objects, is stopped, traced or frozen.
    pub fn has_stopped_peer(&self) -> bool {
        self.peers.iter().any(|peer| peer.process.is_stopped()) || self.any_of.iter().any(Object::has_stopped_peer)
    }

    /// Returns whether a process or thread is known that could end the wait.
    pub fn has_peer(&self) -> bool {
        !self.peers.is_empty() || self.any_of.iter().any(Object::has_peer)
    }

    /// Returns whether both are the same object. What peers do, and the timeouts of the calls, may differ. Connections to
    /// one address are the same object.
    pub fn is_same(&self, other: &Object) -> bool {
        let own = |of: &Object| if of.remote.is_some() { (None, None) } else { (of.inode, of.local.clone()) };
        // An rwsem may be held by readers now and by a writer then.
        let lock = |of: &Object| of.lock.map(|lock| if lock == Lock::RwsemReaders { Lock::Rwsem } else { lock });
        let key = |of: &Object| (of.kind, of.is_deleted, own(of), of.address, of.id, lock(of), of.any_of.len());
        let names = |of: &Object| [&of.path, &of.remote, &of.mount, &of.process, &of.symbol].map(Clone::clone);
        key(self) == key(other)
            && names(self) == names(other)
            && self.any_of.iter().zip(&other.any_of).all(|(one, other)| one.is_same(other))
    }

    /// Strips the fields in which it differs from an object that [is the same](Object::is_same).
    pub fn keep_common(&mut self, other: &Object) {
        if self.local != other.local {
            self.local = None;
        }
        if self.inode != other.inode {
            self.inode = None;
        }
        self.any_of.iter_mut().zip(&other.any_of).for_each(|(one, other)| one.keep_common(other));
    }

    /// Copies the peers of an object that [is the same](Object::is_same).
    pub fn clone_peers(&mut self, other: &Object) {
        (self.peers, self.other_peers) = (other.peers.clone(), other.other_peers);
        self.any_of.iter_mut().zip(&other.any_of).for_each(|(one, other)| one.clone_peers(other));
    }

    /// Strips the local address and the inode of a connection, which differ from one connection to the next.
    #[must_use]
    pub fn without_local_address(mut self) -> Self {
        if self.remote.is_some() {
            (self.local, self.inode) = (None, None);
        }
        self.any_of = self.any_of.into_iter().map(Object::without_local_address).collect();
        self
    }

    /// Returns whether a waiter gives up on the object if the timeout of its call ends the wait. This holds for a lock that
    /// others hold, a request to a FUSE daemon, a connection that is being made, an answer by UDP, and anything of a stopped
    /// process. It does not hold for a server that waits for its next request.
    pub fn is_owed(&self) -> bool {
        let is_own = match self.kind {
            ObjectKind::FileLock | ObjectKind::Mutex | ObjectKind::Fuse => true,
            ObjectKind::Udp => self.remote.is_some(),
            ObjectKind::Tcp => self.state.as_deref() == Some("syn_sent"),
            _ => false,
        };
        is_own || self.has_stopped_peer() || self.any_of.iter().any(Object::is_owed)
    }

    /// Returns whether the object says more than the system call does: a name, an address, or who could end the wait.
    pub fn is_telling(&self) -> bool {
        match self.kind {
            ObjectKind::Futex
            | ObjectKind::Eventfd
            | ObjectKind::Timerfd
            | ObjectKind::Epoll
            | ObjectKind::Signalfd
            | ObjectKind::Signal
            | ObjectKind::IoUring => self.has_peer(),
            ObjectKind::Pipe | ObjectKind::Mutex | ObjectKind::Thread | ObjectKind::Process | ObjectKind::Socket => {
                self.has_peer()
            }
            ObjectKind::AnyOf => self.any_of.iter().any(Object::is_telling),
            _ => true,
        }
    }

    /// Returns whether it is a lock, of which the peer is the holder.
    pub fn is_lock(&self) -> bool {
        matches!(self.kind, ObjectKind::FileLock | ObjectKind::Mutex) || self.is_kernel_lock()
    }

    /// Returns whether it is a lock of the kernel, of which the peers are threads that held it during the wait.
    pub fn is_kernel_lock(&self) -> bool {
        use ObjectKind::{InodeLock, KernelLock, MemoryLock, PipeLock, PositionLock};
        matches!(self.kind, MemoryLock | InodeLock | PipeLock | PositionLock | KernelLock)
    }

    /// Puts the thread that released a kernel lock last before those that had it earlier.
    pub fn add_last_holder(&mut self, who: String) {
        if let Some(at) = self.peers.iter().position(|peer| peer.process.who == who) {
            self.peers[..=at].rotate_right(1);
            return;
        }
        self.peers.truncate(MAX_PEERS - 1);
        self.peers.insert(0, Peer { process: Holder { who, ..Holder::default() }, others: 0 });
    }

    /// Renders the object without its peers and the timeout of the call.
    pub fn without_peers(&self) -> String {
        Object { peers: Vec::new(), other_peers: 0, timeout_ns: None, ..self.clone() }.to_string()
    }

    /// Renders the object without the timeout of the call.
    pub fn without_timeout(&self) -> String {
        Object { timeout_ns: None, ..self.clone() }.to_string()
    }

    /// Returns whether the object is no larger than one that whylate writes: a recording may come from anywhere.
    pub fn is_credible(&self) -> bool {
        self.is_credible_at(DEEPEST)
    }

    fn is_credible_at(&self, deepest: usize) -> bool {
        deepest > 0
            && self.peers.len() <= MAX_PEERS
            && self.any_of.len() <= MAX_OBJECTS
            && self.any_of.iter().all(|object| object.is_credible_at(deepest - 1))
    }

    /// Renders the name of the object, without its peers.
    fn name(&self) -> String {
        let path = self.path.as_deref().map(printable);
        let named = |what: &str| path.as_ref().map_or_else(|| what.to_owned(), |path| format!("{what} {path}"));
        let with_id = |what: &str| self.id.map_or_else(|| named(what), |id| format!("{what} {id}"));
        let name = match self.kind {
            ObjectKind::File => named("file"),
            ObjectKind::Fuse => {
                let mount = self.mount.as_deref().map_or_else(String::new, |mount| format!(" at {}", printable(mount)));
                format!("{} of the FUSE file system{mount}", named("file"))
            }
            ObjectKind::FileLock => format!("the lock of {}", named("file")),
            ObjectKind::MemoryLock => match &self.process {
                Some(process) => format!("the lock of the memory map of {}", printable(process)),
                None => "the lock of its process's memory map".to_owned(),
            },
            ObjectKind::InodeLock => format!("the inode lock of {}", named("a file").replacen("a file /", "file /", 1)),
            ObjectKind::PipeLock => "the mutex of a pipe".to_owned(),
            ObjectKind::PositionLock => format!("the position of {}", named("file")),
            ObjectKind::KernelLock => {
                let kind = self.lock.map_or("a kernel lock", lock_name);
                self.symbol.as_ref().map_or_else(|| kind.to_owned(), |symbol| format!("{kind} ({})", printable(symbol)))
            }
            ObjectKind::Pipe => "a pipe".to_owned(),
            ObjectKind::Fifo => named("FIFO"),
            ObjectKind::UnixSocket => {
                path.map_or_else(|| "a Unix socket".to_owned(), |path| format!("Unix socket {path}"))
            }
            ObjectKind::Tcp => format!("TCP {}", self.addresses()),
            ObjectKind::Udp => format!("UDP {}", self.addresses()),
            ObjectKind::Socket => path.map_or_else(|| "a socket".to_owned(), |path| format!("a socket ({path})")),
            ObjectKind::Futex => "a futex".to_owned(),
            ObjectKind::Mutex => "a mutex of its process".to_owned(),
            ObjectKind::Thread => "the end of a thread".to_owned(),
            ObjectKind::Process => "the end of a process".to_owned(),
            ObjectKind::Eventfd => "an eventfd".to_owned(),
            ObjectKind::Timerfd => "a timerfd".to_owned(),
            ObjectKind::Epoll => "an epoll instance".to_owned(),
            ObjectKind::Inotify => "file events (inotify, fanotify)".to_owned(),
            ObjectKind::Signalfd => "a signalfd".to_owned(),
            ObjectKind::Signal => "a signal".to_owned(),
            ObjectKind::IoUring => "an io_uring".to_owned(),
            ObjectKind::MessageQueue => with_id("message queue"),
            ObjectKind::Semaphore => with_id("semaphore set"),
            ObjectKind::Terminal => named("terminal"),
            ObjectKind::Device => named("device"),
            ObjectKind::AnyOf => "one of several".to_owned(),
            ObjectKind::Other => path.unwrap_or_else(|| "a descriptor".to_owned()),
        };
        let name = if self.is_deleted { format!("{name} (deleted)") } else { name };
        self.address.map_or_else(|| name.clone(), |address| format!("{name} at {address:#x}"))
    }

    fn addresses(&self) -> String {
        let of = |address: &Option<String>| address.as_deref().map(printable).unwrap_or_default();
        match (&self.remote, &self.state) {
            (Some(_), _) if self.local.is_none() => format!("to {}", of(&self.remote)),
            (Some(_), Some(state)) => format!("{} -> {} ({})", of(&self.local), of(&self.remote), printable(state)),
            (Some(_), None) => format!("{} -> {}", of(&self.local), of(&self.remote)),
            (None, Some(state)) => format!("{} ({})", of(&self.local), printable(state)),
            (None, None) => of(&self.local),
        }
    }

    /// Returns what the peers of this kind are.
    fn role(&self) -> &'static str {
        match self.kind {
            ObjectKind::Pipe | ObjectKind::Fifo => "other end held by",
            _ if self.is_lock() => "held by",
            ObjectKind::Fuse => "served by",
            ObjectKind::Process | ObjectKind::Thread => "namely",
            ObjectKind::Semaphore => "last changed by",
            ObjectKind::Tcp | ObjectKind::UnixSocket if self.remote.is_none() && self.state.is_some() => "used by",
            _ => "peer",
        }
    }
}

/// Returns the name of a kernel lock.
fn lock_name(lock: Lock) -> &'static str {
    match lock {
        Lock::Mutex => "a kernel mutex",
        Lock::Rwsem => "a kernel rwsem",
        Lock::RwsemReaders => "a kernel rwsem that readers hold",
        Lock::Semaphore => "a kernel semaphore",
        Lock::RtMutex => "a kernel rt_mutex",
        Lock::PiFutex => "a PI futex",
        Lock::FileLock => "the lock of a file",
        Lock::WorkItem => "a work item",
    }
}

impl Display for Peer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", printable(&self.process.who))?;
        if self.others > 0 {
            write!(f, " and {} more with this name", self.others)?;
        }
        let does = self.process.activity();
        if does.is_empty() { Ok(()) } else { write!(f, " ({does})") }
    }
}

/// Renders the object after "waits for".
impl Display for Object {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.kind == ObjectKind::AnyOf {
            let names: Vec<String> = self.any_of.iter().map(ToString::to_string).collect();
            write!(f, "{}", names.join("; or "))?;
            if self.other_objects > 0 {
                write!(f, "; or {} more", self.other_objects)?;
            }
        } else {
            write!(f, "{}", self.name())?;
        }
        for (number, peer) in self.peers.iter().enumerate() {
            match number {
                0 => write!(f, ", {} {peer}", self.role())?,
                _ => write!(f, ", {peer}")?,
            }
        }
        if self.other_peers > 0 {
            write!(f, " and {} more", self.other_peers)?;
        }
        if let Some(ns) = self.expires_in_ns {
            write!(f, ", which expires in {}", format_ns(ns))?;
        }
        self.timeout_ns.map_or(Ok(()), |ns| write!(f, ", for at most {}", format_ns(ns)))
    }
}

/// A wait that is not over at the end of a measurement, and its object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct UnfinishedWait {
    /// The waiting thread.
    pub waiter: ActorName,
    /// System call that the thread waits in.
    pub via: String,
    /// What it waits for.
    pub object: Object,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(who: &str, state: &str, others: u32) -> Peer {
        Peer { process: Holder { who: who.to_owned(), state: state.to_owned(), ..Holder::default() }, others }
    }

    fn tcp() -> Object {
        Object {
            local: Some("127.0.0.1:53412".to_owned()),
            remote: Some("127.0.0.53:53".to_owned()),
            state: Some("established".to_owned()),
            peers: vec![peer("resolver:88", "T", 0)],
            ..Object::new(ObjectKind::Tcp)
        }
    }

    #[test]
    fn text_names_object_and_peer() {
        let pipe = Object { peers: vec![peer("gzip:88", "S", 3)], ..Object::new(ObjectKind::Pipe) };
        let fuse = Object {
            mount: Some("/mnt".to_owned()),
            peers: vec![peer("sshfs:7", "T", 0)],
            ..Object::with_path(ObjectKind::Fuse, "/mnt/a\x1b[2J")
        };
        let either = Object {
            any_of: vec![tcp(), Object::new(ObjectKind::Eventfd)],
            other_objects: 2,
            timeout_ns: Some(5_000_000_000),
            ..Object::new(ObjectKind::AnyOf)
        };
        let listening = Object { remote: None, state: Some("listening".to_owned()), peers: Vec::new(), ..tcp() };
        let deleted = Object { is_deleted: true, ..Object::with_path(ObjectKind::File, "/tmp/x") };
        let futex = Object { address: Some(0x7f00_1234), ..Object::new(ObjectKind::Futex) };
        let timer = Object { expires_in_ns: Some(1_500_000_000), ..Object::new(ObjectKind::Timerfd) };
        let queue = Object { id: Some(3), ..Object::new(ObjectKind::MessageQueue) };
        let texts: Vec<String> = [tcp(), pipe, fuse, either, listening, deleted, futex, timer, queue]
            .iter()
            .map(ToString::to_string)
            .collect();
        let expected = [
            "TCP 127.0.0.1:53412 -> 127.0.0.53:53 (established), peer resolver:88 (stopped by a signal)",
            "a pipe, other end held by gzip:88 and 3 more with this name (asleep)",
            "file /mnt/a?[2J of the FUSE file system at /mnt, served by sshfs:7 (stopped by a signal)",
            "TCP 127.0.0.1:53412 -> 127.0.0.53:53 (established), peer resolver:88 (stopped by a signal); or an eventfd; \
             or 2 more, for at most 5.00s",
            "TCP 127.0.0.1:53412 (listening)",
            "file /tmp/x (deleted)",
            "a futex at 0x7f001234",
            "a timerfd, which expires in 1.50s",
            "message queue 3",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn locks_name_their_holders() {
        let holder = || vec![peer("indexer:812", "S", 0)];
        let file = Object { peers: holder(), ..Object::with_path(ObjectKind::FileLock, "/srv/lock") };
        let inode = Object { peers: holder(), ..Object::with_path(ObjectKind::InodeLock, "/srv/a") };
        let nameless = Object { peers: holder(), path: None, ..inode.clone() };
        let memory = Object { peers: holder(), lock: Some(Lock::Rwsem), ..Object::new(ObjectKind::MemoryLock) };
        let kernel = Object { lock: Some(Lock::RwsemReaders), ..Object::new(ObjectKind::KernelLock) };
        let texts = [file, inode, nameless, memory, kernel].map(|object| object.to_string());
        let expected = [
            "the lock of file /srv/lock, held by indexer:812 (asleep)",
            "the inode lock of file /srv/a, held by indexer:812 (asleep)",
            "the inode lock of a file, held by indexer:812 (asleep)",
            "the lock of its process's memory map, held by indexer:812 (asleep)",
            "a kernel rwsem that readers hold",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn connections_to_one_address_are_the_same_object() {
        let udp = |port: u16, peers| Object {
            local: Some(format!("127.0.0.1:{port}")),
            remote: Some("127.0.0.53:53".to_owned()),
            inode: Some(port.into()),
            timeout_ns: Some(5_000_000_000),
            peers,
            ..Object::new(ObjectKind::Udp)
        };
        let (mut one, other) = (udp(1, vec![peer("resolver:88", "T", 0)]), udp(2, Vec::new()));
        assert!(one.is_same(&other) && one.is_owed());
        one.keep_common(&other);
        assert_eq!(one.without_timeout(), "UDP to 127.0.0.53:53, peer resolver:88 (stopped by a signal)");
        assert_eq!(one, Object { peers: one.peers.clone(), ..other.without_local_address() });
        let pipe = |inode| Object { inode: Some(inode), ..Object::new(ObjectKind::Pipe) };
        assert!(pipe(1).is_same(&pipe(1)) && !pipe(1).is_same(&pipe(2)) && !pipe(1).is_same(&tcp()));
    }

    #[test]
    fn waiters_give_up_on_locks_and_answers_but_not_on_requests() {
        let state = |state: &str| Object { state: Some(state.to_owned()), peers: Vec::new(), ..tcp() };
        assert!(state("syn_sent").is_owed() && !state("established").is_owed() && tcp().is_owed());
        let listening = Object { local: Some("0.0.0.0:53".to_owned()), ..Object::new(ObjectKind::Udp) };
        assert!(!listening.is_owed(), "a server waits for requests");
        let either = Object { any_of: vec![listening, tcp()], ..Object::new(ObjectKind::AnyOf) };
        assert!(either.is_owed() && !Object::new(ObjectKind::Eventfd).is_owed());
    }

    #[test]
    fn stopped_peer_is_found_within_several_objects() {
        let either = Object { any_of: vec![Object::new(ObjectKind::Eventfd), tcp()], ..Object::new(ObjectKind::AnyOf) };
        assert!(either.has_stopped_peer() && either.has_peer());
        let running = Object { peers: vec![peer("a:1", "S", 0)], ..tcp() };
        assert!(!running.has_stopped_peer() && running.has_peer());
    }

    #[test]
    fn deep_and_wide_objects_are_not_credible() {
        let within = |object: Object| Object { any_of: vec![object], ..Object::new(ObjectKind::AnyOf) };
        assert!(within(within(tcp())).is_credible());
        assert!(!within(within(within(tcp()))).is_credible());
        assert!(!Object { peers: vec![Peer::default(); MAX_PEERS + 1], ..tcp() }.is_credible());
    }

    #[test]
    fn json_has_fields_that_are_known() {
        let text = serde_json::to_string(&tcp()).expect("an object serializes");
        let expected = r#"{"kind":"tcp","local":"127.0.0.1:53412","remote":"127.0.0.53:53","state":"established","peers":[{"who":"resolver:88","state":"T","off_cpu_ns":0}]}"#;
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<Object>(&text).expect("and parses"), tcp());
    }
}
