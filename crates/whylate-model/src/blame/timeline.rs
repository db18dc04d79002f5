// SPDX-License-Identifier: MIT OR Apache-2.0
//! Index over the account of one CPU, for lookups by time.

use super::frames::{Interrupted, interrupted};
use super::span::Span;
use crate::occupancy::{Merged, Taken};
use crate::{Interval, Occupancy, Occupant};

/// Maximum gap in the account between an interrupt and the next pending one: exit from the first, entry of the second.
const MAX_GAP_NS: u64 = 20_000;

/// Maximum gap before a device's interrupt, which a hypervisor may have to inject after a timer's.
const MAX_DEVICE_GAP_NS: u64 = 100_000;

/// The intervals of an account, sorted and made disjoint even if the account is inconsistent.
#[derive(Debug)]
pub(super) struct Timeline<'a> {
    pub cpu: u32,
    pieces: Vec<Piece<'a>>,
    merged: Option<&'a Merged>,
}

/// An interval or a part of it, without the time covered by earlier intervals.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub span: Span,
    pub interval: &'a Interval,
    /// The whole interval, including time covered by earlier intervals.
    pub whole: Span,
    /// Steal and NMI time within `whole`.
    pub taken: Taken,
    /// The parts in which a later interrupt was held off, with its stack.
    pub irqs_off: Vec<(Span, &'a [String])>,
}

#[derive(Debug)]
pub(super) enum Coverage<'t, 'a> {
    /// The occupant is known.
    Piece(&'t Piece<'a>),
    /// Only the total time of each occupant in a longer span is known.
    Merged(&'a Merged),
    Nothing,
}

impl<'a> Timeline<'a> {
    pub fn new(occupancy: &'a Occupancy) -> Self {
        let mut intervals: Vec<&Interval> = occupancy.intervals.iter().collect();
        intervals.sort_by_key(|interval| (interval.start_ns, interval.end_ns));
        let mut pieces: Vec<Piece> = Vec::with_capacity(intervals.len());
        for interval in intervals {
            let from_ns = pieces.last().map_or(0, |last| last.span.to_ns).max(interval.start_ns);
            if from_ns < interval.end_ns {
                let whole = Span { from_ns: interval.start_ns, to_ns: interval.end_ns };
                let span = Span { from_ns, ..whole };
                split_at_steal(&mut pieces, interval);
                pieces.push(Piece { span, interval, whole, taken: interval.taken, irqs_off: Vec::new() });
            }
        }
        find_irqs_off(&mut pieces);
        Timeline { cpu: occupancy.cpu, pieces, merged: occupancy.merged.as_ref() }
    }

    /// Walks a span in order of time and reports the known facts about each part.
    pub fn each(&self, span: Span, mut seen: impl FnMut(Span, Coverage<'_, 'a>)) {
        let mut now_ns = span.from_ns;
        let first = self.pieces.partition_point(|piece| piece.span.to_ns <= span.from_ns);
        for piece in self.pieces[first..].iter().take_while(|piece| piece.span.from_ns < span.to_ns) {
            let part = piece.span.within(span);
            self.each_gap(Span { from_ns: now_ns, to_ns: part.from_ns }, &mut seen);
            seen(part, Coverage::Piece(piece));
            now_ns = part.to_ns;
        }
        self.each_gap(Span { from_ns: now_ns, to_ns: span.to_ns }, &mut seen);
    }

    /// Returns since when interrupts were disabled before the last interrupt that started at or before `at_ns`, or
    /// before the first interrupt of its burst; `None` if they are not known to have been disabled.
    pub fn irqs_off_since_ns(&self, at_ns: u64) -> Option<u64> {
        let began = self.pieces.partition_point(|piece| piece.span.from_ns <= at_ns);
        let is_irq = |piece: &Piece<'_>| matches!(piece.interval.occupant, Occupant::Irq { .. });
        let last = self.pieces[..began].iter().rposition(is_irq)?;
        let first = first_of_burst(&self.pieces, last, MAX_DEVICE_GAP_NS, false);
        let mut since_ns = self.pieces[first].span.from_ns;
        for piece in self.pieces[..first].iter().rev() {
            // In each piece they were disabled up to its end, if at all; the last entry is the earliest.
            match (piece.irqs_off.first(), piece.irqs_off.last()) {
                (Some((last, _)), Some((off, _))) if last.to_ns == since_ns => since_ns = off.from_ns,
                _ => break,
            }
        }
        (since_ns < self.pieces[first].span.from_ns).then_some(since_ns)
    }

