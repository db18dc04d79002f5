// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the programs' records into the model's types.

use std::mem::offset_of;

use whylate_model::blame::{Found, LateTick, Reason, interrupted_stack, tick_causes};
use whylate_model::late::cpu_subject;
use whylate_model::{ActorName, LateEvent, Occupancy};

use super::programs::types::{
    culprit_key, interrupted_stack as interrupted_stack_record, late_tick, stack_taken, tick_found, tick_reason,
};
use crate::cpu_account;
use crate::irqsoff::IrqsoffOptions;
use crate::kernel::symbols::KernelSymbols;
use crate::kernel::{attach, clock};

/// Maximum number of frames of a stack from inside a section.
const TAKEN_FRAMES: usize = (size_of::<stack_taken>() - offset_of!(stack_taken, frames)) / size_of::<u64>();

/// A late tick.
#[derive(Clone, Debug)]
pub(super) struct Late {
    due_ns: u64,
    came_ns: u64,
    delivery_ns: u64,
    steal_ns: u64,
    perhaps_stolen_ns: u64,
    handlers_ns: u64,
    /// Interrupted frames as bytes, innermost first; may be empty.
    pub stack: Vec<u8>,
    cpu: u32,
    tid: u32,
    name: String,
    /// Stack from inside the section, innermost frame first; may be empty.
    inside: Vec<u64>,
    key: culprit_key,
    handler: String,
}

impl Late {
    /// Decodes a record of the ring buffer. Also returns the window that follows it, if any.
    pub(super) fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let text_at = |at: usize| {
            let characters: Vec<i8> = bytes.get(at..at + 16)?.iter().map(|&byte| byte as i8).collect();
            Some(attach::text(&characters))
        };
        // Left out if there is neither a stack nor a window.
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
            perhaps_stolen_ns: u64_at(offset_of!(late_tick, perhaps_stolen_ns))?,
            handlers_ns: u64_at(offset_of!(late_tick, handlers_ns))?,
            stack: stack_of(bytes.get(offset_of!(late_tick, stack)..)?)?.to_vec(),
            cpu: u32_at(offset_of!(late_tick, cpu))?,
            tid: u32_at(offset_of!(late_tick, tid))?,
            name: text_at(offset_of!(late_tick, comm))?,
            inside: (0..frames.min(TAKEN_FRAMES)).map_while(frame_at).collect(),
            handler: text_at(offset_of!(late_tick, name))?,
            key,
        };
        Some((late, bytes.get(offset_of!(late_tick, window)..).unwrap_or_default()))
    }

    /// Builds the late event; `stack` is the interrupted stack.
    pub(super) fn event(
        &self,
        stack: Vec<String>,
        occupancy: Option<Occupancy>,
        options: &IrqsoffOptions,
        period_ns: u64,
        symbols: &mut KernelSymbols,
    ) -> LateEvent {
        let tick = LateTick {
            due_ns: self.due_ns,
            came_ns: self.came_ns,
            found: found(&self.key),
            reason: reason(&self.key, &self.handler, symbols),
            stack,
            steal_ns: self.steal_ns,
            perhaps_stolen_ns: self.perhaps_stolen_ns,
            handlers_ns: self.handlers_ns,
            cpu: self.cpu,
            inside: inside_of(&self.inside, symbols),
            thread: ActorName::thread(self.name.as_str(), self.tid),
            occupancy,
        };
        let mut labels = tick.keeper().labels();
        labels.insert("task".to_owned(), tick.thread.to_string());
        if options.timer_test {
            let overruns = tick.late_ns().saturating_add(self.delivery_ns) / period_ns;
            labels.insert("overruns".to_owned(), overruns.to_string());
        }
        LateEvent {
            subject: cpu_subject(self.cpu),
            labels,
            at_unix_ns: clock::unix_ns_of(self.came_ns),
            at_ns: self.came_ns,
            latency_ns: tick.late_ns(),
            at_most_ns: Some(tick.late_ns().saturating_add(self.delivery_ns).saturating_add(period_ns)),
            cpu: self.cpu,
            stack: interrupted_stack(&tick.stack).to_vec(),
            inside: tick.inside.clone(),
            causes: tick_causes(&tick),
            evidence: options.keep_evidence.then(|| Box::new(tick.into())),
            ..LateEvent::default()
        }
    }
}

/// Returns the frames of a `struct interrupted_stack`, as bytes.
pub(super) fn stack_of(record: &[u8]) -> Option<&[u8]> {
    let taken = i64::from_ne_bytes(*record.first_chunk()?);
    let most = size_of_val(&interrupted_stack_record::default().frames);
    let from = offset_of!(interrupted_stack_record, frames);
    record.get(from..from + usize::try_from(taken).unwrap_or(0).min(most))
}

/// Names all frames: the whole stack belongs to the sampled code, also in a BPF program.
pub(super) fn inside_of(frames: &[u64], symbols: &mut KernelSymbols) -> Vec<String> {
    frames.iter().map(|&address| symbols.name(address).to_owned()).collect()
}

/// Decodes the code that the interrupt interrupted.
pub(super) fn found(key: &culprit_key) -> Found {
    match tick_found(key.found.into()) {
        tick_found::FOUND_USER => Found::User,
        tick_found::FOUND_IDLE => Found::Idle,
        _ => Found::Kernel,
    }
}

/// Decodes why the tick was late; `name` is that of a device's handler.
pub(super) fn reason(key: &culprit_key, name: &str, symbols: &mut KernelSymbols) -> Reason {
    let number = || key.id.to_string();
    match tick_reason(key.reason.into()) {
        tick_reason::REASON_STEAL => Reason::Steal,
        tick_reason::REASON_PERHAPS_STEAL => Reason::PerhapsSteal,
        tick_reason::REASON_DEVICE_IRQ if name.is_empty() => Reason::Handler(format!("irq {}", number())),
        tick_reason::REASON_DEVICE_IRQ => Reason::Handler(name.to_owned()),
        tick_reason::REASON_CALLBACK => Reason::Handler(symbols.name(key.id).to_owned()),
        tick_reason::REASON_VECTOR => {
            let vector = u32::try_from(key.id).ok().and_then(cpu_account::vectors::name_of);
            Reason::Handler(vector.map_or_else(|| name.to_owned(), str::to_owned))
        }
        _ => Reason::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saturates_on_impossible_delivery_time() {
        let mut bytes = vec![0; size_of::<late_tick>()];
        let mut put = |at: usize, ns: u64| bytes[at..at + 8].copy_from_slice(&ns.to_ne_bytes());
        put(offset_of!(late_tick, due_ns), 10);
        put(offset_of!(late_tick, came_ns), 15);
        put(offset_of!(late_tick, delivery_ns), u64::MAX);
        let (late, _) = Late::read(&bytes).expect("it is whole");
        let options = IrqsoffOptions { timer_test: true, ..IrqsoffOptions::default() };
        let event = late.event(Vec::new(), None, &options, 1, &mut KernelSymbols::default());
        assert_eq!((event.latency_ns, event.at_most_ns), (5, Some(u64::MAX)));
        assert_eq!(event.labels["overruns"], u64::MAX.to_string());
    }
}
