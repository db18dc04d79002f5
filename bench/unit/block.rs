// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/block.rs`, which includes this file.

use super::*;

#[test]
fn sums_lost_events() {
    assert!((lost_events("lost 12 events on CPU #0\nlost 3 events on CPU #1\nlibbpf: lost\n") - 15.0).abs() < 1e-9);
    assert!(lost_events("").abs() < 1e-9);
}
