// SPDX-License-Identifier: MIT OR Apache-2.0
//! systemd's protocols for services: sockets that it has opened (sd_listen_fds(3)), and readiness (sd_notify(3)).

use std::env;
use std::net::TcpListener;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::process::getpid;

/// First passed descriptor (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;
/// Maximum number of sockets that are taken.
const MAX_SOCKETS: i32 = 64;

/// A socket that was passed to this process.
#[derive(Debug)]
pub enum PassedSocket {
    /// Listens on a TCP port.
    Tcp(TcpListener),
    /// Listens on a path.
    Unix(UnixListener),
    /// Does not listen, or is of another kind.
    Other,
}

/// Returns the sockets that systemd has passed to this process. Returns each at the first call only.
pub fn take_passed_sockets() -> Vec<PassedSocket> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name| env::var(name).ok().and_then(|number| number.parse::<i32>().ok());
    // Without the check of the PID, a child of the service would take them.
    let is_for_this_process = number("LISTEN_PID") == Some(getpid().as_raw_nonzero().get());
    if !is_for_this_process || IS_TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, MAX_SOCKETS);
    (FIRST..FIRST + count).map(take).collect()
}

#[allow(unsafe_code)]
fn take(number: i32) -> PassedSocket {
    // SAFETY: by the protocol above, this descriptor was opened for this process before it started, and nothing else
    // here owns it: it is taken once.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    // No child process needs it.
    if fcntl_setfd(&descriptor, FdFlags::CLOEXEC).is_err() || !socket_acceptconn(&descriptor).unwrap_or(false) {
        return PassedSocket::Other;
    }
    match socket_domain(&descriptor) {
        Ok(AddressFamily::INET | AddressFamily::INET6) => PassedSocket::Tcp(descriptor.into()),
        Ok(AddressFamily::UNIX) => PassedSocket::Unix(descriptor.into()),
        _ => PassedSocket::Other,
    }
}

/// Notifies the service manager that the service is ready, if it has asked for that. Errors are ignored, as it goes on
/// without.
pub fn notify_ready() {
    let Some(name) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let _ = UnixDatagram::unbound().and_then(|socket| socket.send_to_addr(b"READY=1", &address?));
}
