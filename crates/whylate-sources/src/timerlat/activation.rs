// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timestamps shared by the measured thread of a CPU and the BPF programs, in mapped memory.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::skel::types::activation;
use super::tally::Times;
use crate::kernel::mapped::MappedArray;

#[derive(Clone, Copy, Debug)]
pub(super) struct Activation<'a> {
    due_ns: &'a AtomicU64,
    irq_ns: &'a AtomicU64,
    thread_ns: &'a AtomicU64,
    task: &'a AtomicU64,
    is_measured: &'a AtomicU32,
    explain_over_ns: &'a AtomicU64,
    explain_irq_over_ns: &'a AtomicU64,
    max_from_idle_ns: &'a AtomicU64,
}

impl<'a> Activation<'a> {
    pub(super) fn on_cpu(map: &'a MappedArray, cpu: u32) -> Self {
        let at = |offset| map.u64_at(cpu as usize, offset);
        Activation {
            due_ns: at(offset_of!(activation, due_ns)),
            irq_ns: at(offset_of!(activation, irq_ns)),
            thread_ns: at(offset_of!(activation, thread_ns)),
            task: at(offset_of!(activation, task)),
            is_measured: map.u32_at(cpu as usize, offset_of!(activation, is_measured)),
            explain_over_ns: at(offset_of!(activation, explain_over_ns)),
            explain_irq_over_ns: at(offset_of!(activation, explain_irq_over_ns)),
            max_from_idle_ns: at(offset_of!(activation, max_from_idle_ns)),
        }
    }

    /// Makes the programs look for the timer of a thread on this CPU, or stop doing so.
    pub(super) fn measure(&self, is_measured: bool) {
        // The programs find out the task.
        self.task.store(0, Ordering::Release);
        self.is_measured.store(is_measured.into(), Ordering::Release);
    }

    /// Sets the thread and interrupt latencies from which the programs send a late event; `u64::MAX` for never.
    pub(super) fn set_thresholds(&self, thread_ns: u64, irq_ns: u64) {
        self.explain_over_ns.store(thread_ns, Ordering::Release);
        self.explain_irq_over_ns.store(irq_ns, Ordering::Release);
    }

    /// Sets only the thread latency from which the programs send a late event.
    pub(super) fn set_thread_threshold(&self, thread_ns: u64) {
        self.explain_over_ns.store(thread_ns, Ordering::Release);
    }

    /// Resets the longest latency that found the CPU idle.
    pub(super) fn reset_max_from_idle(&self) {
        self.max_from_idle_ns.store(0, Ordering::Relaxed);
    }

    pub(super) fn max_from_idle_ns(&self) -> u64 {
        self.max_from_idle_ns.load(Ordering::Relaxed)
    }

    /// Sets the timer of the next activation, before the thread sleeps.
    pub(super) fn expect(&self, due_ns: u64) {
        // In this order: a timer function that runs in between finds no expiry that it could take for its own.
        self.due_ns.store(0, Ordering::Release);
        self.irq_ns.store(0, Ordering::Release);
        self.thread_ns.store(0, Ordering::Release);
        self.due_ns.store(due_ns, Ordering::Release);
    }

    /// Returns the timestamps of the activation, once the thread is back in user space.
    pub(super) fn times(&self, due_ns: u64, user_ns: u64) -> Times {
        Times {
            due_ns,
            irq_ns: self.irq_ns.load(Ordering::Acquire),
            thread_ns: self.thread_ns.load(Ordering::Acquire),
            user_ns,
        }
    }
}
