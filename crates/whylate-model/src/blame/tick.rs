// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who kept interrupts off, told from what was seen of an interrupt that came late.

use serde::{Deserialize, Serialize};

use super::frames::{Interrupted, interrupted};
use super::window::{NOT_RECORDED, PERHAPS_STOLEN};
use super::{TimerEvidence, timer_causes};
use crate::{Cause, CauseKind, Labels, Occupancy};

/// What an interrupt interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// Kernel code, of a thread.
    #[default]
    Kernel,
    /// Kernel code, of the idle loop.
    Idle,
    /// User code, in which interrupts are on.
    User,
}

/// What made an interrupt late, where that is known without a look at the stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It is not.
    #[default]
    Unknown,
    /// The hypervisor had the CPU for most of the time.
    Steal,
    /// The hypervisor may have had it for nearly all of the time, or before.
    PerhapsSteal,
    /// Handlers of other interrupts ran for most of it; this is the one that ran longest.
    Handler(String),
}

/// What was seen of an interrupt that came late. Times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateTick {
    /// When its timer was due.
    pub due_ns: u64,
    /// When it was let in.
    pub came_ns: u64,
    /// What it interrupted.
    pub found: Found,
    /// What is known of what made it late.
    pub reason: Reason,
    /// The kernel stack that it found, innermost frame first, with the frames of the interrupt itself.
    pub stack: Vec<String>,
    /// The kernel stack that was found while the timer was overdue and interrupts were off, innermost frame first;
    /// empty where nobody could look.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inside: Vec<String>,
    /// Of that, what the hypervisor took, at least.
    pub steal_ns: u64,
    /// What it took beyond that, then or before the timer was due.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub perhaps_stolen_ns: u64,
    /// Of that, what handlers of other interrupts took.
    pub handlers_ns: u64,
    /// The CPU.
    pub cpu: u32,
    /// The thread that had it, as causes name it: `name:tid`.
    pub thread: String,
    /// Who had the CPU meanwhile, where causes are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy: Option<Occupancy>,
}

impl LateTick {
    /// How late it was.
    pub fn late_ns(&self) -> u64 {
        self.came_ns.saturating_sub(self.due_ns)
    }

    /// Who made it late.
    pub fn keeper(&self) -> Keeper {
        keeper(self.found, &self.reason, &self.stack)
    }
}

fn is_zero(ns: &u64) -> bool {
    *ns == 0
}

/// Who made interrupts late, and how.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Keeper {
    /// How.
    pub kind: CauseKind,
    /// The function that enabled interrupts again.
    pub function: Option<String>,
    /// The one that called it.
    pub caller: Option<String>,
    /// The handler of an interrupt.
    pub handler: Option<String>,
}

impl Keeper {
    /// As the labels of a series: `kind`, and `function`, `caller` or `handler` where they are known.
    pub fn labels(&self) -> Labels {
        let names = [("function", &self.function), ("caller", &self.caller), ("handler", &self.handler)];
        let known = names.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)));
        known.chain([("kind".to_owned(), self.kind.name().to_owned())]).collect()
    }

    fn of(kind: CauseKind) -> Self {
        Keeper { kind, function: None, caller: None, handler: None }
    }
}

/// Who made it late.
///
/// Only kernel code keeps interrupts off: one that interrupts user code was kept waiting by a handler, by the
/// hypervisor, or by the machine itself (system management mode). One that is late in kernel code comes in where
/// interrupts were enabled again. An idle state is left with interrupts off, which is nobody's doing.
pub fn keeper(found: Found, reason: &Reason, stack: &[String]) -> Keeper {
    match reason {
        Reason::Steal => return Keeper::of(CauseKind::Steal),
        Reason::Handler(name) => return Keeper { handler: Some(name.clone()), ..Keeper::of(CauseKind::Irq) },
        Reason::PerhapsSteal | Reason::Unknown => {}
    }
    let frames = match interrupted(stack) {
        _ if found == Found::User => return Keeper::of(CauseKind::Unknown),
        Interrupted::User => return Keeper::of(CauseKind::Unknown),
        Interrupted::Kernel(frames) => frames,
    };
    if found == Found::Idle && is_idle_state(frames) {
        return Keeper::of(CauseKind::IdleExit);
    }
    if *reason == Reason::PerhapsSteal {
        return Keeper { handler: Some(PERHAPS_STOLEN.to_owned()), ..Keeper::of(CauseKind::Unknown) };
    }
    Keeper { function: frames.first().cloned(), caller: frames.get(1).cloned(), ..Keeper::of(CauseKind::IrqsOff) }
}

