// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzz targets: texts of `/proc` about waits, and answers about Unix sockets.

use super::call::Call;
use super::{fuse, sockets, switches_in};

/// The call of a thread, its switches, sockets of a namespace, and mounts.
pub fn waits_in_proc(text: &str) {
    let _ = Call::parse(text).map(|call| call.target());
    let _ = switches_in(text);
    sockets::check_inet(text);
    fuse::check(text);
}

/// A datagram about Unix sockets.
///
/// # Panics
/// Panics if it has more sockets than there is room for.
pub fn unix_sockets(bytes: &[u8]) {
    sockets::check_unix(bytes);
}
