// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the programs tell of late items.

use super::skel::types::late_item;
use super::{explain, late};
use crate::attach::read_plain;
use crate::fuzzing::with_names;

/// A record alone, and one with what explains it.
pub fn work_items(bytes: &[u8]) {
    if let Some(item) = read_plain::<late_item>(bytes) {
        late::event_of(&item, Vec::new());
    }
    with_names(|windows, symbols| explain::event_of(bytes, windows, symbols, true));
}
