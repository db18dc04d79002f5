// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the matrix reads what a machine printed, which needs no machine.

#[allow(dead_code)]
#[path = "matrix/record.rs"]
mod record;
