// SPDX-License-Identifier: MIT OR Apache-2.0
//! TCP and UDP sockets of a network namespace, from `/proc/PID/net` (proc_pid_net(5)).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use whylate_model::object::{Object, ObjectKind};

use crate::kernel::proc;

/// Maximum bytes of one list: some 27,000 sockets.
const MAX_LIST_BYTES: u64 = 4 << 20;

/// The lists of a namespace.
const LISTS: [(ObjectKind, &str); 4] =
    [(ObjectKind::Tcp, "tcp"), (ObjectKind::Tcp, "tcp6"), (ObjectKind::Udp, "udp"), (ObjectKind::Udp, "udp6")];

/// States of sockets (include/net/tcp_states.h), from 1 on.
const STATES: [&str; 12] = [
    "established",
    "syn_sent",
    "syn_recv",
    "fin_wait1",
    "fin_wait2",
    "time_wait",
    "close",
    "close_wait",
    "last_ack",
    "listening",
    "closing",
    "new_syn_recv",
];
const SYN_SENT: u8 = 2;
const TIME_WAIT: u8 = 6;
const LISTEN: u8 = 10;

/// A socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    kind: ObjectKind,
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    /// 0 for a connection that no process has accepted.
    inode: u64,
}

/// The sockets of a namespace.
#[derive(Debug, Default)]
pub(super) struct Inet(Vec<Row>);

impl Inet {
    /// Reads the sockets of the process's namespace.
    pub(super) fn of_process(pid: u32) -> Self {
        let lists = LISTS.iter().flat_map(|&(kind, name)| {
            let text = proc::text_at_most(format!("/proc/{pid}/net/{name}"), MAX_LIST_BYTES).unwrap_or_default();
            parse(kind, &text)
        });
        Inet(lists.collect())
    }

    /// Returns the socket with this inode.
    pub(super) fn find(&self, inode: u64) -> Option<Row> {
        self.0.iter().copied().find(|row| row.inode == inode)
    }

    /// Returns the inode of the socket at the other end, if it is one of this namespace.
    pub(super) fn peer_of(&self, row: &Row) -> Option<u64> {
        if !row.is_connected() {
            return None;
        }
        let reversed = self.reversed(row);
        match (row.kind, reversed) {
            (_, Some(peer)) if peer.inode > 0 => Some(peer.inode),
            // No process has accepted it: the listener can.
            (ObjectKind::Tcp, Some(_)) => self.only(|other| other.state == LISTEN && other.is_reached_by(row, true)),
            (ObjectKind::Tcp, None) if row.state == SYN_SENT => {
                self.only(|other| other.state == LISTEN && other.is_reached_by(row, row.is_to_own_address()))
            }
            (ObjectKind::Udp, None) => {
                self.only(|other| !other.is_connected() && other.is_reached_by(row, row.is_to_own_address()))
            }
            _ => None,
        }
        .filter(|&inode| inode != row.inode)
    }

    /// Returns the inode of the socket at the other end of a connection of another namespace.
    pub(super) fn peer_of_other(&self, row: &Row) -> Option<u64> {
        // Each namespace has its own loopback addresses.
        let is_local = row.local.ip().is_loopback() || row.remote.ip().is_loopback();
        if is_local || !row.is_connected() {
            return None;
        }
        let peer = self.reversed(row)?;
        if peer.inode > 0 {
            return Some(peer.inode);
        }
        self.only(|other| other.state == LISTEN && other.is_reached_by(row, true))
    }

    fn reversed(&self, row: &Row) -> Option<&Row> {
        let is_it = |other: &&Row| {
            other.kind == row.kind && other.local == row.remote && other.remote == row.local && other.state != TIME_WAIT
        };
        self.0.iter().find(is_it)
    }

    /// Returns the inode of the only socket for which this holds.
    fn only(&self, is_it: impl Fn(&Row) -> bool) -> Option<u64> {
        let mut all = self.0.iter().filter(|row| row.inode > 0 && is_it(row));
        let first = all.next()?;
        all.next().is_none().then_some(first.inode)
    }
}

impl Row {
    fn is_connected(&self) -> bool {
        self.remote.port() != 0 && !self.remote.ip().is_unspecified()
    }

    /// Returns whether the remote address is one of this machine, as far as the socket shows.
    fn is_to_own_address(&self) -> bool {
        self.remote.ip().is_loopback() || self.remote.ip() == self.local.ip()
    }

    /// Returns whether packets from `from` reach this unconnected socket; at any address only if `is_here` holds.
    fn is_reached_by(&self, from: &Row, is_here: bool) -> bool {
        let (own, wanted) = (self.local, from.remote);
        self.kind == from.kind
            && own.port() == wanted.port()
            && (own.ip() == wanted.ip() || is_here && own.ip().is_unspecified())
    }

    /// Describes the socket.
    pub(super) fn object(&self) -> Object {
        let state = match self.kind {
            ObjectKind::Tcp => STATES.get(usize::from(self.state).wrapping_sub(1)),
            _ => None,
        };
        Object {
            inode: Some(self.inode),
            local: Some(self.local.to_string()),
            remote: self.is_connected().then(|| self.remote.to_string()),
            state: state.map(|&state| state.to_owned()),
            ..Object::new(self.kind)
        }
    }

