// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hands bytes to a parser of what others have written: `scripts/fuzz` runs each for a time. `FUZZ_TARGET` names it.
#![no_main]

/// Of the program, which is no library.
#[path = "../../crates/whylate/src/commands/sqpoll/sweep/fio/figures.rs"]
mod figures;
#[path = "../../crates/whylate/src/output/offcpu/svg/graph.rs"]
#[allow(dead_code)]
mod graph;

use std::io;
use std::sync::OnceLock;

use figures::Figures;
use libfuzzer_sys::fuzz_target;
use whylate_model::ftrace::{self, ImportOptions};
use whylate_model::import::{Imported, Names, Order};
use whylate_model::path::import::{Trace, Wanted};
use whylate_model::wait::Classes;
use whylate_sources::fuzzing;

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("activations", fuzzing::activations),
    ("elf", fuzzing::elf),
    ("cgroups", |bytes| fuzzing::cgroups(&text(bytes))),
    ("fdinfo", |bytes| fuzzing::fdinfo(&text(bytes))),
    ("fio", |bytes| {
        for (direction, depth) in [("read", 1), ("write", u32::MAX)] {
            Figures::of(&text(bytes), direction).map(|figures| figures.trusted(depth));
        }
    }),
    ("kallsyms", |bytes| fuzzing::kallsyms(&text(bytes))),
    ("kept_cpus", fuzzing::kept_cpus),
    ("late_ticks", fuzzing::late_ticks),
    ("looks", fuzzing::looks),
    ("maps", |bytes| fuzzing::maps(&text(bytes))),
    ("mountinfo", |bytes| fuzzing::mountinfo(&text(bytes))),
    ("perf_map", |bytes| fuzzing::perf_map(&text(bytes))),
    ("places", fuzzing::places),
    ("ring_page", fuzzing::ring_page),
    ("sections", fuzzing::sections),
    ("small_files", |bytes| fuzzing::small_files(&text(bytes))),
    ("stat", |bytes| fuzzing::stat(&text(bytes))),
    ("timerlat_samples", fuzzing::timerlat_samples),
    ("waits", fuzzing::waits),
    ("work_items", fuzzing::work_items),
    ("classes", |bytes| {
        let _ = Classes::parse(&text(bytes));
    }),
    ("ftrace", |bytes| {
        let options = ImportOptions { late_over_ns: Some(1_000), worst: 3 };
        let _ = ftrace::import(bytes, "host", options, &mut |_| ());
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
    ("stacks", |bytes| {
        // Drawing takes nearly all of the time: one of the four ways is enough for an input.
        let names = [Names::Thread, Names::Process][bytes.len() / 2 % 2];
        let order = [Order::RootFirst, Order::LeafFirst][bytes.len() % 2];
        let Ok(mut imported) = Imported::read(&text(bytes), names) else { return };
        // Its counts may be too large twice.
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
