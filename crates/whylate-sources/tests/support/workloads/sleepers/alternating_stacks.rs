// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that sleep alternately in two functions. Their stacks differ only in return addresses.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;

use anyhow::{Result, ensure};

/// Share of a thread's sleep that is in `nap_for_long`.
pub const SHARE_OF_LONG: f64 = 0.75;
/// Name of the threads.
pub const NAME: &std::ffi::CStr = c"shaped";

/// Starts threads with stack pointers at several offsets in a page: below the end of a page a copied stack is
/// truncated.
pub fn start() -> Result<usize> {
    let functions = [take_turns::<0>, take_turns::<1024>, take_turns::<2048>, take_turns::<3072>];
    for function in functions {
        // Not by the standard library, which adds frames.
        let mut thread = 0;
        // SAFETY: the function takes no argument and never returns; the handle is written to a live variable.
        let status = unsafe { libc::pthread_create(&raw mut thread, ptr::null(), function, ptr::null_mut()) };
        ensure!(status == 0, "no thread");
        // SAFETY: the thread never ends, and the name ends in a zero.
        ensure!(unsafe { libc::pthread_setname_np(thread, NAME.as_ptr()) } == 0, "no name");
    }
    Ok(functions.len())
}

extern "C" fn take_turns<const BYTES: usize>(_nothing: *mut c_void) -> *mut c_void {
    let mut room = [0_u8; BYTES];
    loop {
        black_box(&mut room);
        nap_for_long();
        nap_shortly();
    }
}

#[inline(never)]
fn nap_for_long() {
    nap(15_000_000);
    black_box(1);
}

#[inline(never)]
fn nap_shortly() {
    nap(5_000_000);
    black_box(2);
}

#[inline(never)]
fn nap(ns: libc::c_long) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: ns };
    // SAFETY: the time outlives the call, and nothing is written.
    unsafe { libc::nanosleep(&raw const time, ptr::null_mut()) };
}
