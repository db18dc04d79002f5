// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timelines of CPUs as text, each with questions and the expected answers.
//!
//! Every `.txt` file in this directory holds a timeline about one mechanism; `README.md` describes the format.
//! `UPDATE_TIMELINES=1` replaces the expected answers by those of this build.

mod answer;
mod format;
mod symbols;

use std::fs;
use std::path::{Path, PathBuf};

use format::Timeline;

fn files() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/timelines");
    let entries = fs::read_dir(directory).expect("the directory can be read");
    let paths = entries.map(|entry| entry.expect("so can its entries").path());
    let mut files: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|of| of == "txt")).collect();
    files.sort();
    files
}

/// The text with the answers to all of its questions replaced.
fn answered(text: &str) -> String {
    let mut timeline = Timeline::parse(text);
    assert!(!timeline.questions.is_empty(), "nothing is asked");
    let mut answers = Vec::new();
    for question in std::mem::take(&mut timeline.questions) {
        answers.push((question.line, answer::render(&question, &mut timeline)));
    }
    let mut answers = answers.into_iter().peekable();
    let mut answered = String::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('=')) {
        answered.push_str(line);
        answered.push('\n');
        if let Some((_, answer)) = answers.next_if(|(asked_in, _)| *asked_in == number) {
            answer.lines().for_each(|line| answered.push_str(&format!("= {line}\n")));
        }
    }
    answered
}

#[test]
fn timelines_have_the_expected_paths_and_budgets() {
    let updates = std::env::var_os("UPDATE_TIMELINES").is_some();
    let mut differing = Vec::new();
    let files = files();
    assert!(files.len() >= 30, "there are {} timelines", files.len());
    for path in files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        println!("{name}");
        let text = fs::read_to_string(&path).expect("a timeline can be read");
        let answered = answered(&text);
        if updates {
            fs::write(&path, answered).expect("a timeline can be written");
        } else if answered != text {
            let changed = text.lines().zip(answered.lines()).find(|(expected, now)| expected != now);
            let (expected, now) = changed.unwrap_or(("(the end)", "(more or fewer lines)"));
            differing.push(format!("{name}:\n  expected: {expected}\n  now:      {now}"));
        }
    }
    assert!(differing.is_empty(), "{}\n(UPDATE_TIMELINES=1 writes the answers of this build)", differing.join("\n"));
}
