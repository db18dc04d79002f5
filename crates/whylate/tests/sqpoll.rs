// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate sqpoll`.

#[path = "running/quota.rs"]
mod quota;
mod running;

use std::io::{BufRead as _, BufReader, Read as _};

use anyhow::{Result, ensure};
use quota::Quota;
use running::{Running, whylate};
use rustix::process::{Signal, geteuid};
use serde_json::Value;

fn is_root() -> bool {
    if !geteuid().is_root() {
        println!("skipped: needs root");
    }
    geteuid().is_root()
}

#[test]
fn fails_if_the_process_has_no_submission_thread() -> Result<()> {
    let pid = std::process::id().to_string();
    for arguments in
        [&["sqpoll", "-p", &pid][..], &["sqpoll", "-p", &pid, "--json"], &["sqpoll", "-p", &pid, "--backend", "fdinfo"]]
    {
        if !is_root() {
            return Ok(());
        }
        let output = whylate(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1), "{arguments:?}: {}: {said}", output.status);
        ensure!(output.stdout.is_empty(), "{arguments:?} printed {}", String::from_utf8_lossy(&output.stdout));
        let expected = format!(
            "whylate: process {pid} has no io_uring submission thread now: a ring that is set up with IORING_SETUP_SQPOLL"
        );
        ensure!(said.contains(&expected), "{arguments:?} said {said}");
    }
    Ok(())
}

#[test]
fn measures_thread_until_ctrl_c() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let mut load = Running::start(&["inject", "sqpoll", "--duty", "20", "--for", "60s"])?;
    let mut first_line = String::new();
    BufReader::new(load.stdout()?).read_line(&mut first_line)?;
    let mut watcher = Running::start(&["sqpoll", "--json", "-p", &load.pid().to_string(), "0.2"])?;
    let mut lines = BufReader::new(watcher.stdout()?);
    let mut line = String::new();
    lines.read_line(&mut line)?;
    let snapshot: Value = serde_json::from_str(&line)?;
    ensure!(snapshot["series"][0]["values"]["working"].is_number(), "{snapshot}");
    watcher.signal(Signal::INT)?;
    let mut rest = String::new();
    lines.read_to_string(&mut rest)?;
    let (status, said) = watcher.end()?;
    ensure!(status.success() && rest.lines().count() >= 1, "{status}, {said}, after Ctrl-C {rest}");
    load.signal(Signal::INT)?;
    ensure!(load.end()?.0.success(), "the load failed");
    Ok(())
}

#[test]
fn names_quota_of_throttled_submission_thread() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let Some(quota) = Quota::make("sqpoll")? else { return Ok(()) };
    let inject = format!("{}; exec {} inject sqpoll --duty 90 --for 60s", quota.enter(), env!("CARGO_BIN_EXE_whylate"));
    let mut load = Running::of(std::process::Command::new("sh").args(["-c", &inject]))?;
    BufReader::new(load.stdout()?).read_line(&mut String::new())?;
    let pid = load.pid().to_string();
    let output = whylate(&["sqpoll", "-p", &pid, "--json", "1", "1"]).output()?;
    let text = String::from_utf8(whylate(&["sqpoll", "-p", &pid, "1", "1"]).output()?.stdout)?;
    load.signal(Signal::INT)?;
    load.end()?;
    let snapshot: Value = serde_json::from_slice(&output.stdout)?;
    let series = snapshot["series"].as_array().cloned().unwrap_or_default();
    let share = |name: &str| series.iter().filter_map(|series| series["values"][name].as_f64()).fold(0.0, f64::max);
    let by = series
        .iter()
        .find(|series| series["values"]["throttled"].is_number())
        .map(|series| series["labels"]["by"].clone());
    ensure!(by == Some(quota.name().into()), "throttled by {by:?}, not by {}: {snapshot}", quota.name());
    ensure!(share("throttled") >= 0.5 * share("starved") && share("starved") > 0.4, "{snapshot}");
    ensure!(text.contains("cpu.max") && !text.contains("pin it"), "{text}");
    Ok(())
}

#[test]
fn closed_pipe_ends_it_with_success() -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let mut watcher = Running::start(&["sqpoll", "0.1"])?;
    drop(watcher.stdout()?);
    let (status, said) = watcher.end()?;
    ensure!(status.success(), "{status}: {said}");
    Ok(())
}
