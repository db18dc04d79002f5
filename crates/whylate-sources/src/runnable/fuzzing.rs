// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs tell of threads that waited for a CPU.

use crate::fuzzing::with_names;

/// A record with its window.
pub fn waits(bytes: &[u8]) {
    with_names(|windows, symbols| super::described(bytes, None, windows, symbols, true));
}
