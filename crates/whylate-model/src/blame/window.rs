// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arithmetic of blame: a window cut into parts, each explained by a rule.
//!
//! Each nanosecond of the window belongs to exactly one cause, so the causes add up to it; shares are whole numbers.

use super::held;
use super::sum::{Blame, Sum};
use super::timeline::{Known, Piece, Timeline};
use super::wq::{HeldSlot, PoolClass};
use crate::occupancy::{Merged, MergedPart, Taken};
use crate::{Cause, CauseKind, Occupant, thread};

/// Nothing was recorded: it was before tracing began, or has been overwritten.
pub(super) const NOT_RECORDED: &str = "not recorded";
/// The hypervisor took as much, then or before the window.
pub(super) const PERHAPS_STOLEN: &str = "hypervisor, or whoever had the CPU";

/// A span of time; empty where `to_ns` is not after `from_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub from_ns: u64,
    pub to_ns: u64,
}

impl Span {
    pub fn ns(self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// What of it is within `outer`; an empty span that lies in `outer` where there is nothing.
    pub fn within(self, outer: Span) -> Span {
        let clip = |ns: u64| ns.clamp(outer.from_ns, outer.to_ns.max(outer.from_ns));
        let from_ns = clip(self.from_ns);
        Span { from_ns, to_ns: clip(self.to_ns).max(from_ns) }
    }
}

/// How a part of a window is explained.
#[derive(Clone, Debug)]
pub(super) enum Rule<'a> {
    /// By one cause.
    Fixed(Blame),
    /// By whoever had the CPU.
    Occupants,
    /// By the occupants of the former CPU, in the run queue of which the thread waited; by this cause where none is known.
    OccupantsOf(&'a Timeline<'a>, Blame),
    /// By whoever had the CPU while an item of this pool was in progress and not asleep, or while it was the awaited
    /// thread itself; by `otherwise` at other times, and where nothing is known of the CPU.
    OccupantsWhileBusy {
        /// The pool; `None` where its items in progress are no reason to wait.
        pool: Option<PoolClass>,
        /// The cause at other times.
        otherwise: Blame,
    },
    /// By whoever held a slot.
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
    /// The thread that the event waited for, whose own time is no other thread's doing; 0 where there is none.
    awaited_tid: u32,
    /// In order, each with its end; they have no gap.
    parts: Vec<(u64, Rule<'a>)>,
}

impl<'a> Window<'a> {
    pub fn new(span: Span, awaited_tid: u32) -> Self {
        Window { span, awaited_tid, parts: Vec::new() }
    }

    /// Explains what follows up to `until_ns`, which is clipped to the window.
    pub fn part(&mut self, until_ns: u64, rule: Rule<'a>) {
        let reached_ns = self.reached_ns();
        let rest = Span { from_ns: reached_ns, to_ns: self.span.to_ns };
        let part = Span { from_ns: reached_ns, to_ns: until_ns }.within(rest);
        if part.ns() > 0 {
            self.parts.push((part.to_ns, rule));
        }
    }

    /// Up to where the window is explained.
    pub fn reached_ns(&self) -> u64 {
        self.parts.last().map_or(self.span.from_ns, |&(until_ns, _)| until_ns)
    }

