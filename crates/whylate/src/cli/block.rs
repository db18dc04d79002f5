// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate block`: latency of I/O requests, and what delays them.

use anyhow::anyhow;
use clap::{ArgGroup, Args};
use whylate_model::units::printable;
use whylate_sources::block::{BlockOptions, By};

use crate::cli::arguments::{Explain, Record, Schedule};
use crate::cli::values::duration_ns;
use crate::cli::{Origin, UsageError};
use crate::engine::late_buffer::Keep;
use crate::engine::runner::{Lates, Query, Stream, drive};
use crate::render::text::block::BlockText;
use crate::render::text::block::shape::{Key, Shape};
use crate::render::text::latency::LatencyOptions;
use crate::render::text::table::terminal_columns;

/// How long I/O requests take, and which requests they wait behind
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    whylate block            # summarize request latency as a histogram per disk
    whylate block 1 10       # print 1 second summaries, 10 times
    whylate block -d sda     # show one disk
    whylate block --table 1  # a row per disk and operation, each second
    whylate block --table --by process
                             # and per submitting process
    whylate block --slower 20ms
                             # a line per request that took 20 ms or longer, as it happens
    whylate block --why 20ms # with its causes, and who caused most of the delay")]
#[command(group = ArgGroup::new("late").args(["slower", "why"]).multiple(true), mut_arg("worst", |worst| worst.requires("why")), mut_arg("duration", |duration| duration.short(None)))]
pub struct Arguments {
    #[command(flatten)]
    shape: Shape,
    /// Measure only this disk (as `lsblk` names it); a duration such as 10s ends the measurement after that time instead
    #[arg(short = 'd', value_name = "DISK|DURATION")]
    disk_or_duration: Vec<String>,
    /// Only requests to this disk
    #[arg(long, visible_alias = "device", value_name = "DISK")]
    disk: Option<String>,
    /// Print a line per request that took at least this long, as it happens (e.g. 20ms)
    #[arg(long, value_name = "LATENCY", value_parser = duration_ns)]
    slower: Option<u64>,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    schedule: Schedule,
    #[command(flatten)]
    record: Record,
    /// What marks the start of a request: fexit, io_start, insert, or auto for the best that works
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
}

impl Arguments {
    /// Returns what is printed.
    fn shown(&self) -> LatencyOptions {
        LatencyOptions {
            explain: self.explain,
            has_slower: self.slower.is_some(),
            lines_only: self.has_lines() && !(self.schedule.json || self.shape.table || self.schedule.repeats()),
        }
    }

    /// Returns the disks given by `--disk` and `-d`. No disk is named like a duration.
    fn disks(&self) -> impl Iterator<Item = &String> {
        self.disk.iter().chain(self.disk_or_duration.iter().filter(|text| duration_ns(text).is_err()))
    }

    fn disk(&self) -> Option<String> {
        self.disks().next().cloned()
    }

    /// Returns the schedule, with a duration given by `-d`.
    pub(crate) fn schedule(&self) -> Schedule {
        let duration = self.disk_or_duration.iter().find_map(|text| duration_ns(text).ok());
        Schedule { duration: self.schedule.duration.or(duration), ..self.schedule }
    }

    /// Returns whether late requests are printed.
    fn has_lines(&self) -> bool {
        self.slower.is_some() || self.explain.why.is_some()
    }

    fn options(&self) -> BlockOptions {
        BlockOptions {
            backend: Some(self.backend.clone()),
            device: self.disk(),
            by: match self.shape.by {
                Some(Key::Process) => By::Process,
                Some(Key::Thread) => By::Thread,
                Some(Key::Cgroup) => By::Cgroup,
                Some(Key::Device | Key::Operation) | None => By::Device,
            },
            late_over_ns: self.slower,
            explain_over_ns: self.explain.why,
            leave_out: Some(std::process::id()),
            phases: self.shape.table || self.shape.phases || self.schedule.json || self.has_lines(),
            ..BlockOptions::default()
        }
    }
}

/// Measures or replays; prints at each interval, and at the end.
///
/// # Errors
/// Fails if the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<()> {
    if arguments.disks().count() > 1 {
        return Err(UsageError(anyhow!("more than one disk is given: name one, or none to measure all of them")).into());
    }
    let schedule = arguments.schedule();
    let (late, disk) = (Lates { slower_ns: arguments.slower, why_ns: arguments.explain.why }, arguments.disk());
    let disk = disk.as_deref().map(|disk| disk.trim_start_matches("/dev/"));
    let query = Query {
        source: &arguments.options(),
        schedule,
        keep: Keep::for_options(schedule, arguments.explain),
        late: arguments.has_lines().then_some(late),
        only: &|labels| disk.is_none_or(|disk| labels.get("device").is_some_and(|device| device == disk)),
    };
    let stream = Stream::open(origin, &query, arguments.record.output.as_deref())?;
    let mut text = BlockText::new(&arguments.shape, arguments.shown(), terminal_columns());
    let mut has_any = false;
    drive(stream, &query, &mut text, &mut |snapshot| {
        has_any |= !snapshot.series.is_empty();
    })?;
    if !has_any {
        let of = arguments.disk().map_or_else(|| "any disk".to_owned(), |disk| printable(&disk));
        say!("whylate: no I/O request to {of} completed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Arguments {
        crate::cli::parsed(line.split_whitespace()).expect("a line that is taken")
    }

    #[test]
    fn d_is_a_disk_or_a_duration() {
        for (line, disk, duration) in [
            ("-d sda", Some("sda"), None),
            ("-d 10s", None, Some(10_000_000_000)),
            ("-d /dev/nvme0n1 -d 2m", Some("/dev/nvme0n1"), Some(120_000_000_000)),
            ("--disk sda --duration 1s", Some("sda"), Some(1_000_000_000)),
            ("1 3", None, None),
        ] {
            let arguments = arguments(line);
            assert_eq!((arguments.disk().as_deref(), arguments.schedule().duration), (disk, duration), "{line}");
        }
    }
}
