// SPDX-License-Identifier: MIT OR Apache-2.0
//! From the programs' records to the model's words.

use std::mem::offset_of;

use whylate_model::blame::{Found, Reason};

use super::programs::types::{culprit_key, late_tick, stack_taken, tick_found, tick_reason};
use crate::attach;
use crate::occupancy;
use crate::symbols::KernelSymbols;

/// Frames that a stack inside a section has, at most.
const TAKEN_FRAMES: usize = (size_of::<stack_taken>() - offset_of!(stack_taken, frames)) / size_of::<u64>();

/// One late tick.
#[derive(Clone, Debug)]
pub(super) struct Late {
    pub due_ns: u64,
    pub came_ns: u64,
    pub delivery_ns: u64,
    pub steal_ns: u64,
    pub handlers_ns: u64,
    pub found: Found,
    /// Its number; negative without one.
    pub stack: i32,
    pub cpu: u32,
    pub tid: u32,
    pub name: String,
    /// The stack that was found in the section, if any; innermost first.
    pub inside: Vec<u64>,
    key: culprit_key,
    handler: String,
}

impl Late {
    /// From a record of the ring, with the window that follows it, if any.
    pub(super) fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let text_at = |at: usize| {
            let characters: Vec<i8> = bytes.get(at..at + 16)?.iter().map(|&byte| byte as i8).collect();
            Some(attach::text(&characters))
        };
        // Left out where there is neither one nor a window.
        let inside_at = offset_of!(late_tick, inside);
        let taken = u64_at(inside_at + offset_of!(stack_taken, bytes)).unwrap_or(0) as i64;
        let frames = usize::try_from(taken).unwrap_or(0) / size_of::<u64>();
        let frame_at = |frame: usize| u64_at(inside_at + offset_of!(stack_taken, frames) + frame * size_of::<u64>());
        let key_at = offset_of!(late_tick, key);
        let key: culprit_key = attach::read_plain(bytes.get(key_at..)?)?;
        let late = Late {
            due_ns: u64_at(offset_of!(late_tick, due_ns))?,
            came_ns: u64_at(offset_of!(late_tick, came_ns))?,
            delivery_ns: u64_at(offset_of!(late_tick, delivery_ns))?,
            steal_ns: u64_at(offset_of!(late_tick, steal_ns))?,
            handlers_ns: u64_at(offset_of!(late_tick, handlers_ns))?,
            found: found(&key),
            stack: key.stack,
            cpu: u32_at(offset_of!(late_tick, cpu))?,
            tid: u32_at(offset_of!(late_tick, tid))?,
            name: text_at(offset_of!(late_tick, comm))?,
            inside: (0..frames.min(TAKEN_FRAMES)).map_while(frame_at).collect(),
            handler: text_at(offset_of!(late_tick, name))?,
            key,
        };
        Some((late, bytes.get(offset_of!(late_tick, window)..).unwrap_or_default()))
    }

    pub(super) fn reason(&self, symbols: &mut KernelSymbols) -> Reason {
        reason(&self.key, &self.handler, symbols)
    }
}

/// What the interrupt found.
pub(super) fn found(key: &culprit_key) -> Found {
    match tick_found(key.found.into()) {
        tick_found::FOUND_USER => Found::User,
        tick_found::FOUND_IDLE => Found::Idle,
        _ => Found::Kernel,
    }
}

/// What made it late; `name` is that of a device's handler.
pub(super) fn reason(key: &culprit_key, name: &str, symbols: &mut KernelSymbols) -> Reason {
    let number = || key.id.to_string();
    match tick_reason(key.reason.into()) {
        tick_reason::REASON_STEAL => Reason::Steal,
        tick_reason::REASON_DEVICE_IRQ if name.is_empty() => Reason::Handler(format!("irq {}", number())),
        tick_reason::REASON_DEVICE_IRQ => Reason::Handler(name.to_owned()),
        tick_reason::REASON_CALLBACK => Reason::Handler(symbols.name(key.id).to_owned()),
        tick_reason::REASON_VECTOR => {
            let vector = u32::try_from(key.id).ok().and_then(occupancy::vector);
            Reason::Handler(vector.map_or_else(|| name.to_owned(), str::to_owned))
        }
        _ => Reason::Unknown,
    }
}
