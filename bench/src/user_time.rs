// SPDX-License-Identifier: MIT OR Apache-2.0
//! User time of a program, to the nanosecond. The kernel's own count samples at ticks, and a tick that was due while
//! interrupts were off comes in just when a thread returns to user space.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::kernel;

/// Sums the time from each return to user space to the next system call, less the time off the CPU.
const SCRIPT: &str = "
tracepoint:raw_syscalls:sys_exit /pid == cpid/ { @since[tid] = nsecs; }
tracepoint:raw_syscalls:sys_enter /@since[tid]/ { @user = sum(nsecs - @since[tid]); delete(@since[tid]); }
tracepoint:sched:sched_switch /@since[args->prev_pid]/ {
    @user = sum(nsecs - @since[args->prev_pid]);
    @away[args->prev_pid] = 1;
    delete(@since[args->prev_pid]);
}
tracepoint:sched:sched_switch /@away[args->next_pid]/ { @since[args->next_pid] = nsecs; delete(@away[args->next_pid]); }
END { clear(@since); clear(@away); }
";

/// Returns the user time of all threads of a program, and its output. None of its arguments has a blank.
pub fn measure(program: &Path, arguments: &str) -> Result<(u64, String)> {
    let line = format!("{} {arguments}", program.display());
    let mut command = Command::new("bpftrace");
    command.args(["-e", SCRIPT, "-c", &line]).stdin(Stdio::null()).stderr(Stdio::null());
    let output =
        kernel::die_with_parent(&mut command).output().context("cannot run bpftrace (scripts/install-deps bench)")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "bpftrace failed on {line}: {text}");
    let user = text.lines().find_map(|line| line.strip_prefix("@user: ")).context("bpftrace told no time")?;
    Ok((user.trim().parse().context("bpftrace told no number")?, text))
}
