// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recording files: the writers and the reader.
//!
//! A [`Recorder`] has a thread of its own, so that the measuring thread never waits for a disk. It passes frames to a
//! [`destination::Store`]: a file, a directory of files, or memory.

pub mod about;
pub mod destination;
mod directory;
mod file;
pub mod frames;
pub mod late_buffer;
pub mod packer;
pub mod play;
pub mod recorder;
mod ring;
pub mod times;

pub use directory::{DirectoryStore, Retention};
pub use file::FileStore;
pub use play::{Played, Span};
pub use recorder::Recorder;
pub use ring::{RingStore, When};

/// File name extension of recordings.
pub const EXTENSION: &str = "whylate";
