// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of cgroups by their numbers, which are those of their folders (on 64-bit kernels).
//!
//! A machine has one hierarchy by which containers are told: the one of the controller `cpu` of cgroup v1 where there is
//! one, else cgroup v2. What a request is charged to, and who limits it, is in that of `blkio` or else of cgroup v2.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the folders are gone through again at most, for cgroups that are made meanwhile.
const AGAIN: Duration = Duration::from_millis(50);
/// The number of a session's group (autogroup of cgroup v1), which only threads of the root have.
const OF_SESSION: u64 = 0;
/// Of the time, at most one part in so many goes into that.
const SHARE: u32 = 50;

/// How a cgroup is told that is gone, or was not found: no path begins so.
const UNKNOWN: &str = "unknown:";

/// Whether a cgroup that was told has no path.
pub(crate) fn is_unknown(told: &str) -> bool {
    told.starts_with(UNKNOWN)
}

/// The controller of cgroup v1 by whose hierarchy containers are told.
const CPU: &str = "cpu";
/// The one of disks.
const BLKIO: &str = "blkio";

/// The hierarchy, read when the first path is asked for.
#[derive(Debug)]
pub struct Cgroups {
    controller: &'static str,
    read: Option<Read>,
}

impl Default for Cgroups {
    fn default() -> Self {
        Cgroups { controller: CPU, read: None }
    }
}

/// Where a controller's hierarchy is mounted.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    pub root: PathBuf,
    pub is_of_v1: bool,
}

/// The hierarchy of the cgroups that requests are charged to.
pub(crate) fn of_disks() -> Option<Hierarchy> {
    hierarchy(BLKIO)
}

/// That of a controller of cgroup v1 where there is one, else cgroup v2.
fn hierarchy(controller: &str) -> Option<Hierarchy> {
    let of_v1 = mounted_of_v1(controller).map(|root| Hierarchy { root, is_of_v1: true });
    of_v1.or_else(|| Some(Hierarchy { root: unified_root()?, is_of_v1: false }))
}

/// Where cgroup v2 is mounted.
pub(crate) fn unified_root() -> Option<PathBuf> {
    mount_of(|kind, _| kind == "cgroup2")
}

#[derive(Debug)]
struct Read {
    path_by_id: HashMap<u64, String>,
    at: Instant,
    took: Duration,
    /// Somebody begins to ask anew.
    is_of_before: bool,
}

impl Cgroups {
    /// Those that requests are charged to.
    pub(crate) fn of_disks() -> Self {
        Cgroups { controller: BLKIO, read: None }
    }

    /// Lets the folders be gone through again once for a cgroup that is not known, however lately that was done.
    pub(crate) fn may_read_again(&mut self) {
        if let Some(read) = &mut self.read {
            read.is_of_before = true;
        }
    }

    /// The path within the hierarchy, such as `/system.slice/ssh.service`; `None` when it is gone, or is outside the
    /// cgroup namespace of this process.
    pub fn path(&mut self, id: u64) -> Option<String> {
        let controller = self.controller;
        let read = self.read.get_or_insert_with(|| read(controller));
        let may_have_more = read.is_of_before || read.at.elapsed() >= AGAIN.max(read.took * SHARE);
        if !read.path_by_id.contains_key(&id) && may_have_more {
            *read = self::read(controller);
        }
        read.path_by_id.get(&id).cloned()
    }

    /// The same of a thread's cgroup, also of one that is gone; `None` where there is no hierarchy.
    pub(crate) fn told(&mut self, id: u64) -> Option<String> {
        if id == OF_SESSION {
            return Some("/".to_owned());
        }
        let path = self.path(id);
        let is_mounted = self.read.as_ref().is_some_and(|read| !read.path_by_id.is_empty());
        path.or_else(|| is_mounted.then(|| format!("{UNKNOWN}{id}")))
    }
}

impl Cgroups {
    /// The path of the next cgroup with a quota of CPU time, from this one upwards; its own where none is found.
    pub(crate) fn with_quota(&mut self, id: u64) -> Option<String> {
        let own = self.told(id)?;
        let Some(root) = mounted() else { return Some(own) };
        let has_quota = |path: &&Path| {
            let folder = root.join(path.strip_prefix("/").unwrap_or(path));
            ["cpu.max", "cpu.cfs_quota_us"].iter().any(|file| {
                let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
                text.bytes().next().is_some_and(|byte| byte.is_ascii_digit())
            })
        };
        let found = Path::new(&own).ancestors().find(has_quota).and_then(Path::to_str).map(str::to_owned);
        Some(found.unwrap_or(own))
    }
}

/// Whether the hierarchy is that of a controller of cgroup v1.
pub(crate) fn are_of_v1() -> bool {
    mounted_of_v1(CPU).is_some()
}

