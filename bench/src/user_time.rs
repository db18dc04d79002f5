// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a program has of the CPUs in user space, to the nanosecond: by the kernel's own count it is sampled at ticks,
//! of which those that were due while interrupts were off come in just when a thread returns to user space.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::kernel;

/// From each return to user space to the next system call, less what others had of the CPU meanwhile.
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

/// Of all threads of a program, and what it printed. None of its arguments has a blank.
pub fn of(program: &Path, arguments: &str) -> Result<(u64, String)> {
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
