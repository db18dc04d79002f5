// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests each row of the tables of capabilities in `docs/privileges.md`.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lock::{MachineLock, share_machine};
use running::{copied, whylate};
use rustix::process::geteuid;
use tempfile::TempDir;

const TABLES: &str = include_str!("../../../docs/privileges.md");
/// Number of concurrent runs of commands that only have to start.
const AT_ONCE: usize = 6;
const NOBODY: u32 = 65_534;
const SMALLEST: &str = "| command | smallest set |";
const WITHOUT: &str = "| without | command |";

/// Returns the rows of the table below this heading, as cells.
fn rows(heading: &str) -> Vec<Vec<&'static str>> {
    let table = TABLES.lines().skip_while(|line| !line.starts_with(heading)).skip(2);
    let rows = table.take_while(|line| line.starts_with('|'));
    rows.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect()).collect()
}

/// Returns the text between backticks.
fn quoted(cell: &'static str) -> Vec<&'static str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Returns capabilities as arguments of setpriv(1).
fn options(capabilities: &[&str], sign: char) -> String {
    let names = capabilities.iter().map(|name| name.trim_start_matches("CAP_").to_lowercase());
    names.map(|name| format!("{sign}{name}")).collect::<Vec<_>>().join(",")
}

/// A directory with a copy of the program that every user can run.
fn program() -> Result<TempDir> {
    copied(env!("CARGO_BIN_EXE_whylate"), "whylate")
}

/// Exit status and output of a command from the tables, which measures only briefly.
fn said(setpriv: &[String], program: &Path, command: &str, pid: u32) -> Result<(i32, String)> {
    let pid = pid.to_string();
    let words = command.split_whitespace().skip(1).map(|word| if word == "PID" { &pid } else { word });
    let mut process = Command::new("setpriv");
    process.args(setpriv).arg(program).args(words).current_dir("/").stdin(Stdio::null());
    if !command.contains(" inject ") {
        process.args(["-d", if command.contains(" timerlat ") { "1s" } else { "300ms" }]);
    }
    // A second injection is refused, not delayed.
    static INJECTING: Mutex<()> = Mutex::new(());
    let _alone = command.contains(" inject ").then(|| INJECTING.lock().unwrap_or_else(PoisonError::into_inner));
    let output = process.output().context("cannot run setpriv")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code().unwrap_or(-1), String::from_utf8_lossy(&text).into_owned()))
}

/// Returns arguments of setpriv(1) that take capabilities away from root.
fn taking(capabilities: &[&str]) -> [String; 2] {
    let removed = options(capabilities, '-');
    [format!("--bounding-set={removed}"), format!("--inh-caps={removed}")]
}

/// Returns what `whylate doctor` says is lost without a capability.
fn loss(setpriv: &[String], program: &Path, capability: &str) -> Result<Option<String>> {
    let output = Command::new("setpriv").args(setpriv).arg(program).arg("doctor").stdin(Stdio::null()).output()?;
    let text = String::from_utf8(output.stdout)?;
    let without = format!("without {capability}: ");
    Ok(text.lines().find_map(|line| line.trim_start().strip_prefix(&without)).map(str::to_owned))
}

/// Whether root has a capability here: in some virtual machines and containers it lacks some.
fn has(capability: &str) -> Result<bool> {
    let output = Command::new("setpriv").arg("--dump").output()?;
    let text = String::from_utf8(output.stdout)?;
    let all =
        text.lines().find_map(|line| line.strip_prefix("Capability bounding set: ")).context("no bounding set")?;
    Ok(all.split(',').any(|name| options(&[capability], '-') == format!("-{name}")))
}

/// Tests that `whylate doctor` names the commands of a capability's rows if it is missing.
fn doctor_names_what_is_lost(capability: &str, rows: &[Vec<&'static str>], program: &Path) -> Result<()> {
    let taken = quoted(rows[0][0]);
    let said = loss(&taking(&taken), program, capability)?.context("doctor has no line of it")?;
    for row in rows {
        let command = quoted(row[1])[0].split(' ').nth(1).unwrap_or("overview");
        ensure!(said.contains(command) || said.starts_with("nothing is lost"), "no {command} in: {said}");
    }
    ensure!(
        loss(&[], program, capability)?.is_none() == has(capability)?,
        "doctor is wrong about {capability} of root"
    );
    if let [_, substitute] = taken[..] {
        let said = loss(&taking(&[capability]), program, capability)?.context("doctor has no line of it alone")?;
        ensure!(said == format!("nothing is lost, because {substitute} is in effect"), "{said}");
    }
    Ok(())
}

/// Returns `None` and prints why if nothing can be tested here.
fn share_as_root() -> Option<MachineLock> {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    share_machine()
}

/// Without the privilege some kernels reveal their addresses all the same, and some not even with it.
fn addresses_need_the_privilege() -> Result<bool> {
    let shows_addresses = |setpriv: &[&str]| -> Result<bool> {
        let output = Command::new("setpriv").args(setpriv).args(["cat", "/proc/kallsyms"]).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| !line.starts_with("0000000000000000")))
    };
    Ok(shows_addresses(&[])? && !shows_addresses(&["--bounding-set=-syslog", "--inh-caps=-syslog"])?)
}

