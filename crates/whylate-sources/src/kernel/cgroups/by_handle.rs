// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens a cgroup by its ID, in the same time for any number of cgroups.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Type of a file handle with a kernfs ID, as of cgroupfs (`FILEID_KERNFS`, exportfs.h).
const FILEID_KERNFS: i32 = 0xfe;

/// `struct file_handle` of open_by_handle_at(2) with a kernfs ID.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    id: [u8; 8],
}

/// The roots of hierarchies that are open: one descriptor for all sources.
static MOUNTS: Mutex<Vec<(PathBuf, Weak<File>)>> = Mutex::new(Vec::new());

fn mount(root: &Path) -> io::Result<Arc<File>> {
    let mut mounts = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    mounts.retain(|(_, mount)| mount.strong_count() > 0);
    if let Some(mount) = mounts.iter().find(|(of, _)| of == root).and_then(|(_, mount)| mount.upgrade()) {
        return Ok(mount);
    }
    let mount = Arc::new(File::open(root)?);
    mounts.push((root.to_owned(), Arc::downgrade(&mount)));
    Ok(mount)
}

/// A mounted hierarchy. Its cgroups can be opened by ID.
#[derive(Debug)]
pub(super) struct ByHandle {
    mount: Arc<File>,
    root: PathBuf,
}

impl ByHandle {
    /// Opens the hierarchy. `None` if this process may not open files by handles, as without CAP_DAC_READ_SEARCH.
    pub(super) fn new(root: &Path) -> Option<Self> {
        let by_handle = ByHandle { mount: mount(root).ok()?, root: root.to_owned() };
        let own = std::os::unix::fs::MetadataExt::ino(&fs::metadata(root).ok()?);
        (by_handle.path(own).as_deref() == Some("/")).then_some(by_handle)
    }

    /// Returns the path within the hierarchy; `None` if the cgroup is gone, or is outside of the mount.
    pub(super) fn path(&self, id: u64) -> Option<String> {
        let cgroup = self.open(id).ok()?;
        let path = fs::read_link(format!("/proc/self/fd/{}", cgroup.as_raw_fd())).ok()?;
        let inside = path.strip_prefix(&self.root).ok()?.to_str()?;
        // The kernel appends this to the path of a removed cgroup that is still referenced.
        (!inside.ends_with(" (deleted)")).then(|| format!("/{inside}"))
    }

    fn open(&self, id: u64) -> io::Result<OwnedFd> {
        let mut handle = Handle { bytes: 8, kind: FILEID_KERNFS, id: id.to_ne_bytes() };
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: the handle is as long as it says.
        let opened =
            unsafe { libc::syscall(libc::SYS_open_by_handle_at, self.mount.as_raw_fd(), &raw mut handle, flags) };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and this is its only owner.
        Ok(unsafe { OwnedFd::from_raw_fd(opened as i32) })
    }
}
