// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line where nothing is measured: arguments, exit statuses, output files, and files that are read. Needs no
//! root.

#[path = "command_line/docs.rs"]
mod docs;
#[path = "command_line/examples.rs"]
mod examples;
#[path = "command_line/import.rs"]
mod import;
#[path = "command_line/recordings.rs"]
mod recordings;
mod running;
#[path = "command_line/schema.rs"]
mod schema;
#[path = "command_line/statuses.rs"]
mod statuses;
#[allow(dead_code)]
#[path = "running/terminal.rs"]
mod terminal;
#[path = "command_line/units.rs"]
mod units;

use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use running::{copied, whylate};

const KINDS: [&str; 4] = ["irqs-off", "preempt-off", "softirq", "hog"];

fn output_of(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(arguments).output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn fails_if_help_cannot_be_written() -> Result<()> {
    for argument in ["--help", "--version"] {
        let output = whylate(&[argument]).stdout(std::fs::File::options().write(true).open("/dev/full")?).output()?;
        ensure!(output.status.code() == Some(1), "{argument}: {}", output.status);
        let message = "whylate: cannot write to standard output: No space left on device";
        ensure!(text(&output.stderr).starts_with(message), "{argument}: {}", text(&output.stderr));
    }
    Ok(())
}

#[test]
fn rejects_invalid_arguments() -> Result<()> {
    for arguments in [
        &["wq", "0"][..],
        &["wq", "-1"],
        &["wq", "abc"],
        &["wq", "1e99"],
        &["offcpu", "--flat", "-o", "/dev/null/x.svg"],
        &["offcpu", "--why", "5ms", "--wakers", "-o", "/dev/null/x.svg"],
        &["offcpu", "--why", "5ms", "--lines", "-o", "/dev/null/x.folded"],
    ] {
        let output = output_of(arguments)?;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
    Ok(())
}

#[test]
fn refusals_say_what_to_write() -> Result<()> {
    for (arguments, message) in [
        (&["wq", "--why", "5"][..], "add a unit (5ms, 5s)"),
        (&["-d", "10"], "add a unit (10ms, 10s)"),
        (&["irqsoff", "--period", "500"], "add a unit (500ms, 500s)"),
        (&["inject", "hog", "--for", "5"], "add a unit (5ms, 5s)"),
        (&["block", "-d", "sda"], "name a disk with --disk"),
        (&["wq", "--by", "cgroup"], "--rank-by ranks the culprits of late events: give --why with it"),
        (&["offcpu", "--rank-by", "name"], "--rank-by ranks the culprits of late events: give --why with it"),
        (&["--cgroup", "/"], "every thread is in cgroup /: omit --cgroup"),
        (&["-p", "1", "--json", "--rank-by", "cgroup"], "--json has the causes of each wait, unranked: omit --rank-by"),
        (&["-p", "1", "--fail-if-late"], "--fail-if-late judges the whole machine: omit it, or -p"),
        (&["offcputime", "-p", "1", "10"], "offcputime (bcc) is not a whylate command: use `whylate offcpu -d 10s`"),
        (&["cyclictest", "-m"], "cyclictest (rt-tests) is not a whylate command: use `whylate timerlat`"),
        (&["offcpuu"], "a similar subcommand exists: 'offcpu'"),
        (&["replay", "x.whylate", "-d", "1s"], "the overview has all of a recording: choose a span with --at"),
        (&["help", "nonsense"], "there is no help on nonsense (see `whylate --help`)"),
    ] {
        let output = output_of(arguments)?;
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty() && stderr.contains(message), "{arguments:?}: {stderr}");
    }
    Ok(())
}

#[test]
fn only_what_is_late_is_colored() -> Result<()> {
    let recording = format!("{RECORDINGS}/sources-6.18.whylate");
    let printed = |arguments: &[&str]| -> Result<String> {
        let output = whylate(&[&["replay", &recording], arguments].concat()).env("NO_COLOR", "").output()?;
        Ok(text(&output.stdout))
    };
    let (plain, colored) = (printed(&[])?, printed(&["--color", "always"])?);
    ensure!(!plain.contains('\x1b') && plain == printed(&["--color", "never"])?, "{plain}");
    ensure!(colored.contains("\x1b[1;31mLATE\x1b[m"), "{colored}");
    ensure!(colored.replace("\x1b[1;31m", "").replace("\x1b[m", "") == plain, "only colors differ: {colored}");
    ensure!(printed(&["block", "--color", "always"])? == printed(&["block"])?, "nothing is late");
    Ok(())
}

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings");

/// One line says how many events were lost, and with -v why.
#[test]
fn v_lists_lost_events_by_reason() -> Result<()> {
    let recording = format!("{RECORDINGS}/sources-6.18.whylate");
    for command in ["wq", "timerlat top -q", "irqsoff", "offcpu", "offcpu --why 10ms"] {
        let printed = |last: &[&str]| -> Result<String> {
            let words: Vec<&str> = ["replay", &recording].into_iter().chain(command.split(' ')).collect();
            Ok(text(&output_of(&[&words, last].concat())?.stdout))
        };
        let (brief, verbose) = (printed(&[])?, printed(&["-v"])?);
        ensure!(brief.contains("/s): -v shows why\n") && !brief.contains("\nlost: "), "{command}: {brief}");
        ensure!(verbose.contains("\nlost: ") && !verbose.contains("-v shows why"), "{command}: {verbose}");
    }
    // All that block counts there are requests of whylate itself, which are left out on purpose.
    let recording = format!("{RECORDINGS}/paths-6.18.whylate");
    let printed = text(&output_of(&["replay", &recording, "block", "-v"])?.stdout);
    ensure!(!printed.contains("lost"), "{printed}");
    let json = text(&output_of(&["replay", &recording, "block", "--json"])?.stdout);
    ensure!(json.contains(r#""own":258"#), "{json}");
    Ok(())
}

/// The table of docs/command-line.md.
#[test]
fn an_unknown_extension_is_refused_with_those_that_the_command_writes() -> Result<()> {
    let page = include_str!("../../../docs/command-line.md");
    let (_, section) = page.split_once("## Output files").context("no table")?;
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests/traces/tracefs.txt");
    let recording = format!("{RECORDINGS}/sources-6.18.whylate");
    for (command, line) in [
        ("overview", "-d 1s"),
        ("-p", "-p 1 -d 1s"),
        ("wq", "wq 1 1"),
        ("timerlat", "timerlat top -d 1s"),
        ("irqsoff", "irqsoff 1 1"),
        ("offcpu", "offcpu 1"),
        ("sqpoll", "sqpoll 1 1"),
        ("block", "block 1 1"),
        ("run", "run"),
        ("record", "record -d 1s"),
        ("report", "report RECORDING"),
        ("export", "export RECORDING"),
        ("import", "import TRACE"),
    ] {
        let line = line.replace("TRACE", trace).replace("RECORDING", &recording);
        let mut words: Vec<&str> = line.split(' ').chain(["-o", "/dev/null/x.png"]).collect();
        if command == "run" {
            words.extend(["--", "true"]);
        }
        let output = output_of(&words)?;
        let stderr = text(&output.stderr);
        let usage = if command == "timerlat" { 1 } else { 2 };
        ensure!(output.status.code() == Some(usage) && output.stdout.is_empty(), "{words:?}: {output:?}");
        let written = format!("`{command}`");
        let extensions = rows.iter().filter(|row| row[3].contains(&written)).map(|row| row[1].trim_matches('`'));
        for extension in extensions {
            ensure!(stderr.contains(extension), "{words:?} does not name {extension}: {stderr}");
        }
        let listed = stderr.split("must end in ").nth(1).context(stderr.clone())?;
        let listed = listed.split([',', ' ']).filter(|word| word.starts_with('.')).count();
        ensure!(listed == rows.iter().filter(|row| row[3].contains(&written)).count(), "{words:?}: {stderr}");
    }
    Ok(())
}

#[test]
fn timerlat_ends_with_a_verdict() -> Result<()> {
    let recording = format!("{RECORDINGS}/sources-6.18.whylate");
    for (options, verdict) in [
        (&["top", "-q", "--why", "1ms"][..], "LATE: 1ms reached on CPU "),
        (&["hist", "--why", "900ms"], "ok: none of "),
        (&["top", "-q", "-T", "1000"], "LATE: 1ms reached on CPU "),
        (&["top", "-q"], ""),
    ] {
        let stdout = text(&output_of(&[&["replay", &recording, "timerlat"], options].concat())?.stdout);
        let last = stdout.lines().last().unwrap_or_default();
        ensure!(last.starts_with(verdict) && (verdict.is_empty() != last.contains(" CPU")), "{options:?}: {stdout}");
    }
    Ok(())
}

#[test]
fn explains_a_foreign_trace() -> Result<()> {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests/traces/tracefs.txt");
    let output = output_of(&["run", "--import", trace, "--comm", "sh"])?;
    let stdout = text(&output.stdout);
    ensure!(output.status.code() == Some(0) && stdout.contains("sh:19025 took 36.8ms:"), "{output:?}");
    let json = output_of(&["run", "--import", trace, "--comm", "sh", "--json"])?;
    let report: serde_json::Value = serde_json::from_slice(&json.stdout)?;
    let path = report["path"].as_array().context("no path is reported")?;
    let sum: u64 = path.iter().filter_map(|part| part["ns"].as_u64()).sum();
    ensure!(report["elapsed_ns"] == sum && sum > 36_000_000, "the parts add up to {sum}: {}", report["elapsed_ns"]);
    let output = output_of(&["run", "--import", "/dev/zero"])?;
    ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{output:?}");
    Ok(())
}

#[test]
fn explains_losses_by_source() -> Result<()> {
    for (arguments, sources) in [
        (&["help", "lost", "timerlat"][..], 1),
        (&["help", "lost"], 6),
        // The former spelling.
        (&["timerlat", "hist", "--help-lost"], 1),
        (&["offcpu", "--comm", "wq", "--help-lost"], 1),
        (&["--help-lost"], 6),
    ] {
        let output = output_of(arguments)?;
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{arguments:?}");
        let printed = text(&output.stdout);
        let headings: Vec<&str> = printed.lines().skip(1).filter(|line| line.ends_with(':')).collect();
        assert_eq!(headings.len(), sources, "{printed}");
        let is_of_one = |heading: &str| arguments.contains(&heading.trim_end_matches(':'));
        assert!(sources > 1 || is_of_one(headings[0]), "{printed}");
    }
    Ok(())
}

#[test]
fn without_privileges_it_says_so_in_one_line() -> Result<()> {
    let unprivileged = Unprivileged::new()?;
    for (arguments, message) in [
        (&["wq", "1", "1"][..], "whylate: cannot attach wq: "),
        (&["-d", "1s"], "whylate: cannot attach any source: "),
        (&["offcpu", "--json", "-d", "1s"], "whylate: cannot attach offcpu: "),
        (&["timerlat", "-d", "1"], "whylate: cannot attach timerlat: not permitted"),
        (&["irqsoff", "1", "1"], "whylate: cannot attach irqsoff: not permitted"),
        (&["irqsoff", "1", "1", "--why", "1ms"], "whylate: cannot attach irqsoff: not permitted"),
        (&["irqsoff", "1", "1", "--timers"], "whylate: cannot attach irqsoff: not permitted"),
        (&["irqsoff", "1", "1", "--backend", "ticks"], "whylate: cannot attach irqsoff: not permitted"),
        (&["irqsoff", "1", "1", "--backend", "tracer"], "whylate: cannot attach irqsoff: not permitted"),
        (&["selftest", "--force"], "whylate: cannot run the self-test: not permitted"),
        (&["inject", "irqs-off"], "whylate: cannot inject irqs-off: not permitted"),
        (&["inject", "softirq"], "whylate: cannot inject softirq: not permitted"),
        (&["inject", "hog"], "whylate: cannot inject hog: not permitted"),
    ] {
        let output = unprivileged.output(arguments)?;
        let stderr = text(&output.stderr);
        println!("{stderr}");
        assert_eq!(output.status.code(), Some(3), "{stderr}");
        assert!(output.stdout.is_empty());
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.starts_with(message), "{stderr}");
    }
    Ok(())
}

/// The program for a user without privileges. If this one is root, that is a copy in a directory that every user can
/// reach: one for many command lines, as the program is large.
struct Unprivileged(Option<TempDir>);

impl Unprivileged {
    fn new() -> Result<Self> {
        let is_root = rustix::process::geteuid().is_root();
        Ok(Unprivileged(is_root.then(|| copied(env!("CARGO_BIN_EXE_whylate"), "whylate")).transpose()?))
    }

    fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = match &self.0 {
            Some(directory) => {
                let mut command = Command::new(directory.path().join("whylate"));
                command.args(arguments).uid(65534).gid(65534).current_dir("/");
                command
            }
            None => whylate(arguments),
        };
        Ok(command.stdin(Stdio::null()).output()?)
    }

    /// Returns the start of a shell's command line that runs the program without privileges.
    fn shell_words(&self) -> String {
        match &self.0 {
            Some(directory) => {
                let program = directory.path().join("whylate");
                format!("setpriv --reuid 65534 --regid 65534 --clear-groups {}", program.display())
            }
            None => env!("CARGO_BIN_EXE_whylate").to_owned(),
        }
    }
}

#[test]
fn unwritable_output_fails_before_command_runs() -> Result<()> {
    let output = whylate(&["run", "-o", "/nowhere/x.svg", "--", "echo", "ran"]).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{output:?}");
    ensure!(stderr.starts_with("whylate: cannot write /nowhere/x.svg: "), "{stderr}");
    Ok(())
}

#[test]
fn top_explains_missing_terminal_or_recording() -> Result<()> {
    let recording = format!("{RECORDINGS}/quiet-6.1.whylate");
    let for_text = format!("standard output is not a terminal (run `whylate replay {recording}` for text");
    for (arguments, status, message) in [
        (&["top"][..], 1, "standard output is not a terminal (run `whylate` for text"),
        (&["top", recording.as_str()][..], 1, for_text.as_str()),
        (&["top", "/dev/null"], 1, "not a regular file"),
        (&["top", "/no/such/file"], 2, "cannot read /no/such/file"),
        (&["top", "--every", "1ns"], 2, "give an interval from 100ms to 1m"),
        (&["top", "x.whylate", "--every", "1s"], 2, "cannot be used with"),
    ] {
        let output = whylate(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() != Some(status) || !said.contains(message) {
            bail!("{arguments:?}: {:?} {said}", output.status);
        }
    }
    Ok(())
}
#[test]
fn inject_rejects_invalid_arguments() -> Result<()> {
    for kind in KINDS {
        for arguments in [
            &["--for", "51ms"][..],
            &["--for", "0"],
            &["--for", "5"],
            &["--for", "999ns"],
            &["--for", "soon"],
            &["--times", "0"],
            &["--times", "10001"],
            &["--for", "50ms", "--times", "1201"],
            &["--for", "10ms", "--every", "19ms"],
            &["--every", "2h"],
            &["--cpu", "-1"],
            &["--cpu", "all"],
            &["--policy", "nonsense"],
        ] {
            let output = whylate(&[&["inject", kind][..], arguments].concat()).output()?;
            assert_eq!(output.status.code(), Some(2), "{kind} {arguments:?}");
            assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{kind} {arguments:?}");
        }
    }
    for arguments in [&["--priority", "0"][..], &["--priority", "99"], &["--policy", "normal", "--priority", "5"]] {
        let output = whylate(&[&["inject", "hog"][..], arguments].concat()).output()?;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    Ok(())
}

#[test]
fn sqpoll_rejects_invalid_arguments() -> Result<()> {
    for (arguments, status, word) in [
        (&["sqpoll", "--backend", "none"][..], 2, "bpf, fdinfo"),
        (&["sqpoll", "--backend", "fdinfo", "--precise"], 2, "leave --backend fdinfo out"),
        (&["sqpoll", "1", "0"], 2, "0"),
        (&["sqpoll", "x"], 2, "x"),
        (&["sqpoll", "sweep"], 2, "--filename"),
        (&["sqpoll", "sweep", "--filename", "/no/such/file"], 2, "/no/such/file"),
        (&["sqpoll", "sweep", "--filename", "/dev/null", "--rw", "write"], 2, "--destroy-what-is-there"),
    ] {
        let output = whylate(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(status) && said.contains(word),
            "{arguments:?}: {}: {said}",
            output.status
        );
    }
    Ok(())
}
