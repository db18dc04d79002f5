// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocator that ends the program with a message if memory runs out: Rust's default is an abort.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

const MESSAGE: &[u8] = b"whylate: out of memory: allow more (ulimit -v, or memory.max of its cgroup)\n";
/// Exit status of a failure.
const STATUS: libc::c_int = 1;

/// The system allocator.
#[derive(Debug)]
pub struct Memory;

// SAFETY: all memory is the system's, and requests are passed on unchanged.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is that of `System`.
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

/// Size from which each allocation has its own mapping, and free memory at the end of the heap that the C library keeps, in
/// bytes.
const MAPPED_FROM: libc::c_int = 1 << 20;
const KEPT_AT_END: libc::c_int = 2 << 20;

/// Keeps the C library from raising its thresholds: after one large buffer, such as a library's unwind table, it would keep
/// tens of megabytes for the next one.
pub fn limit_kept() {
    // SAFETY: the function changes only when the allocator returns memory.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_AT_END);
    }
}

/// Returns freed memory to the system. Bursts of late events leave a heap of many times what is in use, which the C
/// library would keep.
pub fn release_freed() {
    // SAFETY: the function takes the allocator's own locks, and moves nothing that is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

fn got(memory: *mut u8) -> *mut u8 {
    if memory.is_null() {
        end();
    }
    memory
}

/// Ends the program. The next whylate restores kernel settings, as after `kill -9`.
#[cold]
fn end() -> ! {
    // SAFETY: the bytes are static; nothing is run or freed on the way out.
    unsafe {
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(STATUS)
    }
}
