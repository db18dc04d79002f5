// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a measured thread touches stays in memory: a page that has to be fetched makes it late. Nothing else is locked:
//! the process may have mapped a lot.
#![allow(unsafe_code)]

use std::ops::Range;

/// Of the stack, from where a thread begins to measure; it uses a page or two.
const STACK_BYTES: usize = 64 << 10;
/// Of code on both sides of a function, with what it calls nearby.
const CODE_BYTES: usize = 256 << 10;
const PAGE: usize = 4 << 10;

/// Memory that stays, until it is dropped. Without the privilege, or beyond RLIMIT_MEMLOCK, a page may have to be
/// fetched, and that is then part of what is measured.
#[derive(Debug)]
pub(super) struct Locked(Range<usize>);

impl Locked {
    fn new(range: Range<usize>) -> Option<Self> {
        let range = range.start & !(PAGE - 1)..range.end.next_multiple_of(PAGE);
        // SAFETY: the kernel checks the addresses; locking changes no content.
        let locked = unsafe { libc::mlock(range.start as *const libc::c_void, range.len()) } == 0;
        locked.then_some(Locked(range))
    }

    /// What a slice has.
    pub(super) fn memory<T>(slice: &[T]) -> Option<Self> {
        let range = slice.as_ptr_range();
        Self::new(range.start.addr()..range.end.addr())
    }

    /// The stack of this thread, from the caller's frame on.
    pub(super) fn stack() -> Option<Self> {
        let here = 0_u8;
        let frame = (&raw const here).addr();
        Self::new(frame.saturating_sub(STACK_BYTES - 2 * PAGE)..frame + PAGE)
    }

    /// The code around a function.
    pub(super) fn code(function: usize) -> Option<Self> {
        let around = |bytes: usize| Self::new(function.saturating_sub(bytes)..function.saturating_add(bytes));
        // It may be close to where the code begins or ends.
        around(CODE_BYTES).or_else(|| around(PAGE))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: as above. What shares a page with it loses its lock too: it ends at the same time.
        unsafe { libc::munlock(self.0.start as *const libc::c_void, self.0.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked_kb() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("the kernel tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn only_what_is_named_is_locked() {
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
