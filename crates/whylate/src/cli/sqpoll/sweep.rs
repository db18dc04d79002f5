// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate sqpoll sweep`: utilization of a submission thread at different numbers of requests in flight.

mod fio;

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use whylate_model::sqpoll::is_thread;
use whylate_model::units::format_ns;
use whylate_model::{Series, Snapshot};
use whylate_sources::inject::file_load::{self, MAX_DEPTH, Plan, Report};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session, Threads};

use crate::cli::values::duration_ns;
use crate::cli::{UsageError, existing};
use crate::files::create_new;
use crate::json::write_line;
use crate::render::text::fit::terminal_columns;
use crate::render::text::table::Table;

/// Size of a temporary file for writes, in bytes.
const MADE_BYTES: u64 = 64 << 20;
const COLUMNS: &str = "IODEPTH, UTIL%, IDLE%, WORK%, STARVED%, IOPS, MEAN, P99";

/// How busy a submission thread is under a synthetic load, at different numbers of requests in flight.
///
/// UTIL% is work as a share of the thread's time on a CPU, and IDLE% is the rest of that time. Requests are direct I/O
/// (O_DIRECT) and read or write the file from start to end, repeatedly.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # read a disk with 1, 4, 8, 16 and 64 requests in flight
    whylate sqpoll sweep --filename /dev/nvme0n1
    # 32 small requests
    whylate sqpoll sweep --filename /dev/nvme0n1 --iodepth 32 --bs 4k
    # let fio make the load
    whylate sqpoll sweep --filename /dev/nvme0n1 --fio
    # write to a new file, which is removed at the end
    whylate sqpoll sweep --filename /srv/new --rw write")]
pub struct Arguments {
    /// The file or block device.
    #[arg(long, value_name = "FILE")]
    filename: PathBuf,
    /// Requests in flight.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 4, 8, 16, 64],
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    iodepth: Vec<u32>,
    /// The size of a request, a multiple of 4k.
    #[arg(long, value_name = "SIZE", default_value = "128k", value_parser = size_bytes)]
    bs: u32,
    /// Read or write.
    #[arg(long, value_enum, default_value_t = Direction::Read)]
    rw: Direction,
    /// Duration of each trial.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration_ns)]
    runtime: u64,
    /// Time for which the thread spins before it sleeps, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    sq_thread_idle: u32,
    /// Keep the submission thread on this CPU.
    #[arg(long, value_name = "N")]
    sq_cpu: Option<u32>,
    /// Have the submission thread poll the device, which must support polling.
    #[arg(long)]
    iopoll: bool,
    /// Have fio produce the load (ioengine=io_uring, sqthread_poll=1); its threads spin for a second before they sleep
    #[arg(long, conflicts_with = "sq_thread_idle")]
    fio: bool,
    /// Write to an existing file or block device: its contents are lost.
    #[arg(long)]
    destroy_what_is_there: bool,
    /// Print one JSON object per line, for each number of requests.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Direction {
    Read,
    Write,
}

/// Parses `4096`, `128k` or `1m`.
fn size_bytes(text: &str) -> Result<u32, String> {
    let unit = match text.to_ascii_lowercase() {
        text if text.ends_with('k') => 1 << 10,
        text if text.ends_with('m') => 1 << 20,
        _ => 1,
    };
    let number = text.trim_end_matches(['k', 'K', 'm', 'M']).parse::<u32>();
    let bytes = number.ok().and_then(|number| number.checked_mul(unit)).filter(|&bytes| bytes > 0 && bytes <= 16 << 20);
    match bytes {
        Some(bytes) if bytes.is_multiple_of(4096) => Ok(bytes),
        _ => Err("write a multiple of 4k, 16m at most, such as 4k, 128k or 1m".to_owned()),
    }
}

/// Figures measured by the load itself.
struct LoadFigures {
    requests: u64,
    duration_ns: u64,
    /// Mean latency; `None` if the load's figures contradict each other.
    mean_ns: Option<u64>,
    p99_ns: Option<u64>,
}

impl From<Report> for LoadFigures {
    fn from(report: Report) -> Self {
        let latency = &report.latency;
        LoadFigures {
            requests: report.requests,
            duration_ns: report.duration_ns,
            mean_ns: Some(latency.mean_ns()),
            p99_ns: Some(latency.printed_quantile_ns(0.99)),
        }
    }
}

/// Temporary file, which is removed on drop.
struct Made<'a> {
    path: &'a PathBuf,
    file: fs::File,
}

impl Made<'_> {
    /// Returns a path to the open file, even if its name is now another file's.
    fn as_opened(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // Another file may have taken the name.
        let is_it = |there: fs::Metadata| {
            self.file.metadata().is_ok_and(|made| (made.dev(), made.ino()) == (there.dev(), there.ino()))
        };
        if fs::symlink_metadata(self.path).is_ok_and(is_it) {
            let _ = fs::remove_file(self.path);
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot watch for signals")?;
    }
    if arguments.rw == Direction::Read {
        let cannot = || format!("cannot read {}", arguments.filename.display());
        existing(fs::metadata(&arguments.filename)).with_context(cannot)?;
    }
    let made = prepare(arguments)?;
    let path = made.as_ref().map_or_else(|| arguments.filename.clone(), Made::as_opened);
    let mut out = io::stdout().lock();
    let mut table = Table::new(COLUMNS);
    for &depth in &arguments.iodepth {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        say!("whylate: {depth} in flight for {} ...", format_ns(arguments.runtime));
        let measured = if arguments.fio {
            fio::measure(arguments, &path, depth, &stop)?
        } else {
            measure(arguments, &path, depth, &stop)?
        };
        let Some((snapshot, pid, load)) = measured else { break };
        let thread = thread_of(&snapshot, pid).context("the submission thread was not seen")?;
        if arguments.json {
            let line = serde_json::json!({
                "iodepth": depth, "requests": load.requests, "duration_ns": load.duration_ns,
                "mean_ns": load.mean_ns, "p99_ns": load.p99_ns, "values": thread.values, "lost": snapshot.lost,
            });
            write_line(&mut out, &line)?;
            out.flush()?;
        } else {
            table.row(row(depth, thread, &load));
        }
    }
    if !arguments.json {
        table.write(&mut out, terminal_columns())?;
    }
    out.flush()?;
    drop(made);
    Ok(())
}

