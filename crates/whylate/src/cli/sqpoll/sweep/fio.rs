// SPDX-License-Identifier: MIT OR Apache-2.0
//! Load by fio.

mod figures;

use std::io::{ErrorKind, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use whylate_model::{Series, Snapshot};
use whylate_sources::kernel::credentials::run_as_real_user;
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session};

use self::figures::Figures;
use super::{Arguments, Direction, LoadFigures, thread_of};

/// Poll interval for the end of fio.
const POLL: Duration = Duration::from_millis(20);

/// Fraction of the run that is measured, without what fio does at its end.
const MEASURED: f64 = 0.9;

fn takes_requests(thread: &Series) -> bool {
    thread.values.get("sqes_per_s").is_some_and(|&rate| rate > 0.0)
}

/// Process of fio, which is killed on drop.
struct Fio(Child);

impl Drop for Fio {
    fn drop(&mut self) {
        // No effect if it has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs fio, and returns the snapshot of its submission thread, its PID, and its own figures. `None` if interrupted.
pub(super) fn measure(
    arguments: &Arguments,
    path: &Path,
    depth: u32,
    stop: &AtomicBool,
) -> anyhow::Result<Option<(Snapshot, u32, LoadFigures)>> {
    // All processes: fio creates its ring before its PID could be set as a filter.
    let mut source = SqpollOptions { backend: Some("bpf".to_owned()), ..SqpollOptions::default() }
        .start(&Session::of_one())
        .context("cannot attach sqpoll")?;
    let mut fio = Fio(start(command(arguments, path, depth)?)?);
    let pid = fio.0.id();
    // Measure only while requests arrive: fio's submission thread also spins before and after.
    let mut measured = None;
    let mut end = None;
    let status = loop {
        if let Some(status) = fio.0.try_wait().context("cannot wait for fio")? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        thread::sleep(POLL);
        match end {
            None => {
                let is_at_work = thread_of(&source.snapshot()?, pid).is_some_and(takes_requests);
                end = is_at_work.then(|| Instant::now() + Duration::from_nanos(arguments.runtime).mul_f64(MEASURED));
            }
            Some(end) if measured.is_none() && Instant::now() >= end => measured = Some(source.snapshot()?),
            Some(_) => {}
        }
    };
    let snapshot = measured.map_or_else(|| source.snapshot(), Ok)?;
    let (mut out, mut said) = (String::new(), String::new());
    // The output is some kilobytes, which fit into the pipe.
    fio.0.stdout.take().context("fio has no output")?.read_to_string(&mut out)?;
    fio.0.stderr.take().context("fio has no standard error")?.read_to_string(&mut said)?;
    // Ctrl-C goes to fio too, which then ends early with partial results, or fails.
    if stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    ensure!(status.success(), "fio failed, {status}: {}", said.trim());
    let direction = if arguments.rw == Direction::Read { "read" } else { "write" };
    let figures =
        Figures::parse(&out, direction).with_context(|| format!("fio printed no results: {}", said.trim()))?;
    let (mean_ns, p99_ns) = figures.trusted(depth);
    if p99_ns.is_none() {
        say!("whylate: leaving out fio's latencies at iodepth {depth}, as they contradict each other");
    }
    let load = LoadFigures { requests: figures.requests, duration_ns: figures.duration_ns, mean_ns, p99_ns };
    Ok(Some((snapshot, pid, load)))
}

fn command(arguments: &Arguments, path: &Path, depth: u32) -> anyhow::Result<Command> {
    let mut command = Command::new("fio");
    // --thread: the ring belongs to the process that is started here.
    command.args([
        "--name=whylate",
        "--thread",
        "--ioengine=io_uring",
        "--sqthread_poll=1",
        "--direct=1",
        "--time_based",
    ]);
    command.args(["--output-format=json", "--allow_file_create=0"]);
    // With a submission thread, fio does not know the time of submission: its completion latency (clat) is wrong.
    command.args(["--lat_percentiles=1", "--clat_percentiles=0"]);
    command.arg(if arguments.rw == Direction::Read { "--rw=read" } else { "--rw=write" });
    if arguments.iopoll {
        command.arg("--hipri=1");
    }
    if let Some(cpu) = arguments.sq_cpu {
        command.arg(format!("--sqthread_poll_cpu={cpu}"));
    }
    let milliseconds = arguments.runtime.div_ceil(1_000_000);
    command
        .arg(format!("--bs={}", arguments.bs))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={milliseconds}ms"));
    // fio separates file names by colons.
    let name = path.to_str().context("fio needs a file name in UTF-8")?;
    command.arg(format!("--filename={}", name.replace(':', "\\:")));
    Ok(command)
}

fn start(mut command: Command) -> anyhow::Result<Child> {
    run_as_real_user(&mut command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("fio is not installed: install it, or leave --fio out"),
        _ => anyhow!("cannot start fio: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_submission_latency_from_fio() -> anyhow::Result<()> {
        let command = command(&super::super::tests::arguments("f".into()), Path::new("f"), 4)?;
        assert!(command.get_args().any(|argument| argument == "--lat_percentiles=1"), "{command:?}");
        Ok(())
    }
}
