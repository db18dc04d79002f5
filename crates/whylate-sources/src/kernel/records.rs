// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records that BPF programs send through a ring buffer.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};

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

    /// Returns the oldest record that was read.
    pub(crate) fn next(&self) -> Option<Box<[u8]>> {
        self.came.borrow_mut().pop_front()
    }
}
