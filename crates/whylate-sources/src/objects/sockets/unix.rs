// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unix sockets, by sock_diag(7).

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, netlink, recv, send, socket};

/// Maximum time for which one answer is awaited.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// Maximum number of datagrams of a list.
const MAX_DATAGRAMS: usize = 256;

/// Header of a netlink message, and of a description of a Unix socket.
const NLMSGHDR: usize = 16;
const UNIX_DIAG_MSG: usize = 16;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
/// What is asked for: names, the other end, and the other ends of connections that were not accepted.
const UDIAG_SHOW_NAME: u32 = 1;
const UDIAG_SHOW_PEER: u32 = 4;
const UDIAG_SHOW_ICONS: u32 = 8;
/// Attributes.
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_PEER: u16 = 2;
const UNIX_DIAG_ICONS: u16 = 3;
const LISTEN: u8 = 10;

/// A Unix socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnixSocket {
    pub inode: u32,
    pub is_listening: bool,
    /// Path, or `@name` of an abstract socket.
    pub name: Option<String>,
    /// Inode of the other end; 0 if no process has accepted it.
    pub peer: Option<u32>,
    /// Inodes of the other ends of connections that were not accepted.
    pub pending: Vec<u32>,
}

/// A netlink socket in a network namespace.
pub(super) struct UnixDiag(OwnedFd);

impl UnixDiag {
    /// Opens a socket in the network namespace of this thread.
    pub(super) fn open() -> Option<Self> {
        let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, Some(netlink::SOCK_DIAG)).ok()?;
        set_socket_timeout(&netlink, Timeout::Recv, Some(MAX_WAIT)).ok()?;
        Some(UnixDiag(netlink))
    }

    /// Returns the socket with this inode.
    pub(super) fn find(&self, inode: u32) -> Option<UnixSocket> {
        self.ask(NLM_F_REQUEST, u32::MAX, inode, UDIAG_SHOW_NAME | UDIAG_SHOW_PEER)?;
        let mut bytes = [0; 8192];
        for _ in 0..MAX_DATAGRAMS {
            let length = match recv(&self.0, &mut bytes[..], RecvFlags::empty()) {
                Ok((_, length)) => length,
                Err(Errno::INTR) => continue,
                Err(_) => return None,
            };
            let sockets = parse(bytes.get(..length)?).sockets;
            // There is no such socket.
            if sockets.is_empty() {
                return None;
            }
            // Other sockets are the answer to an earlier question that took too long.
            let found = sockets.into_iter().find(|found| found.inode == inode);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the listening sockets.
    pub(super) fn listening(&self) -> Vec<UnixSocket> {
        let mut all = Vec::new();
        if self.ask(NLM_F_REQUEST | NLM_F_DUMP, 1 << LISTEN, 0, UDIAG_SHOW_NAME | UDIAG_SHOW_ICONS).is_none() {
            return all;
        }
        let mut bytes = vec![0; 64 << 10];
        for _ in 0..MAX_DATAGRAMS {
            let length = match recv(&self.0, &mut bytes[..], RecvFlags::empty()) {
                Ok((_, length)) => length,
                Err(Errno::INTR) => continue,
                Err(_) => break,
            };
            let part = parse(bytes.get(..length).unwrap_or_default());
            all.extend(part.sockets);
            if part.is_last {
                break;
            }
        }
        all
    }

    fn ask(&self, flags: u16, states: u32, inode: u32, show: u32) -> Option<()> {
        let mut request = Vec::with_capacity(40);
        request.extend(40_u32.to_ne_bytes());
        request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        request.extend(flags.to_ne_bytes());
        request.extend([0; 8]);
        request.extend([libc::AF_UNIX as u8, 0, 0, 0]);
        for word in [states, inode, show, u32::MAX, u32::MAX] {
            request.extend(word.to_ne_bytes());
        }
        send(&self.0, &request, SendFlags::empty()).ok().map(drop)
    }
}

/// Sockets of one datagram.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    sockets: Vec<UnixSocket>,
    is_last: bool,
}