    /// The causes, largest first; they add up to the window.
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
                Known::Piece(piece) => self.blame_piece(part, piece, timeline.cpu, sum),
                Known::Merged(merged) => {
                    let ns = self.blame_merged(part, merged, timeline.cpu, |_| true, sum);
                    sum.add(Blame::unknown(NOT_RECORDED), part.ns() - ns, &[]);
                }
                Known::Nothing => sum.add(Blame::unknown(NOT_RECORDED), part.ns(), &[]),
            }),
            Rule::OccupantsOf(other, otherwise) => other.each(span, |part, known| match known {
                Known::Nothing => sum.add(otherwise.clone(), part.ns(), &[]),
                _ => self.explain(part, &Rule::Occupants, other, sum),
            }),
            Rule::OccupantsWhileBusy { pool, otherwise } => timeline.each(span, |part, known| match known {
                Known::Piece(piece) if self.is_awaited(&piece.interval.occupant) => {
                    self.blame_piece(part, piece, timeline.cpu, sum);
                }
                Known::Piece(piece) if pool.is_some_and(|pool| piece.interval.busy.has(pool)) => {
                    self.blame_piece(part, piece, timeline.cpu, sum);
                }
                Known::Piece(_) => sum.add(otherwise.clone(), part.ns(), &[]),
                Known::Merged(merged) => {
                    // Whether the pool was busy is not kept. Where a worker of it had the CPU with an item, it was, and
                    // whoever else had the CPU is taken to have kept that worker from it.
                    let of_pool = |part: &MergedPart| pool.is_some_and(|pool| pool.is_of(&part.occupant, timeline.cpu));
                    let busy = merged.parts.iter().any(of_pool);
                    let blamed = |part: &MergedPart| busy || self.is_awaited(&part.occupant);
                    let ns = self.blame_merged(part, merged, timeline.cpu, blamed, sum);
                    sum.add(otherwise.clone(), part.ns() - ns, &[]);
                }
                Known::Nothing => {
                    let for_want_of_it = pool.is_some() && otherwise.kind == CauseKind::Unknown;
                    let blame = if for_want_of_it { Blame::unknown(NOT_RECORDED) } else { otherwise.clone() };
                    sum.add(blame, part.ns(), &[]);
                }
            }),
        }
    }

    /// Blames the occupant of an interval for a part of it.
    ///
    /// Steal comes out of the time with interrupts disabled first: an interrupt is late in the same way while the whole
    /// CPU is stopped.
    pub fn blame_piece(&self, part: Span, piece: &Piece<'a>, cpu: u32, sum: &mut Sum<'a>) {
        let taken = taken_within(part, piece, self.span);
        sum.add(Blame::new(CauseKind::Steal, "hypervisor"), taken.steal_ns, &[]);
        sum.add(Blame::unknown(PERHAPS_STOLEN), taken.perhaps_stolen_ns, &[]);
        sum.add(Blame::new(CauseKind::Nmi, "NMI"), taken.nmi_ns, &[]);
        let mut steal_ns = taken.steal_ns + taken.perhaps_stolen_ns;
        let mut left_ns = part.ns() - steal_ns - taken.nmi_ns;
        let blame = self.blame_of(&piece.interval.occupant, cpu);
        for &(irqs_off, stack) in &piece.irqs_off {
            let ns = irqs_off.within(part).ns();
            let stolen_ns = ns.min(steal_ns);
            steal_ns -= stolen_ns;
            let ns = (ns - stolen_ns).min(left_ns);
            left_ns -= ns;
            let keeper = Blame::new(CauseKind::IrqsOff, who(&piece.interval.occupant, cpu));
            sum.add(Blame { cgroup: cgroup(&piece.interval.occupant), ..keeper }, ns, stack);
        }
        sum.add(blame, left_ns, &[]);
    }

    /// Blames the occupants of a merged span for a part of it, each in proportion, and returns how much was blamed.
    fn blame_merged(
        &self,
        part: Span,
        merged: &Merged,
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
            sum.add(Blame::new(CauseKind::Steal, "hypervisor"), steal_ns, &[]);
            sum.add(Blame::new(CauseKind::Nmi, "NMI"), nmi_ns, &[]);
            sum.add(self.blame_of(&occupant.occupant, cpu), ns - steal_ns - nmi_ns, &[]);
            total_ns += ns;
        }
        total_ns
    }

    fn blame_of(&self, occupant: &Occupant, cpu: u32) -> Blame {
        let kind = match occupant {
            Occupant::Idle => CauseKind::IdleExit,
            Occupant::Thread { tid, .. } if self.is_tid(*tid) => CauseKind::Wakeup,
            Occupant::Thread { .. } => CauseKind::Thread,
            Occupant::Work { .. } => CauseKind::Work,
            Occupant::Irq { .. } => CauseKind::Irq,
            Occupant::Softirq { .. } => CauseKind::Softirq,
        };
        Blame { cgroup: cgroup(occupant), ..Blame::new(kind, who(occupant, cpu)) }
    }

    fn is_tid(&self, tid: u32) -> bool {
        tid != 0 && tid == self.awaited_tid
    }

    fn is_awaited(&self, occupant: &Occupant) -> bool {
        matches!(occupant, Occupant::Thread { tid, .. } | Occupant::Work { tid, .. } if self.is_tid(*tid))
    }
}

/// An occupant as causes name it.
fn who(occupant: &Occupant, cpu: u32) -> String {
    match occupant {
        Occupant::Idle => format!("CPU {cpu}"),
        Occupant::Thread { tid, name, .. } => thread::called(name, *tid),
        Occupant::Work { handler, .. } => handler.clone(),
        Occupant::Irq { name } | Occupant::Softirq { name } => name.clone(),
    }
}

/// Only a thread is in one.
fn cgroup(occupant: &Occupant) -> Option<String> {
    match occupant {
        Occupant::Thread { cgroup, .. } => cgroup.clone(),
        _ => None,
    }
}

/// What was taken in a part of an interval, never more than the part.
///
/// Where in an interval the hypervisor or an NMI took time is not known: what it took in the window is spread evenly
/// over what the window has of the interval. Steal that can have been before the window was perhaps in it, except of an
/// idle CPU, where it can replace no culprit.
fn taken_within(part: Span, piece: &Piece<'_>, window: Span) -> Taken {
    let whole = piece.whole;
    let inside = whole.within(window);
    let Taken { steal_ns, perhaps_stolen_ns, nmi_ns } = piece.taken;
    let most_ns = steal_ns.saturating_add(perhaps_stolen_ns).min(inside.ns());
    let least_ns = match piece.interval.occupant {
        Occupant::Idle => most_ns,
        _ => steal_ns.min(whole.ns()).saturating_sub(whole.ns() - inside.ns()),
    };
    // Differences of running sums, so that the parts of an interval add up to it.
    let share = |ns: u64, of: Span| {
        let until = |at_ns: u64| scale(ns.min(of.ns()), at_ns - of.from_ns, of.ns());
        until(part.to_ns) - until(part.from_ns)
    };
    let steal_ns = share(least_ns, inside);
    let perhaps_stolen_ns = share(most_ns, inside).saturating_sub(steal_ns);
    let nmi_ns = share(nmi_ns, whole);
    Taken { steal_ns, perhaps_stolen_ns, nmi_ns: nmi_ns.min(part.ns() - steal_ns - perhaps_stolen_ns) }
}

/// `ns * part_ns / whole_ns`, rounded down; 0 of an empty whole.
fn scale(ns: u64, part_ns: u64, whole_ns: u64) -> u64 {
    let scaled = (u128::from(ns) * u128::from(part_ns)).checked_div(u128::from(whole_ns)).unwrap_or(0);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