/// What a stack has below the frames of the interrupt; empty where that has interrupted user code.
pub fn interrupted_stack(stack: &[String]) -> &[String] {
    match interrupted(stack) {
        Interrupted::Kernel(frames) => frames,
        Interrupted::User => &[],
    }
}

/// Whether the idle loop was in an idle state, or on the way into or out of one.
fn is_idle_state(frames: &[String]) -> bool {
    let is_state = |frame: &String| {
        let function = frame.split(['+', ' ']).next().unwrap_or_default();
        // What the idle loop calls when it gives the CPU to a thread.
        function != "schedule_idle" && ["idle", "halt", "mwait"].iter().any(|part| function.contains(part))
    };
    let called = frames.iter().take_while(|frame| !frame.starts_with("schedule_idle"));
    let reaches_loop = called.clone().count() == frames.len();
    reaches_loop && called.take(3).any(is_state)
}

/// What made it late, largest first; the parts add up to its lateness. With an account each instant has its cause.
pub fn tick_causes(tick: &LateTick) -> Vec<Cause> {
    let late_ns = tick.late_ns();
    if let Some(occupancy) = &tick.occupancy {
        let stack = tick.stack.clone();
        let LateTick { due_ns, came_ns, .. } = *tick;
        let occupancy = occupancy.clone();
        let causes =
            timer_causes(&TimerEvidence { due_ns, irq_ns: came_ns, thread_ns: came_ns, tid: 0, occupancy, stack });
        return proven(tick, causes);
    }
    let keeper = tick.keeper();
    let most_ns = tick.steal_ns.saturating_add(tick.perhaps_stolen_ns).min(late_ns);
    // Neither user code nor an idle state is to blame for the rest.
    let is_user = keeper.kind == CauseKind::Unknown && keeper.handler.is_none();
    let is_nobodys = is_user || tick.found == Found::User || keeper.kind == CauseKind::IdleExit;
    let steal_ns = if is_nobodys { most_ns } else { tick.steal_ns.min(late_ns) };
    let handlers_ns = tick.handlers_ns.min(late_ns - most_ns);
    let rest_ns = late_ns - most_ns - handlers_ns;
    let cause = |kind, who: &str, ns| Cause::new(kind, who, ns);
    let handlers = |name: &str| cause(CauseKind::Irq, name, handlers_ns);
    let (handlers, rest) = match &keeper {
        Keeper { kind: CauseKind::Irq, handler, .. } => (
            handlers(handler.as_deref().unwrap_or_default()),
            cause(CauseKind::Unknown, "beside the handlers", rest_ns),
        ),
        Keeper { kind: CauseKind::Steal, .. } => {
            (handlers("handlers"), cause(CauseKind::Unknown, "beside what was stolen", rest_ns))
        }
        Keeper { kind: CauseKind::IdleExit, .. } => {
            (handlers("handlers"), cause(CauseKind::IdleExit, &format!("CPU {}", tick.cpu), rest_ns))
        }
        Keeper { kind: CauseKind::IrqsOff, .. } => {
            let stack = interrupted_stack(&tick.stack).to_vec();
            (handlers("handlers"), Cause { stack, ..cause(CauseKind::IrqsOff, &tick.thread, rest_ns) })
        }
        Keeper { handler: Some(_), .. } => {
            (handlers("handlers"), cause(CauseKind::Unknown, "beside what may be stolen", rest_ns))
        }
        _ => (handlers("handlers"), cause(CauseKind::Unknown, "user code ran: the machine or its hypervisor", rest_ns)),
    };
    let perhaps = cause(CauseKind::Unknown, PERHAPS_STOLEN, most_ns - steal_ns);
    let mut causes = vec![cause(CauseKind::Steal, "hypervisor", steal_ns), perhaps, handlers, rest];
    causes.retain(|cause| cause.ns > 0);
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
    causes
}

