// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of other processes, which choose what lies at a path and when. A file is opened only once it is known to be a
//! regular one: an `O_PATH` descriptor has no side effects, and is opened again through /proc/self/fd.
//!
//! A file on a file system that may not answer, such as FUSE and NFS, is copied by a process of its own, which is given
//! up: not even SIGKILL ends a process that waits for one of these.
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
use super::mounts::{Device, Mounts};

/// How long a file may take to be copied; half of it for each copier that was given up and still waits.
const PATIENCE: Duration = Duration::from_millis(200);
/// How many copiers that were given up may wait at a time; then no more files are copied.
const MOST_GIVEN_UP: usize = 4;
/// What is copied of a file at most.
const MOST_BYTES: usize = 128 << 20;
/// How long a disk's number is taken to be that of the same file system.
const DISK_KNOWN_FOR: Duration = Duration::from_secs(10);
/// How many far files are remembered.
const MOST_COPIES: usize = 1024;

/// What distinguishes a file from all others, also from a later one with the same inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity([u64; 7]);

/// What a copier writes behind the copy: an [`Identity`].
const IDENTITY_BYTES: usize = size_of::<Identity>();

/// Opens files of other processes.
#[derive(Default)]
pub(super) struct FarFiles {
    /// Disks with a near file system, and when that was found.
    near_disks: HashMap<Device, Instant>,
    /// Far files by their line in maps, with what they were when they were copied last.
    copies: HashMap<(Device, u64, String), Identity>,
    /// Copiers that still wait, with the file system for which they do.
    given_up: Vec<(Device, OwnedFd)>,
    /// How long copiers were waited for.
    waited: Duration,
}

