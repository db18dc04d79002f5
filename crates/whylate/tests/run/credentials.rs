// SPDX-License-Identifier: MIT OR Apache-2.0
//! The user and the capabilities that a command runs with.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::running::copied;
use super::{PROGRAM, lock_machine, status_of};

/// A shell script that prints the capabilities and users of its process, and the kernel objects among its descriptors.
const CREDENTIALS: &str = "grep -E '^(Uid|Gid|Groups|Cap(Inh|Prm|Eff|Amb)):' /proc/self/status; \
    echo \"Env: $HOME $USER $LOGNAME\"; readlink /proc/$$/fd/* | sed -n 's/^anon_inode/Fd: &/p'";

/// The fields that the script prints, split into words.
fn credentials(command: &mut Command) -> Result<BTreeMap<String, Vec<String>>> {
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let fields = fields.map(|(name, words)| (name.to_owned(), words.split_whitespace().map(str::to_owned).collect()));
    Ok(fields.collect())
}

/// Every listed capability set is empty, and no descriptor of a BPF object or perf event is open.
fn ensure_unprivileged(fields: &BTreeMap<String, Vec<String>>, sets: &[&str]) -> Result<()> {
    for set in sets {
        let mask = fields.get(*set).and_then(|words| words.first()).with_context(|| format!("no {set}: {fields:?}"))?;
        ensure!(u64::from_str_radix(mask, 16)? == 0, "{set}: {fields:?}");
    }
    ensure!(!fields.contains_key("Fd"), "{fields:?}");
    Ok(())
}

const ALL_SETS: [&str; 4] = ["CapInh", "CapPrm", "CapEff", "CapAmb"];

/// A user may run whylate with ambient, inheritable or file capabilities.
#[test]
fn command_of_privileged_user_has_no_capabilities() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = copied(PROGRAM, "whylate")?;
    let program = directory.path().join("whylate");
    let ids = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let with = |sets: &[&str], arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(sets).arg(&program).args(arguments).args(["sh", "-c", CREDENTIALS]);
        credentials(&mut command)
    };
    let (inh, amb) = ("--inh-caps=+bpf,+perfmon,+syslog", "--ambient-caps=+bpf,+perfmon,+syslog");
    let ambient = [&ids[..], &[inh, amb]].concat();
    ensure_unprivileged(&with(&ambient, &["run", "--"])?, &ALL_SETS)?;
    // Root has the capabilities that the kernel gives to root, and no others.
    let as_root = with(&[inh], &["run", "--"])?;
    ensure_unprivileged(&as_root, &["CapInh", "CapAmb"])?;
    ensure!(as_root["Uid"] == ["0"; 4], "{as_root:?}");
    if !Command::new("setcap")
        .arg("cap_bpf,cap_perfmon,cap_syslog=eip")
        .arg(&program)
        .status()
        .is_ok_and(|s| s.success())
    {
        println!("skipped: setcap gives a file no capabilities here");
        return Ok(());
    }
    let inheritable = [&ids[..], &[inh]].concat();
    ensure_unprivileged(&with(&inheritable, &["run", "--"])?, &ALL_SETS)?;
    // The real user of a set-user-ID program owns what it starts.
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755))?;
    let of_user = with(&ids, &["run", "--"])?;
    ensure_unprivileged(&of_user, &ALL_SETS)?;
    ensure!(of_user["Uid"] == ["65534"; 4], "{of_user:?}");
    Ok(())
}

/// The shell of `timerlat --on-end` is a command of the user, too.
#[test]
fn shell_of_action_has_no_capabilities() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = copied(PROGRAM, "whylate")?;
    let written = tempfile::NamedTempFile::new()?;
    fs::set_permissions(written.path(), fs::Permissions::from_mode(0o666))?;
    let caps = "+bpf,+perfmon,+sys_nice";
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.args([format!("--inh-caps={caps}"), format!("--ambient-caps={caps}")]);
    command.arg(directory.path().join("whylate")).args(["timerlat", "hist", "-d", "100ms", "-c", "0", "--on-end"]);
    command.arg(format!("shell,command=cat /proc/self/status > {}", written.path().display()));
    let output = command.output()?;
    ensure!(output.status.success(), "{output:?}");
    let status = fs::read_to_string(written.path())?;
    let fields = status.lines().filter_map(|line| line.split_once(':'));
    let fields = fields.map(|(name, words)| (name.to_owned(), words.split_whitespace().map(str::to_owned).collect()));
    ensure_unprivileged(&fields.collect(), &ALL_SETS)
}

#[test]
fn command_runs_as_given_user() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    for name in ["nobody", "65534"] {
        // A remaining group of root would let the command read root's files.
        let mut run = Command::new("setpriv");
        run.args([
            "--groups=0,4,27",
            "--inh-caps=+bpf,+perfmon",
            PROGRAM,
            "run",
            "--user",
            name,
            "--",
            "sh",
            "-c",
            CREDENTIALS,
        ]);
        let fields = credentials(&mut run)?;
        ensure_unprivileged(&fields, &ALL_SETS)?;
        let [uid, groups] = ["-u", "-G"].map(|of| Command::new("id").args([of, "nobody"]).output());
        let (uid, groups) = (String::from_utf8(uid?.stdout)?, String::from_utf8(groups?.stdout)?);
        ensure!(fields["Uid"] == [uid.trim(); 4], "{fields:?}");
        ensure!(fields["Groups"] == groups.split_whitespace().collect::<Vec<_>>(), "{groups}: {fields:?}");
        ensure!(fields["Env"][1..] == ["nobody"; 2] && fields["Env"][0] != "/root", "{fields:?}");
    }
    let (status, stderr) = status_of(&["--user", "no such user", "--", "echo", "ran"])?;
    ensure!(status.code() == Some(2) && stderr.contains("\"no such user\""), "{status}: {stderr}");
    let mut bounded = Command::new("setpriv");
    bounded.args([
        "--bounding-set=-setuid",
        "--inh-caps=-setuid",
        PROGRAM,
        "run",
        "--user",
        "nobody",
        "--",
        "echo",
        "ran",
    ]);
    let output = bounded.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(3) && output.stdout.is_empty(), "{output:?}");
    ensure!(stderr.contains("CAP_SETUID"), "{stderr}");
    Ok(())
}
