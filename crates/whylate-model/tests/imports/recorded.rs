// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the walk of recorded traces' waits with a forward oracle.

#[path = "../forward/mod.rs"]
mod forward;

use whylate_model::ftrace::timeline::Trace;

/// Tolerated share of time with another label.
const OFF: f64 = 0.02;

#[test]
fn walk_of_recorded_traces_matches_forward_oracle() {
    // `perf sched` records no timers.
    for (name, text, known) in [
        ("tracefs", include_str!("../traces/tracefs.txt"), 0.9),
        ("perf script", include_str!("../traces/perf-script.txt"), 0.9),
        ("perf sched", include_str!("../traces/perf-sched.txt"), 0.0),
    ] {
        let trace = Trace::read(text.as_bytes()).expect("a trace");
        let agreement = forward::compare(trace.history());
        let off = agreement.share(agreement.off_ns);
        let both_know = agreement.share(agreement.known_ns);
        println!("{name}: {} waits, {both_know:.3} of the time known, {:.4} % off", agreement.waits, off * 100.0);
        assert!(both_know >= known, "{name}: {agreement:?}");
        assert!(agreement.waits >= 3, "{name}: {agreement:?}");
        assert!(off <= OFF, "{name}: {agreement:?}");
    }
}
