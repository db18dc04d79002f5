// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of code on file systems that may not answer, such as FUSE's and NFS's. Whoever waits for one of these may not
//! even be killed, so such a file is copied by a process of its own, which is given up.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, Mode, OFlags, ResolveFlags, memfd_create, openat2};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

/// File systems that wait for nobody but this machine's disks and memory.
const NEAR: [&str; 22] = [
    "bcachefs",
    "btrfs",
    "cramfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "jfs",
    "overlay",
    "ramfs",
    "reiserfs",
    "romfs",
    "rootfs",
    "squashfs",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
];

/// How long a file may take to be copied; half of it for each that was given up and still waits.
const PATIENCE: Duration = Duration::from_millis(200);
/// So many processes that were given up may wait at a time; then no more of such files are read.
const MOST_GIVEN_UP: usize = 4;
/// What is copied of a file at most.
const MOST_BYTES: usize = 256 << 20;
/// What is read of a list of mounts at most.
const MOST_MOUNTS: u64 = 1 << 20;

/// Opens files of other processes.
#[derive(Default)]
pub(super) struct FarFiles {
    is_near: HashMap<String, bool>,
    /// Which still wait, by what tells their end.
    given_up: Vec<OwnedFd>,
}

impl FarFiles {
    /// Opens the first of the paths that is there, on a device as proc_pid_maps(5) tells it, or a copy of it.
    ///
    /// # Errors
    /// When it cannot be opened, or does not answer.
    pub(super) fn open(&mut self, tgid: u32, device: &str, paths: &[String]) -> io::Result<File> {
        let is_near = match self.is_near.get(device) {
            Some(is_near) => *is_near,
            None => {
                let mounts = mounts_of(tgid);
                let is_near = type_of(&mounts, device).is_some_and(|name| NEAR.contains(&name));
                // Of a process that has ended nothing is told. Numbers of devices that are none are given out anew.
                let is_kept = !is_near || !device.starts_with("00:");
                if is_kept && !mounts.is_empty() {
                    self.is_near.insert(device.to_owned(), is_near);
                }
                is_near
            }
        };
        let mut failed = io::Error::from(io::ErrorKind::NotFound);
        for path in paths {
            // A FIFO that somebody put there would have it wait.
            let opened = if is_near {
                OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
            } else {
                self.copy(c"/", path)
            };
            match opened {
                Ok(file) => return Ok(file),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Opens a file in a process's `/tmp`, or a copy of it. Any process can put anything there: links are not followed,
    /// and nothing outside of its root is reached.
    ///
    /// # Errors
    /// When it cannot be opened, or does not answer.
    pub(super) fn open_temporary(&mut self, tgid: u32, name: &str) -> io::Result<File> {
        let root = CString::new(format!("/proc/{tgid}/root"))?;
        if !type_at(&mounts_of(tgid), "/tmp").is_some_and(|name| NEAR.contains(&name)) {
            return self.copy(&root, &format!("tmp/{name}"));
        }
        let root = File::open(OsStr::from_bytes(root.as_bytes()))?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        Ok(File::from(openat2(&root, format!("tmp/{name}"), flags, Mode::empty(), within)?))
    }

    /// `root` other than `/` is not left, and links are not followed there.
    fn copy(&mut self, root: &CStr, path: &str) -> io::Result<File> {
        self.given_up.retain(|process| !has_ended(process, Duration::ZERO));
        if self.given_up.len() >= MOST_GIVEN_UP {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let path = CString::new(path)?;
        let copy = File::from(memfd_create("whylate-copy", MemfdFlags::CLOEXEC)?);
        // SAFETY: the new process makes system calls alone, as another thread may have held any lock of this program.
        let pid = match unsafe { libc::fork() } {
            0 => copy_and_end(root, &path, copy.as_raw_fd()),
            pid => Pid::from_raw(pid).filter(|pid| !pid.is_init()).ok_or_else(io::Error::last_os_error)?,
        };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        if !has_ended(&process, PATIENCE / (1 << self.given_up.len())) {
            // It has no effect for as long as the file system holds it.
            let _ = pidfd_send_signal(&process, Signal::KILL);
            self.given_up.push(process);
            return Err(io::ErrorKind::TimedOut.into());
        }
        // An empty file is none of code.
        if copy.metadata()?.len() == 0 { Err(io::ErrorKind::NotFound.into()) } else { Ok(copy) }
    }
}

/// Whether a process ends within so long; it is reaped then.
fn has_ended(process: &OwnedFd, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return false,
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    true
}

/// Copies a regular file, whole or not at all, and ends: without taking memory or a lock, since the threads that may
/// have had these are not there.
fn copy_and_end(root: &CStr, path: &CStr, copy: RawFd) -> ! {
    const CONFINED: u64 = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    let mut part = [0_u8; 16 << 10];
    // SAFETY: system calls on memory of this function, and on descriptors of this process, which has its own table.
    unsafe {
        // Handlers of signals are for the program that this is a copy of.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // What is held open would keep programs attached in the kernel for as long as this waits.
        libc::dup2(copy, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let file = if root == c"/" {
            libc::open(path.as_ptr(), flags)
        } else {
            let mut how: libc::open_how = std::mem::zeroed();
            (how.flags, how.resolve) = ((flags | libc::O_NOFOLLOW) as u64, CONFINED);
            let root = libc::open(root.as_ptr(), libc::O_PATH | libc::O_DIRECTORY);
            libc::syscall(libc::SYS_openat2, root, path.as_ptr(), &raw const how, size_of_val(&how)) as RawFd
        };
        let mut about: libc::stat = std::mem::zeroed();
        let is_wanted = file >= 0
            && libc::fstat(file, &mut about) == 0
            && about.st_mode & libc::S_IFMT == libc::S_IFREG
            && about.st_size as usize <= MOST_BYTES;
        let mut copied = 0;
        let mut is_whole = false;
        while is_wanted && copied <= MOST_BYTES && !is_whole {
            let bytes = libc::read(file, part.as_mut_ptr().cast(), part.len());
            is_whole = bytes == 0;
            if bytes < 0 || libc::write(0, part.as_ptr().cast(), bytes as usize) != bytes {
                break;
            }
            copied += bytes as usize;
        }
        if is_whole {
            libc::_exit(0);
        }
        libc::ftruncate(0, 0);
        libc::_exit(1);
    }
}

/// The type of the file system on a device, as proc_pid_maps(5) tells it, by proc_pid_mountinfo(5).
pub(super) fn type_of<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    let (major, minor) = device.split_once(':')?;
    let number = |hex: &str| u32::from_str_radix(hex, 16).ok();
    let device = format!("{}:{}", number(major)?, number(minor)?);
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    line.split_once(" - ")?.1.split(' ').next()
}

/// The same of what is mounted at a path, or above it.
pub(super) fn type_at<'a>(mounts: &'a str, path: &str) -> Option<&'a str> {
    let mounted = mounts.lines().filter_map(|line| {
        let point = line.split(' ').nth(4)?;
        let is_above =
            path.strip_prefix(point.trim_end_matches('/')).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        is_above.then_some((point.len(), line))
    });
    // What is mounted last hides what is below it.
    let (_, line) = mounted.max_by_key(|(length, _)| *length)?;
    line.split_once(" - ")?.1.split(' ').next()
}

/// As far as they are no more than anybody has; what is mounted beyond that counts as far.
fn mounts_of(tgid: u32) -> String {
    let mut mounts = Vec::new();
    let file = File::open(format!("/proc/{tgid}/mountinfo"));
    let _ = file.and_then(|file| file.take(MOST_MOUNTS).read_to_end(&mut mounts));
    String::from_utf8_lossy(&mounts).into_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_type_is_told_by_the_device() {
        let mounts = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                      36 35 254:1 / /mnt rw,noatime shared:1 master:2 - ext4 /dev/root rw\n\
                      40 35 0:46 / /home/a\\040b rw - fuse.sshfs me@there:/ rw\n";
        assert_eq!(type_of(mounts, "fe:01"), Some("ext4"));
        assert_eq!(type_of(mounts, "00:2e"), Some("fuse.sshfs"));
        assert_eq!(type_of(mounts, "fe:02"), None);
        assert_eq!(type_of(mounts, "nonsense"), None);
        let mounts = "1 0 0:5 / / rw - fuse.fuse-overlayfs o rw\n2 1 0:6 / /tmpfiles rw - ext4 o rw\n";
        assert_eq!(type_at(mounts, "/tmp"), Some("fuse.fuse-overlayfs"));
        let mounts = "1 0 0:5 / / rw - ext4 o rw\n2 1 0:6 / /tmp rw - tmpfs o rw\n3 2 0:7 / /tmp rw - nfs4 o rw\n";
        assert_eq!(type_at(mounts, "/tmp"), Some("nfs4"));
        assert_eq!(type_at("", "/tmp"), None);
    }

    #[test]
    fn files_are_copied_whole_and_others_are_not() -> io::Result<()> {
        let mut files = FarFiles::default();
        let path = std::env::current_exe()?.to_string_lossy().into_owned();
        let mut copied = Vec::new();
        // On a device that no mount tells of.
        let paths = ["/no/such/file".to_owned(), path.clone()];
        let mut copy = files.open(std::process::id(), "fff:fff", &paths)?;
        std::io::Seek::rewind(&mut copy)?;
        copy.read_to_end(&mut copied)?;
        assert!(copied == fs::read(path)?, "a copy is the same");
        for none in ["/no/such/file", "/proc/self", "/dev/zero"] {
            assert!(files.open(std::process::id(), "fff:fff", &[none.to_owned()]).is_err(), "{none}");
        }
        assert!(files.given_up.is_empty());
        Ok(())
    }
}
