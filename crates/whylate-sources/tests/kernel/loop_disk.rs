// SPDX-License-Identifier: MIT OR Apache-2.0
//! A disk that no other process uses, on any machine: a loop device on a file.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;
use whylate_sources::block::disk_of;

/// The loop device, detached on drop.
pub struct Loop {
    pub name: String,
    /// The disk of the backing file.
    pub disk: String,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    pub fn make(mib: usize) -> Result<Option<Loop>> {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR"))?;
        fs::write(file.path(), vec![7; mib << 20])?;
        file.as_file().sync_all()?;
        let Ok(disk) = disk_of(file.as_file()) else {
            println!("skipped: the build folder is on no disk");
            return Ok(None);
        };
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--partscan", "--direct-io=on"]).arg(file.path());
        let Some(made) = losetup.output().ok().filter(|made| made.status.success()) else {
            println!("skipped: there is no loop device with direct I/O");
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&made.stdout).trim().trim_start_matches("/dev/").to_owned();
        let made = Loop { name, disk, _file: file };
        made.settle();
        Ok(Some(made))
    }

    /// Waits until udev has probed the new device.
    fn settle(&self) {
        let _ = Command::new("udevadm").arg("settle").stderr(Stdio::null()).status();
    }

    pub fn path(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Adds a partition from this sector to the end of the device. Returns `None`, and prints why, if there can be
    /// none.
    pub fn add_partition(&self, from: u64) -> Result<Option<String>> {
        let size: u64 = fs::read_to_string(format!("/sys/block/{}/size", self.name))?.trim().parse()?;
        let mut add = Command::new("addpart");
        add.arg(self.path()).args(["1", &from.to_string(), &(size - from).to_string()]);
        let partition = format!("{}p1", self.path());
        if !add.status().is_ok_and(|added| added.success()) || !Path::new(&partition).exists() {
            println!("skipped: a loop device has no partitions here");
            return Ok(None);
        }
        self.settle();
        Ok(Some(partition))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("delpart").arg(self.path()).arg("1").stderr(Stdio::null()).status();
        let _ = Command::new("losetup").arg("--detach").arg(self.path()).status();
    }
}
