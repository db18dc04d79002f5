// SPDX-License-Identifier: MIT OR Apache-2.0
//! The account of a CPU, put in order for looking up.

use super::frames::{Interrupted, interrupted};
use super::window::Span;
use crate::occupancy::{Merged, Taken};
use crate::{Interval, Occupancy, Occupant};

/// The time an account sees between an interrupt and the next pending one: leaving the one, entering the other.
const BETWEEN_INTERRUPTS_NS: u64 = 20_000;

/// The same where the next one is a device's, which a hypervisor may have to bring in after a timer's.
const UNTIL_A_DEVICES_NS: u64 = 100_000;

/// The intervals of an account, in order of time and disjoint whatever the account looks like.
#[derive(Debug)]
pub(super) struct Timeline<'a> {
    pub cpu: u32,
    pieces: Vec<Piece<'a>>,
    merged: Option<&'a Merged>,
}

/// An interval or a part of one, without what an earlier one has already.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub span: Span,
    pub interval: &'a Interval,
    /// With what an earlier one has.
    pub whole: Span,
    /// What took parts of the whole.
    pub taken: Taken,
    /// The parts in which a later interrupt could not come in, and the stack that it found.
    pub irqs_off: Vec<(Span, &'a [String])>,
}

#[derive(Debug)]
pub(super) enum Known<'t, 'a> {
    /// Who had the CPU.
    Piece(&'t Piece<'a>),
    /// Only who had how much of a longer span.
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
                cut_where_stopped(&mut pieces, interval);
                pieces.push(Piece { span, interval, whole, taken: interval.taken, irqs_off: Vec::new() });
            }
        }
        find_irqs_off(&mut pieces);
        Timeline { cpu: occupancy.cpu, pieces, merged: occupancy.merged.as_ref() }
    }

    /// Goes through a span in order of time, and says of each part what is known of it.
    pub fn each(&self, span: Span, mut seen: impl FnMut(Span, Known<'_, 'a>)) {
        let mut now_ns = span.from_ns;
        let first = self.pieces.partition_point(|piece| piece.span.to_ns <= span.from_ns);
        for piece in self.pieces[first..].iter().take_while(|piece| piece.span.from_ns < span.to_ns) {
            let part = piece.span.within(span);
            self.each_between(Span { from_ns: now_ns, to_ns: part.from_ns }, &mut seen);
            seen(part, Known::Piece(piece));
            now_ns = part.to_ns;
        }
        self.each_between(Span { from_ns: now_ns, to_ns: span.to_ns }, &mut seen);
    }

    /// Since when interrupts were off before the last one that began by that moment, or before the first of those that
    /// came in with it; `None` where they are not known to have been.
    pub fn held_back_since_ns(&self, at_ns: u64) -> Option<u64> {
        let began = self.pieces.partition_point(|piece| piece.span.from_ns <= at_ns);
        let is_irq = |piece: &Piece<'_>| matches!(piece.interval.occupant, Occupant::Irq { .. });
        let last = self.pieces[..began].iter().rposition(is_irq)?;
        let first = first_of_burst(&self.pieces, last, UNTIL_A_DEVICES_NS, false);
        let mut since_ns = self.pieces[first].span.from_ns;
        for piece in self.pieces[..first].iter().rev() {
            // In each piece they were off up to its end, if at all; the last one is the earliest.
            match (piece.irqs_off.first(), piece.irqs_off.last()) {
                (Some((last, _)), Some((off, _))) if last.to_ns == since_ns => since_ns = off.from_ns,
                _ => break,
            }
        }
        (since_ns < self.pieces[first].span.from_ns).then_some(since_ns)
    }

    /// The same of a span without intervals.
    fn each_between(&self, span: Span, seen: &mut impl FnMut(Span, Known<'_, 'a>)) {
        let Some(merged) = self.merged else {
            seen(span, Known::Nothing);
            return;
        };
        let part = Span { from_ns: merged.start_ns, to_ns: merged.end_ns }.within(span);
        seen(Span { from_ns: span.from_ns, to_ns: part.from_ns }, Known::Nothing);
        seen(part, Known::Merged(merged));
        seen(Span { from_ns: part.to_ns, to_ns: span.to_ns }, Known::Nothing);
    }
}

/// User code has interrupts enabled: one that came late in it was held up by the hypervisor, from when it was due. As
/// much of what that took from the last piece was not before.
fn cut_where_stopped(pieces: &mut Vec<Piece<'_>>, irq: &Interval) {
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

/// Finds where interrupts were disabled: from when a late interrupt was due to when it came in, as far as nothing shows
/// that they were enabled in between.
///
/// Whoever gives up the CPU does so with interrupts enabled, so only the last occupant before the interrupt can have
/// disabled them, and not before another interrupt came in; except in the switch from one thread to the next, which the
/// stack shows. An idle state is left with interrupts disabled, which is nobody's doing. An instant before several late
/// interrupts belongs to the one that came first: it saw who enabled them.
fn find_irqs_off(pieces: &mut [Piece<'_>]) {
    for irq in 0..pieces.len() {
        let interval = pieces[irq].interval;
        if !matches!(interval.occupant, Occupant::Irq { .. }) || interval.late_ns == 0 {
            continue;
        }
        // In user code interrupts are enabled: something else made this one late. Without a stack that may be so.
        let Interrupted::Kernel(stack) = interrupted(&interval.stack) else {
            continue;
        };
        if stack.is_empty() {
            continue;
        }
        let due_ns = interval.start_ns.saturating_sub(interval.late_ns);
        let mut in_switch = is_in_switch(stack);
        let mut blamed: Option<&Occupant> = None;
        for index in (0..first_of_burst(pieces, irq, BETWEEN_INTERRUPTS_NS, is_leaving_interrupt(stack))).rev() {
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
            // Earlier interrupts have the end of the piece.
            let to_ns = piece.irqs_off.last().map_or(piece.span.to_ns, |&(span, _)| span.from_ns);
            let from_ns = due_ns.max(piece.span.from_ns);
            if from_ns < to_ns {
                piece.irqs_off.push((Span { from_ns, to_ns }, stack));
            }
        }
    }
}

/// The first of the interrupts that came in right after one another up to this one, at most `most_ns` apart;
/// or any time apart, where the last one came in while the one before was being left.
fn first_of_burst(pieces: &[Piece<'_>], irq: usize, most_ns: u64, is_leaving: bool) -> usize {
    let mut first = irq;
    for index in (0..irq).rev() {
        let (piece, next_ns) = (&pieces[index], pieces[index + 1].span.from_ns);
        let between_ns = pieces[first].span.from_ns - next_ns;
        let is_left = is_leaving && first == irq;
        if piece.span.to_ns != next_ns || (between_ns > most_ns && !is_left) {
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

/// Whether interrupts were enabled on the way out of an interrupt, to which they were disabled: whoever it has woken is
/// to run, and the scheduler enables them before it looks for it (preempt_schedule_irq() in kernel/sched/core.c).
fn is_leaving_interrupt(stack: &[String]) -> bool {
    stack.first().and_then(|frame| frame.split(['+', ' ']).next()) == Some("preempt_schedule_irq")
}

/// Whether interrupts were enabled at the end of a switch between threads: they were disabled since before it.
fn is_in_switch(stack: &[String]) -> bool {
    // Above it are only the functions that release the run queue's lock.
    stack.iter().take(3).any(|frame| frame.starts_with("finish_task_switch"))
}
