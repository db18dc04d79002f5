// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locks the memory that a measured thread touches: a page fault makes it late. Nothing else is locked, as the process
//! may have mapped a lot.
#![allow(unsafe_code)]

use std::ops::Range;

/// Locked bytes of the stack, from the frame where a thread starts to measure; it uses a page or two.
const STACK_BYTES: usize = 64 << 10;
/// Locked bytes of code on both sides of a function, with nearby callees.
const CODE_BYTES: usize = 256 << 10;
const PAGE: usize = 4 << 10;

/// Memory that is locked until it is dropped. Without the privilege, or beyond RLIMIT_MEMLOCK, page faults are part of
/// the measured latency.
#[derive(Debug)]
pub(super) struct Locked(Range<usize>);

impl Locked {
    fn new(range: Range<usize>) -> Option<Self> {
        let range = range.start & !(PAGE - 1)..range.end.next_multiple_of(PAGE);
        // SAFETY: the kernel checks the addresses; locking changes no content.
        let locked = unsafe { libc::mlock(range.start as *const libc::c_void, range.len()) } == 0;
        locked.then_some(Locked(range))
    }

    /// Locks the memory of a slice.
    pub(super) fn memory<T>(slice: &[T]) -> Option<Self> {
        let range = slice.as_ptr_range();
        Self::new(range.start.addr()..range.end.addr())
    }

    /// Locks the stack of this thread, from the caller's frame on.
    pub(super) fn stack() -> Option<Self> {
        let here = 0_u8;
        let frame = (&raw const here).addr();
        Self::new(frame.saturating_sub(STACK_BYTES - 2 * PAGE)..frame + PAGE)
    }

    /// Locks the code around a function.
    pub(super) fn code(function: usize) -> Option<Self> {
        let around = |bytes: usize| Self::new(function.saturating_sub(bytes)..function.saturating_add(bytes));
        // The function may be close to the start or end of the code.
        around(CODE_BYTES).or_else(|| around(PAGE))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: as above. Locked data on a shared page is unlocked too, but is dropped at the same time.
        unsafe { libc::munlock(self.0.start as *const libc::c_void, self.0.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked_kb() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("VmLck in status");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn locks_only_the_given_memory() {
        let memory = vec![1_u8; 1 << 20];
        let before = locked_kb();
        let Some(locked) = Locked::memory(&memory) else {
            println!("skipped: this user may not lock memory");
            return;
        };
        assert!((1024..=1024 + 8).contains(&(locked_kb() - before)));
        drop(locked);
        let all = [Locked::stack(), Locked::code(locked_kb as *const () as usize)];
        assert!(all.iter().all(Option::is_some));
        assert!((64..=64 + 2 * 256 + 16).contains(&(locked_kb() - before)), "{} kB", locked_kb() - before);
        drop(all);
        assert_eq!(locked_kb(), before);
    }
}
