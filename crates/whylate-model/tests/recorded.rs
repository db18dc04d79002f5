// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits of recorded traces, told forward and backward.

mod forward;

use whylate_model::path::import::Trace;

/// How much of the time may have another label.
const OFF: f64 = 0.02;

#[test]
fn told_forward_and_backward_the_waits_of_recorded_traces_agree() {
    for (name, text) in [
        ("tracefs", include_str!("traces/tracefs.txt")),
        ("perf script", include_str!("traces/perf-script.txt")),
        ("perf sched", include_str!("traces/perf-sched.txt")),
    ] {
        let trace = Trace::read(text.as_bytes()).expect("a trace");
        let agreement = forward::compare(trace.history());
        let off = agreement.share(agreement.off_ns);
        println!("{name}: {} waits of {} ns, {:.4} % off", agreement.waits, agreement.ns, off * 100.0);
        assert!(agreement.waits >= 3, "{name}: {agreement:?}");
        assert!(off <= OFF, "{name}: {agreement:?}");
    }
}
