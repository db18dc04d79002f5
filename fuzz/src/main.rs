// SPDX-License-Identifier: MIT OR Apache-2.0
//! Feeds bytes to a parser of foreign input: `scripts/fuzz` runs each target for a while. `FUZZ_TARGET` selects it.
#![no_main]

/// Modules of the binary crate, which is not a library.
#[path = "../../crates/whylate/src/cli/sqpoll/sweep/fio/figures.rs"]
mod figures;
#[path = "../../crates/whylate-model/tests/imports/mangle.rs"]
#[allow(dead_code)]
mod mangle;
#[path = "../../crates/whylate/src/render/text/offcpu/svg/graph.rs"]
#[allow(dead_code)]
mod graph;

use std::collections::HashMap;
use std::io::{self, Cursor};
use std::sync::OnceLock;

use figures::Figures;
use libfuzzer_sys::fuzz_target;
use whylate_model::diff::{About, Comparison};
use whylate_model::ftrace::{self, ImportOptions};
use whylate_model::import::{Imported, Names, Order};
use whylate_model::ftrace::timeline::{Trace, Wanted};
use whylate_model::recording::{Frame, Line, Reader};
use whylate_model::sniff::sniff;
use whylate_model::wait::Classes;
use whylate_model::{Merger, Stack};
use whylate_sources::fuzzing;

type Target = fn(&[u8]);

/// Reads a recording as the commands do, into a comparison and into mergers.
fn recorded(bytes: &[u8]) {
    let Ok(mut reader) = Reader::new(Cursor::new(bytes)) else { return };
    let sources = reader.header().sources.clone();
    let mut comparison = Comparison::new([&sources, &sources], 1_000_000_000);
    let mut mergers: HashMap<String, Merger> = HashMap::new();
    while let Ok(Some(line)) = reader.next_line() {
        let Line::Snapshot(snapshot) = line else { continue };
        for side in 0..2 {
            comparison.add(side, snapshot.start_unix_ns % 100_000_000_000, (*snapshot).clone());
        }
        mergers.entry(snapshot.source.clone()).or_default().add(*snapshot);
    }
    let _ = comparison.finish([About::default(), About::default()]);
    mergers.values_mut().for_each(|merger| drop(merger.take()));
    fast_reader_agrees(bytes);
}

/// Checks that the fast reader returns what serde reads, apart from `lost` counters of zero.
fn fast_reader_agrees(bytes: &[u8]) {
    let [mut fast, mut other] = [(); 2].map(|()| Reader::new(Cursor::new(bytes)).expect("it was read before"));
    fast.repeat(|_, _| true);
    loop {
        let (mut line, same) = match (other.next_line(), fast.next_line()) {
            (Ok(Some(line)), Ok(Some(same))) => (line, same),
            (Ok(None), Ok(None)) | (Err(_), Err(_)) => break,
            different => panic!("{different:?}"),
        };
        line = without_zeros(line);
        // A snapshot with NaN is not equal to itself.
        if line == line.clone() {
            assert_eq!(without_zeros(same.clone()), line);
        }
        if let (Line::Snapshot(snapshot), Some(of)) = (line, fast.take_repeated()) {
            let counts = |stack: &Stack| (stack.samples, stack.weight_ns, stack.waits);
            assert!(of.iter().map(|of| (of.samples, of.weight_ns, of.waits)).eq(snapshot.stacks.iter().map(counts)));
        }
        fast.use_again(same);
    }
    assert_eq!(fast.damage(), other.damage());
}

fn without_zeros(mut line: Line) -> Line {
    if let Line::Snapshot(snapshot) = &mut line {
        snapshot.lost.retain(|_, count| *count > 0);
    }
    line
}

/// Returns a recording of these lines after a header.
fn recording_of(lines: &[u8]) -> io::Result<Vec<u8>> {
    let header = br#"{"line":"header","recording":1,"schema":1,"start":"1970-01-01T00:00:00Z","sources":[
        {"source":"wq","backend":"bpf","late_from_ns":1},{"source":"offcpu","backend":"bpf","late_from_ns":1}]}"#;
    let header: Vec<u8> = header.iter().copied().filter(|&byte| byte != b'\n').chain([b'\n']).collect();
    let mut frame = Frame::new()?;
    frame.add(&header, None)?;
    for line in lines.split_inclusive(|&byte| byte == b'\n') {
        frame.add(line, None)?;
    }
    let (bytes, index) = frame.finish()?;
    Ok([&index.to_bytes()[..], &bytes].concat())
}

