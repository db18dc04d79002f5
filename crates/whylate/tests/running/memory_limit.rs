// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cgroup that may use little memory, as of a container. Not every test program uses everything.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;

/// Removed on drop.
pub struct MemoryLimit(PathBuf);

impl MemoryLimit {
    /// Returns `None` and prints why if this would need changes to the hierarchies.
    pub fn make(name: &str, limit_bytes: u64) -> Result<Option<Self>> {
        let name = format!("whylate-{name}-{}", std::process::id());
        let unified = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(unified.join("cgroup.subtree_control")).unwrap_or_default();
        let has_unified = controllers.split_whitespace().any(|name| name == "memory");
        let first = unified.join("memory");
        let (parent, file) = match has_unified {
            true => (unified, "memory.max"),
            false if first.join("cgroup.procs").exists() => (first.as_path(), "memory.limit_in_bytes"),
            false => {
                println!("skipped: no cgroup may have a limit of memory here");
                return Ok(None);
            }
        };
        fs::create_dir(parent.join(&name))?;
        let made = MemoryLimit(parent.join(&name));
        fs::write(made.0.join(file), limit_bytes.to_string())?;
        Ok(Some(made))
    }

    /// Returns the path of a file of the cgroup.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the path within its hierarchy.
    pub fn path(&self) -> String {
        format!("/{}", self.0.file_name().unwrap_or_default().display())
    }

    /// Returns the shell command that enters the cgroup.
    pub fn enter(&self) -> String {
        format!("echo $$ >{}/cgroup.procs", self.0.display())
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // A process that was in the cgroup may still be exiting.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }
}
