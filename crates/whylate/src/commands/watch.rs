// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting for the next output, for Ctrl-C, or for the reader of our output to go away.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Instant;

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its time had come.
    Time,
    /// Somebody asked us to end.
    Signal,
    /// Nobody reads our output any more.
    OutputClosed,
}

/// Watches for the signals that ask a program to end. The first one ends the wait; a second one ends the program at
/// once, in case it cannot get rid of its output.
pub struct Watch {
    signals: UnixStream,
}

impl Watch {
    /// Starts watching.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The order matters: the first signal finds the flag unset, and sets it.
            let seen = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
            signal_hook::flag::register(signal, seen)?;
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        Ok(Watch { signals })
    }

    /// Waits until then, or for ever.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn until(&self, until: Option<Instant>) -> io::Result<Ended> {
        let stdout = io::stdout();
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            // Errors of a pipe are reported without being asked for.
            let mut watched = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&stdout, PollFlags::empty())];
            match poll(&mut watched, timeout.as_ref()) {
                Ok(0) => return Ok(Ended::Time),
                Ok(_) if watched[0].revents().contains(PollFlags::IN) => {
                    let mut bytes = [0; 16];
                    // Only whether there was one matters.
                    let _ = (&self.signals).read(&mut bytes);
                    return Ok(Ended::Signal);
                }
                Ok(_) => return Ok(Ended::OutputClosed),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Sets a flag, and tells its number, at the first signal that asks a program to end. A second one ends it at once.
///
/// # Errors
/// When the system does not let signals be watched.
pub fn stop_at_signal() -> anyhow::Result<(Arc<AtomicBool>, Arc<AtomicUsize>)> {
    let (stop, by) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The first signal finds the flag unset, and sets it.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&by), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot watch for signals")?;
    }
    Ok((stop, by))
}
