// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the compressed profile format of pprof: <https://github.com/google/pprof/blob/main/proto/profile.proto>.

use std::collections::HashMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;
use whylate_model::folded::{WOKEN_BY, runnable, stopped, waiting};
use whylate_model::units::printable;
use whylate_model::{Snapshot, Stack, WaitClass};

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    text: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
}

#[derive(Default)]
struct Tables {
    texts: Vec<String>,
    text_of: HashMap<String, i64>,
    functions: Vec<Function>,
    function_of: HashMap<String, u64>,
}

impl Tables {
    /// Returns the index of a string. Control characters are escaped, as readers print names on terminals.
    fn text(&mut self, text: &str) -> i64 {
        let text = printable(text);
        if let Some(&known) = self.text_of.get(&text) {
            return known;
        }
        let index = self.texts.len() as i64;
        self.texts.push(text.clone());
        self.text_of.insert(text, index);
        index
    }

    /// Returns the ID of a function, which has one location: functions are identified by name alone.
    fn function(&mut self, name: &str) -> u64 {
        if let Some(&known) = self.function_of.get(name) {
            return known;
        }
        let (id, text) = (self.functions.len() as u64 + 1, self.text(name));
        self.functions.push(Function { id, name: text, system_name: text });
        self.function_of.insert(name.to_owned(), id);
        id
    }

    fn sample(&mut self, stack: &Stack) -> Sample {
        let process = stack.labels.get("process").map_or("?", String::as_str).to_owned();
        let runnable = runnable(stack).or_else(|| stopped(stack)).map(WaitClass::frame);
        // Innermost first; the outermost is the process. The waker's frames are inside, in reverse order.
        let waker = stack.waker.iter().flat_map(|waker| {
            let frames = waker.user.iter().rev().chain(waker.kernel.iter().rev()).map(String::as_str);
            [waker.name()].into_iter().chain(frames).chain([WOKEN_BY])
        });
        let frames = stack.kernel.iter().chain(&stack.user).chain(&runnable).chain([&process]).map(String::as_str);
        let location_id = waker.chain(frames).map(|name| self.function(name)).collect();
        let waker = stack.waker.as_ref().map(|waker| ("waker", waker.name()));
        let class = stack.wait.as_ref().map(|wait| ("wait", wait.class.words()));
        let labels = stack.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let label = labels
            .chain([("state", stack.state.as_str())])
            .chain(class)
            .chain(waker)
            .map(|(key, value)| Label { key: self.text(key), text: self.text(value) })
            .collect();
        Sample { location_id, value: vec![stack.weight_ns as i64, stack.waits as i64], label }
    }
}

fn profile(snapshot: &Snapshot, hide_idle: bool) -> Profile {
    let mut tables = Tables::default();
    // The first string must be empty.
    tables.text("");
    let mut value = |kind: &str, unit: &str| ValueType { kind: tables.text(kind), unit: tables.text(unit) };
    let time = value("off_cpu", "nanoseconds");
    let waits = value("waits", "count");
    let rate_hz = super::value(snapshot, "rate_hz");
    let sample = waiting(snapshot, hide_idle).map(|stack| tables.sample(stack)).collect();
    let location = tables
        .functions
        .iter()
        .map(|function| Location { id: function.id, line: vec![Line { function_id: function.id }] });
    Profile {
        sample,
        location: location.collect(),
        time_nanos: snapshot.start_unix_ns as i64,
        duration_nanos: snapshot.duration_ns as i64,
        period: if rate_hz > 0.0 { (1e9 / rate_hz) as i64 } else { 0 },
        sample_type: vec![time.clone(), waits],
        default_sample_type: time.kind,
        period_type: Some(time),
        function: tables.functions,
        string_table: tables.texts,
    }
}

/// Writes the profile: time off CPU in nanoseconds and numbers of waits.
pub fn write(out: &mut dyn Write, snapshot: &Snapshot, hide_idle: bool) -> io::Result<()> {
    let mut compressed = GzEncoder::new(out, Compression::default());
    compressed.write_all(&profile(snapshot, hide_idle).encode_to_vec())?;
    compressed.finish().map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::super::sample;
    use super::*;

    fn decoded(snapshot: &Snapshot) -> Profile {
        let (mut file, mut bytes) = (Vec::new(), Vec::new());
        write(&mut file, snapshot, false).expect("a vector takes everything");
        GzDecoder::new(file.as_slice()).read_to_end(&mut bytes).expect("it is compressed");
        Profile::decode(bytes.as_slice()).expect("a profile")
    }

    #[test]
    fn a_waker_is_further_in_than_the_thread_that_it_woke() {
        let profile = decoded(&sample::with_wakers());
        let text = |index: i64| profile.string_table[index as usize].as_str();
        let names = |sample: usize| -> Vec<&str> {
            let locations = profile.sample[sample].location_id.iter();
            locations.map(|id| text(profile.function[*id as usize - 1].name)).collect()
        };
        let waker = ["writer;", "start", "work", "unlock", "futex", "do_futex", "futex_wake", "wake_up_q", "--"];
        assert_eq!(names(0)[..9], waker);
        assert_eq!(names(0)[9..], ["futex_wait", "do_futex", "futex", "lock", "work", "start", "db"]);
        assert_eq!(names(2)[..3], ["[interrupt]", "--", "io_schedule"]);
        let labels = |sample: usize| profile.sample[sample].label.iter().map(|l| (text(l.key), text(l.text)));
        assert!(labels(0).any(|label| label == ("waker", "writer;")));
        assert!(labels(1).any(|label| label == ("waker", "[not woken yet]")));
    }

    #[test]
    fn the_file_holds_each_stack_with_its_time_and_labels() {
        let profile = decoded(&sample::snapshot());
        let text = |index: i64| profile.string_table[index as usize].as_str();
        assert_eq!(text(0), "");
        assert_eq!((text(profile.sample_type[0].kind), text(profile.sample_type[0].unit)), ("off_cpu", "nanoseconds"));
        assert_eq!(profile.sample.iter().map(|sample| sample.value[0]).sum::<i64>(), 12_000_000_000);
        let names: Vec<&str> =
            profile.sample[0].location_id.iter().map(|id| text(profile.function[*id as usize - 1].name)).collect();
        assert_eq!(names, ["futex_wait", "do_futex", "futex", "lock", "work", "start", "db"]);
        let evil = printable(sample::EVIL);
        let mut labels = profile.sample[2].label.iter();
        assert!(labels.any(|label| text(label.key) == "thread" && text(label.text) == evil));
        assert!(profile.string_table.iter().all(|text| *text == printable(text)));
    }
}
