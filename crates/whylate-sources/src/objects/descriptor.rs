// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of descriptors, from the links in `/proc/PID/fd` and, where that cannot block, from `fdinfo`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use whylate_model::name::into_bounded;
use whylate_model::object::{Object, ObjectKind};

use super::call::Direction;
use super::fuse;
use super::lead::{Access, Lead};
use crate::kernel::mounts::Mounts;
use crate::kernel::proc;

/// Maximum number of bytes of a `fdinfo`, which lists each lock of the process on its file.
const MAX_ABOUT_BYTES: u64 = 16 << 10;

/// Suffix of the link of a deleted file.
const DELETED: &str = " (deleted)";

/// Returns the object of a descriptor, and how to find its peers.
pub(super) fn object_of(
    pid: u32,
    descriptor: i32,
    direction: Direction,
    kernel: &[String],
) -> Option<(Object, Option<Lead>)> {
    let descriptor = u32::try_from(descriptor).ok()?;
    let link = link_of(pid, descriptor)?;
    if let Some(inode) = number_in(&link, "pipe:[") {
        let access = wanted_access(pid, descriptor, direction)?;
        let object = Object { inode: Some(inode), ..Object::new(ObjectKind::Pipe) };
        return Some((object, Some(Lead::Pipe { link, access })));
    }
    if let Some(inode) = number_in(&link, "socket:[") {
        let object = Object { inode: Some(inode), ..Object::new(ObjectKind::Socket) };
        return Some((object, Some(Lead::Socket { inode })));
    }
    if let Some(kind) = kind_of_anonymous(&link) {
        let object = Object::new(kind);
        return Some(match kind {
            ObjectKind::Timerfd => (Object { expires_in_ns: expiry(&about(pid, descriptor)?), ..object }, None),
            ObjectKind::Process => {
                let of = value_of(&about(pid, descriptor)?, "Pid:").and_then(|pid| pid.parse().ok());
                (object, of.filter(|&pid: &u32| pid > 0).map(|pid| Lead::Processes(vec![pid])))
            }
            ObjectKind::Other => (Object { path: Some(into_bounded(link)), ..object }, None),
            _ => (object, None),
        });
    }
    if link.starts_with('/') { of_path(pid, descriptor, direction, &link, kernel) } else { None }
}

/// Returns the object of a descriptor with a path.
fn of_path(
    pid: u32,
    descriptor: u32,
    direction: Direction,
    link: &str,
    kernel: &[String],
) -> Option<(Object, Option<Lead>)> {
    if let Some(kind) = kind_of_device(link) {
        // Its own functions answer for its `fdinfo`.
        return Some((Object::with_path(kind, into_bounded(link.to_owned())), None));
    }
    let (path, is_deleted) = match link.strip_suffix(DELETED) {
        Some(path) => (path, true),
        None => (link, false),
    };
    let object = |kind| Object { is_deleted, ..Object::with_path(kind, into_bounded(path.to_owned())) };
    if kernel.iter().any(|frame| frame.starts_with("do_mq_") || frame.starts_with("wq_sleep")) {
        return Some((object(ObjectKind::MessageQueue), None));
    }
    let about = about(pid, descriptor)?;
    let mount = value_of(&about, "mnt_id:").and_then(|id| id.parse().ok())?;
    if fuse::waits_for_daemon(kernel) {
        let (mount, minor) = fuse::mount_by_id(pid, mount)?;
        let object = Object { mount: Some(mount), ..object(ObjectKind::Fuse) };
        return Some((object, Some(Lead::Fuse { minor })));
    }
    if is_fifo(pid, descriptor, mount, kernel) {
        let inode = value_of(&about, "ino:").and_then(|inode| inode.parse().ok());
        let access = wanted_access(pid, descriptor, direction)?;
        let lead = inode.map(|inode| Lead::Fifo { link: link.to_owned(), inode, access });
        return Some((Object { inode, ..object(ObjectKind::Fifo) }, lead));
    }
    Some((object(ObjectKind::File), None))
}

/// Returns whether a descriptor is a FIFO. To ask a remote file system could block; that of a descriptor that was replaced
/// meanwhile is not asked either.
fn is_fifo(pid: u32, descriptor: u32, mount: u64, kernel: &[String]) -> bool {
    let is_local = || {
        let own = || Mounts::of_process("self");
        Mounts::of_process(&pid.to_string()).is_local_mount(mount, own)
    };
    kernel.iter().any(|frame| is_of_pipe(frame)) || is_local() && kind_of_file(pid, descriptor) == Some(FileType::Fifo)
}

