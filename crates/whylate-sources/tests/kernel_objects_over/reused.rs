// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that keep reusing the numbers of descriptors.

use std::ffi::CString;
use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::thread::set_name;
use whylate_model::object::ObjectKind;
use whylate_model::path::budget::Budget;

use super::named;

const THREADS: u64 = 24;

/// Names the thread after the kind and inode of the descriptor that it waits for next.
fn named_after(kind: char, descriptor: impl AsFd) -> Result<()> {
    let inode = fstat(descriptor)?.st_ino;
    set_name(&CString::new(format!("{kind}{inode}"))?)?;
    // The timeline has the name that the thread had when it was switched in.
    thread::sleep(Duration::from_millis(1));
    Ok(())
}

/// Waits for new pipes and sockets in turn, for varying times.
fn wait_by_turns(number: u64, until: Instant) -> Result<u64> {
    let mut turn = 0;
    while Instant::now() < until {
        turn += 1;
        let wait = Duration::from_millis(60 + (turn * 37 + number * 13) % 180);
        if (turn + number).is_multiple_of(2) {
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
    Ok(turn)
}

pub fn wait(seconds: u64) -> Result<Vec<String>> {
    let until = Instant::now() + Duration::from_secs(seconds);
    let (sender, receiver) = mpsc::channel();
    for number in 0..THREADS {
        let sender = sender.clone();
        thread::spawn(move || {
            let _ = sender.send(wait_by_turns(number, until));
            drop(sender);
            // The threads stay until they have been listed.
            thread::sleep(Duration::from_secs(1_000));
        });
    }
    drop(sender);
    let turns: Vec<u64> = receiver.into_iter().collect::<Result<_>>()?;
    Ok(vec![format!("{} waits", turns.iter().sum::<u64>())])
}

/// Compares the object of each wait with the one that its thread was named after. Returns the number of objects.
pub fn check(budget: &Budget) -> Result<u64> {
    let mut seen = 0;
    for segment in named(budget) {
        let (Some(waiter), Some(object)) = (&segment.waiter, &segment.object) else { continue };
        let name = waiter.comm().unwrap_or_default();
        let Some((kind, inode)) = name.split_at_checked(1).and_then(|(kind, inode)| Some((kind, inode.parse().ok()?)))
        else {
            continue;
        };
        let is_kind = match kind {
            "p" => object.kind == ObjectKind::Pipe,
            // If a socket is closed before its kind is read, only `socket` is known.
            _ => matches!(object.kind, ObjectKind::UnixSocket | ObjectKind::Socket),
        };
        ensure!(is_kind && object.inode == Some(inode), "{name} has {object:?}");
        seen += 1;
    }
    println!("{seen} objects, all right");
    Ok(seen)
}
