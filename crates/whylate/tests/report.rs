// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of `whylate report`: its tables have the figures of `replay --json`, for recordings of any length and any
//! names.

#[path = "golden/directory.rs"]
mod directory;
#[path = "report/fixtures.rs"]
mod fixtures;
#[path = "export/python.rs"]
mod python;
mod running;
#[path = "report/tables.rs"]
mod tables;

use std::fs;
use std::io::Cursor;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use whylate_model::Snapshot;
use whylate_model::recording::Reader;
use whylate_model::units::is_printable;

use directory::{RECORDINGS, recordings};
use fixtures::{HELD_UP_PERCENT, MARKS, recording};
use python::python_with;
use running::whylate;
use tables::{Row, ensure_same, rows, unescaped};

/// Recordings of every format version, which must stay readable.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings/schema-1.whylate");
/// Checks pages with a standard HTML parser that accepts no errors.
const CHECK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report/check.py");

fn name(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Writes a page and returns its text.
fn page(arguments: &[&str], out: &Path) -> Result<String> {
    let output = whylate(&["report"]).args(arguments).args(["-o", name(out)]).env("TZ", "UTC").output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    ensure!(fs::metadata(out)?.permissions().mode() & 0o777 == 0o600, "others may read it");
    Ok(fs::read_to_string(out)?)
}

fn look(arguments: &[&str]) -> Result<Value> {
    let output = whylate(&["replay"]).args(arguments).arg("--json").output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Extracts the recording inside a page.
fn inside(page: &str) -> Result<Vec<u8>> {
    let (_, rest) = page.split_once("id=\"recording\">").context("no recording is inside")?;
    Ok(STANDARD.decode(rest.split_once('<').context("it does not end")?.0)?)
}

#[test]
fn page_has_figures_of_replay() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (short, long) = (directory.path().join("short"), directory.path().join("long"));
    fs::create_dir(&short)?;
    fs::create_dir(&long)?;
    // The longer recording has far more ticks than slots.
    for file in [Path::new(GOLDEN).to_owned(), recording(&short, 30, false)?, recording(&long, 1_500, false)?] {
        let page = page(&[name(&file)], &directory.path().join("x.html"))?;
        let look = look(&[name(&file)])?;
        ensure_same(&rows(&page, "<table id=\"sources\">")?, &rows(&page, "<table id=\"culprits\">")?, &look)
            .with_context(|| name(&file).to_owned())?;
        // The overview's worst come first among late events.
        let late = rows(&page, "<table id=\"late\">")?;
        let worst = look["worst"].as_array().context("worst")?;
        ensure!(!worst.is_empty() && late[0][2].parse().ok() == worst[0]["latency_ns"].as_u64(), "{:?}", late[0]);
        for (reason, count) in look["lost"].as_object().into_iter().flatten() {
            ensure!(page.contains(&format!("{count} {} (all)", reason.replace('_', " "))), "{reason}");
        }
    }
    Ok(())
}

/// Returns the source and the number of late values of each row, in alphabetical order.
fn late_values(rows: &[Row]) -> Vec<String> {
    let mut late: Vec<String> = rows.iter().map(|row| format!("{} {}", row[1], row[8])).collect();
    late.sort();
    late
}

#[test]
fn page_and_overview_agree_on_each_recording() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut is_any_own = false;
    for recording in recordings()? {
        let file = format!("{RECORDINGS}/{recording}.whylate");
        let page = page(&[&file], &directory.path().join("x.html"))?;
        let output = whylate(&["replay", &file]).env("TZ", "UTC").output()?;
        let text = String::from_utf8(output.stdout)?;
        // The headline has the first sentences of the overview.
        let verdict: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
        let headline = page.split_once("<h1>").and_then(|(_, rest)| rest.split_once("</h1>")).context("no headline")?.0;
        ensure!(unescaped(headline) == verdict.join(" "), "{recording}: {headline}\n{text}");
        // Both count the same late values.
        let (_, table) = text.split_once("WHAT WAITED").context("no table")?;
        let table = table.lines().skip(1).take_while(|line| !line.is_empty() && !line.starts_with([' ', '-']));
        let cells = table.map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect());
        let mut late: Vec<String> = cells.map(|cells: Vec<&str>| format!("{} {}", cells[0], cells[3])).collect();
        late.sort();
        let shown = late_values(&rows(&page, "<table id=\"sources\">")?);
        ensure!(shown == late, "{recording}: {shown:?}, {late:?}");
        // Without late events, there is no such table.
        for row in rows(&page, "<table id=\"culprits\">").unwrap_or_default() {
            let is_own = row[4].starts_with("whylate:") || row[4].starts_with("sq-samples:");
            ensure!(!is_own || row[4].ends_with("(whylate itself)"), "{recording}: {row:?}");
            is_any_own |= is_own;
        }
    }
    ensure!(is_any_own, "no recording has whylate as a culprit");
    // Of 12 late timers, 7 are dots.
    let page = page(&[&format!("{RECORDINGS}/late-6.18.whylate")], &directory.path().join("x.html"))?;
    ensure!(page.contains("dots: 7 of 12 timers, 5ms or longer (dashed)"), "other dots");
    Ok(())
}

