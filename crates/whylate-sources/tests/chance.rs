// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the statistical bounds that decide kernel tests.

#[allow(dead_code)]
#[path = "support/oracles/chance.rs"]
mod chance;

use std::collections::BTreeMap;

use chance::{Verdict, by_chance};

#[test]
fn bound_is_exceeded_once_in_ten_thousand_runs() {
    // One trial that almost never fails, ten that almost always fail, and no trial.
    assert_eq!([by_chance(1, 1e-5), by_chance(10, 0.999), by_chance(0, 0.5)], [0, 10, 0]);
    // Of 30 with 5 %: P(X > 6) = 5.7e-4, P(X > 7) = 8.5e-5. Of 200 with 1 %: P(X > 8) = 2.1e-4, P(X > 9) = 4.0e-5.
    assert_eq!([by_chance(30, 0.05), by_chance(200, 0.01)], [7, 9]);
    // With 16,000 trials the probability of no failure underflows; 3.5 standard deviations of the normal distribution.
    assert!((4_190..4_230).contains(&by_chance(16_000, 0.25)), "{}", by_chance(16_000, 0.25));
}

/// Returns the verdict on `rounds`, in which `p` is a round that passes, and the number of rounds up to it.
fn verdict(rounds: &str) -> (Option<bool>, usize) {
    let mut verdict = Verdict::new(0.05);
    for (number, round) in (1..).zip(rounds.chars()) {
        if let Some(holds) = verdict.after(round == 'p') {
            return (Some(holds), number);
        }
    }
    (None, rounds.len())
}

#[test]
fn passed_rounds_must_outweigh_a_failed_one() {
    assert_eq!(verdict("p"), (Some(true), 1));
    assert_eq!(verdict("ffff"), (Some(false), 4));
    assert_eq!(verdict("fp"), (None, 2));
    assert_eq!(verdict("fppp"), (Some(true), 4));
    assert_eq!(verdict("ffpfpff"), (Some(false), 7));
}

#[test]
fn correct_code_fails_once_in_ten_thousand_runs() {
    // Probabilities of each (failed, passed) count that is still undecided, where one round of twenty fails by chance.
    let mut undecided = BTreeMap::from([((0, 0), 1.0)]);
    let (mut wrong, mut right) = (0.0, 0.0);
    for _ in 0..60 {
        let mut next = BTreeMap::new();
        for ((failed, passed), chance) in undecided {
            for (failed, passed, of) in [(failed + 1, passed, 0.05), (failed, passed + 1, 0.95)] {
                let mut verdict = Verdict::new(0.05);
                let mut holds = None;
                (0..failed).for_each(|_| holds = verdict.after(false));
                (0..passed).for_each(|_| holds = verdict.after(true));
                match holds {
                    Some(true) => right += chance * of,
                    Some(false) => wrong += chance * of,
                    None => *next.entry((failed, passed)).or_insert(0.0) += chance * of,
                }
            }
        }
        undecided = next;
    }
    let open: f64 = undecided.values().sum();
    assert!(wrong + open <= 1e-4 && right > 0.9999, "{wrong} and {open}, {right}");
}
