// SPDX-License-Identifier: MIT OR Apache-2.0
//! Iterators of the kernel over all threads.

use std::io::{ErrorKind, Read as _};

use anyhow::Context as _;
use libbpf_rs::{Iter, Link};

/// Runs an iterator over all threads, and passes on its output.
pub(crate) fn iterate(link: &Link, mut each: impl FnMut(&[u8])) -> anyhow::Result<()> {
    let mut iterator = Iter::new(link).context("cannot walk over the threads")?;
    let mut buffer = vec![0; 32 << 10];
    loop {
        match iterator.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(bytes) => each(&buffer[..bytes]),
            // EAGAIN after a million threads since the last read, or a signal.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error).context("cannot walk over the threads"),
        }
    }
}
