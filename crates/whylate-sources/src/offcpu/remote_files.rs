// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of other processes, which choose what lies at a path and when. A file is opened only once it is known to be a
//! regular one: an `O_PATH` descriptor has no side effects, and is reopened through /proc/self/fd.
//!
//! A file on a file system that may block forever, such as FUSE and NFS, is copied by a forked process, which is
//! abandoned on timeout: not even SIGKILL ends a process that waits for such a file system.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    AtFlags, CWD, FileType, MemfdFlags, Mode, OFlags, ResolveFlags, StatxFlags, memfd_create, openat, openat2, statx,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

use super::mappings::Mapping;
use crate::kernel::mounts::{Device, Mounts};

/// Timeout of copying a file, halved for each abandoned copier that still waits.
const TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum number of abandoned copiers; beyond it no more files are copied.
const MAX_ABANDONED: usize = 4;
/// Maximum bytes copied of a file.
const MAX_BYTES: usize = 128 << 20;
/// Time for which a disk's device number is assumed to stay that of the same file system.
const DISK_KNOWN_FOR: Duration = Duration::from_secs(10);
/// Maximum number of copied files with a cached identity.
const MAX_COPIES: usize = 1024;

/// Identity of a file, which also distinguishes it from a later one with the same inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity([u64; 7]);

/// Bytes of the [`Identity`] that a copier appends to the copy.
const IDENTITY_BYTES: usize = size_of::<Identity>();

/// Opens files of other processes.
#[derive(Default)]
pub(super) struct RemoteFiles {
    /// Disks with a local file system, and when that was determined.
    local_disks: HashMap<Device, Instant>,
    /// Remote files by device, inode and path in maps, with their identity when they were last copied.
    copies: HashMap<(Device, u64, String), Identity>,
    /// Abandoned copiers that still wait, with the file system that blocks them.
    abandoned: Vec<(Device, OwnedFd)>,
    /// Time spent waiting for copiers.
    waited: Duration,
}

