// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders snapshots and late events as text and JSON.

pub mod block;
pub mod diff;
pub mod doctor;
pub mod doctor_json;
pub mod fit;
pub mod footer;
pub mod histogram;
pub mod irqsoff;
pub mod latency;
pub mod lost;
pub mod next;
pub mod offcpu;
pub mod overview;
pub mod own_cost;
pub mod pad;
pub mod path;
pub mod processes;
pub mod program;
mod reclaim;
pub mod run;
pub mod selftest;
pub mod sqpoll;
pub mod table;
pub mod time_of_day;
pub mod timerlat;
pub mod waits;
pub mod why;
mod work;
pub mod wq;

use std::io::{self, Write};

use whylate_model::{LateEvent, Snapshot};

#[cfg(test)]
use crate::store::late_buffer::{Keep, LateBuffer};

/// Sink of a source's late events and snapshots, as they arrive. The caller flushes the writer.
pub trait Output {
    /// Describes the measurement for a person who waits for its end; `None` if a program reads the output.
    fn activity(&self) -> Option<String> {
        None
    }

    /// Writes the heading of late events, if they are written as they arrive.
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()>;

    /// Receives a late event as it arrives.
    fn late(&mut self, out: &mut dyn Write, event: &LateEvent) -> io::Result<()>;

    fn snapshot(&mut self, out: &mut dyn Write, snapshot: Snapshot) -> io::Result<()>;
}

/// Returns what `write` writes, as text.
pub fn text_of(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    let mut bytes = Vec::new();
    match write(&mut bytes) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => error.to_string(),
    }
}

/// Returns what `write` writes on terminals of 80, 100 and 160 columns, below a heading each. `tests/screens.rs` checks
/// the snapshots that begin so.
#[cfg(test)]
pub fn screens_of(write: impl Fn(&mut dyn Write, Option<usize>) -> io::Result<()>) -> String {
    let screen = |columns| {
        let text = text_of(|out| {
            let mut fit = fit::Fit::new(out, Some(columns));
            write(&mut fit, Some(columns))?;
            fit.flush()
        });
        format!("=== {columns} columns\n{text}")
    };
    [80, 100, 160].map(screen).concat()
}

/// Returns the whole output of late events, followed by a snapshot with those that it keeps.
#[cfg(test)]
pub fn whole_output(output: &mut dyn Output, keep: Keep, late: Vec<LateEvent>, mut snapshot: Snapshot) -> String {
    let mut kept = LateBuffer::new(keep);
    text_of(|out| {
        output.begin(out)?;
        for event in late {
            output.late(out, &event)?;
            kept.add(event);
        }
        kept.move_into(&mut snapshot);
        output.snapshot(out, snapshot)
    })
}