/// Returns the kind of a descriptor's file, without a request to its file system.
fn kind_of_file(pid: u32, descriptor: u32) -> Option<FileType> {
    let link = format!("/proc/{pid}/fd/{descriptor}");
    let about = statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    Some(FileType::from_raw_mode(about.stx_mode.into()))
}

/// Returns whether a kernel function belongs to pipes and FIFOs.
pub(super) fn is_of_pipe(frame: &str) -> bool {
    ["pipe_", "anon_pipe_", "fifo_", "wait_for_partner"].iter().any(|name| frame.starts_with(name))
}

/// Returns the target of a descriptor's link. Reading a link asks no file system.
pub(super) fn link_of(pid: u32, descriptor: u32) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// Reads the `fdinfo` of a descriptor whose kind never blocks there.
pub(super) fn about(pid: u32, descriptor: u32) -> Option<String> {
    proc::text_at_most(format!("/proc/{pid}/fdinfo/{descriptor}"), MAX_ABOUT_BYTES).ok()
}

/// Returns the value behind a name in `fdinfo`.
pub(super) fn value_of<'a>(about: &'a str, name: &str) -> Option<&'a str> {
    about.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Returns the access to a descriptor, from the permissions of its link.
pub(super) fn access_of(pid: u32, descriptor: u32) -> Option<Access> {
    let mode = fs::symlink_metadata(format!("/proc/{pid}/fd/{descriptor}")).ok()?.mode();
    Some(Access { reads: mode & 0o400 != 0, writes: mode & 0o200 != 0 })
}

/// Returns the access that a process needs which could end the wait.
fn wanted_access(pid: u32, descriptor: u32, direction: Direction) -> Option<Access> {
    let of_waiter = match direction {
        Direction::Read => Access { reads: true, writes: false },
        Direction::Write => Access { reads: false, writes: true },
        Direction::Any => access_of(pid, descriptor)?,
    };
    Some(Access { reads: of_waiter.writes, writes: of_waiter.reads })
}

/// Parses the number in a link such as `pipe:[4711]`.
pub(super) fn number_in(link: &str, begins: &str) -> Option<u64> {
    link.strip_prefix(begins)?.strip_suffix(']')?.parse().ok()
}

/// Returns the kind of a descriptor without a file.
fn kind_of_anonymous(link: &str) -> Option<ObjectKind> {
    if number_in(link, "pidfd:[").is_some() {
        return Some(ObjectKind::Process);
    }
    Some(match link.strip_prefix("anon_inode:")?.trim_matches(['[', ']']) {
        "eventfd" => ObjectKind::Eventfd,
        "timerfd" => ObjectKind::Timerfd,
        "eventpoll" => ObjectKind::Epoll,
        "inotify" | "fanotify" => ObjectKind::Inotify,
        "signalfd" => ObjectKind::Signalfd,
        "io_uring" => ObjectKind::IoUring,
        "pidfd" => ObjectKind::Process,
        _ => ObjectKind::Other,
    })
}

/// Returns the kind of a device by its path; `None` for files in memory.
fn kind_of_device(path: &str) -> Option<ObjectKind> {
    let name = path.strip_prefix("/dev/")?;
    if name.starts_with("shm/") || name.starts_with("mqueue/") || name.starts_with("hugepages/") {
        return None;
    }
    let is_terminal = ["pts/", "tty", "console", "ptmx", "hvc"].iter().any(|begins| name.starts_with(begins));
    Some(if is_terminal { ObjectKind::Terminal } else { ObjectKind::Device })
}

/// Parses `it_value: (1, 500000000)`, the time until a timerfd expires; `None` if it is not set.
fn expiry(about: &str) -> Option<u64> {
    let (seconds, nanoseconds) = value_of(about, "it_value:")?.strip_prefix('(')?.strip_suffix(')')?.split_once(',')?;
    let nanoseconds = nanoseconds.trim().parse().ok().filter(|&ns: &u32| ns < 1_000_000_000)?;
    let left = Duration::new(seconds.trim().parse().ok()?, nanoseconds);
    u64::try_from(left.as_nanos()).ok().filter(|&ns| ns > 0)
}

