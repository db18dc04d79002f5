// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzz target: records of late activations.

use super::late;
pub use super::tracer::fuzzing::timerlat_samples;
use crate::cpu_account::fuzzing::with_names;

/// Reads a late activation with its window.
pub fn activations(bytes: &[u8]) {
    with_names(|windows, symbols| late::event_of(bytes, windows, symbols));
}
