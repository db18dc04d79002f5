// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records when kernel functions are entered and left, by the function_graph tracer in an instance of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::thread::gettid;
use whylate_sources::kernel::tracefs;

use crate::support::machine::real_time::patching;

const NAME: &str = "whylate-functions";
/// The kernel function that writes a record of a BPF iterator.
const RECORD: &str = "seq_write";
/// Per CPU.
const BUFFER_KB: &str = "16384";
/// Format of the lines. These options are global: the kernel shares them among all instances.
const LINES: [(&str, &str); 5] = [
    ("funcgraph-abstime", "1"),
    ("funcgraph-proc", "1"),
    ("funcgraph-cpu", "1"),
    ("funcgraph-overhead", "0"),
    ("funcgraph-duration", "1"),
];

/// Records until it is dropped.
pub struct FunctionTrace {
    directory: PathBuf,
    /// The format options before the start.
    before: Vec<(&'static str, String)>,
}

/// What a thread did in the traced functions.
#[derive(Debug, Default)]
pub struct Calls {
    /// Spans on the CPU within one of the functions, in nanoseconds of CLOCK_MONOTONIC.
    pub busy_ns: Vec<(u64, u64)>,
    /// Start and duration of each outermost call, time off the CPU included.
    pub outermost_ns: Vec<(u64, u64)>,
    /// When the kernel wrote an iterator record for the calling thread.
    pub records_ns: Vec<u64>,
}

/// State of one thread while its lines are read.
#[derive(Default)]
struct Walk {
    depth: u32,
    entered_ns: u64,
    /// Start of the current span on the CPU; 0 outside of the functions or off the CPU.
    since_ns: u64,
    calls: Calls,
}

impl FunctionTrace {
    /// Records those of the functions that the kernel has, for every thread. The inner error is why this kernel cannot.
    pub fn start(functions: &[&str]) -> Result<Result<Self, String>> {
        let tracefs = tracefs::find()?;
        let tracers = fs::read_to_string(tracefs.join("available_tracers"))?;
        if !tracers.split_whitespace().any(|tracer| tracer == "function_graph") {
            return Ok(Err("this kernel has no function_graph tracer".to_owned()));
        }
        let known = fs::read_to_string(tracefs.join("available_filter_functions"))?;
        let is_known = |name: &&str| known.lines().any(|line| line == *name);
        if !is_known(&RECORD) {
            return Ok(Err(format!("the function_graph tracer does not know {RECORD}")));
        }
        let known: Vec<&str> = functions.iter().copied().filter(is_known).chain([RECORD]).collect();
        let directory = tracefs.join("instances").join(NAME);
        let _ = fs::remove_dir(&directory);
        fs::create_dir(&directory).context("cannot create a tracefs instance")?;
        let mut trace = FunctionTrace { directory, before: Vec::new() };
        trace.write("tracing_on", "0")?;
        trace.write("buffer_size_kb", BUFFER_KB)?;
        trace.write("trace_clock", "mono")?;
        patching(|| trace.write("set_ftrace_filter", &known.join("\n")))?;
        // Before 6.11 an instance has no such tracer.
        if patching(|| trace.write("current_tracer", "function_graph")).is_err() {
            return Ok(Err("this kernel has no function_graph tracer in instances (Linux 6.11)".to_owned()));
        }
        for (name, value) in LINES {
            let file = format!("options/{name}");
            trace.before.push((name, fs::read_to_string(trace.directory.join(&file)).with_context(|| file.clone())?));
            trace.write(&file, value)?;
        }
        trace.write("events/sched/sched_switch/filter", r#"prev_comm ~ "iou-sqp-*" || next_comm ~ "iou-sqp-*""#)?;
        patching(|| trace.write("events/sched/sched_switch/enable", "1"))?;
        trace.write("tracing_on", "1")?;
        Ok(Ok(trace))
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        fs::write(self.directory.join(file), value).with_context(|| format!("cannot write {value} to {file}"))
    }

    /// Returns what one thread has done so far, and clears the trace of all threads. Fails if events were lost.
    pub fn take(&self, tid: u32) -> Result<Calls> {
        self.write("tracing_on", "0")?;
        for (cpu, stats) in self.stats()? {
            for name in ["overrun", "commit overrun", "dropped events"] {
                let count = stats.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
                ensure!(count == Some("0"), "CPU {cpu} has lost function calls ({name}): {stats}");
            }
        }
        let text = fs::read_to_string(self.directory.join("trace"))?;
        fs::write(self.directory.join("trace"), "")?;
        self.write("tracing_on", "1")?;
        calls(&text, tid)
    }

    fn stats(&self) -> Result<BTreeMap<String, String>> {
        let mut stats = BTreeMap::new();
        for entry in fs::read_dir(self.directory.join("per_cpu"))? {
            let entry = entry?;
            stats.insert(
                entry.file_name().to_string_lossy().into_owned(),
                fs::read_to_string(entry.path().join("stats"))?,
            );
        }
        Ok(stats)
    }
}

impl Drop for FunctionTrace {
    fn drop(&mut self) {
        for (name, value) in &self.before {
            let _ = self.write(&format!("options/{name}"), value.trim());
        }
        patching(|| {
            let _ = self.write("events/enable", "0");
            let _ = self.write("current_tracer", "nop");
            let _ = fs::remove_dir(&self.directory);
        });
    }
}

/// Parses the calls of one thread from lines like these:
/// `  12.345678 |   1)  iou-sqp-81  |   12.345 us   |  io_submit_sqes();`
/// `  12.345678 |   1)  iou-sqp-81  |               |  /* sched_switch: prev_comm=… prev_pid=81 … ==> next_pid=0 … */`
fn calls(text: &str, tid: u32) -> Result<Calls> {
    let reader = gettid().as_raw_nonzero().get() as u32;
    let mut walk = Walk::default();
    for line in text.lines() {
        let mut columns = line.splitn(4, " | ").map(str::trim);
        let (Some(at), Some(who), Some(took), Some(what)) =
            (columns.next(), columns.next(), columns.next(), columns.next())
        else {
            continue;
        };
        let Some(at_ns) = nanoseconds(at) else { continue };
        let is_of = |tid: u32| who.rsplit_once('-').is_some_and(|(_, number)| number.parse() == Ok(tid));
        let is_own = is_of(tid);
        if let Some((_, fields)) = what.split_once("sched_switch: ") {
            let number = |key: &str| fields.split_whitespace().find_map(|word| word.strip_prefix(key)?.parse().ok());
            if number("prev_pid=") == Some(tid) {
                walk.switch_out(at_ns);
            } else if number("next_pid=") == Some(tid) {
                walk.switch_in(at_ns);
            }
        } else if what.starts_with(RECORD) && is_of(reader) {
            walk.calls.records_ns.push(at_ns);
        } else if is_own && what.ends_with("();") {
            let us: f64 = took.trim_end_matches("us").trim().parse().with_context(|| format!("no time in {line:?}"))?;
            walk.enter(at_ns);
            walk.leave(at_ns + (us * 1e3) as u64);
        } else if is_own && what.ends_with("() {") {
            walk.enter(at_ns);
        } else if is_own && what.starts_with('}') {
            walk.leave(at_ns);
        }
    }
    Ok(walk.calls)
}

impl Walk {
    fn enter(&mut self, at_ns: u64) {
        if self.depth == 0 {
            (self.entered_ns, self.since_ns) = (at_ns, at_ns);
        }
        self.depth += 1;
    }

