// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine that all tests share: exclusive use, CPUs, priorities, and what the kernel supports.

pub mod cpus;
pub mod lock;
pub mod real_time;
