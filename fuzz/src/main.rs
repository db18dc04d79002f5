// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hands bytes to a parser of what others have written: `scripts/fuzz` runs each for a time. `FUZZ_TARGET` names it.
#![no_main]

/// Of the program, which is no library.
#[path = "../../crates/whylate/src/commands/sqpoll/sweep/fio/figures.rs"]
mod figures;

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
    ("fdinfo", |bytes| fuzzing::fdinfo(&text(bytes))),
    ("fio", |bytes| {
        for (direction, depth) in [("read", 1), ("write", u32::MAX)] {
            Figures::of(&text(bytes), direction).map(|figures| figures.trusted(depth));
        }
    }),
    ("kept_cpus", fuzzing::kept_cpus),
    ("late_ticks", fuzzing::late_ticks),
    ("looks", fuzzing::looks),
    ("maps", |bytes| fuzzing::maps(&text(bytes))),
    ("mountinfo", |bytes| fuzzing::mountinfo(&text(bytes))),
    ("perf_map", |bytes| fuzzing::perf_map(&text(bytes))),
    ("places", fuzzing::places),
    ("ring_page", fuzzing::ring_page),
    ("sections", fuzzing::sections),
    ("stat", |bytes| fuzzing::stat(&text(bytes))),
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
        for names in [Names::Thread, Names::Process] {
            let Ok(mut imported) = Imported::read(&text(bytes), names) else { continue };
            imported.merge(imported.clone());
            imported.lines(Order::RootFirst);
        }
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
