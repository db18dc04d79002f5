// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate top` in a real terminal: tmux(1) shows what a user would see.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use lock::share_machine;
use running::{Running, whylate};

/// Timeout, far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// A tmux server with its own socket directory.
struct Tmux {
    directory: tempfile::TempDir,
}

impl Tmux {
    /// Returns `None` without tmux.
    fn start(columns: usize, rows: usize) -> Result<Option<Self>> {
        if Command::new("tmux").arg("-V").stdout(Stdio::null()).status().is_err() {
            println!("skipped: there is no tmux (scripts/install-deps terminal)");
            return Ok(None);
        }
        let tmux = Tmux { directory: tempfile::tempdir()? };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        tmux.run(&["new-session", "-d", "-x", &columns, "-y", &rows, "env PS1='$ ' sh"])?;
        tmux.wait_for("$")?;
        Ok(Some(tmux))
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("tmux");
        command.arg("-u").arg("-S").arg(self.directory.path().join("tmux")).args(["-f", "/dev/null"]).args(arguments);
        command.current_dir(self.directory.path()).env("LC_ALL", "C.UTF-8").env_remove("TMUX").stdin(Stdio::null());
        let output = command.output()?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn screen(&self) -> Result<String> {
        self.run(&["capture-pane", "-p"])
    }

    fn press(&self, keys: &[&str]) -> Result<()> {
        self.run(&[&["send-keys"], keys].concat()).map(drop)
    }

    /// Types a command and Enter.
    fn type_line(&self, line: &str) -> Result<()> {
        self.run(&["send-keys", "-l", line])?;
        self.press(&["Enter"])
    }

    /// Waits until the screen has the text and returns the screen.
    fn wait_for(&self, text: &str) -> Result<String> {
        self.wait_until(text, |screen| screen.contains(text))
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let screen = self.screen()?;
            if is_so(&screen) {
                return Ok(screen);
            }
            ensure!(Instant::now() < deadline, "no {what:?} on the screen:\n{screen}");
            thread::sleep(POLL);
        }
    }

    /// Returns the screen of a fresh shell; the terminal's modes are in a file.
    fn before(&self) -> Result<String> {
        self.type_line("clear; stty -a >before")?;
        self.wait_until("prompt", |screen| screen.trim_end() == "$")
    }

    /// Screen and terminal modes are as before.
    fn ensure_as_before(&self, before: &str) -> Result<()> {
        self.type_line("stty -a >after; clear")?;
        self.wait_until("screen as before", |screen| screen == before)?;
        let [before, after] = ["before", "after"].map(|name| fs::read_to_string(self.directory.path().join(name)));
        ensure!(before? == after?, "the terminal is not as it was");
        Ok(())
    }

    /// Returns the processes of this name that the shell started.
    fn pids(&self, name: &str) -> Result<Vec<u32>> {
        let shell = self.run(&["display-message", "-p", "#{pane_pid}"])?;
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.trim()))?;
        let is_named =
            |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        Ok(children.split_whitespace().flat_map(str::parse).filter(is_named).collect())
    }

    /// Starts `top` and waits for its first figures.
    fn run_top(&self, arguments: &str) -> Result<u32> {
        self.type_line(&format!("{} top {arguments}", env!("CARGO_BIN_EXE_whylate")))?;
        self.wait_for("OVER TIME")?;
        self.pids("whylate")?.first().copied().context("it runs")
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = self.run(&["kill-server"]);
    }
}

fn wait_until_gone(pid: u32) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while fs::exists(format!("/proc/{pid}"))? {
        ensure!(Instant::now() < deadline, "{pid} goes on without its terminal");
        thread::sleep(POLL);
    }
    Ok(())
}

