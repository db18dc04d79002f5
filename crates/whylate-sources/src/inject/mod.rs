// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known delays on demand, made by BPF: the truth that sources are tested against.

mod reserve;
mod threads;
pub mod work;
