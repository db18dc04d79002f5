// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that `import`, `offcpu` and `irqsoff` read, and graphs that are drawn from them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use whylate_model::Snapshot;

use crate::running::whylate;
use crate::{output_of, text};

const PROCSTAT: &str = "\
  PID    TID COMM             TDNAME           KSTACK
    0 100000 kernel           swapper          mi_switch sleepq_timedwait _sleep swapper btext
    0 100023 kernel           firmware taskq   mi_switch sleepq_wait _sleep taskqueue_thread_loop fork_exit fork_trampoline
";

const CAPTURE: &str = include_str!("../../../whylate-model/tests/ftrace/trace-pipe-5.4.txt");

fn printed(arguments: &[&str]) -> Result<String> {
    let output = output_of(arguments)?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{arguments:?}: {stderr}");
    Ok(String::from_utf8(output.stdout)?)
}

fn snapshots(json: &str) -> Result<Vec<Snapshot>> {
    json.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn irqsoff(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(&[&["irqsoff"], arguments].concat()).output()?)
}

/// Memory in KiB for the program, its libraries, and its buffers.
const ENOUGH_KIB: u32 = 200 << 10;

#[test]
fn offcpu_rejects_invalid_arguments() -> Result<()> {
    for arguments in [
        &["offcpu", "-F", "0"][..],
        &["offcpu", "-F", "1000"],
        &["offcpu", "--state", "X"],
        &["offcpu", "--max-depth", "128"],
        &["offcpu", "-o", "graph.png"],
        &["offcpu", "--why", "5ms", "-o", "chains.pb.gz"],
        &["offcpu", "--why", "5ms", "-o", "chains.speedscope.json"],
        &["offcpu", "--blocked", "1s", "-d", "1s"],
        &["offcpu", "--blocked", "1s", "--wakers"],
        &["offcpu", "--wakers", "--backend", "sample"],
        &["offcpu", "--wakers", "--backend", "proc"],
        &["offcpu", "--blocked", "1s", "--backend", "proc"],
        &["offcpu", "import"],
        &["offcpu", "--classes", "/dev/zero", "-d", "1s"],
    ] {
        let output = output_of(arguments)?;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
    Ok(())
}

#[test]
fn checks_class_file_before_measuring() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("waits.txt");
    fs::write(&file, "# ours\nlock my_lock\nlok my_other_lock\n")?;
    let name = file.to_str().context("a name in UTF-8")?;
    let output = output_of(&["offcpu", "--classes", name, "-d", "1h"])?;
    let stderr = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with(&format!("whylate: {name}, line 3: \"lok\" is no class of waits (")), "{stderr}");
    let output = output_of(&["offcpu", "--classes", "/no/such/file"])?;
    assert_eq!(output.status.code(), Some(2));
    Ok(())
}

#[test]
fn converts_procstat_files_to_folded_stacks_and_graph() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let text = directory.path().join("procstat.txt");
    fs::write(&text, PROCSTAT)?;
    let text = text.to_str().context("a name in UTF-8")?;
    assert_eq!(
        printed(&["offcpu", "import", text, text, "--by", "thread"])?,
        "kernel;firmware taskq;fork_trampoline;fork_exit;taskqueue_thread_loop;_sleep;sleepq_wait;mi_switch 2\n\
         kernel;swapper;btext;swapper;_sleep;sleepq_timedwait;mi_switch 2\n"
    );
    assert_eq!(
        printed(&["offcpu", "import", text, "--by", "stack", "--leaf-first"])?,
        "mi_switch;sleepq_timedwait;_sleep;swapper;btext 1\n\
         mi_switch;sleepq_wait;_sleep;taskqueue_thread_loop;fork_exit;fork_trampoline 1\n"
    );
    let graph = directory.path().join("graph.svg");
    printed(&["offcpu", "import", text, "-o", graph.to_str().context("a name in UTF-8")?])?;
    let svg = fs::read_to_string(&graph)?;
    assert!(svg.contains("taskqueue_thread_loop") && svg.trim_end().ends_with("</svg>"));
    let output = output_of(&["offcpu", "import", "/proc/version"])?;
    assert_eq!(output.status.code(), Some(1));
    Ok(())
}

#[test]
fn rejects_undrawable_input_in_one_line() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (input, graph) = (directory.path().join("a.folded"), directory.path().join("a.svg"));
    let [path, graph] = [&input, &graph].map(|path| path.to_str().unwrap_or_default());
    for (text, message) in [
        (format!("d {0}\ne {0}\n", u64::MAX), "the counts add up to more than"),
        (format!("{}f 1\n", "f;".repeat(2_000_000)), "has more than 4096 frames"),
    ] {
        fs::write(&input, text)?;
        let output = output_of(&["offcpu", "import", path, "-o", graph])?;
        let stderr = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && stderr.lines().count() == 1, "{stderr}");
        ensure!(stderr.contains(message) && !Path::new(graph).exists(), "{stderr}");
    }
    for arguments in [&["offcpu", "import", "/dev/zero"][..], &["offcpu", "--diff", "/dev/zero", path]] {
        let output = output_of(arguments)?;
        let stderr = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && stderr.contains("/dev/zero: this is not text"), "{stderr}");
    }
    Ok(())
}

