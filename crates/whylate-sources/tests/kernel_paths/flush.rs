// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client that flushes a work item of each CPU, one of which is busy with a thread that lets no worker run.
#![allow(unsafe_code)]

use std::io;
use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Result, ensure};
use whylate_sources::clock::monotonic_ns;

use crate::kernel::late::stay_on;
use crate::kernel::urgent::be_urgent_on;
use crate::peers::{BURNT_NS, PAUSE, cpus, rounds, skip, tell, tid};

const PRIORITY: i32 = 10;
const PAGE: usize = 4096;
/// include/uapi/linux/mempolicy.h
const MPOL_MF_MOVE: i32 = 2;

/// Moves a page to where it is. Before that, the kernel has each CPU that keeps lists of new pages empty them, by a work
/// item that it flushes (`lru_cache_disable`, mm/swap.c).
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

/// A new page, which the CPU has on such a list then.
struct NewPage(*mut libc::c_void);

impl NewPage {
    fn get() -> Result<Self> {
        let (access, map) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at an address that the kernel chooses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, map, -1, 0) };
        ensure!(page != libc::MAP_FAILED, "{}", io::Error::last_os_error());
        // SAFETY: it is mapped, and nobody else's.
        unsafe { page.cast::<u8>().write_volatile(1) };
        Ok(NewPage(page))
    }
}

impl Drop for NewPage {
    fn drop(&mut self) {
        // SAFETY: it is mapped, and nobody else has its address.
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
    let (begun, has_begun) = channel::<()>();
    thread::scope(|scope| {
        let bully = move || -> Result<()> {
            be_urgent_on(there, PRIORITY)?;
            for () in begins {
                let _page = NewPage::get()?;
                let until_ns = monotonic_ns() + BURNT_NS;
                begun.send(())?;
                while monotonic_ns() < until_ns {
                    std::hint::spin_loop();
                }
                report.send((tid(), monotonic_ns()))?;
            }
            Ok(())
        };
        let client = move || -> Result<()> {
            stay_on(here)?;
            for _ in 0..rounds() {
                begin.send(())?;
                has_begun.recv()?;
                let began_ns = monotonic_ns();
                flush()?;
                let ended_ns = monotonic_ns();
                let (bully, until_ns) = reported.recv()?;
                // 0 where the client came too late.
                tell("flush", tid(), began_ns, ended_ns, &[bully.into(), until_ns.saturating_sub(began_ns)]);
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
