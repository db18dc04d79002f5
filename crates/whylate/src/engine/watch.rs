// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for the next output, for Ctrl-C, or for a closed standard output.

use std::fs;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Instant;

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The time was reached.
    Time,
    /// A signal.
    Signal,
    /// The reader of the output is gone.
    OutputClosed,
}

/// Watches for SIGINT, SIGTERM and SIGHUP. The first one ends the wait; a second one ends the program at once, in case
/// its output blocks.
pub struct Watch {
    signals: UnixStream,
    reads_output: bool,
}

impl Watch {
    /// Starts watching.
    ///
    /// # Errors
    /// Fails if the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let (signals, sender) = UnixStream::pair()?;
        signals.set_nonblocking(true)?;
        for signal in heard() {
            // The order matters: the first signal finds the flag unset, and sets it.
            let seen = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
            signal_hook::flag::register(signal, seen)?;
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        Ok(Watch { signals, reads_output: true })
    }

    /// Starts watching for signals only, not for a closed standard output.
    ///
    /// # Errors
    /// Fails if the system has no descriptors left.
    pub fn of_signals() -> io::Result<Self> {
        Ok(Watch { reads_output: false, ..Self::new()? })
    }

    /// Watches for the other end of a socket to be closed, instead of signals.
    pub fn of_socket(peer: UnixStream) -> Self {
        Watch { signals: peer, reads_output: false }
    }

    /// Waits until a time, or forever.
    ///
    /// # Errors
    /// Fails if poll(2) fails.
    pub fn until(&self, until: Option<Instant>) -> io::Result<Ended> {
        let stdout = io::stdout();
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            // poll(2) reports errors of a pipe even without requested events.
            let mut watched = [PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&stdout, PollFlags::empty())];
            let watched = if self.reads_output { &mut watched[..] } else { &mut watched[..1] };
            match poll(watched, timeout.as_ref()) {
                Ok(0) => return Ok(Ended::Time),
                Ok(_) if watched[0].revents().contains(PollFlags::IN) => {
                    // The bytes do not matter; the end means that the other end of a socket is gone.
                    let read = (&self.signals).read(&mut [0; 16]);
                    return Ok(if matches!(read, Ok(0)) { Ended::OutputClosed } else { Ended::Signal });
                }
                Ok(_) => return Ok(Ended::OutputClosed),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns the signals to handle: SIGHUP only if it is not ignored, as by nohup(1).
fn heard() -> impl Iterator<Item = i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let is_heard = move |signal: &i32| *signal != SIGHUP || ignored & (1 << (SIGHUP - 1)) == 0;
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(is_heard)
}

/// Returns a flag that the first termination signal sets, and the signal's number. A second signal ends the program at
/// once.
///
/// # Errors
/// Fails if a signal handler cannot be installed.
pub fn stop_at_signal() -> anyhow::Result<(Arc<AtomicBool>, Arc<AtomicUsize>)> {
    let (stop, by) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    for signal in heard() {
        // The first signal finds the flag unset, and sets it.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&by), signal as usize))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot watch for signals")?;
    }
    Ok((stop, by))
}