#[test]
fn finds_culprit_and_writes_recording() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let Some(tmux) = Tmux::start(140, 40)? else { return Ok(()) };
    let before = tmux.before()?;
    tmux.run_top("--sources wq,timerlat,offcpu")?;
    let hog = Running::start(&["inject", "hog", "--for", "40ms", "--every", "100ms", "--times", "600", "--cpu", "0"])?;
    tmux.wait_for("thread whylate-hog")?;
    // The culprit, its victims, and one of their events. Culprits come first, and have the focus.
    tmux.type_line("/thread whylate-hog")?;
    tmux.press(&["Enter"])?;
    let culprit = tmux.wait_for("Victims of thread whylate-hog")?;
    ensure!(["timerlat", "wq", "offcpu"].iter().any(|source| culprit.contains(source)), "{culprit}");
    tmux.press(&["Enter"])?;
    tmux.wait_until("causes", |screen| {
        screen.contains("SHARE") && screen.contains("whylate-hog") && screen.contains("KIND")
    })?;
    tmux.press(&["Space", "T", "t"])?;
    tmux.wait_for("FROZEN")?;
    // The span is visible on a wide screen only.
    tmux.run(&["resize-window", "-x", "20", "-y", "5"])?;
    tmux.wait_until("small screen", |screen| screen.contains("FROZEN") && !screen.contains("last 1m"))?;
    tmux.run(&["resize-window", "-x", "140", "-y", "40"])?;
    tmux.wait_for("last 1m")?;
    tmux.press(&["w"])?;
    let screen = tmux.wait_until("name", |screen| screen.contains("saved ") && screen.contains(".whylate ("))?;
    let name = screen.split("saved ").nth(1).and_then(|rest| rest.split(" (").next()).context("it has a name")?;
    let path = tmux.directory.path().join(name);
    let replayed = whylate(&["replay"]).arg(&path).output()?;
    let replayed = String::from_utf8_lossy(&replayed.stdout) + String::from_utf8_lossy(&replayed.stderr);
    ensure!(replayed.contains("CULPRITS") && replayed.contains("whylate-hog"), "{replayed}");
    drop(hog);
    tmux.press(&["q"])?;
    // The previous screen content is back.
    tmux.wait_until("prompt", |screen| !screen.contains("FROZEN") && screen.contains('$'))?;
    tmux.ensure_as_before(&before)?;
    // The written recording shows the same screen.
    tmux.type_line(&format!("{} top {name}", env!("CARGO_BIN_EXE_whylate")))?;
    tmux.wait_until("replay", |screen| screen.contains("REPLAY") && screen.contains("whylate-hog"))?;
    tmux.press(&["C-c"])?;
    tmux.wait_until("prompt", |screen| !screen.contains("REPLAY"))?;
    Ok(())
}

#[test]
fn restores_terminal_after_signals_and_panics() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    let Some(tmux) = Tmux::start(80, 24)? else { return Ok(()) };
    let before = tmux.before()?;
    let top = tmux.run_top("--sources wq")?;
    rustix::process::kill_process(rustix::process::Pid::from_raw(top as i32).context("a PID")?, Signal::TERM)?;
    wait_until_gone(top)?;
    tmux.ensure_as_before(&before)?;
    // After a suspend the shell has the terminal; afterwards `top` is back.
    tmux.type_line("set -m")?;
    tmux.run_top("--sources wq")?;
    tmux.press(&["C-z"])?;
    tmux.wait_until("prompt", |screen| !screen.contains("OVER TIME") && screen.contains("$"))?;
    tmux.type_line("fg")?;
    tmux.wait_for("OVER TIME")?;
    tmux.press(&["q"])?;
    tmux.wait_until("prompt", |screen| !screen.contains("OVER TIME"))?;
    if !cfg!(debug_assertions) {
        println!("skipped: no fault can be made in a release");
        return Ok(());
    }
    // A panic of the screen is printed below the prompt, and a panic of the feed on the screen.
    let program = env!("CARGO_BIN_EXE_whylate");
    tmux.type_line(&format!("clear; WHYLATE_PANIC=screen {program} top --sources wq"))?;
    tmux.wait_until("fault", |screen| screen.contains("a test asks for it") && !screen.contains("OVER TIME"))?;
    tmux.ensure_as_before(&before)?;
    tmux.type_line(&format!("clear; WHYLATE_PANIC=feed {program} top --sources wq"))?;
    tmux.wait_until("fault", |screen| screen.contains("internal error") && screen.contains("ENDED"))?;
    tmux.press(&["q"])?;
    tmux.wait_until("prompt", |screen| !screen.contains("ENDED"))?;
    tmux.ensure_as_before(&before)
}

#[test]
fn closed_terminal_leaves_nothing_behind() -> Result<()> {
    let Some(_lock) = share_machine() else {
        println!("skipped: no source measures here");
        return Ok(());
    };
    // With and without SIGHUP, and whether the terminal emulator closes the terminal or is killed.
    for (ignored, is_killed) in [("", false), ("trap '' HUP; ", false), ("", true)] {
        let Some(tmux) = Tmux::start(80, 24)? else { return Ok(()) };
        tmux.type_line(&format!("{ignored}clear"))?;
        let top = tmux.run_top("--sources wq")?;
        if is_killed {
            let server = tmux.run(&["display-message", "-p", "#{pid}"])?.trim().parse()?;
            rustix::process::kill_process(rustix::process::Pid::from_raw(server).context("a PID")?, Signal::KILL)?;
        }
        drop(tmux);
        wait_until_gone(top)?;
    }
    Ok(())
}
