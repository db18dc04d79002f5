// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/drivers.rs`, which includes this file.

use super::*;

#[test]
fn subjects_take_turns_and_the_warm_up_does_not_count() {
    let mut order = Vec::new();
    let mut count = 0;
    let rounds = in_rounds("test", (2, true), &["a", "b"], |which| {
        order.push(which);
        count += 1;
        Ok(f64::from(count) * 10.0)
    });
    let rounds = rounds.expect("measured");
    assert_eq!(order, [0, 1, 1, 0, 0, 1]);
    assert_eq!(rounds.0, [[40.0, 30.0], [50.0, 60.0]]);
    assert_eq!((rounds.subject(1), rounds.median(0, |ns| *ns)), (vec![&30.0, &60.0], 45.0));
    let error = in_rounds("test", (1, false), &["a", "b"], |_| -> Result<()> { anyhow::bail!("no") });
    assert_eq!(error.map(|_| ()).expect_err("it fails").to_string(), "cannot measure b");
}

#[test]
fn slowdown_is_relative_to_both_neighbors() {
    let run = |s: f64| Run { elapsed_s: vec![s; 10], cpu_s: s, switches: 1_000_000, lost_percent: s };
    let sample = Slowdown { before: run(1.0), watched: run(1.155), after: run(1.2) };
    let figures = [sample.percent(), sample.cpu_percent(), sample.noise_percent(), sample.added_ns_per_switch()];
    for (figure, expected) in figures.into_iter().zip([5.0, 5.0, 20.0, 55.0]) {
        assert!((figure - expected).abs() < 1e-6, "{figures:?}");
    }
    assert!((sample.lost_percent() - 0.055).abs() < 1e-9);
}
