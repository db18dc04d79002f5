// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate inject irqs-off`, `preempt-off`, `softirq` and `hog` as their users meet them.

#[path = "../../whylate-sources/tests/kernel/programs.rs"]
mod programs;
mod running;
// Not every test program uses all of it.
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/turn.rs"]
mod turn;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use running::{Running, whylate};
use turn::turn;

const KINDS: [&str; 4] = ["irqs-off", "preempt-off", "softirq", "hog"];

/// True, and a line that says why, where this kernel cannot make it.
fn is_skipped(kind: &str) -> Result<bool> {
    let output = whylate(&["inject", kind, "--for", "1us", "--times", "1"]).output()?;
    let is_skipped = output.status.code() == Some(3);
    if is_skipped {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(is_skipped)
}

#[test]
fn arguments_that_make_no_sense_are_refused() -> Result<()> {
    for kind in KINDS {
        for arguments in [
            &["--for", "51ms"][..],
            &["--for", "0"],
            &["--for", "999ns"],
            &["--for", "soon"],
            &["--times", "0"],
            &["--times", "10001"],
            &["--for", "50ms", "--times", "1201"],
            &["--for", "10ms", "--every", "19ms"],
            &["--every", "2h"],
            &["--cpu", "-1"],
            &["--cpu", "all"],
            &["--policy", "nonsense"],
        ] {
            let output = whylate(&[&["inject", kind][..], arguments].concat()).output()?;
            assert_eq!(output.status.code(), Some(2), "{kind} {arguments:?}");
            assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{kind} {arguments:?}");
        }
    }
    for arguments in [&["--priority", "0"][..], &["--priority", "99"], &["--policy", "normal", "--priority", "5"]] {
        let output = whylate(&[&["inject", "hog"][..], arguments].concat()).output()?;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    Ok(())
}

#[test]
fn json_tells_every_disturbance() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    for (kind, in_json) in KINDS.into_iter().zip(["irqs_off", "preempt_off", "softirq", "hog"]) {
        if is_skipped(kind)? {
            continue;
        }
        let output =
            whylate(&["inject", kind, "--for", "2ms", "--times", "3", "--every", "20ms", "--json"]).output()?;
        let stderr = String::from_utf8(output.stderr)?;
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        println!("{json}");
        assert_eq!((&json["kind"], &json["complete"]), (&in_json.into(), &true.into()));
        assert_eq!((&json["wanted_ns"], &json["times"]), (&2_000_000.into(), &3.into()));
        let disturbances = json["disturbances"].as_array().context("no list")?;
        assert_eq!(disturbances.len(), 3);
        for one in disturbances {
            assert!(one["ns"].as_u64().is_some_and(|ns| ns >= 2_000_000) && one["cpu"] == json["cpu"], "{one}");
            assert!(one["start"].is_string() && one["start_monotonic_ns"].is_u64(), "{one}");
            assert_eq!(one["on_cpu_ns"].is_u64(), kind == "hog", "{one}");
        }
    }
    Ok(())
}

#[test]
fn ctrl_c_ends_it_and_it_tells_how_many_of_how_many() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    for kind in KINDS {
        if is_skipped(kind)? {
            continue;
        }
        let mut whylate = Running::start(&["inject", kind, "--times", "5000"])?;
        let mut stdout = BufReader::new(whylate.stdout()?);
        // Each one is written when it is over.
        let mut written = String::new();
        stdout.read_line(&mut written)?;
        whylate.signal(Signal::INT)?;
        stdout.read_to_string(&mut written)?;
        let (status, stderr) = whylate.end()?;
        println!("{written}");
        assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
        let made = written.lines().filter(|line| line.starts_with('#')).count();
        assert!((1..5000).contains(&made));
        assert!(
            written.lines().last().is_some_and(|line| line.contains(&format!(", {made} of 5000 times"))),
            "{written}"
        );
    }
    Ok(())
}

#[test]
fn work_ends_well_at_ctrl_c_too() -> Result<()> {
    let mut whylate = Running::start(&["inject", "work", "--delay", "1h"])?;
    // It watches for signals before it loads its program.
    while whylate.is_alive()? {
        if programs::held_by(whylate.pid()).is_ok_and(|held| !held.is_empty()) {
            whylate.signal(Signal::INT)?;
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let (status, stderr) = whylate.end()?;
    if status.code() == Some(3) {
        println!("skipped: {}", stderr.trim_end());
        return Ok(());
    }
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    Ok(())
}

#[test]
fn killed_it_leaves_no_program_behind() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    for kind in ["irqs-off", "softirq"] {
        if is_skipped(kind)? {
            continue;
        }
        let mut whylate = Running::start(&["inject", kind, "--for", "50ms", "--every", "100ms", "--times", "1000"])?;
        BufReader::new(whylate.stdout()?).read_line(&mut String::new())?;
        let held = programs::held_by(whylate.pid())?;
        assert!(!held.is_empty());
        whylate.signal(Signal::KILL)?;
        let (status, _) = whylate.end()?;
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        programs::ensure_gone(&held)?;
    }
    Ok(())
}

#[test]
fn a_reader_that_has_had_enough_is_a_normal_end() -> Result<()> {
    let Some(_turn) = turn() else { return Ok(()) };
    let mut whylate = Running::start(&["inject", "hog", "--policy", "normal", "--times", "5000"])?;
    BufReader::new(whylate.stdout()?).read_line(&mut String::new())?;
    let (status, stderr) = whylate.end()?;
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    Ok(())
}
