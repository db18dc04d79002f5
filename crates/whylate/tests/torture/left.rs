// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leftovers: everything that a run could leave behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Columns of the table, in order.
pub const KINDS: [&str; 7] = ["programs", "maps", "links", "instances", "settings", "files", "threads"];

const OF_TRACING: [&str; 10] = [
    "current_tracer",
    "tracing_on",
    "set_event",
    "set_event_pid",
    "set_ftrace_filter",
    "trace_clock",
    "trace_options",
    "tracing_cpumask",
    "tracing_thresh",
    "buffer_size_kb",
];
const OF_THE_KERNEL: [&str; 4] = ["bpf_stats_enabled", "sched_schedstats", "perf_event_paranoid", "ftrace_enabled"];
/// Kernel threads that come and go with other work.
const OTHERS_THREADS: [&str; 2] = ["kworker/", "psimon"];

/// State by kind, each item with enough detail to distinguish it.
#[derive(Debug)]
pub struct Leftovers(BTreeMap<&'static str, BTreeSet<String>>);

impl Leftovers {
    /// Takes the current state. `directory` is where the commands run, in addition to the shared directories.
    pub fn now(directory: &Path) -> Self {
        let programs = ProgInfoIter::default().map(|info| format!("{} {}", info.id, info.name.to_string_lossy()));
        let maps = MapInfoIter::default().map(|info| format!("{} {}", info.id, info.name.to_string_lossy()));
        let links = LinkInfoIter::default().map(|info| format!("{} of program {}", info.id, info.prog_id));
        Leftovers(BTreeMap::from([
            ("programs", programs.collect()),
            ("maps", maps.collect()),
            ("links", links.collect()),
            ("instances", names_in(Path::new("/sys/kernel/tracing/instances")).collect()),
            ("settings", settings()),
            ("files", files(directory)),
            ("threads", threads()),
        ]))
    }

    /// Returns the items that are new since `before`, by kind in the order of `KINDS`. The kernel frees some items a
    /// little later.
    pub fn left_behind(&self, directory: &Path) -> Vec<Vec<String>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let now = Leftovers::now(directory);
            let left = KINDS.map(|kind| now.0[kind].difference(&self.0[kind]).cloned().collect::<Vec<_>>());
            if left.iter().all(Vec::is_empty) || Instant::now() >= deadline {
                return left.into();
            }
            sleep(Duration::from_millis(100));
        }
    }
}

fn names_in(directory: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Settings that sources or the kernel's tracers change while they measure, with their values.
fn settings() -> BTreeSet<String> {
    let tracing = Path::new("/sys/kernel/tracing");
    let mut paths: Vec<_> = OF_TRACING.iter().map(|file| tracing.join(file)).collect();
    paths.extend(names_in(&tracing.join("osnoise")).map(|file| tracing.join("osnoise").join(file)));
    paths.extend(OF_THE_KERNEL.iter().map(|file| Path::new("/proc/sys/kernel").join(file)));
    let cpus = Path::new("/sys/devices/system/cpu");
    for cpu in names_in(cpus) {
        let idle = cpus.join(cpu).join("cpuidle");
        paths.extend(names_in(&idle).map(|state| idle.join(state).join("disable")));
    }
    // Directories cannot be read, and do not change.
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    paths.iter().map(|path| format!("{}: {}", path.display(), read(path).trim_end())).collect()
}

fn files(directory: &Path) -> BTreeSet<String> {
    let mut files = BTreeSet::new();
    for (parent, is_ours) in [("/tmp", false), ("/var/tmp", false), ("/dev/shm", false), ("/run/whylate", true)] {
        // The lock of a running whylate's records stays.
        let is_left = |name: &String| if is_ours { !name.ends_with(".lock") } else { name.contains("whylate") };
        files.extend(names_in(Path::new(parent)).filter(is_left).map(|name| format!("{parent}/{name}")));
    }
    files.extend(names_in(directory));
    files
}

/// Threads of every whylate, and kernel threads.
fn threads() -> BTreeSet<String> {
    let mut threads = BTreeSet::new();
    for pid in names_in(Path::new("/proc")).filter(|name| name.bytes().all(|letter| letter.is_ascii_digit())) {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // `PID (NAME) STATE PARENT ...`
        let Some((before, after)) = stat.rsplit_once(") ") else { continue };
        let Some((_, comm)) = before.split_once('(') else { continue };
        if after.split_whitespace().nth(1) == Some("2") {
            if !OTHERS_THREADS.iter().any(|name| comm.starts_with(name)) {
                threads.insert(format!("kernel thread {comm}"));
            }
        } else if comm == "whylate" {
            threads.extend(names_in(&Path::new("/proc").join(&pid).join("task")).map(|tid| format!("{pid}/{tid}")));
        }
    }
    threads
}
