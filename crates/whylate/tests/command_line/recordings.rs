// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate diff` of synthetic recordings, and recordings of each format version.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use whylate_model::diff::{Diff, Outcome, What};
use whylate_model::recording::{Frame, Header, Line, Measured};
use whylate_model::{ActorName, Cause, CauseKind, LateEvent, Series, Snapshot};

use crate::running::whylate;

const SECOND_NS: u64 = 1_000_000_000;
/// 2026-11-21T09:14:00Z.
const START_NS: u64 = 1_795_252_440 * SECOND_NS;

/// Writes a recording of one snapshot per second; in the seconds that `is_late` selects there is a late item.
fn write_recording(path: &Path, seconds: u64, is_late: impl Fn(u64) -> bool) -> Result<()> {
    let source = "wq".to_owned();
    let measured = Measured { source, backend: "made".to_owned(), late_from_ns: Some(10_000_000), nothing: None };
    let header = Header {
        recording: 1,
        schema: 1,
        start_unix_ns: START_NS,
        host: "web\x1b[2J1".to_owned(),
        sources: vec![measured],
        ..Header::default()
    };
    let mut lines = vec![Line::Header(header)];
    for second in 0..seconds {
        let mut snapshot = Snapshot::new("wq", "made", "web1", START_NS + second * SECOND_NS);
        snapshot.duration_ns = SECOND_NS;
        let latencies = (0..50).map(|number| 1_000 * (1 + (number * 37 + second * 11) % 90));
        snapshot.series.push(Series {
            labels: [("handler".to_owned(), "vmstat_update".to_owned())].into(),
            histograms: [("latency".to_owned(), latencies.collect())].into(),
            ..Series::default()
        });
        if is_late(second) {
            let causes =
                vec![Cause::new(CauseKind::Thread, ActorName::thread("evil\x1b[J", second as u32 + 1), 40_000_000)];
            snapshot.late.push(LateEvent { latency_ns: 40_000_000, causes, ..LateEvent::default() });
        }
        lines.push(Line::Snapshot(Box::new(snapshot)));
    }
    let mut frame = Frame::new()?;
    for line in &lines {
        frame.add((serde_json::to_string(line)? + "\n").as_bytes(), line.span_unix_ns())?;
    }
    let (bytes, index) = frame.finish()?;
    Ok(fs::write(path, [&index.to_bytes()[..], &bytes].concat())?)
}

fn diff(arguments: &[&str]) -> Result<Diff> {
    let output = whylate(&["diff", "--json"]).args(arguments).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("it printed no difference")
}

#[test]
fn compares_two_recordings_or_parts_of_one() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (path, later) = (directory.path().join("a.whylate"), directory.path().join("b.whylate"));
    write_recording(&path, 40, |second| second >= 20)?;
    write_recording(&later, 20, |_| true)?;
    let [name, later] = [&path, &later].map(|path| path.to_str().unwrap_or_default());
    let same = diff(&[name, name])?;
    ensure!(same.rows.is_empty() && same.differ == 0 && same.compared > 2, "{same:?}");
    let all = diff(&[name, name, "--all"])?;
    ensure!(all.rows.iter().all(|row| !row.outcome.differs()) && all.rows.len() as u64 > all.compared);
    for arguments in [
        &[name, "--split", "2026-11-21T09:14:20Z"][..],
        &[name, "--before", "..2026-11-21T09:14:20Z", "--after", "2026-11-21T09:14:20Z.."],
        &[name, later, "--before", "2026-11-21T09:14:00Z..2026-11-21T09:14:20Z"],
    ] {
        let found = diff(arguments)?;
        let (first, evil) = (&found.rows[0], ActorName::from("evil\x1b[J"));
        ensure!(first.what == What::Culprit { kind: CauseKind::Thread, who: evil }, "{arguments:?}: {first:?}");
        ensure!((first.outcome, first.before.count, first.after.count) == (Outcome::More, 0, 20), "{first:?}");
        ensure!(found.rows.len() == 2 && matches!(found.rows[1].what, What::Late { .. }), "{found:?}");
        let text = String::from_utf8(whylate(&["diff"]).args(arguments).output()?.stdout)?;
        ensure!(text.contains("thread evil?[J") && text.contains("only after") && !text.contains('\x1b'), "{text}");
        ensure!(text.lines().next().is_some_and(|line| line.contains(" has delay caused by thread evil?[J")), "{text}");
        let details = String::from_utf8(whylate(&["diff", "-v"]).args(arguments).output()?.stdout)?;
        ensure!(details.contains("Mann–Whitney U") && details.contains("Benjamini–Hochberg"), "{details}");
        ensure!(!text.contains("Mann–Whitney U"), "{text}");
    }
    Ok(())
}

#[test]
fn diff_rejects_invalid_arguments() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("a.whylate");
    write_recording(&path, 10, |_| false)?;
    let name = path.to_str().context("a plain name")?;
    for (arguments, status, message) in [
        (&[name][..], 2, "--split"),
        (&[name, name, "--after", "2026-11-21T09:15:00Z..2026-11-21T09:14:00Z"], 2, "ends before it begins"),
        (&[name, name, "--after", "2026-11-22T09:15:00Z.."], 1, "no snapshots in that span"),
        (&[name, "/dev/null"], 1, "/dev/null"),
    ] {
        let output = whylate(&["diff"]).args(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(status) && said.contains(message), "{arguments:?}: {said}");
    }
    Ok(())
}

/// Recordings of every format version, which must stay readable.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings/schema-1.whylate");

/// Returns the standard output of a run that succeeds.
fn printed(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(text.into_owned())
}

#[test]
fn recordings_of_each_version_are_read() -> Result<()> {
    let look = printed(whylate(&["replay", GOLDEN]).env("TZ", "UTC"))?;
    let table = printed(whylate(&["replay", GOLDEN, "wq", "--table", "--why", "1ms"]).env("TZ", "UTC"))?;
    let sleeps = printed(whylate(&["replay", GOLDEN, "offcpu", "--flat"]).env("TZ", "UTC"))?;
    // The next commands have the path that was given.
    insta::assert_snapshot!(format!("{look}\n{table}\n{sleeps}").replace(GOLDEN, "schema-1.whylate"));
    Ok(())
}
