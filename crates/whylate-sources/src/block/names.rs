// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of devices, cgroups, operations, flags and errors of requests.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::fs::{major, minor};
use whylate_model::ActorName;

use super::skel::types::{operation, request_facts, request_flag};
use crate::kernel::attach;
use crate::kernel::cgroups::{self, Cgroups, Hierarchy};
use crate::kernel::symbols::KernelSymbols;
use crate::paths::device_name;

/// Number of bits of the minor number in the kernel's `dev_t`.
const MINOR_BITS: u32 = 20;

/// Work function of the kernel's writeback.
const WRITEBACK: &str = "wb_workfn";

/// Files with the I/O limits of a cgroup, a line for each disk.
const LIMIT_FILES_V2: [&str; 1] = ["io.max"];
const LIMIT_FILES_V1: [&str; 4] = [
    "blkio.throttle.read_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.write_iops_device",
];

/// Looks up names on this machine, and caches them.
pub(super) struct RequestNames {
    symbols: KernelSymbols,
    devices: HashMap<u32, String>,
    /// Whether writeback throttling is on, by device.
    writeback_limits: HashMap<String, bool>,
    cgroups: Cgroups,
    hierarchy: Option<Hierarchy>,
}

impl RequestNames {
    pub fn new(symbols: KernelSymbols) -> Self {
        RequestNames {
            symbols,
            // A disk that is removed later keeps its name.
            devices: disks(),
            writeback_limits: HashMap::new(),
            cgroups: Cgroups::of_disks(),
            hierarchy: cgroups::of_disks(),
        }
    }

    pub fn symbols(&mut self) -> &mut KernelSymbols {
        &mut self.symbols
    }

    /// Names the submitting thread; a kworker by its work function, as its comm says nothing.
    pub fn submitter(&mut self, facts: &request_facts) -> ActorName {
        self.owner_name(facts, facts.tid)
    }

    /// Names the submitting process; a kworker by its work function.
    pub fn process_of(&mut self, facts: &request_facts) -> ActorName {
        self.owner_name(facts, facts.pid)
    }

    fn owner_name(&mut self, facts: &request_facts, number: u32) -> ActorName {
        if facts.handler == 0 && facts.tid == 0 {
            return "an interrupt".into();
        }
        if facts.handler == 0 {
            return ActorName::thread(attach::text(&facts.comm), number);
        }
        let frames = self.symbols.stack(&facts.handler.to_ne_bytes());
        match frames.first() {
            Some(function) if function == WRITEBACK => format!("writeback of {}", self.device(facts.device)).into(),
            Some(function) => function.as_str().into(),
            None => ActorName::thread(attach::text(&facts.comm), number),
        }
    }

    /// Returns the causes that may have delayed the allocation of the request; empty if only processes that had all
    /// requests may have.
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

    /// Returns the limit that held the bio back: of its cgroup, or of an ancestor.
    pub fn limit_of(&mut self, facts: &request_facts) -> String {
        let number = format!("{}:{}", facts.device >> MINOR_BITS, facts.device & ((1 << MINOR_BITS) - 1));
        let (Some(cgroup), Some(hierarchy)) = (self.cgroup(facts.cgroup), &self.hierarchy) else {
            return "a limit of its cgroup".to_owned();
        };
        let (called, files) =
            if hierarchy.is_of_v1 { ("blkio.throttle", &LIMIT_FILES_V1[..]) } else { ("io.max", &LIMIT_FILES_V2[..]) };
        let is_of_disk = |limit: &str| limit.split(' ').next() == Some(&number);
        let has_limit = |cgroup: &&Path| {
            let directory = hierarchy.root.join(cgroup.strip_prefix("/").unwrap_or(cgroup));
            let has_line = |file: &&str| {
                fs::read_to_string(directory.join(file)).is_ok_and(|limits| limits.lines().any(is_of_disk))
            };
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
        // The number of a disk without a name may be reused by one with a name.
        if !name.contains(':') {
            self.devices.insert(device, name.clone());
        }
        name
    }

    /// Returns the path of a cgroup; `None` if unknown.
    pub fn cgroup(&mut self, number: u64) -> Option<String> {
        if number == 0 { None } else { self.cgroups.path_or_placeholder(number) }
    }
}

/// Reads the disks that exist, by their kernel `dev_t`.
fn disks() -> HashMap<u32, String> {
    let disk = |entry: fs::DirEntry| {
        let numbers = fs::read_to_string(entry.path().join("dev")).ok()?;
        let (major, minor) = numbers.trim().split_once(':')?;
        let number = major.parse::<u32>().ok()? << MINOR_BITS | minor.parse::<u32>().ok()?;
        Some((number, entry.file_name().into_string().ok()?))
    };
    fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(disk).collect()
}

/// Returns the kernel `dev_t` of a device, by its name or path.
///
/// # Errors
/// Fails if there is no such device, or it is a partition.
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

/// Returns the disk that holds a file, by its name in `/dev`; for a partition, the whole disk.
///
/// # Errors
/// Fails if the file is on no disk, or on more than one (btrfs).
pub fn disk_of(file: &File) -> anyhow::Result<String> {
    let device = file.metadata()?.dev();
    let path = fs::canonicalize(format!("/sys/dev/block/{}:{}", major(device), minor(device)))?;
    let disk = if path.join("partition").exists() { path.parent() } else { Some(path.as_path()) };
    let name = disk.and_then(Path::file_name).context("it has no name")?;
    Ok(name.to_string_lossy().into_owned())
}

/// Returns the name of an operation.
pub(super) fn operation_name(number: u32) -> &'static str {
    match operation(number) {
        operation::READS => "read",
        operation::WRITES => "write",
        operation::FLUSHES => "flush",
        operation::DISCARDS => "discard",
        _ => "other",
    }
}

/// Returns the errno that programs see for a `blk_status_t` (`blk_errors` in block/blk-core.c); `None` for success.
/// Codes from 13 on differ between kernels, and most kernels map them to `EIO`.
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

/// Returns whether writeback throttling applies, as `wbt_should_throttle` (block/blk-wbt.c): direct writes, which have
/// REQ_SYNC and REQ_IDLE, pass.
fn is_throttled_writeback(facts: &request_facts) -> bool {
    let direct = request_flag::FLAG_SYNC.0 | request_flag::FLAG_IDLE.0;
    match operation(facts.operation) {
        operation::WRITES => facts.flags & direct != direct,
        operation::DISCARDS => true,
        _ => false,
    }
}

/// Formats flags as blktrace and the kernel's tracepoints do (`blk_fill_rwbs`), such as `WS`, `RA` or `FWFS`.
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

/// Returns the plural name of an operation.
pub(super) fn plural(number: u32) -> &'static str {
    match operation(number) {
        operation::READS => "reads",
        operation::WRITES => "writes",
        operation::FLUSHES => "flushes",
        operation::DISCARDS => "discards",
        _ => "other requests",
    }
}
