// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests how the matrix reads what a machine printed, without a machine.

#[allow(dead_code)]
#[path = "matrix/record.rs"]
mod record;
