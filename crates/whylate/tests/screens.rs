// SPDX-License-Identifier: MIT OR Apache-2.0
//! Screens of commands on terminals of 80, 100 and 160 columns, and what holds for each of them at 80. Unit tests pin
//! the screens that no recording has; `src/top` those of `whylate top`.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetwinsize, tcsetwinsize};

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings");
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
/// Lines of a screen that are stored.
const KEPT_LINES: usize = 60;

/// Name of the screen, and the command: each source with and without late events.
const SCREENS: &[(&str, &str)] = &[
    ("overview_late", "replay late-6.18.whylate"),
    ("overview_quiet", "replay sources-6.18.whylate --at 2026-11-28T23:18:26.142511Z..2026-11-28T23:18:28.142511Z"),
    ("overview_verbose", "replay late-6.18.whylate -v"),
    ("overview_of_whylate_itself", "replay gap-6.12-rt.whylate"),
    ("wq", "replay quiet-6.1.whylate wq"),
    ("wq_per_handler", "replay sources-6.18.whylate wq -W"),
    ("wq_phases", "replay late-6.18.whylate wq --phases"),
    ("wq_table", "replay late-6.18.whylate wq --table"),
    ("wq_why", "replay late-6.18.whylate wq --why 10ms"),
    ("wq_why_verbose", "replay late-6.18.whylate wq --why 10ms -v"),
    ("wq_nothing_late", "replay quiet-6.1.whylate wq --why 10ms"),
    ("block", "replay quiet-6.1.whylate block"),
    ("block_table", "replay sources-6.18.whylate block --table --phases"),
    ("block_by_process", "replay sources-6.1.whylate block --table --by process"),
    ("block_why", "replay sources-6.1.whylate block --why 100us"),
    ("block_why_verbose", "replay sources-6.1.whylate block --why 100us -v"),
    ("timerlat_top", "replay late-6.18.whylate timerlat top -q"),
    ("timerlat_hist", "replay late-6.18.whylate timerlat hist"),
    ("irqsoff", "replay sources-6.18.whylate irqsoff --histogram"),
    ("irqsoff_late", "replay late-6.18.whylate irqsoff"),
    ("irqsoff_why", "replay sources-6.12-rt.whylate irqsoff --why 5ms"),
    ("offcpu", "replay threads-6.18.whylate offcpu"),
    ("offcpu_flat", "replay late-6.18.whylate offcpu --flat"),
    ("offcpu_blocked", "replay paths-6.1.whylate offcpu --blocked 100ms"),
    ("offcpu_why", "replay paths-6.18.whylate offcpu --why 100ms"),
    ("offcpu_nothing_late", "replay threads-6.18.whylate offcpu --why 10s"),
    ("sqpoll", "replay sources-6.18.whylate sqpoll"),
    ("sqpoll_why", "replay sources-6.18.whylate sqpoll --why 1ms"),
    ("import_interrupts", "import ../../../whylate-model/tests/ftrace/irqsoff-6.12.txt"),
    ("import_pipe", "import ../../../whylate-model/tests/ftrace/trace-pipe-5.4.txt"),
    ("import_switches", "import ../../../whylate-model/tests/traces/tracefs.txt"),
    ("import_perf_sched", "import ../../../whylate-model/tests/traces/perf-sched.txt"),
    ("import_perf_script", "import ../../../whylate-model/tests/traces/perf-script.txt"),
    ("import_procstat", "import ../imports/procstat.txt"),
    ("import_proc_stack", "import ../imports/proc-stack.txt"),
    ("import_folded", "import ../imports/folded.txt"),
    ("help_lost", "help lost"),
    ("diff", "diff sources-6.1.whylate sources-6.18.whylate"),
    ("diff_halves", "diff late-6.18.whylate --split 2026-11-28T23:18:33.007551Z"),
];

/// Runs whylate on a terminal of this width without color, and returns what it shows there.
fn on_terminal(command: &str, columns: u16) -> Result<String> {
    with_variable(("NO_COLOR", "1"), command, columns)
}

