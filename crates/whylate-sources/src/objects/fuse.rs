// SPDX-License-Identifier: MIT OR Apache-2.0
//! FUSE file systems: the mount of a file, and the connection by which its daemon is found.

use std::path::Path;

use crate::kernel::proc;

/// Maximum bytes read of mountinfo.
const MAX_MOUNTINFO_BYTES: u64 = 1 << 20;

/// Returns whether a thread waits for the answer of a FUSE daemon.
pub(super) fn waits_for_daemon(kernel: &[String]) -> bool {
    // The daemon itself waits in fuse_dev_do_read().
    let is_of = |frame: &String| {
        frame.starts_with("fuse_") || frame.starts_with("__fuse_") || frame.starts_with("request_wait_answer")
    };
    kernel.iter().any(is_of) && !kernel.iter().any(|frame| frame.starts_with("fuse_dev_"))
}

/// Returns mount point and minor device number of a FUSE mount of the process, by the number of the mount.
pub(super) fn mount_by_id(pid: u32, id: u64) -> Option<(String, u32)> {
    let text = mountinfo(pid)?;
    let mount = text.lines().filter_map(FuseMount::parse).find(|mount| mount.id == id)?;
    Some((mount.point, mount.minor))
}

/// Returns mount point and minor device number of the FUSE mount that a path of the process is on.
pub(super) fn mount_of_path(pid: u32, path: &str) -> Option<(String, u32)> {
    let text = mountinfo(pid)?;
    mount_of(&text, path)
}

fn mount_of(text: &str, path: &str) -> Option<(String, u32)> {
    let mounts = text.lines().filter_map(FuseMount::parse).filter(|mount| Path::new(path).starts_with(&mount.point));
    // Of mounts on one point, the last one is on top.
    let mount = mounts.max_by_key(|mount| mount.point.len())?;
    Some((mount.point, mount.minor))
}

/// Returns the number of FUSE mounts of a process.
pub(super) fn count_of_mounts(pid: u32) -> usize {
    mountinfo(pid).map_or(0, |text| text.lines().filter_map(FuseMount::parse).count())
}

fn mountinfo(pid: u32) -> Option<String> {
    proc::text_at_most(format!("/proc/{pid}/mountinfo"), MAX_MOUNTINFO_BYTES).ok()
}

struct FuseMount {
    id: u64,
    minor: u32,
    point: String,
}

impl FuseMount {
    /// Parses a line of mountinfo; `None` for other file systems.
    fn parse(line: &str) -> Option<Self> {
        let (about, kind) = line.split_once(" - ")?;
        let kind = kind.split(' ').next()?;
        if kind != "fuse" && kind != "fuseblk" && !kind.starts_with("fuse.") {
            return None;
        }
        let mut words = about.split(' ');
        let id = words.next()?.parse().ok()?;
        let minor = words.nth(1)?.split_once(':')?.1.parse().ok()?;
        let point = unescaped(words.nth(1)?);
        Some(FuseMount { id, minor, point })
    }
}

/// Replaces octal escapes such as `\040`.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let digits = behind.first_chunk::<3>().filter(|_| *first == b'\\');
        let value = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(value.unwrap_or(*first));
        rest = if value.is_some() { &behind[3..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn check(text: &str) {
    let (path, mounts) = text.split_once('\n').unwrap_or_default();
    mount_of(mounts, path);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
36 35 254:1 / / rw,noatime shared:1 - ext4 /dev/root rw
40 36 0:46 / /home/a\\040b rw - fuse.sshfs me@there:/ rw
41 40 0:47 / /home/a\\040b/c rw - fuse /dev/fuse rw
";

    #[test]
    fn finds_innermost_mount_of_path() {
        let of = |path: &str| mount_of(MOUNTS, path).map(|(point, minor)| format!("{minor} {point}"));
        assert_eq!(of("/home/a b/x").as_deref(), Some("46 /home/a b"));
        assert_eq!(of("/home/a b/c/x").as_deref(), Some("47 /home/a b/c"));
        assert_eq!(of("/home/a bc"), None);
        check("/x\nnonsense\n1 2 x:y - fuse");
        assert_eq!(unescaped("\\04\\777a\\"), "\\04\\777a\\");
    }

    #[test]
    fn daemon_does_not_wait_for_itself() {
        let stack = |name: &str| [name.to_owned()];
        assert!(waits_for_daemon(&stack("request_wait_answer")));
        assert!(!waits_for_daemon(&stack("fuse_dev_do_read")));
        assert!(!waits_for_daemon(&stack("vfs_read")));
    }
}
