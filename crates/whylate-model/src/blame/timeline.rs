// SPDX-License-Identifier: MIT OR Apache-2.0
//! The account of a CPU, put in order for looking up.

use super::frames::{Interrupted, interrupted};
use super::window::Span;
use crate::occupancy::Merged;
use crate::{Interval, Occupancy, Occupant};

/// The intervals of an account, in order of time and disjoint whatever the account looks like.
#[derive(Debug)]
pub(super) struct Timeline<'a> {
    pub cpu: u32,
    pieces: Vec<Piece<'a>>,
    merged: Option<&'a Merged>,
}

/// An interval, without what an earlier one has already.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    pub span: Span,
    pub interval: &'a Interval,
    /// The parts in which a later interrupt could not come in, and the stack that it found.
    pub irqs_off: Vec<(Span, &'a [String])>,
}

/// What is known of a span.
#[derive(Debug)]
pub(super) enum Known<'t, 'a> {
    /// Who had the CPU.
    Piece(&'t Piece<'a>),
    /// Only who had how much of a longer span.
    Merged(&'a Merged),
    /// Nothing.
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
                let span = Span { from_ns, to_ns: interval.end_ns };
                pieces.push(Piece { span, interval, irqs_off: Vec::new() });
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

/// Finds where interrupts were disabled: from when a late interrupt was due to when it came in, except where the CPU was idle (an idle
/// state is left with interrupts disabled, which is no thread's doing) or handled another interrupt.
///
/// An instant before several late interrupts belongs to the one that came first: it saw who enabled interrupts.
fn find_irqs_off(pieces: &mut [Piece<'_>]) {
    // Late interrupts after the piece at hand: when they were due and what they found. The first to come is last; those that came
    // later were due earlier, or they say nothing new.
    let mut late: Vec<(u64, &[String])> = Vec::new();
    for piece in pieces.iter_mut().rev() {
        // All that these cover is behind.
        while late.last().is_some_and(|&(due_ns, _)| due_ns >= piece.span.to_ns) {
            late.pop();
        }
        match piece.interval.occupant {
            Occupant::Thread { .. } | Occupant::Work { .. } | Occupant::Softirq { .. } => {
                let mut to_ns = piece.span.to_ns;
                for &(due_ns, stack) in late.iter().rev() {
                    let from_ns = due_ns.max(piece.span.from_ns);
                    if from_ns >= to_ns {
                        break;
                    }
                    piece.irqs_off.push((Span { from_ns, to_ns }, stack));
                    to_ns = from_ns;
                }
            }
            Occupant::Irq { .. } if piece.interval.late_ns > 0 => {
                let due_ns = piece.interval.start_ns.saturating_sub(piece.interval.late_ns);
                // Between two instructions of user code interrupts are enabled: something else made this one late.
                if let Interrupted::Kernel(stack) = interrupted(&piece.interval.stack) {
                    while late.last().is_some_and(|&(other_ns, _)| other_ns >= due_ns) {
                        late.pop();
                    }
                    late.push((due_ns, stack));
                }
            }
            Occupant::Irq { .. } | Occupant::Idle => {}
        }
    }
}
