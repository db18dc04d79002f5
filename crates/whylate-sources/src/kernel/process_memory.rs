// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of other processes, without requests to file systems.
//!
//! `/proc/PID/mem` is read rather than process_vm_readv(2): it does not wait for a user-space page fault handler
//! (userfaultfd(2)). It would still read a missing page of a mapped file, and the file system, such as a user's FUSE, may
//! not answer. So `/proc/PID/pagemap` is asked first. A page that is evicted between both is the only gap.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Flags of `/proc/PID/pagemap` (admin-guide/mm/pagemap.rst): the page is present, or was swapped out.
const PRESENT_OR_SWAPPED: u64 = 3 << 62;

/// The memory of a process or thread.
pub(crate) struct ProcessMemory {
    memory: File,
    /// Some kernels have none.
    pagemap: Option<File>,
}

impl ProcessMemory {
    /// Opens the memory; `None` if the process has ended or may not be read.
    pub(crate) fn open(pid: u32) -> Option<Self> {
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        let pagemap = match File::open(format!("/proc/{pid}/pagemap")) {
            Ok(pagemap) => Some(pagemap),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(_) => return None,
        };
        Some(ProcessMemory { memory, pagemap })
    }

    /// Fills `bytes` from an address. `None` if a page is neither present nor swapped, or cannot be read.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], address: u64) -> Option<()> {
        let page_bytes = rustix::param::page_size() as u64;
        let (mut rest, mut at) = (bytes, address);
        while !rest.is_empty() {
            let length = rest.len().min((page_bytes - at % page_bytes) as usize);
            let (part, behind) = rest.split_at_mut(length);
            if !self.has_page(at / page_bytes)? {
                return None;
            }
            self.memory.read_exact_at(part, at).ok()?;
            (rest, at) = (behind, at.checked_add(length as u64)?);
        }
        Some(())
    }

    fn has_page(&self, number: u64) -> Option<bool> {
        let Some(pagemap) = &self.pagemap else { return Some(true) };
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, number * 8).ok()?;
        Some(u64::from_ne_bytes(entry) & PRESENT_OR_SWAPPED != 0)
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;

    #[test]
    fn reads_across_pages() {
        let page_bytes = rustix::param::page_size();
        let written: Vec<u8> = (0..3 * page_bytes).map(|at| (at % 251) as u8).collect();
        let mut read = vec![0; written.len()];
        let own = ProcessMemory::open(std::process::id()).expect("own memory");
        own.read_exact_at(&mut read, written.as_ptr() as u64).expect("read");
        assert!(read == written);
        assert_eq!(own.read_exact_at(&mut [0; 8], 8), None, "nothing is mapped there");
    }

    #[test]
    #[allow(unsafe_code)]
    fn missing_page_is_not_read_from_its_file() {
        let (file, bytes) = (tempfile::tempfile().expect("a file"), rustix::param::page_size());
        file.set_len(bytes as u64).expect("it is extended");
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let at = at.expect("it is mapped").cast::<u8>();
        let own = ProcessMemory::open(std::process::id()).expect("own memory");
        let read = || own.read_exact_at(&mut [0; 8], at as u64 + 8);
        let before = read();
        // SAFETY: the byte is mapped, and the file has it.
        unsafe { at.read_volatile() };
        let after = read();
        // SAFETY: the mapping from above; nothing refers to it.
        unsafe { munmap(at.cast(), bytes) }.expect("it is unmapped");
        assert_eq!((before, after), (None, Some(())));
    }
}
