// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pins what every replaying command shows of each recording in `recordings/`, byte by byte, in
//! `golden/RECORDING/COMMAND.txt`:
//! the exit status, standard output, standard error, and the files that it writes. `WHYLATE_BLESS=1` rewrites them.
//!
//! Long texts and binary files are stored as their SHA-256, after a start that a reader can compare. The screens of
//! `whylate top` are in the same directories (`src/top/golden.rs`).

#[path = "golden/directory.rs"]
mod directory;
#[path = "report/tables.rs"]
mod tables;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};
use whylate_model::recording::Unmeasured;
use whylate_model::recording::{Frame, Line, Reader};
use whylate_model::sources::CARDS;

use directory::{RECORDINGS, check, recordings};

/// Bytes of a text that are stored.
const KEPT_LINES: usize = 100;
const KEPT_BYTES: usize = 8_000;

/// How a file or standard output is stored.
#[derive(Clone, Copy)]
enum Form {
    /// As text, up to the limit.
    Text,
    /// JSON, one value per line: each is stored indented, up to the limit.
    Json,
    /// Its size and digest.
    Digest,
    /// A page: its tables, and the digest of the rest.
    Page,
}
use Form::{Digest, Json, Page, Text};

/// Name of the golden file, the command with `F` for the recording, how standard output is stored, and the files that
/// it writes into the current directory.
type Case = (&'static str, &'static str, Form, &'static [(&'static str, Form)]);

/// Commands that run on every recording.
const CASES: &[Case] = &[
    ("look", "replay F", Text, &[]),
    ("look-json", "replay F --json", Json, &[]),
    ("look-by-name", "replay F --by name", Text, &[]),
    ("look-by-cgroup", "replay F --by cgroup", Text, &[]),
    ("wq", "replay F wq", Text, &[]),
    ("wq-table", "replay F wq --table --phases", Text, &[]),
    ("wq-interval", "replay F wq --table 1 2", Text, &[]),
    ("wq-json", "replay F wq --json", Json, &[]),
    ("wq-why", "replay F wq --why 10ms", Text, &[]),
    ("wq-worst-json", "replay F wq --why 5ms --worst 3 --json", Json, &[]),
    ("timerlat-top", "replay F timerlat top -q", Text, &[]),
    ("timerlat-hist", "replay F timerlat hist --percentiles", Text, &[]),
    ("timerlat-why", "replay F timerlat top --why 10ms --worst 2", Text, &[]),
    ("timerlat-json", "replay F timerlat top --json", Json, &[]),
    ("irqsoff", "replay F irqsoff", Text, &[]),
    ("irqsoff-why", "replay F irqsoff --why 10ms --histogram", Text, &[]),
    ("irqsoff-json", "replay F irqsoff --json", Json, &[]),
    ("offcpu", "replay F offcpu", Text, &[]),
    ("offcpu-flat", "replay F offcpu --flat", Text, &[]),
    ("offcpu-blocked", "replay F offcpu --blocked 1s", Text, &[]),
    ("offcpu-why", "replay F offcpu --why 10ms", Text, &[]),
    ("offcpu-json", "replay F offcpu --json", Json, &[]),
    ("offcpu-folded", "replay F offcpu -o out.folded", Text, &[("out.folded", Text)]),
    ("offcpu-flame", "replay F offcpu -o out.svg", Text, &[("out.svg", Digest)]),
    ("offcpu-pprof", "replay F offcpu -o out.pb.gz", Text, &[("out.pb.gz", Digest)]),
    ("offcpu-speedscope", "replay F offcpu -o out.speedscope.json", Text, &[("out.speedscope.json", Digest)]),
    ("offcpu-file", "replay F offcpu -o out.json", Text, &[("out.json", Digest)]),
    ("offcpu-chains-folded", "replay F offcpu --why 5ms -o out.folded", Text, &[("out.folded", Text)]),
    ("offcpu-chains-flame", "replay F offcpu --why 5ms -o out.svg", Text, &[("out.svg", Digest)]),
    ("sqpoll", "replay F sqpoll", Text, &[]),
    ("sqpoll-json", "replay F sqpoll --json", Json, &[]),
    ("block", "replay F block", Text, &[]),
    ("block-table", "replay F block --table --phases", Text, &[]),
    ("block-why", "replay F block --why 10ms", Text, &[]),
    ("block-json", "replay F block --json", Json, &[]),
    ("diff-halves", "diff F --split HALF", Text, &[]),
    ("report", "report F -o out.html", Text, &[("out.html", Page)]),
    ("export-perfetto", "export F --perfetto out.trace", Text, &[("out.trace", Digest)]),
    (
        "export-csv",
        "export F --csv out",
        Text,
        &[
            ("out/snapshots.csv", Text),
            ("out/lost.csv", Text),
            ("out/late.csv", Digest),
            ("out/causes.csv", Digest),
            ("out/path.csv", Digest),
            ("out/series.csv", Digest),
            ("out/buckets.csv", Digest),
            ("out/stacks.csv", Digest),
        ],
    ),
    (
        "export-parquet",
        "export F --parquet out",
        Text,
        &[("out/late.parquet", Digest), ("out/causes.parquet", Digest), ("out/series.parquet", Digest)],
    ),
];

