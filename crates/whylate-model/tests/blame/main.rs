// SPDX-License-Identifier: MIT OR Apache-2.0
//! Causes of late events: case by case, by properties of any evidence, and against a ground truth. One program, as each
//! takes seconds to link.

mod properties;
mod steal;
mod wq;
