// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of `whylate export` with its target programs: Perfetto's own messages and DuckDB, both from PyPI.

mod export {
    pub mod fixtures;
    pub mod python;
}
mod running;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whylate_model::{Series, Snapshot};

use export::fixtures::{self, BOOT_NS, CULPRIT, EVIL, HOUR_NS, MS, START_NS, recording};
use export::python::python;
use running::whylate;

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/export/trace.py");
const QUERIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/export/queries.py");
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sql.md");

/// Returns the standard output of a run that succeeds.
fn stdout_of(arguments: &[&str]) -> Result<String> {
    let output = whylate(arguments).env("TZ", "UTC").output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the error message and exit status of a run that fails.
fn refused(arguments: &[&str]) -> Result<(i32, String)> {
    let output = whylate(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output.status.code().context("it was killed")?, said))
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o777)
}

/// Decodes a trace with `trace.py`; `None` without Python.
fn decoded(arguments: &[&str]) -> Result<Option<Value>> {
    let Some(python) = python()? else { return Ok(None) };
    let output = python.command().arg(TRACE).args(arguments).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

fn slices(trace: &Value, matches: impl Fn(&Value) -> bool) -> Vec<&Value> {
    trace["slices"].as_array().into_iter().flatten().filter(|slice| matches(slice)).collect()
}

#[test]
fn perfetto_trace_has_late_events_and_their_parts() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path())?;
    let out = directory.path().join("trace");
    stdout_of(&["export", name(&file), "--perfetto", name(&out)])?;
    ensure!(mode(&out)? == 0o600);
    let Some(trace) = decoded(&[name(&out)])? else { return Ok(()) };
    assert_eq!(trace["clocks"][0], json!({"6": BOOT_NS, "3": BOOT_NS - fixtures::ASLEEP_NS, "1": START_NS}));

    // Phases are parts of the event and add up to it.
    let at_ns = BOOT_NS + fixtures::LATE_AT_NS;
    let whole = slices(&trace, |slice| slice["name"] == "slow_work" && slice["to"] == at_ns);
    ensure!(whole.len() == 1, "{whole:?}");
    assert_eq!((&whole[0]["from"], &whole[0]["depth"]), (&json!(at_ns - 30 * MS), &json!(0)));
    assert_eq!(whole[0]["below"], json!(["wq"]));
    assert_eq!(whole[0]["told"]["causes"][0]["who"], CULPRIT);
    assert_eq!(whole[0]["frames"], json!(["worker_thread", "queue_work_on"]));
    let phases = slices(&trace, |slice| {
        let is_of_it = slice["within"] == "slow_work" && slice["uuid"] == whole[0]["uuid"];
        is_of_it && slice["to"].as_u64() <= Some(at_ns)
    });
    let spans: Vec<_> = phases.iter().map(|phase| (&phase["name"], &phase["from"], &phase["to"])).collect();
    let (queued, active, end) = (json!(at_ns - 30 * MS), json!(at_ns - 20 * MS), json!(at_ns));
    assert_eq!(spans, [(&json!("queued"), &queued, &active), (&json!("waiting"), &active, &end)]);
    // Of two overlapping events, one has its own track with the same name.
    let both = slices(&trace, |slice| slice["track"] == "slow_work" && slice["depth"] == 0);
    ensure!(both.iter().any(|slice| slice["uuid"] != whole[0]["uuid"]), "{both:?}");

    // Each segment of a path has its position in time; its actor has a slice of that time, with a flow.
    let segments = slices(&trace, |slice| slice["within"] == "postgres:4711");
    ensure!(segments.len() == 3, "{segments:?}");
    let waiting = segments[1];
    assert_eq!(waiting["name"], "running writer:99");
    assert_eq!(waiting["track"], "late (offcpu)");
    assert_eq!(waiting["below"], json!(["4700/4711 postgres"]));
    let of_culprit = slices(&trace, |slice| slice["starts"] == waiting["ends"] && slice["starts"] != json!([]));
    ensure!(of_culprit.len() == 1, "{of_culprit:?}");
    assert_eq!(of_culprit[0]["track"], "writer:99");
    assert_eq!((&of_culprit[0]["from"], &of_culprit[0]["to"]), (&waiting["from"], &waiting["to"]));
    // A cause without a position is an instant at the start.
    let instant = slices(&trace, |slice| slice["track"] == CULPRIT && slice["told"]["ns"] == 25 * MS);
    assert_eq!((&instant[0]["from"], &instant[0]["to"]), (&whole[0]["from"], &whole[0]["from"]));
    assert_eq!(instant[0]["starts"][0], whole[0]["ends"][0]);

    let counters = trace["counters"].as_array().context("counters")?;
    let p99: Vec<_> = counters.iter().filter(|one| one["track"] == "wq: p99").map(|one| &one["value"]).collect();
    let printed = stdout_of(&["replay", name(&file), "wq", "--json", "1"])?;
    let mut expected = Vec::new();
    for line in printed.lines() {
        let snapshot: whylate_model::Snapshot = serde_json::from_str(line)?;
        expected.push(json!(snapshot.total("latency").quantile_ns(0.99)));
    }
    assert_eq!(p99, expected.iter().collect::<Vec<_>>());
    ensure!(!trace.to_string().contains("\\u001b"), "names reach terminals");
    ensure!(!slices(&trace, |slice| slice["name"] == "suspended").is_empty());
    Ok(())
}

