// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes without their first thread, which has exited: the others go on, but `/proc/PID` then shows a thread
//! without memory, files and root. `/proc` shows these under the TID of each other thread.

use std::fs;

/// Tests whether a thread has exited. Its entry in `/proc` remains while other threads of its process live, or its
/// parent has not waited for it.
pub(crate) fn has_exited(tid: u32) -> bool {
    fs::read(format!("/proc/{tid}/stat")).is_ok_and(|stat| is_exited(&stat))
}

/// Parses the state behind the name, which may contain anything (proc_pid_stat(5)).
fn is_exited(stat: &[u8]) -> bool {
    let end = stat.iter().rposition(|&byte| byte == b')');
    matches!(end.and_then(|end| stat.get(end + 2)), Some(b'Z' | b'X'))
}

/// Returns the TID under which `/proc` shows the shared state of a process's threads: its PID, or the TID of another
/// thread once the first one has exited.
pub(crate) fn shown_as(process: u32) -> u32 {
    if !has_exited(process) {
        return process;
    }
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let mut numbers = threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|&tid| tid != process && !has_exited(tid)).unwrap_or(process)
}

#[cfg(test)]
#[allow(unsafe_code)]
pub(crate) mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// A process in which the first thread has exited and another one sleeps. Killed when dropped.
    pub(crate) struct Headless(pub(crate) u32);

    impl Headless {
        pub(crate) fn start() -> Self {
            // SAFETY: the new process only makes system calls, and one thread, which does the same.
            let pid = match unsafe { libc::fork() } {
                // SAFETY: as above; the arguments live as long as the process.
                0 => unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    let mut thread = std::mem::zeroed();
                    libc::pthread_create(&raw mut thread, std::ptr::null(), sleep, std::ptr::null_mut());
                    libc::syscall(libc::SYS_exit, 0);
                    libc::_exit(1)
                },
                pid => u32::try_from(pid).expect("it is forked"),
            };
            let deadline = Instant::now() + Duration::from_secs(30);
            while !has_exited(pid) {
                assert!(Instant::now() < deadline, "its first thread does not exit");
                std::thread::sleep(Duration::from_millis(1));
            }
            Headless(pid)
        }
    }

    impl Drop for Headless {
        fn drop(&mut self) {
            // SAFETY: it is a child that has not been waited for.
            unsafe {
                libc::kill(self.0 as i32, libc::SIGKILL);
                libc::waitpid(self.0 as i32, std::ptr::null_mut(), 0);
            }
        }
    }

    extern "C" fn sleep(_: *mut libc::c_void) -> *mut libc::c_void {
        loop {
            // SAFETY: it has no effect on memory.
            unsafe { libc::sleep(60) };
        }
    }

    #[test]
    fn process_without_first_thread_is_shown_as_another() {
        let own = std::process::id();
        assert!(!has_exited(own) && shown_as(own) == own);
        let process = Headless::start();
        let shown = shown_as(process.0);
        assert_ne!(shown, process.0);
        let maps = |number: u32| fs::read_to_string(format!("/proc/{number}/maps")).expect("it is there");
        assert!(maps(process.0).is_empty() && maps(shown).contains("[stack]"));
        assert_eq!(shown_as(u32::MAX), u32::MAX, "there is none");
    }

    #[test]
    fn ignores_state_like_names() {
        assert!(is_exited(b"7 (a) Z 1 7\n") && is_exited(b"7 (a) S) X 1 7\n"));
        for stat in [&b"7 (Z) S 1 7\n"[..], b"7 (a) Z) R 1\n", b"7 (a)", b""] {
            assert!(!is_exited(stat));
        }
    }
}
