// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cgroup with a quota of a fifth of a CPU, as of a container. Not every test program uses everything.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};

const QUOTA_US: u32 = 20_000;
const PERIOD_US: u32 = 100_000;

/// Removed on drop.
pub struct Quota(PathBuf);

impl Quota {
    /// Returns `None` and prints why if this would need changes to the hierarchies.
    pub fn make(name: &str) -> Result<Option<Self>> {
        let name = format!("whylate-{name}-{}", std::process::id());
        for parent in ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"].map(Path::new) {
            if parent.join("cgroup.procs").exists() {
                fs::create_dir(parent.join(&name))?;
                let made = Quota(parent.join(&name));
                if fs::write(made.0.join("cpu.cfs_quota_us"), QUOTA_US.to_string()).is_ok() {
                    return Ok(Some(made));
                }
            }
        }
        let unified = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(unified.join("cgroup.subtree_control")).unwrap_or_default();
        if controllers.split_whitespace().any(|name| name == "cpu") {
            fs::create_dir(unified.join(&name))?;
            let made = Quota(unified.join(&name));
            fs::write(made.0.join("cpu.max"), format!("{QUOTA_US} {PERIOD_US}"))?;
            return Ok(Some(made));
        }
        println!("skipped: no cgroup may have a quota of CPU time here");
        Ok(None)
    }

    /// Returns the file of the real-time runtime per second, if the kernel limits it by cgroup.
    pub fn of_real_time(&self) -> Option<PathBuf> {
        Some(self.0.join("cpu.rt_runtime_us")).filter(|file| file.exists())
    }

    /// Returns the name that causes have for it.
    pub fn name(&self) -> String {
        format!("cgroup /{}", self.0.file_name().map(|name| name.to_string_lossy()).unwrap_or_default())
    }

    /// Returns the throttled time over all CPUs: in nanoseconds with v1, in microseconds with v2.
    pub fn throttled_ns(&self) -> Result<u64> {
        let stat = fs::read_to_string(self.0.join("cpu.stat"))?;
        let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        let ns = of("throttled_time ").or_else(|| of("throttled_usec ").map(|us| us * 1_000));
        ns.context("the kernel does not count throttled time")
    }

    /// Returns the shell command that enters the cgroup.
    pub fn enter(&self) -> String {
        format!("echo $$ >{}/cgroup.procs", self.0.display())
    }
}

impl Drop for Quota {
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
