// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/timerlat.rs`, which includes this file.

use super::*;

#[test]
fn parses_output_of_rtla() {
    let text = "# RTLA\nIndex   IRQ-000   Thr-000   IRQ-001   Thr-001\n3      5     0     9   0\n7   6   11    2     0\n9 0 0 0 11\n\
                over:    0 0 0 0\ncount:  11 11 11 11\n";
    let sample = from_rtla(text).expect("read");
    assert_eq!((sample.irq_us, sample.thread_us, sample.activations), ((7.5 + 3.5) / 2.0, (7.5 + 9.5) / 2.0, 22.0));
    assert_eq!(seconds("1m2.50s"), Some(62.5));
}
