// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions from snapshots to what people and programs read.
