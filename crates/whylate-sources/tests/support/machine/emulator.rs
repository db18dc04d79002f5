// SPDX-License-Identifier: MIT OR Apache-2.0
//! Emulated kernels, where no time is exact.

/// Returns whether this kernel runs on an emulator. The host may then stop a CPU for milliseconds between any two
/// instructions, or between two records of one event: of many comparisons the typical one counts, not the worst.
pub fn is_emulated() -> bool {
    std::env::var_os("WHYLATE_EMULATED").is_some()
}