#[test]
fn truncated_trace_is_readable_up_to_the_end() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (file, out) = (recording(directory.path())?, directory.path().join("trace"));
    stdout_of(&["export", name(&file), "--perfetto", name(&out)])?;
    let whole = fs::read(&out)?;
    let mut before = 0;
    for part in 1..=4 {
        let cut = directory.path().join("cut");
        fs::write(&cut, &whole[..whole.len() * part / 4 - part % 4])?;
        let Some(trace) = decoded(&[name(&cut), "--cut"])? else { return Ok(()) };
        let now = slices(&trace, |_| true).len();
        ensure!(now > before, "{now} slices at {part} of 4, {before} before");
        before = now;
    }
    Ok(())
}

/// Returns the results of each documented query, alternately on the recording and on the tables.
fn answers(file: &Path, tables: &Path) -> Result<Option<Vec<Value>>> {
    let Some(python) = python()? else { return Ok(None) };
    let output = python.command().args([QUERIES, DOCUMENT, name(file), name(tables)]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout)?;
    Ok(Some(lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?))
}

#[test]
fn documented_sql_matches_printed_figures() -> Result<()> {
    if !cfg!(feature = "parquet") {
        println!("skipped: it is built without Parquet (--features parquet)");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let (file, tables) = (recording(directory.path())?, directory.path().join("tables"));
    stdout_of(&["export", name(&file), "--parquet", name(&tables)])?;
    assert_eq!((mode(&tables)?, mode(&tables.join("late.parquet"))?), (0o700, 0o600));
    let Some(answers) = answers(&file, &tables)? else { return Ok(()) };
    let [by_hour, by_hour_of_tables, p99, p99_of_tables, beside, beside_of_tables] = &answers[..] else {
        anyhow::bail!("{} queries", answers.len())
    };
    assert_eq!(by_hour, by_hour_of_tables);
    assert_eq!(p99, p99_of_tables);
    // Tables have no control characters.
    assert_eq!(serde_json::to_string(beside)?.replace("\\u001b", "?"), serde_json::to_string(beside_of_tables)?);

    // Culprits by cost per hour: the overview of each hour ranks them.
    let mut expected = Vec::new();
    for hour in ["10", "11"] {
        let (from, to) = (format!("2026-11-26T{hour}:00:00Z"), format!("2026-11-26T{hour}:59:59Z"));
        let look: Value =
            serde_json::from_str(&stdout_of(&["replay", name(&file), "--from", &from, "--to", &to, "--json"])?)?;
        for culprit in look["culprits"].as_array().context("culprits")?.iter().take(3) {
            let hour = format!("2026-11-26 {hour}:00:00");
            expected.push(json!([hour, culprit["kind"], culprit["who"], culprit["total_ns"]]));
        }
    }
    assert_eq!(by_hour, &json!(expected));
    assert_eq!(by_hour.as_array().map(Vec::len), Some(6));

    // The p99 by handler before and after.
    let of_span = |option: &str, time: &str| -> Result<Vec<(Value, Value)>> {
        let printed = stdout_of(&["replay", name(&file), option, time, "wq", "--json", "7200"])?;
        ensure!(printed.lines().count() == 1, "{printed}");
        // Of the buckets: printed percentiles are rounded.
        let snapshot: Snapshot = serde_json::from_str(&printed)?;
        let series = snapshot.series.iter().filter(|series| series.labels.contains_key("handler"));
        let p99 = |series: &Series| series.histogram("latency").quantile_ns(0.99);
        Ok(series.map(|series| (json!(series.label("handler")), json!(p99(series)))).collect())
    };
    let (before, after) = (of_span("--to", "2026-11-26T10:59:59Z")?, of_span("--from", "2026-11-26T11:00:00Z")?);
    let mut expected: Vec<Value> =
        before.iter().zip(&after).map(|((handler, before), (_, after))| json!([handler, before, after])).collect();
    expected.sort_by_key(|row| row[0].to_string());
    assert_eq!(p99, &json!(expected));
    assert_eq!(p99.as_array().map(Vec::len), Some(2));

    // Late events by the process that delayed them.
    let look: Value = serde_json::from_str(&stdout_of(&["replay", name(&file), "--json"])?)?;
    let mut expected: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for culprit in look["culprits"].as_array().context("culprits")? {
        // `dd:4711`, `dd:4711 (writes)` or `vda (write by dd:4711)`.
        let Some((before, after)) = culprit["who"].as_str().and_then(|who| who.rsplit_once(':')) else { continue };
        let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
        if rest.len() == after.len() {
            continue;
        }
        let name = format!("{before}{rest}");
        for victims in culprit["victims"].as_array().into_iter().flatten() {
            let source = victims["source"].as_str().unwrap_or_default();
            let sum = expected.entry((name.clone(), source.to_owned())).or_default();
            sum.0 += victims["events"].as_u64().context("events")?;
            sum.1 += victims["total_ns"].as_u64().context("ns")?;
        }
    }
    let mut rows: Vec<Value> = beside.as_array().context("rows")?.clone();
    rows.sort_by_key(|row| (row[0].to_string(), row[1].to_string()));
    let expected: Vec<Value> =
        expected.iter().map(|((name, source), (events, ns))| json!([name, source, events, ns])).collect();
    assert_eq!(rows, expected);
    for who in ["dd", "fio (writes)", "259:3 (read by fio)", "timeout in poll (curl)", "sleep"] {
        ensure!(rows.iter().any(|row| row[0] == who), "{who} is left out: {beside}");
    }
    Ok(())
}

#[test]
fn parquet_and_csv_have_the_same_rows() -> Result<()> {
    if !cfg!(feature = "parquet") {
        println!("skipped: it is built without Parquet (--features parquet)");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let (file, tables) = (recording(directory.path())?, directory.path().join("tables"));
    stdout_of(&["export", name(&file), "--parquet", name(&tables), "--csv", name(&tables)])?;
    let late = fs::read_to_string(tables.join("late.csv"))?;
    let header = late.lines().next().context("a header")?;
    ensure!(header.starts_with("snapshot,event,source,subject,ended,start,latency_ns,"), "{header}");
    assert_eq!(late.lines().count(), 1 + fixtures::LATE);
    let causes = fs::read_to_string(tables.join("causes.csv"))?;
    ensure!(causes.contains(r#""'=cmd|'?[2J"",x:7""#), "{causes}");
    ensure!(!causes.contains('\u{1b}') && fixtures::EVIL.contains('\u{1b}'));
    let lost = fs::read_to_string(tables.join("lost.csv"))?;
    ensure!(lost.contains(",suspended,0,true") && lost.contains(",unmatched,3,false"), "{lost}");
    let Some(python) = python()? else { return Ok(()) };
    for table in ["snapshots", "series", "buckets", "late", "causes", "path", "stacks", "lost"] {
        let query = format!(
            "import duckdb; p = duckdb.sql(\"FROM '{0}/{table}.parquet'\"); \
             c = duckdb.read_csv('{0}/{table}.csv', all_varchar=True); \
             assert p.columns == c.columns, p.columns; n = p.shape[0]; \
             assert n > 0 and n == c.shape[0], n",
            name(&tables)
        );
        let output = python.command().args(["-c", &query]).output()?;
        ensure!(output.status.success(), "{table}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Lists the paths of all files below a directory, relative to it, in order.
fn files_below(directory: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let (path, entry) = (entry.as_ref().map(fs::DirEntry::path).unwrap_or_default(), entry?);
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            files.extend(files_below(&path)?.into_iter().map(|below| format!("{name}/{below}")));
        } else {
            files.push(name);
        }
    }
    files.sort();
    Ok(files)
}

#[test]
fn partitions_have_the_rows_of_their_host_and_day_once() -> Result<()> {
    if !cfg!(feature = "parquet") {
        println!("skipped: it is built without Parquet (--features parquet)");
        return Ok(());
    }
    const HOSTILE: &str = "../../=x'\n*%2F";
    let (directory, out) = (tempfile::tempdir()?, tempfile::tempdir()?);
    // The second hour's snapshots start 0.5 s before midnight: one of its late events ends before, the others after it.
    let to_midnight_ns = 13 * HOUR_NS - HOUR_NS / 3_600 / 2;
    let fleet = out.path().join("fleet");
    let export = |file: &Path| stdout_of(&["export", name(file), "--parquet", name(&fleet), "--partition"]);
    for host in ["web1", HOSTILE] {
        let file = fixtures::recording_of(directory.path(), host, to_midnight_ns)?;
        export(&file)?;
    }
    let once = files_below(out.path())?;
    let file = fixtures::recording_of(directory.path(), "web1", to_midnight_ns)?;
    export(&file)?;
    assert_eq!(files_below(out.path())?, once, "a second export replaces the first one");
    let mut directories: Vec<&str> = once.iter().filter_map(|file| Some(file.rsplit_once('/')?.0)).collect();
    directories.dedup();
    let hostile = "host=..%2F..%2F%3Dx%27%0A%2A%252F";
    let expected = ["2026-11-26", "2026-11-27"].into_iter();
    let expected: Vec<String> =
        expected.flat_map(|date| [hostile, "host=web1"].map(|host| format!("fleet/date={date}/{host}"))).collect();
    assert_eq!(directories, expected);
    assert_eq!(once.len(), 4 * 8, "{once:?}");
    assert_eq!(mode(&fleet.join("date=2026-11-26/host=web1"))?, 0o700);
    // A later recording of the host is beside the first one.
    export(&fixtures::recording_of(directory.path(), "web1", to_midnight_ns + 24 * HOUR_NS)?)?;
    assert_eq!(files_below(out.path())?.len(), 6 * 8);

    let Some(python) = python()? else { return Ok(()) };
    let query = "import duckdb, json, sys; duckdb.sql(\"SET TimeZone = 'UTC'\"); \
        table = lambda name: f\"read_parquet('{sys.argv[1]}/date=*/host=*/{name}-*.parquet', hive_partitioning=true)\"; \
        late = duckdb.sql(f'SELECT host, date::VARCHAR, count(*), count(DISTINCT event), sum(latency_ns)::UBIGINT, \
            bool_and(ended::DATE = date) FROM {table(\"late\")} GROUP BY ALL ORDER BY ALL').fetchall(); \
        ns = duckdb.sql(f'SELECT (SELECT sum(ns) FROM {table(\"causes\")})::UBIGINT, \
            (SELECT sum(latency_ns) FROM {table(\"late\")} JOIN {table(\"snapshots\")} USING (host, recording, snapshot))::UBIGINT, \
            (SELECT count(DISTINCT recording) FROM {table(\"snapshots\")})').fetchall(); \
        print(json.dumps([late, ns]))";
    let output = python.command().args(["-c", query, name(&fleet)]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let [rows, sums]: [Value; 2] = serde_json::from_slice(&output.stdout)?;
    let ms = |ms: u64| json!(ms * MS);
    // Of the four events of an hour (30, 40, 207 and 22 ms), the last one ended before midnight in the second hour.
    let (whole, before, after) = (299, 22, 277);
    let row = |host: &str, date: &str, events: u64, sum: u64| json!([host, date, events, events, ms(sum), true]);
    assert_eq!(
        rows,
        json!([
            row(HOSTILE, "2026-11-26", 5, whole + before),
            row(HOSTILE, "2026-11-27", 3, after),
            row("web1", "2026-11-26", 5, whole + before),
            row("web1", "2026-11-27", 8, after + whole + before),
            row("web1", "2026-11-28", 3, after),
        ])
    );
    assert_eq!(sums, json!([[3 * 2 * whole * MS, 3 * 2 * whole * MS, 3]]));
    Ok(())
}

#[test]
fn partitions_are_for_whole_recordings_as_parquet() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (file, out) = (recording(directory.path())?, directory.path().join("out"));
    let csv = directory.path().join("t.csv");
    let (status, said) = refused(&["export", name(&file), "-o", name(&csv), "--partition"])?;
    ensure!(status == 2 && said.contains("--partition is for Parquet"), "{said}");
    for span in [["--from", "10:00"], ["--to", "10:00"], ["--at", "10:00"]] {
        let arguments = [&["export", name(&file), "--parquet", name(&out), "--partition"], &span[..]].concat();
        let (status, said) = refused(&arguments)?;
        ensure!(status == 2 && said.contains("whole recordings"), "{said}");
    }
    ensure!(!out.exists() && !csv.exists());
    Ok(())
}

#[test]
fn exports_part_of_a_recording() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (file, tables, out) =
        (recording(directory.path())?, directory.path().join("t.csv"), directory.path().join("late.perfetto-trace"));
    let from = "2026-11-26T11:00:00Z";
    stdout_of(&["export", name(&file), "--from", from, "-o", name(&tables), "-o", name(&out)])?;
    let snapshots = fs::read_to_string(tables.join("snapshots.csv"))?;
    ensure!(snapshots.lines().skip(1).all(|line| line.contains("2026-11-26T11:")), "{snapshots}");
    let (status, said) = refused(&["export", name(&file), "--from", "2027-01-01", "--csv", name(&tables)])?;
    ensure!(status == 1 && said.contains("no snapshots in that span"), "{said}");
    let Some(trace) = decoded(&[name(&out)])? else { return Ok(()) };
    // The clock readings are those of that time, although they were recorded before it.
    let late = slices(&trace, |slice| slice["name"] == "slow_work");
    assert_eq!(
        late.iter().map(|slice| &slice["to"]).max_by_key(|ns| ns.as_u64()),
        Some(&json!(BOOT_NS + HOUR_NS + fixtures::LATE_AT_NS))
    );
    Ok(())
}

#[test]
fn writes_nothing_through_links_or_over_its_input() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = recording(directory.path())?;
    let (status, said) = refused(&["export", name(&file), "-o", "web1.trace"])?;
    ensure!(status == 2 && said.contains("must end in .perfetto-trace, .parquet/ or .csv/"), "{said}");
    let (status, said) = refused(&["export", name(&file)])?;
    ensure!(status == 2 && said.contains("--output"), "{said}");
    let before = fs::read(&file)?;
    let (status, said) = refused(&["export", name(&file), "--perfetto", name(&file)])?;
    ensure!(status == 1 && said.contains("the recording itself") && fs::read(&file)? == before, "{said}");
    let (secret, link) = (directory.path().join("secret"), directory.path().join("link"));
    fs::write(&secret, "content")?;
    symlink(&secret, &link)?;
    let (status, said) = refused(&["export", name(&file), "--perfetto", name(&link)])?;
    ensure!(status == 1 && said.contains("symbolic link") && fs::read(&secret)? == b"content", "{said}");
    let tables = directory.path().join("tables");
    fs::create_dir(&tables)?;
    symlink(&secret, tables.join("path.csv"))?;
    let (status, said) = refused(&["export", name(&file), "--csv", name(&tables)])?;
    ensure!(status == 1 && said.contains("symbolic link") && fs::read(&secret)? == b"content", "{said}");
    ensure!(!tables.join("late.csv").exists(), "what could not be ended is taken away");
    fs::set_permissions(&secret, Permissions::from_mode(0o600))?;
    let (status, said) = refused(&["export", name(&secret), "--csv", name(&tables)])?;
    ensure!(status == 1 && said.contains("not a whylate recording"), "{said}");
    ensure!(EVIL.contains('='));
    Ok(())
}
