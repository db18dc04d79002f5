// SPDX-License-Identifier: MIT OR Apache-2.0
//! Live recordings: they replay what was shown, and stay readable however they end.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use whylate_model::recording::{Damage, Line, Reader};

use lock::{lock_machine, share_machine};
use running::{Running, whylate};

/// Output of each source and of the overview.
const SHOWN: [&[&str]; 8] = [
    &["wq", "--table", "--why", "100us", "1", "2"],
    &["wq", "--why", "100us", "--worst", "3", "--json", "-d", "2s"],
    &["timerlat", "top", "-d", "2s"],
    &["irqsoff", "--why", "500us", "1", "2"],
    &["offcpu", "--why", "1ms", "-d", "2s"],
    &["sqpoll", "1", "2"],
    &["block", "--table", "--why", "100us", "1", "2"],
    &["-d", "2s"],
];

fn lines_of(path: &Path) -> Result<(Vec<Line>, Damage)> {
    let mut reader = Reader::new(File::open(path)?)?;
    let mut lines = Vec::new();
    while let Some(line) = reader.next_line()? {
        lines.push(line);
    }
    Ok((lines, reader.damage()))
}

/// Returns the standard output of a run that succeeds.
fn printed(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(text.into_owned())
}

/// Splits an overview into the text without its next commands, and those commands.
fn without_next(text: &str) -> (String, Vec<&str>) {
    let mut is_next = false;
    let (commands, rest): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| {
        is_next = (is_next || *line == "NEXT") && !line.is_empty();
        is_next && *line != "NEXT"
    });
    (rest.join("\n"), commands)
}

#[test]
fn replay_matches_live_output() -> Result<()> {
    let Some(_lock) = lock_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    // Run in parallel, they take as long as one.
    thread::scope(|scope| {
        let all = SHOWN.iter().enumerate().map(|(number, words)| {
            let path = directory.path().join(format!("{number}.whylate"));
            scope.spawn(move || -> Result<()> {
                let live = without_precision(&printed(whylate(words).arg("-o").arg(&path))?);
                ensure!(!live.is_empty(), "{words:?} shows nothing");
                ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o600, "others may read {words:?}");
                // The overview has all of a recording.
                let is_overview = words.first() == Some(&"-d");
                let words = if is_overview { &words[2..] } else { words };
                let replayed = printed(whylate(&["replay"]).arg(&path).args(words))?;
                let (live, measuring) = without_next(&live);
                let (replayed, replaying) = without_next(&replayed);
                ensure!(replayed == live, "{words:?} live:\n{live}\nreplayed:\n{replayed}");
                // Below a replay, the next commands replay as well.
                let on_replay = format!("  whylate replay {} ", path.display());
                let as_replays = measuring.iter().map(|line| line.replacen("  whylate ", &on_replay, 1));
                let as_replays: Vec<String> =
                    as_replays.map(|line| line.trim_end_matches(" -d 10s").to_owned()).collect();
                ensure!(replaying == as_replays, "{replaying:?}, expected {as_replays:?}");
                let (lines, damage) = lines_of(&path)?;
                ensure!(damage == Damage::default() && matches!(lines.last(), Some(Line::End(_))), "{damage:?}");
                Ok(())
            })
        });
        let all: Vec<_> = all.collect();
        all.into_iter().try_for_each(|one| one.join().expect("nothing panics"))
    })
}

/// Strips the number of notes on precision: they are about measuring, and a replay has none.
fn without_precision(text: &str) -> String {
    let of_line = |line: &str| match line.rsplit_once("; ") {
        Some((rest, note)) if note.contains(" precision note") => Some(format!("{rest}: -v shows why\n")),
        None if line.contains(" precision note") && line.ends_with(": -v") => None,
        _ => Some(format!("{line}\n")),
    };
    text.lines().filter_map(of_line).collect()
}

/// Number of kills.
fn kills() -> u32 {
    std::env::var("WHYLATE_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(3)
}

/// Returns whether the recorder's writer waits for the disk, while ticks queue up behind it.
fn is_syncing(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let calls = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("syscall")).ok());
    // fdatasync(2) on x86-64, and in the generic table.
    let sync = if cfg!(target_arch = "x86_64") { "75 " } else { "83 " };
    calls.into_iter().any(|call| call.starts_with(sync))
}

#[test]
fn recording_keeps_shown_snapshots_when_killed() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("a.whylate");
    let name = path.to_str().context("a plain name")?;
    let mut random = 1_u64;
    for round in 0..kills() {
        let mut child = Running::start(&["wq", "--json", "-o", name, "0.02"])?;
        let mut shown = BufReader::new(child.stdout()?).lines();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut seen = Vec::new();
        for _ in 0..random >> 58 {
            seen.push(shown.next().context("it ends")??);
        }
        thread::sleep(Duration::from_micros((random >> 40) % 20_000));
        let syncs = is_syncing(child.pid());
        child.signal(Signal::KILL)?;
        seen.extend(shown.map_while(Result::ok));
        drop(child);
        let (lines, _) = lines_of(&path)?;
        let mut recorded = Vec::new();
        for line in &lines {
            if let Line::Snapshot(snapshot) = line {
                recorded.push(serde_json::to_value(snapshot)?);
            }
        }
        // The writer thread may be a snapshot behind, or wait for the disk.
        let is_whole = recorded.len() + 1 >= seen.len() || syncs;
        ensure!(is_whole, "round {round}: {} of {} recorded", recorded.len(), seen.len());
        for (recorded, seen) in recorded.iter().zip(&seen) {
            ensure!(*recorded == serde_json::from_str::<serde_json::Value>(seen)?, "round {round}: {seen}");
        }
    }
    Ok(())
}

