// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packets as they are written, and the tracks that they are on.

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

/// All packets are one sequence: it orders those of one moment.
const SEQUENCE: u32 = 1;
/// Of the first packet: nothing is known from before.
const CLEARED: u32 = 1;
/// A packet is a field of the trace.
const PACKET: u8 = 1 << 3 | 2;

/// A thread whose process is known: other traces of the machine have it as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread<'a> {
    pub pid: i32,
    pub tid: i64,
    pub name: &'a str,
    pub process: &'a str,
}

/// Writes packets one by one, so that a file that is cut can be read up to the cut.
pub struct Packets {
    out: PendingFile,
    has_begun: bool,
    clock: Option<Clock>,
    /// Up to when clocks are told.
    told_ns: Option<u64>,
    /// Tracks that were described.
    described: HashSet<u64>,
    /// For tracks whose slices may overlap: up to when each of their lanes is taken.
    lanes: HashMap<u64, Vec<u64>>,
}

impl Packets {
    pub fn new(out: PendingFile) -> Self {
        Packets { out, has_begun: false, clock: None, told_ns: None, described: HashSet::new(), lanes: HashMap::new() }
    }

    pub fn end(self) -> io::Result<()> {
        self.out.end()
    }

    fn write(&mut self, mut packet: TracePacket) -> io::Result<()> {
        packet.trusted_packet_sequence_id = SEQUENCE;
        packet.sequence_flags = if self.has_begun { 0 } else { CLEARED };
        self.has_begun = true;
        let mut bytes = vec![PACKET];
        packet.encode_length_delimited(&mut bytes)?;
        self.out.write_all(&bytes)
    }

    /// From then on, times are told by these clocks.
    pub fn clock(&mut self, clock: &Clock) -> io::Result<()> {
        self.clock = Some(*clock);
        // Later ones are about later times: readers take others for invalid.
        if self.told_ns.is_some_and(|told_ns| clock.boottime_ns <= told_ns) {
            return Ok(());
        }
        self.told_ns = Some(clock.boottime_ns);
        let of = [(BOOTTIME, clock.boottime_ns), (MONOTONIC, clock.monotonic_ns), (REALTIME, clock.at_unix_ns)];
        let clocks = of.map(|(clock_id, timestamp)| proto::Clock { clock_id, timestamp });
        let clock_snapshot = ClockSnapshot { clocks: clocks.into(), primary_trace_clock: BOOTTIME };
        self.write(TracePacket { clock_snapshot: Some(clock_snapshot), ..TracePacket::default() })
    }

    pub fn has_clock(&self) -> bool {
        self.clock.is_some()
    }

    /// A time on the clock that traces have, which goes on while the machine is suspended and is never set.
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

    /// A track with nothing above it.
    pub fn root(&mut self, name: &str) -> io::Result<u64> {
        let uuid = number(&["root", name]);
        self.describe(TrackDescriptor { uuid, name: printable(name), ..TrackDescriptor::default() })
    }

    /// The track of a thread.
    pub fn thread(&mut self, thread: Thread<'_>) -> io::Result<u64> {
        let Thread { pid, tid, name, process } = thread;
        let process_name = printable(process);
        let uuid = number(&["process", &pid.to_string()]);
        let of_process = Some(ProcessDescriptor { pid, process_name });
        self.describe(TrackDescriptor { uuid, process: of_process, ..TrackDescriptor::default() })?;
        let uuid = number(&["thread", &pid.to_string(), &tid.to_string()]);
        let of_thread = Some(ThreadDescriptor { pid, tid, thread_name: printable(name) });
        self.describe(TrackDescriptor { uuid, thread: of_thread, ..TrackDescriptor::default() })
    }

    /// The track `name` below another one. What overlaps there goes to tracks of the same name, which are shown as one: on
    /// each slices nest.
    pub fn lane(&mut self, parent: u64, name: &str, from_ns: u64, to_ns: u64) -> io::Result<u64> {
        let group = number(&["lanes", &parent.to_string(), name]);
        let lanes = self.lanes.entry(group).or_default();
        let free = lanes.iter().position(|&taken_ns| taken_ns <= from_ns).unwrap_or(lanes.len());
        match lanes.get_mut(free) {
            Some(taken_ns) => *taken_ns = to_ns,
            None => lanes.push(to_ns),
        }
        let uuid = number(&["lane", &group.to_string(), &free.to_string()]);
        let descriptor =
            TrackDescriptor { uuid, parent_uuid: Some(parent), name: printable(name), ..Default::default() };
        self.describe(descriptor)
    }

    /// The track of a figure.
    pub fn counter(&mut self, parent: u64, name: &str, is_time: bool) -> io::Result<u64> {
        let uuid = number(&["counter", &parent.to_string(), name]);
        let counter = Some(CounterDescriptor { unit: if is_time { NANOSECONDS } else { 0 } });
        let (parent_uuid, name) = (Some(parent), name.to_owned());
        self.describe(TrackDescriptor { uuid, parent_uuid, name, counter, ..TrackDescriptor::default() })
    }

    fn event(&mut self, at_ns: u64, event: TrackEvent) -> io::Result<()> {
        let clock = (Some(at_ns), Some(BOOTTIME));
        let (timestamp, timestamp_clock_id) = clock;
        self.write(TracePacket { timestamp, timestamp_clock_id, track_event: Some(event), ..TracePacket::default() })
    }

    /// A slice begins.
    pub fn begin(&mut self, at_ns: u64, event: TrackEvent) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: BEGIN, ..event })
    }

    /// The innermost slice of the track ends.
    pub fn finish(&mut self, at_ns: u64, track_uuid: u64) -> io::Result<()> {
        self.event(at_ns, TrackEvent { kind: END, track_uuid, ..TrackEvent::default() })
    }

    /// A slice without anything within it.
    pub fn slice(&mut self, from_ns: u64, to_ns: u64, event: TrackEvent) -> io::Result<()> {
        let track_uuid = event.track_uuid;
        self.begin(from_ns, event)?;
        self.finish(to_ns, track_uuid)
    }

    /// Something that takes no time.
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

/// A number for what has these names, the same in each export (FNV-1a).
pub fn number(names: &[&str]) -> u64 {
    let bytes = names.iter().flat_map(|name| name.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
