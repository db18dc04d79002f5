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

#[test]
fn command_lines_of_units_are_accepted() -> Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    for unit in ["whylate-exporter.service", "whylate-recorder.service"] {
        let unit = fs::read_to_string(directory.join(unit))?;
        let line =
            unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/whylate ")).context("a command")?;
        let words: Vec<&str> = line.split(' ').filter(|word| *word != "$OPTIONS").chain(["--help"]).collect();
        let output = output_of(&words)?;
        ensure!(output.status.success(), "{line}: {}", text(&output.stderr));
    }
    Ok(())
}
