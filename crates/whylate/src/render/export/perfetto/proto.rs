// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of a trace that whylate writes: <https://github.com/google/perfetto/tree/main/protos/perfetto/trace>.

use prost::Message;
use whylate_model::units::printable;

/// Built-in clock IDs.
pub const REALTIME: u32 = 1;
pub const MONOTONIC: u32 = 3;
pub const BOOTTIME: u32 = 6;

/// Types of a [`TrackEvent`].
pub const BEGIN: i32 = 1;
pub const END: i32 = 2;
pub const INSTANT: i32 = 3;
pub const COUNTER: i32 = 4;

/// The unit of a [`CounterDescriptor`].
pub const NANOSECONDS: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub struct TracePacket {
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "58")]
    pub timestamp_clock_id: Option<u32>,
    #[prost(uint32, tag = "10")]
    pub trusted_packet_sequence_id: u32,
    #[prost(uint32, tag = "13")]
    pub sequence_flags: u32,
    #[prost(message, optional, tag = "6")]
    pub clock_snapshot: Option<ClockSnapshot>,
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ClockSnapshot {
    #[prost(message, repeated, tag = "1")]
    pub clocks: Vec<Clock>,
    #[prost(uint32, tag = "2")]
    pub primary_trace_clock: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Clock {
    #[prost(uint32, tag = "1")]
    pub clock_id: u32,
    #[prost(uint64, tag = "2")]
    pub timestamp: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub uuid: u64,
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, optional, tag = "3")]
    pub process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    pub thread: Option<ThreadDescriptor>,
    #[prost(message, optional, tag = "8")]
    pub counter: Option<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessDescriptor {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    #[prost(string, tag = "6")]
    pub process_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ThreadDescriptor {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    #[prost(int64, tag = "2")]
    pub tid: i64,
    #[prost(string, tag = "5")]
    pub thread_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct CounterDescriptor {
    #[prost(int32, tag = "3")]
    pub unit: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrackEvent {
    #[prost(int32, tag = "9")]
    pub kind: i32,
    #[prost(uint64, tag = "11")]
    pub track_uuid: u64,
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    #[prost(string, tag = "23")]
    pub name: String,
    #[prost(int64, optional, tag = "30")]
    pub counter_value: Option<i64>,
    #[prost(double, optional, tag = "44")]
    pub double_counter_value: Option<f64>,
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub flow_ids: Vec<u64>,
    #[prost(fixed64, repeated, packed = "false", tag = "48")]
    pub terminating_flow_ids: Vec<u64>,
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<Annotation>,
    #[prost(message, optional, tag = "55")]
    pub callstack: Option<Callstack>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Callstack {
    #[prost(message, repeated, tag = "1")]
    pub frames: Vec<Frame>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Frame {
    #[prost(string, tag = "1")]
    pub function_name: String,
}

/// A debug annotation of a track event.
#[derive(Clone, PartialEq, Message)]
pub struct Annotation {
    #[prost(string, tag = "10")]
    pub name: String,
    #[prost(uint64, optional, tag = "3")]
    pub uint_value: Option<u64>,
    #[prost(string, optional, tag = "6")]
    pub string_value: Option<String>,
    #[prost(message, repeated, tag = "11")]
    pub entries: Vec<Annotation>,
    #[prost(message, repeated, tag = "12")]
    pub values: Vec<Annotation>,
}

impl Annotation {
    pub fn number(name: &str, number: u64) -> Self {
        Annotation { name: name.to_owned(), uint_value: Some(number), ..Annotation::default() }
    }

    pub fn text(name: &str, text: &str) -> Self {
        Annotation { name: printable(name), string_value: Some(printable(text)), ..Annotation::default() }
    }

    /// Creates an annotation with named entries.
    pub fn map(name: &str, entries: Vec<Annotation>) -> Self {
        Annotation { name: name.to_owned(), entries, ..Annotation::default() }
    }

    /// Creates an annotation with unnamed entries.
    pub fn list(name: &str, values: Vec<Annotation>) -> Self {
        Annotation { name: name.to_owned(), values, ..Annotation::default() }
    }

    pub fn texts(name: &str, texts: &[String]) -> Self {
        Annotation::list(name, texts.iter().map(|text| Annotation::text("", text)).collect())
    }
}

impl Callstack {
    /// Reverses frames, of which the innermost comes first: in a trace the outermost does. `None` for no frames.
    pub fn from_innermost_first(frames: &[String]) -> Option<Self> {
        let frames = frames.iter().rev().map(|frame| Frame { function_name: printable(frame) });
        Some(Callstack { frames: frames.collect() }).filter(|stack| !stack.frames.is_empty())
    }
}
