// SPDX-License-Identifier: MIT OR Apache-2.0
//! What makes others late has one name, in whatever view it stands.

mod running;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/turn.rs"]
mod turn;

use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use whylate_model::look::Look;

use running::{Running, whylate};
use turn::turn_to_measure;

/// Whoever waits for the lock waits until the sleep of its holder is over, which another process does.
const HOLDERS: &str = "for i in 1 2 3 4 5 6; do flock $0 sleep 0.3 & sleep 0.05; flock $0 true; wait; done";

fn printed(arguments: &[&str]) -> Result<String> {
    let output = whylate(arguments).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn holders(lock: &Path) -> Result<Child> {
    Ok(Command::new("sh").args(["-c", HOLDERS]).arg(lock).spawn()?)
}

/// Names of culprits that are threads called `sleep`, of which no other culprit is a timer without a name.
fn sleepers<'a>(all: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Vec<String>> {
    let timers: Vec<&str> = all.filter(|(kind, _)| *kind == "timer").map(|(_, who)| who).collect();
    ensure!(!timers.contains(&"timer"), "a culprit has no name: {timers:?}");
    Ok(timers.into_iter().filter(|who| who.starts_with("sleep:")).map(str::to_owned).collect())
}

#[test]
fn a_thread_that_slept_is_the_culprit_in_each_view() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (recording, page) = (path("a.whylate"), path("a.html"));
    let mut looking = Running::start(&["-d", "4s", "-o", &recording])?;
    sleep(Duration::from_millis(1_500));
    holders(&folder.path().join("lock"))?.wait()?;
    let (status, stderr) = looking.end()?;
    ensure!(status.success(), "{stderr}");
    let look: Look = serde_json::from_str(&printed(&["replay", &recording, "--json"])?)?;
    let culprits = || look.culprits.iter().map(|culprit| (culprit.kind.name(), culprit.who.as_str()));
    let who = sleepers(culprits())?;
    let longest = who.first().with_context(|| format!("no sleeper is among {:?}", look.culprits))?;
    let text = printed(&["replay", &recording])?;
    // Others on a busy machine may have delayed more.
    let is_told = text.lines().any(|line| line.contains("  sleep  ") && line.contains(&format!(" {longest}: ")));
    ensure!(is_told || culprits().take(8).all(|(_, who)| who != longest), "{text}");
    printed(&["report", &recording, "-o", &page])?;
    let page = std::fs::read_to_string(page)?;
    let bare = ["due to timer", "<li>timer: ", "<td>timer</td><td>timer<"].into_iter().find(|bare| page.contains(bare));
    ensure!(page.contains(&format!("{longest} sleeping")) && bare.is_none(), "the report has {bare:?}");
    let csv = path("csv");
    printed(&["export", &recording, "--csv", &csv])?;
    let causes = std::fs::read_to_string(Path::new(&csv).join("causes.csv"))?;
    ensure!(causes.contains(longest.as_str()) && !causes.contains(",timer,timer,"), "{causes}");
    Ok(())
}

#[test]
fn explained_waits_have_the_same_culprits_as_a_look() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let mut looking = Running::start(&["offcpu", "--why", "100ms", "--worst", "1000", "--json", "-d", "4s"])?;
    let output = looking.stdout()?;
    sleep(Duration::from_millis(1_500));
    holders(&folder.path().join("lock"))?.wait()?;
    let snapshot: Value = serde_json::from_reader(output)?;
    let late = snapshot["late"].as_array().context("nothing is late")?;
    let causes = late.iter().flat_map(|event| event["causes"].as_array().into_iter().flatten());
    let who = sleepers(causes.filter_map(|cause| Some((cause["kind"].as_str()?, cause["who"].as_str()?))))?;
    ensure!(!who.is_empty(), "{late:?}");
    Ok(())
}