/// The path of the calling thread's cgroup in a hierarchy.
pub(crate) fn own_path(hierarchy: &Hierarchy) -> std::io::Result<String> {
    let text = fs::read_to_string("/proc/thread-self/cgroup")?;
    let controller = if hierarchy.is_of_v1 { Some(BLKIO) } else { None };
    let path = text.lines().find_map(|line| path_in_hierarchy(line, controller));
    Ok(path.ok_or(std::io::ErrorKind::NotFound)?.to_owned())
}

/// The number of a cgroup by its path, within the hierarchy or on the file system.
///
/// # Errors
/// When there is no such cgroup.
pub fn id_of(path: &str) -> std::io::Result<u64> {
    let inside = mounted().map(|root| root.join(path.trim_start_matches('/')));
    let found = inside.into_iter().find_map(|path| fs::metadata(path).ok());
    let about = match found {
        Some(about) => about,
        None => fs::metadata(path)?,
    };
    Ok(about.ino())
}

/// For how long the cgroup of a process and those above it have been throttled so far, over all CPUs, by their paths.
pub fn throttled_ns(process: u32) -> Vec<(String, u64)> {
    let (Some(root), Ok(own)) = (mounted(), fs::read_to_string(format!("/proc/{process}/cgroup"))) else {
        return Vec::new();
    };
    let controller = are_of_v1().then_some(CPU);
    let Some(path) = own.lines().find_map(|line| path_in_hierarchy(line, controller)) else { return Vec::new() };
    let of = |folder: &Path| {
        let inside = folder.to_str()?;
        let stat = fs::read_to_string(root.join(inside.trim_start_matches('/')).join("cpu.stat")).ok()?;
        Some((inside.to_owned(), throttled_in(&stat)?))
    };
    Path::new(path).ancestors().filter_map(of).collect()
}

/// Of a line of `/proc/PID/cgroup`: in the hierarchy of a controller of cgroup v1, or in that of cgroup v2.
fn path_in_hierarchy<'a>(line: &'a str, controller: Option<&str>) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let is_it = controller.map_or(number == "0", |wanted| controllers.split(',').any(|name| name == wanted));
    is_it.then_some(path)
}

/// In nanoseconds with v1, in microseconds with v2.
fn throttled_in(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| match line.split_once(' ')? {
        ("throttled_time", ns) => ns.parse().ok(),
        ("throttled_usec", us) => us.parse::<u64>().ok()?.checked_mul(1_000),
        _ => None,
    })
}

fn mounted() -> Option<PathBuf> {
    hierarchy(CPU).map(|hierarchy| hierarchy.root)
}

fn mounted_of_v1(controller: &str) -> Option<PathBuf> {
    mount_of(|kind, options| kind == "cgroup" && options.split(',').any(|option| option == controller))
}

/// Where a file system is mounted, by its kind and options.
fn mount_of(is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mount_in(&fs::read_to_string("/proc/self/mounts").ok()?, is_it)
}

fn mount_in(mounts: &str, is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [_, path, kind, options, ..] if is_it(kind, options) => Some(PathBuf::from(path)),
        _ => None,
    })
}

fn read(controller: &str) -> Read {
    let at = Instant::now();
    let mut path_by_id = HashMap::new();
    if let Some(Hierarchy { root, .. }) = hierarchy(controller) {
        descend(&root, &root, &mut path_by_id);
    }
    Read { path_by_id, at, took: at.elapsed(), is_of_before: false }
}

fn descend(root: &Path, folder: &Path, found: &mut HashMap<u64, String>) {
    let Ok(about) = fs::metadata(folder) else { return };
    let inside = folder.strip_prefix(root).unwrap_or(folder);
    found.insert(about.ino(), format!("/{}", inside.display()));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            descend(root, &entry.path(), found);
        }
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use std::path::Path;

    /// What `cpu.stat`, /proc/PID/cgroup and /proc/self/mounts tell.
    pub fn cgroups(text: &str) {
        super::throttled_in(text);
        for controller in [Some(super::CPU), None] {
            let path = text.lines().find_map(|line| super::path_in_hierarchy(line, controller));
            path.into_iter().flat_map(|path| Path::new(path).ancestors()).for_each(drop);
        }
        super::mount_in(text, |kind, options| {
            kind == "cgroup" && options.split(',').any(|option| option == super::CPU)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_tell_for_how_long_a_cgroup_was_throttled() {
        assert_eq!(throttled_in("nr_periods 5\nnr_throttled 2\nthrottled_time 78000000\n"), Some(78_000_000));
        assert_eq!(throttled_in("usage_usec 9\nthrottled_usec 78000\n"), Some(78_000_000));
        assert_eq!(throttled_in("usage_usec 9\n"), None);
        let lines = ["4:cpu,cpuacct:/a", "1:name=systemd:/b", "0::/c:d"];
        assert_eq!(lines.map(|line| path_in_hierarchy(line, Some(CPU))), [Some("/a"), None, None]);
        assert_eq!(lines.map(|line| path_in_hierarchy(line, Some(BLKIO))), [None, None, None]);
        assert_eq!(lines.map(|line| path_in_hierarchy(line, None)), [None, None, Some("/c:d")]);
    }
}
