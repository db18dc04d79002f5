// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hands bytes to a parser of what others have written: `scripts/fuzz` runs each for a time. `FUZZ_TARGET` names it.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use whylate_model::ftrace::{self, ImportOptions};
use whylate_model::import::{Imported, Names, Order};
use whylate_model::wait::Classes;
use whylate_sources::fuzzing;

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("elf", fuzzing::elf),
    ("fdinfo", |bytes| fuzzing::fdinfo(&text(bytes))),
    ("maps", |bytes| fuzzing::maps(&text(bytes))),
    ("mountinfo", |bytes| fuzzing::mountinfo(&text(bytes))),
    ("perf_map", |bytes| fuzzing::perf_map(&text(bytes))),
    ("ring_page", fuzzing::ring_page),
    ("stat", |bytes| fuzzing::stat(&text(bytes))),
    ("classes", |bytes| {
        let _ = Classes::parse(&text(bytes));
    }),
    ("ftrace", |bytes| {
        let options = ImportOptions { late_over_ns: Some(1_000), worst: 3 };
        let _ = ftrace::import(bytes, "host", options, &mut |_| ());
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
