// SPDX-License-Identifier: MIT OR Apache-2.0
//! Text of any process's ring, and the iterators' records of threads and rings.

use std::collections::BTreeMap;

use super::bpf_backend::thread_states;
use super::iterators::Records;
use super::states::{ThreadStates, series};
use crate::kernel::cgroups::Cgroups;

const INTERVAL_NS: u64 = 1_000_000_000;
const TICKS_A_SECOND: Option<u64> = Some(250);

/// Parses a ring's text from /proc/PID/fdinfo.
pub fn fdinfo(text: &str) {
    super::fdinfo::parse(text);
}

/// Decodes two reads, each of half of the bytes; once with the second one's threads ended.
pub fn looks(bytes: &[u8]) {
    let look = |bytes: &[u8], has_ended: bool| -> ThreadStates {
        let mut records = Records::default();
        // Records before an invalid one count.
        let _ = records.take(bytes);
        if has_ended {
            records.ended = records.threads.iter().map(|record| record.thread).collect();
        }
        thread_states(&records, &BTreeMap::new(), TICKS_A_SECOND, &mut Cgroups::default())
    };
    let (before, after) = bytes.split_at(bytes.len() / 2);
    series(&look(before, false), &look(after, false), INTERVAL_NS, false);
    series(&ThreadStates::new(), &look(before, true), INTERVAL_NS, true);
}
