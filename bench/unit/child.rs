// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/child.rs`, which includes this file.

use super::*;

#[test]
fn finds_peak_memory() {
    assert_eq!(find_kib("VmPeak:\t   9999 kB\nVmHWM:\t    5120 kB\n", PEAK), Some(5120.0));
    assert_eq!(find_kib("Name:\tkthreadd\n", PEAK), None);
}
