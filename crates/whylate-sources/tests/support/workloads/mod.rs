// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads of known effect.

pub mod disturbances;
pub mod paced_ring;
pub mod ping_pong;
pub mod work_items;
