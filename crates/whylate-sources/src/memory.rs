// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of a program that ends with a sentence where there is no more: Rust's own way to end is a crash.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

const SAID: &[u8] = b"whylate: out of memory: allow more (ulimit -v, or memory.max of its cgroup)\n";
/// That of a failure.
const STATUS: libc::c_int = 1;

/// The system's memory.
#[derive(Debug)]
pub struct Memory;

// SAFETY: all that is given out is the system's, and what is asked for is handed on unchanged.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to what the system asks for too.
        got(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        got(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        got(unsafe { System.realloc(memory, layout, size) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn got(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        end();
    }
    memory
}

/// What it has changed in the kernel the next whylate puts back, as after `kill -9`.
#[cold]
fn end() -> ! {
    // SAFETY: the bytes are there as long as the program; nothing is run or freed on the way out.
    unsafe {
        libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len());
        libc::_exit(STATUS)
    }
}