/// Commands on two recordings of one kind: `F`, and the second one by name.
const DIFFS: &[(&str, Case)] = &[
    ("sources-6.1", ("diff", "diff F sources-6.18.whylate", Text, &[])),
    ("sources-6.1", ("diff-json", "diff F sources-6.18.whylate --json", Json, &[])),
    ("paths-6.1", ("diff", "diff F paths-6.18.whylate --all", Text, &[])),
    ("sources-6.1", ("report-diff", "report F --diff sources-6.18.whylate -o out.html", Text, &[("out.html", Page)])),
];

/// Commands that show a span, run on an empty one: the status is 1 and the message is the same.
const EMPTY: &[&str] = &[
    "replay F SPAN",
    "replay F SPAN wq",
    "replay F SPAN timerlat top -q",
    "replay F SPAN irqsoff",
    "replay F SPAN offcpu",
    "replay F SPAN sqpoll",
    "replay F SPAN block --json",
    "report F SPAN -o out.html",
    "export F SPAN --perfetto out.trace",
    "diff F F --before 2001-01-01T00:00:00Z..2001-01-02T00:00:00Z",
];
const SPAN: [&str; 4] = ["--from", "2001-01-01T00:00:00Z", "--to", "2001-01-02T00:00:00Z"];

/// Returns a text in full, or its start, length and digest.
fn kept(text: &str) -> String {
    let mut end = text.len();
    if text.len() > KEPT_BYTES || text.lines().count() > KEPT_LINES {
        let lines: usize = text.split_inclusive('\n').take(KEPT_LINES).map(str::len).sum();
        end = lines.min(KEPT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
    }
    let mut kept = text[..end].to_owned();
    if !kept.is_empty() && !kept.ends_with('\n') {
        kept.push('\n');
    }
    if end < text.len() {
        let _ = writeln!(kept, "[the beginning of {}]", digest(text.as_bytes()));
    }
    kept
}

fn digest(bytes: &[u8]) -> String {
    let sum: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{} bytes, SHA-256 {sum}", bytes.len())
}

fn in_form(bytes: &[u8], form: Form) -> Result<String> {
    let text = String::from_utf8_lossy(bytes);
    Ok(match form {
        Text => kept(&text),
        Json => {
            let values = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
            let mut all = String::new();
            for value in values {
                all += &serde_json::to_string_pretty(&value?)?;
                all.push('\n');
            }
            // The bytes matter, too: field order and number format.
            format!("{}[{}]\n", kept(&all), digest(bytes))
        }
        Digest => format!("[{}]\n", digest(bytes)),
        Page => {
            let mut all = String::new();
            for table in ["sources", "culprits", "late"] {
                let _ = writeln!(all, "{table}:");
                if let Ok(rows) = tables::rows(&text, &format!("<table id=\"{table}\">")) {
                    rows.iter().for_each(|row| all += &format!("    {}\n", row.join(" | ").replace('\n', " ")));
                }
            }
            format!("{}[{}]\n", kept(&all), digest(without_time(&text)?.as_bytes()))
        }
    })
}

/// Returns a page without the time at which it was made.
fn without_time(page: &str) -> Result<String> {
    let (before, rest) = page.split_once("<p>Made by whylate ").context("nobody made it")?;
    let (_, after) = rest.split_once("</p>").context("it does not end")?;
    Ok([before, after].concat())
}

/// Returns the snapshot sources of a recording.
fn sources(recording: &str) -> Result<Vec<String>> {
    let file = fs::File::open(Path::new(RECORDINGS).join(format!("{recording}.whylate")))?;
    Ok(Reader::new(file)?.header().sources.iter().map(|of| of.source.clone()).collect())
}

/// Returns the time in the middle of a recording.
fn half(name: &str) -> Result<String> {
    let mut reader = Reader::new(fs::File::open(Path::new(RECORDINGS).join(name))?)?;
    let (first_ns, mut last_ns) = (reader.header().start_unix_ns, 0);
    while let Some(line) = reader.next_line()? {
        last_ns = last_ns.max(line.span_unix_ns().unwrap_or_default().1);
    }
    Ok(whylate_model::units::rfc3339::format(first_ns.midpoint(last_ns)))
}

/// Runs whylate in an environment where its output depends on the recording alone.
fn whylate(arguments: &[&str], directory: &Path) -> Result<Output> {
    Ok(Command::new(env!("CARGO_BIN_EXE_whylate"))
        .args(arguments)
        .current_dir(directory)
        .env_clear()
        .envs([("TZ", "UTC"), ("COLUMNS", "120"), ("NO_COLOR", "1"), ("LC_ALL", "C.UTF-8"), ("PATH", "/nonexistent")])
        .stdin(Stdio::null())
        .output()?)
}

/// Runs a case in its own directory, so that the output shows nothing of this machine.
fn run(recording: &str, (_, words, form, files): &Case) -> Result<String> {
    let name = format!("{recording}.whylate");
    let directory = tempfile::tempdir()?;
    for one in recordings()? {
        let one = format!("{one}.whylate");
        if one == name || words.contains(&one) {
            std::os::unix::fs::symlink(Path::new(RECORDINGS).join(&one), directory.path().join(&one))?;
        }
    }
    let half = if words.contains("HALF") { half(&name)? } else { String::new() };
    let mut arguments: Vec<&str> = Vec::new();
    for word in words.split(' ') {
        match word {
            "F" => arguments.push(&name),
            "HALF" => arguments.push(&half),
            "SPAN" => arguments.extend(SPAN),
            word => arguments.push(word),
        }
    }
    let output = whylate(&arguments, directory.path())?;
    let status = output.status.code().context("a signal ends it")?;
    ensure!(status != 101, "{arguments:?} panics: {}", String::from_utf8_lossy(&output.stderr));
    let mut shown = format!("$ whylate {}\n[status {status}]\n", arguments.join(" "));
    shown += &in_form(&output.stdout, *form)?;
    // The first command after a killed one restores what that one left, whatever it was asked for.
    let messages = String::from_utf8_lossy(&output.stderr);
    let is_own = |line: &&str| !line.starts_with("whylate: an earlier whylate was killed: ");
    let messages: String = messages.split_inclusive('\n').filter(is_own).collect();
    if !messages.is_empty() {
        shown += "[standard error]\n";
        shown += &kept(&messages);
    }
    for (file, form) in *files {
        match fs::read(directory.path().join(file)) {
            Ok(bytes) => shown += &format!("[{file}]\n{}", in_form(&bytes, *form)?),
            Err(_) => shown += &format!("[no {file}]\n"),
        }
    }
    Ok(shown)
}

/// Runs all commands on all CPUs and reports every difference.
fn each(cases: &[(String, Case)]) -> Result<()> {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((recording, case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = run(recording, case).and_then(|shown| check(recording, case.0, &shown)) {
                        wrong.lock().expect("nothing panics").push(format!("{recording}/{}: {error:#}", case.0));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("nothing panics");
    ensure!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}

#[test]
fn golden_files_are_what_each_command_shows_of_each_recording() -> Result<()> {
    let mut cases: Vec<(String, Case)> = Vec::new();
    for recording in recordings()? {
        let sources = sources(&recording)?;
        // Of a source that was not recorded, only the first command runs: it prints the error.
        let is_recorded = |(_, words, _, _): &&Case| {
            let of: Vec<&str> = words.split(' ').collect();
            of.len() <= 3 || !CARDS.iter().any(|card| card.name == of[2]) || sources.iter().any(|one| one == of[2])
        };
        cases.extend(CASES.iter().filter(is_recorded).map(|case| (recording.clone(), *case)));
    }
    cases.extend(DIFFS.iter().map(|(recording, case)| ((*recording).to_owned(), *case)));
    each(&cases)
}

#[test]
fn golden_status_of_an_empty_span_is_1_everywhere() -> Result<()> {
    let recording = "sources-6.18".to_owned();
    let mut all = String::new();
    for words in EMPTY {
        let shown = run(&recording, &("", words, Text, &[]))?;
        ensure!(shown.contains("[status 1]") && shown.contains("has no snapshots in that span"), "{shown}");
        all += &shown;
    }
    check(&recording, "empty-span", &all)
}

#[test]
fn golden_status_of_an_empty_span_does_not_depend_on_sources_that_were_not_measured() -> Result<()> {
    let mut reader = Reader::new(fs::File::open(Path::new(RECORDINGS).join("quiet-6.1.whylate"))?)?;
    let mut header = reader.header().clone();
    header.unmeasured.push(Unmeasured::new("irqsoff", "a test says so"));
    let mut frame = Frame::new()?;
    let mut add = |line: &Line| -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        Ok(frame.add(text.as_bytes(), line.span_unix_ns())?)
    };
    add(&Line::Header(header))?;
    while let Some(line) = reader.next_line()? {
        add(&line)?;
    }
    let (bytes, index) = frame.finish()?;
    let directory = tempfile::tempdir()?;
    fs::write(directory.path().join("a.whylate"), [&index.to_bytes()[..], &bytes].concat())?;
    let all = whylate(&["replay", "a.whylate"], directory.path())?;
    ensure!(all.status.success() && String::from_utf8_lossy(&all.stdout).contains("a test says so"), "{all:?}");
    let none = whylate(&[&["replay", "a.whylate"], &SPAN[..]].concat(), directory.path())?;
    ensure!(none.status.code() == Some(1) && none.stdout.is_empty(), "{none:?}");
    Ok(())
}
