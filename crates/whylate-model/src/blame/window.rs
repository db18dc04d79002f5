// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arithmetic of blame: splits a window into parts, each explained by a rule.
//!
//! Each nanosecond of the window belongs to exactly one cause, so the causes add up to it; shares are whole numbers.

use super::held;
use super::pool::{HeldSlot, PoolClass};
use super::span::Span;
use super::sum::{Blame, Sum};
use super::timeline::{Coverage, Piece, Timeline};
use crate::occupancy::{Merged, MergedPart, Taken};
use crate::{Cause, CauseKind, Occupant};

/// Nothing was recorded: the time was before tracing started, or the record was overwritten.
pub(super) const NOT_RECORDED: &str = "not recorded";

/// Possible steal time: the hypervisor took it in the window or before.
pub(super) const PERHAPS_STOLEN: &str = "hypervisor, or the thread that had the CPU";

/// Rule by which a part of a window is explained.
#[derive(Clone, Debug)]
pub(super) enum Rule<'a> {
    /// One cause.
    Fixed(Blame),
    /// The occupants of the CPU.
    Occupants,
    /// The occupants of the CPU that the thread migrated from, while it waited in that run queue; the given cause where
    /// no occupant is known.
    OccupantsOf(&'a Timeline<'a>, Blame),
    /// The occupants of the CPU while an item of this pool was in progress and not sleeping, or while the awaited
    /// thread itself was running; `otherwise` at other times, and where the occupant is unknown.
    OccupantsWhileBusy {
        /// The pool; `None` if its items in progress are no reason to wait.
        pool: Option<PoolClass>,
        /// The cause at other times.
        otherwise: Blame,
    },
    /// The holders of the slots.
    Held {
        /// The holders.
        slots: &'a [HeldSlot],
        /// The cause where no holder is known.
        otherwise: Blame,
    },
}

/// A late event's window, and how each part of it is explained.
#[derive(Debug)]
pub(super) struct Window<'a> {
    span: Span,
    /// TID of the thread that the event waited for; its own run time is not blamed on another thread. 0 if none.
    awaited_tid: u32,
    /// End and rule of each part, in order and without gaps.
    parts: Vec<(u64, Rule<'a>)>,
}

impl<'a> Window<'a> {
    pub fn new(span: Span, awaited_tid: u32) -> Self {
        Window { span, awaited_tid, parts: Vec::new() }
    }

    /// Explains the window from where it is explained so far to `until_ns`, clipped to the window.
    pub fn part(&mut self, until_ns: u64, rule: Rule<'a>) {
        let reached_ns = self.reached_ns();
        let rest = Span { from_ns: reached_ns, to_ns: self.span.to_ns };
        let part = Span { from_ns: reached_ns, to_ns: until_ns }.within(rest);
        if part.ns() > 0 {
            self.parts.push((part.to_ns, rule));
        }
    }

    /// Returns the end of the explained part.
    pub fn reached_ns(&self) -> u64 {
        self.parts.last().map_or(self.span.from_ns, |&(until_ns, _)| until_ns)
    }

    /// Returns the causes, largest first; they add up to the window.
    pub fn causes(&self, timeline: &Timeline<'a>) -> Vec<Cause> {
        let mut sum = Sum::default();
        let mut from_ns = self.span.from_ns;
        for (to_ns, rule) in &self.parts {
            self.explain(Span { from_ns, to_ns: *to_ns }, rule, timeline, &mut sum);
            from_ns = *to_ns;
        }
        sum.add(Blame::unknown(NOT_RECORDED), self.span.ns() - sum.total_ns(), &[]);
        sum.into_causes()
    }