    /// Reports the parts of a span without intervals.
    fn each_gap(&self, span: Span, seen: &mut impl FnMut(Span, Coverage<'_, 'a>)) {
        let Some(merged) = self.merged else {
            seen(span, Coverage::Nothing);
            return;
        };
        let part = Span { from_ns: merged.start_ns, to_ns: merged.end_ns }.within(span);
        seen(Span { from_ns: span.from_ns, to_ns: part.from_ns }, Coverage::Nothing);
        seen(part, Coverage::Merged(merged));
        seen(Span { from_ns: part.to_ns, to_ns: span.to_ns }, Coverage::Nothing);
    }
}

/// Splits the last piece where the hypervisor stopped the vCPU. User code runs with interrupts enabled, so one that
/// came late there was held up by the hypervisor, from when it was due. The steal time of that piece moves to the
/// stopped part first.
fn split_at_steal(pieces: &mut Vec<Piece<'_>>, irq: &Interval) {
    let is_stopped = irq.late_ns > 0 && interrupted(&irq.stack) == Interrupted::User;
    let Some(last) = pieces.last_mut().filter(|last| is_stopped && last.span.to_ns == irq.start_ns) else { return };
    let due_ns = irq.start_ns.saturating_sub(irq.late_ns);
    if due_ns <= last.span.from_ns || due_ns >= last.span.to_ns {
        return;
    }
    let stopped = Span { from_ns: due_ns, ..last.span };
    let steal_ns = last.taken.steal_ns.min(stopped.ns());
    let taken = Taken { steal_ns, ..Taken::default() };
    last.taken.steal_ns -= steal_ns;
    (last.span.to_ns, last.whole.to_ns) = (due_ns, due_ns);
    let interval = last.interval;
    pieces.push(Piece { span: stopped, interval, whole: stopped, taken, irqs_off: Vec::new() });
}

/// Finds where interrupts were disabled: from when a late interrupt was due until it came in, unless something shows
/// that they were enabled in between.
///
/// A thread switches out with interrupts enabled, so only the last occupant before the interrupt can have disabled
/// them, and only since the previous interrupt. The exception is a context switch itself, which the stack shows. The
/// exit from an idle state runs with interrupts disabled, which is no thread's fault. Where several late interrupts
/// overlap, the first one gets the time: its stack shows the code that enabled them.
fn find_irqs_off(pieces: &mut [Piece<'_>]) {
    for irq in 0..pieces.len() {
        let interval = pieces[irq].interval;
        if !matches!(interval.occupant, Occupant::Irq { .. }) || interval.late_ns == 0 {
            continue;
        }
        // In user code interrupts are enabled, so something else delayed this one. The same may hold without a stack.
        let Interrupted::Kernel(stack) = interrupted(&interval.stack) else {
            continue;
        };
        if stack.is_empty() {
            continue;
        }
        let due_ns = interval.start_ns.saturating_sub(interval.late_ns);
        let mut in_switch = is_in_switch(stack);
        let mut blamed: Option<&Occupant> = None;
        for index in (0..first_of_burst(pieces, irq, MAX_GAP_NS, is_leaving_interrupt(stack))).rev() {
            let next_ns = pieces[index + 1].span.from_ns;
            let piece = &mut pieces[index];
            if piece.span.to_ns != next_ns || next_ns <= due_ns {
                break;
            }
            match &piece.interval.occupant {
                Occupant::Irq { .. } | Occupant::Idle => break,
                same if blamed.is_none_or(|blamed| blamed == same) => {}
                _ if in_switch => in_switch = false,
                _ => break,
            }
            blamed = Some(&piece.interval.occupant);
            // Earlier interrupts have the end of the piece already.
            let to_ns = piece.irqs_off.last().map_or(piece.span.to_ns, |&(span, _)| span.from_ns);
            let from_ns = due_ns.max(piece.span.from_ns);
            if from_ns < to_ns {
                piece.irqs_off.push((Span { from_ns, to_ns }, stack));
            }
        }
    }
}

/// Returns the first interrupt of the burst that ends with `irq`: interrupts at most `max_gap_ns` apart, or any time
/// apart if the last one came in during the exit of the previous one.
fn first_of_burst(pieces: &[Piece<'_>], irq: usize, max_gap_ns: u64, is_leaving: bool) -> usize {
    let mut first = irq;
    for index in (0..irq).rev() {
        let (piece, next_ns) = (&pieces[index], pieces[index + 1].span.from_ns);
        let between_ns = pieces[first].span.from_ns - next_ns;
        let is_left = is_leaving && first == irq;
        if piece.span.to_ns != next_ns || (between_ns > max_gap_ns && !is_left) {
            break;
        }
        match &piece.interval.occupant {
            Occupant::Irq { .. } => first = index,
            Occupant::Idle => break,
            occupant if is_left && index + 1 < irq && pieces[index + 1].interval.occupant != *occupant => break,
            _ => {}
        }
    }
    first
}

/// Returns whether interrupts were enabled during the exit of an interrupt, which runs with interrupts disabled: the
/// interrupt woke a thread, and the scheduler enables interrupts before it picks one (preempt_schedule_irq() in
/// kernel/sched/core.c).
fn is_leaving_interrupt(stack: &[String]) -> bool {
    stack.first().and_then(|frame| frame.split(['+', ' ']).next()) == Some("preempt_schedule_irq")
}

/// Returns whether interrupts were enabled at the end of a context switch: they were disabled since before it.
fn is_in_switch(stack: &[String]) -> bool {
    // Only the functions that release the run queue's lock can be further in.
    stack.iter().take(3).any(|frame| frame.starts_with("finish_task_switch"))
}
