// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes packets and describes the tracks that they are on.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write as _};

use prost::Message as _;
use whylate_model::recording::Clock;
use whylate_model::units::printable;

use super::proto::{
    self, BEGIN, BOOTTIME, COUNTER, ClockSnapshot, CounterDescriptor, END, INSTANT, MONOTONIC, NANOSECONDS,
    ProcessDescriptor, REALTIME, ThreadDescriptor, TracePacket, TrackDescriptor, TrackEvent,
};
use crate::files::PendingFile;

/// One sequence for all packets keeps those of equal timestamps in order.
const SEQUENCE: u32 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED` of the first packet: it needs no earlier one.
const CLEARED: u32 = 1;
/// Tag of the field `Trace.packet`: number 1, length-delimited.
const PACKET: u8 = 1 << 3 | 2;

/// A thread of a known process. Tracks of it from other traces of the machine can be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread<'a> {
    pub pid: i32,
    pub tid: i64,
    pub name: &'a str,
    pub process: &'a str,
}

/// Writes packets one by one, so that a truncated file can be read up to its end.
pub struct Packets {
    out: PendingFile,
    has_packets: bool,
    clock: Option<Clock>,
    /// Time of the last clock snapshot in the trace.
    clock_snapshot_ns: Option<u64>,
    /// UUIDs of tracks that were described.
    described: HashSet<u64>,
    /// Ends of the last slices on the tracks of a group, for slices that may overlap.
    track_ends: HashMap<u64, Vec<u64>>,
}

impl Packets {
    pub fn new(out: PendingFile) -> Self {
        Packets {
            out,
            has_packets: false,
            clock: None,
            clock_snapshot_ns: None,
            described: HashSet::new(),
            track_ends: HashMap::new(),
        }
    }

    pub fn end(self) -> io::Result<()> {
        self.out.end()
    }

    fn write(&mut self, mut packet: TracePacket) -> io::Result<()> {
        packet.trusted_packet_sequence_id = SEQUENCE;
        packet.sequence_flags = if self.has_packets { 0 } else { CLEARED };
        self.has_packets = true;
        let mut bytes = vec![PACKET];
        packet.encode_length_delimited(&mut bytes)?;
        self.out.write_all(&bytes)
    }

    /// Sets the clocks for the following timestamps, and writes a clock snapshot.
    pub fn clock(&mut self, clock: &Clock) -> io::Result<()> {
        self.clock = Some(*clock);
        // Readers reject clock snapshots that are not newer than the last one.
        if self.clock_snapshot_ns.is_some_and(|clock_snapshot_ns| clock.boottime_ns <= clock_snapshot_ns) {
            return Ok(());
        }
        self.clock_snapshot_ns = Some(clock.boottime_ns);
        let clocks_ns = [(BOOTTIME, clock.boottime_ns), (MONOTONIC, clock.monotonic_ns), (REALTIME, clock.at_unix_ns)];
        let clocks = clocks_ns.map(|(clock_id, timestamp)| proto::Clock { clock_id, timestamp });
        let clock_snapshot = ClockSnapshot { clocks: clocks.into(), primary_trace_clock: BOOTTIME };
        self.write(TracePacket { clock_snapshot: Some(clock_snapshot), ..TracePacket::default() })
    }

    pub fn has_clock(&self) -> bool {
        self.clock.is_some()
    }

    /// Converts a wall-clock time to CLOCK_BOOTTIME, the clock of traces: it continues while the machine is suspended
    /// and is never set.
    pub fn boot_ns(&self, unix_ns: u64) -> u64 {
        let Some(clock) = self.clock else { return unix_ns };
        let since = i128::from(unix_ns) - i128::from(clock.at_unix_ns);
        u64::try_from(i128::from(clock.boottime_ns) + since).unwrap_or(0)
    }

    fn describe(&mut self, descriptor: TrackDescriptor) -> io::Result<u64> {
        let uuid = descriptor.uuid;
        if self.described.insert(uuid) {
            self.write(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() })?;
        }
        Ok(uuid)
    }

    /// Describes a track without a parent. Returns its UUID.
    pub fn root(&mut self, name: &str) -> io::Result<u64> {
        let uuid = hash(&["root", name]);
        self.describe(TrackDescriptor { uuid, name: printable(name), ..TrackDescriptor::default() })
    }

    /// Describes the track of a thread. Returns its UUID.
    pub fn thread(&mut self, thread: Thread<'_>) -> io::Result<u64> {
        let Thread { pid, tid, name, process } = thread;
        let process_name = printable(process);
        let uuid = hash(&["process", &pid.to_string()]);
        let of_process = Some(ProcessDescriptor { pid, process_name });
        self.describe(TrackDescriptor { uuid, process: of_process, ..TrackDescriptor::default() })?;
        let uuid = hash(&["thread", &pid.to_string(), &tid.to_string()]);
        let of_thread = Some(ThreadDescriptor { pid, tid, thread_name: printable(name) });
        self.describe(TrackDescriptor { uuid, thread: of_thread, ..TrackDescriptor::default() })
    }

    /// Returns the UUID of a track `name` below `parent` that is free from `from_ns` to `to_ns`. Overlapping slices go
    /// to several tracks of one name, which Perfetto shows as one, because slices of a track must nest.
    pub fn overlap_track(&mut self, parent: u64, name: &str, from_ns: u64, to_ns: u64) -> io::Result<u64> {
        let group = hash(&["lanes", &parent.to_string(), name]);
        let track_ends = self.track_ends.entry(group).or_default();
        let free = track_ends.iter().position(|&taken_ns| taken_ns <= from_ns).unwrap_or(track_ends.len());
        match track_ends.get_mut(free) {
            Some(taken_ns) => *taken_ns = to_ns,
            None => track_ends.push(to_ns),
        }
        let uuid = hash(&["lane", &group.to_string(), &free.to_string()]);
        let descriptor =
            TrackDescriptor { uuid, parent_uuid: Some(parent), name: printable(name), ..Default::default() };
        self.describe(descriptor)
    }

    /// Describes a counter track. Returns its UUID.
    pub fn counter(&mut self, parent: u64, name: &str, is_time: bool) -> io::Result<u64> {
        let uuid = hash(&["counter", &parent.to_string(), name]);
        let counter = Some(CounterDescriptor { unit: if is_time { NANOSECONDS } else { 0 } });
        let (parent_uuid, name) = (Some(parent), name.to_owned());
        self.describe(TrackDescriptor { uuid, parent_uuid, name, counter, ..TrackDescriptor::default() })
    }

    fn event(&mut self, at_ns: u64, event: TrackEvent) -> io::Result<()> {
        let clock = (Some(at_ns), Some(BOOTTIME));
        let (timestamp, timestamp_clock_id) = clock;
        self.write(TracePacket { timestamp, timestamp_clock_id, track_event: Some(event), ..TracePacket::default() })
    }

    /// Begins a slice.
    pub fn begin(&mut self, at_ns: u64, event: TrackEvent) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: BEGIN, ..event })
    }

    /// Ends the innermost slice of the track.
    pub fn finish(&mut self, at_ns: u64, track_uuid: u64) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: END, track_uuid, ..TrackEvent::default() })
    }

    /// Writes a slice that contains no other one.
    pub fn slice(&mut self, from_ns: u64, to_ns: u64, event: TrackEvent) -> io::Result<()> {
        let track_uuid = event.track_uuid;
        self.begin(from_ns, event)?;
        self.finish(to_ns, track_uuid)
    }

    /// Writes an event without duration.
    pub fn instant(&mut self, at_ns: u64, event: TrackEvent) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: INSTANT, ..event })
    }

    pub fn count(&mut self, at_ns: u64, track_uuid: u64, value: i64) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: COUNTER, track_uuid, counter_value: Some(value), ..TrackEvent::default() })
    }

    pub fn measure(&mut self, at_ns: u64, track_uuid: u64, value: f64) -> io::Result<()> {
        self.event(
            at_ns,
            TrackEvent { kind: COUNTER, track_uuid, double_counter_value: Some(value), ..TrackEvent::default() },
        )
    }
}

/// Returns a UUID for a list of names, equal in each export (FNV-1a).
pub fn hash(names: &[&str]) -> u64 {
    let bytes = names.iter().flat_map(|name| name.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
