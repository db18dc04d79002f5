// SPDX-License-Identifier: MIT OR Apache-2.0
//! BPF arrays mapped into this process: reading takes no system call, and taking counters out loses no event.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::kernel::attach::{PlainData, read_plain};

/// Maximum size of an element that is copied.
const MAX_COPIED_BYTES: usize = 320;

/// A `BPF_MAP_TYPE_ARRAY` with `BPF_F_MMAPABLE`. The kernel changes it concurrently: every access is atomic.
#[derive(Debug)]
pub struct MappedArray {
    memory: NonNull<u8>,
    bytes: usize,
    /// Offset of the first element, in bytes.
    start: usize,
    /// Distance of two elements: the kernel rounds the element size up to 8 bytes.
    stride: usize,
    entries: usize,
}

// SAFETY: the mapping is shared memory that no thread owns, and all access to it is atomic.
unsafe impl Send for MappedArray {}
// SAFETY: as above.
unsafe impl Sync for MappedArray {}

impl MappedArray {
    /// Maps `entries` elements of `element_bytes` each.
    ///
    /// # Errors
    /// Fails if the kernel refuses, e.g. because the map is smaller or not mmapable.
    pub fn new(map: impl AsFd, entries: usize, element_bytes: usize) -> io::Result<Self> {
        Self::inside(map, 0, entries, element_bytes)
    }

    /// Maps an array that is a variable of a BPF program, `start` bytes into the map of its variables.
    ///
    /// # Errors
    /// As [`MappedArray::new`].
    pub fn inside(map: impl AsFd, start: usize, entries: usize, element_bytes: usize) -> io::Result<Self> {
        let stride = element_bytes.next_multiple_of(8);
        let end = entries.checked_mul(stride).and_then(|bytes| bytes.checked_add(start));
        let bytes = end.ok_or(io::ErrorKind::OutOfMemory)?.next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping at an address that the kernel chooses; it replaces nothing.
        let memory =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, map, 0)? };
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(MappedArray { memory, bytes, start, stride, entries })
    }

    /// Returns the number of elements.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Returns the 64-bit counter at `offset` bytes into element `index`.
    ///
    /// # Panics
    /// Panics if the counter is outside of the element or not aligned.
    pub fn u64_at(&self, index: usize, offset: usize) -> &AtomicU64 {
        let at = self.position::<AtomicU64>(index, offset);
        // SAFETY: within the mapping and aligned, as `position` checks; all access is atomic.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Returns the 32-bit number at `offset` bytes into element `index`.
    ///
    /// # Panics
    /// Panics if the number is outside of the element or not aligned.
    pub fn u32_at(&self, index: usize, offset: usize) -> &AtomicU32 {
        let at = self.position::<AtomicU32>(index, offset);
        // SAFETY: within the mapping and aligned, as `position` checks; all access is atomic.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Returns the 16-bit number at `offset` bytes into element `index`.
    ///
    /// # Panics
    /// Panics if the number is outside of the element or not aligned.
    pub fn u16_at(&self, index: usize, offset: usize) -> &AtomicU16 {
        let at = self.position::<AtomicU16>(index, offset);
        // SAFETY: within the mapping and aligned, as `position` checks; all access is atomic.
        unsafe { AtomicU16::from_ptr(at.cast()) }
    }

    /// Returns the byte at `offset` bytes into element `index`.
    ///
    /// # Panics
    /// Panics if the byte is outside of the element.
    pub fn u8_at(&self, index: usize, offset: usize) -> &AtomicU8 {
        let at = self.position::<AtomicU8>(index, offset);
        // SAFETY: within the mapping, as `position` checks; all access is atomic.
        unsafe { AtomicU8::from_ptr(at) }
    }

    /// Copies an element, which may be torn.
    ///
    /// # Panics
    /// Panics if there is no such element.
    pub fn copy<T: PlainData>(&self, index: usize) -> Option<T> {
        const { assert!(size_of::<T>() <= MAX_COPIED_BYTES, "it is too large to be copied") };
        let mut bytes = [0; MAX_COPIED_BYTES];
        let words = bytes.chunks_exact_mut(8).take(size_of::<T>() / 8).enumerate();
        for (index_of_word, word) in words {
            word.copy_from_slice(&self.u64_at(index, index_of_word * 8).load(Ordering::Relaxed).to_ne_bytes());
        }
        read_plain(&bytes)
    }

    fn position<T>(&self, index: usize, offset: usize) -> *mut u8 {
        assert!(index < self.entries && offset + size_of::<T>() <= self.stride, "outside the BPF array");
        assert!(offset.is_multiple_of(align_of::<T>()), "not aligned in the BPF array");
        // SAFETY: the assertions keep the address within the mapping; its base is aligned to a page.
        unsafe { self.memory.as_ptr().add(self.start + index * self.stride + offset) }
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references into it cannot outlive `self`.
        let _ = unsafe { munmap(self.memory.as_ptr().cast::<c_void>(), self.bytes) };
    }
}
