// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of systemd: valid, confined, and with command lines that whylate accepts.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::{output_of, text};

/// Highest exposure of a unit, as systemd-analyze rates it from 0 to 10.
const MAX_EXPOSURE: f64 = 4.0;

#[test]
fn units_are_valid_and_confined() -> Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("skipped: there is no systemd-analyze");
        return Ok(());
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let mut units = 0;
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_of_kind = |kind: &str| path.extension().is_some_and(|extension| extension == kind);
        if !is_of_kind("service") && !is_of_kind("socket") {
            continue;
        }
        let analyzed = |arguments: &[&str]| Command::new("systemd-analyze").args(arguments).arg(&path).output();
        let verified = text(&analyzed(&["verify", "--man=no"])?.stderr);
        let name = path.file_name().context("a name")?.to_string_lossy().into_owned();
        // The units of the system may have faults of their own.
        let faults = verified.lines().filter(|line| line.contains(&name) && !line.contains("is not executable"));
        let faults: Vec<&str> = faults.collect();
        ensure!(faults.is_empty(), "{faults:?}");
        units += 1;
        if is_of_kind("socket") {
            continue;
        }
        let rated = text(&analyzed(&["security", "--offline=true", "--no-pager"])?.stdout);
        let exposure =
            rated.rsplit_once(".service: ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
        let exposure = exposure.with_context(|| format!("{name}: {rated}"))?;
        ensure!(exposure < MAX_EXPOSURE, "{name}: {exposure}");
    }
    ensure!(units == 3, "{units} units");
    Ok(())
}

/// Returns the options in the comments of a unit and of its file in `/etc/default`.
fn examples(unit: &str, defaults: &str) -> Result<Vec<String>> {
    let comment = unit.lines().find_map(|line| line.strip_prefix("# Options such as ")).context("examples")?;
    let (comment, _) = comment.split_once(". ").unwrap_or((comment.trim_end_matches('.'), ""));
    let of_defaults = defaults.lines().filter_map(|line| line.strip_prefix("#OPTIONS=\"")?.strip_suffix('"'));
    let examples: Vec<String> = comment.split(" or ").chain(of_defaults).map(str::to_owned).collect();
    ensure!(examples.len() > 2 && examples.iter().all(|example| example.starts_with("--")), "{examples:?}");
    Ok(examples)
}

#[test]
fn command_lines_of_units_and_their_examples_are_accepted() -> Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    // Neither can be had, which the commands find after they have accepted all options, and before they measure.
    let fails = "/proc/whylate/";
    let places = [("whylate-exporter", format!("--listen=unix:{fails}")), ("whylate-recorder", String::new())];
    for (name, more) in places {
        let unit = fs::read_to_string(directory.join(format!("{name}.service")))?;
        let defaults = fs::read_to_string(directory.join("default").join(name))?;
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).context(key.to_owned());
        let line = value("ExecStart=/usr/bin/whylate ")?;
        let state = format!("/var/lib/{}/", value("StateDirectory=")?);
        ensure!(value("StateDirectoryMode=")? == "0700", "others can read recordings");
        for example in examples(&unit, &defaults)?.iter().map(String::as_str).chain([""]) {
            let line = line.replace("$OPTIONS", example);
            // All else is read-only.
            let paths = line.split([' ', '=']).filter(|word| word.starts_with('/'));
            let outside: Vec<&str> = paths.filter(|path| !path.starts_with(&state)).collect();
            ensure!(outside.is_empty(), "{line}: {outside:?}");
            let words = format!("{line} {more}").replace(&state, fails);
            let output = output_of(&words.split_whitespace().collect::<Vec<_>>())?;
            let said = text(&output.stderr);
            ensure!(output.status.code() == Some(1) && said.contains("cannot "), "{line}: {}: {said}", output.status);
        }
    }
    Ok(())
}
