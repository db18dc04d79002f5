// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cgroup paths by ID, which is the inode of the cgroup's directory (on 64-bit kernels).
//!
//! Containers are identified in one hierarchy: that of the controller `cpu` of cgroup v1 if there is one, else cgroup
//! v2. Requests are charged and limited in that of `blkio`, and memory in that of `memory`, or else of cgroup v2.

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

use crate::kernel::first_thread;
use crate::kernel::proc;

/// Maximum memory of known paths, in bytes. A user with a delegated subtree can create cgroups without end.
const MAX_PATH_BYTES: usize = 4 << 20;
/// Minimum interval between walks for new cgroups.
const MIN_WALK_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of cgroups that a walk visits: those beyond have no paths.
const MAX_WALKED: usize = 20_000;
/// ID of a session's group (autogroup of cgroup v1), which only threads of the root have.
const SESSION_ID: u64 = 0;
/// Resolving cgroup paths may take at most 1/`SHARE` of wall time.
const SHARE: u32 = 50;

/// Prefix of the name of a cgroup that is gone, or was not found: no path begins so.
const UNKNOWN_PREFIX: &str = "unknown:";

/// Tests whether a name stands for a cgroup without a path.
pub(crate) fn is_unknown(name: &str) -> bool {
    name.starts_with(UNKNOWN_PREFIX)
}

/// The cgroup v1 controller with the hierarchy that identifies containers.
const CPU: &str = "cpu";
/// The cgroup v1 controller of block I/O.
const BLKIO: &str = "blkio";
/// The cgroup v1 controller of memory.
const MEMORY: &str = "memory";

/// Cache of cgroup paths by ID.
///
/// With CAP_DAC_READ_SEARCH the kernel opens a cgroup by its ID. Without it, a bounded number of directories is walked
/// at a bounded rate.
#[derive(Debug)]
pub struct Cgroups {
    controller: &'static str,
    /// `None` before the first lookup.
    hierarchy: Option<Opened>,
    paths: Paths,
}

/// Way in which cgroups are found.
#[derive(Debug)]
enum Opened {
    /// There is no hierarchy.
    None,
    ByHandle(ByHandle),
    ByWalk {
        root: PathBuf,
        /// Start and duration of the last walk.
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
        // Approximate size of a map entry without its text.
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

/// A mounted cgroup hierarchy.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    pub root: PathBuf,
    pub is_of_v1: bool,
}

/// Returns the hierarchy of the cgroups that requests are charged to.
pub(crate) fn of_disks() -> Option<Hierarchy> {
    hierarchy(BLKIO)
}

/// Returns the hierarchy of a cgroup v1 controller if there is one, else cgroup v2.
fn hierarchy(controller: &str) -> Option<Hierarchy> {
    let of_v1 = mounted_of_v1(controller).map(|root| Hierarchy { root, is_of_v1: true });
    of_v1.or_else(|| Some(Hierarchy { root: unified_root()?, is_of_v1: false }))
}

/// Returns the mount point of cgroup v2.
pub(crate) fn unified_root() -> Option<PathBuf> {
    mount_of(|kind, _| kind == "cgroup2")
}

impl Cgroups {
    /// Paths in the hierarchy that requests are charged to.
    pub(crate) fn of_disks() -> Self {
        Cgroups { controller: BLKIO, ..Cgroups::default() }
    }

    /// Paths in the hierarchy that memory is charged to.
    pub(crate) fn of_memory() -> Self {
        Cgroups { controller: MEMORY, ..Cgroups::default() }
    }

    /// Returns the path within the hierarchy, such as `/system.slice/ssh.service`; `None` if the cgroup is gone, or is
    /// outside of this process's cgroup namespace.
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
                let may_walk = last.is_none_or(|(at, took)| at.elapsed() >= MIN_WALK_INTERVAL.max(took * SHARE));
                if may_walk {
                    let at = Instant::now();
                    walk(root, &mut self.paths);
                    *last = Some((at, at.elapsed()));
                }
            }
        }
        self.paths.by_id.get(&id).cloned()
    }

    /// Returns the cgroup's name in causes.
    pub(crate) fn label(&mut self, id: u64) -> String {
        self.path(id).map_or_else(|| format!("cgroup {id}"), |path| format!("cgroup {path}"))
    }

    /// Returns the path of a thread's cgroup, or a placeholder if it is gone; `None` if there is no hierarchy.
    pub(crate) fn path_or_placeholder(&mut self, id: u64) -> Option<String> {
        if id == SESSION_ID {
            return Some("/".to_owned());
        }
        let path = self.path(id);
        let is_mounted = !matches!(self.hierarchy, None | Some(Opened::None));
        path.or_else(|| is_mounted.then(|| format!("{UNKNOWN_PREFIX}{id}")))
    }
}

impl Cgroups {
    /// Returns the path of the nearest cgroup with a quota of CPU time, from this one upwards; its own if none has.
    pub(crate) fn with_quota(&mut self, id: u64) -> Option<String> {
        let own = self.path_or_placeholder(id)?;
        let Some(root) = mounted() else { return Some(own) };
        let has_quota = |path: &&Path| {
            let directory = root.join(path.strip_prefix("/").unwrap_or(path));
            ["cpu.max", "cpu.cfs_quota_us"].iter().any(|file| {
                let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
                text.bytes().next().is_some_and(|byte| byte.is_ascii_digit())
            })
        };
        let found = Path::new(&own).ancestors().find(has_quota).and_then(Path::to_str).map(str::to_owned);
        Some(found.unwrap_or(own))
    }
}

