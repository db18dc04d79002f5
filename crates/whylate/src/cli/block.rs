// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate block`: latency of I/O requests, and what delays them.

use clap::Args;
use whylate_model::late::Thresholds;
use whylate_model::sources::BLOCK;
use whylate_model::units::printable;
use whylate_sources::block::{BlockOptions, By};

use crate::cli::arguments::{Explain, Rank, Record, Schedule, Verbosity};
use crate::cli::runner::{Query, Stream, drive};
use crate::cli::values::duration_ns;
use crate::cli::{FAILURE, Origin};
use crate::render::text::block::BlockText;
use crate::render::text::block::shape::{Key, Shape};
use crate::render::text::fit::terminal_columns;
use crate::render::text::latency::LatencyOptions;
use crate::store::late_buffer::Keep;

/// How long I/O requests take, and which requests they wait behind
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # request latency as a histogram per disk, at Ctrl-C
    whylate block
    # 1 second summaries, 10 times
    whylate block 1 10
    # one disk
    whylate block --disk sda
    # a row per disk and operation, each second
    whylate block --table 1
    # a row per submitting process
    whylate block --table --by process 1
    # a line per request that took 20 ms or longer, as it happens
    whylate block --slower 20ms
    # also the causes of each, and who caused most of the delay
    whylate block --why 20ms
    # the 5 longest requests of a minute, explained
    whylate block --worst 5 -d 1m")]
#[command(
    mut_arg("duration", |duration| duration.value_parser(duration_not_disk)),
    mut_arg("verbose", |verbose| verbose.help("Also print all phases, the flags and the sector of each late request, and lost events by reason"))
)]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Only requests to this disk, as `lsblk` names it
    #[arg(long, visible_alias = "device", value_name = "DISK")]
    disk: Option<String>,
    /// Print each request that took at least this long, as it happens (e.g. 20ms)
    #[arg(long, value_name = "LATENCY", value_parser = duration_ns)]
    slower: Option<u64>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    #[command(flatten)]
    schedule: Schedule,
    #[command(flatten)]
    verbosity: Verbosity,
    #[command(flatten)]
    record: Record,
    /// What marks the start of a request: fexit, io_start, insert, or auto for the best that works
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
}

/// Parses a duration, and names the option for disks to users of other tools.
fn duration_not_disk(text: &str) -> Result<u64, String> {
    let is_name = !text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if is_name { Err("this is a duration, e.g. 10s: name a disk with --disk".to_owned()) } else { duration_ns(text) }
}

impl Arguments {
    /// Returns what is printed.
    pub(crate) fn shown(&self) -> LatencyOptions {
        LatencyOptions {
            thresholds: self.thresholds(),
            rank_by: self.rank.into(),
            lines_only: self.has_lines() && !(self.schedule.json || self.shape.table || self.schedule.repeats()),
            is_verbose: self.verbosity.verbose,
        }
    }

    fn thresholds(&self) -> Thresholds {
        self.explain.with_limit_of(&BLOCK).thresholds(self.slower)
    }

    /// Returns whether late requests are printed.
    fn has_lines(&self) -> bool {
        self.thresholds().min_ns().is_some()
    }

    fn options(&self) -> BlockOptions {
        BlockOptions {
            backend: Some(self.backend.clone()),
            device: self.disk.clone(),
            by: match self.shape.by {
                Some(Key::Process) => By::Process,
                Some(Key::Thread) => By::Thread,
                Some(Key::Cgroup) => By::Cgroup,
                Some(Key::Device | Key::Operation) | None => By::Device,
            },
            late_over_ns: self.slower,
            explain_over_ns: self.thresholds().explain_ns,
            leave_out: Some(std::process::id()),
            phases: self.shape.table || self.shape.phases || self.schedule.json || self.has_lines(),
            ..BlockOptions::default()
        }
    }
}

/// Measures or replays; prints at each interval, and at the end. Returns the exit status.
///
/// # Errors
/// Fails if the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    let thresholds = arguments.thresholds();
    arguments.rank.needs(thresholds)?;
    let disk = arguments.disk.as_deref().map(|disk| disk.trim_start_matches("/dev/"));
    let query = Query {
        source: &arguments.options(),
        schedule: arguments.schedule,
        explain: arguments.explain,
        is_verbose: arguments.verbosity.verbose,
        keep: Keep::for_output(arguments.schedule.json, thresholds),
        late: arguments.has_lines().then_some(thresholds),
        only: &|labels| disk.is_none_or(|disk| labels.get("device").is_some_and(|device| device == disk)),
    };
    let stream = Stream::open(origin, &query, arguments.record.output.as_deref())?;
    let mut text = BlockText::new(&arguments.shape, arguments.shown(), terminal_columns(), stream.next(origin));
    let mut has_any = false;
    let is_late = drive(stream, &query, &mut text, &mut |snapshot| {
        has_any |= !snapshot.series.is_empty();
    })?;
    if !has_any {
        let of = disk.map_or_else(|| "any disk".to_owned(), printable);
        say!("whylate: no I/O request to {of} completed");
        // A disk that is measured exists; a recording may be without it.
        if disk.is_some() && !origin.is_live() {
            return Ok(FAILURE);
        }
    }
    Ok(arguments.explain.status(is_late))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Result<Arguments, clap::Error> {
        crate::cli::parsed(line.split_whitespace())
    }

    #[test]
    fn d_is_a_duration_and_names_the_option_for_disks() {
        let timed = arguments("-d 10s --disk sda").expect("a line that is taken");
        assert_eq!((timed.disk.as_deref(), timed.schedule.duration), (Some("sda"), Some(10_000_000_000)));
        for line in ["-d sda", "-d /dev/nvme0n1"] {
            let error = arguments(line).expect_err("a disk").to_string();
            assert!(error.contains("name a disk with --disk"), "{error}");
        }
        assert!(arguments("-d 10").expect_err("no unit").to_string().contains("add a unit (10ms, 10s)"));
    }

    #[test]
    fn worst_alone_has_the_sources_own_limit() {
        let worst = arguments("--worst 3").expect("a line that is taken");
        assert_eq!(worst.options().explain_over_ns, Some(BLOCK.events().late_from_ns));
    }
}
