// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/timerlat_why.rs`, which includes this file.

use super::*;

#[test]
fn analysis_has_largest_part_and_names_below() {
    let text = "Timer Latency\nrtla timerlat hit stop tracing\n## CPU 1 hit stop tracing, analyzing it ##\n  IRQ handler delay:  1.00 us (2.38 %)\n  IRQ latency: 28.13 us\n  \
                Blocking thread:     39.96 us (95.14 %)\n       irq_test:71   39.96 us\n    Blocking thread stack trace\n       -> timerlat_irq\n\
                ------\n  Thread latency:     42.00 us (100%)\nMax timerlat IRQ latency from idle: 7.00 us in cpu 0\n";
    let analysis = analysis(text).expect("there is one");
    let (part, named) = ("Blocking thread".to_owned(), vec!["irq_test:71".to_owned()]);
    assert_eq!(analysis, Analysis { part, percent: 95.14, named, latency_us: 42.0 });
    assert_eq!(count_right(&CAUSES[0], &[Some(analysis.clone()), None]), (0, 0));
    assert_eq!(count_right(&CAUSES[1], &[Some(analysis)]), (1, 0));
}

#[test]
fn run_without_stop_has_no_analysis() {
    let analyses =
        parse("@ 0 1\nTimer Latency\n@ 2 3\n## CPU 0 hit stop tracing, analyzing it ##\n").expect("two runs");
    assert_eq!(analyses, Analyses::from([((0, 1), vec![None]), ((2, 3), vec![None])]));
    assert!(super::parse("rubbish").is_err());
}