#[test]
fn selects_the_same_part_as_replay() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 60, false)?;
    let span = ["--from", "2026-11-26T10:00:20Z", "--to", "2026-11-26T10:00:40Z"];
    let page = page(&[&[name(&file)], &span[..]].concat(), &directory.path().join("x.html"))?;
    let look = look(&[&[name(&file)], &span[..]].concat())?;
    ensure_same(&rows(&page, "<table id=\"sources\">")?, &rows(&page, "<table id=\"culprits\">")?, &look)
}

#[test]
fn timeline_shows_when_a_program_was_held_up() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 30, false)?;
    let page = page(&[name(&file)], &directory.path().join("x.html"))?;
    // Held up in odd seconds only.
    let percents: Vec<String> = (0..30).map(|second| (second % 2 * HELD_UP_PERCENT).to_string()).collect();
    ensure!(page.contains(&format!("data-percents=\"{}\"><h3>service:900</h3>", percents.join(","))), "other slots");
    let what = "held up 40% of 30.0s by thread indexer:812 running, flock the lock of file /var/lib/app/lock";
    ensure!(page.contains(what), "another program, or none");
    // A recording without programs has no such picture.
    let page = self::page(&[GOLDEN], &directory.path().join("y.html"))?;
    ensure!(!page.contains("data-percents"), "a program that was not recorded");
    Ok(())
}

#[test]
fn ranks_culprits_as_replay_does() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/late-6.18.whylate");
    let mut pages = Vec::new();
    for by in ["culprit", "name", "cgroup"] {
        let arguments = [name(&file), "--rank-by", by];
        let page = page(&arguments, &directory.path().join("x.html"))?;
        let culprits = rows(&page, "<table id=\"culprits\">")?;
        ensure_same(&rows(&page, "<table id=\"sources\">")?, &culprits, &look(&arguments)?)?;
        pages.push(culprits);
    }
    ensure!(pages[0] != pages[2], "{pages:?}");
    Ok(())
}

#[test]
fn series_have_figures_of_their_command() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 45, false)?;
    let page = page(&[name(&file)], &directory.path().join("x.html"))?;
    let output = whylate(&["replay", name(&file), "timerlat", "top", "-q", "--json"]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    let snapshot: whylate_model::Snapshot = serde_json::from_str(text.lines().last().context(said.into_owned())?)?;
    let (_, section) = page.split_once("data-source=\"timerlat\" data-number").context("no section")?;
    let table = rows(section, "<table class=\"series\">")?;
    ensure!(table.len() == 2, "{table:?}");
    for (row, series) in table.iter().zip(&snapshot.series) {
        let of = &series.histograms["thread"];
        let expected =
            [of.count(), of.quantile_ns(0.5), of.quantile_ns(0.99), of.max_ns()].map(|figure| figure.to_string());
        ensure!(row[5..9] == expected, "{row:?}: {expected:?}");
    }
    Ok(())
}

#[test]
fn embedded_recording_replays_identically() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 40, false)?;
    let saved = directory.path().join("saved.whylate");
    fs::write(&saved, inside(&page(&[name(&file)], &directory.path().join("x.html"))?)?)?;
    ensure!(look(&[name(&saved)])? == look(&[name(&file)])?, "it replays something else");
    Ok(())
}