    fn explain(&self, span: Span, rule: &Rule<'a>, timeline: &Timeline<'a>, sum: &mut Sum<'a>) {
        match rule {
            Rule::Fixed(blame) => sum.add(blame.clone(), span.ns(), &[]),
            Rule::Held { slots, otherwise } => held::share(span, slots, otherwise, sum),
            Rule::Occupants => timeline.each(span, |part, known| match known {
                Coverage::Piece(piece) => self.blame_piece(part, piece, timeline.cpu, sum),
                Coverage::Merged(merged) => {
                    let ns = self.blame_merged(part, merged, timeline.cpu, |_| true, sum);
                    sum.add(Blame::unknown(NOT_RECORDED), part.ns() - ns, &[]);
                }
                Coverage::Nothing => sum.add(Blame::unknown(NOT_RECORDED), part.ns(), &[]),
            }),
            Rule::OccupantsOf(other, otherwise) => other.each(span, |part, known| match known {
                Coverage::Nothing => sum.add(otherwise.clone(), part.ns(), &[]),
                _ => self.explain(part, &Rule::Occupants, other, sum),
            }),
            Rule::OccupantsWhileBusy { pool, otherwise } => timeline.each(span, |part, known| match known {
                Coverage::Piece(piece) if self.is_awaited(&piece.interval.occupant) => {
                    self.blame_piece(part, piece, timeline.cpu, sum);
                }
                Coverage::Piece(piece) if pool.is_some_and(|pool| piece.interval.busy.has(pool)) => {
                    self.blame_piece(part, piece, timeline.cpu, sum);
                }
                Coverage::Piece(_) => sum.add(otherwise.clone(), part.ns(), &[]),
                Coverage::Merged(merged) => {
                    // A merged account does not say when the pool was busy. If a worker of the pool ran an item, it
                    // was, and the other occupants are assumed to have delayed that worker.
                    let of_pool = |part: &MergedPart| pool.is_some_and(|pool| pool.is_of(&part.occupant, timeline.cpu));
                    let busy = merged.parts.iter().any(of_pool);
                    let blamed = |part: &MergedPart| busy || self.is_awaited(&part.occupant);
                    let ns = self.blame_merged(part, merged, timeline.cpu, blamed, sum);
                    sum.add(otherwise.clone(), part.ns() - ns, &[]);
                }
                Coverage::Nothing => {
                    let lacks_account = pool.is_some() && otherwise.kind == CauseKind::Unknown;
                    let blame = if lacks_account { Blame::unknown(NOT_RECORDED) } else { otherwise.clone() };
                    sum.add(blame, part.ns(), &[]);
                }
            }),
        }
    }

    /// Blames the occupant of an interval for a part of it.
    ///
    /// Steal time is subtracted from the time with interrupts disabled first: a stopped vCPU delays an interrupt in the
    /// same way.
    pub fn blame_piece(&self, part: Span, piece: &Piece<'a>, cpu: u32, sum: &mut Sum<'a>) {
        let taken = taken_within(part, piece, self.span);
        let occupant = &piece.interval.occupant;
        add_taken(taken, sum);
        let mut steal_ns = taken.steal_ns + taken.perhaps_stolen_ns;
        let mut left_ns = part.ns() - steal_ns - taken.nmi_ns;
        for &(irqs_off, stack) in &piece.irqs_off {
            let ns = irqs_off.within(part).ns();
            let stolen_ns = ns.min(steal_ns);
            steal_ns -= stolen_ns;
            let ns = (ns - stolen_ns).min(left_ns);
            left_ns -= ns;
            sum.add_occupant(CauseKind::IrqsOff, occupant, cpu, ns, stack);
        }
        sum.add_occupant(self.kind_of(occupant), occupant, cpu, left_ns, &[]);
    }

