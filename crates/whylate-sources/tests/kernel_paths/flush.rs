// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client that flushes a work item of each CPU, while a thread on one of them lets no worker run.
#![allow(unsafe_code)]

use std::io;
use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Result, ensure};
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{BURNT_NS, PAUSE, cpus, report_round, rounds, skip, tid};
use crate::support::machine::cpus::pin_to;
use crate::support::machine::real_time::become_fifo_on;

const PRIORITY: i32 = 10;
const PAGE: usize = 4096;
/// include/uapi/linux/mempolicy.h
const MPOL_MF_MOVE: i32 = 2;

/// Migrates a page to its own node. Before that, the kernel empties the per-CPU LRU batches by a work item on each CPU
/// that has one, and flushes it (`lru_cache_disable`, mm/swap.c).
fn flush() -> io::Result<()> {
    let page = Box::new([1_u8; PAGE]);
    let pages = [std::ptr::from_ref(page.as_ref()).cast::<libc::c_void>()];
    let (nodes, mut status) = ([0_i32], [0_i32]);
    // SAFETY: three arrays of one entry each; the page stays the caller's, wherever it is.
    let outcome = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, 1_u64, pages.as_ptr(), nodes.as_ptr(), status.as_mut_ptr(), MPOL_MF_MOVE)
    };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A new page, which puts an entry into the CPU's LRU batch.
struct NewPage(*mut libc::c_void);

impl NewPage {
    fn get() -> Result<Self> {
        let (access, map) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at an address that the kernel chooses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, map, -1, 0) };
        ensure!(page != libc::MAP_FAILED, "{}", io::Error::last_os_error());
        // SAFETY: the page is mapped, and owned here.
        unsafe { page.cast::<u8>().write_volatile(1) };
        Ok(NewPage(page))
    }
}

impl Drop for NewPage {
    fn drop(&mut self) {
        // SAFETY: the page is mapped, and nothing else has its address.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}

pub fn play() -> Result<()> {
    if let Err(error) = flush() {
        skip(&format!("no pages are moved here: {error}"));
        return Ok(());
    }
    let (here, there) = cpus()?;
    let (begin, begins) = channel::<()>();
    let (report, reported) = channel::<(u32, u64)>();
    let (started, has_started) = channel::<()>();
    thread::scope(|scope| {
        let bully = move || -> Result<()> {
            become_fifo_on(there, PRIORITY)?;
            for () in begins {
                let _page = NewPage::get()?;
                let until_ns = monotonic_ns() + BURNT_NS;
                started.send(())?;
                while monotonic_ns() < until_ns {
                    std::hint::spin_loop();
                }
                report.send((tid(), monotonic_ns()))?;
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            pin_to(here)?;
            for _ in 0..rounds() {
                begin.send(())?;
                has_started.recv()?;
                let began_ns = monotonic_ns();
                flush()?;
                let ended_ns = monotonic_ns();
                let (bully, until_ns) = reported.recv()?;
                // 0 if the client came too late.
                report_round("flush", tid(), began_ns, ended_ns, &[bully.into(), until_ns.saturating_sub(began_ns)]);
                thread::sleep(PAUSE);
            }
            Ok(())
        };
        let bully = thread::Builder::new().name("bully".to_owned()).spawn_scoped(scope, bully)?;
        let client = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, client)?;
        client.join().expect("flushing does not panic")?;
        bully.join().expect("spinning does not panic")
    })
}
