// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records of late ticks.

use super::culprits::Late;
use crate::cpu_account::fuzzing::with_names;
use crate::irqsoff::IrqsoffOptions;

const PERIOD_NS: u64 = 1_000_000;

/// Decodes a record, with and without a window.
pub fn late_ticks(bytes: &[u8]) {
    let Some((late, window)) = Late::read(bytes) else { return };
    let options = IrqsoffOptions { timer_test: true, keep_evidence: true, ..IrqsoffOptions::default() };
    with_names(|windows, symbols| {
        let stack = symbols.stack(&late.stack);
        let occupancy = windows.read(window, symbols);
        late.event(Vec::new(), None, &options, PERIOD_NS, symbols);
        Some(late.event(stack, occupancy, &options, PERIOD_NS, symbols))
    });
}