#[test]
fn compares_two_profiles() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = directory.path().join(name);
        fs::write(&path, text)?;
        Ok(path.to_str().context("a name in UTF-8")?.to_owned())
    };
    let (before, after) = (file("a.folded", "p;f 10\np;g 10\n")?, file("b.folded", "p;f 30\np;h 10\n")?);
    let graph = file("d.svg", "")?;
    let table = printed(&["offcpu", "--diff", &before, &after, "-o", &graph])?;
    assert_eq!(table.lines().nth(1).map(str::trim), Some("-50.0%   50.0%   0.0%  p;g"), "{table}");
    assert!(fs::read_to_string(&graph)?.contains("</svg>"));
    Ok(())
}

const OF_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../whylate-model/tests");

#[test]
fn import_recognizes_each_format() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = directory.path().join(name);
        fs::write(&path, text)?;
        Ok(path.to_str().context("a name in UTF-8")?.to_owned())
    };
    let folded = file("a.folded", "a;b 1\na;c 2\n")?;
    let dump = file("dump", "==> /proc/1/stack <==\n[<0>] futex_wait+0x1/0x2\n[<0>] do_syscall_64+0x3/0x4\n")?;
    let procstat = file("procstat", PROCSTAT)?;
    let quoted: String = PROCSTAT.lines().map(|line| format!("> {line}\n")).collect();
    let quoted = file("mail", &quoted)?;
    let ftrace = |name: &str| format!("{OF_MODEL}/ftrace/{name}.txt");
    let traces = |name: &str| format!("{OF_MODEL}/traces/{name}.txt");
    for (file, options, former) in [
        (&folded, "", "offcpu import"),
        (&dump, "--by stack", "offcpu import"),
        (&procstat, "--leaf-first", "offcpu import"),
        (&quoted, "--by thread", "offcpu import"),
        (&ftrace("irqsoff-2.6"), "", "irqsoff --import"),
        (&ftrace("irqsoff-6.12"), "--json", "irqsoff --import"),
        (&ftrace("trace-pipe-5.4"), "--slower 1ms", "irqsoff --import"),
        (&ftrace("trace-pipe-5.4"), "--histogram --worst 3", "irqsoff --import"),
        (&traces("tracefs"), "--comm sh", "run --import"),
        (&traces("perf-script"), "--json", "run --import"),
        (&traces("perf-sched"), "", "run --import"),
    ] {
        let options: Vec<&str> = options.split_whitespace().collect();
        let [now, before] = ["import", former].map(|command| {
            let command: Vec<&str> = command.split(' ').chain([file.as_str()]).chain(options.clone()).collect();
            output_of(&command)
        });
        let (now, before) = (now?, before?);
        ensure!(now.status.success() && !now.stdout.is_empty(), "{file}: {}", text(&now.stderr));
        ensure!(now.stdout == before.stdout, "{file}: {}", text(&now.stdout));
        ensure!(now.stderr == before.stderr, "{file}: {}", text(&now.stderr));
    }
    Ok(())
}

#[test]
fn import_says_why_it_does_not_show_a_file() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let notes = directory.path().join("notes.txt");
    fs::write(&notes, "a report\nthat has no trace\n")?;
    let notes = notes.to_str().context("a name in UTF-8")?;
    let trace = format!("{OF_MODEL}/traces/tracefs.txt");
    let recording = format!("{}/late-6.18.whylate", crate::RECORDINGS);
    for (arguments, status, message) in [
        (&[notes][..], 1, "no line in it is of a known format: give the text output of ftrace"),
        (&["/dev/null"], 1, "no line in it is of a known format"),
        (&["/dev/zero"], 1, "/dev/zero: this is not text"),
        (&[&recording], 1, "this is a recording of whylate: show it with `whylate replay`"),
        (&["/no/such/file"], 2, "No such file or directory"),
        (&[&trace, &trace], 2, "it has context switches: import it alone"),
        (&[&trace, "--by", "stack"], 2, "it has context switches, and --by is for stacks: omit it"),
        (&[&trace, "-o", "x.pb.gz"], 2, "its name must end in .svg, .folded or .trace.json"),
        (&[&trace, "--as", "stacks"], 1, "this is no output of procstat -ka"),
    ] {
        let output = output_of(&[&["import"], arguments].concat())?;
        let stderr = text(&output.stderr);
        ensure!(output.status.code() == Some(status) && output.stdout.is_empty(), "{arguments:?}: {output:?}");
        ensure!(stderr.contains(message) && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
    }
    Ok(())
}

#[test]
fn import_keeps_the_path_of_a_command() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let trace = format!("{OF_MODEL}/traces/tracefs.txt");
    for (name, beginning) in [("path.svg", "<"), ("path.folded", "bash worked "), ("path.trace.json", "{")] {
        let path = directory.path().join(name);
        let path = path.to_str().context("a name in UTF-8")?;
        ensure!(printed(&["import", &trace, "--comm", "sh", "-o", path])?.starts_with("sh:19025"), "{name}");
        let written = fs::read_to_string(path)?;
        ensure!(written.starts_with(beginning), "{name}: {written}");
    }
    Ok(())
}