/// Families of kernel functions, and the kinds of descriptors that they work on.
const FAMILIES: &[(&[&str], &[ObjectKind])] = &[
    (&["pipe_read", "pipe_write", "anon_pipe_", "fifo_pipe_"], &[ObjectKind::Pipe, ObjectKind::Fifo]),
    (&["unix_"], &[ObjectKind::UnixSocket, ObjectKind::Socket]),
    (&["tcp_", "inet_csk_", "inet_wait_for_connect"], &[ObjectKind::Tcp, ObjectKind::Socket]),
    (&["udp_", "udpv6_"], &[ObjectKind::Udp, ObjectKind::Socket]),
    (&["netlink_", "packet_", "vsock_"], &[ObjectKind::Socket]),
    (&["eventfd_"], &[ObjectKind::Eventfd]),
    (&["timerfd_"], &[ObjectKind::Timerfd]),
    (&["ep_poll", "do_epoll_wait"], &[ObjectKind::Epoll]),
    (&["inotify_", "fanotify_"], &[ObjectKind::Inotify]),
    (&["signalfd_"], &[ObjectKind::Signalfd]),
    (&["n_tty_"], &[ObjectKind::Terminal, ObjectKind::Device]),
    (&["fuse_dev_"], &[ObjectKind::Device]),
];

/// Returns whether the kernel stack may be one of a wait for this kind: another thread of the process may have replaced the
/// descriptor since the call.
pub(super) fn agrees(kind: ObjectKind, kernel: &[String]) -> bool {
    let is_of =
        |frame: &String, (names, _): &(&[&str], &[ObjectKind])| names.iter().any(|name| frame.starts_with(name));
    let families = FAMILIES.iter().filter(|family| kernel.iter().any(|frame| is_of(frame, family)));
    families.into_iter().all(|(_, kinds)| kinds.contains(&kind))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn links_name_kinds() {
        assert_eq!(number_in("pipe:[4711]", "pipe:["), Some(4711));
        assert_eq!(number_in("pipe:[x]", "pipe:["), None);
        let kinds = ["anon_inode:[eventfd]", "anon_inode:inotify", "pidfd:[7]", "anon_inode:[bpf-map]"];
        let expected = [ObjectKind::Eventfd, ObjectKind::Inotify, ObjectKind::Process, ObjectKind::Other];
        assert_eq!(kinds.map(kind_of_anonymous), expected.map(Some));
        assert_eq!(kind_of_anonymous("/tmp/anon_inode:[eventfd]"), None);
        let devices = ["/dev/pts/3", "/dev/ttyS0", "/dev/fuse", "/dev/shm/x", "/srv/dev/pts/1"];
        let expected = [Some(ObjectKind::Terminal), Some(ObjectKind::Terminal), Some(ObjectKind::Device), None, None];
        assert_eq!(devices.map(kind_of_device), expected);
    }

    #[test]
    fn kind_is_that_of_the_file() {
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        let file = tempfile::tempfile().expect("a file");
        let kind = |descriptor: i32| kind_of_file(std::process::id(), descriptor as u32);
        let kinds = [kind(reader.as_raw_fd()), kind(file.as_raw_fd()), kind(-1)];
        assert_eq!(kinds, [Some(FileType::Fifo), Some(FileType::RegularFile), None]);
    }

    #[test]
    fn parses_expiry_of_timer() {
        let about = "pos:\t0\nclockid: 1\nticks: 0\nsettime flags: 00\nit_value: (1, 500000000)\nit_interval: (0, 0)\n";
        assert_eq!(expiry(about), Some(1_500_000_000));
        assert_eq!(expiry("it_value: (0, 0)"), None);
        assert_eq!(expiry("it_value: (99999999999999999999, 0)"), None);
        assert_eq!(expiry("it_value: (18446744073709551615, 4294967295)"), None);
    }

    #[test]
    fn stack_contradicts_replaced_descriptor() {
        let stack = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert!(agrees(ObjectKind::Pipe, &stack(&["anon_pipe_read", "vfs_read"])));
        assert!(!agrees(ObjectKind::Socket, &stack(&["anon_pipe_read", "vfs_read"])));
        assert!(!agrees(ObjectKind::Udp, &stack(&["tcp_recvmsg", "inet_recvmsg"])));
        assert!(agrees(ObjectKind::File, &stack(&["folio_wait_bit", "ext4_sync_file"])));
    }
}
