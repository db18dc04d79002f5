// SPDX-License-Identifier: MIT OR Apache-2.0
//! From snapshots to what people and programs read.

pub mod block;
pub mod diff;
pub mod doctor;
pub mod doctor_json;
pub mod footer;
pub mod histogram;
pub mod irqsoff;
pub mod json;
pub mod look;
pub mod lost;
pub mod moment;
pub mod offcpu;
pub mod pad;
pub mod path;
pub mod processes;
pub mod program;
pub mod run;
pub mod selftest;
pub mod sqpoll;
pub mod table;
pub mod timerlat;
pub mod waits;
pub mod why;
pub mod wq;

use std::io::{self, Write};

use whylate_model::{LateEvent, Snapshot};

/// Shows what a source yields, as it comes. Whoever drives the source flushes.
pub trait Output {
    /// Writes what comes before the first figures.
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()>;

    /// Takes a late event as it happens.
    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()>;

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()>;
}
