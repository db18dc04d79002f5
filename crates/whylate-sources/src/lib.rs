// SPDX-License-Identifier: MIT OR Apache-2.0
//! All contact with the kernel: BPF programs, tracefs, `/proc`. All `unsafe` code of whylate is in this crate.
//!
//! Sources yield plain data of `whylate-model` and never print.

pub mod attach;
pub mod capabilities;
pub mod cgroups;
pub mod clock;
pub mod cpus;
mod distribution;
mod floors;
mod heartbeat;
pub mod inject;
pub mod irqsoff;
mod loaded_code;
#[cfg(test)]
mod lost_reasons;
pub mod mapped;
mod occupancy;
pub mod offcpu;
mod percpu;
mod perf_event;
pub mod realtime;
mod records;
pub mod restore;
mod runnable;
pub mod source;
pub mod sqpoll;
pub mod symbols;
mod syscalls;
pub mod timerlat;
pub mod tracefs;
pub mod wq;

pub use occupancy::Together;
pub use source::{AttachError, Attached, Backend, BackendInfo, By, MapKind, Need, Options, Source, SourceInfo};

/// Every source, in the order in which they are listed.
pub static SOURCES: &[&dyn Source] =
    &[&wq::Wq, &timerlat::Timerlat, &irqsoff::Irqsoff, &offcpu::Offcpu, &sqpoll::Sqpoll];
