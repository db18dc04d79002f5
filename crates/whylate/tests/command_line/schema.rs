// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `--json` prints is valid by docs/schema-1.json.

use std::fs;

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;

use super::{RECORDINGS, output_of, text};

#[path = "../../../whylate-model/src/schema/validate.rs"]
mod validate;

/// Commands for each recording, and what they print.
const COMMANDS: [(&str, &str); 12] = [
    ("replay F --json", "Overview"),
    ("replay F --json --rank-by cgroup", "Overview"),
    ("replay F wq --json", "Snapshot"),
    ("replay F wq --why 1ms --json 1", "Snapshot"),
    ("replay F timerlat top --why 1ms --json", "Snapshot"),
    ("replay F irqsoff --why 1ms --json", "Snapshot"),
    ("replay F offcpu --json", "Snapshot"),
    ("replay F offcpu --why 5ms --json", "Snapshot"),
    ("replay F sqpoll --why 1ms --json", "Snapshot"),
    ("replay F block --why 1ms --json", "Snapshot"),
    ("diff F F --json", "Diff"),
    ("diff F sources-6.18.whylate --json", "Diff"),
];

fn root() -> Result<Value> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/schema-1.json"))?;
    Ok(serde_json::from_str(&text)?)
}

/// Checks that whole figures are integers, and that percentiles have no more digits than their bucket justifies.
fn check_figures(value: &Value, at: &str) -> Result<()> {
    match value {
        Value::Number(number) => {
            let is_whole = number.as_f64().is_some_and(|number| number.fract() == 0.0);
            // Shares and probabilities are fractions.
            let is_fraction =
                [".share", ".p", ".q", ".false_share", ".least_change"].iter().any(|end| at.ends_with(end));
            ensure!(!number.is_f64() || !is_whole || is_fraction, "{at}: {number} is no integer");
        }
        Value::Array(all) => all.iter().try_for_each(|item| check_figures(item, at))?,
        Value::Object(all) => {
            let number = |name: &str| all.get(name).and_then(Value::as_u64);
            let digits = if number("grouping_power") == Some(6) { 4 } else { 3 };
            for name in ["p50_ns", "p90_ns", "p99_ns", "p999_ns"] {
                let Some(ns) = number(name).filter(|&ns| Some(ns) != number("max_ns")) else { continue };
                let text = ns.to_string();
                let has_zeros = text.bytes().skip(digits).all(|digit| digit == b'0');
                ensure!(has_zeros, "{at}.{name}: {ns} has more than {digits} digits");
            }
            all.iter().try_for_each(|(name, field)| check_figures(field, &format!("{at}.{name}")))?;
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
    Ok(())
}

/// Checks each line, and returns their number.
fn check(root: &Value, definition: &str, printed: &str) -> Result<u64> {
    let mut lines = 0;
    for line in printed.lines() {
        let value: Value = serde_json::from_str(line)?;
        validate::check(root, definition, &value).map_err(|why| anyhow!(why))?;
        check_figures(&value, "")?;
        lines += 1;
    }
    Ok(lines)
}

#[test]
fn json_of_each_recording_is_valid_by_the_schema() -> Result<()> {
    let (root, mut lines) = (root()?, 0);
    for file in fs::read_dir(RECORDINGS)? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "whylate") {
            continue;
        }
        let path = path.to_str().context("a name in UTF-8")?;
        for (command, definition) in COMMANDS {
            let other = format!("{RECORDINGS}/sources-6.18.whylate");
            let words: Vec<&str> = command
                .split(' ')
                .map(|word| match word {
                    "F" => path,
                    "sources-6.18.whylate" => &other,
                    word => word,
                })
                .collect();
            let output = output_of(&words)?;
            // A recording need not have each source.
            let is_known = matches!(output.status.code(), Some(0 | 1));
            ensure!(is_known, "{path}: {command}: {}", text(&output.stderr));
            lines += check(&root, definition, &text(&output.stdout)).with_context(|| format!("{path}: {command}"))?;
        }
    }
    ensure!(lines > 100, "only {lines} lines");
    Ok(())
}

#[test]
fn json_of_imports_is_valid_by_the_schema() -> Result<()> {
    let of_model = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests");
    for (file, definition) in [
        ("traces/tracefs.txt", "CommandReport"),
        ("traces/perf-script.txt", "CommandReport"),
        ("ftrace/irqsoff-6.12.txt", "Snapshot"),
        ("ftrace/trace-pipe-5.4.txt", "Snapshot"),
    ] {
        let output = output_of(&["import", &format!("{of_model}/{file}"), "--json"])?;
        let lines = check(&root()?, definition, &text(&output.stdout)).with_context(|| file.to_owned())?;
        ensure!(lines == 1, "{file}: {}", text(&output.stderr));
    }
    Ok(())
}
