// SPDX-License-Identifier: MIT OR Apache-2.0
//! From the kernel's record of a wait for a CPU to a late event with causes.

use whylate_model::blame::{self, StarvedEvidence};
use whylate_model::sqpoll::{SqThread, labels};
use whylate_model::{LateEvent, blame::Evidence};

use super::skel::types::late_wait;
use crate::attach::{self, PlainData, text};
use crate::clock;
use crate::occupancy::Account;
use crate::symbols::KernelSymbols;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for late_wait {}

/// `None` where the record is cut short. Its window lacks the intervals that are not in use.
pub(super) fn event_of(
    bytes: &[u8],
    account: &mut Account,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<LateEvent> {
    let window_at = std::mem::offset_of!(late_wait, window);
    let occupancy = account.window(bytes.get(window_at..)?, symbols)?;
    let mut whole = bytes.to_vec();
    whole.resize(size_of::<late_wait>().max(bytes.len()), 0);
    let record: late_wait = attach::read_plain(&whole)?;
    let evidence =
        StarvedEvidence { runnable_ns: record.runnable_ns, running_ns: record.running_ns, tid: record.tid, occupancy };
    let thread = SqThread { pid: record.tgid, tid: record.tid, born: 0 };
    Some(LateEvent {
        labels: labels(&text(&record.process), &thread),
        at_unix_ns: clock::unix_ns_of(record.running_ns),
        latency_ns: record.running_ns.saturating_sub(record.runnable_ns),
        cpu: record.cpu,
        causes: blame::starved_causes(&evidence),
        evidence: keep_evidence.then(|| Box::new(Evidence::from(evidence))),
        ..LateEvent::default()
    })
}
