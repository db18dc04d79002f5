// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of cgroups by their numbers, which are the inodes of their directories (on 64-bit kernels).
//!
//! A machine has one hierarchy by which containers are told: the one of the controller `cpu` of cgroup v1 where there is
//! one, else cgroup v2. What a request is charged to, and who limits it, is in that of `blkio` or else of cgroup v2.

mod by_handle;
mod frozen;

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use whylate_model::name::into_bounded;

use by_handle::ByHandle;
pub(crate) use frozen::is_frozen;

use crate::first_thread;

/// The memory that known paths take at most. A user with a subtree of its own can make cgroups without end.
const MAX_PATH_BYTES: usize = 4 << 20;
/// How often directories are walked again at most, for new cgroups.
const AGAIN: Duration = Duration::from_millis(50);
/// The most cgroups that a walk visits: those beyond have no paths.
const MAX_WALKED: usize = 20_000;
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

/// Paths of cgroups by their numbers, each of which is looked up once.
///
/// With CAP_DAC_READ_SEARCH the kernel opens a cgroup by its number. Without it, a bounded number of directories is walked
/// at a bounded rate.
#[derive(Debug)]
pub struct Cgroups {
    controller: &'static str,
    /// `None` before the first path is asked for.
    hierarchy: Option<Opened>,
    paths: Paths,
}

/// How cgroups are found.
#[derive(Debug)]
enum Opened {
    /// There is no hierarchy.
    None,
    ByHandle(ByHandle),
    ByWalk {
        root: PathBuf,
        /// When the last walk began, and how long it took.
        last: Option<(Instant, Duration)>,
    },
}

#[derive(Debug, Default)]
struct Paths {
    by_id: HashMap<u64, String>,
    bytes: usize,
}

impl Paths {
    fn add(&mut self, id: u64, path: String) {
        if self.bytes > MAX_PATH_BYTES {
            *self = Paths::default();
        }
        let path = into_bounded(path);
        // What a map's entry takes, beside its text.
        self.bytes += path.len() + 64;
        self.by_id.insert(id, path);
    }
}

impl Opened {
    fn new(controller: &str) -> Self {
        match hierarchy(controller) {
            None => Opened::None,
            Some(Hierarchy { root, .. }) => match ByHandle::new(&root) {
                Some(by_handle) => Opened::ByHandle(by_handle),
                None => Opened::ByWalk { root, last: None },
            },
        }
    }
}

