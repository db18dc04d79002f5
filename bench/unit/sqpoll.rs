// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/sqpoll.rs`, which includes this file.

use super::*;

#[test]
fn parses_output_of_the_test() {
    let text = "test a ... duty 0.37: 9 requests each 50ms make 0.3600\n\
                duty 0.37: by functions 0.3052, reported 0.4038: off by +9.86 points; 61 calls, of which each may hide 51827 ns, in total 0.313 points\n\
                a round fails: duty 0.37: by functions 0.3052, reported 0.4038, and 0.003 may be hidden\n\
                duty 0.37: by functions 0.3052, reported 0.3038: off by -0.145 points; 61 calls, of which each may hide 51827 ns, in total 0.313 points\n";
    let duties = duties(text).expect("it can be read");
    let duty = &duties["0.37"];
    assert_eq!((duty.samples.len(), duty.tries.len()), (1, 1));
    assert!((duty.samples[0].off_at_most() - 0.453).abs() < 1e-6);
}
