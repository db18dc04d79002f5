// SPDX-License-Identifier: MIT OR Apache-2.0
//! All contact with the kernel: BPF programs, tracefs, `/proc`. All `unsafe` code of whylate is in this crate.
//!
//! Sources yield plain data of `whylate-model` and never print.

pub mod source;

pub use source::{AttachError, Attached, Backend, BackendInfo, By, MapKind, Need, Options, Source, SourceInfo};
