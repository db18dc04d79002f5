// SPDX-License-Identifier: MIT OR Apache-2.0
//! fio as the load.

use std::io::{ErrorKind, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use serde_json::Value;
use whylate_model::{Series, Snapshot};
use whylate_sources::Attached as _;
use whylate_sources::sqpoll::{self, SqpollOptions};

use super::{Arguments, Direction, Told, thread_of};

/// How often it is looked whether fio has ended.
const POLL: Duration = Duration::from_millis(20);

/// Of the run, so much is measured: a part at its end is left for what fio does then.
const MEASURED: f64 = 0.9;

fn takes_requests(thread: &Series) -> bool {
    thread.values.get("sqes_per_s").is_some_and(|&rate| rate > 0.0)
}

/// Ended at the latest when it is dropped.
struct Fio(Child);

impl Drop for Fio {
    fn drop(&mut self) {
        // Without effect on one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What its submission thread did, its process, and what fio tells of itself.
pub(super) fn measure(
    arguments: &Arguments,
    path: &Path,
    depth: u32,
    stop: &AtomicBool,
) -> anyhow::Result<(Snapshot, u32, Told)> {
    // Of all processes: fio's ring is there before anybody could know its number.
    let mut source = sqpoll::attach(&SqpollOptions { backend: Some("bpf".to_owned()), ..SqpollOptions::default() })
        .context("cannot attach sqpoll")?;
    let mut fio = Fio(start(arguments, path, depth)?);
    let pid = fio.0.id();
    // While the load runs: fio's thread is there, and spins, before its first request and after its last one.
    let mut measured = None;
    let mut end = None;
    let status = loop {
        if let Some(status) = fio.0.try_wait().context("cannot wait for fio")? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("told to stop before it was done");
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
    // Some kilobytes, which a pipe holds.
    fio.0.stdout.take().context("fio has no output")?.read_to_string(&mut out)?;
    fio.0.stderr.take().context("fio has no standard error")?.read_to_string(&mut said)?;
    ensure!(status.success(), "fio failed, {status}: {}", said.trim());
    let direction = if arguments.rw == Direction::Read { "read" } else { "write" };
    Ok((snapshot, pid, told(&out, direction).with_context(|| format!("fio told nothing of its run: {}", said.trim()))?))
}

fn start(arguments: &Arguments, path: &Path, depth: u32) -> anyhow::Result<Child> {
    let mut command = Command::new("fio");
    // A thread, so that the ring is one of the process that is started here.
    command.args([
        "--name=whylate",
        "--thread",
        "--ioengine=io_uring",
        "--sqthread_poll=1",
        "--direct=1",
        "--time_based",
    ]);
    command.args(["--output-format=json", "--allow_file_create=0"]);
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
    // fio takes a colon for the end of a name.
    let name = path.to_str().context("fio needs a file name in UTF-8")?;
    command.arg(format!("--filename={}", name.replace(':', "\\:")));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("fio is not installed: install it, or leave --fio out"),
        _ => anyhow!("cannot start fio: {error}"),
    })
}

/// From its JSON, in front of which it may print notes.
fn told(out: &str, direction: &str) -> Option<Told> {
    let json: Value = serde_json::from_str(out.get(out.find('{')?..)?).ok()?;
    let job = json.get("jobs")?.get(0)?.get(direction)?;
    Some(Told {
        requests: job.get("total_ios")?.as_u64()?,
        duration_ns: job.get("runtime")?.as_u64()? * 1_000_000,
        mean_ns: job.get("lat_ns")?.get("mean")?.as_f64()? as u64,
        p99_ns: job.get("clat_ns")?.get("percentile")?.get("99.000000")?.as_u64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_tells_what_it_did() {
        let out = "note: something\n{\"jobs\": [{\"read\": {\"total_ios\": 500, \"runtime\": 2000, \"lat_ns\": {\"mean\": 812.5},
            \"clat_ns\": {\"percentile\": {\"99.000000\": 1500}}}}]}";
        let told = told(out, "read").expect("it is complete");
        assert_eq!((told.requests, told.duration_ns, told.mean_ns, told.p99_ns), (500, 2_000_000_000, 812, 1_500));
        assert!(super::told("nothing", "read").is_none() && super::told("{}", "read").is_none());
    }
}
