// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of what requests have as numbers.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::fs::{major, minor};
use whylate_model::thread;

use super::skel::types::{operation, request_facts, request_flag};
use crate::attach;
use crate::cgroups::{self, Cgroups, Hierarchy};
use crate::paths::device_name;
use crate::symbols::KernelSymbols;

/// How many bits of a device's number are its minor one, in the kernel.
const MINOR_BITS: u32 = 20;

/// The kernel's function that writes back what is dirty.
const WRITEBACK: &str = "wb_workfn";

/// Where limits of a cgroup stand, with a line for each disk.
const OF_V2: [&str; 1] = ["io.max"];
const OF_V1: [&str; 4] = [
    "blkio.throttle.read_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.write_iops_device",
];

/// Looks them up on this machine, each once.
pub(super) struct Names {
    symbols: KernelSymbols,
    devices: HashMap<u32, String>,
    /// Whether writeback throttling is on, by device.
    writeback_limits: HashMap<String, bool>,
    cgroups: Cgroups,
    hierarchy: Option<Hierarchy>,
}

impl Names {
    pub fn new(symbols: KernelSymbols) -> Self {
        Names {
            symbols,
            // One that goes away meanwhile keeps its name.
            devices: disks(),
            writeback_limits: HashMap::new(),
            cgroups: Cgroups::of_disks(),
            hierarchy: cgroups::of_disks(),
        }
    }

    pub fn symbols(&mut self) -> &mut KernelSymbols {
        &mut self.symbols
    }

    /// Who submitted it. A worker's name tells nothing, but what it is at does.
    pub fn submitter(&mut self, facts: &request_facts) -> String {
        self.called(facts, facts.tid)
    }

    /// The same with the number of its process.
    pub fn process_of(&mut self, facts: &request_facts) -> String {
        self.called(facts, facts.pid)
    }

    fn called(&mut self, facts: &request_facts, number: u32) -> String {
        if facts.handler == 0 && facts.tid == 0 {
            return "an interrupt".to_owned();
        }
        if facts.handler == 0 {
            return thread::called(&attach::text(&facts.comm), number);
        }
        let frames = self.symbols.stack(&facts.handler.to_ne_bytes());
        match frames.first() {
            Some(function) if function == WRITEBACK => format!("writeback of {}", self.device(facts.device)),
            Some(function) => function.clone(),
            None => thread::called(&attach::text(&facts.comm), number),
        }
    }

    /// What may have kept it from becoming a request; empty where only others may have, who had all of them.
    pub fn held_back_by(&mut self, facts: &request_facts) -> String {
        let device = self.device(facts.device);
        if is_throttled_writeback(facts) && self.has_writeback_limit(&device) {
            format!("writeback throttling of {device}")
        } else {
            String::new()
        }
    }

    fn has_writeback_limit(&mut self, device: &str) -> bool {
        *self.writeback_limits.entry(device.to_owned()).or_insert_with(|| {
            let limit = fs::read_to_string(format!("/sys/block/{device}/queue/wbt_lat_usec"));
            limit.is_ok_and(|limit| limit.trim().parse::<i64>().is_ok_and(|limit_us| limit_us > 0))
        })
    }

    /// The limit that held it back before: of its cgroup, or of one above.
    pub fn limit_of(&mut self, facts: &request_facts) -> String {
        let number = format!("{}:{}", facts.device >> MINOR_BITS, facts.device & ((1 << MINOR_BITS) - 1));
        let (Some(cgroup), Some(hierarchy)) = (self.cgroup(facts.cgroup), &self.hierarchy) else {
            return "a limit of its cgroup".to_owned();
        };
        let (called, files) = if hierarchy.is_of_v1 { ("blkio.throttle", &OF_V1[..]) } else { ("io.max", &OF_V2[..]) };
        let is_of_disk = |limit: &str| limit.split(' ').next() == Some(&number);
        let has_limit = |cgroup: &&Path| {
            let folder = hierarchy.root.join(cgroup.strip_prefix("/").unwrap_or(cgroup));
            let has_line =
                |file: &&str| fs::read_to_string(folder.join(file)).is_ok_and(|limits| limits.lines().any(is_of_disk));
            files.iter().any(has_line)
        };
        let limited = Path::new(&cgroup).ancestors().find(has_limit).and_then(Path::to_str);
        format!("{called} of {}", limited.unwrap_or(&cgroup))
    }

