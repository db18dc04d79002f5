// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds tracefs, the kernel's tracing files.

pub mod instance;
pub mod ring_page;

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// `TRACEFS_MAGIC` of `linux/magic.h`.
const MAGIC: u64 = 0x7472_6163;
/// Usual mount point, and the automatic one below debugfs.
const USUAL: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Reason why tracefs is missing.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NoTracefs {
    /// The kernel has tracefs, but it is not mounted, or something is mounted over it.
    #[error("not mounted here (run as root: mount -t tracefs tracefs /sys/kernel/tracing)")]
    NotMounted,
    /// The kernel does not have tracefs.
    #[error("not in this kernel (boot one with CONFIG_FTRACE=y)")]
    NotBuilt,
}

/// Returns the directory in which tracefs is mounted.
///
/// # Errors
/// Fails if no mount is visible to this process.
pub fn find() -> Result<PathBuf, NoTracefs> {
    let mounts = fs::read("/proc/self/mounts").unwrap_or_default();
    let usual = USUAL.iter().map(PathBuf::from);
    // A mount that another one covers is still listed, so each directory's file system is checked.
    if let Some(found) = usual.chain(mount_points(&mounts)).find(|path| is_tracefs(path)) {
        return Ok(found);
    }
    match fs::read_to_string("/proc/filesystems") {
        Ok(filesystems) if !knows_tracefs(&filesystems) => Err(NoTracefs::NotBuilt),
        _ => Err(NoTracefs::NotMounted),
    }
}

fn is_tracefs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type as u64 == MAGIC)
}

fn knows_tracefs(filesystems: &str) -> bool {
    filesystems.lines().any(|line| line.split_whitespace().next_back() == Some("tracefs"))
}

/// Returns the directories in `/proc/self/mounts` that have or may have tracefs.
fn mount_points(mounts: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in mounts.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ').skip(1);
        let (Some(path), Some(kind)) = (fields.next(), fields.next()) else { continue };
        let path = PathBuf::from(OsString::from_vec(without_escapes(path)));
        match kind {
            b"tracefs" => found.push(path),
            // debugfs mounts tracefs in its directory `tracing` on access.
            b"debugfs" => found.push(path.join("tracing")),
            _ => {}
        }
    }
    found
}

/// Decodes `/proc/self/mounts`, which writes space, tab, newline and backslash as `\` and three octal digits.
fn without_escapes(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after_escape @ ..] if first == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after_escape;
            }
            _ => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn finds_mount_points_and_decodes_escapes() {
        let mounts = b"proc /proc proc rw 0 0\n\
                       tracefs /sys/kernel/tracing tracefs rw 0 0\n\
                       x /mnt/a\\040b\\134c tracefs rw 0 0\n\
                       none /dbg debugfs rw 0 0\nshort";
        let expected: Vec<PathBuf> =
            ["/sys/kernel/tracing", "/mnt/a b\\c", "/dbg/tracing"].iter().map(PathBuf::from).collect();
        assert_eq!(mount_points(mounts), expected);
    }

    #[test]
    fn recognizes_tracefs_in_filesystems() {
        assert!(knows_tracefs("nodev\tsysfs\nnodev\ttracefs\n\text4\n"));
        assert!(!knows_tracefs("nodev\tsysfs\n\text4\n"));
    }

    #[test]
    fn ordinary_directory_is_not_tracefs() {
        assert!(!is_tracefs(Path::new("/")));
        assert!(!is_tracefs(Path::new("/no/such/place")));
    }

    proptest! {
        #[test]
        fn never_panics_on_any_mounts(mounts in any::<Vec<u8>>(), text in "([a-z/\\\\0-9]{0,9} ?){0,9}") {
            mount_points(&mounts);
            mount_points(text.as_bytes());
            mount_points(format!("x {text} tracefs rw").as_bytes());
        }
    }
}
