// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that sleep by turns in two functions. Their stacks have the same shape: only return addresses differ.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;

use anyhow::{Result, ensure};

/// Of the time that a thread sleeps, it does so in `nap_for_long`.
pub const SHARE_OF_LONG: f64 = 0.75;
/// What threads are called.
pub const NAME: &std::ffi::CStr = c"shaped";

/// Threads whose stacks begin at several places of a page: a few bytes below its end there is only a part of them.
pub fn start() -> Result<usize> {
    let functions = [take_turns::<0>, take_turns::<1024>, take_turns::<2048>, take_turns::<3072>];
    for function in functions {
        // Not of the standard library, whose frames would make the stacks long.
        let mut thread = 0;
        // SAFETY: the function takes no argument and never returns; the thread's number goes to memory that is ours.
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
