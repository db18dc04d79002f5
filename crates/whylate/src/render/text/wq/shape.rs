// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of `whylate wq` for histograms and tables of latencies: grouping and order.

use clap::{Args, ValueEnum};

/// Histograms or a table.
#[derive(Debug, Args)]
pub struct Shape {
    /// Print a histogram per work handler
    #[arg(short = 'W', long)]
    pub works: bool,
    /// Print a histogram of each phase: waiting for max_active, waiting for a worker, running, on a CPU, asleep, ready
    #[arg(long)]
    pub phases: bool,
    /// Print a row per handler with its latency and run time
    #[arg(long)]
    pub table: bool,
    /// Column that orders the table
    #[arg(long, value_enum, default_value_t = Sort::Max, requires = "table")]
    pub sort: Sort,
    /// What rows and histograms are grouped by
    #[arg(long, value_enum)]
    pub by: Option<By>,
}

impl Shape {
    /// Returns the label that series are grouped by; `None` for a single series.
    pub fn label(&self) -> Option<&'static str> {
        self.by.filter(|by| *by != By::Cgroup).map(By::label)
    }

    /// Returns whether culprits are ranked by their cgroup, by the former name of `--rank-by cgroup`.
    pub fn by_cgroup(&self) -> bool {
        self.by == Some(By::Cgroup)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    Handler,
    Workqueue,
    Cpu,
    Pool,
    #[value(hide = true)]
    Cgroup,
}

impl By {
    /// Returns the label of series.
    pub const fn label(self) -> &'static str {
        match self {
            By::Handler => "handler",
            By::Workqueue => "workqueue",
            By::Cpu => "cpu",
            By::Pool => "pool",
            By::Cgroup => "cgroup",
        }
    }
}

/// The column that orders the table, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    Count,
    Mean,
    P50,
    P99,
    Max,
    /// Longest run time
    Runtime,
    /// By name, A to Z
    Name,
}