/// A sleeping process of a program of its own.
struct Sleeper(Child, TempDir);

impl Sleeper {
    fn new() -> Result<Self> {
        let directory = copied(which_sleep()?, "sleeper")?;
        let child = Command::new(directory.path().join("sleeper")).arg("60").spawn()?;
        // The process has its name after execve(2).
        while fs::read_to_string(format!("/proc/{}/comm", child.id()))?.trim() != "sleeper" {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Sleeper(child, directory))
    }

    fn program(&self) -> std::path::PathBuf {
        self.1.path().join("sleeper")
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn which_sleep() -> Result<&'static str> {
    ["/usr/bin/sleep", "/bin/sleep"].into_iter().find(|path| Path::new(path).exists()).context("there is no sleep")
}

/// Figures do not matter here, so commands run in parallel.
fn some_at_once<T: Sync>(jobs: &[T], run: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let of_worker = jobs.chunks(jobs.len().div_ceil(AT_ONCE));
        let workers: Vec<_> = of_worker.map(|jobs| scope.spawn(|| jobs.iter().try_for_each(&run))).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("it panicked")))
    })
}

/// Tests all rows of one capability.
fn without(capability: &str) -> Result<()> {
    let Some(_lock) = share_as_root() else { return Ok(()) };
    if capability == "CAP_SYSLOG" && !addresses_need_the_privilege()? {
        println!("skipped: this kernel's settings tell the addresses of functions to everybody, or to nobody");
        return Ok(());
    }
    let directory = program()?;
    let program = directory.path().join("whylate");
    let rows: Vec<_> = rows(WITHOUT).into_iter().filter(|row| quoted(row[0])[0] == capability).collect();
    ensure!(!rows.is_empty(), "no row begins with {capability}");
    doctor_names_what_is_lost(capability, &rows, &program)?;
    some_at_once(&rows, |row| try_row(row, &program))
}

