// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate offcpu` of a process with 30,000 threads.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "../../whylate-sources/tests/support/workloads/many_threads.rs"]
mod many_threads;
mod running;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lock::lock_machine;
use many_threads::{Crowd, PLACES};
use quick_xml::events::Event;
use running::whylate;
use whylate_model::Snapshot;
use whylate_model::units::parse_duration_ns;

/// Returns the number of threads: 30,000 in the full run.
fn wanted_threads() -> u32 {
    if std::env::var_os("WHYLATE_THOROUGH").is_some() { 30_000 } else { 5_000 }
}

const DURATION: &str = "1s";
/// Tolerance: a thread's time may start and end anywhere in a sampling period and in a walk.
const SLACK_S: f64 = 0.25;

#[test]
fn each_format_has_thousands_of_threads() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let wanted = wanted_threads();
    let crowd = match Crowd::start(wanted)? {
        Ok(crowd) => crowd,
        Err(reason) => {
            println!("skipped: this machine has no room for {wanted} threads: {reason}");
            return Ok(());
        }
    };
    let threads = crowd.threads()?;
    ensure!(threads >= u64::from(wanted), "the process has {threads} threads");
    let directory = tempfile::tempdir()?;
    let written = |name: &str, more: &[&str]| -> Result<(Vec<u8>, f64)> {
        let began = Instant::now();
        let file = directory.path().join(name).to_string_lossy().into_owned();
        let pid = crowd.pid().to_string();
        let output = whylate(&["offcpu", "-d", DURATION, "-p", &pid, "-o", &file]).args(more).output()?;
        ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        Ok((fs::read(&file)?, began.elapsed().as_secs_f64()))
    };
    json(&written("x.json", &["--by", "thread"])?.0, threads)?;
    let (lines, elapsed_s) = written("x.folded", &["--by", "thread"])?;
    folded(std::str::from_utf8(&lines)?, threads, elapsed_s)?;
    // Most of the frames by thread are too narrow to be drawn, but the whole is not.
    for (name, more) in [("x.svg", &[][..]), ("threads.svg", &["--by", "thread"])] {
        let (graph, elapsed_s) = written(name, more)?;
        svg(std::str::from_utf8(&graph)?, threads, elapsed_s)?;
    }
    Ok(())
}

/// Checks that no time is lost, and none counted twice. The span ends with a walk over all threads, which takes longer
/// on a busy machine.
fn ensure_is_span(each_s: f64, elapsed_s: f64) -> Result<()> {
    ensure!(each_s > 1.0 - SLACK_S && each_s <= elapsed_s, "each thread has {each_s} s, of {elapsed_s} s");
    Ok(())
}

/// Checks by TID that each thread has all of its time and none is lost.
fn json(bytes: &[u8], threads: u64) -> Result<()> {
    let snapshot: Snapshot = serde_json::from_slice(bytes)?;
    ensure!(!snapshot.lost.is_empty() && snapshot.lost.values().all(|&count| count == 0), "lost: {:?}", snapshot.lost);
    let mut ns_by_thread: BTreeMap<&str, u64> = BTreeMap::new();
    let mut by_place = [0_u64; PLACES.len()];
    for stack in &snapshot.stacks {
        *ns_by_thread.entry(&stack.labels["tid"]).or_default() += stack.weight_ns;
        let place = PLACES.iter().position(|place| stack.user.iter().any(|frame| frame.contains(place)));
        if let Some(place) = place {
            by_place[place] += stack.weight_ns;
        }
    }
    ensure!(ns_by_thread.len() as u64 == threads, "{} of {threads} threads are there", ns_by_thread.len());
    let slack_ns = (SLACK_S * 1e9) as u64;
    for (tid, ns) in ns_by_thread {
        ensure!(ns.abs_diff(snapshot.duration_ns) < slack_ns, "thread {tid} has {ns} of {} ns", snapshot.duration_ns);
    }
    let whole: u64 = by_place.iter().sum();
    println!("{threads} threads, {} ns, by place {by_place:?}, lost {:?}", snapshot.duration_ns, snapshot.lost);
    for (place, ns) in PLACES.iter().zip(by_place) {
        ensure!((ns as f64 / whole as f64 - 0.25).abs() < 0.001, "{place} has {ns} of {whole} ns");
    }
    Ok(())
}

/// A line per thread, with all of their time.
fn folded(text: &str, threads: u64, elapsed_s: f64) -> Result<()> {
    let (mut tids, mut sum_us) = (BTreeSet::new(), 0_u64);
    for line in text.lines() {
        let (frames, us) = line.rsplit_once(' ').context("a line has no time")?;
        ensure!(!line.contains('\x1b'), "{line:?} moves a terminal's cursor");
        // Process name, thread name, and TID.
        tids.insert(frames.split(';').nth(2).and_then(|tid| tid.parse::<u32>().ok()).with_context(|| line.to_owned())?);
        sum_us += us.parse::<u64>()?;
    }
    ensure!(tids.len() as u64 == threads, "{} of {threads} threads are there", tids.len());
    let each_s = sum_us as f64 / 1e6 / threads as f64;
    println!("{each_s} s for each thread in folded lines");
    ensure_is_span(each_s, elapsed_s)
}

/// Well-formed XML, with the expected total.
fn svg(text: &str, threads: u64, elapsed_s: f64) -> Result<()> {
    let mut reader = quick_xml::Reader::from_str(text);
    reader.config_mut().check_end_names = true;
    let (mut titles, mut inside) = (Vec::new(), String::new());
    loop {
        match reader.read_event()? {
            Event::Eof => break,
            Event::Start(tag) | Event::Empty(tag) => {
                tag.attributes().try_for_each(|attribute| attribute.map(drop))?;
                inside.clear();
            }
            Event::Text(part) => inside += &part.decode()?,
            Event::End(tag) if tag.name().as_ref() == b"title" => titles.push(std::mem::take(&mut inside)),
            _ => {}
        }
    }
    ensure!(!text.contains("<script>a") && text.trim_end().ends_with("</svg>"), "a name is markup");
    let all = titles.iter().find_map(|title| title.strip_prefix("all (")).context("there is no sum")?;
    let sum_ns = parse_duration_ns(all.split(',').next().unwrap_or_default(), None)?;
    let each_s = sum_ns as f64 / 1e9 / threads as f64;
    println!("{each_s} s for each thread in {} frames of the flame graph", titles.len());
    ensure_is_span(each_s, elapsed_s)?;
    ensure!(text.contains(&format!("{threads} threads")) && !text.contains(" lost"), "the subtitle tells of others");
    Ok(())
}

/// Entry point of the child process.
#[test]
fn crowd_process() -> Result<()> {
    many_threads::run_if_asked()
}
