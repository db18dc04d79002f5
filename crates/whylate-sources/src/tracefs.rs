// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finding tracefs, the kernel's tracing files.

pub mod instance;
pub mod ring_page;

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// `TRACEFS_MAGIC` of `linux/magic.h`.
const MAGIC: u64 = 0x7472_6163;
/// Where distributions mount it, and where it shows up below debugfs.
const USUAL: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Why there is no tracefs.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NoTracefs {
    /// The kernel has it, nobody mounted it, or something is mounted over it.
    #[error("not mounted here (run as root: mount -t tracefs tracefs /sys/kernel/tracing)")]
    NotMounted,
    /// The kernel does not have it.
    #[error("not in this kernel (boot one with CONFIG_FTRACE=y)")]
    NotBuilt,
}

/// The folder in which tracefs is mounted.
///
/// # Errors
/// When it is mounted nowhere that this process can see.
pub fn find() -> Result<PathBuf, NoTracefs> {
    let mounts = fs::read("/proc/self/mounts").unwrap_or_default();
    let usual = USUAL.iter().map(PathBuf::from);
    // A mount that another one covers is still listed, so each place is asked what it really is.
    if let Some(found) = usual.chain(mount_points(&mounts)).find(|place| is_tracefs(place)) {
        return Ok(found);
    }
    match fs::read_to_string("/proc/filesystems") {
        Ok(filesystems) if !knows_tracefs(&filesystems) => Err(NoTracefs::NotBuilt),
        _ => Err(NoTracefs::NotMounted),
    }
}

fn is_tracefs(place: &Path) -> bool {
    rustix::fs::statfs(place).is_ok_and(|stat| stat.f_type as u64 == MAGIC)
}

fn knows_tracefs(filesystems: &str) -> bool {
    filesystems.lines().any(|line| line.split_whitespace().next_back() == Some("tracefs"))
}

/// The places in the text of `/proc/self/mounts` that have or may have tracefs.
fn mount_points(mounts: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in mounts.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ').skip(1);
        let (Some(place), Some(kind)) = (fields.next(), fields.next()) else { continue };
        let place = PathBuf::from(OsString::from_vec(without_escapes(place)));
        match kind {
            b"tracefs" => found.push(place),
            // debugfs mounts tracefs in its folder `tracing` as soon as somebody looks.
            b"debugfs" => found.push(place.join("tracing")),
            _ => {}
        }
    }
    found
}

/// `/proc/self/mounts` writes space, tab, newline and backslash as `\` and three octal digits.
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
    fn mount_points_are_found_with_their_escapes() {
        let mounts = b"proc /proc proc rw 0 0\n\
                       tracefs /sys/kernel/tracing tracefs rw 0 0\n\
                       x /mnt/a\\040b\\134c tracefs rw 0 0\n\
                       none /dbg debugfs rw 0 0\nshort";
        let expected: Vec<PathBuf> =
            ["/sys/kernel/tracing", "/mnt/a b\\c", "/dbg/tracing"].iter().map(PathBuf::from).collect();
        assert_eq!(mount_points(mounts), expected);
    }

    #[test]
    fn the_kernel_lists_tracefs_as_a_file_system_without_a_device() {
        assert!(knows_tracefs("nodev\tsysfs\nnodev\ttracefs\n\text4\n"));
        assert!(!knows_tracefs("nodev\tsysfs\n\text4\n"));
    }

    #[test]
    fn an_ordinary_folder_is_no_tracefs() {
        assert!(!is_tracefs(Path::new("/")));
        assert!(!is_tracefs(Path::new("/no/such/place")));
    }

    proptest! {
        #[test]
        fn any_list_of_mounts_is_read_without_a_panic(mounts in any::<Vec<u8>>(), text in "([a-z/\\\\0-9]{0,9} ?){0,9}") {
            mount_points(&mounts);
            mount_points(text.as_bytes());
            mount_points(format!("x {text} tracefs rw").as_bytes());
        }
    }
}