    pub fn device(&mut self, device: u32) -> String {
        if let Some(name) = self.devices.get(&device) {
            return name.clone();
        }
        let name = device_name(device);
        // One that came and went has its number only, which the next one may have with a name.
        if !name.contains(':') {
            self.devices.insert(device, name.clone());
        }
        name
    }

    /// `None` where it is not known.
    pub fn cgroup(&mut self, number: u64) -> Option<String> {
        if number == 0 { None } else { self.cgroups.path_or_placeholder(number) }
    }
}

/// Those that are there, by their numbers in the kernel.
fn disks() -> HashMap<u32, String> {
    let disk = |entry: fs::DirEntry| {
        let numbers = fs::read_to_string(entry.path().join("dev")).ok()?;
        let (major, minor) = numbers.trim().split_once(':')?;
        let number = major.parse::<u32>().ok()? << MINOR_BITS | minor.parse::<u32>().ok()?;
        Some((number, entry.file_name().into_string().ok()?))
    };
    fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(disk).collect()
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
        bail!("{device} is a partition: name its disk instead");
    }
    Ok(major << MINOR_BITS | minor)
}

/// The disk that has a file, by its name in `/dev`: that of its partition.
///
/// # Errors
/// When it is on none, or on more than one (btrfs).
pub fn disk_of(file: &File) -> anyhow::Result<String> {
    let device = file.metadata()?.dev();
    let path = fs::canonicalize(format!("/sys/dev/block/{}:{}", major(device), minor(device)))?;
    let disk = if path.join("partition").exists() { path.parent() } else { Some(path.as_path()) };
    let name = disk.and_then(Path::file_name).context("it has no name")?;
    Ok(name.to_string_lossy().into_owned())
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

/// The error number that programs see for a `blk_status_t` (`blk_errors` in block/blk-core.c); `None` for none. Those from
/// 13 on differ between kernels, and all of them are `EIO` to most.
pub(super) fn error_name(status: i32) -> Option<&'static str> {
    Some(match status {
        0 => return None,
        1 => "EOPNOTSUPP",
        2 => "ETIMEDOUT",
        3 => "ENOSPC",
        4 => "ENOLINK",
        5 => "EREMOTEIO",
        6 => "EBADE",
        7 => "ENODATA",
        8 => "EILSEQ",
        9 => "ENOMEM",
        12 => "EAGAIN",
        _ => "EIO",
    })
}

/// As `wbt_should_throttle` (block/blk-wbt.c): direct writes, which are sync and idle, pass.
fn is_throttled_writeback(facts: &request_facts) -> bool {
    let direct = request_flag::FLAG_SYNC.0 | request_flag::FLAG_IDLE.0;
    match operation(facts.operation) {
        operation::WRITES => facts.flags & direct != direct,
        operation::DISCARDS => true,
        _ => false,
    }
}

/// As blktrace and the kernel's events write it (`blk_fill_rwbs`), such as `WS`, `RA` or `FWFS`.
pub(super) fn flags(facts: &request_facts) -> String {
    let has = |flag: request_flag| facts.flags & flag.0 != 0;
    let letter = match operation(facts.operation) {
        operation::READS => "R",
        operation::WRITES => "W",
        operation::FLUSHES => "F",
        operation::DISCARDS => "D",
        _ => "N",
    };
    let mut text = String::new();
    if has(request_flag::FLAG_PREFLUSH) && letter != "F" {
        text.push('F');
    }
    text.push_str(letter);
    let after = [
        (request_flag::FLAG_FUA, 'F'),
        (request_flag::FLAG_AHEAD, 'A'),
        (request_flag::FLAG_SYNC, 'S'),
        (request_flag::FLAG_META, 'M'),
    ];
    text.extend(after.into_iter().filter(|(flag, _)| has(*flag)).map(|(_, letter)| letter));
    text
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
