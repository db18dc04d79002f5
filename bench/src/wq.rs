// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of watching work items with whylate, and with the usual bpftrace one-liner, on the same load.

mod cost;
mod footprint;
mod report;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::figures::Check;
use crate::{kernel, machine, results, whylate};

/// Limits of the other figures.
const START_LIMIT_MS: f64 = 150.0;
const MEMORY_LIMIT_MB: f64 = 30.0;

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    if machine::is_skipped(&[("bpftrace", "no bpftrace to compare with")]) {
        return Ok(true);
    }
    let whylate = whylate::build("bench-wq")?;
    if let Some(reason) = lack_of_load(&whylate) {
        println!("skipped: {reason}");
        return Ok(true);
    }
    // Before the rounds: what the first start reads is in the page cache from the build.
    let mut checks = vec![Check::new(
        "start to first output of `whylate wq`, median of 10",
        footprint::start_ms(&whylate)?,
        "ms",
        START_LIMIT_MS,
    )];
    for options in [["wq", "-W", "1"], ["wq", "--json", "1"]] {
        let what = format!("peak resident memory of `whylate {}` after 10,000 items", options.join(" "));
        checks.push(Check::new(what, footprint::peak_mb(&whylate, &options)?, "MB", MEMORY_LIMIT_MB));
    }
    let _counting = kernel::count_run_times()?;
    let rounds = cost::measure(&whylate, arguments.rounds)?;

    let heading = results::heading("`whylate wq`", "bench-wq", &format!("wq --rounds {}", arguments.rounds));
    let heading = format!("{heading}- backend of `whylate wq`: {}\n", backend(&whylate)?);
    let text = report::markdown(&rounds, &checks, arguments.rounds, &heading);
    arguments.publish("wq", &text)?;
    Ok(report::within_limits(&rounds, &checks))
}

/// Returns why no work items can be injected, e.g. on a kernel without `bpf_wq`.
fn lack_of_load(whylate: &Path) -> Option<String> {
    match Command::new(whylate).args(["inject", "work"]).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("cannot run whylate: {error}")),
    }
}

/// Returns the backend, on which the cost depends.
fn backend(whylate: &Path) -> Result<String> {
    let output = Command::new(whylate).args(["wq", "--json", "--duration", "100ms"]).output();
    let output = output.context("cannot run whylate")?.stdout;
    let line: serde_json::Value = serde_json::from_slice(&output).context("whylate does not tell its backend")?;
    Ok(line["backend"].as_str().unwrap_or("unknown").to_owned())
}

/// Figures of a load that has run.
struct Load {
    /// Items that waited together: fewer than requested if the kernel is briefly short of memory.
    at_once: u64,
    items_per_second: f64,
}

/// Injects work items, `at_once` of them waiting together. Fails if not all have run.
fn inject(whylate: &Path, items: u64, at_once: u64) -> Result<Load> {
    let (items_text, at_once_text) = (items.to_string(), at_once.to_string());
    let output = Command::new(whylate)
        .args(["inject", "work", "--json", "--items", &items_text, "--at-once", &at_once_text])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot inject work")?;
    let record: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("the load does not tell what it did")?;
    let number = |name: &str| record[name].as_u64().with_context(|| format!("the load does not tell {name}"));
    let executed = number("executed")?;
    if executed != items {
        bail!("the load ran {executed} items, not {items}");
    }
    let span_ns = number("last_end_monotonic_ns")?.saturating_sub(number("first_queue_monotonic_ns")?);
    Ok(Load { at_once: number("at_once")?, items_per_second: items as f64 * 1e9 / span_ns.max(1) as f64 })
}
