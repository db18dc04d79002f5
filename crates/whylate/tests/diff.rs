// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate diff` of synthetic recordings, and of recordings with injected disturbances.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;
#[path = "../../whylate-sources/tests/support/machine/steal.rs"]
mod steal;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_setaffinity};
use whylate_model::diff::{Diff, What};

use lock::lock_machine;
use running::{Running, whylate};
use steal::{is_too_much, stolen};

fn diff(arguments: &[&str]) -> Result<Diff> {
    let output = whylate(&["diff", "--json"]).args(arguments).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("it printed no difference")
}

/// A kind of injection.
struct Injection {
    words: &'static [&'static str],
    /// Latency from which late events are recorded, for sources whose own limits are above the injected delay.
    why: &'static [&'static str],
    /// Expected names in the first row, one of these: the culprit or, if there is none, what increased.
    names: &'static [&'static str],
}

/// All injections use the first CPU only, except requests and the submission thread.
const INJECTIONS: [Injection; 7] = [
    Injection {
        words: &["hog", "--for", "40ms", "--every", "100ms", "--times", "1400", "--cpu", "0"],
        // Threads that wake on that CPU mostly wait below the overview's limit.
        why: &["--why", "5ms"],
        names: &["thread whylate-hog", "running whylate-hog"],
    },
    Injection {
        words: &["irqs-off", "--for", "20ms", "--every", "100ms", "--times", "2500", "--cpu", "0"],
        why: &[],
        names: &["irqs_off whylate-irqsoff"],
    },
    Injection {
        words: &["preempt-off", "--for", "20ms", "--every", "100ms", "--times", "2500", "--cpu", "0"],
        why: &[],
        names: &["whylate-preempt"],
    },
    Injection {
        words: &["softirq", "--for", "20ms", "--every", "100ms", "--times", "2500", "--cpu", "0"],
        why: &[],
        names: &["softirq hrtimer"],
    },
    Injection {
        words: &["work", "--items", "11000", "--at-once", "20", "--busy", "5ms", "--cpu", "0"],
        why: &[],
        names: &["work bpf_wq_work"],
    },
    Injection {
        words: &["sqpoll", "--duty", "90", "--for", "10m"],
        why: &[],
        // Its two threads, its process, and the thread that it waited for.
        names: &[
            "iou-sqp",
            "thread whylate-app",
            r#"sqpoll Series { labels: {"process": "whylate"#,
            r#"sqpoll Series { labels: {"by": "timerlat/*", "process": "whylate"#,
        ],
    },
    Injection {
        words: &["block", "--reads", "5000", "--hogs", "16"],
        // Reads are delayed by some milliseconds; the overview's limit is 50.
        why: &["--why", "5ms"],
        // On a disk fast enough that no read is late, its writes are what is new.
        names: &["(write by whylate-hog)", "whylate-hog (writes)", r#""operation": "write", "process": "whylate"#],
    },
];

/// Length of each recording and interval of its snapshots.
const LENGTH: &[&str] = &["-d", "6s", "--every", "300ms"];

fn record(path: &Path, injection: &Injection) -> Result<()> {
    let output = whylate(&["record"]).args(LENGTH).args(injection.why).arg("-o").arg(path).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Records while the disturbance is injected.
fn record_beside(injection: &Injection, path: &Path) -> Result<()> {
    let words = [&["inject"], injection.words].concat();
    let mut injecting = Running::start(&words)?;
    injecting.wait_until_it_catches(Signal::INT)?;
    // Until the disturbance starts.
    thread::sleep(Duration::from_millis(500));
    let recorded = if injecting.is_alive()? { record(path, injection) } else { Ok(()) };
    if !injecting.is_alive()? {
        bail!("it ended: {}", injecting.end()?.1);
    }
    injecting.signal(Signal::INT)?;
    injecting.end()?;
    recorded
}

/// Returns the subject of the first row, as searchable text.
fn first_row(found: &Diff) -> String {
    match found.rows.first().map(|row| (&row.source, &row.what)) {
        Some((_, What::Culprit { kind, who })) => format!("{} {who}", kind.name()),
        Some((source, what)) => format!("{source} {what:?}"),
        None => "nothing".to_owned(),
    }
}

#[test]
fn what_is_injected_comes_first() -> Result<()> {
    let Some(_lock) = lock_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    match std::env::var("WHYLATE_TRIAL").ok().and_then(|rounds| rounds.parse().ok()) {
        Some(rounds) => trial(rounds),
        None => {
            println!("skipped: it takes three minutes a round (`make trial`)");
            Ok(())
        }
    }
}

/// A thread that wakes on the first CPU a hundred times a second, with and without an injection: on a machine where no
/// other thread wants that CPU, nothing is late.
fn wake_there(over: &AtomicBool) {
    let mut first = CpuSet::new();
    first.set(0);
    // If it may not run there, the machine's other threads have to do.
    let _ = sched_setaffinity(None, &first);
    while !over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sets the flag on drop.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Maximum number of new recordings of a pair whose second one had more steal time.
const PAIRS: usize = 5;

/// Rounds of each kind, each with a recording just before.
fn trial(rounds: usize) -> Result<()> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| wake_there(&over));
        // Also after a panic.
        let _over = Over(&over);
        rounds_of(rounds)
    })
}

fn rounds_of(rounds: usize) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (before, after) = (directory.path().join("a.whylate"), directory.path().join("b.whylate"));
    // Only this kind, if one is given.
    let only = std::env::var("WHYLATE_TRIAL_OF").ok();
    // Directory for pairs with another first row, for inspection.
    let kept = std::env::var_os("WHYLATE_TRIAL_KEPT").map(PathBuf::from);
    let is_asked = |injection: &&Injection| only.as_ref().is_none_or(|only| only == injection.words[0]);
    let injections: Vec<&Injection> = INJECTIONS.iter().filter(is_asked).collect();
    ensure!(!injections.is_empty(), "WHYLATE_TRIAL_OF names no kind");
    let mut found_first = vec![0; injections.len()];
    for round in 1..=rounds {
        for (&injection, found_first) in injections.iter().zip(&mut found_first) {
            let kind = injection.words[0];
            for pair in 1..=PAIRS {
                record(&before, injection)?;
                let (began, stolen_before) = (Instant::now(), stolen());
                record_beside(injection, &after)?;
                let (stolen, elapsed) = (stolen().saturating_sub(stolen_before), began.elapsed());
                let found = diff(&[&before, &after].map(|path| path.to_str().unwrap_or_default()))?;
                let (first, differ, compared) = (first_row(&found), found.differ, found.compared);
                println!("{round} {kind}: {first} ({differ} of {compared} rows)");
                if injection.names.iter().any(|name| first.contains(name)) {
                    *found_first += 1;
                    break;
                }
                if let Some(directory) = &kept {
                    for (path, side) in [(&before, "before"), (&after, "after")] {
                        fs::copy(path, directory.join(format!("{kind}-{round}-{pair}-{side}.whylate")))?;
                    }
                }
                // By the kernel's count, the second one also had steal time.
                if pair == PAIRS || !is_too_much(stolen, elapsed) {
                    break;
                }
                println!("{round} {kind}: another pair: the hypervisor took {stolen:?} of {elapsed:?}");
            }
        }
    }
    for (injection, &found) in injections.iter().zip(&found_first) {
        println!("{}: the first row in {found} of {rounds}", injection.words[0]);
    }
    ensure!(found_first.iter().all(|&found| found == rounds), "not always");
    Ok(())
}
