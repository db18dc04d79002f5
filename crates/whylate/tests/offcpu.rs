// SPDX-License-Identifier: MIT OR Apache-2.0
//! End-to-end tests of `whylate offcpu`.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod running;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lock::{lock_machine, share_machine};
use running::{Running, whylate};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use serde_json::Value;
use whylate_model::{Snapshot, WaitClass};

fn output_of(arguments: &[&str]) -> Result<Output> {
    Ok(whylate(arguments).output()?)
}

fn printed(arguments: &[&str]) -> Result<String> {
    let output = output_of(arguments)?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{arguments:?}: {stderr}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn output_files_are_private_to_their_owner() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    for (name, begins) in [
        ("x.svg", &b"<?xml"[..]),
        ("x.folded", b""),
        ("x.pb.gz", &[0x1f, 0x8b]),
        ("x.json", b"{\"schema\":1"),
        ("x.speedscope.json", b"{"),
    ] {
        let path = directory.path().join(name);
        printed(&["offcpu", "-d", "300ms", "-o", path.to_str().context("a name in UTF-8")?])?;
        let bytes = fs::read(&path)?;
        ensure!(bytes.starts_with(begins) && !bytes.is_empty(), "{name} has something else");
        ensure!(fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600, "others may read {name}");
        if name.ends_with("json") {
            serde_json::from_slice::<Value>(&bytes)?;
        }
    }
    Ok(())
}

#[test]
fn folded_stacks_end_with_wakers() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    // A process woken by timers again and again, which exits with the test.
    let mut sleeper = std::process::Command::new("sh").args(["-c", "while :; do sleep 0.02; done"]).spawn()?;
    let outcome = with_wakers(&path);
    let _ = sleeper.kill();
    let _ = sleeper.wait();
    outcome
}

fn with_wakers(path: &dyn Fn(&str) -> String) -> Result<()> {
    for (backend, says) in [(None, true), (Some("auto"), true), (Some("trace"), false)] {
        let file = path("woken.folded");
        let mut arguments = vec!["offcpu", "--wakers", "-d", "500ms", "-o", &file];
        arguments.extend(backend.into_iter().flat_map(|name| ["--backend", name]));
        let output = output_of(&arguments)?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{arguments:?}: {stderr}");
        ensure!(stderr.contains("offcpu uses the trace backend, because only") == says, "{arguments:?}: {stderr}");
        let folded = fs::read_to_string(&file)?;
        let has = |end: &str| folded.lines().any(|line| line.contains(";--;") && line.contains(end));
        ensure!(has(";--;[interrupt] ") && has(";--;[not woken yet] "), "some ends are missing");
        // The shell waits for each `sleep`, whose exit wakes it.
        ensure!(has(";--;try_to_wake_up") && has(";sleep "), "no waker is a thread");
    }
    let file = path("woken.json");
    printed(&["offcpu", "--wakers", "-d", "500ms", "-o", &file])?;
    let snapshot: Snapshot = serde_json::from_slice(&fs::read(&file)?)?;
    ensure!(snapshot.backend == "trace" && snapshot.lost.contains_key("unseen_wakers"), "{:?}", snapshot.lost);
    for stack in &snapshot.stacks {
        let can_run = stack.state == "R";
        ensure!(stack.waker.is_some() != can_run, "{stack:?}");
    }
    let svg = path("woken.svg");
    printed(&["offcpu", "--wakers", "-d", "500ms", "-o", &svg])?;
    ensure!(fs::read_to_string(&svg)?.contains("[interrupt]"), "the flame graph has no wakers");
    let flat = printed(&["offcpu", "--wakers", "-d", "500ms", "--flat"])?;
    ensure!(flat.lines().next().is_some_and(|line| line.contains("WOKEN BY")), "{flat}");
    Ok(())
}