impl FarFiles {
    /// Opens the file of a mapping, or a copy of it. Without a file: `is_known` has said that the file is not needed.
    ///
    /// # Errors
    /// When the file cannot be opened, is not the one that is mapped, or does not answer.
    pub(super) fn open(
        &mut self,
        tgid: u32,
        mapping: &Mapping,
        is_known: impl Fn(&Identity) -> bool,
    ) -> io::Result<(Identity, Option<File>)> {
        // This link leads to the file that is mapped, whatever its path leads to by now, and through no directory. A
        // network file system may be asked even so.
        let link = format!("/proc/{tgid}/map_files/{:x}-{:x}", mapping.start, mapping.end);
        if self.is_near_device(tgid, mapping.device) {
            match openat(CWD, &link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(found) if self.is_near(tgid, found.as_fd()) => {
                    let identity = identity_of(found.as_fd())?;
                    let file = if is_known(&identity) { None } else { Some(reopen(found.as_fd())?) };
                    return Ok((identity, file));
                }
                // Another file is mapped there by now; or the link takes a privilege that is missing.
                Ok(_) | Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let key = (mapping.device, mapping.inode, mapping.path.to_string());
        // Another file may have its number by now, or another content: its copier looks.
        let known = self.copies.get(&key).copied().filter(|identity| is_known(identity));
        let (identity, file) = self.copy(
            mapping.device,
            &Wanted {
                link: Some(CString::new(link)?),
                root: CString::new(format!("/proc/{tgid}/root"))?,
                path: CString::new(mapping.path.as_bytes())?,
                resolve: ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
                mapped: Some((libc::makedev(mapping.device.0, mapping.device.1), mapping.inode)),
                known,
            },
        )?;
        if self.copies.len() >= MOST_COPIES {
            self.copies.clear();
        }
        self.copies.insert(key, identity);
        Ok((identity, (known != Some(identity)).then_some(file)))
    }

    /// Opens a regular file in a process's `/tmp`, or a copy of it. Any process can put anything there: nothing outside
    /// of its root is reached.
    ///
    /// # Errors
    /// When the file cannot be opened, or does not answer.
    pub(super) fn open_temporary(&mut self, tgid: u32, name: &str) -> io::Result<File> {
        let root = format!("/proc/{tgid}/root");
        if let Some(found) = self.find_near_temporary(tgid, &root, name)? {
            identity_of(found.as_fd())?;
            return reopen(found.as_fd());
        }
        // Of a process's `/tmp` no number is known.
        let (_, file) = self.copy(
            (u32::MAX, tgid),
            &Wanted {
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

    /// Finds such a file step by step, each only once the file system of the one before is known to be near; `None` if
    /// one of them is not, or the way leads through a link.
    fn find_near_temporary(&mut self, tgid: u32, root: &str, name: &str) -> io::Result<Option<OwnedFd>> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let root = openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if !self.is_near(tgid, root.as_fd()) {
            return Ok(None);
        }
        let tmp = match openat2(&root, "tmp", directory, Mode::empty(), within) {
            Ok(tmp) if self.is_near(tgid, tmp.as_fd()) => tmp,
            Ok(_) | Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let file = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Some(openat2(&tmp, name, file, Mode::empty(), within | ResolveFlags::NO_XDEV)?))
    }

    /// Whether a device as maps shows it has a near file system.
    fn is_near_device(&mut self, tgid: u32, device: Device) -> bool {
        self.is_near_disk(device)
            || Mounts::of(&tgid.to_string()).is_near_device(device, || Mounts::of("self")) && {
                // Only disks keep their numbers.
                if device.0 != 0 {
                    self.near_disks.insert(device, Instant::now());
                }
                true
            }
    }

    fn is_near_disk(&mut self, device: Device) -> bool {
        self.near_disks.retain(|_, found| found.elapsed() < DISK_KNOWN_FOR);
        self.near_disks.contains_key(&device)
    }

    /// Whether an `O_PATH` descriptor is of a near file system, which is not asked.
    fn is_near(&mut self, tgid: u32, found: BorrowedFd<'_>) -> bool {
        let unasked = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let device =
            statx(found, c"", unasked, StatxFlags::TYPE).map(|about| (about.stx_dev_major, about.stx_dev_minor));
        device.is_ok_and(|device| self.is_near_disk(device))
            || mount_of(found)
                .is_some_and(|mount| Mounts::of(&tgid.to_string()).is_near_mount(mount, || Mounts::of("self")))
    }

    /// How long copiers were waited for since the last call.
    pub(super) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    fn copy(&mut self, device: Device, wanted: &Wanted) -> io::Result<(Identity, File)> {
        self.given_up.retain(|(_, process)| end_of(process, Duration::ZERO).is_none());
        // Another one would wait for the same.
        if self.given_up.len() >= MOST_GIVEN_UP || self.given_up.iter().any(|(silent, _)| *silent == device) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let copy = File::from(memfd_create("whylate-copy", MemfdFlags::CLOEXEC)?);
        // SAFETY: the new process makes system calls alone, as another thread may have held any lock of this program.
        let pid = match unsafe { libc::fork() } {
            0 => copy_and_end(wanted, copy.as_raw_fd()),
            pid => Pid::from_raw(pid).filter(|pid| !pid.is_init()).ok_or_else(io::Error::last_os_error)?,
        };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let began = Instant::now();
        let status = end_of(&process, PATIENCE / (1 << self.given_up.len()));
        self.waited += began.elapsed();
        let Some(status) = status else {
            // It has no effect for as long as the file system holds it.
            let _ = pidfd_send_signal(&process, Signal::KILL);
            self.given_up.push((device, process));
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

/// What a regular file is told by.
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

/// Opens a regular file of an `O_PATH` descriptor. A lease on the file would make it wait.
fn reopen(found: BorrowedFd<'_>) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(openat(CWD, format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty())?.into())
}

/// The number of the mount of a descriptor, for which no file system is asked.
fn mount_of(found: BorrowedFd<'_>) -> Option<u64> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", found.as_raw_fd())).ok()?;
    about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// Waits for a process's end; its status. It is reaped then.
fn end_of(process: &OwnedFd, within: Duration) -> Option<i32> {
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

/// A file for a copier.
struct Wanted {
    /// A link of the kernel's that leads to it, where that may be followed.
    link: Option<CString>,
    /// Else a directory, and a path from there.
    root: CString,
    path: CString,
    resolve: ResolveFlags,
    /// Device and inode of the file at the path; without them any regular file will do.
    mapped: Option<(u64, u64)>,
    /// That one need not be copied again.
    known: Option<Identity>,
}

/// Copies a regular file with its identity and ends with 0, or with an error number: without taking memory or a lock,
/// since the threads that may have had these are not there.
fn copy_and_end(wanted: &Wanted, copy: RawFd) -> ! {
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
        match copy_of(wanted) {
            Ok(()) => libc::_exit(0),
            Err(error) => libc::_exit(error),
        }
    }
}

/// Copies to descriptor 0, the only one that is open.
///
/// # Safety
/// Descriptors of this process are closed.
unsafe fn copy_of(wanted: &Wanted) -> Result<(), i32> {
    // The only error number that is not taken from the system must not be 0 either.
    let failed = || Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    // SAFETY: system calls on memory of this function and of the caller's.
    unsafe {
        let follow = |link: &CStr| libc::open(link.as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
        let mut found = wanted.link.as_deref().map_or(-1, follow);
        let mut is_mapped = found >= 0;
        if found < 0 {
            if wanted.link.is_some() && !matches!(failed(), Err(libc::EPERM | libc::EACCES)) {
                return failed();
            }
            let root = libc::open(wanted.root.as_ptr(), libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC);
            let mut how: libc::open_how = std::mem::zeroed();
            how.flags = (libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;
            how.resolve = wanted.resolve.bits();
            found = libc::syscall(libc::SYS_openat2, root, wanted.path.as_ptr(), &raw const how, size_of_val(&how))
                as RawFd;
        }
        let mut about: libc::stat = std::mem::zeroed();
        if found < 0 || libc::fstat(found, &mut about) != 0 {
            return failed();
        }
        if about.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(libc::EINVAL);
        }
        if about.st_size as usize > MOST_BYTES {
            return Err(libc::EFBIG);
        }
        if let Some((device, inode)) = wanted.mapped {
            let mut system: libc::statfs = std::mem::zeroed();
            // A subvolume of btrfs has a device number that maps does not show.
            is_mapped |= inode == about.st_ino
                && (device == about.st_dev
                    || libc::fstatfs(found, &mut system) == 0 && system.f_type == libc::BTRFS_SUPER_MAGIC);
            if !is_mapped {
                return Err(libc::ESTALE);
            }
        }
        // Few descriptors are open: the number is one digit.
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
        let is_known = wanted.known == Some(identity);
        let (mut part, mut copied) = ([0_u8; 16 << 10], 0);
        while copied <= MOST_BYTES {
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

    fn wanted(path: &Path, mapped: Option<(u64, u64)>) -> Wanted {
        let path = CString::new(path.to_str().expect("a path in UTF-8")).expect("no zeros");
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Wanted { link: None, root: c"/".into(), path, resolve, mapped, known: None }
    }

    #[test]
    fn a_copier_without_a_link_copies_the_mapped_file_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let [path, other, pipe, link] = ["file", "other", "pipe", "link"].map(|name| directory.path().join(name));
        let content = "content".repeat(10_000);
        fs::write(&path, &content).expect("written");
        fs::write(&other, "other").expect("written");
        fifo(&pipe);
        symlink(&path, &link).expect("linked");
        let about = fs::metadata(&path).expect("there");
        let mapped = Some((about.dev(), about.ino()));
        let mut files = FarFiles::default();
        let (identity, mut copy) = files.copy((0, 0), &wanted(&path, mapped)).expect("it is copied");
        let mut copied = String::new();
        io::Seek::rewind(&mut copy).expect("rewound");
        copy.read_to_string(&mut copied).expect("it is read");
        assert!(copied == content && identity == identity_of(File::open(&path).expect("there").as_fd()).expect("told"));
        let known = Wanted { known: Some(identity), ..wanted(&path, mapped) };
        let (again, copy) = files.copy((0, 0), &known).expect("it is there");
        assert!(again == identity && copy.metadata().is_ok_and(|about| about.len() == 0), "only looked at");
        let mut error = |path: &Path, mapped| {
            files.copy((0, 0), &wanted(path, mapped)).err().and_then(|error| error.raw_os_error())
        };
        assert_eq!(error(&other, mapped), Some(libc::ESTALE));
        for none in [&link, pipe.as_path(), directory.path(), "/dev/zero".as_ref()] {
            assert_eq!(error(none, None), Some(libc::EINVAL), "{}", none.display());
        }
        assert_eq!(error(Path::new("/no/such/file"), None), Some(libc::ENOENT));
        assert!(files.given_up.is_empty());
    }

    #[test]
    fn only_a_regular_file_is_opened_in_tmp() {
        let (mut files, own) = (FarFiles::default(), std::process::id());
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
