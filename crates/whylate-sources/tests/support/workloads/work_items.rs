// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many kinds of work items at once: files, terminals, processes, namespaces and, where the kernel can, injected ones.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use whylate_sources::AttachError;
use whylate_sources::inject::work::{Plan, run};

use crate::support::machine::lock::plan;

/// Pause between two rounds, so that the trace buffer suffices.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs the load for `time`.
pub fn mixed_load(time: Duration) -> Result<()> {
    // On a disk, if there is one: a virtual machine has none.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).or_else(|_| tempfile::tempdir())?;
    let over = AtomicBool::new(false);
    let until_over = |step: &(dyn Fn(u32) -> Result<()> + Sync)| -> Result<()> {
        (0..).take_while(|_| !over.load(Ordering::Relaxed)).try_for_each(step)
    };
    let write_files = |round: u32| {
        let mut file = File::create(directory.path().join(format!("file{}", round % 8)))?;
        file.write_all(&vec![b'x'; 1 << 20])?;
        Ok(file.sync_all()?)
    };
    let sync_all = |_| {
        rustix::fs::sync();
        thread::sleep(PAUSE);
        Ok(())
    };
    let use_terminals = |_| silently(&["script", "-qec", "head -c 100000 /dev/zero | od -An -v", "/dev/null"]);
    let make_namespaces = |_| silently(&["unshare", "-n", "true"]);
    let inject = |round: u32| {
        let load = round % 2 == 1;
        let busy_ns = if round % 4 < 2 { 0 } else { 200_000 };
        let items = if busy_ns > 0 { 500 } else { 2_000 };
        match run(&Plan { load, busy_ns, ..plan(items) }, &AtomicBool::new(false)) {
            // Before 6.10 the other loads have to do.
            Ok(_) | Err(AttachError::Unsupported(_)) => {}
            Err(error) => return Err(error.into()),
        }
        thread::sleep(PAUSE);
        Ok(())
    };
    let write_to_terminal = |_| write_to_terminal();
    let steps: [&(dyn Fn(u32) -> Result<()> + Sync); 6] =
        [&write_files, &sync_all, &use_terminals, &write_to_terminal, &make_namespaces, &inject];
    thread::scope(|scope| {
        let began = Instant::now();
        let threads = steps.map(|step| scope.spawn(|| until_over(step)));
        while began.elapsed() < time {
            thread::sleep(Duration::from_millis(10));
        }
        over.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a load failed")))
    })
}

/// Writes to a terminal byte by byte: the kernel flushes each by a work item.
fn write_to_terminal() -> Result<()> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?.into_string()?;
    // As the controlling terminal its close would end this process.
    let mut theirs = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name)?;
    let mut ours = File::from(ours);
    for _ in 0..500 {
        theirs.write_all(b"x")?;
        ours.read_exact(&mut [0])?;
    }
    thread::sleep(PAUSE);
    Ok(())
}

/// Runs a program that a small machine may not have, without output.
fn silently(command: &[&str]) -> Result<()> {
    let (program, arguments) = (command[0], &command[1..]);
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _ = command.status();
    thread::sleep(PAUSE);
    Ok(())
}
