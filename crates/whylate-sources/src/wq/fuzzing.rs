// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzz target: records of late items.

use super::skel::types::late_item;
use super::{explain, late};
use crate::cpu_account::fuzzing::with_names;
use crate::kernel::attach::read_plain;

/// Reads a plain record, and one with evidence.
pub fn work_items(bytes: &[u8]) {
    if let Some(item) = read_plain::<late_item>(bytes) {
        late::event_of(&item, Vec::new());
    }
    with_names(|windows, symbols| explain::event_of(bytes, windows, symbols, true));
}
