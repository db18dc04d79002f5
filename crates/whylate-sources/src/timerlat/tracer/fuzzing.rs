// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzz target: samples of the kernel's tracer.

use super::super::tally::Tally;
use super::samples::{Activations, Rules, SampleFormat, TimedSample};

const PERIOD_NS: u64 = 1_000_000;
/// Unit of the time between samples: the maximum is a few periods, as each missed one is counted.
const UNIT_NS: u64 = 100;
/// Maximum length of a sample's record, in bytes.
const RECORD: usize = 32;

thread_local! {
    /// Reused: creating one per input would take most of the time.
    static TALLY: Tally = Tally::new(None);
}

/// Reads a format, up to a zero byte, and records of samples, each with the time since the one before.
pub fn timerlat_samples(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let text = String::from_utf8_lossy(parts.next().unwrap_or_default());
    let Some(format) = SampleFormat::parse(&text) else { return };
    let records = parts.next().unwrap_or_default();
    TALLY.with(|tally| count(format, records, tally));
}

fn count(format: SampleFormat, records: &[u8], tally: &Tally) {
    for (has_user, may_pause) in [(false, true), (true, false)] {
        let (mut activations, mut time_ns) = (Activations::default(), 1 << 40);
        for record in records.chunks(RECORD + 2) {
            let Some((after, data)) = record.split_first_chunk() else { break };
            time_ns += u64::from(u16::from_ne_bytes(*after)) * UNIT_NS;
            let rules = Rules { period_ns: PERIOD_NS, has_user, may_pause, from_ns: 1 << 40, until_ns: time_ns };
            match format.read(data) {
                Some(sample) => drop(activations.add(TimedSample { sample, time_ns }, &rules, tally)),
                None => activations.forget(),
            }
            activations.count_missed(&rules, tally);
            activations.overdue(&rules);
        }
        activations.cut_off(true, tally);
    }
}
