// SPDX-License-Identifier: MIT OR Apache-2.0
//! A terminal for a command, made by script(1).

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

/// Input that ends the foreground process.
pub const CTRL_C: &[u8] = b"\x03";

/// Runs a shell command line in a terminal, types `keys` once a line of its output contains `once`, and returns the
/// exit status and all output; `None` with a printed reason without a terminal.
pub fn typed(line: &str, once: &str, keys: &[u8]) -> Result<Option<(Option<i32>, String)>> {
    let mut script = Command::new("script");
    // A shell that waits for the program would be killed by Ctrl-C itself.
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
    // End of input would end the program.
    drop(stdin);
    let status = script.wait()?;
    Ok(Some((status.code(), String::from_utf8_lossy(&printed).replace('\r', ""))))
}
