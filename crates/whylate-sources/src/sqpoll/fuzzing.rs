// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a ring of any process tells of itself, and what the iterators write of threads and rings.

use std::collections::BTreeMap;

use super::look::Records;
use super::of_kernel::look_of;
use super::seen::{Look, series};
use crate::cgroups::Cgroups;

const INTERVAL_NS: u64 = 1_000_000_000;
const TICKS_A_SECOND: Option<u64> = Some(250);

/// What /proc/PID/fdinfo has of a ring.
pub fn fdinfo(text: &str) {
    super::fdinfo::parse(text);
}

/// Two looks, each of half of the bytes; threads of the second one have ended too.
pub fn looks(bytes: &[u8]) {
    let look = |bytes: &[u8], has_ended: bool| -> Look {
        let mut records = Records::default();
        // Those before one that makes no sense are there.
        let _ = records.take(bytes);
        if has_ended {
            records.ended = records.threads.iter().map(|record| record.thread).collect();
        }
        look_of(&records, &BTreeMap::new(), TICKS_A_SECOND, &mut Cgroups::default())
    };
    let (before, after) = bytes.split_at(bytes.len() / 2);
    series(&look(before, false), &look(after, false), INTERVAL_NS);
    series(&Look::new(), &look(before, true), INTERVAL_NS);
}
