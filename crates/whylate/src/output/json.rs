// SPDX-License-Identifier: MIT OR Apache-2.0
//! One JSON object a line.

use std::io::{self, Write};

use serde::Serialize;

/// Writes `value` on one line and flushes, so that a reader has it at once.
///
/// # Errors
/// Those of the writer.
pub fn write_line(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)?;
    out.flush()
}
