// SPDX-License-Identifier: MIT OR Apache-2.0
//! One connection: reads a request, then writes a reply. Never blocks.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::PollFlags;

use super::listener::Stream;
use super::request::{Reply, Request, Status};

/// Maximum length of a request's head.
const MAX_HEAD_BYTES: usize = 8 << 10;

/// What happened on a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The connection goes on.
    Goes,
    /// A request has arrived.
    Requests(Request),
    /// What has arrived is no request.
    Refused(Status),
    /// The connection is closed, or the reply is written.
    Ended,
}

/// Phase of a connection.
#[derive(Debug)]
enum Phase {
    Reads(Vec<u8>),
    /// The reply is being made.
    Waits,
    Writes(Reply),
    /// The reply was made by the child process.
    WritesMade(Reply),
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    phase: Phase,
    /// When it is closed if it has not ended.
    pub deadline: Instant,
}

impl Connection {
    /// Takes a non-blocking stream.
    pub fn new(stream: Stream, deadline: Instant) -> Self {
        Connection { stream, phase: Phase::Reads(Vec::new()), deadline }
    }

    /// Returns whether the client is a process of this machine that may open the Unix socket.
    pub fn is_local(&self) -> bool {
        matches!(self.stream, Stream::Unix(_))
    }

    /// Returns whether the client has connected to a loopback address.
    pub fn is_loopback(&self) -> bool {
        matches!(&self.stream, Stream::Tcp(stream) if stream.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback()))
    }

    /// Returns whether the reply is being made.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waits)
    }

    /// Returns whether no request has arrived.
    pub fn is_silent(&self) -> bool {
        matches!(self.phase, Phase::Reads(_))
    }

    /// Returns whether a reply is written that the child process has made.
    pub fn writes_made(&self) -> bool {
        matches!(self.phase, Phase::WritesMade(_))
    }

    /// Returns the events to wait for.
    pub fn interest(&self) -> PollFlags {
        match self.phase {
            Phase::Reads(_) => PollFlags::IN,
            // A client that closes its end is noticed.
            Phase::Waits => PollFlags::RDHUP,
            Phase::Writes(_) | Phase::WritesMade(_) => PollFlags::OUT,
        }
    }

    /// Waits for a reply that is being made.
    pub fn wait(&mut self, deadline: Instant) {
        (self.phase, self.deadline) = (Phase::Waits, deadline);
    }

    /// Starts to write a reply.
    pub fn reply(&mut self, reply: Reply, deadline: Instant) {
        (self.phase, self.deadline) = (Phase::Writes(reply), deadline);
    }

    /// Starts to write a reply that the child process has made.
    pub fn reply_made(&mut self, reply: Reply, deadline: Instant) {
        (self.phase, self.deadline) = (Phase::WritesMade(reply), deadline);
    }

    /// Reads or writes what is possible now.
    pub fn advance(&mut self) -> Progress {
        match self.try_advance() {
            Ok(progress) => progress,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Progress::Goes
            }
            Err(_) => Progress::Ended,
        }
    }

    fn try_advance(&mut self) -> io::Result<Progress> {
        match &mut self.phase {
            Phase::Reads(head) => {
                let mut part = [0; 1 << 10];
                let read = self.stream.read(&mut part)?;
                if read == 0 {
                    return Ok(Progress::Ended);
                }
                head.extend_from_slice(&part[..read]);
                Ok(match Request::parse(head) {
                    Ok(Some(request)) => Progress::Requests(request),
                    Ok(None) if head.len() < MAX_HEAD_BYTES => Progress::Goes,
                    Ok(None) => Progress::Refused(Status::TooLarge),
                    Err(status) => Progress::Refused(status),
                })
            }
            Phase::Waits => Ok(Progress::Ended),
            Phase::Writes(reply) | Phase::WritesMade(reply) => {
                while !reply.rest().is_empty() {
                    match self.stream.write(reply.rest())? {
                        0 => return Ok(Progress::Ended),
                        written => reply.advance(written),
                    }
                }
                self.stream.end()?;
                Ok(Progress::Ended)
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
