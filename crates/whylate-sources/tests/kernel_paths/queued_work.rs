// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client that waits for a work item that a server queues while the worker is busy with another item.
#![allow(unsafe_code)]

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rustix::fs::{MemfdFlags, memfd_create};
use whylate_sources::inject::work::{self, Plan};
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{BURNT_NS, PAUSE, burn, cpu_ns, cpus, report_round, rounds, skip, tid, until_asleep};
use crate::support::machine::cpus::pin_to;
use crate::support::machine::real_time::become_fifo_on;

const PRIORITY: i32 = 10;
/// Length of each other item; after 10 ms the kernel would start another worker (kernel/workqueue.c).
const BUSY_NS: u64 = 8_000_000;
const AT_ONCE: u64 = 4;
/// include/uapi/linux/aio_abi.h
const IOCB_CMD_FSYNC: u64 = 2;

/// An AIO context, which makes the kernel sync files by work items on the submitting CPU.
struct Aio {
    context: c_long,
    file: OwnedFd,
}

fn checked(outcome: c_long) -> io::Result<()> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Aio {
    fn new() -> Result<Self> {
        let file = memfd_create("synced", MemfdFlags::CLOEXEC)?;
        let mut context: c_long = 0;
        // SAFETY: the kernel writes one number.
        checked(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) })?;
        Ok(Aio { context, file })
    }

    /// Queues a work item that syncs a file without a device, which takes no time.
    fn sync(&self) -> io::Result<()> {
        let descriptor = self.file.as_raw_fd() as u64;
        let request: [u64; 8] = [0, 0, IOCB_CMD_FSYNC | descriptor << 32, 0, 0, 0, 0, 0];
        let requests = [request.as_ptr()];
        // SAFETY: an array of one pointer to a `struct iocb` of 64 bytes, which the kernel copies.
        checked(unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1_usize, requests.as_ptr()) })
    }

    fn wait(&self) -> io::Result<()> {
        let mut event = [0_u64; 4];
        // Nothing comes if the server fails.
        let most = libc::timespec { tv_sec: 5, tv_nsec: 0 };
        let most = &raw const most;
        // SAFETY: room for one `struct io_event` of 32 bytes, and a time that the call only reads.
        let events =
            unsafe { libc::syscall(libc::SYS_io_getevents, self.context, 1_usize, 1_usize, event.as_mut_ptr(), most) };
        checked(events)
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: no thread waits for its events any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

pub fn play() -> Result<()> {
    let (here, there) = cpus()?;
    let aio = Aio::new()?;
    let one = Plan { items: 1, at_once: 1, delay: Duration::ZERO, busy_ns: 1_000, cpu: Some(there), load: false };
    if let Err(error) = work::run(&one, &AtomicBool::new(false)) {
        skip(&format!("no items are queued here: {:#}", anyhow::Error::from(error)));
        return Ok(());
    }
    // One after another, until all rounds are played.
    let (many, over) = (Plan { items: 5_000, at_once: AT_ONCE, busy_ns: BUSY_NS, ..one }, AtomicBool::new(false));
    let (ask, asked) = channel::<u32>();
    let (report, reported) = channel::<(u32, u64, u64)>();
    thread::scope(|scope| {
        let (aio, over) = (&aio, &over);
        let others = scope.spawn(move || work::run(&many, over));
        let server = move || -> Result<()> {
            for client in asked {
                become_fifo_on(here, PRIORITY)?;
                let before_ns = cpu_ns();
                until_asleep(std::process::id(), client);
                burn(BURNT_NS);
                pin_to(there)?;
                aio.sync()?;
                report.send((tid(), BURNT_NS, cpu_ns() - before_ns))?;
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            pin_to(here)?;
            for _ in 0..rounds() {
                ask.send(tid())?;
                let began_ns = monotonic_ns();
                aio.wait()?;
                let ended_ns = monotonic_ns();
                let (server, burnt_ns, all_ns) = reported.recv()?;
                report_round("queued", tid(), began_ns, ended_ns, &[server.into(), burnt_ns, all_ns]);
                thread::sleep(PAUSE);
            }
            Ok(())
        };
        let server = thread::Builder::new().name("server".to_owned()).spawn_scoped(scope, server)?;
        let client = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, client)?;
        let waited = client.join().expect("waiting does not panic");
        let served = server.join().expect("serving does not panic");
        over.store(true, Ordering::Relaxed);
        others.join().expect("queueing does not panic")?;
        waited.and(served)
    })
}
