// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of `whylate block` for histograms and tables of latencies: grouping and order.

use clap::{Args, ValueEnum};

/// Histograms or a table.
#[derive(Debug, Args)]
pub struct Shape {
    /// Print a histogram of each phase: throttled, queued, at the device, completion
    #[arg(long)]
    pub phases: bool,
    /// Print a row per disk and operation: rates, latency, and the mean of each phase
    #[arg(long)]
    pub table: bool,
    /// Column that orders the table
    #[arg(long, value_enum, default_value_t = Sort::Max, requires = "table")]
    pub sort: Sort,
    /// What rows and histograms are grouped by (default: device, which is the disk; with --table, operation)
    #[arg(long, value_enum)]
    pub by: Option<Key>,
}

/// Key by which series are distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Key {
    #[value(alias = "disk")]
    Device,
    /// Disk and operation
    #[value(alias = "op")]
    Operation,
    /// The submitting process
    Process,
    /// The submitting thread; writeback and some file systems have threads of their own
    #[value(alias = "file-system-thread")]
    Thread,
    /// The cgroup that requests are charged to
    Cgroup,
}

/// The column that orders the table, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    Count,
    Bytes,
    Mean,
    P50,
    P99,
    Max,
    /// By name, A to Z
    Name,
}
