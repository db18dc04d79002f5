// SPDX-License-Identifier: MIT OR Apache-2.0
//! Series of short-lived processes and threads, and of reused PIDs. Runs as root.

mod support;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use support::file_on_disk;
use support::machine::lock::lock_machine;
use support::machine::real_time::patching;
use support::oracles::chance::in_rounds;
use whylate_model::Snapshot;
use whylate_sources::block::{BlockOptions, By, disk_of};
use whylate_sources::{Measuring, Session, Source as _};

const BLOCK: usize = 4096;
const BLOCKS: usize = 256;

/// A buffer that is aligned for direct I/O.
#[repr(align(4096))]
struct Buffer([u8; BLOCK]);

/// Creates a file on the disk that bypasses the page cache. Returns `None`, and prints why, if there can be none.
fn direct_file() -> Result<Option<File>> {
    let Some(file) = file_on_disk()? else { return Ok(None) };
    (0..BLOCKS).try_for_each(|number| file.write_all_at(&[7; BLOCK], (number * BLOCK) as u64))?;
    file.sync_all()?;
    if fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::DIRECT).is_err() {
        println!("skipped: the file system of the build folder has no direct I/O");
        return Ok(None);
    }
    Ok(Some(file))
}

fn start(file: &File, by: By, most_series: u32) -> Result<Measuring> {
    let options = BlockOptions {
        device: Some(disk_of(file)?),
        by,
        phases: true,
        most_series: Some(most_series),
        ..BlockOptions::default()
    };
    Ok(patching(|| options.attach(&Session::of_one()))?)
}

/// Counts the reads of threads or processes with this name.
fn reads(snapshot: &Snapshot, label: &str, name: &str) -> u64 {
    let is_its = |labels: &whylate_model::Labels| labels["operation"] == "read" && labels[label] == name;
    let series = snapshot.series.iter().filter(|series| is_its(&series.labels));
    series.map(|series| series.histograms["latency"].count()).sum()
}

/// Returns whether `seen` are all reads that were made, except the unfinished ones. A page fault may read a page of the
/// program under the same name.
fn are_all(made: u64, seen: u64, unseen: u64) -> bool {
    (made..=made + 10).contains(&(seen + unseen.min(made - seen.min(made))))
}

/// Starts a thread that reads blocks, and waits for its end.
fn reader(name: &str, file: &File, count: usize) -> Result<()> {
    let file = file.try_clone()?;
    let read = move || (0..count).try_for_each(|at| file.read_exact_at(&mut Buffer([0; BLOCK]).0, (at * BLOCK) as u64));
    let thread = thread::Builder::new().name(name.to_owned()).spawn(read)?;
    Ok(thread.join().expect("reading does not panic")?)
}

#[test]
fn counts_threads_after_table_was_reused() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(file) = direct_file()? else { return Ok(()) };
    // An end that was not seen is found, and counted, when its request is reused, which may be after the snapshot.
    in_rounds(|| counts_threads(&file))
}

fn counts_threads(file: &File) -> Result<()> {
    let mut source = start(file, By::Thread, 128)?;
    for number in 0..400 {
        reader("early", file, 1)?;
        if number % 8 == 0 {
            source.drain_late(Duration::ZERO, &mut |_| {})?;
        }
    }
    reader("late", file, 50)?;
    let snapshot = source.snapshot()?;
    let (early, late) = (reads(&snapshot, "thread", "early"), reads(&snapshot, "thread", "late"));
    println!("{early} of 400 and {late} of 50 reads, lost {:?}", snapshot.lost);
    let unseen = snapshot.lost["reused"];
    ensure!(are_all(400, early, unseen) && are_all(50, late, unseen) && snapshot.lost["series_full"] == 0);
    // Without a drain to free entries, requests without a free entry are lost, and counted as lost.
    (0..200).try_for_each(|_| reader("many", file, 1))?;
    let snapshot = source.snapshot()?;
    let many = reads(&snapshot, "thread", "many");
    println!("{many} of 200 reads, lost {:?}", snapshot.lost);
    ensure!(many < 200 && many + snapshot.lost["series_full"] + snapshot.lost["reused"] >= 200);
    // Bytes are counted together with their requests.
    let is_read = |labels: &whylate_model::Labels| labels["thread"] == "many";
    let bytes: f64 =
        snapshot.series.iter().filter(|series| is_read(&series.labels)).map(|series| series.values["bytes"]).sum();
    ensure!(bytes >= (many * BLOCK as u64) as f64, "{bytes} bytes of {many} reads");
    patching(|| drop(source));
    Ok(())
}

/// Runs a process, with the given PID if any, that reads blocks under each name in turn. Returns `None` if the PID is
/// taken, or if the kernel does not let a process choose it.
#[allow(unsafe_code)]
fn process(
    number: Option<libc::pid_t>,
    file: &File,
    lives: &[(&std::ffi::CStr, usize)],
) -> Result<Option<libc::pid_t>> {
    let fd = file.as_raw_fd();
    let mut buffer = Buffer([0; BLOCK]);
    let mut arguments = libc::clone_args {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: number.as_ref().map_or(0, |number| std::ptr::from_ref(number) as u64),
        set_tid_size: u64::from(number.is_some()),
        // SAFETY: integers only.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: as fork(): the child has a copy of this memory, calls no function that takes a lock, and ends.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    if child == 0 {
        for (name, reads) in lives {
            // SAFETY: the name ends with a zero.
            unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
            for at in 0..*reads {
                // SAFETY: there is room for a block.
                let read = unsafe { libc::pread(fd, buffer.0.as_mut_ptr().cast(), BLOCK, (at * BLOCK) as libc::off_t) };
                if read != BLOCK as isize {
                    // SAFETY: it only ends the process.
                    unsafe { libc::_exit(1) };
                }
            }
        }
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    if child < 0 {
        let error = std::io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EEXIST | libc::EPERM | libc::ENOSYS) if number.is_some() => Ok(None),
            _ => Err(error).context("cannot make a process"),
        };
    }
    let child = child as libc::pid_t;
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(waited == child && status == 0, "the process ended with {status}");
    Ok(Some(child))
}

#[test]
fn reused_pid_and_renamed_process_get_own_series() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(file) = direct_file()? else { return Ok(()) };
    let mut source = start(&file, By::Process, 2048)?;
    let number = process(None, &file, &[(c"first", 20)])?.context("it has any number")?;
    if process(Some(number), &file, &[(c"second", 30), (c"renamed", 7)])?.is_none() {
        println!("skipped: no process can have the number of another one here");
        return Ok(());
    }
    let snapshot = source.snapshot()?;
    patching(|| drop(source));
    let seen = ["first", "second", "renamed"].map(|name| reads(&snapshot, "process", name));
    let is_its = |series: &&whylate_model::Series| series.labels["pid"] == number.to_string();
    let all: Vec<_> = snapshot.series.iter().filter(is_its).map(|series| &series.labels).collect();
    println!("reads {seen:?} of {number}: {all:?}, lost {:?}", snapshot.lost);
    let unseen = snapshot.lost["reused"];
    let are_whole = [20, 30, 7].into_iter().zip(seen).all(|(made, seen)| are_all(made, seen, unseen));
    ensure!(are_whole && all.len() == 3, "{seen:?}");
    Ok(())
}