    /// Blames the occupants of a merged span for a part of it, in proportion to their time; returns the time blamed.
    fn blame_merged(
        &self,
        part: Span,
        merged: &'a Merged,
        cpu: u32,
        blamed: impl Fn(&MergedPart) -> bool,
        sum: &mut Sum<'a>,
    ) -> u64 {
        let span_ns = merged.end_ns.saturating_sub(merged.start_ns);
        let (mut before_ns, mut total_ns) = (0, 0);
        for occupant in &merged.parts {
            // Rounding the running sum and not each part keeps the total exact.
            let after_ns = occupant.ns.saturating_add(before_ns).min(span_ns);
            let ns = scale(after_ns, part.ns(), span_ns) - scale(before_ns, part.ns(), span_ns);
            before_ns = after_ns;
            if !blamed(occupant) {
                continue;
            }
            let steal_ns = scale(occupant.taken.steal_ns.min(occupant.ns), ns, occupant.ns);
            let nmi_ns = scale(occupant.taken.nmi_ns.min(occupant.ns), ns, occupant.ns).min(ns - steal_ns);
            add_taken(Taken { steal_ns, nmi_ns, ..Taken::default() }, sum);
            let kind = self.kind_of(&occupant.occupant);
            sum.add_occupant(kind, &occupant.occupant, cpu, ns - steal_ns - nmi_ns, &[]);
            total_ns += ns;
        }
        total_ns
    }

    /// Returns the kind of delay by an occupant.
    fn kind_of(&self, occupant: &Occupant) -> CauseKind {
        match occupant {
            Occupant::Idle => CauseKind::IdleExit,
            Occupant::Thread { tid, .. } if self.is_tid(*tid) => CauseKind::Wakeup,
            Occupant::Thread { .. } => CauseKind::Thread,
            Occupant::Work { .. } => CauseKind::Work,
            Occupant::Irq { .. } => CauseKind::Irq,
            Occupant::Softirq { .. } => CauseKind::Softirq,
        }
    }

    fn is_tid(&self, tid: u32) -> bool {
        tid != 0 && tid == self.awaited_tid
    }

    fn is_awaited(&self, occupant: &Occupant) -> bool {
        matches!(occupant, Occupant::Thread { tid, .. } | Occupant::Work { tid, .. } if self.is_tid(*tid))
    }
}

/// Adds the time taken from an occupant; nearly always none.
fn add_taken(taken: Taken, sum: &mut Sum<'_>) {
    let add = |sum: &mut Sum<'_>, kind, who, ns| {
        if ns > 0 {
            sum.add(Blame::new(kind, who), ns, &[]);
        }
    };
    add(sum, CauseKind::Steal, "hypervisor", taken.steal_ns);
    add(sum, CauseKind::Unknown, PERHAPS_STOLEN, taken.perhaps_stolen_ns);
    add(sum, CauseKind::Nmi, "NMI", taken.nmi_ns);
}

/// Returns the steal and NMI time in a part of an interval, never more than the part.
///
/// The position of steal or NMI time within an interval is unknown: the time within the window is spread evenly over
/// the interval's part in the window. Steal time that may have been before the window counts as possible steal, except
/// for an idle CPU, where it displaces no culprit.
fn taken_within(part: Span, piece: &Piece<'_>, window: Span) -> Taken {
    let whole = piece.whole;
    let inside = whole.within(window);
    let Taken { steal_ns, perhaps_stolen_ns, nmi_ns } = piece.taken;
    let max_ns = steal_ns.saturating_add(perhaps_stolen_ns).min(inside.ns());
    let min_ns = match piece.interval.occupant {
        Occupant::Idle => max_ns,
        _ => steal_ns.min(whole.ns()).saturating_sub(whole.ns() - inside.ns()),
    };
    // Differences of running sums, so that the parts of an interval add up to it.
    let share = |ns: u64, of: Span| {
        let until = |at_ns: u64| scale(ns.min(of.ns()), at_ns - of.from_ns, of.ns());
        until(part.to_ns) - until(part.from_ns)
    };
    let steal_ns = share(min_ns, inside);
    let perhaps_stolen_ns = share(max_ns, inside).saturating_sub(steal_ns);
    let nmi_ns = share(nmi_ns, whole);
    Taken { steal_ns, perhaps_stolen_ns, nmi_ns: nmi_ns.min(part.ns() - steal_ns - perhaps_stolen_ns) }
}

/// Returns `ns * part_ns / whole_ns`, rounded down; 0 if the whole is empty.
fn scale(ns: u64, part_ns: u64, whole_ns: u64) -> u64 {
    let scaled = (u128::from(ns) * u128::from(part_ns)).checked_div(u128::from(whole_ns)).unwrap_or(0);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