/// Tests whether the hierarchy is that of a cgroup v1 controller.
pub(crate) fn are_of_v1() -> bool {
    mounted_of_v1(CPU).is_some()
}

/// Returns the path of the calling thread's cgroup in a hierarchy.
pub(crate) fn own_path(hierarchy: &Hierarchy) -> std::io::Result<String> {
    let text = proc::text("/proc/thread-self/cgroup")?;
    let controller = if hierarchy.is_of_v1 { Some(BLKIO) } else { None };
    let path = text.lines().find_map(|line| path_in_hierarchy(line, controller));
    Ok(path.ok_or(std::io::ErrorKind::NotFound)?.to_owned())
}

/// Returns the ID of a cgroup by its path, within the hierarchy or on the file system.
///
/// # Errors
/// Fails if there is no such cgroup.
pub fn id_of(path: &str) -> std::io::Result<u64> {
    let inside = mounted().map(|root| root.join(path.trim_start_matches('/')));
    let found = inside.into_iter().find_map(|path| fs::metadata(path).ok());
    let about = match found {
        Some(about) => about,
        None => fs::metadata(path)?,
    };
    Ok(about.ino())
}

/// Returns how long the cgroup of a process and its ancestors have been throttled so far, over all CPUs, by path.
pub fn throttled_ns(process: u32) -> Vec<(String, u64)> {
    let shown = first_thread::shown_as(process);
    let (Some(root), Ok(own)) = (mounted(), proc::text(format!("/proc/{shown}/cgroup"))) else {
        return Vec::new();
    };
    let controller = are_of_v1().then_some(CPU);
    let Some(path) = own.lines().find_map(|line| path_in_hierarchy(line, controller)) else { return Vec::new() };
    let of = |directory: &Path| {
        let inside = directory.to_str()?;
        let stat = fs::read_to_string(root.join(inside.trim_start_matches('/')).join("cpu.stat")).ok()?;
        Some((inside.to_owned(), throttled_in(&stat)?))
    };
    Path::new(path).ancestors().filter_map(of).collect()
}

/// Returns the path of a thread's cgroup in the hierarchy that identifies containers; `None` if the thread has exited.
pub fn path_of_thread(tid: u32) -> Option<String> {
    let of_thread = proc::text(format!("/proc/{tid}/cgroup")).ok()?;
    let controller = are_of_v1().then_some(CPU);
    let path = of_thread.lines().find_map(|line| path_in_hierarchy(line, controller))?;
    Some(into_bounded(path.to_owned()))
}

/// Parses a line of `/proc/PID/cgroup`: returns the path if the hierarchy is that of the cgroup v1 controller, or
/// cgroup v2.
fn path_in_hierarchy<'a>(line: &'a str, controller: Option<&str>) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let is_it = controller.map_or(number == "0", |wanted| controllers.split(',').any(|name| name == wanted));
    is_it.then_some(path)
}

/// Parses `cpu.stat`, which has nanoseconds with v1 and microseconds with v2.
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

/// Returns the mount point of a file system, by its type and options.
fn mount_of(is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    mount_in(&proc::text("/proc/self/mounts").ok()?, is_it)
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

    /// Parses `cpu.stat`, /proc/PID/cgroup and /proc/self/mounts.
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

    /// Creates a cgroup below the root; `None` without the privilege.
    fn made() -> Option<(PathBuf, String)> {
        let root = mounted()?;
        let name = format!("/whylate-{}-{:?}", std::process::id(), std::thread::current().id()).replace(['(', ')'], "");
        let directory = root.join(name.trim_start_matches('/'));
        fs::create_dir(&directory).ok().map(|()| (directory, name))
    }

    #[test]
    fn finds_cgroup_by_id() {
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
        // Root may open files by handles, except in a user namespace of its own.
        assert!(is_by_handle || !rustix::process::geteuid().is_root(), "directories are walked");
    }

    #[test]
    fn path_cache_is_bounded() {
        let mut paths = Paths::default();
        for id in 0..3_000 {
            paths.add(id, "/a".repeat(10_000));
            assert!(paths.bytes <= MAX_PATH_BYTES + 5_000);
        }
        assert_eq!(paths.by_id[&2_999].len(), whylate_model::name::MAX_BYTES);
    }

    #[test]
    fn limits_rate_of_walks() {
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
    fn thread_has_the_path_of_its_cgroup() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let of_thread = path_of_thread(thread);
        let listed = fs::read_to_string("/proc/thread-self/cgroup").expect("a thread");
        assert!(
            of_thread.as_ref().is_some_and(|path| listed.lines().any(|line| line.ends_with(&format!(":{path}")))),
            "{of_thread:?}: {listed}"
        );
        assert_eq!(path_of_thread(u32::MAX), None);
    }

    #[test]
    fn parses_throttled_time_of_both_versions() {
        assert_eq!(throttled_in("nr_periods 5\nnr_throttled 2\nthrottled_time 78000000\n"), Some(78_000_000));
        assert_eq!(throttled_in("usage_usec 9\nthrottled_usec 78000\n"), Some(78_000_000));
        assert_eq!(throttled_in("usage_usec 9\n"), None);
        let lines = ["4:cpu,cpuacct:/a", "1:name=systemd:/b", "0::/c:d"];
        assert_eq!(lines.map(|line| path_in_hierarchy(line, Some(CPU))), [Some("/a"), None, None]);
        assert_eq!(lines.map(|line| path_in_hierarchy(line, Some(BLKIO))), [None, None, None]);
        assert_eq!(lines.map(|line| path_in_hierarchy(line, None)), [None, None, Some("/c:d")]);
    }
}