/// Tests one row.
fn try_row(row: &[&'static str], program: &Path) -> Result<()> {
    let [taken, command, status, says, works] = row[..] else { anyhow::bail!("a row of other cells: {row:?}") };
    let taken = quoted(taken);
    let mut sleeper = Sleeper::new()?;
    if command.contains("deleted") {
        fs::remove_file(sleeper.program())?;
    } else if command.contains("only another user can read") {
        chown(sleeper.program(), Some(NOBODY), None)?;
        fs::set_permissions(sleeper.program(), Permissions::from_mode(0o711))?;
    }
    let ring = command.contains("of a ring").then(|| {
        let mut load = whylate(&["inject", "sqpoll", "--for", "60s"]);
        load.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    });
    let mut ring = ring.transpose()?;
    if let Some(ring) = &mut ring {
        // It prints a line once its submission thread runs.
        BufReader::new(ring.stdout.take().context("a pipe")?).read_line(&mut String::new())?;
    }
    let setpriv = taking(&taken);
    let outcome = (|| {
        let (command, expected) = (quoted(command)[0], quoted(says).into_iter().next());
        let (ended, text) = said(&setpriv, program, command, sleeper.0.id())?;
        println!("without {taken:?}: {command}: {ended}: {text}");
        ensure!(ended.to_string() == status, "{command} ended with {ended}: {text}");
        match expected {
            Some(sentence) => {
                ensure!(text.contains(sentence), "{command} does not say {sentence:?} but: {text}");
                let (_, whole) = said(&[], program, command, sleeper.0.id())?;
                ensure!(!whole.contains(sentence), "{command} says {sentence:?} with all capabilities, too");
                // Another capability includes it.
                if taken.len() > 1 {
                    let (_, text) = said(&taking(&taken[..1]), program, command, sleeper.0.id())?;
                    ensure!(!text.contains(sentence), "{command} says {sentence:?} without {} alone", taken[0]);
                }
            }
            None => ensure!(!text.contains("CAP_") && !text.contains("ermitted"), "{command} says: {text}"),
        }
        let line = text.lines().find(|line| expected.is_some_and(|sentence| line.contains(sentence)));
        ensure!(!line.is_some_and(|line| line.contains("os error")), "the system's error is no advice: {line:?}");
        for works in quoted(works) {
            let (ended, text) = said(&setpriv, program, works, sleeper.0.id())?;
            ensure!(ended == 0, "{works} ended with {ended}: {text}");
        }
        Ok(())
    })();
    if let Some(ring) = &mut ring {
        ring.kill()?;
        ring.wait()?;
    }
    sleeper.0.kill()?;
    outcome
}

macro_rules! without {
    ($($test:ident: $capability:literal,)*) => {
        /// Capabilities with a test.
        const TRIED: &[&str] = &[$($capability),*];
        $(#[test]
        fn $test() -> Result<()> {
            without($capability)
        })*
    };
}

without! {
    without_bpf: "CAP_BPF",
    without_perfmon: "CAP_PERFMON",
    without_sys_admin: "CAP_SYS_ADMIN",
    without_syslog: "CAP_SYSLOG",
    without_sys_nice: "CAP_SYS_NICE",
    without_sys_ptrace: "CAP_SYS_PTRACE",
    without_checkpoint_restore: "CAP_CHECKPOINT_RESTORE",
    without_dac_read_search: "CAP_DAC_READ_SEARCH",
    without_ipc_lock: "CAP_IPC_LOCK",
    without_sys_resource: "CAP_SYS_RESOURCE",
}

#[test]
fn doctor_table_and_tests_list_the_same_capabilities() -> Result<()> {
    let output = whylate(&["doctor", "--json"]).output()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let known = report["capabilities"].as_object().context("doctor lists capabilities")?;
    let known: BTreeSet<String> = known.keys().map(|name| name.to_uppercase()).collect();
    let rows: BTreeSet<String> = rows(WITHOUT).iter().map(|row| quoted(row[0])[0].to_owned()).collect();
    let tried: BTreeSet<String> = TRIED.iter().map(|&name| name.to_owned()).collect();
    ensure!(known == rows && rows == tried, "doctor: {known:?}, table: {rows:?}, tests: {tried:?}");
    Ok(())
}

/// Everything works with the smallest set, and something fails without any one capability of it.
#[test]
fn smallest_capability_sets_suffice_and_are_minimal() -> Result<()> {
    let Some(_lock) = share_as_root() else { return Ok(()) };
    let needs_syslog = addresses_need_the_privilege()?;
    let directory = program()?;
    let program = directory.path().join("whylate");
    let as_nobody = |capabilities: &[&str], command: &str| {
        let added = options(capabilities, '+');
        let ids = ["--reuid", "--regid"].map(|id| format!("{id}={NOBODY}"));
        let sets = ["--inh-caps", "--ambient-caps"].map(|set| format!("{set}={added}"));
        let setpriv = [&ids[..], &["--clear-groups".to_owned()], &sets].concat();
        said(&setpriv, &program, command, 0)
    };
    let rows = rows(SMALLEST);
    ensure!(rows.len() > 5, "{rows:?}");
    let mut jobs: Vec<(&str, Vec<&str>, Option<&str>)> = Vec::new();
    for row in rows {
        let (command, set) = (quoted(row[0])[0], quoted(row[1]));
        if set.contains(&"CAP_SYSLOG") && !needs_syslog {
            println!("skipped: this kernel's settings tell the addresses of functions to everybody, or to nobody");
            continue;
        }
        for &one in &set {
            let others = set.iter().copied().filter(|&other| other != one).collect();
            jobs.push((command, others, Some(one)));
        }
        jobs.push((command, set, None));
    }
    let try_one = |(command, set, missing): &(&str, Vec<&str>, Option<&str>)| -> Result<()> {
        let (status, text) = as_nobody(set, command)?;
        println!("{command} with {set:?}: {status}: {text}");
        match missing {
            Some(one) => ensure!(text.contains(one), "{command} without {one} does not say so: {status}: {text}"),
            None => ensure!(status == 0 && !text.contains("CAP_"), "{command} with {set:?}: {status}: {text}"),
        }
        Ok(())
    };
    some_at_once(&jobs, try_one)
}
