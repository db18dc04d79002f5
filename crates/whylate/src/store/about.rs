// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine that a recording was made on.

use std::fs;

use jiff::tz::TimeZone;
use whylate_model::recording::{Clock, FORMAT, Header, Measured};
use whylate_model::snapshot::SCHEMA;
use whylate_sources::kernel::{clock, cpus, host, pid_namespace};

/// Returns a header of this machine, without sources.
pub fn this_machine() -> Header {
    let uname = rustix::system::uname();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    Header {
        recording: FORMAT,
        schema: SCHEMA,
        whylate: env!("CARGO_PKG_VERSION").to_owned(),
        start_unix_ns: clock::unix_ns(),
        host: host::name(),
        kernel: uname.release().to_string_lossy().into_owned(),
        boot_id: boot_id.trim().to_owned(),
        cpus: cpus::online().map_or(0, |cpus| cpus.len() as u32),
        pid_namespace: pid_namespace::own(),
        time_zone: TimeZone::system().iana_name().unwrap_or_default().to_owned(),
        ..Header::default()
    }
}

/// Returns a header for one source.
pub fn of_one(source: &str, backend: &str, late_from_ns: Option<u64>) -> Header {
    let measured = Measured { source: source.to_owned(), backend: backend.to_owned(), late_from_ns, nothing: None };
    Header { sources: vec![measured], ..this_machine() }
}

/// Reads all clocks.
pub fn now() -> Clock {
    Clock { at_unix_ns: clock::unix_ns(), monotonic_ns: clock::monotonic_ns(), boottime_ns: clock::boot_ns() }
}