    /// Parses `0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 12345 …`.
    fn parse(kind: ObjectKind, line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let mut nth = |number: usize| words.nth(number);
        let local = parse_address(nth(1)?)?;
        let remote = parse_address(nth(0)?)?;
        let state = u8::from_str_radix(nth(0)?, 16).ok()?;
        let inode = nth(5)?.parse().ok()?;
        Some(Row { kind, local, remote, state, inode })
    }
}

fn parse(kind: ObjectKind, text: &str) -> Vec<Row> {
    text.lines().filter_map(|line| Row::parse(kind, line)).collect()
}

/// Parses an address as the kernel writes it: 32-bit words in the byte order of the machine, and a port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let digits = address.get(at * 8..at * 8 + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    let ip = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (number, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(number)?);
            }
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(any(test, feature = "fuzzing"))]
pub(in crate::objects) fn check(text: &str) {
    let inet = Inet(LISTS.iter().flat_map(|&(kind, _)| parse(kind, text)).collect());
    for row in &inet.0 {
        let _ = (inet.peer_of(row), inet.peer_of_other(row), row.object().to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:D0A4 01 00000000:00000000 00:00000000 00000000     0        0 101 1 0 100 0 0 10 0
   2: 0100007F:D0A4 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 102 1 0 100 0 0 10 0
   3: 0100007F:1F90 0100007F:D0A5 01 00000000:00000000 00:00000000 00000000     0        0 0 1 0 100 0 0 10 0
   4: 0100007F:D0A5 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 103 1 0 100 0 0 10 0
   5: 0200000A:D0A6 01010101:1F90 02 00000000:00000000 00:00000000 00000000     0        0 104 1 0 100 0 0 10 0
   6: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 105 1 0 100 0 0 10 0
   7: 0200000A:D0A7 01010101:0050 02 00000000:00000000 00:00000000 00000000     0        0 106 1 0 100 0 0 10 0
   8: 0100007F:D0A8 0100007F:0050 02 00000000:00000000 00:00000000 00000000     0        0 107 1 0 100 0 0 10 0
";
    const UDP: &str = "\
  461: 3500007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000   101        0 200 2 0000000000000000 0
  462: 0100007F:D431 3500007F:0035 01 00000000:00000000 00:00000000 00000000     0        0 201 2 0000000000000000 0
";

    fn inet() -> Inet {
        Inet([parse(ObjectKind::Tcp, TCP), parse(ObjectKind::Udp, UDP)].concat())
    }

    #[test]
    fn addresses_are_in_byte_order_of_the_machine() {
        let of = |text: &str| parse_address(text).map(|address| address.to_string());
        assert_eq!(of("0100007F:1F90").as_deref(), Some("127.0.0.1:8080"));
        assert_eq!(of("00000000000000000000000001000000:0016").as_deref(), Some("[::1]:22"));
        assert_eq!(of("0000000000000000FFFF00000100007F:0016").as_deref(), Some("127.0.0.1:22"));
        for wrong in ["", ":", "0100007F", "é100007F:1F90", "00000000000000000000000001é00000:1"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn peer_is_the_other_end_or_who_can_accept() {
        let inet = inet();
        let peer = |inode| inet.peer_of(&inet.find(inode).expect("a socket"));
        assert_eq!((peer(102), peer(101)), (Some(101), Some(102)));
        assert_eq!(peer(103), Some(100), "not accepted yet");
        assert_eq!(peer(201), Some(200), "UDP");
        assert_eq!((peer(100), peer(200)), (None, None), "not connected");
        assert_eq!(peer(106), None, "another machine, although a local socket listens on this port");
        assert_eq!(peer(107), Some(105), "this machine");
        assert_eq!(peer(104), None);
    }

    #[test]
    fn peers_in_other_namespaces_have_no_loopback_addresses() {
        let inet = inet();
        let row = inet.find(102).expect("a socket");
        assert_eq!(inet.peer_of_other(&row), None);
        let reversed = "1: 01010101:1F90 0200000A:D0A6 01 0:0 0:0 0 0 0 300";
        let other = Inet(parse(ObjectKind::Tcp, reversed));
        assert_eq!(other.peer_of_other(&inet.find(104).expect("a socket")), Some(300));
    }

    #[test]
    fn object_has_addresses_and_state() {
        let text = |inode| inet().find(inode).expect("a socket").object().to_string();
        assert_eq!(text(102), "TCP 127.0.0.1:53412 -> 127.0.0.1:8080 (established)");
        assert_eq!(text(100), "TCP 127.0.0.1:8080 (listening)");
        assert_eq!(text(201), "UDP 127.0.0.1:54321 -> 127.0.0.53:53");
        check(TCP);
        check("0: 0:0 0:0 0 0:0 0:0 0 0 0 18446744073709551616\n");
    }
}
