// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the BPF programs' record of a late item to a late event with causes.

use whylate_model::LateEvent;
use whylate_model::blame::{self, HeldSlot, PoolClass, Wakeup, WorkEvidence};

use super::late;
use super::skel::types::{explained_item, held_slot, pool_class};
use crate::cpu_account::Windows;
use crate::kernel::attach::{self, PlainData};
use crate::kernel::symbols::KernelSymbols;

// SAFETY: integers and arrays of integers only.
#[allow(unsafe_code)]
unsafe impl PlainData for explained_item {}

/// Returns the late event of a record, without the stack that queued the item, and the ID of that stack.
pub(super) fn event_of(
    bytes: &[u8],
    windows: &mut Windows,
    symbols: &mut KernelSymbols,
    keep_evidence: bool,
) -> Option<(LateEvent, i32)> {
    let record: explained_item = attach::read_plain(bytes)?;
    let window = bytes.get(size_of::<explained_item>()..)?;
    let mut event = late::event_of(&record.late, Vec::new());
    let evidence = WorkEvidence {
        queued_ns: record.late.queued_ns,
        activated_ns: record.late.activated_ns.max(record.late.queued_ns),
        started_ns: record.late.started_ns,
        workqueue: attach::text(&record.late.workqueue),
        pool: match pool_class(record.pool) {
            pool_class::POOL_IS_HIGHPRI => PoolClass::Highpri,
            pool_class::POOL_IS_UNBOUND => PoolClass::Unbound,
            pool_class::POOL_IS_SOFTIRQ => PoolClass::Softirq,
            _ => PoolClass::Normal,
        },
        worker_tid: record.late.worker_tid,
        by_rescuer: record.late.by_rescuer != 0,
        worker_created_ns: record.worker_created_ns,
        wakeup: (record.woken_ns != 0).then(|| Wakeup {
            woken_ns: record.woken_ns,
            moved: (record.moved_ns != 0).then_some((record.moved_ns, record.moved_from)),
        }),
        slots: slots_of(&record, symbols),
        previous: slot(&record.previous, symbols),
        occupancy: windows.read(window, symbols)?,
    };
    event.causes = blame::causes(&evidence);
    event.evidence = keep_evidence.then(|| Box::new(evidence.into()));
    Some((event, record.late.stack))
}

fn slots_of(record: &explained_item, symbols: &mut KernelSymbols) -> Vec<HeldSlot> {
    let mut slots: Vec<HeldSlot> = record.slots.iter().filter_map(|from| slot(from, symbols)).collect();
    slots.sort_by_key(|slot| slot.ended_ns);
    // Overwritten holders are unknown. From the first known holder on, that one is blamed.
    let first_known_ns = slots.iter().map(|slot| slot.started_ns).min().unwrap_or(u64::MAX);
    let unknown_until_ns = record.holders_since_ns.min(first_known_ns);
    if unknown_until_ns > record.late.queued_ns {
        let unnamed = HeldSlot {
            handler: attach::text(&record.late.workqueue),
            started_ns: record.late.queued_ns,
            ended_ns: unknown_until_ns,
        };
        slots.insert(0, unnamed);
    }
    slots
}

fn slot(from: &held_slot, symbols: &mut KernelSymbols) -> Option<HeldSlot> {
    (from.ended_ns != 0).then(|| HeldSlot {
        handler: symbols.name(from.handler).to_owned(),
        started_ns: from.started_ns,
        ended_ns: from.ended_ns,
    })
}