/// Parses a datagram of netlink messages.
fn parse(mut bytes: &[u8]) -> Part {
    let mut part = Part::default();
    while let Some(length) = word_at(bytes, 0) {
        let length = length as usize;
        let Some(message) = bytes.get(..length).filter(|_| length >= NLMSGHDR) else { break };
        match half_at(message, 4) {
            Some(NLMSG_DONE) => part.is_last = true,
            Some(SOCK_DIAG_BY_FAMILY) => part.sockets.extend(parse_socket(&message[NLMSGHDR..])),
            _ => {}
        }
        bytes = bytes.get(aligned(length)..).unwrap_or_default();
    }
    part
}

fn parse_socket(bytes: &[u8]) -> Option<UnixSocket> {
    let inode = word_at(bytes, 4)?;
    let mut socket = UnixSocket { inode, is_listening: bytes[2] == LISTEN, ..UnixSocket::default() };
    let mut rest = bytes.get(UNIX_DIAG_MSG..).unwrap_or_default();
    while let (Some(length), Some(kind)) = (half_at(rest, 0), half_at(rest, 2)) {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else { break };
        match kind {
            UNIX_DIAG_NAME => socket.name = name_of(value),
            UNIX_DIAG_PEER => socket.peer = word_at(value, 0),
            UNIX_DIAG_ICONS => socket.pending = (0..value.len() / 4).filter_map(|at| word_at(value, at * 4)).collect(),
            _ => {}
        }
        rest = rest.get(aligned(length)..).unwrap_or_default();
    }
    Some(socket)
}

/// Returns a path, or `@` and the name of an abstract socket.
pub(in crate::objects) fn name_of(bytes: &[u8]) -> Option<String> {
    let (begins, name) = match bytes {
        [0, name @ ..] => ("@", name),
        path => ("", path.split(|&byte| byte == 0).next().unwrap_or_default()),
    };
    (!name.is_empty()).then(|| format!("{begins}{}", String::from_utf8_lossy(name)))
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4).max(4)
}

fn word_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn half_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|half| u16::from_ne_bytes(*half))
}

#[cfg(any(test, feature = "fuzzing"))]
pub(in crate::objects) fn check(bytes: &[u8]) {
    let part = parse(bytes);
    assert!(part.sockets.len() <= bytes.len() / NLMSGHDR);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn inode_of(descriptor: &impl std::os::fd::AsRawFd) -> u32 {
        let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        std::fs::metadata(link).expect("a socket").ino() as u32
    }

    #[test]
    fn finds_other_end_and_listener() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let client = UnixStream::connect(&path).expect("connected");
        assert!(client.as_raw_fd() >= 0);
        let Some(diag) = UnixDiag::open() else { panic!("this kernel has no sock_diag") };
        let own = diag.find(inode_of(&client)).expect("this socket");
        assert_eq!((own.peer, own.name, own.is_listening), (Some(0), None, false), "not accepted");
        let listening = diag.listening();
        let of = listening.iter().find(|socket| socket.inode == inode_of(&listener)).expect("the listener");
        assert_eq!((of.name.as_deref(), of.pending.as_slice()), (path.to_str(), &[inode_of(&client)][..]));
        let (server, _) = listener.accept().expect("accepted");
        let own = diag.find(inode_of(&client)).expect("this socket");
        assert_eq!(own.peer, Some(inode_of(&server)));
        let other = diag.find(inode_of(&server)).expect("the other end");
        assert_eq!((other.peer, other.name.as_deref()), (Some(inode_of(&client)), path.to_str()));
        assert_eq!(diag.find(1), None);
        let late = inode_of(&listener);
        diag.ask(NLM_F_REQUEST, u32::MAX, late, UDIAG_SHOW_NAME).expect("asked");
        assert_eq!(diag.find(inode_of(&client)), Some(own), "behind the answer to an earlier question");
    }

    #[test]
    fn cut_messages_end_the_list() {
        let mut bytes = Vec::new();
        bytes.extend(36_u32.to_ne_bytes());
        bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend([1, 1, LISTEN, 0]);
        bytes.extend(7_u32.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0xff, 0xff, 0, 0]);
        let expected = UnixSocket { inode: 7, is_listening: true, ..UnixSocket::default() };
        assert_eq!(parse(&bytes).sockets, [expected]);
        for end in 0..bytes.len() {
            check(&bytes[..end]);
        }
        check(&[0; 64]);
        assert_eq!((name_of(b"\0a"), name_of(b"/x\0y"), name_of(b"")), (Some("@a".into()), Some("/x".into()), None));
    }
}
