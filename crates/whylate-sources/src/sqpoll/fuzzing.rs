// SPDX-License-Identifier: MIT OR Apache-2.0
//! The text that a ring of any process tells of itself.

/// What /proc/PID/fdinfo has of a ring.
pub fn fdinfo(text: &str) {
    super::fdinfo::parse(text);
}