    fn leave(&mut self, at_ns: u64) {
        // The call was entered before the trace began.
        let Some(depth) = self.depth.checked_sub(1) else { return };
        self.depth = depth;
        if depth == 0 {
            self.switch_out(at_ns);
            self.calls.outermost_ns.push((self.entered_ns, at_ns.saturating_sub(self.entered_ns)));
        }
    }

    fn switch_out(&mut self, at_ns: u64) {
        if self.since_ns != 0 {
            self.calls.busy_ns.push((self.since_ns, at_ns));
        }
        self.since_ns = 0;
    }

    fn switch_in(&mut self, at_ns: u64) {
        if self.depth > 0 {
            self.since_ns = at_ns;
        }
    }
}

impl Calls {
    /// Returns the nanoseconds on the CPU within one of the functions.
    pub fn busy_between(&self, from_ns: u64, until_ns: u64) -> u64 {
        let within = |&(began_ns, ended_ns): &(u64, u64)| ended_ns.min(until_ns).saturating_sub(began_ns.max(from_ns));
        self.busy_ns.iter().map(within).sum()
    }

    /// Counts the calls that began in the span.
    pub fn count_between(&self, from_ns: u64, until_ns: u64) -> u64 {
        self.outermost_ns.iter().filter(|(began_ns, _)| (from_ns..until_ns).contains(began_ns)).count() as u64
    }

    /// Returns the first quartile of the calls' durations.
    pub fn quarter_ns(&self) -> Option<u64> {
        let mut took_ns: Vec<u64> = self.outermost_ns.iter().map(|&(_, took_ns)| took_ns).collect();
        took_ns.sort_unstable();
        took_ns.get(took_ns.len() / 4).copied()
    }
}

/// Parses seconds such as `12.345678`.
fn nanoseconds(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.')?;
    Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + fraction.parse::<u64>().ok()? * 1_000)
}