#[test]
fn records_all_sources_and_no_command_lines() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("a.whylate");
    let secret = "hunter2-is-a-secret";
    let mut sleeper = Command::new("sh").args(["-c", "sleep 30; :", secret]).stdout(Stdio::null()).spawn()?;
    let outcome = printed(whylate(&["record", "-d", "3s", "--why", "5ms", "-o"]).arg(&path));
    sleeper.kill()?;
    sleeper.wait()?;
    outcome?;
    let header = Reader::new(File::open(&path)?)?.header().clone();
    let (lines, damage) = lines_of(&path)?;
    ensure!(damage == Damage::default(), "{damage:?}");
    ensure!(header.sources.iter().all(|of| of.late_from_ns == Some(5_000_000)), "{header:?}");
    for measured in &header.sources {
        let of = |line: &&Line| matches!(line, Line::Snapshot(snapshot) if snapshot.source == measured.source);
        let snapshots = lines.iter().filter(of).count();
        ensure!((2..=4).contains(&snapshots), "{snapshots} of {}", measured.source);
        printed(whylate(&["replay"]).arg(&path).arg(&measured.source))?;
    }
    let text: String = lines.iter().map(|line| serde_json::to_string(line).unwrap_or_default()).collect();
    ensure!(!text.contains(secret), "a command line is recorded");
    let look = printed(whylate(&["replay"]).arg(&path))?;
    ensure!(look.contains("WHAT WAITED") && look.contains("timer: until"), "{look}");
    // A truncated file is reported, and its snapshots are shown.
    let bytes = fs::read(&path)?;
    fs::write(&path, &bytes[..bytes.len() - bytes.len() / 4])?;
    let cut = whylate(&["replay"]).arg(&path).output()?;
    let said = String::from_utf8_lossy(&cut.stderr);
    ensure!(cut.status.success() && said.contains("cut off"), "{said}");
    Ok(())
}

/// Timeout, far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Retries until the condition holds.
fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn snapshots_of(path: &Path) -> usize {
    let lines = lines_of(path).map(|(lines, _)| lines).unwrap_or_default();
    lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).count()
}

#[test]
fn killed_overview_keeps_recorded_snapshots() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("a.whylate");
    let child = Running::start(&["-d", "1m", "-o", path.to_str().context("a plain name")?])?;
    until("nothing is recorded", || Ok(snapshots_of(&path) > 0))?;
    child.signal(Signal::KILL)?;
    drop(child);
    ensure!(snapshots_of(&path) > 0 && lines_of(&path)?.1.is_cut);
    Ok(())
}

#[test]
fn flight_recorder_writes_history_on_signal() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let mode = |path: &Path| Ok::<_, anyhow::Error>(fs::metadata(path)?.mode() & 0o777);
    let kept = directory.path().join("kept");
    let name = kept.to_str().context("a plain name")?;
    let options = ["--ring", "1m", "--after", "300ms", "--every", "100ms", "--sources", "wq", "-o"];
    let mut recorder = Running::start(&[&["record"][..], &options, &[&format!("{name}/")]].concat())?;
    recorder.wait_until_it_catches(Signal::USR1)?;
    until("there is no directory", || Ok(kept.exists()))?;
    recorder.wait_until_it_measures()?;
    thread::sleep(Duration::from_secs(1));
    let files = || -> Result<Vec<PathBuf>> {
        let all = fs::read_dir(&kept)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().filter(|path| path.extension().is_some()).collect())
    };
    ensure!(files()?.is_empty() && mode(&kept)? == 0o700, "nobody has asked");
    let asked_ns = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    recorder.signal(Signal::USR1)?;
    until("no file is written", || Ok(files()?.first().is_some_and(|path| snapshots_of(path) > 0)))?;
    thread::sleep(Duration::from_millis(600));
    recorder.signal(Signal::INT)?;
    let (status, said) = recorder.end()?;
    ensure!(status.success() && said.contains("recorded to"), "{said}");
    let [file] = &files()?[..] else { bail!("{:?}", files()) };
    let (lines, damage) = lines_of(file)?;
    ensure!(damage == Damage::default() && mode(file)? == 0o600, "{damage:?}");
    let spans = lines.iter().filter(|line| matches!(line, Line::Snapshot(_))).filter_map(Line::span_unix_ns);
    let (before, after) = spans.partition::<Vec<_>, _>(|(_, last_ns)| *last_ns < asked_ns);
    ensure!(before.len() >= 2 && !after.is_empty(), "{} before, {} after", before.len(), after.len());
    Ok(())
}
