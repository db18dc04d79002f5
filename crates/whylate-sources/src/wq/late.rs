// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the BPF programs' record of a late item to a late event.

use whylate_model::{Labels, LateEvent, thread};

use super::gather::handler_labels;
use super::skel::types::late_item;
use crate::kernel::attach::{PlainData, text};
use crate::kernel::clock;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for late_item {}

/// Returns the late event of an item that a worker has just started.
pub(super) fn event_of(item: &late_item, stack: Vec<String>) -> LateEvent {
    let mut labels = Labels::new();
    handler_labels(&text(&item.handler), &mut labels);
    let subject = labels.get("handler").cloned().unwrap_or_default();
    labels.insert("workqueue".to_owned(), text(&item.workqueue));
    labels.insert("worker".to_owned(), text(&item.worker_comm));
    labels.insert("worker_pid".to_owned(), thread::number(item.worker_tid));
    labels.insert("queued_by".to_owned(), text(&item.comm));
    labels.insert("queued_by_pid".to_owned(), thread::number(item.pid));
    labels.insert("queued_by_tid".to_owned(), thread::number(item.tid));
    if item.by_rescuer != 0 {
        labels.insert("rescuer".to_owned(), "yes".to_owned());
    }
    // 0: it was activated when it was queued.
    let activated_ns = item.activated_ns.max(item.queued_ns);
    LateEvent {
        subject,
        labels,
        at_unix_ns: clock::unix_ns_of(item.started_ns),
        at_ns: item.started_ns,
        latency_ns: item.started_ns.saturating_sub(item.queued_ns),
        cpu: item.cpu,
        phases: vec![
            ("activate".to_owned(), activated_ns - item.queued_ns),
            ("pool".to_owned(), item.started_ns.saturating_sub(activated_ns)),
        ],
        stack,
        ..LateEvent::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_to_latency() {
        for (activated_ns, activate_ns, pool_ns) in [(0, 0, 30), (115, 15, 15)] {
            let item = late_item { queued_ns: 100, activated_ns, started_ns: 130, ..late_item::default() };
            let event = event_of(&item, Vec::new());
            assert_eq!(event.latency_ns, 30);
            assert_eq!(event.phases, [("activate".to_owned(), activate_ns), ("pool".to_owned(), pool_ns)]);
        }
    }
}
