// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time from the last walk over the threads to their flame graph, and time to symbolize many kernel addresses.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use whylate_sources::kernel::symbols::KernelSymbols;

use crate::child::Tool;
use crate::sleepers;

pub const THREADS: u32 = 10_000;
pub const CALL_SITES: u32 = 500;
/// Bits of a number below `CALL_SITES`.
const DESCENTS: u32 = 9;
/// Long enough to walk over all threads.
const SAMPLING: Duration = Duration::from_millis(1500);
pub const ADDRESSES: usize = 100_000;

/// Returns the milliseconds from SIGINT to the end of `whylate offcpu -o x.svg`: the last walk, symbolization and the
/// graph.
pub fn first_graph_ms(whylate: &Path) -> Result<f64> {
    let _sleepers = sleepers::start(THREADS, DESCENTS, CALL_SITES)?;
    let directory = tempfile::tempdir()?;
    let svg = directory.path().join("first.svg");
    let tool = Tool::start(whylate, &["offcpu", "-o", &svg.to_string_lossy()])?;
    thread::sleep(SAMPLING);
    let began = Instant::now();
    tool.end()?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let drawn = fs::read_to_string(&svg).context("it wrote no flame graph")?;
    ensure!(drawn.contains("descend") || drawn.contains("::left"), "the threads are not in the flame graph");
    Ok(ms)
}

/// Returns the milliseconds to symbolize [`ADDRESSES`] in as many functions as possible, without a cache.
pub fn names_ms() -> Result<f64> {
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    let functions: BTreeSet<u64> = symbols
        .lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            matches!(words.next()?, "t" | "T").then_some(address)
        })
        .collect();
    ensure!(functions.len() > 10_000, "the kernel does not tell where its functions are");
    // Within functions, as return addresses are, and several per function if there are fewer functions than addresses.
    let wanted: BTreeSet<u64> =
        (1..).flat_map(|offset| functions.iter().map(move |at| at + offset)).take(ADDRESSES).collect();
    let mut names = KernelSymbols::default();
    let began = Instant::now();
    names.look_up_all(&wanted);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let unnamed = wanted.iter().filter(|&&at| names.name(at).starts_with("0x")).count();
    ensure!(unnamed * 100 < ADDRESSES, "{unnamed} addresses have no name");
    Ok(ms)
}
