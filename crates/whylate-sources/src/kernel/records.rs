// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records that BPF programs send through a ring buffer.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::kernel::attach;
use crate::kernel::error::AttachError;

/// Records as programs wrote them, in order.
pub(crate) struct Records {
    ring: RingBuffer<'static>,
    came: Rc<RefCell<VecDeque<Box<[u8]>>>>,
}

impl Records {
    /// Opens a ring buffer.
    pub(crate) fn new(ring: &dyn MapCore) -> Result<Self, AttachError> {
        let came = Rc::<RefCell<VecDeque<Box<[u8]>>>>::default();
        let theirs = Rc::clone(&came);
        let mut builder = RingBufferBuilder::new();
        builder.add(ring, move |bytes| {
            theirs.borrow_mut().push_back(bytes.into());
            0
        })?;
        Ok(Records { ring: builder.build()?, came })
    }

    /// Reads new records, waiting at most `wait` for the first one.
    pub(crate) fn poll(&self, wait: Duration) -> anyhow::Result<()> {
        attach::poll(&self.ring, wait)
    }

    /// Reads new records, waiting at most `wait` until a program gives notice of one, or until `other` can be read.
    pub(crate) fn poll_with(&self, other: &impl AsFd, wait: Duration) -> anyhow::Result<()> {
        // SAFETY: the ring buffer owns the descriptor and is not dropped before the end of this function.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) };
        let mut awaited = [PollFd::new(&ring, PollFlags::IN), PollFd::new(other, PollFlags::IN)];
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut awaited, Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => self.poll(Duration::ZERO),
            Err(error) => Err(error).context("cannot wait for records"),
        }
    }

    /// Returns the oldest record that was read.
    pub(crate) fn next(&self) -> Option<Box<[u8]>> {
        self.came.borrow_mut().pop_front()
    }
}
