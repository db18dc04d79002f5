// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where this program runs: on which CPUs, and in which cgroup.

use std::fs;
use std::path::{Component, Path};

use anyhow::{Context as _, bail};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Lets the calling thread, and those that it starts from now on, run on these CPUs only.
///
/// # Errors
/// When none of them is there.
pub fn keep_to(cpus: &[u32]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| (cpu as usize) < CpuSet::MAX_CPU) {
        set.set(cpu as usize);
    }
    sched_setaffinity(None, &set).context("cannot run on the CPUs chosen for housekeeping: choose CPUs that are online")
}

/// Moves this process, with the threads that are measured, into a cgroup (version 2), named from the top.
///
/// # Errors
/// When it is not there, or the caller may not move into it.
pub fn join_cgroup(name: &str) -> anyhow::Result<()> {
    let this_process = 0;
    move_to_cgroup(name, &[this_process])
}

/// Moves kernel threads or processes into a cgroup (version 2), named from the top; without a name, into our own.
///
/// # Errors
/// When it is not there, or the caller may not move them there.
pub fn move_to_cgroup(name: &str, processes: &[u32]) -> anyhow::Result<()> {
    if processes.is_empty() {
        return Ok(());
    }
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read which file systems are mounted")?;
    let Some(top) = mount_point(&mounts) else {
        bail!("no cgroup file system of version 2 is mounted: leave -C out");
    };
    let own = fs::read_to_string("/proc/self/cgroup").context("cannot read the cgroup of this process")?;
    let name = match name.trim_start_matches('/') {
        "" => own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or(""),
        name if Path::new(name).components().any(|part| !matches!(part, Component::Normal(_))) => {
            bail!("a cgroup is named from the top, without dots: {name}")
        }
        name => name,
    };
    let folder = Path::new(top).join(name);
    if !folder.is_dir() {
        bail!("there is no cgroup {name} below {top}");
    }
    for process in processes {
        fs::write(folder.join("cgroup.procs"), process.to_string())
            .with_context(|| format!("cannot move process {process} (0: this one) into the cgroup {name}"))?;
    }
    Ok(())
}

fn mount_point(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then_some(place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_found_by_its_kind() {
        let mounts =
            "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(mount_point(mounts), Some("/sys/fs/cgroup"));
        assert_eq!(mount_point(""), None);
    }

    #[test]
    fn a_name_cannot_lead_out_of_the_tree() {
        assert!(join_cgroup("../../etc").is_err());
    }
}
