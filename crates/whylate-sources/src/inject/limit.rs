// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cgroup that limits the rate at which its threads read a disk; the kernel throttles the rest.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{Access, access};

use crate::AttachError;
use crate::kernel::cgroups::{self, Hierarchy};
use crate::kernel::restore::Restore;

/// Keeps its creator in the cgroup while it lives: with cgroup v1 the calling thread, with v2 its process, as `io` is
/// no threaded controller. The cgroup is removed with it; after a SIGKILL, the next start removes it.
pub(super) struct Limit {
    /// The cgroup's path in its hierarchy.
    pub path: String,
    /// Files to write to for moving back: of the previous cgroup, and of the root if that one is gone.
    before: [PathBuf; 2],
    /// Removes the cgroup, which is empty by then.
    _restore: Restore,
}

impl Limit {
    /// Creates a cgroup with a limit for a disk, by its name in `/dev`, and enters it.
    pub(super) fn enter(disk: &str, reads_a_second: u32) -> Result<Limit, AttachError> {
        let hierarchy = usable()?;
        let Hierarchy { root, is_of_v1 } = &hierarchy;
        let number = fs::read_to_string(format!("/sys/block/{disk}/dev"));
        let number = number.with_context(|| format!("cannot read the device number of {disk}"))?;
        let before = cgroups::own_path(&hierarchy).context("cannot find the cgroup of this process")?;
        let path = format!("/whylate-inject-{}", std::process::id());
        let of = |path: &str| root.join(path.trim_start_matches('/'));
        let (threads, limit, line) = if *is_of_v1 {
            ("tasks", "blkio.throttle.read_iops_device", format!("{} {reads_a_second}", number.trim()))
        } else {
            ("cgroup.procs", "io.max", format!("{} riops={reads_a_second}", number.trim()))
        };
        let mut restore = Restore::default();
        if !is_of_v1 {
            enable_io_controller(root, &mut restore).map_err(|error| unsupported(&format!("{error:#}")))?;
        }
        restore.make_directory(&of(&path))?;
        let limits = of(&path).join(limit);
        if !limits.exists() {
            return Err(unsupported("this kernel cannot throttle disks (it needs CONFIG_BLK_DEV_THROTTLING)"));
        }
        // The limit ends with the cgroup.
        fs::write(&limits, line).with_context(|| format!("cannot write to {}", limits.display()))?;
        let limit = Limit { before: [&before, "/"].map(|path| of(path).join(threads)), path, _restore: restore };
        let own = of(&limit.path).join(threads);
        move_to(&own).with_context(|| format!("cannot write to {} (run as root)", own.display()))?;
        Ok(limit)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        let _ = self.before.iter().any(|threads| move_to(threads).is_ok());
    }
}

/// Moves the calling thread, or its process.
fn move_to(threads: &Path) -> io::Result<()> {
    fs::write(threads, "0")
}

fn unsupported(reason: &str) -> AttachError {
    AttachError::Unsupported(reason.to_owned())
}

/// Returns the hierarchy in which cgroups may limit disks.
fn usable() -> Result<Hierarchy, AttachError> {
    let has_io = |hierarchy: &Hierarchy| {
        hierarchy.is_of_v1
            || fs::read_to_string(hierarchy.root.join("cgroup.controllers")).is_ok_and(|names| has(&names, "io"))
    };
    let hierarchy = cgroups::of_disks().filter(has_io).ok_or_else(|| {
        unsupported("cgroups cannot throttle disks here: mount cgroup v2 with the io controller, or cgroup v1 with the blkio controller")
    })?;
    access(&hierarchy.root, Access::WRITE_OK).map_err(|error| {
        let root = hierarchy.root.display();
        unsupported(&format!("cannot make a cgroup in {root}: {error} (run as root, outside containers)"))
    })?;
    Ok(hierarchy)
}

fn has(names: &str, name: &str) -> bool {
    names.split_whitespace().any(|listed| listed == name)
}

/// Enables the controller `io` for child cgroups. In a container the kernel refuses if this cgroup has processes.
fn enable_io_controller(root: &Path, restore: &mut Restore) -> anyhow::Result<()> {
    let below = root.join("cgroup.subtree_control");
    restore.enable_controller(&below, "io").context("cannot enable the io controller in cgroup.subtree_control")
}
