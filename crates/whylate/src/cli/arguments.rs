// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that several commands share.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use whylate_model::culprits::By;
use whylate_model::late::Thresholds;
use whylate_model::snapshot::Unexplained;
use whylate_model::{Card, LateEvent, Snapshot};

use crate::cli::values::{Cpus, at, duration_ns, seconds_ns, share_ppm};
use crate::cli::{LATE, SUCCESS, UsageError};
use crate::store::Span;
use crate::store::times::{Given, given};

/// Output interval and format, for commands that print at intervals.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Schedule {
    /// Output interval, in seconds
    #[arg(value_parser = seconds_ns)]
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

/// How much is printed, for commands that print figures.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Verbosity {
    /// Also print lost events by reason, and notes on precision
    #[arg(short, long)]
    pub verbose: bool,
}

/// Help text of `--why` for sources that explain run-queue waits.
pub const WAITS: &str =
    "Explain every wait for a CPU of THRESHOLD or more (e.g. 5ms): its causes, and who caused most of the delay";

/// Which latencies are explained and printed, for commands with late events.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Explain {
    /// Explain every latency of THRESHOLD or more (e.g. 5ms): its causes, and who caused most of the delay
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns)]
    pub why: Option<u64>,
    /// Print only the N longest at each output, with their causes; without --why, only those over the source's own limit
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub worst: Option<u16>,
    /// Exit with status 4 if anything was late: over --why if it is given, otherwise over the source's own limit
    #[arg(long)]
    pub fail_if_late: bool,
}

impl Explain {
    /// Returns the thresholds: `--worst` and `--fail-if-late` alone imply `--why` with the source's own limit.
    pub fn with_limit_of(self, card: &Card) -> Self {
        let implies_why = self.worst.is_some() || self.fail_if_late;
        Explain { why: self.why.or(implies_why.then(|| card.events().late_from_ns)), ..self }
    }

    /// Returns the thresholds with that of `--slower`, if the command has the option.
    pub fn thresholds(&self, show_ns: Option<u64>) -> Thresholds {
        Thresholds { show_ns, explain_ns: self.why, worst: self.worst.map(usize::from) }
    }

    /// Returns whether a late event is over `--why`, or over the source's own limit without it.
    pub fn judges_late(&self, card: &Card, event: &LateEvent) -> bool {
        self.why.map_or_else(|| card.is_late(event, &[]), |why_ns| event.latency_ns >= why_ns)
    }

    /// Returns whether a snapshot has something late that is not among its late events: events that came too fast, and
    /// figures over the source's own limit.
    pub fn judges_late_snapshot(&self, card: &Card, snapshot: &Snapshot) -> bool {
        let Unexplained { events, recorded, .. } = snapshot.unexplained;
        // The figures of some sources are not those of their late events.
        let why_ns = self.why.filter(|_| card.events.is_none());
        let late_from_ns = if self.why.is_some() { why_ns } else { Some(card.judged.late_from_ns) };
        events > 0 && recorded.is_none()
            || late_from_ns.is_some_and(|from_ns| (card.figures)(snapshot).count_from(from_ns) > 0)
    }

    /// Returns the exit status.
    pub fn status(&self, is_late: bool) -> u8 {
        if self.fail_if_late && is_late { LATE } else { SUCCESS }
    }
}

/// The span of a recording to read.
#[derive(Clone, Debug, Default, Args)]
pub struct Within {
    /// Start at this time, e.g. 10:00, 10m ago, yesterday 14:30 or 2026-11-26T10:00:00Z
    #[arg(long, value_name = "TIME", value_parser = given)]
    from: Option<Given>,
    /// End at this time
    #[arg(long, value_name = "TIME", value_parser = given)]
    to: Option<Given>,
    /// Only this span, e.g. 10:00..10:05, ..10:05 or 'yesterday 14:30'..; a single time selects the snapshots that
    /// include it
    #[arg(long, value_name = "FROM..TO", value_parser = at, conflicts_with_all = ["from", "to"])]
    at: Option<Span>,
}

impl Within {
    pub fn span(&self) -> Span {
        self.at.clone().unwrap_or_else(|| Span { from: self.from.clone(), to: self.to.clone() })
    }
}

/// File to record to, for commands that print snapshots.
#[derive(Clone, Debug, Default, Args)]
pub struct Record {
    /// Also record to this file (.whylate), for `whylate replay`
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// CPUs and CPU time for whylate itself, for commands that attach all sources.
#[derive(Clone, Debug, Default, Args)]
pub struct OwnCpus {
    /// CPUs on which irqsoff and timerlat measure, with timers and threads of their own, e.g. 0,2-5 [default: all that
    /// whylate may use, except isolated and nohz_full CPUs, and CPUs that run a real-time thread]
    #[arg(short, long, value_name = "CPUS")]
    cpus: Option<Cpus>,
    /// Share of the machine's CPU time that explaining late waits may take; beyond it, late waits are counted without
    /// causes [default: 1%]
    #[arg(long, value_name = "SHARE", value_parser = share_ppm, hide_short_help = true)]
    budget: Option<u32>,
}

impl OwnCpus {
    /// Returns the share of the machine for explaining, in parts per million, if given.
    pub fn explain_ppm(&self) -> Option<u32> {
        self.budget
    }

    /// Returns the CPUs given by the user; empty for the default.
    pub fn asked(&self) -> Vec<u32> {
        self.cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone())
    }
}

/// How culprits are grouped, for commands that rank them.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Rank {
    /// How culprits are ranked [default: name; in JSON and reports: culprit]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub rank_by: Option<RankBy>,
}

impl Rank {
    /// Returns the ranking for JSON and reports, which list each thread unless asked otherwise: their readers can add up those
    /// of one name.
    pub fn by_thread(self) -> By {
        self.rank_by.map_or(By::Culprit, By::from)
    }

    /// Refuses `--rank-by` where no culprits are ranked.
    ///
    /// # Errors
    /// Fails if `--rank-by` is given, and late events are not explained.
    pub fn needs(self, thresholds: Thresholds) -> anyhow::Result<()> {
        match self.rank_by {
            Some(_) if thresholds.explain_ns.is_none() => {
                Err(UsageError(anyhow!("--rank-by ranks the culprits of late events: give --why with it")).into())
            }
            _ => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RankBy {
    /// Each thread by itself
    Culprit,
    /// Threads of one name together; with its TID, if there is only one
    Name,
    /// Threads of one cgroup (pod, container or service) together
    Cgroup,
}

impl From<RankBy> for By {
    fn from(by: RankBy) -> By {
        match by {
            RankBy::Culprit => By::Culprit,
            RankBy::Name => By::Name,
            RankBy::Cgroup => By::Cgroup,
        }
    }
}

impl From<Rank> for By {
    fn from(rank: Rank) -> By {
        rank.rank_by.map_or(By::Name, By::from)
    }
}
