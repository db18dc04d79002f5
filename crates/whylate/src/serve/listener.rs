// SPDX-License-Identifier: MIT OR Apache-2.0
//! Addresses to listen on: TCP, Unix sockets, and sockets that systemd has opened.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, anyhow};
use rustix::fs::Mode;
use rustix::process::{geteuid, umask};
use whylate_model::units::printable;
use whylate_sources::kernel::passed_sockets::{PassedSocket, take_passed_sockets};

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let how = "give the absolute path of a socket, e.g. unix:/run/whylate/serve.sock";
            return if path.starts_with('/') { Ok(Address::Unix(path.into())) } else { Err(how.to_owned()) };
        }
        let how = "give an address with its port, e.g. 127.0.0.1:9797 or [::1]:9797, or unix:PATH";
        // `:9797` is every address for many programs: the user has to say so.
        text.parse().map(Address::Tcp).map_err(|_| how.to_owned())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(out, "{address}"),
            Address::Unix(path) => write!(out, "unix:{}", printable(&path.to_string_lossy())),
        }
    }
}

impl Address {
    /// Returns whether other machines can connect.
    pub fn is_exposed(&self) -> bool {
        matches!(self, Address::Tcp(address) if !address.ip().is_loopback())
    }
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    /// A Unix socket, and the path to remove at the end if this process made it.
    Unix(UnixListener, Option<PathBuf>),
}

/// A client's connection.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    /// Listens on an address.
    ///
    /// # Errors
    /// Fails if the address is in use or not of this machine, or the path is no own socket.
    pub fn bind(address: &Address) -> anyhow::Result<Self> {
        match address {
            Address::Tcp(at) => {
                let listener = TcpListener::bind(at)
                    .with_context(|| format!("cannot listen on {address} (choose another one with --listen)"))?;
                Ok(Listener::Tcp(listener))
            }
            Address::Unix(path) => bind_unix(path).with_context(|| format!("cannot listen on {address}")),
        }
    }

    /// Returns the sockets that systemd has opened for this process.
    ///
    /// # Errors
    /// Fails if one of them is no stream socket.
    pub fn passed() -> anyhow::Result<Vec<Self>> {
        let listener = |passed| match passed {
            PassedSocket::Tcp(listener) => Ok(Listener::Tcp(listener)),
            PassedSocket::Unix(listener) => Ok(Listener::Unix(listener, None)),
            PassedSocket::Other => Err(anyhow!("a socket of the .socket unit is no stream socket (use ListenStream=)")),
        };
        take_passed_sockets().into_iter().map(listener).collect()
    }

    /// Makes accepting not block.
    ///
    /// # Errors
    /// Fails if fcntl(2) fails.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.set_nonblocking(true),
            Listener::Unix(listener, _) => listener.set_nonblocking(true),
        }
    }

    /// Returns the next connection, if there is one.
    ///
    /// # Errors
    /// Fails if no descriptor is left.
    pub fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match self {
            Listener::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                Ok(Stream::Tcp(stream))
            }),
            Listener::Unix(listener, _) => listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }),
        };
        match accepted {
            Ok(stream) => Ok(Some(stream)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the address, for messages.
    pub fn name(&self) -> String {
        match self {
            Listener::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "a passed socket".to_owned(), |at| format!("http://{at}"))
            }
            Listener::Unix(_, Some(path)) => format!("unix:{}", printable(&path.to_string_lossy())),
            Listener::Unix(_, None) => "a passed socket".to_owned(),
        }
    }
}

/// Makes a socket that only its owner can connect to. One without a listener is left from a killed process, and
/// replaced.
fn bind_unix(path: &Path) -> anyhow::Result<Listener> {
    if let Ok(about) = fs::symlink_metadata(path) {
        let is_own_socket = about.file_type().is_socket() && about.uid() == geteuid().as_raw();
        if !is_own_socket {
            return Err(anyhow!("the path exists and is no socket of this user"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(anyhow!("another process listens on it"));
        }
        fs::remove_file(path)?;
    }
    // The mode is there from the start, so that no other user connects in between.
    let before = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener?;
    Ok(Listener::Unix(listener, Some(path.to_owned())))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, Some(path)) = self {
            let _ = fs::remove_file(path);
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener, _) => listener.as_fd(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Ends the reply: nothing follows.
    ///
    /// # Errors
    /// Fails if the client is gone.
    pub fn end(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let tcp = |text: &str| Ok(Address::Tcp(text.parse().expect("an address")));
        assert_eq!("127.0.0.1:9797".parse(), tcp("127.0.0.1:9797"));
        assert_eq!("[::1]:80".parse(), tcp("[::1]:80"));
        assert_eq!("unix:/run/a.sock".parse(), Ok(Address::Unix("/run/a.sock".into())));
        for wrong in ["9797", ":9797", "localhost:9797", "127.0.0.1", "unix:a", ""] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_loopback_is_not_exposed() {
        for (text, is_exposed) in [("127.0.0.2:1", false), ("[::1]:1", false), ("0.0.0.0:1", true), ("[::]:1", true)] {
            assert_eq!(text.parse::<Address>().expect("an address").is_exposed(), is_exposed, "{text}");
        }
    }

    #[test]
    fn socket_left_by_killed_process_is_replaced_and_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.sock");
        drop(UnixListener::bind(&path).expect("a socket"));
        let listener = Listener::bind(&Address::Unix(path.clone())).expect("it is replaced");
        assert_eq!(fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o600);
        assert!(Listener::bind(&Address::Unix(path.clone())).is_err(), "somebody listens");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "text").expect("a file");
        assert!(Listener::bind(&Address::Unix(path.clone())).is_err());
        assert!(path.exists());
    }
}