#[test]
fn one_snapshot_shows_waits_of_this_test() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let pid = std::process::id().to_string();
    let text = printed(&["offcpu", "--json", "-d", "500ms", "-p", &pid])?;
    let snapshot: Snapshot = serde_json::from_str(&text)?;
    ensure!(snapshot.source == "offcpu" && snapshot.backend == "sample", "{} {}", snapshot.source, snapshot.backend);
    // A thread of the test waits for the program's output.
    let reads = snapshot.stacks.iter().any(|stack| stack.labels.get("syscall").is_some_and(|call| call == "poll"));
    ensure!(reads, "{text}");
    ensure!(snapshot.stacks.iter().all(|stack| stack.labels["pid"] == pid), "others are there");
    ensure!(snapshot.stacks.iter().all(|stack| stack.wait.is_some()), "a wait has no class");

    let threads = printed(&["offcpu", "-p", &pid, "--by", "thread", "-d", "300ms"])?;
    ensure!(threads.contains("at 9 Hz"), "{threads}");
    let blocked = printed(&["offcpu", "-p", &pid, "--blocked", "1h"])?;
    ensure!(blocked.starts_with("No thread has waited 3600s or longer: "), "{blocked}");
    let none = printed(&["offcpu", "--comm", "no such name", "--blocked", "1ns"])?;
    ensure!(none == "No thread has waited 1ns or longer: no selected thread was off CPU\n", "{none}");
    let text = printed(&["offcpu", "-p", &pid, "--blocked", "1ns", "--json"])?;
    let blocked: Snapshot = serde_json::from_str(&text)?;
    ensure!(!blocked.stacks.is_empty() && blocked.stacks.iter().all(|stack| stack.age.count() == 1), "{text}");
    let text = printed(&["offcpu", "-p", &pid, "--blocked", "1h", "--json"])?;
    ensure!(serde_json::from_str::<Snapshot>(&text)?.stacks.is_empty(), "{text}");
    ensure!(
        snapshot.stacks.iter().any(|stack| stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::Idle)),
        "{text}"
    );
    Ok(())
}

/// A sleeping process with its own copy of the C library; killed on drop.
struct InLibrary(Child);

impl InLibrary {
    /// Returns `None` if the process does not use the library of this directory.
    fn start(directory: &Path) -> Result<Option<Self>> {
        let mut command = Command::new("/bin/sleep");
        command.arg("1000").env("LD_LIBRARY_PATH", directory).stdin(Stdio::null());
        let mut started = InLibrary(command.spawn()?);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !started.proc("wchan").contains("nanosleep") {
            ensure!(started.0.try_wait()?.is_none(), "sleep does not run with a copy of the C library");
            ensure!(Instant::now() < deadline, "sleep does not sleep");
            sleep(Duration::from_millis(5));
        }
        Ok(started.proc("maps").contains(&*directory.to_string_lossy()).then_some(started))
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.0.id())).unwrap_or_default()
    }
}

impl Drop for InLibrary {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the C library that the process maps.
fn c_library() -> Result<Option<Vec<u8>>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(Path::new);
    let is_it = |path: &&Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name == "libc.so.6" || name.starts_with("libc-2.")
    };
    paths.into_iter().find(is_it).map(fs::read).transpose().map_err(Into::into)
}

/// A tmpfs, unmounted on drop.
struct MemoryDisk(tempfile::TempDir);

