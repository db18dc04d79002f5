// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that hold locks while the process lives, and threads that wait for those locks.

use std::ffi::c_void;
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

/// Maps a page that is never filled (userfaultfd(2)): a thread that reads or writes it blocks forever.
pub fn missing_page() -> Result<usize> {
    /// `UFFDIO_API` and `UFFDIO_REGISTER` (include/uapi/linux/userfaultfd.h).
    const API: libc::c_ulong = 0xc018_aa3f;
    const REGISTER: libc::c_ulong = 0xc020_aa00;
    const LENGTH: usize = 4096;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let page = unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), LENGTH, access, kind, -1, 0)
    };
    ensure!(page != libc::MAP_FAILED, "no page");
    let mut api = [0xaa_u64, 0, 0];
    let mut registered = [page as u64, LENGTH as u64, 1, 0];
    // SAFETY: the arrays are laid out as the kernel's structures, and outlive the calls.
    unsafe {
        let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
        ensure!(faults >= 0, "no userfaultfd: {}", std::io::Error::last_os_error());
        ensure!(libc::ioctl(faults, API, api.as_mut_ptr()) == 0, "another userfaultfd");
        ensure!(libc::ioctl(faults, REGISTER, registered.as_mut_ptr()) == 0, "the page is not taken");
    }
    Ok(page as usize)
}

static FIRST: AtomicU32 = AtomicU32::new(0);
static SECOND: AtomicU32 = AtomicU32::new(0);

/// Starts two threads in a chain on two futexes, and a holder and a waiter each for a pipe's mutex and for the inode
/// locks of `file` and of a directory beside it.
pub fn start(file: &Path) -> Result<()> {
    let sleep = || super::sleep_in_nanosleep();
    waits_in("pi holder", "nanosleep", move || {
        lock(&FIRST);
        sleep();
    })?;
    waits_in("pi middle", "futex_lock_pi", || {
        lock(&SECOND);
        lock(&FIRST);
    })?;
    waits_in("pi waiter", "futex_lock_pi", || lock(&SECOND))?;

    super::hold_a_pipe()?;
    waits_in("pipe waiter", "pipe_write", super::sleep_in_mutex)?;

    // A writer holds the file's inode lock while it copies from the page.
    let (path, page) = (file.to_owned(), missing_page()?);
    waits_in("file holder", "handle_userfault", move || {
        let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
        // SAFETY: the page is mapped; nothing else uses it.
        let outcome = unsafe { libc::write(file.as_raw_fd(), page as *const c_void, 1) };
        black_box(outcome);
    })?;
    let path = file.to_owned();
    waits_in("file waiter", "write", move || {
        let _ = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(b"x"));
    })?;

    // A reader of a directory holds its inode lock shared.
    let directory = file.with_file_name("directory");
    fs::create_dir(&directory)?;
    let (path, page) = (directory.clone(), missing_page()?);
    waits_in("dir holder", "handle_userfault", move || {
        let Ok(directory) = File::open(path) else { return };
        // SAFETY: the page is mapped; nothing else uses it.
        let outcome = unsafe { libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), page, 4096) };
        black_box(outcome);
    })?;
    waits_in("dir waiter", "mkdir", move || {
        let _ = fs::create_dir(directory.join("new"));
    })
}

/// Takes a PI futex, which stores its holder's TID.
#[inline(never)]
fn lock(word: &AtomicU32) {
    // SAFETY: the word is there as long as the process.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_LOCK_PI, 0, std::ptr::null::<c_void>()) };
}

/// Starts a thread, and waits until its kernel stack contains a function with `function` in its name.
pub fn waits_in(name: &str, function: &str, act: impl FnOnce() + Send + 'static) -> Result<()> {
    super::spawn(name.to_owned(), act)?;
    for _ in 0..3_000 {
        for entry in fs::read_dir("/proc/self/task")? {
            let thread = entry?.path();
            let read = |file: &str| fs::read_to_string(thread.join(file)).unwrap_or_default();
            if read("comm").trim_end() == name && read("stack").contains(function) {
                return Ok(());
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("{name} does not come to wait in {function}")
}

/// Flushes a kernel work item repeatedly: closing an inotify descriptor waits for SRCU readers of its marks.
pub fn flush() -> Result<()> {
    super::spawn("flusher".to_owned(), || {
        loop {
            // SAFETY: the path ends in a zero byte, and the descriptor is ours.
            unsafe {
                let watches = libc::inotify_init();
                libc::inotify_add_watch(watches, c"/".as_ptr(), libc::IN_CREATE);
                libc::close(watches);
            }
        }
    })
}