/// Runs whylate on a terminal of this width, with a variable in its environment, and returns what it shows there.
fn with_variable(variable: (&str, &str), command: &str, columns: u16) -> Result<String> {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let name = ptsname(&master, Vec::new())?;
    let terminal = File::options().read(true).write(true).open(name.to_str()?)?;
    tcsetwinsize(&terminal, Winsize { ws_row: 50, ws_col: columns, ..tcgetwinsize(&terminal)? })?;
    let mut whylate = Command::new(env!("CARGO_BIN_EXE_whylate"));
    whylate
        .args(command.split(' '))
        .current_dir(RECORDINGS)
        .env_clear()
        .envs([("TZ", "UTC"), variable, ("LC_ALL", "C.UTF-8"), ("PATH", "/nonexistent")])
        .stdin(Stdio::null())
        .stdout(OwnedFd::from(terminal))
        .stderr(Stdio::null());
    let mut child = whylate.spawn()?;
    // The terminal hangs up once no process has it open.
    drop(whylate);
    let (mut shown, mut master) = (Vec::new(), File::from(master));
    let mut bytes = [0; 4096];
    loop {
        match master.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => shown.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let status = child.wait()?;
    ensure!(status.code() != Some(101), "{command} panics");
    ensure!(!shown.trim_ascii().is_empty(), "{command} shows nothing");
    Ok(String::from_utf8_lossy(&shown).replace('\r', ""))
}

#[test]
fn only_what_is_late_has_color_on_a_terminal() -> Result<()> {
    let terminal = ("TERM", "xterm-256color");
    for command in ["--help", "-h", "wq --help", "help lost", "replay quiet-6.1.whylate block"] {
        let shown = with_variable(terminal, command, 100)?;
        ensure!(!shown.contains('\x1b'), "{command}: {shown:?}");
    }
    for command in ["", " wq --table", " irqsoff", " timerlat top -q --why 5ms", " timerlat hist --why 5ms"] {
        let command = format!("replay late-6.18.whylate{command}");
        let shown = with_variable(terminal, &command, 100)?;
        let plain = shown.replace("\x1b[1;31m", "").replace("\x1b[m", "");
        ensure!(shown != plain && !plain.contains('\x1b'), "{command}: {shown:?}");
        ensure!(on_terminal(&command, 100)? == plain, "NO_COLOR: {command}");
        ensure!(with_variable(terminal, &format!("{command} --color never"), 100)? == plain, "never: {command}");
    }
    Ok(())
}

#[test]
fn screens_of_recordings_at_80_100_and_160_columns() -> Result<()> {
    for (name, command) in SCREENS {
        let mut screens = format!("whylate {command}\n");
        for columns in [80, 100, 160] {
            screens += &format!("=== {columns} columns\n");
            let shown = on_terminal(command, columns)?;
            shown.lines().take(KEPT_LINES).for_each(|line| screens += &format!("{line}\n"));
        }
        insta::assert_snapshot!(*name, screens);
    }
    Ok(())
}

/// Returns the snapshot files below a directory.
fn snapshots(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            all.extend(snapshots(&path)?);
        } else if path.extension().is_some_and(|end| end == "snap") {
            all.push(path);
        }
    }
    Ok(all)
}

/// Returns the screens at 80 columns that unit tests pin, by the names of their files.
fn pinned() -> Result<Vec<(String, String)>> {
    let mut screens = Vec::new();
    for path in snapshots(Path::new(SOURCES))? {
        let text = fs::read_to_string(&path)?;
        let (_, text) = text.split_once("\n---\n").context("a snapshot has a heading")?;
        let name = path.file_stem().context("a name")?.to_string_lossy().into_owned();
        if name.ends_with("_80x24") {
            screens.push((name, text.to_owned()));
        } else if let Some((_, text)) = text.split_once("=== 80 columns\n") {
            screens.push((name, text.split("=== ").next().unwrap_or_default().to_owned()));
        }
    }
    ensure!(screens.len() > 10, "{} screens", screens.len());
    Ok(screens)
}

/// Returns whether a text was shortened: `..` that is no ellipsis, and no graph in ASCII.
fn is_shortened(text: &str) -> bool {
    text.contains(char::is_alphanumeric) && text.replace("...", "").contains("..")
}

/// Screens in a layout of other tools: rtla's tables, and folded stacks.
const FOREIGN: [&str; 5] = ["timerlat_top", "timerlat_hist", "import_procstat", "import_proc_stack", "import_folded"];

/// Returns what is wrong with a line of a terminal with 80 columns. In a stack (`f < .. < g`) frames are left out, and
/// names of half a terminal lose their middle in any column.
fn fault(line: &str) -> Option<&'static str> {
    let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    let is_cut = |cell: &&str| is_shortened(cell) && cell.chars().count() < 40;
    let is_row = cells.len() > 2 && !line.contains(" > ") && !line.contains(" < ");
    let is_whole = |open, close| line.matches(open).count() == line.matches(close).count();
    let keeps_ends = |cell: &&str| !(cell.starts_with("..") || cell.ends_with(".."));
    if line.chars().count() > 80 {
        Some("is wider than the terminal")
    } else if line.contains("Hit Ctrl-C") || line.contains("whylate doctor") {
        Some("is not true of a recording")
    } else if is_row && cells.iter().take(2).any(is_cut) {
        Some("is cut in its first two columns")
    } else if line.contains("  [") && !is_whole("[", "]") {
        Some("has half a bracket")
    } else if !cells.iter().filter(|cell| is_shortened(cell)).all(keeps_ends) {
        Some("lacks an end of a name")
    } else {
        None
    }
}

#[test]
fn nothing_decisive_is_cut_at_80_columns() -> Result<()> {
    let mut screens = pinned()?;
    for (name, command) in SCREENS.iter().filter(|(name, _)| !FOREIGN.contains(name)) {
        screens.push(((*name).to_owned(), on_terminal(command, 80)?));
    }
    let mut faults = String::new();
    for (name, text) in &screens {
        let wrong = text.lines().filter_map(|line| Some((fault(line)?, line)));
        wrong.for_each(|(fault, line)| faults += &format!("{name} {fault}: {line}\n"));
    }
    ensure!(faults.is_empty(), "\n{faults}");
    Ok(())
}
