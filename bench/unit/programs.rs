// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/programs.rs`, which includes this file.

use super::*;

#[test]
fn fdinfo_of_programs_and_links_has_the_id() {
    assert_eq!(program_id("pos:\t0\nprog_type:\t26\nprog_id:\t41\nrun_cnt:\t7\n"), Some(41));
    assert_eq!(program_id("pos:\t0\nmap_id:\t41\n"), None);
}

#[test]
fn difference_includes_new_programs() {
    let counts = |runs, run_ns| Counts { name: "p".to_owned(), runs, run_ns, missed: 0 };
    let before = Programs::from([(1, counts(10, 1000)), (2, counts(5, 100))]);
    let after = Programs::from([(1, counts(30, 5000)), (3, counts(4, 40))]);
    let difference = difference(&before, &after);
    assert_eq!(difference, [counts(20, 4000), counts(4, 40)]);
    assert!((difference[0].mean_ns() - 200.0).abs() < 1e-9);
}