const TARGETS: &[(&str, Target)] = &[
    ("activations", fuzzing::activations),
    ("demangle", |bytes| fuzzing::demangle(&text(bytes))),
    ("elf", fuzzing::elf),
    ("cgroups", |bytes| fuzzing::cgroups(&text(bytes))),
    ("fdinfo", |bytes| fuzzing::fdinfo(&text(bytes))),
    ("fio", |bytes| {
        for (direction, depth) in [("read", 1), ("write", u32::MAX)] {
            Figures::parse(&text(bytes), direction).map(|figures| figures.trusted(depth));
        }
    }),
    ("recordings", recorded),
    ("recorded_lines", |bytes| {
        if let Ok(file) = recording_of(bytes) {
            recorded(&file);
        }
    }),
    ("kallsyms", |bytes| fuzzing::kallsyms(&text(bytes))),
    ("kept_cpus", fuzzing::kept_cpus),
    ("late_ticks", fuzzing::late_ticks),
    ("looks", fuzzing::looks),
    ("maps", |bytes| fuzzing::maps(&text(bytes))),
    ("mountinfo", |bytes| fuzzing::mountinfo(&text(bytes))),
    ("perf_map", fuzzing::perf_map),
    ("places", fuzzing::places),
    ("ring_page", fuzzing::ring_page),
    ("sections", fuzzing::sections),
    ("small_files", |bytes| fuzzing::small_files(&text(bytes))),
    ("stat", |bytes| fuzzing::stat(&text(bytes))),
    ("timerlat_samples", fuzzing::timerlat_samples),
    ("unix_sockets", fuzzing::unix_sockets),
    ("waits", fuzzing::waits),
    ("waits_in_proc", |bytes| fuzzing::waits_in_proc(&text(bytes))),
    ("work_items", fuzzing::work_items),
    ("classes", |bytes| {
        let _ = Classes::parse(&text(bytes));
    }),
    ("ftrace", |bytes| {
        let options = ImportOptions { late_over_ns: Some(1_000), worst: 3 };
        let _ = ftrace::import(bytes, "host", options, &mut |_| ());
    }),
    ("formats", |bytes| {
        let _ = sniff(bytes);
    }),
    ("traces", |bytes| {
        let Ok(mut trace) = Trace::read(bytes) else { return };
        let tids: Vec<u32> = trace.lives().iter().take(8).map(|life| life.tid).collect();
        for tid in tids {
            trace.late_waits(tid, 0, 8);
            if let Ok(command) = trace.command(Wanted::Pid(tid)) {
                let sum: u64 = command.explained.path.iter().map(|segment| segment.ns).sum();
                assert_eq!(sum, command.to_ns.saturating_sub(command.from_ns));
            }
        }
        let _ = trace.command(Wanted::Any);
    }),
    ("pastes", |bytes| {
        let mut bytes = bytes.iter().copied();
        let mut choose = || bytes.next().unwrap_or(255);
        let (kind, text) = mangle::TEXTS[usize::from(choose()) % mangle::TEXTS.len()];
        let text = mangle::some_lines(text, &mut choose);
        let Ok(original) = mangle::imported(kind, text.as_bytes()) else { return };
        let (pasted, done) = mangle::mangle(&text, &mut choose);
        if let Err(why) = mangle::check(kind, &pasted, &original) {
            panic!("{kind:?} {done:?}: {why}\n{}", String::from_utf8_lossy(&pasted));
        }
    }),
    ("stacks", |bytes| {
        // Drawing takes most of the time: one of the four combinations is enough per input.
        let names = [Names::Thread, Names::Process][bytes.len() / 2 % 2];
        let order = [Order::RootFirst, Order::LeafFirst][bytes.len() % 2];
        let Ok(mut imported) = Imported::read(&text(bytes), names) else { return };
        // Merging with itself may overflow the counts.
        let _ = imported.merge(imported.clone());
        let lines = imported.lines(order);
        let drawn = graph::write_lines(&mut io::sink(), "Off-CPU", "samples", &lines);
        let is_any = lines.iter().any(|line| !line.starts_with(' ') && !line.ends_with(" 0"));
        assert!(drawn.is_ok() || !is_any, "{drawn:?}: {lines:?}");
    }),
];

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn target() -> Target {
    static CHOSEN: OnceLock<Target> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let known = TARGETS.iter().find(|(known, _)| *known == name);
        known.unwrap_or_else(|| panic!("no target is called {name:?}")).1
    })
}

fuzz_target!(|bytes: &[u8]| target()(bytes));
