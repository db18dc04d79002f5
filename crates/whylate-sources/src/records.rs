// SPDX-License-Identifier: MIT OR Apache-2.0
//! What BPF programs send through a ring buffer, record by record.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};

use crate::attach;
use crate::source::AttachError;

/// Records as programs wrote them, in order.
pub(crate) struct Records {
    ring: RingBuffer<'static>,
    came: Rc<RefCell<VecDeque<Box<[u8]>>>>,
}

impl Records {
    /// Those of a ring buffer.
    pub(crate) fn of(ring: &dyn MapCore) -> Result<Self, AttachError> {
        let came = Rc::<RefCell<VecDeque<Box<[u8]>>>>::default();
        let theirs = Rc::clone(&came);
        let mut builder = RingBufferBuilder::new();
        builder.add(ring, move |bytes| {
            theirs.borrow_mut().push_back(bytes.into());
            0
        })?;
        Ok(Records { ring: builder.build()?, came })
    }

    /// Takes in what has been sent, and waits at most so long for the first one.
    pub(crate) fn poll(&self, wait: Duration) -> anyhow::Result<()> {
        attach::poll(&self.ring, wait)
    }

    /// The oldest one that was taken in.
    pub(crate) fn next(&self) -> Option<Box<[u8]>> {
        self.came.borrow_mut().pop_front()
    }
}
