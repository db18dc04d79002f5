// SPDX-License-Identifier: MIT OR Apache-2.0
//! A terminal of its own for a command, which script(1) makes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

/// What is typed to end what runs in the foreground.
pub const CTRL_C: &[u8] = b"\x03";

/// Runs a program by a shell's line in a terminal, types something once a line of its output has that in it, and returns its exit
/// status and all output; `None`, and a line that says why, where there is no terminal to be had.
pub fn typed(line: &str, once: &str, keys: &[u8]) -> Result<Option<(Option<i32>, String)>> {
    let mut script = Command::new("script");
    // A shell that waited for the line's program would be ended by Ctrl-C itself.
    let line = format!("exec {line}");
    script.args(["-qec", &line, "/dev/null"]).env("SHELL", "/bin/sh").stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut script) = script.spawn() else {
        println!("skipped: there is no script(1)");
        return Ok(None);
    };
    let mut stdin = script.stdin.take().context("no input")?;
    let mut stdout = BufReader::new(script.stdout.take().context("no output")?);
    let mut printed = Vec::new();
    while !String::from_utf8_lossy(&printed).contains(once) && stdout.read_until(b'\n', &mut printed)? > 0 {}
    stdin.write_all(keys)?;
    stdout.read_to_end(&mut printed)?;
    // The end of its input would be the end of what it runs.
    drop(stdin);
    let status = script.wait()?;
    Ok(Some((status.code(), String::from_utf8_lossy(&printed).replace('\r', ""))))
}