impl RemoteFiles {
    /// Opens the file of a mapping, or a copy of it. Returns no file if `is_known` says that its identity is cached.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, is not the mapped one, or does not answer.
    pub(super) fn open(
        &mut self,
        tgid: u32,
        mapping: &Mapping,
        is_known: impl Fn(&Identity) -> bool,
    ) -> io::Result<(Identity, Option<File>)> {
        // This magic link leads to the mapped file, whatever lies at its path by now, without a path walk. It may still
        // send a request to a network file system.
        let link = format!("/proc/{tgid}/map_files/{:x}-{:x}", mapping.start, mapping.end);
        if self.is_local_device(tgid, mapping.device) {
            match openat(CWD, &link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(found) if self.is_local(tgid, found.as_fd()) => {
                    let identity = identity_of(found.as_fd())?;
                    let file = if is_known(&identity) { None } else { Some(reopen(found.as_fd())?) };
                    return Ok((identity, file));
                }
                // Another file is mapped there by now, or the caller lacks the privilege to follow the link.
                Ok(_) | Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let key = (mapping.device, mapping.inode, mapping.path.to_string());
        // Another file may have the inode number by now, or the content may differ: the copier compares the identity.
        let known = self.copies.get(&key).copied().filter(|identity| is_known(identity));
        let (identity, file) = self.copy(
            mapping.device,
            &FileRequest {
                link: Some(CString::new(link)?),
                root: CString::new(format!("/proc/{tgid}/root"))?,
                path: CString::new(mapping.path.as_bytes())?,
                resolve: ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
                mapped: Some((libc::makedev(mapping.device.0, mapping.device.1), mapping.inode)),
                known,
            },
        )?;
        if self.copies.len() >= MAX_COPIES {
            self.copies.clear();
        }
        self.copies.insert(key, identity);
        Ok((identity, (known != Some(identity)).then_some(file)))
    }

    /// Opens a regular file in a process's `/tmp`, or a copy of it. Any process can put anything there; the lookup does
    /// not leave the process's root directory.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or does not answer.
    pub(super) fn open_temporary(&mut self, tgid: u32, name: &str) -> io::Result<File> {
        let root = format!("/proc/{tgid}/root");
        if let Some(found) = self.find_local_temporary(tgid, &root, name)? {
            identity_of(found.as_fd())?;
            return reopen(found.as_fd());
        }
        // The device of a process's `/tmp` is unknown without asking its file system.
        let (_, file) = self.copy(
            (u32::MAX, tgid),
            &FileRequest {
                link: None,
                root: CString::new(root)?,
                path: CString::new(format!("tmp/{name}"))?,
                resolve: ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
                mapped: None,
                known: None,
            },
        )?;
        Ok(file)
    }

    /// Opens the file one path component at a time, each only once the file system of its parent is known to be local;
    /// `None` if one of them is not, or a component is a symlink.
    fn find_local_temporary(&mut self, tgid: u32, root: &str, name: &str) -> io::Result<Option<OwnedFd>> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let root = openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if !self.is_local(tgid, root.as_fd()) {
            return Ok(None);
        }
        let tmp = match openat2(&root, "tmp", directory, Mode::empty(), within) {
            Ok(tmp) if self.is_local(tgid, tmp.as_fd()) => tmp,
            Ok(_) | Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let file = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Some(openat2(&tmp, name, file, Mode::empty(), within | ResolveFlags::NO_XDEV)?))
    }

    /// Returns whether the file system of a device, as in /proc/PID/maps, is local.
    fn is_local_device(&mut self, tgid: u32, device: Device) -> bool {
        self.is_local_disk(device)
            || Mounts::of_process(&tgid.to_string()).is_local_device(device, || Mounts::of_process("self")) && {
                // Only disks have stable device numbers.
                if device.0 != 0 {
                    self.local_disks.insert(device, Instant::now());
                }
                true
            }
    }

    fn is_local_disk(&mut self, device: Device) -> bool {
        self.local_disks.retain(|_, found| found.elapsed() < DISK_KNOWN_FOR);
        self.local_disks.contains_key(&device)
    }

    /// Returns whether an `O_PATH` descriptor is on a local file system, without a request to it.
    fn is_local(&mut self, tgid: u32, found: BorrowedFd<'_>) -> bool {
        let without_request = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let device = statx(found, c"", without_request, StatxFlags::TYPE)
            .map(|about| (about.stx_dev_major, about.stx_dev_minor));
        device.is_ok_and(|device| self.is_local_disk(device))
            || mount_of(found).is_some_and(|mount| {
                Mounts::of_process(&tgid.to_string()).is_local_mount(mount, || Mounts::of_process("self"))
            })
    }

    /// Returns the time spent waiting for copiers since the last call.
    pub(super) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    fn copy(&mut self, device: Device, request: &FileRequest) -> io::Result<(Identity, File)> {
        self.abandoned.retain(|(_, process)| wait_for_exit(process, Duration::ZERO).is_none());
        // Another copier would block on the same file system.
        if self.abandoned.len() >= MAX_ABANDONED || self.abandoned.iter().any(|(blocked_by, _)| *blocked_by == device) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let copy = File::from(memfd_create("whylate-copy", MemfdFlags::CLOEXEC)?);
        // SAFETY: the child only makes system calls, as another thread may have held any lock at the fork.
        let pid = match unsafe { libc::fork() } {
            0 => copy_and_exit(request, copy.as_raw_fd()),
            pid => Pid::from_raw(pid).filter(|pid| !pid.is_init()).ok_or_else(io::Error::last_os_error)?,
        };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let began = Instant::now();
        let status = wait_for_exit(&process, TIMEOUT / (1 << self.abandoned.len()));
        self.waited += began.elapsed();
        let Some(status) = status else {
            // SIGKILL takes effect once the file system releases the process.
            let _ = pidfd_send_signal(&process, Signal::KILL);
            self.abandoned.push((device, process));
            return Err(io::ErrorKind::TimedOut.into());
        };
        if status != 0 {
            return Err(io::Error::from_raw_os_error(status));
        }
        let mut identity = [0; IDENTITY_BYTES];
        let length = copy.metadata()?.len().checked_sub(IDENTITY_BYTES as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        copy.read_exact_at(&mut identity, length)?;
        copy.set_len(length)?;
        let (words, _) = identity.as_chunks();
        Ok((Identity(std::array::from_fn(|word| u64::from_ne_bytes(words[word]))), copy))
    }
}

/// Returns the identity of a regular file.
fn identity_of(found: BorrowedFd<'_>) -> io::Result<Identity> {
    let about = statx(found, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    if FileType::from_raw_mode(about.stx_mode.into()) != FileType::RegularFile {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(Identity([
        libc::makedev(about.stx_dev_major, about.stx_dev_minor),
        about.stx_ino,
        about.stx_size,
        about.stx_mtime.tv_sec as u64,
        about.stx_mtime.tv_nsec.into(),
        about.stx_ctime.tv_sec as u64,
        about.stx_ctime.tv_nsec.into(),
    ]))
}

/// Reopens the regular file of an `O_PATH` descriptor for reading. O_NONBLOCK: a lease on the file would block open().
fn reopen(found: BorrowedFd<'_>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(openat(CWD, format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty())?.into())
}

/// Returns the mount ID of a descriptor, without a request to its file system.
fn mount_of(found: BorrowedFd<'_>) -> Option<u64> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", found.as_raw_fd())).ok()?;
    about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// Waits for the end of a process and reaps it. Returns its exit status; `None` on timeout.
fn wait_for_exit(process: &OwnedFd, within: Duration) -> Option<i32> {
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return None,
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    let ended = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    Some(ended.ok().flatten().and_then(|ended| ended.exit_status()).unwrap_or(libc::EIO))
}

/// The file that a copier opens.
struct FileRequest {
    /// Magic link to the file, if the caller may follow it.
    link: Option<CString>,
    /// Otherwise a directory, and a path relative to it.
    root: CString,
    path: CString,
    resolve: ResolveFlags,
    /// Device and inode of the mapped file; without them any regular file is accepted.
    mapped: Option<(u64, u64)>,
    /// A file with this identity need not be copied again.
    known: Option<Identity>,
}

/// Copies a regular file, appends its identity, and exits with 0 or an errno. Allocates no memory and takes no lock:
/// the threads that may have held one at the fork do not exist here.
fn copy_and_exit(request: &FileRequest, copy: RawFd) -> ! {
    // SAFETY: system calls on memory of this function, and on descriptors of this process, which has its own table.
    unsafe {
        // Signal handlers belong to the parent program.
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // Inherited descriptors would keep BPF programs attached for as long as this process waits.
        libc::dup2(copy, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        match copy_of(request) {
            Ok(()) => libc::_exit(0),
            Err(error) => libc::_exit(error),
        }
    }
}

/// Copies to descriptor 0, the only open one.
///
/// # Safety
/// All descriptors except 0 must be closed.
unsafe fn copy_of(request: &FileRequest) -> Result<(), i32> {
    // A missing errno must not become exit status 0.
    let failed = || Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    // SAFETY: system calls on memory of this function and of the caller's.
    unsafe {
        let follow = |link: &CStr| libc::open(link.as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
        let mut found = request.link.as_deref().map_or(-1, follow);
        let mut is_mapped = found >= 0;
        if found < 0 {
            if request.link.is_some() && !matches!(failed(), Err(libc::EPERM | libc::EACCES)) {
                return failed();
            }
            let root = libc::open(request.root.as_ptr(), libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC);
            let mut how: libc::open_how = std::mem::zeroed();
            how.flags = (libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;
            how.resolve = request.resolve.bits();
            found = libc::syscall(libc::SYS_openat2, root, request.path.as_ptr(), &raw const how, size_of_val(&how))
                as RawFd;
        }
        let mut about: libc::stat = std::mem::zeroed();
        if found < 0 || libc::fstat(found, &mut about) != 0 {
            return failed();
        }
        if about.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(libc::EINVAL);
        }
        if about.st_size as usize > MAX_BYTES {
            return Err(libc::EFBIG);
        }
        if let Some((device, inode)) = request.mapped {
            let mut system: libc::statfs = std::mem::zeroed();
            // A subvolume of btrfs has a device number that differs from the one in maps.
            is_mapped |= inode == about.st_ino
                && (device == about.st_dev
                    || libc::fstatfs(found, &mut system) == 0 && system.f_type == libc::BTRFS_SUPER_MAGIC);
            if !is_mapped {
                return Err(libc::ESTALE);
            }
        }
        // Few descriptors are open, so the number has one digit.
        let mut path = *b"/proc/self/fd/0\0";
        path[path.len() - 2] += found as u8;
        let file =
            libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY);
        let identity = Identity([
            about.st_dev,
            about.st_ino,
            about.st_size as u64,
            about.st_mtime as u64,
            about.st_mtime_nsec as u64,
            about.st_ctime as u64,
            about.st_ctime_nsec as u64,
        ]);
        let is_known = request.known == Some(identity);
        let (mut part, mut copied) = ([0_u8; 16 << 10], 0);
        while copied <= MAX_BYTES {
            let bytes = if is_known { 0 } else { libc::read(file, part.as_mut_ptr().cast(), part.len()) };
            if bytes < 0 || libc::write(0, part.as_ptr().cast(), bytes as usize) != bytes {
                return failed();
            }
            copied += bytes as usize;
            if bytes == 0 {
                let written = libc::write(0, (&raw const identity).cast(), IDENTITY_BYTES);
                return if written == IDENTITY_BYTES as isize { Ok(()) } else { failed() };
            }
        }
        Err(libc::EFBIG)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::Path;

    use rustix::fs::{mkfifoat, mknodat};

    use super::*;

    fn fifo(path: &Path) {
        mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).expect("made");
    }

    fn request_for(path: &Path, mapped: Option<(u64, u64)>) -> FileRequest {
        let path = CString::new(path.to_str().expect("a path in UTF-8")).expect("no zeros");
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        FileRequest { link: None, root: c"/".into(), path, resolve, mapped, known: None }
    }

    #[test]
    fn copies_only_the_mapped_file_without_magic_link() {
        let directory = tempfile::tempdir().expect("a directory");
        let [path, other, pipe, link] = ["file", "other", "pipe", "link"].map(|name| directory.path().join(name));
        let content = "content".repeat(10_000);
        fs::write(&path, &content).expect("written");
        fs::write(&other, "other").expect("written");
        fifo(&pipe);
        symlink(&path, &link).expect("linked");
        let about = fs::metadata(&path).expect("there");
        let mapped = Some((about.dev(), about.ino()));
        let mut files = RemoteFiles::default();
        let (identity, mut copy) = files.copy((0, 0), &request_for(&path, mapped)).expect("it is copied");
        let mut copied = String::new();
        io::Seek::rewind(&mut copy).expect("rewound");
        copy.read_to_string(&mut copied).expect("it is read");
        assert!(
            copied == content
                && identity == identity_of(File::open(&path).expect("there").as_fd()).expect("a regular file")
        );
        let known = FileRequest { known: Some(identity), ..request_for(&path, mapped) };
        let (again, copy) = files.copy((0, 0), &known).expect("it is there");
        assert!(again == identity && copy.metadata().is_ok_and(|about| about.len() == 0), "compared, not copied");
        let mut error = |path: &Path, mapped| {
            files.copy((0, 0), &request_for(path, mapped)).err().and_then(|error| error.raw_os_error())
        };
        assert_eq!(error(&other, mapped), Some(libc::ESTALE));
        for none in [&link, pipe.as_path(), directory.path(), "/dev/zero".as_ref()] {
            assert_eq!(error(none, None), Some(libc::EINVAL), "{}", none.display());
        }
        assert_eq!(error(Path::new("/no/such/file"), None), Some(libc::ENOENT));
        assert!(files.abandoned.is_empty());
    }

    #[test]
    fn opens_only_regular_files_in_tmp() {
        let (mut files, own) = (RemoteFiles::default(), std::process::id());
        let path = |kind: &str| format!("/tmp/whylate-test-{own}-{kind}");
        fs::write(path("file"), "content").expect("written");
        fifo(path("pipe").as_ref());
        symlink(path("file"), path("link")).expect("linked");
        let device = rustix::fs::makedev(1, 3);
        let has_device = mknodat(CWD, path("device"), FileType::CharacterDevice, Mode::RUSR, device).is_ok();
        let mut opened = |kind: &str| files.open_temporary(own, &format!("whylate-test-{own}-{kind}"));
        let mut content = String::new();
        let read = opened("file").and_then(|mut file| file.read_to_string(&mut content));
        let others = ["pipe", "link", "none", "device"].map(|kind| opened(kind).is_err());
        for kind in ["file", "pipe", "link"].into_iter().chain(has_device.then_some("device")) {
            fs::remove_file(path(kind)).expect("there");
        }
        assert!(read.is_ok() && content == "content", "{read:?}");
        assert_eq!(others, [true; 4]);
    }
}
