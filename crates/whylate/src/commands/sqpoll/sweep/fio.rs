// SPDX-License-Identifier: MIT OR Apache-2.0
//! fio as the load.

use std::io::{ErrorKind, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use serde_json::Value;
use whylate_model::{Series, Snapshot};
use whylate_sources::sqpoll::SqpollOptions;
use whylate_sources::{Attached as _, Session};

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

/// What its submission thread did, its process, and what fio tells of itself; nothing where stopped before fio's end.
pub(super) fn measure(
    arguments: &Arguments,
    path: &Path,
    depth: u32,
    stop: &AtomicBool,
) -> anyhow::Result<Option<(Snapshot, u32, Told)>> {
    // Of all processes: fio's ring is there before anybody could know its number.
    let mut source = SqpollOptions { backend: Some("bpf".to_owned()), ..SqpollOptions::default() }
        .start(&Session::of_one())
        .context("cannot attach sqpoll")?;
    let mut fio = Fio(start(command(arguments, path, depth)?)?);
    let pid = fio.0.id();
    // While the load runs: fio's thread is there, and spins, before its first request and after its last one.
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
    // Some kilobytes, which a pipe holds.
    fio.0.stdout.take().context("fio has no output")?.read_to_string(&mut out)?;
    fio.0.stderr.take().context("fio has no standard error")?.read_to_string(&mut said)?;
    // Ctrl-C goes to fio too, which then ends early with what it has done so far, or fails.
    if stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    ensure!(status.success(), "fio failed, {status}: {}", said.trim());
    let direction = if arguments.rw == Direction::Read { "read" } else { "write" };
    let told = told(&out, direction).with_context(|| format!("fio printed no results: {}", said.trim()))?;
    Ok(Some((snapshot, pid, told.trusted(depth))))
}

fn command(arguments: &Arguments, path: &Path, depth: u32) -> anyhow::Result<Command> {
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
    // With a submission thread fio does not know when a request was submitted: its completion latency is garbage.
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
    // fio takes a colon for the end of a name.
    let name = path.to_str().context("fio needs a file name in UTF-8")?;
    command.arg(format!("--filename={}", name.replace(':', "\\:")));
    Ok(command)
}

fn start(mut command: Command) -> anyhow::Result<Child> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("fio is not installed: install it, or leave --fio out"),
        _ => anyhow!("cannot start fio: {error}"),
    })
}

/// From its JSON, in front of which it may print notes.
fn told(out: &str, direction: &str) -> Option<Figures> {
    let json: Value = serde_json::from_str(out.get(out.find('{')?..)?).ok()?;
    let job = json.get("jobs")?.get(0)?.get(direction)?;
    let latency = job.get("lat_ns")?;
    Some(Figures {
        requests: job.get("total_ios")?.as_u64()?,
        duration_ns: job.get("runtime")?.as_u64()? * 1_000_000,
        min_ns: latency.get("min")?.as_u64()?,
        mean_ns: latency.get("mean")?.as_f64()? as u64,
        max_ns: latency.get("max")?.as_u64()?,
        p99_ns: latency.get("percentile")?.get("99.000000")?.as_u64()?,
    })
}

/// What fio says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Figures {
    requests: u64,
    duration_ns: u64,
    min_ns: u64,
    mean_ns: u64,
    max_ns: u64,
    p99_ns: u64,
}

impl Figures {
    /// Without latencies that contradict the other figures.
    fn trusted(self, depth: u32) -> Told {
        let mean_ns = self.mean_is_possible(depth).then_some(self.mean_ns);
        let p99_ns = (mean_ns.is_some() && self.p99_is_possible()).then_some(self.p99_ns);
        if p99_ns.is_none() {
            eprintln!("whylate: leaving out fio's latencies at iodepth {depth}, as they contradict each other");
        }
        Told { requests: self.requests, duration_ns: self.duration_ns, mean_ns, p99_ns }
    }

    /// Requests in flight at the same time, at most `depth`, take no more than so many times the run in all.
    fn mean_is_possible(self, depth: u32) -> bool {
        let all_ns = u128::from(self.mean_ns) * u128::from(self.requests);
        // fio rounds the run to a millisecond, and lets those that are in flight at its end finish.
        let longest_ns = u128::from(depth) * u128::from(self.duration_ns + 1_000_000 + self.max_ns);
        self.min_ns <= self.mean_ns && self.mean_ns <= self.max_ns && all_ns <= longest_ns
    }

    /// One request in a hundred takes as long as that or longer, so the mean is a hundredth of it at least.
    fn p99_is_possible(self) -> bool {
        // fio's buckets are 1.6 % wide.
        let at_most = |ns: u64| ns.saturating_add(ns / 32);
        self.min_ns <= at_most(self.p99_ns)
            && self.p99_ns <= at_most(self.max_ns)
            && self.p99_ns <= at_most(self.mean_ns.saturating_add(1).saturating_mul(100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT: &str = r#"note: something
        {"jobs": [{"read": {"total_ios": 500, "runtime": 2000,
            "lat_ns": {"min": 700, "max": 1900, "mean": 812.5, "percentile": {"99.000000": 1500}},
            "clat_ns": {"mean": 0.0, "percentile": {"99.000000": 3070000000}}}}]}"#;

    const FIGURES: Figures =
        Figures { requests: 500, duration_ns: 2_000_000_000, min_ns: 700, mean_ns: 812, max_ns: 1_900, p99_ns: 1_500 };

    #[test]
    fn fio_tells_what_it_did() {
        assert_eq!(told(OUT, "read"), Some(FIGURES));
        assert!(told("nothing", "read").is_none() && told("{}", "read").is_none());
    }

    #[test]
    fn latencies_that_cannot_be_are_left_out() {
        let told = |figures: Figures| {
            let told = figures.trusted(4);
            (told.mean_ns, told.p99_ns)
        };
        assert_eq!(told(FIGURES), (Some(812), Some(1_500)));
        let slow = Figures { mean_ns: 192_000, max_ns: 4_000_000_000, ..FIGURES };
        assert_eq!(told(Figures { p99_ns: 3_070_000_000, ..slow }), (Some(192_000), None));
        assert_eq!(told(Figures { p99_ns: 19_000_000, ..slow }), (Some(192_000), Some(19_000_000)));
        assert_eq!(told(Figures { p99_ns: 2_500, ..FIGURES }), (Some(812), None), "longer than the longest");
        assert_eq!(told(Figures { p99_ns: 600, ..FIGURES }), (Some(812), None), "shorter than the shortest");
        assert_eq!(told(Figures { mean_ns: 600, ..FIGURES }), (None, None), "the mean is less than the shortest");
        let crowded = Figures { mean_ns: 100_000_000, max_ns: 200_000_000, p99_ns: 150_000_000, ..FIGURES };
        assert_eq!(told(crowded), (None, None), "500 requests of 100 ms, 4 at a time, take longer than 2 s");
    }

    #[test]
    fn fio_is_asked_for_the_latency_from_submission_on() -> anyhow::Result<()> {
        let command = command(&super::super::tests::arguments("f".into()), Path::new("f"), 4)?;
        assert!(command.get_args().any(|argument| argument == "--lat_percentiles=1"), "{command:?}");
        Ok(())
    }
}
