// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of what requests have as numbers.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::fs::{major, minor};
use whylate_model::thread;

use super::skel::types::{operation, request_facts};
use crate::attach;
use crate::cgroups::{self, Cgroups};
use crate::paths::device_name;

/// How many bits of a device's number are its minor one, in the kernel.
const MINOR_BITS: u32 = 20;

/// Looks them up on this machine, each once.
#[derive(Debug, Default)]
pub(super) struct Names {
    devices: HashMap<u32, String>,
    cgroups: Cgroups,
    /// The controller `io` of cgroup v1 has a hierarchy of its own, of which nothing is known here.
    has_no_cgroups: bool,
}

impl Names {
    pub fn new() -> Self {
        Names { has_no_cgroups: cgroups::are_of_v1(), ..Names::default() }
    }

    pub fn device(&mut self, device: u32) -> String {
        self.devices.entry(device).or_insert_with(|| device_name(device)).clone()
    }

    /// `None` where it is not known.
    pub fn cgroup(&mut self, number: u64) -> Option<String> {
        if number == 0 || self.has_no_cgroups { None } else { self.cgroups.told(number) }
    }
}

/// A device's number in the kernel, by its name or path.
///
/// # Errors
/// When there is no such device.
pub(super) fn number_of(device: &str) -> anyhow::Result<u32> {
    let path = if device.starts_with('/') { Path::new(device).to_owned() } else { Path::new("/dev").join(device) };
    let about = fs::metadata(&path).with_context(|| format!("there is no block device {device} (see `lsblk`)"))?;
    if !about.file_type().is_block_device() {
        bail!("{device} is not a block device (see `lsblk`)");
    }
    let (major, minor) = (major(about.rdev()), minor(about.rdev()));
    if Path::new(&format!("/sys/dev/block/{major}:{minor}/partition")).exists() {
        bail!("{device} is a partition: name its disk, to which all requests go");
    }
    Ok(major << MINOR_BITS | minor)
}

/// What a request does, in a word.
pub(super) fn operation_name(number: u32) -> &'static str {
    match operation(number) {
        operation::READS => "read",
        operation::WRITES => "write",
        operation::FLUSHES => "flush",
        operation::DISCARDS => "discard",
        _ => "other",
    }
}

/// Who submitted it.
pub(super) fn submitter(facts: &request_facts) -> String {
    thread::called(&attach::text(&facts.comm), facts.tid)
}

/// The same of several.
pub(super) fn plural(number: u32) -> &'static str {
    match operation(number) {
        operation::READS => "reads",
        operation::WRITES => "writes",
        operation::FLUSHES => "flushes",
        operation::DISCARDS => "discards",
        _ => "other requests",
    }
}
