// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recordings as files: who writes them, and what is played from them.
//!
//! A [`Recorder`] is a thread of its own: whoever measures never waits for a disk. It hands frames to a [`store::Store`]:
//! a file, a folder of files, or memory.

pub mod about;
mod file;
mod folder;
pub mod frames;
pub mod packer;
pub mod play;
pub mod recorder;
mod ring;
pub mod store;
pub mod times;

pub use play::{Played, Span};
pub use recorder::Recorder;

/// What such files are called.
pub const EXTENSION: &str = "whylate";