/// An unprivileged user who owns a directory cannot redirect root's writes to root's files.
#[test]
fn writes_nothing_through_links_or_to_foreign_files() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let text = directory.path().join("procstat.txt");
    fs::write(&text, PROCSTAT)?;
    let text = text.to_str().context("a name in UTF-8")?;
    let ensure_refused = |path: &Path, kept: &Path, message: &str| -> Result<()> {
        let name = path.to_str().context("a name in UTF-8")?;
        let output = output_of(&["offcpu", "import", text, "-o", name])?;
        let stderr = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{}: {stderr}", output.status);
        ensure!(stderr.contains(message) && stderr.lines().count() == 1, "{stderr}");
        ensure!(fs::read_to_string(kept)? == "content", "{} has something else", kept.display());
        Ok(())
    };
    let [secret, link] = ["secret.svg", "link.svg"].map(|name| directory.path().join(name));
    fs::write(&secret, "content")?;
    symlink(&secret, &link)?;
    ensure_refused(&link, &secret, "it is a symbolic link (choose another file)")?;
    ensure!(fs::symlink_metadata(&link)?.is_symlink(), "the link is gone");
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can give files away");
        return Ok(());
    }
    let shared = directory.path().join("shared");
    fs::create_dir(&shared)?;
    fs::set_permissions(&shared, Permissions::from_mode(0o1777))?;
    let theirs = shared.join("theirs.svg");
    fs::write(&theirs, "content")?;
    chown(&theirs, Some(65_534), Some(65_534))?;
    ensure_refused(&theirs, &theirs, "it belongs to another user (choose another file)")
}

#[test]
fn rejects_useless_files_in_one_line() -> Result<()> {
    let directory = tempfile::tempdir()?;
    for (name, bytes, message) in [
        ("empty", &b""[..], "no line in it is a latency trace"),
        ("binary", b"\x7fELF\x02\x01\x01\0\0", "this is not text"),
        ("garbage", b"\xff\xfe\x1b[2J\n\n=> \n#\n[[[[::::", "no line in it is a latency trace"),
        ("truncated", b"# tracer: irqsoff\n# irqsoff latency trace v1.1.5 on 5.4\n# ---", "breaks off in its heading"),
        ("trace.dat", b"\x17\x08\x44tracing6\0\0", "this is a trace.dat"),
        ("compressed", b"\x1f\x8b\x08\0\0", "decompress it first"),
        ("other", b"# wakeup latency trace v1.1.5 on 5.4\n# latency: 5 us, #1/1, CPU#0 |\n", "of another tracer"),
    ] {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes)?;
        let path = path.to_str().context("a path")?;
        let output = irqsoff(&["--import", path])?;
        let stderr = text(&output.stderr);
        ensure!(output.status.code() == Some(1), "{name}: {output:?}");
        ensure!(stderr.lines().count() == 1 && stderr.contains(message), "{name}: {stderr}");
        ensure!(stderr.starts_with(&format!("whylate: cannot import {path}: ")), "{name}: {stderr}");
    }
    for (path, status, message) in [
        ("/nonexistent", 2, "No such file or directory"),
        ("/", 1, "Is a directory"),
        ("/dev/zero", 1, "this is not text"),
    ] {
        let output = irqsoff(&["--import", path])?;
        let stderr = text(&output.stderr);
        ensure!(output.status.code() == Some(status) && stderr.lines().count() == 1, "{output:?}");
        ensure!(stderr.matches(message).count() == 1, "the reason is printed once: {stderr}");
    }
    Ok(())
}

/// Larger than the memory: the rest of the file is a hole. A gigabyte in the full run.
fn long() -> u64 {
    if std::env::var_os("WHYLATE_THOROUGH").is_some() { 1 << 30 } else { 256 << 20 }
}

#[test]
fn reads_huge_file_in_little_memory() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("long");
    // Zero bytes at the start: not text.
    std::fs::write(&path, [CAPTURE, &"x".repeat(8_192)].concat())?;
    std::fs::File::options().write(true).open(&path)?.set_len(long())?;
    let script = format!("ulimit -v {ENOUGH_KIB}; exec \"$0\" irqsoff --json --import \"$1\"");
    let mut limited = std::process::Command::new("sh");
    let output = limited.args(["-c", &script, env!("CARGO_BIN_EXE_whylate")]).arg(&path).output()?;
    ensure!(output.status.success(), "{output:?}");
    let all = snapshots(&text(&output.stdout))?;
    // The hole is a line that ftrace does not write.
    ensure!(all[0].lost["unreadable"] == 1, "{:?}", all[0].lost);
    ensure!(all[0].late.iter().any(|event| event.latency_ns == 10_966_000), "{:?}", all[0].late);
    Ok(())
}
