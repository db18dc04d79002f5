// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/wq.rs`, which includes this file.

use super::*;

#[test]
fn details_have_medians_of_rounds() {
    let sample = |run_ns, missed| {
        let counts = |name: &str| Counts { name: name.to_owned(), runs: 10, run_ns, missed };
        Sample { programs: vec![counts("queue"), counts("start")], items_per_second: 1.0, ratio: 1.0 }
    };
    let samples = [sample(100, 0), sample(300, 2), sample(200, 0)];
    let line = details_line("x", &samples.iter().collect::<Vec<_>>().iter().collect::<Vec<_>>());
    assert_eq!(line, "- x: `queue` 20, `start` 20 (4 events of all rounds missed)\n");
    assert!((samples[1].cost_ns() - 60.0).abs() < 1e-9);
}
