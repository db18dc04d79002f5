// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject block`: disk reads with known latency.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use serde::Serialize;
use whylate_model::sources::BLOCK;
use whylate_model::units::{format_ns, printable};
use whylate_sources::inject::requests::{self, Plan, Report, folder_on_disk};

use crate::cli::UsageError;
use crate::cli::values::duration_ns;
use crate::json::write_line;

/// Read blocks from a disk and measure how long each read takes.
///
/// It reads an unnamed temporary file with direct I/O, so each read is one disk request. With --hogs,
/// threads named whylate-hog keep the disk busy with 512 KiB writes.
///
/// With --loop, the file is a loop device until the command ends, and no other process sends it requests. With
/// --limit, the reading thread (with cgroup v2, the whole process) is in a cgroup /whylate-inject-PID; the kernel
/// throttles its reads (io.max, or blkio.throttle with cgroup v1). Both need root.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # 100 reads, one every 10 ms
    whylate inject block
    # the same while 16 threads write
    whylate inject block --hogs 16
    # throttle to 20 reads a second: about 50 ms each on average
    whylate inject block --limit 20
    # on a loop device, to be watched with `whylate block --disk loop0`
    whylate inject block --loop --limit 20
    # as JSON, for a script
    whylate inject block --json")]
pub struct Arguments {
    /// Number of blocks of 4 KiB to read.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=requests::MAX_READS))]
    reads: u64,
    /// Time from the start of one read to the start of the next.
    #[arg(long = "every", value_name = "DURATION", default_value = "10ms", value_parser = duration_ns)]
    every_ns: u64,
    /// Number of threads that write at the same time.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=i64::from(requests::MAX_HOGS)))]
    hogs: u32,
    /// Read from a temporary loop device backed by the file, not from the disk that has the file.
    #[arg(long = "loop")]
    is_loop: bool,
    /// Throttle to this many reads a second, with a cgroup for this purpose.
    #[arg(long = "limit", value_name = "IOPS", value_parser = clap::value_parser!(u32).range(1..))]
    reads_a_second: Option<u32>,
    /// Directory for the file (default: the first of /var/tmp, /tmp and the current directory that is on a disk).
    #[arg(long, value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
    /// Print one JSON object per read, and one at the end.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ReadRecord<'a> {
    kind: &'static str,
    disk: &'a str,
    start_unix_ns: u64,
    start_monotonic_ns: u64,
    took_ns: u64,
}

#[derive(Serialize)]
struct EndRecord<'a> {
    kind: &'static str,
    disk: &'a str,
    pid: u32,
    tid: u32,
    reads: usize,
    writes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cgroup: Option<&'a str>,
    complete: bool,
}

pub fn run(arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let folder = match arguments.folder.clone().or_else(folder_on_disk) {
        Some(folder) => folder,
        None => bail!(
            "none of /var/tmp, /tmp and the current directory is on a disk with direct I/O: name another one with --folder"
        ),
    };
    let every = Duration::from_nanos(arguments.every_ns);
    let Arguments { reads, hogs, is_loop, reads_a_second, .. } = *arguments;
    let plan = Plan { folder, reads, every, hogs, is_loop, reads_a_second };
    plan.check().map_err(UsageError)?;
    let report = requests::run(&plan, stop).context("cannot inject block")?;
    let mut out = io::stdout().lock();
    if arguments.json {
        write_json(&mut out, &report)?
    } else {
        write_text(&mut out, &report)?
    }
    out.flush()?;
    if report.complete || stop.load(Ordering::Relaxed) {
        return Ok(());
    }
    bail!(
        "the disk is too slow: only {} of {} reads were made (ask for fewer with --reads)",
        report.made.len(),
        plan.reads
    )
}

fn write_json(out: &mut dyn Write, report: &Report) -> anyhow::Result<()> {
    let Report { disk, cgroup, tid, made, writes, complete } = report;
    let kind = BLOCK.name;
    for read in made {
        let (start_unix_ns, start_monotonic_ns) = (read.start.unix_ns, read.start.monotonic_ns);
        write_line(out, &ReadRecord { kind, disk, start_unix_ns, start_monotonic_ns, took_ns: read.took_ns })?;
    }
    let end = EndRecord {
        kind,
        disk,
        pid: std::process::id(),
        tid: *tid,
        reads: made.len(),
        writes: *writes,
        cgroup: cgroup.as_deref(),
        complete: *complete,
    };
    write_line(out, &end)?;
    Ok(())
}

fn write_text(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Report { disk, cgroup, tid, made, writes, .. } = report;
    let longest_ns = made.iter().map(|read| read.took_ns).max().unwrap_or(0);
    let all_ns: u64 = made.iter().map(|read| read.took_ns).sum();
    writeln!(
        out,
        "thread {tid} read {} blocks from {}{}: {} on average, {} at most; {writes} concurrent writes",
        made.len(),
        printable(disk),
        cgroup.iter().map(|path| format!(" in cgroup {path}")).collect::<String>(),
        format_ns(all_ns / (made.len() as u64).max(1)),
        format_ns(longest_ns)
    )
}
