// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of cgroups by their numbers, which are those of their folders (cgroup v2 on 64-bit kernels).

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the folders are gone through again at most, for cgroups that are made meanwhile.
const AGAIN: Duration = Duration::from_secs(1);

/// The mounted hierarchies, read when the first path is asked for.
#[derive(Debug, Default)]
pub struct Cgroups {
    path_by_id: Option<HashMap<u64, String>>,
    /// Of the hierarchy by which CPUs are shared out, and when it was read.
    of_cpu: Option<(HashMap<u64, String>, Instant)>,
}

impl Cgroups {
    /// The path within the hierarchy, such as `/system.slice/ssh.service`; `None` when it is gone.
    pub fn path(&mut self, id: u64) -> Option<String> {
        self.path_by_id.get_or_insert_with(|| read(mounted())).get(&id).cloned()
    }

    /// The same within the hierarchy of the controller `cpu`.
    pub(crate) fn path_of_cpu(&mut self, id: u64) -> Option<String> {
        let fresh = || (read(mounted_of_cpu()), Instant::now());
        let (paths, at) = self.of_cpu.get_or_insert_with(fresh);
        if !paths.contains_key(&id) && at.elapsed() >= AGAIN {
            (*paths, *at) = fresh();
        }
        paths.get(&id).cloned()
    }
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

/// Where cgroup v2 is mounted.
fn mounted() -> Option<PathBuf> {
    mount_of(|kind, _| kind == "cgroup2")
}

/// Where the controller `cpu` is: a hierarchy of its own (cgroup v1), or cgroup v2.
fn mounted_of_cpu() -> Option<PathBuf> {
    mount_of(|kind, options| kind == "cgroup" && options.split(',').any(|option| option == "cpu")).or_else(mounted)
}

/// Where a file system is mounted, by its kind and options.
fn mount_of(is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [_, path, kind, options, ..] if is_it(kind, options) => Some(PathBuf::from(path)),
        _ => None,
    })
}

fn read(root: Option<PathBuf>) -> HashMap<u64, String> {
    let mut found = HashMap::new();
    if let Some(root) = root {
        descend(&root, &root, &mut found);
    }
    found
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
