// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that reuse the numbers of descriptors all the time: no wait may have the name of another object.

use std::ffi::CString;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::thread::set_name;
use whylate_model::object::{Object, ObjectKind};

use super::{Observer, share_machine};

const THREADS: u64 = 24;
/// Number of objects that have to be seen, and the longest time for that.
const OBJECTS: u64 = 200;
const OBJECTS_THOROUGH: u64 = 10_000;
const MAX_TIME: Duration = Duration::from_secs(120);

/// Names the thread after the kind and inode of the descriptor that it waits for.
fn named_after(kind: char, descriptor: impl AsFd) -> Result<()> {
    let inode = fstat(descriptor)?.st_ino;
    set_name(&CString::new(format!("{kind}{inode}"))?)?;
    Ok(())
}

/// Waits for new pipes and sockets by turns, for `wait` each.
fn wait_by_turns(number: u64, is_over: &AtomicBool, waits: &AtomicU64) -> Result<()> {
    let mut turn = number;
    while !is_over.load(Ordering::Relaxed) {
        turn += 1;
        let wait = Duration::from_millis(5 + (turn * 7 + number * 13) % 60);
        waits.fetch_add(1, Ordering::Relaxed);
        if turn.is_multiple_of(2) {
            let (reader, _writer) = std::io::pipe()?;
            let reader = OwnedFd::from(reader);
            named_after('p', &reader)?;
            poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&Timespec::try_from(wait)?))?;
        } else {
            let (mut client, _server) = UnixStream::pair()?;
            client.set_read_timeout(Some(wait))?;
            named_after('s', &client)?;
            let _ = client.read(&mut [0; 8]);
        }
    }
    Ok(())
}

/// Returns whether an object is the one that its thread is named after.
fn is_of(name: &str, object: &Object) -> bool {
    let (kind, inode) = name.split_at(1);
    let kind = if kind == "p" { ObjectKind::Pipe } else { ObjectKind::UnixSocket };
    // A socket that is closed before its kind is asked for is only a socket.
    let is_kind = object.kind == kind || kind == ObjectKind::UnixSocket && object.kind == ObjectKind::Socket;
    is_kind && object.inode == inode.parse().ok()
}

#[test]
fn reused_descriptors_have_no_wrong_names() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let wanted = if std::env::var_os("WHYLATE_THOROUGH").is_some() { OBJECTS_THOROUGH } else { OBJECTS };
    let (is_over, waits) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let (is_over, waits) = (&is_over, &waits);
        let workers: Vec<_> =
            (0..THREADS).map(|number| scope.spawn(move || wait_by_turns(number, is_over, waits))).collect();
        let outcome = watch(wanted);
        is_over.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no panic")?;
        }
        println!("{} waits", waits.load(Ordering::Relaxed));
        outcome
    })
}

/// Compares objects until there were enough.
fn watch(wanted: u64) -> Result<()> {
    let mut observer = Observer::start()?;
    let (mut seen, began) = (0, Instant::now());
    let max_time = MAX_TIME * if wanted > OBJECTS { 10 } else { 1 };
    while seen < wanted {
        ensure!(began.elapsed() < max_time, "only {seen} objects in {max_time:?}");
        for stack in observer.snapshot()?.stacks {
            let name = &stack.labels["thread"];
            let is_worker = name.len() > 1 && name[1..].bytes().all(|byte| byte.is_ascii_digit());
            let Some(object) = stack.object.filter(|_| is_worker) else { continue };
            ensure!(is_of(name, &object), "{name} has {object:?}");
            seen += 1;
        }
    }
    println!("{seen} objects, all right");
    Ok(())
}