/// The account misses an interrupt that comes in while it is being written. The late tick itself proves then what the
/// thread that had the CPU did: it kept interrupts off.
fn proven(tick: &LateTick, causes: Vec<Cause>) -> Vec<Cause> {
    let is_told = causes.iter().any(|cause| cause.kind == CauseKind::IrqsOff);
    if is_told || tick.keeper().kind != CauseKind::IrqsOff {
        return causes;
    }
    let is_thread = |cause: &&Cause| matches!(cause.kind, CauseKind::Thread | CauseKind::Work);
    // Of several threads, nobody tells which one was not recorded.
    let is_alone = causes.iter().filter(is_thread).all(|cause| cause.who == tick.thread);
    let is_holder = |cause: &Cause| {
        (cause.kind == CauseKind::Unknown && cause.who == NOT_RECORDED && is_alone)
            || (cause.kind == CauseKind::Thread && cause.who == tick.thread)
    };
    let (held, mut causes): (Vec<Cause>, Vec<Cause>) = causes.into_iter().partition(is_holder);
    let ns = held.iter().map(|cause| cause.ns).sum();
    if ns > 0 {
        let stack = interrupted_stack(&tick.stack).to_vec();
        let cgroup = held.into_iter().find_map(|cause| cause.cgroup);
        causes.push(Cause { stack, cgroup, ..Cause::new(CauseKind::IrqsOff, &*tick.thread, ns) });
    }
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
    causes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::occupancy::{Interval, Occupant, Taken};

    fn stack(frames: &str) -> Vec<String> {
        let own = "hrtimer_interrupt sysvec_apic_timer_interrupt asm_sysvec_apic_timer_interrupt";
        format!("{own} {frames}").split_whitespace().map(str::to_owned).collect()
    }

    fn told(found: Found, frames: &str) -> (CauseKind, Option<String>, Option<String>) {
        let keeper = keeper(found, &Reason::Unknown, &stack(frames));
        (keeper.kind, keeper.function, keeper.caller)
    }

    #[test]
    fn whoever_enabled_interrupts_is_the_culprit() {
        let held = "_raw_spin_unlock_irqrestore serial8250_console_write console_unlock";
        let names = |function: &str, caller: &str| (Some(function.to_owned()), Some(caller.to_owned()));
        let (kind, function, caller) = told(Found::Kernel, held);
        assert_eq!(
            (kind, (function, caller)),
            (CauseKind::IrqsOff, names("_raw_spin_unlock_irqrestore", "serial8250_console_write"))
        );
        // The idle loop runs the scheduler too, and softirqs.
        let switch = "finish_task_switch __schedule schedule_idle do_idle cpu_startup_entry";
        assert_eq!(told(Found::Idle, switch).0, CauseKind::IrqsOff);
        let softirq = "_raw_spin_unlock_irqrestore net_rx_action handle_softirqs irq_exit_rcu do_idle";
        assert_eq!(told(Found::Idle, softirq).0, CauseKind::IrqsOff);
    }

    #[test]
    fn an_idle_state_is_nobodys_doing() {
        for frames in ["pv_native_safe_halt default_idle do_idle", "cpuidle_enter_state cpuidle_enter do_idle"] {
            assert_eq!(told(Found::Idle, frames), (CauseKind::IdleExit, None, None), "{frames}");
        }
    }

    #[test]
    fn a_late_tick_proves_what_the_account_has_missed() {
        let tick = LateTick {
            found: Found::Kernel,
            came_ns: 1_000,
            stack: stack("bpf_local_irq_restore a b"),
            thread: "dd:7".to_owned(),
            ..LateTick::default()
        };
        let cause = |kind, who: &str, ns| Cause::new(kind, who, ns);
        let (thread, irq, unknown) = (CauseKind::Thread, CauseKind::Irq, CauseKind::Unknown);
        let missed = vec![cause(thread, "dd:7", 800), cause(unknown, "not recorded", 150), cause(irq, "eth0", 50)];
        let told: Vec<_> = proven(&tick, missed.clone()).iter().map(|cause| (cause.kind, cause.ns)).collect();
        assert_eq!(told, [(CauseKind::IrqsOff, 950), (irq, 50)]);
        // Whoever else had the CPU may have had what was not recorded as well.
        let two = vec![cause(thread, "sh:8", 800), cause(unknown, "not recorded", 150), cause(thread, "dd:7", 50)];
        let told: Vec<_> = proven(&tick, two).into_iter().map(|cause| (cause.kind, cause.who, cause.ns)).collect();
        let expected = [(thread, "sh:8", 800), (unknown, "not recorded", 150), (CauseKind::IrqsOff, "dd:7", 50)];
        assert_eq!(told, expected.map(|(kind, who, ns)| (kind, who.to_owned(), ns)));
        // The hypervisor may have had that.
        let perhaps = vec![cause(unknown, PERHAPS_STOLEN, 800), cause(irq, "eth0", 50)];
        assert_eq!(proven(&tick, perhaps.clone()), perhaps);
        // Nothing is proven where user code was interrupted, and nothing changes where it is told.
        let in_user = LateTick { found: Found::User, ..tick.clone() };
        assert_eq!(proven(&in_user, missed.clone()), missed);
        let mut seen = missed;
        seen.push(cause(CauseKind::IrqsOff, "dd:7", 10));
        assert_eq!(proven(&tick, seen.clone()), seen);
    }

    #[test]
    fn user_code_keeps_no_interrupts_off() {
        assert_eq!(told(Found::User, "anything").0, CauseKind::Unknown);
        assert_eq!(told(Found::Kernel, "").0, CauseKind::Unknown);
        let late =
            LateTick { found: Found::User, came_ns: 900, steal_ns: 800, reason: Reason::Steal, ..LateTick::default() };
        let kinds: Vec<_> = tick_causes(&late).iter().map(|cause| (cause.kind, cause.ns)).collect();
        assert_eq!(kinds, [(CauseKind::Steal, 800), (CauseKind::Unknown, 100)]);
    }

    /// The account of a vCPU that lost the processor in user code, and whose late interrupt it has or has not recorded.
    fn account_of_user_code(stolen_ns: u64, late_ns: u64) -> Occupancy {
        let taken = Taken { steal_ns: stolen_ns, ..Taken::default() };
        let of = |occupant, span: std::ops::Range<u64>| Interval {
            start_ns: span.start,
            end_ns: span.end,
            occupant,
            ..Interval::default()
        };
        let thread = Occupant::Thread { tid: 7, name: "dd".to_owned(), cgroup: None };
        let interrupt = Occupant::Irq { name: "local_timer".to_owned() };
        let intervals = vec![
            Interval { taken, ..of(thread, 0..1_000) },
            Interval { late_ns, stack: stack(""), ..of(interrupt, 1_000..1_001) },
        ];
        Occupancy { intervals, ..Occupancy::default() }
    }

    proptest! {
        #[test]
        fn stolen_time_never_has_interrupts_off(told_ns in 0u64..1500, late_ns in 0u64..1000, with_account: bool) {
            // Some hypervisors do not tell of all that they take, and some of none.
            for reason in [Reason::Steal, Reason::Unknown] {
                let account = with_account.then(|| account_of_user_code(told_ns.min(1_000), late_ns));
                let tick = LateTick {
                    found: Found::User,
                    reason,
                    came_ns: 1_000,
                    steal_ns: told_ns,
                    stack: stack(""),
                    thread: "dd:7".to_owned(),
                    occupancy: account,
                    ..LateTick::default()
                };
                prop_assert_ne!(tick.keeper().kind, CauseKind::IrqsOff);
                let found = tick_causes(&tick);
                prop_assert!(found.iter().all(|cause| cause.kind != CauseKind::IrqsOff), "{:?}", found);
                prop_assert_eq!(found.iter().map(|cause| cause.ns).sum::<u64>(), 1_000);
            }
            // In kernel code too, as long as the hypervisor tells.
            let tick = LateTick { reason: Reason::Steal, came_ns: 1_000, steal_ns: told_ns, stack: stack("a b"), ..LateTick::default() };
            prop_assert_eq!(tick.keeper().kind, CauseKind::Steal);
            prop_assert!(tick_causes(&tick).iter().all(|cause| cause.kind != CauseKind::IrqsOff));
        }
    }

    #[test]
    fn what_may_have_been_stolen_before_is_nobodys_doing_yet() {
        let tick = |found, frames: &str| LateTick {
            found,
            reason: Reason::PerhapsSteal,
            came_ns: 1_000,
            steal_ns: 300,
            perhaps_stolen_ns: 650,
            stack: stack(frames),
            thread: "dd:7".to_owned(),
            ..LateTick::default()
        };
        let told = |tick: &LateTick| -> Vec<(CauseKind, String, u64)> {
            tick_causes(tick).into_iter().map(|cause| (cause.kind, cause.who, cause.ns)).collect()
        };
        let steal = |ns| (CauseKind::Steal, "hypervisor".to_owned(), ns);
        let unknown = |who: &str, ns| (CauseKind::Unknown, who.to_owned(), ns);
        let held = tick(Found::Kernel, "unlock write");
        assert_eq!(held.keeper().kind, CauseKind::Unknown);
        let beside = unknown("beside what may be stolen", 50);
        assert_eq!(told(&held), [unknown(PERHAPS_STOLEN, 650), steal(300), beside]);
        // A section that was longer than all that was stolen is proven.
        let longer = LateTick { came_ns: 2_000, reason: Reason::Unknown, ..held };
        let section = (CauseKind::IrqsOff, "dd:7".to_owned(), 1_050);
        assert_eq!(told(&longer), [section, unknown(PERHAPS_STOLEN, 650), steal(300)]);
        // Neither user code nor an idle state keeps interrupts off.
        let idle = told(&tick(Found::Idle, "pv_native_safe_halt default_idle do_idle"));
        assert_eq!(idle, [steal(950), (CauseKind::IdleExit, "CPU 0".to_owned(), 50)]);
        assert_eq!(told(&tick(Found::User, ""))[0], steal(950));
    }

    #[test]
    fn labels_name_what_is_known() {
        let handler = keeper(Found::User, &Reason::Handler("nvme0q1".to_owned()), &[]);
        let pairs = |culprit: &Keeper| culprit.labels().into_iter().collect::<Vec<_>>();
        let text = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(pairs(&handler), [text("handler", "nvme0q1"), text("kind", "irq")]);
        assert_eq!(pairs(&keeper(Found::Kernel, &Reason::Steal, &[])), [text("kind", "steal")]);
        let held = keeper(Found::Kernel, &Reason::Unknown, &stack("unlock write"));
        assert_eq!(pairs(&held), [text("caller", "write"), text("function", "unlock"), text("kind", "irqs_off")]);
    }

    proptest! {
        #[test]
        fn the_parts_add_up(late_ns in 0u64..1000, took in [0u64..1500, 0..1500, 0..1500], reason in 0..4, found in 0..3) {
            let [steal_ns, perhaps_stolen_ns, handlers_ns] = took;
            let handler = Reason::Handler("h".to_owned());
            let reason = [Reason::Unknown, Reason::Steal, Reason::PerhapsSteal, handler][reason as usize].clone();
            let found = [Found::Kernel, Found::Idle, Found::User][found as usize];
            let tick = LateTick { found, reason, stack: stack("a b"), came_ns: late_ns, steal_ns, perhaps_stolen_ns, handlers_ns, ..LateTick::default() };
            prop_assert_eq!(tick_causes(&tick).iter().map(|cause| cause.ns).sum::<u64>(), late_ns);
        }
    }
}
