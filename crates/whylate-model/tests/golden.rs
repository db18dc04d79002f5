// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replays recorded late events and compares their causes with the recorded ones.
//!
//! Each file in `golden/` is one event: `evidence` and the `causes` derived from it. `WHYLATE_BLESS=1` writes the
//! causes of this build into the files; a new file then needs only the evidence. Files named `made-*` were written by
//! hand, the others were recorded on a kernel.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use whylate_model::Cause;
use whylate_model::blame::Evidence;

#[derive(Serialize, Deserialize)]
struct Golden {
    evidence: Evidence,
    #[serde(default)]
    causes: Vec<Cause>,
}

fn files() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = fs::read_dir(directory).expect("the directory exists");
    let paths = entries.map(|entry| entry.expect("and can be read").path());
    let mut files: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect();
    files.sort();
    files
}

#[test]
fn recorded_events_keep_their_causes() {
    let files = files();
    assert!(!files.is_empty(), "there is no golden file");
    for path in files {
        let text = fs::read_to_string(&path).expect("a golden file can be read");
        let mut golden: Golden =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let found = golden.evidence.causes();
        let total_ns: u64 = found.iter().map(|cause| cause.ns).sum();
        assert_eq!(total_ns, golden.evidence.latency_ns(), "{}", path.display());
        if std::env::var_os("WHYLATE_BLESS").is_some() {
            golden.causes = found;
            let mut text = serde_json::to_string_pretty(&golden).expect("a golden file serialises");
            text.push('\n');
            fs::write(&path, text).expect("a golden file can be written");
        } else {
            assert_eq!(found, golden.causes, "{}", path.display());
        }
    }
}
