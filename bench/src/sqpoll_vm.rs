// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accuracy of `whylate sqpoll --precise`, compared with the function_graph tracer, in a virtual machine: a long kernel
//! test.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::results::{Arguments, Section};
use crate::table::{Figure, Show, column};
use crate::{child, vm};

const KERNEL: &str = "6.12-cloud";
const TEST: &str = "kernel_sqpoll_precise";
const INTERVALS: usize = 10;
/// In percentage points.
const LIMIT: f64 = 1.0;

/// One interval, in percent and percentage points.
struct Sample {
    truth: f64,
    reported: f64,
    hidden: f64,
}

/// Measurements of one duty, and the reasons of repeated tries.
#[derive(Default)]
struct Duty {
    samples: Vec<Sample>,
    tries: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let program = test_program()?;
    let (program, intervals) = (program.to_string_lossy(), format!("WHYLATE_INTERVALS={INTERVALS}"));
    let before = ["--no-whylate", "--timeout", "900", "--with", &program, "--", "WHYLATE_EMULATED=1", &intervals];
    let script = [vm::KEEP_ENABLED, "exec \"$@\"\n"].concat();
    let text = vm::run(KERNEL, &before, &script, &[&program, "--nocapture"])?;
    let duties = duties(&text)?;
    ensure!(!duties.is_empty(), "it measured nothing: {text}");
    let largest = duties.values().flat_map(|duty| &duty.samples).map(Sample::off_at_most).fold(0.0, f64::max);
    let what = "working share, largest error of an interval with what may be hidden";
    let columns = [
        column("least work by the tracer", Show::Min(1), " %", |sample: &Sample| sample.truth),
        column("most", Show::Max(1), " %", |sample| sample.truth),
        column("mean error, points", Show::Mean(2), "", Sample::off),
        column("largest", Show::Max(2), "", Sample::off),
        column("with what may be hidden", Show::Max(2), "", Sample::off_at_most),
    ];
    let rows = duties.values().map(|duty| ((duty.tries.len() + 1).to_string(), duty.samples.iter().collect()));
    let title = "`whylate sqpoll --precise`";
    let section = Section::new(arguments, "sqpoll-vm", title, "bench-sqpoll-vm", "sqpoll-vm")
        .fact(&format!("in a virtual machine: Debian's {KERNEL}, 2 emulated CPUs"))
        .figures([Figure::new(what, largest, 2).unit("points").at_most(LIMIT)])
        .text(&format!(
            "{INTERVALS} intervals of 1 s of each load. The truth is how long the thread was in `io_submit_sqes` and `io_handle_tw_list` and on a CPU, by the \
             kernel's function_graph tracer and `sched_switch` in the same run. The tool's programs are at the same functions, within what the tracer counts: \
             what they take themselves is hidden between the two. It is in each call, so for each one as much is added as the shortest calls take."
        ))
        .grid("tries", &columns, rows);
    let reasons = duties.values().flat_map(|duty| &duty.tries);
    reasons.fold(section, |section, reason| section.text(&format!("Repeated: {reason}."))).publish()
}

/// Builds the test program, and returns its path.
fn test_program() -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--workspace", "--test", TEST, "--no-run", "--message-format=json"]);
    let text = String::from_utf8(child::run(cargo.stderr(Stdio::inherit()))?.stdout)?;
    let mut messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let built = messages.find(|message| message["target"]["name"] == TEST && message["executable"].is_string());
    Ok(PathBuf::from(built.context("cargo names no program")?["executable"].as_str().unwrap_or_default()))
}

/// Parses `duty 0.37: by functions 0.3052, reported 0.3038: off by -0.145 points; 61 calls, […], in total 0.313
/// points`.
fn duties(text: &str) -> Result<BTreeMap<String, Duty>> {
    let mut duties: BTreeMap<String, Duty> = BTreeMap::new();
    let mut last = String::new();
    for line in text.lines() {
        // A failed round is repeated (`in_rounds` in the test's `kernel/chance.rs`).
        if let Some(reason) = ["a round fails: ", "not judged, "].iter().find_map(|begin| line.strip_prefix(begin)) {
            let duty = duties.entry(last.clone()).or_default();
            duty.samples.clear();
            duty.tries.push(reason.to_owned());
            continue;
        }
        let Some((_, line)) = line.split_once("duty ") else { continue };
        let Some((duty, rest)) = line.split_once(": by functions ") else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let number = |word: Option<&&str>| -> Result<f64> {
            let word = word.with_context(|| format!("cannot read {line:?}"))?;
            Ok(word.trim_end_matches([',', ':', ';']).parse()?)
        };
        let hidden = number(words.len().checked_sub(2).and_then(|index| words.get(index)))?;
        let sample = Sample { truth: number(words.first())? * 100.0, reported: number(words.get(2))? * 100.0, hidden };
        duty.clone_into(&mut last);
        duties.entry(last.clone()).or_default().samples.push(sample);
    }
    Ok(duties)
}

impl Sample {
    fn off(&self) -> f64 {
        (self.reported - self.truth).abs()
    }

    fn off_at_most(&self) -> f64 {
        self.off() + self.hidden
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_output_of_the_test() {
        let text = "test a ... duty 0.37: 9 requests each 50ms make 0.3600\n\
                    duty 0.37: by functions 0.3052, reported 0.4038: off by +9.86 points; 61 calls, of which each may hide 51827 ns, in total 0.313 points\n\
                    a round fails: duty 0.37: by functions 0.3052, reported 0.4038, and 0.003 may be hidden\n\
                    duty 0.37: by functions 0.3052, reported 0.3038: off by -0.145 points; 61 calls, of which each may hide 51827 ns, in total 0.313 points\n";
        let duties = duties(text).expect("it can be read");
        let duty = &duties["0.37"];
        assert_eq!((duty.samples.len(), duty.tries.len()), (1, 1));
        assert!((duty.samples[0].off_at_most() - 0.453).abs() < 1e-6);
    }
}
