// SPDX-License-Identifier: MIT OR Apache-2.0
//! Local file systems: those that never wait for anything but this machine's disks and memory.

use std::fs::File;
use std::io::Read as _;

/// A device number as (major, minor).
pub(crate) type Device = (u32, u32);

/// File systems that never wait for anything but this machine's disks and memory.
const LOCAL_FILE_SYSTEMS: [&str; 22] = [
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
    OVERLAY,
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

/// Overlayfs, which an unprivileged user may mount in a user namespace, with layers on FUSE.
const OVERLAY: &str = "overlay";

/// Maximum bytes read of mountinfo.
const MAX_MOUNTINFO_BYTES: u64 = 1 << 20;

/// The mounts of a process (proc_pid_mountinfo(5)).
pub(crate) struct Mounts(String);

impl Mounts {
    /// Reads mountinfo, up to 1 MB. A mount that is missing counts as remote.
    pub(crate) fn of_process(process: &str) -> Self {
        let mut text = Vec::new();
        let file = File::open(format!("/proc/{process}/mountinfo"));
        let _ = file.and_then(|file| file.take(MAX_MOUNTINFO_BYTES).read_to_end(&mut text));
        Mounts(String::from_utf8_lossy(&text).into_owned())
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn from_text(text: &str) -> Self {
        Mounts(text.to_owned())
    }

    /// Returns whether the file system of a device is local; `own` reads the mounts of whylate's mount namespace.
    pub(crate) fn is_local_device(&self, device: Device, own: impl FnOnce() -> Mounts) -> bool {
        self.lines().find(|mount| mount.device == Some(device)).is_some_and(|mount| mount.is_local(own))
    }

    /// Returns whether the file system of a mount is local; `own` reads the mounts of whylate's mount namespace.
    pub(crate) fn is_local_mount(&self, id: u64, own: impl FnOnce() -> Mounts) -> bool {
        self.lines().find(|mount| mount.id == Some(id)).is_some_and(|mount| mount.is_local(own))
    }

    /// Returns where these mounts show a path within the file system of a device, if they do: other mounts may hide it.
    pub(crate) fn path_of(&self, device: Device, path: &str) -> Option<String> {
        let visible = |mount: Mount<'_>| {
            let root = unescaped(mount.root);
            let rest = path.strip_prefix(root.trim_end_matches('/'))?;
            if !rest.is_empty() && !rest.starts_with('/') {
                return None;
            }
            let below = unescaped(mount.point);
            let path = format!("{}{rest}", below.trim_end_matches('/'));
            let path = if path.is_empty() { "/".to_owned() } else { path };
            (self.uppermost_at(&path)? == mount.id).then_some(path)
        };
        // A path without its beginning is below every mount.
        if path.starts_with('…') {
            return self.lines().any(|mount| mount.device == Some(device)).then(|| path.to_owned());
        }
        self.lines().filter(|mount| mount.device == Some(device)).find_map(visible)
    }

    /// Returns the ID of the mount in which a path is: the innermost one, and of several at one point the last one.
    fn uppermost_at(&self, path: &str) -> Option<Option<u64>> {
        let length = |mount: &Mount<'_>| {
            let point = unescaped(mount.point);
            let rest = path.strip_prefix(point.trim_end_matches('/'))?;
            (rest.is_empty() || rest.starts_with('/')).then_some(point.len())
        };
        let around = self.lines().filter_map(|mount| Some((length(&mount)?, mount.id)));
        around.max_by_key(|&(length, _)| length).map(|(_, id)| id)
    }

    fn lines(&self) -> impl Iterator<Item = Mount<'_>> {
        self.0.lines().filter_map(Mount::parse)
    }
}

struct Mount<'a> {
    id: Option<u64>,
    device: Option<Device>,
    /// The directory of the file system that is mounted, and where.
    root: &'a str,
    point: &'a str,
    kind: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split(' ');
        let id = words.next()?.parse().ok();
        let (major, minor) = words.nth(1)?.split_once(':')?;
        let device = major.parse().ok().zip(minor.parse().ok());
        let (root, point) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let kind = line.split_once(" - ")?.1.split(' ').next()?;
        Some(Mount { id, device, root, point, kind })
    }

    /// Returns whether the file system is local. An overlay is, if it is also mounted in whylate's own mount namespace:
    /// then root has mounted it.
    fn is_local(&self, own: impl FnOnce() -> Mounts) -> bool {
        let is_mounted_here = || own().lines().any(|mount| mount.kind == OVERLAY && mount.device == self.device);
        LOCAL_FILE_SYSTEMS.contains(&self.kind) && (self.kind != OVERLAY || is_mounted_here())
    }
}

/// Replaces the octal numbers with which mountinfo writes spaces, tabs, newlines and backslashes.
fn unescaped(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (number, character)| text.replace(number, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Mounts {
        Mounts::from_text("")
    }

    #[test]
    fn finds_file_system_by_device_and_by_mount_id() {
        let mounts = Mounts::from_text(
            "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
             36 35 254:1 / /mnt rw,noatime shared:1 master:2 - ext4 /dev/root rw\n\
             40 35 0:46 / /home/a\\040b rw - fuse.sshfs me@there:/ rw\n",
        );
        let is_local = |device| mounts.is_local_device(device, none);
        assert_eq!([(254, 1), (0, 46), (0, 21), (254, 2)].map(is_local), [true, false, false, false]);
        assert_eq!([36, 40, 22, 41].map(|id| mounts.is_local_mount(id, none)), [true, false, false, false]);
        assert!(!Mounts::from_text("nonsense - - ext4\n\n1 2 x:y - ext4").is_local_device((0, 0), none));
    }

    #[test]
    fn path_in_a_file_system_is_found_below_its_mount() {
        let mounts = Mounts::from_text(
            "36 35 254:1 / / rw - ext4 /dev/root rw\n\
             37 35 0:24 /sub /mnt/a\\040b rw - btrfs /dev/vdb rw\n\
             38 35 0:24 / /srv rw - btrfs /dev/vdb rw\n\
             39 36 0:30 / /tmp rw - tmpfs tmpfs rw\n",
        );
        let path = |device, path| mounts.path_of(device, path);
        assert_eq!(path((254, 1), "/etc/x").as_deref(), Some("/etc/x"));
        assert_eq!(path((254, 1), "/").as_deref(), Some("/"));
        assert_eq!(path((0, 24), "/sub/x").as_deref(), Some("/mnt/a b/x"));
        assert_eq!(path((0, 24), "/sub").as_deref(), Some("/mnt/a b"));
        assert_eq!(path((0, 24), "/subway").as_deref(), Some("/srv/subway"));
        assert_eq!(path((0, 24), "…/x").as_deref(), Some("…/x"));
        assert_eq!((path((0, 9), "/x"), path((0, 9), "…/x")), (None, None));
        assert_eq!(path((254, 1), "/tmp/x"), None, "another mount hides it");
        assert_eq!(path((0, 30), "/x").as_deref(), Some("/tmp/x"));
    }

    #[test]
    fn overlay_is_local_only_if_mounted_in_own_namespace() {
        let text = "50 1 0:60 / / rw - overlay overlay rw,lowerdir=/fuse\n";
        let mounts = Mounts::from_text(text);
        assert!(!mounts.is_local_mount(50, none));
        assert!(!mounts.is_local_mount(50, || Mounts::from_text("9 1 0:61 / /x rw - overlay o rw\n")));
        assert!(mounts.is_local_mount(50, || Mounts::from_text("9 1 0:60 / /x rw - overlay o rw\n")));
    }
}