impl MemoryDisk {
    /// Returns `None` if mounting is not permitted.
    fn mount() -> Result<Option<Self>> {
        let directory = tempfile::tempdir()?;
        let mounted = rustix::mount::mount("whylate-test", directory.path(), "tmpfs", MountFlags::empty(), None);
        Ok(mounted.is_ok().then_some(MemoryDisk(directory)))
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

/// An open code file would keep a file system mounted, also a container's, and the disk space of a deleted program in
/// use.
#[test]
fn releases_file_system_after_its_programs_exit() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let disk = MemoryDisk::mount()?.context("root may mount a file system")?;
    let program = disk.0.path().join("prog");
    ensure!(Command::new("cp").arg("/bin/sleep").arg(&program).status()?.success(), "cp cannot copy /bin/sleep");
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("x.folded");
    let name = file.to_str().context("a name in UTF-8")?;
    let mut running = Running::start(&["offcpu", "-d", "4s", "-F", "49", "--comm", "prog", "-o", name])?;
    running.wait_until_it_measures()?;
    let mut sleeping = Command::new(&program).arg("1").spawn()?;
    // Through another path it is another mapping of the same file.
    let deleted = disk.0.path().join("deleted");
    fs::hard_link(&program, &deleted)?;
    let mut also_sleeping = Command::new(&deleted).arg("1").spawn()?;
    fs::remove_file(&deleted)?;
    ensure!(sleeping.wait()?.success() && also_sleeping.wait()?.success());
    let ended = Instant::now();
    while unmount(disk.0.path(), UnmountFlags::empty()).is_err() {
        ensure!(running.is_alive()? && ended.elapsed() < Duration::from_secs(2), "the file system is busy");
        sleep(Duration::from_millis(50));
    }
    ensure!(running.is_alive()?, "whylate had ended");
    let (status, stderr) = running.end()?;
    ensure!(status.success(), "{status}: {stderr}");
    let stacks = fs::read_to_string(&file)?;
    ensure!(stacks.contains("nanosleep"), "{stacks}");
    Ok(())
}

/// The owner of a library could crash whylate by truncating it while it is mapped.
#[test]
fn survives_truncated_libraries() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(whole) = c_library()? else {
        println!("skipped: this test has no shared C library (glibc)");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let notes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    let (mut libraries, mut sleeping) = (BTreeMap::new(), Vec::new());
    // The processes have exited, so only whylate could fault on the truncated part.
    for number in 0..8 {
        let place = directory.path().join(number.to_string());
        fs::create_dir(&place)?;
        let path = place.join("libc.so.6");
        fs::write(&path, &whole)?;
        let Some(process) = InLibrary::start(&place)? else {
            println!("skipped: sleep does not use the C library of LD_LIBRARY_PATH");
            return Ok(());
        };
        sleeping.push(process);
        let library = File::options().write(true).open(&path)?;
        // One library is empty from the start; the others are truncated while open, to nothing or to some headers.
        if number == 0 {
            library.set_len(0)?;
        }
        let bytes = if number % 2 == 0 { 0 } else { 100 };
        libraries.insert(inotify::add_watch(&notes, &path, WatchFlags::OPEN)?, (library, bytes));
    }
    let file = directory.path().join("x.json");
    let name = file.to_str().context("a name in UTF-8")?;
    let arguments = ["offcpu", "--backend", "sample", "-d", "1s", "--by", "thread", "-o", name];
    let mut running = Running::start(&arguments)?;
    let mut opened = BTreeSet::new();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&notes, &mut buffer);
    while running.is_alive()? {
        poll(&mut [PollFd::new(&notes, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }))?;
        while let Ok(event) = events.next() {
            let (library, bytes) = &libraries[&event.wd()];
            library.set_len(*bytes)?;
            opened.insert(event.wd());
        }
    }
    let (status, stderr) = running.end()?;
    ensure!(status.code() == Some(0), "{status}: {stderr}");
    let snapshot: Snapshot = serde_json::from_slice(&fs::read(&file)?)?;
    println!("{} of {} were opened, lost {:?}", opened.len(), libraries.len(), snapshot.lost);
    ensure!(snapshot.lost["unread_files"] > 0, "{:?}", snapshot.lost);
    if opened.is_empty() {
        println!("skipped: the file system does not tell when a library is opened, so none was cut short while it was");
    }
    let stack_of = |process: &InLibrary| {
        let pid = process.0.id().to_string();
        let stack = snapshot.stacks.iter().find(|stack| stack.labels.get("pid") == Some(&pid));
        stack.with_context(|| format!("process {pid} is missing"))
    };
    for process in &sleeping {
        println!("{:?}", stack_of(process)?.user);
    }
    // The others may have been read before.
    let of_empty = &stack_of(&sleeping[0])?.user;
    ensure!(of_empty.last().is_some_and(|frame| frame == "[unwound partly]"), "{of_empty:?}");
    Ok(())
}
