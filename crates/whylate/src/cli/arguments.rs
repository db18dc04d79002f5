// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use whylate_model::culprits::By;

use crate::cli::values::{Cpus, duration_ns};

/// Output interval and format, for commands that print at intervals.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Schedule {
    /// Output interval, in seconds
    #[arg(value_parser = duration_ns)]
    pub interval: Option<u64>,
    /// Number of outputs
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after this time (e.g. 10s, 5m, 1h)
    #[arg(short, long, value_parser = duration_ns)]
    pub duration: Option<u64>,
    /// Print one JSON object per output, each on one line
    #[arg(long)]
    pub json: bool,
}

impl Schedule {
    /// Returns whether there is more than one output.
    pub fn repeats(&self) -> bool {
        self.interval.is_some()
    }

    /// Returns whether the run ends by itself or prints at intervals.
    pub fn lasts(&self) -> bool {
        self.interval.is_some() || self.duration.is_some()
    }
}

/// Help text of `--why` for sources that explain run-queue waits.
pub const WAITS: &str =
    "Explain each wait for a CPU this long or longer (e.g. 5ms): its causes, which add up to it, and the main culprits";

/// Which latencies are explained and printed, for commands with late events.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Explain {
    /// Explain each latency this long or longer (e.g. 5ms): its causes, which add up to it, and the main culprits
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns)]
    pub why: Option<u64>,
    /// With --why: print only the N longest at each output, longest first
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub worst: Option<u16>,
}

/// File to record to, for commands that print snapshots.
#[derive(Clone, Debug, Default, Args)]
pub struct Record {
    /// Also record to this file (.whylate), for `whylate replay`
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// CPUs for whylate's own threads and timers, for commands that attach all sources.
#[derive(Clone, Debug, Default, Args)]
pub struct OwnCpus {
    /// CPUs on which irqsoff and timerlat measure, with timers and threads of their own, e.g. 0,2-5 [default: those that
    /// whylate may use, without isolated and nohz_full ones and those where a real-time thread runs]
    #[arg(short, long, value_name = "CPUS")]
    cpus: Option<Cpus>,
}

impl OwnCpus {
    /// Returns the CPUs given by the user; empty for the default.
    pub fn asked(&self) -> Vec<u32> {
        self.cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone())
    }
}

/// How culprits are grouped, for commands that rank them.
#[derive(Clone, Copy, Debug, Args)]
pub struct Rank {
    /// Rank each culprit separately, threads with the same name together, or threads by cgroup (which pod, container or
    /// service delays the others)
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = RankBy::Culprit)]
    pub by: RankBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RankBy {
    Culprit,
    Name,
    Cgroup,
}

impl From<Rank> for By {
    fn from(rank: Rank) -> By {
        match rank.by {
            RankBy::Culprit => By::Culprit,
            RankBy::Name => By::Name,
            RankBy::Cgroup => By::Cgroup,
        }
    }
}
