// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unit tests of `src/irqsoff.rs`, which includes this file.

use super::*;

const START: &str = "2026-01-01T00:00:00.000Z";

#[test]
fn distinguishes_delays_from_other_sections() {
    let event = |task: &str, function: &str, ns: u64| {
        let labels = format!(r#"{{"task":"{task}","function":"{function}"}}"#);
        format!(r#"{{"labels":{labels},"at":"{START}","latency_ns":{ns},"cpu":1,"stack":["{function}"]}}"#)
    };
    let late = [event("irq_test:7", "execute_preemptirqtest", 1_010_000), event("sh:8", "other", 2_000_000)].join(",");
    let line = format!(
        r#"{{"schema":1,"source":"irqsoff","backend":"events","host":"","start":"{START}","duration_ns":1,"series":[],"late":[{late}],"lost":{{}},"probe":{{"run_ns":0,"runs":0}}}}"#
    );
    let rows = rows(&format!("@ events irq 1000\n{line}\n@ end\n")).expect("read");
    assert_eq!(
        rows[0].cells(1),
        "events | irq | 1000 | 1 of 1 | `execute_preemptirqtest` in 1 | exact | 10.0 | 10.0 | 1 | 0"
    );
    assert!(figures(&rows, 1).iter().all(Figure::is_within) && (rows[0].allowed_us() - 20.0).abs() < 1e-9);
    assert!(!figures(&rows, 2)[1].is_within());
}

#[test]
fn compares_each_run_with_its_neighbors() {
    let text = "@ nothing 1.0\n@ ticks 2.2\nx\n@ nothing 1.2\n@ bare 3.3\n@ nothing 1.0\n@ end\n";
    let slowdowns = slowdowns(text).expect("read");
    let rounded: Vec<(&str, f64)> = slowdowns.iter().map(|&(name, percent)| (name, percent.round())).collect();
    assert_eq!(rounded, [("ticks", 100.0), ("bare", 200.0)]);
    assert!(super::slowdowns("@ nothing nothing\n@ ticks 1\n").is_err());
}

#[test]
fn parses_chosen_period() {
    let errors = "whylate: a timer interrupt costs 14.1 us here, so heartbeats come every 2 ms (irqsoff --period 1ms for finer bounds)";
    assert_eq!(period(errors), "2 ms");
    assert_eq!(period("whylate: irqsoff uses the ticks backend: it is asked for"), "1 ms");
}
