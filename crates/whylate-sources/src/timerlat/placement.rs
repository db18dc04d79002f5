// SPDX-License-Identifier: MIT OR Apache-2.0
//! Placement of this process: CPU affinity and cgroup.

use std::fs;
use std::path::{Component, Path};

use anyhow::{Context as _, bail};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::kernel::proc;

/// Restricts the calling thread, and threads that it starts later, to these CPUs.
///
/// # Errors
/// Fails if none of the CPUs exists.
pub fn keep_to(cpus: &[u32]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| (cpu as usize) < CpuSet::MAX_CPU) {
        set.set(cpu as usize);
    }
    sched_setaffinity(None, &set).context("cannot run on the CPUs chosen for housekeeping: choose CPUs that are online")
}

/// Moves this process with its measured threads into a cgroup (version 2), given relative to the root.
///
/// # Errors
/// Fails if the cgroup does not exist, or the caller may not move the process.
pub fn join_cgroup(name: &str) -> anyhow::Result<()> {
    let this_process = 0;
    move_to_cgroup(name, &[this_process])
}

/// Moves kernel threads or processes into a cgroup (version 2), relative to the root; without a name, into our own.
///
/// # Errors
/// Fails if the cgroup does not exist, or the caller may not move them.
pub fn move_to_cgroup(name: &str, processes: &[u32]) -> anyhow::Result<()> {
    if processes.is_empty() {
        return Ok(());
    }
    let mounts = proc::text("/proc/self/mounts").context("cannot read which file systems are mounted")?;
    let Some(top) = mount_point(&mounts) else {
        bail!("no cgroup file system of version 2 is mounted: leave -C out");
    };
    let own = proc::text("/proc/self/cgroup").context("cannot read the cgroup of this process")?;
    let name = match name.trim_start_matches('/') {
        "" => own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or(""),
        name if Path::new(name).components().any(|part| !matches!(part, Component::Normal(_))) => {
            bail!("a cgroup is named from the top, without dots: {name}")
        }
        name => name,
    };
    let directory = Path::new(top).join(name);
    if !directory.is_dir() {
        bail!("there is no cgroup {name} below {top}");
    }
    for process in processes {
        fs::write(directory.join("cgroup.procs"), process.to_string())
            .with_context(|| format!("cannot move process {process} (0: this one) into the cgroup {name}"))?;
    }
    Ok(())
}

fn mount_point(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup2_mount() {
        let mounts =
            "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(mount_point(mounts), Some("/sys/fs/cgroup"));
        assert_eq!(mount_point(""), None);
    }

    #[test]
    fn rejects_cgroup_outside_of_the_tree() {
        assert!(join_cgroup("../../etc").is_err());
    }
}