#[test]
fn thinned_recording_keeps_stacks_and_series() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 6_000, false)?;
    let saved = directory.path().join("saved.whylate");
    let bytes = inside(&page(&[name(&file)], &directory.path().join("x.html"))?)?;
    ensure!(Reader::new(Cursor::new(&bytes))?.header().every_ns.is_none(), "all of it is inside");
    fs::write(&saved, bytes)?;
    let snapshot = |path: &Path| -> Result<Snapshot> {
        let output = whylate(&["replay", name(path), "offcpu", "--json"]).output()?;
        let mut snapshot: Snapshot = serde_json::from_slice(&output.stdout)?;
        snapshot.stacks.sort_by(|a, b| a.labels.cmp(&b.labels).then_with(|| a.kernel.cmp(&b.kernel)));
        Ok(snapshot)
    };
    let (whole, thinned) = (snapshot(&file)?, snapshot(&saved)?);
    ensure!(whole.stacks.len() > 1 && whole.stacks == thinned.stacks, "{:?}\n{:?}", whole.stacks, thinned.stacks);
    ensure!(whole.series.len() == thinned.series.len(), "{:?}\n{:?}", whole.series, thinned.series);
    Ok(())
}

#[test]
fn escapes_markup_in_names() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 12, true)?;
    let page = page(&[name(&file)], &directory.path().join("x.html"))?;
    ensure!(page.matches("<script").count() == 3, "{} scripts", page.matches("<script").count());
    ensure!(!page.contains("<img") && !page.contains("<svg/"), "a name is markup");
    ensure!(page.contains("&lt;img src=x"), "no name is told");
    let turns =
        |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{1b}');
    ensure!(!page.contains(turns), "a name turns text around");
    ensure!(!page.contains(&"x".repeat(1_100)), "a name is as long as it likes");
    // Attributes are fixed text.
    for attribute in ["href=", "src=\"", " style=", "onerror=\"", "onclick="] {
        let (document, _) = page.split_once("<script type=").context("no data")?;
        let (_, body) = document.split_once("</style>").context("no style")?;
        ensure!(!body.contains(attribute), "{attribute}");
    }
    Ok(())
}

/// Commands that show a recording; the last one fails.
const SHOW: [&str; 25] = [
    "replay FILE",
    "replay FILE --json",
    "replay FILE --by cgroup",
    "replay FILE wq",
    "replay FILE wq --table --why 1ms",
    "replay FILE wq --why 1ms --json",
    "replay FILE timerlat top --why 1ms",
    "replay FILE timerlat hist",
    "replay FILE irqsoff",
    "replay FILE irqsoff --why 1ms --json",
    "replay FILE offcpu",
    "replay FILE offcpu --flat",
    "replay FILE offcpu --why 1ms",
    "replay FILE offcpu --json",
    "replay FILE sqpoll --why 1ms",
    "replay FILE block --why 1ms",
    "replay FILE block --table --json",
    "replay FILE offcpu -o OUT/x.svg",
    "replay FILE offcpu -o OUT/x.folded",
    "replay FILE offcpu --why 1ms -o OUT/why.svg",
    "diff FILE FILE",
    "diff FILE FILE --json",
    "export FILE --csv OUT/tables",
    "export FILE --perfetto OUT/trace",
    "replay FILE wq NAME",
];