/// Creates the file to write to, if it does not exist.
fn prepare(arguments: &Arguments) -> anyhow::Result<Option<Made<'_>>> {
    if arguments.rw == Direction::Read {
        return Ok(None);
    }
    if let Some(refusal) = file_load::refusal_to_write(&arguments.filename) {
        if !arguments.destroy_what_is_there {
            return Err(UsageError(anyhow!("{refusal}: to allow this, use --destroy-what-is-there")).into());
        }
        return Ok(None);
    }
    // Fails if the file exists, even if it was created just now.
    let file = create_new(&arguments.filename);
    let file = file.with_context(|| format!("cannot make {}", arguments.filename.display()))?;
    let made = Made { path: &arguments.filename, file };
    made.file.set_len(MADE_BYTES).with_context(|| format!("cannot make {} larger", arguments.filename.display()))?;
    Ok(Some(made))
}

fn measure(
    arguments: &Arguments,
    path: &Path,
    depth: u32,
    stop: &AtomicBool,
) -> anyhow::Result<Option<(Snapshot, u32, LoadFigures)>> {
    let plan = Plan {
        path: path.to_owned(),
        writes: arguments.rw == Direction::Write,
        block_bytes: arguments.bs,
        depth,
        runtime: Duration::from_nanos(arguments.runtime),
        idle_ms: arguments.sq_thread_idle,
        sq_cpu: arguments.sq_cpu,
        iopoll: arguments.iopoll,
    };
    let own = std::process::id();
    let mut source = SqpollOptions {
        backend: Some("bpf".to_owned()),
        threads: Threads::of_process(own),
        ..SqpollOptions::default()
    }
    .start(&Session::of_one())
    .context("cannot attach sqpoll")?;
    // Measure from the first request on.
    let started = || source.snapshot().map(|_| ()).map_err(io::Error::other);
    let report = file_load::run(&plan, stop, started);
    let report = report.with_context(|| format!("cannot use {} like this", arguments.filename.display()))?;
    if report.requests == 0 {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        bail!("no request was carried out");
    }
    Ok(Some((source.snapshot()?, own, report.into())))
}

/// Returns the submission thread of a process: of several (an earlier one may be exiting), the busiest.
fn thread_of(snapshot: &Snapshot, pid: u32) -> Option<&Series> {
    let sqes = |series: &Series| series.values.get("sqes_per_s").copied().unwrap_or(0.0);
    let is_own = |series: &&Series| is_thread(series) && series.labels.get("pid") == Some(&pid.to_string());
    snapshot.series.iter().filter(is_own).max_by(|a, b| sqes(a).total_cmp(&sqes(b)))
}

fn row(depth: u32, thread: &Series, load: &LoadFigures) -> Vec<String> {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}", share * 100.0));
    let value = |name: &str| thread.values.get(name).copied();
    vec![
        depth.to_string(),
        percent(value("utilisation")),
        percent(value("utilisation").map(|share| 1.0 - share)),
        percent(value("working")),
        percent(value("starved")),
        format!("{:.0}", load.requests as f64 * 1e9 / load.duration_ns.max(1) as f64),
        load.mean_ns.map_or_else(|| "-".to_owned(), format_ns),
        load.p99_ns.map_or_else(|| "-".to_owned(), format_ns),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn sizes_are_multiples_of_a_page() {
        assert_eq!(size_bytes("128k"), Ok(128 << 10));
        assert_eq!(size_bytes("1M"), Ok(1 << 20));
        assert_eq!(size_bytes("4096"), Ok(4096));
        for bad in ["", "k", "0", "1000", "17m", "4g", "-4k"] {
            assert!(size_bytes(bad).is_err(), "{bad}");
        }
    }

    pub fn arguments(filename: PathBuf) -> Arguments {
        Arguments {
            filename,
            iodepth: vec![1],
            bs: 4096,
            rw: Direction::Write,
            runtime: 1,
            sq_thread_idle: 1,
            sq_cpu: None,
            iopoll: false,
            fio: false,
            destroy_what_is_there: false,
            json: false,
        }
    }

    #[test]
    fn refuses_to_overwrite_existing_file() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("dear");
        fs::write(&path, "dear")?;
        let error = run(&arguments(path.clone())).expect_err("it is there");
        assert!(error.is::<UsageError>() && error.to_string().contains("--destroy-what-is-there"), "{error:#}");
        assert_eq!(fs::read_to_string(&path)?, "dear");
        Ok(())
    }

    #[test]
    fn removes_temporary_file_on_drop() -> anyhow::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("new");
        let arguments = arguments(path.clone());
        let made = prepare(&arguments)?;
        assert_eq!(fs::metadata(&path)?.len(), MADE_BYTES);
        drop(made);
        assert!(!path.exists());
        Ok(())
    }
}
