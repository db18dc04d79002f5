// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records of threads that waited for a CPU.

use crate::cpu_account::fuzzing::with_names;

/// Decodes a record with its window.
pub fn waits(bytes: &[u8]) {
    with_names(|windows, symbols| super::late_event(bytes, [None, None], windows, symbols, true));
}
