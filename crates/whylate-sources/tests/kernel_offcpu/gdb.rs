// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares user frames with those of a debugger.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use whylate_sources::Threads;
use whylate_sources::offcpu::OffcpuOptions;

use crate::sampled;
use crate::sleepers::Sleepers;
use crate::support::is_emulated;
use crate::support::machine::lock::share_machine;

/// Prints each thread's TID and frames on a line, without inlined ones, by the names of the symbol table.
const GDB: &str = "
import gdb
for thread in gdb.selected_inferior().threads():
    thread.switch()
    frame, names = gdb.newest_frame(), []
    while frame is not None:
        if frame.type() == gdb.NORMAL_FRAME:
            at = frame.pc() - (1 if names else 0)
            symbol = gdb.execute('info symbol 0x%x' % at, to_string=True)
            names.append(symbol.split(' in section ')[0].split(' + ')[0].strip())
        frame = frame.older()
    print('stack', thread.ptid[1], *names, sep='\t')
";

/// Returns the name without what differs between two spellings: the hashes of a Rust function and of its crate, and the
/// C library's aliases of a function (`read`, `__libc_read`).
fn normalized(name: &str) -> String {
    let name = name.split_once("::h").filter(|(_, hash)| hash.len() == 16).map_or(name, |(name, _)| name);
    let name = name.trim_start_matches("__GI_").trim_start_matches('_');
    let mut parts = name.strip_prefix("libc_").unwrap_or(name).split('[');
    let mut normalized = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(']') {
            Some((hash, rest)) if hash.chars().all(|digit| digit.is_ascii_hexdigit()) => normalized.push_str(rest),
            _ => normalized.extend(["[", part]),
        }
    }
    normalized
}

#[test]
fn user_frames_match_gdb() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    // Some 4,000 threads in the seven functions in which a debugger can stop them.
    let of_each = if is_emulated() { 3 } else { 572 };
    let sleepers = Sleepers::start("stoppable", of_each)?;
    let mut script = tempfile::NamedTempFile::with_suffix(".py")?;
    script.write_all(GDB.as_bytes())?;
    let options =
        OffcpuOptions { threads: Threads::of_process(sleepers.pid()), by_thread: true, ..OffcpuOptions::default() };
    let snapshot = sampled(&options, Duration::from_millis(500))?;
    let gdb = Command::new("gdb")
        .args(["-nx", "-batch", "-p", &sleepers.pid().to_string(), "-x"])
        .arg(script.path())
        .stdin(Stdio::null())
        .output();
    let Ok(gdb) = gdb else {
        println!("skipped: gdb is not installed");
        return Ok(());
    };
    let output = String::from_utf8_lossy(&gdb.stdout);
    let (mut compared, mut same, mut other) = (0_u64, 0_u64, None);
    for line in output.lines().filter_map(|line| line.strip_prefix("stack\t")) {
        let (tid, names) = line.split_once('\t').context("gdb prints no frames")?;
        let by_gdb: Vec<String> = names.split('\t').map(normalized).collect();
        let ours = snapshot.stacks.iter().find(|stack| stack.labels["tid"] == tid).context("a thread was not seen")?;
        let ours: Vec<String> = ours.user.iter().map(|name| normalized(name)).collect();
        compared += 1;
        if by_gdb == ours {
            same += 1;
        } else {
            other = other.or(Some(format!("{by_gdb:?} by gdb, {ours:?} by us")));
        }
    }
    println!("{same} of {compared} stacks are those of gdb; {other:?}");
    if compared == 0 {
        println!("skipped: gdb tells no stacks: {}", String::from_utf8_lossy(&gdb.stderr).lines().last().unwrap_or(""));
        return Ok(());
    }
    ensure!(compared >= of_each * 7 && same * 100 >= compared * 99, "{same} of {compared}: {other:?}");
    Ok(())
}
