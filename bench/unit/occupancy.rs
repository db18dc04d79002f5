// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/occupancy.rs`, which includes this file.

use super::*;

#[test]
fn quartiles_and_costs_are_of_all_rounds() {
    let run = |s| Run { elapsed_s: vec![s; 10], cpu_s: s, switches: 1_000_000, lost_percent: f64::NAN };
    let sample = Slowdown { before: run(1.0), watched: run(1.02), after: run(1.2) };
    let percent = paced_percent(&Rounds(vec![vec![sample; 4]; 5]), WHYLATE);
    assert!((percent - 2.0).abs() < 1e-9, "{percent}");
    let counts = |name: &str, run_ns| Counts { name: name.to_owned(), runs: 10, run_ns, missed: 0 };
    let idle = Counts { name: "on_nmi".to_owned(), ..Counts::default() };
    let cost = Cost { programs: vec![counts("on_sched_switch", 2000), idle], switches: 10 };
    let measured = Rounds(vec![vec![cost; 3]; 5]);
    let floor = Subject::empty_at_switches();
    let (rows, idle) = cost_rows(&measured, [&floor; 3]);
    let first = [
        "floor | `on_sched_switch` | 1.0000 | 200 (200 to 200)",
        "floor | all, a switch of the load | | 200 (200 to 200)",
    ];
    assert_eq!((&rows[..2], rows.len(), idle.len()), (&first.map(str::to_owned)[..], 6, 3));
    assert!((at_switch_ns(&[measured]) - 200.0).abs() < 1e-9);
}