impl Default for Cgroups {
    fn default() -> Self {
        Cgroups { controller: CPU, hierarchy: None, paths: Paths::default() }
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

impl Cgroups {
    /// Those that requests are charged to.
    pub(crate) fn of_disks() -> Self {
        Cgroups { controller: BLKIO, ..Cgroups::default() }
    }

    /// The path within the hierarchy, such as `/system.slice/ssh.service`; `None` when it is gone, or is outside the
    /// cgroup namespace of this process.
    pub fn path(&mut self, id: u64) -> Option<String> {
        if let Some(path) = self.paths.by_id.get(&id) {
            return Some(path.clone());
        }
        match self.hierarchy.get_or_insert_with(|| Opened::new(self.controller)) {
            Opened::None => {}
            Opened::ByHandle(by_handle) => {
                if let Some(path) = by_handle.path(id) {
                    self.paths.add(id, path);
                }
            }
            Opened::ByWalk { root, last } => {
                let may_walk = last.is_none_or(|(at, took)| at.elapsed() >= AGAIN.max(took * SHARE));
                if may_walk {
                    let at = Instant::now();
                    walk(root, &mut self.paths);
                    *last = Some((at, at.elapsed()));
                }
            }
        }
        self.paths.by_id.get(&id).cloned()
    }

    /// As causes name it.
    pub(crate) fn called(&mut self, id: u64) -> String {
        self.path(id).map_or_else(|| format!("cgroup {id}"), |path| format!("cgroup {path}"))
    }

    /// The same of a thread's cgroup, also of one that is gone; `None` where there is no hierarchy.
    pub(crate) fn told(&mut self, id: u64) -> Option<String> {
        if id == OF_SESSION {
            return Some("/".to_owned());
        }
        let path = self.path(id);
        let is_mounted = !matches!(self.hierarchy, None | Some(Opened::None));
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
    let shown = first_thread::shown_as(process);
    let (Some(root), Ok(own)) = (mounted(), fs::read_to_string(format!("/proc/{shown}/cgroup"))) else {
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

/// Adds the paths of all cgroups, breadth first: those of containers are near the root.
fn walk(root: &Path, paths: &mut Paths) {
    let mut directories = std::collections::VecDeque::from([root.to_owned()]);
    let mut visited = 0;
    *paths = Paths::default();
    while let Some(directory) = directories.pop_front() {
        visited += 1;
        if visited > MAX_WALKED || paths.bytes > MAX_PATH_BYTES {
            return;
        }
        let Ok(about) = fs::metadata(&directory) else { continue };
        let inside = directory.strip_prefix(root).unwrap_or(&directory);
        paths.add(about.ino(), format!("/{}", inside.display()));
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if directories.len() < MAX_WALKED && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push_back(entry.path());
            }
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

    /// A cgroup below this process's own, or the root's where that has processes; `None` without the privilege.
    fn made() -> Option<(PathBuf, String)> {
        let root = mounted()?;
        let name = format!("/whylate-{}-{:?}", std::process::id(), std::thread::current().id()).replace(['(', ')'], "");
        let directory = root.join(name.trim_start_matches('/'));
        fs::create_dir(&directory).ok().map(|()| (directory, name))
    }

    #[test]
    fn a_cgroup_is_found_by_its_number_however_many_there_are() {
        let Some(root) = mounted() else { return };
        let mut by_handle = Cgroups::default();
        by_handle.path(1);
        let is_by_handle = matches!(by_handle.hierarchy, Some(Opened::ByHandle(_)));
        let mut by_walk = Cgroups { hierarchy: Some(Opened::ByWalk { root, last: None }), ..Cgroups::default() };
        let Some((directory, name)) = made() else { return };
        let id = fs::metadata(&directory).expect("it is there").ino();
        let found = [&mut by_handle, &mut by_walk].map(|cgroups| cgroups.path(id));
        let gone = [&mut by_handle, &mut by_walk].map(|cgroups| cgroups.path(u64::MAX / 3));
        fs::remove_dir(&directory).expect("it is empty");
        assert_eq!(found, [Some(name.clone()), Some(name.clone())]);
        assert_eq!(gone, [None, None]);
        assert_eq!(by_handle.path(id), Some(name), "it was known before it went");
        assert_eq!(Cgroups::default().path(id), None);
        // Root may open files by handles, but in a user namespace of its own.
        assert!(is_by_handle || !rustix::process::geteuid().is_root(), "directories are walked");
    }

    #[test]
    fn known_paths_take_bounded_memory() {
        let mut paths = Paths::default();
        for id in 0..3_000 {
            paths.add(id, "/a".repeat(10_000));
            assert!(paths.bytes <= MAX_PATH_BYTES + 5_000);
        }
        assert_eq!(paths.by_id[&2_999].len(), whylate_model::name::MAX_BYTES);
    }

    #[test]
    fn directories_are_not_walked_for_each_unknown_cgroup() {
        let directory = tempfile::tempdir().expect("a directory");
        let last = Some((Instant::now(), Duration::from_secs(1)));
        let opened = Opened::ByWalk { root: directory.path().to_owned(), last };
        let mut cgroups = Cgroups { hierarchy: Some(opened), ..Cgroups::default() };
        let id = fs::metadata(directory.path()).expect("it is there").ino();
        assert_eq!(cgroups.path(id), None, "a walk takes a fiftieth of the time at most");
        if let Some(Opened::ByWalk { last, .. }) = &mut cgroups.hierarchy {
            *last = None;
        }
        assert_eq!(cgroups.path(id).as_deref(), Some("/"));
    }

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
