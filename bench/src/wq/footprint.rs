// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of `whylate wq` besides that of each item: startup time and memory.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::{cost, inject};
use crate::child::Tool;
use crate::figures::median;

const STARTS: usize = 10;
const ITEMS: u64 = 10_000;

/// Returns the median time from starting the program to the first byte of its output.
pub fn start_ms(whylate: &Path) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut tool = Tool::start(whylate, &["wq"])?;
        times.push(tool.first_output()?.as_secs_f64() * 1e3);
        tool.end()?;
    }
    Ok(median(&times))
}

/// Returns the peak memory once it has counted the items and printed them; `options` have an interval of a second.
pub fn peak_mb(whylate: &Path, options: &[&str]) -> Result<f64> {
    let mut tool = Tool::start(whylate, options)?;
    tool.first_output()?;
    inject(whylate, ITEMS, cost::LOADS[1])?;
    // The next output, and some time to make it.
    thread::sleep(Duration::from_millis(1500));
    let peak_kib = tool.peak_kib()?;
    tool.end()?;
    Ok(peak_kib * 1024.0 / 1e6)
}
