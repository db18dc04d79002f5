// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measurements side by side with the tools users have today.
fn main() {}
