// SPDX-License-Identifier: MIT OR Apache-2.0
//! Paths of cgroups by their numbers, which are those of their folders (cgroup v2 on 64-bit kernels).

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The mounted hierarchy, read when the first path is asked for.
#[derive(Debug, Default)]
pub struct Cgroups {
    path_by_id: Option<HashMap<u64, String>>,
}

impl Cgroups {
    /// The path within the hierarchy, such as `/system.slice/ssh.service`; `None` when it is gone.
    pub fn path(&mut self, id: u64) -> Option<String> {
        self.path_by_id.get_or_insert_with(read).get(&id).cloned()
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
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    line.split(' ').nth(1).map(PathBuf::from)
}

fn read() -> HashMap<u64, String> {
    let mut found = HashMap::new();
    if let Some(root) = mounted() {
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