/// Hostile names are printable in every output: text, JSON, tables, folded stacks, graphs, traces and messages.
#[test]
fn escapes_control_characters_in_every_output() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let evil = directory.path().join(format!("{MARKS}.whylate"));
    fs::rename(recording(directory.path(), 12, true)?, &evil)?;
    let out = directory.path().join("out");
    fs::create_dir(&out)?;
    let is_safe = |text: &str| text.lines().all(|line| line.chars().all(|c| is_printable(c) || c == '\t'));
    for line in SHOW {
        let words = line.split(' ').map(|word| match word {
            "FILE" => name(&evil).to_owned(),
            "NAME" => format!("--{MARKS}"),
            word => word.replace("OUT", name(&out)),
        });
        let output = whylate(&[]).args(words).env("TZ", "UTC").output()?;
        let status = if line.ends_with("NAME") { 2 } else { 0 };
        ensure!(output.status.code() == Some(status), "{line}: {output:?}");
        let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(is_safe(&stdout) && is_safe(&stderr), "{line}: {stdout:?} {stderr:?}");
        if line.ends_with("--json") {
            // Except for what serde escapes.
            let marks = MARKS.split('\x1b').next().context("marks")?;
            let has_marks =
                |line: &str| serde_json::from_str::<Value>(line).map(|json| json.to_string().contains(marks));
            let marked = stdout.lines().map(has_marks).collect::<Result<Vec<_>, _>>()?;
            ensure!(marked.contains(&true) || line.starts_with("diff"), "{line}: names are others: {stdout}");
        }
    }
    let tables = fs::read_dir(out.join("tables"))?.map(|entry| Ok(entry?.path()));
    let files = ["x.svg", "x.folded", "why.svg", "trace"].map(|file| Ok(out.join(file)));
    let paths = tables.chain(files).collect::<Result<Vec<_>>>()?;
    ensure!(paths.len() > 8, "{paths:?}");
    for path in paths {
        let bytes = fs::read(&path)?;
        // A trace is binary.
        let is_marked = MARKS.chars().filter(|&c| c > '\x7f').any(|mark| {
            let mark = mark.to_string();
            bytes.windows(mark.len()).any(|part| part == mark.as_bytes())
        });
        ensure!(!is_marked, "{path:?} has marks");
        ensure!(path.ends_with("trace") || is_safe(std::str::from_utf8(&bytes)?), "{path:?}");
    }
    Ok(())
}

#[test]
fn two_runs_are_on_one_page() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    fs::create_dir(&one)?;
    fs::create_dir(&other)?;
    let (before, after) = (recording(&one, 40, false)?, recording(&other, 80, false)?);
    let page = page(&[name(&before), "--diff", name(&after)], &directory.path().join("x.html"))?;
    let look = look(&[name(&after)])?;
    ensure_same(&rows(&page, "<table id=\"other-sources\">")?, &rows(&page, "<table id=\"other-culprits\">")?, &look)?;
    let (what, when) =
        (page.find("id=\"differs\"").context("nothing is compared")?, page.find("id=\"when\"").context("no time")?);
    ensure!(what < when && page.contains("Mann–Whitney"), "differences come first");
    Ok(())
}

#[test]
fn rejects_invalid_arguments() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path(), 3, false)?;
    let link = directory.path().join("link.html");
    symlink(&file, &link)?;
    let before = fs::read(&file)?;
    for (arguments, status, message) in [
        (&["-o", "x.txt"][..], 2, "must end in .html"),
        (&[name(&file), "-o", name(&file)], 2, "must end in .html"),
        (&[name(&file), "-d", "5s"], 2, "cannot be used with"),
        (&["--diff", name(&file)], 2, "FILE"),
        (&[name(&file), "-o", name(&link)], 1, "it is the recording itself"),
        (&["/dev/null", "-o", "/dev/null/x.html"], 1, "/dev/null"),
        (&[name(&file), "--from", "2027-01-01", "-o", "/dev/null/x.html"], 1, "cannot write"),
    ] {
        let output = whylate(&["report"]).args(arguments).current_dir(directory.path()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(status) && said.contains(message), "{arguments:?}: {said}");
    }
    ensure!(fs::read(&file)? == before, "the recording was written over");
    // Without a name, each page gets a new one.
    for _ in 0..2 {
        let output = whylate(&["report", name(&file)]).current_dir(directory.path()).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let pages = fs::read_dir(directory.path())?
        .flatten()
        .filter(|file| name(&file.path()).ends_with("Z.html") || name(&file.path()).contains("Z-"));
    ensure!(pages.count() == 2, "one was written over");
    Ok(())
}

/// The page without scripts and without the line on how it was made.
#[test]
fn a_page_of_a_recording_stays_as_it_is() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let page = page(&[GOLDEN], &directory.path().join("x.html"))?;
    let (_, body) = page.split_once("<main>").context("no page")?;
    let (body, _) = body.split_once("<section id=\"raw\">").context("no end")?;
    insta::assert_snapshot!(body.replace(GOLDEN, "schema-1.whylate"));
    Ok(())
}

#[test]
fn page_is_valid_html() -> Result<()> {
    let Some(python) = python_with("html", &["html5lib==1.1"])? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    for (seconds, is_evil) in [(20, true), (9, false)] {
        let file = recording(directory.path(), seconds, is_evil)?;
        let out = directory.path().join("x.html");
        page(&[name(&file), "--diff", name(&file)], &out)?;
        let output = python.command().args([CHECK, name(&out)]).output()?;
        ensure!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
