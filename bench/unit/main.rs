// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/main.rs`, which includes this file.

use clap::CommandFactory as _;

use super::*;

#[test]
fn arguments_are_consistent() {
    Benchmark::command().debug_assert();
}
