// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds what kept interrupts disabled, from the evidence of a late interrupt.

use serde::{Deserialize, Serialize};

use super::frames::{Interrupted, interrupted};
use super::window::{NOT_RECORDED, PERHAPS_STOLEN};
use super::{TimerEvidence, timer_causes};
use crate::{ActorName, Cause, CauseKind, Labels, Occupancy};

/// Code that an interrupt interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

/// Reason of a late interrupt, where it is known without its stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Unknown.
    #[default]
    Unknown,
    /// Steal time covers most of the delay.
    Steal,
    /// Possible steal time covers nearly all of the delay, but may be from before the timer was due.
    PerhapsSteal,
    /// Handlers of other interrupts ran for most of the delay; names the one that ran longest.
    Handler(String),
}

/// Evidence of a late interrupt. Timestamps are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LateTick {
    /// Due time of its timer.
    pub due_ns: u64,
    /// Start of its handler.
    pub came_ns: u64,
    /// Interrupted code.
    pub found: Found,
    /// Reason, as far as known.
    pub reason: Reason,
    /// Kernel stack at the interrupt, innermost frame first, including the interrupt's own frames.
    pub stack: Vec<String>,
    /// Kernel stack taken while the timer was overdue and interrupts were disabled (by an NMI), innermost frame first;
    /// empty if none could be taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inside: Vec<String>,
    /// Minimum time that the hypervisor took of the delay.
    pub steal_ns: u64,
    /// Further steal time, of the delay or from before the timer was due.
    #[serde(default, skip_serializing_if = "crate::units::is_zero")]
    pub perhaps_stolen_ns: u64,
    /// Time of the delay that handlers of other interrupts took.
    pub handlers_ns: u64,
    /// The CPU.
    pub cpu: u32,
    /// The thread that was running.
    pub thread: ActorName,
    /// Account of the CPU during the delay, if causes are enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy: Option<Occupancy>,
}

impl LateTick {
    /// Returns the delay in nanoseconds.
    pub fn late_ns(&self) -> u64 {
        self.came_ns.saturating_sub(self.due_ns)
    }

    /// Returns what made the interrupt late.
    pub fn keeper(&self) -> Keeper {
        keeper(self.found, &self.reason, &self.stack)
    }
}

/// Cause of late interrupts: the kind and the code.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Keeper {
    /// Kind of the delay.
    pub kind: CauseKind,
    /// Function that enabled interrupts again.
    pub function: Option<String>,
    /// Caller of the function that enabled interrupts again.
    pub caller: Option<String>,
    /// Interrupt handler.
    pub handler: Option<String>,
}

impl Keeper {
    /// Returns the labels of a series: `kind`, and `function`, `caller` or `handler` where known.
    pub fn labels(&self) -> Labels {
        let names = [("function", &self.function), ("caller", &self.caller), ("handler", &self.handler)];
        let known = names.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)));
        known.chain([("kind".to_owned(), self.kind.name().to_owned())]).collect()
    }

    fn from_kind(kind: CauseKind) -> Self {
        Keeper { kind, function: None, caller: None, handler: None }
    }
}

/// Finds what made an interrupt late.
///
/// Only kernel code can disable interrupts: an interrupt of user code was delayed by a handler, by the hypervisor, or
/// by the machine itself (system management mode). A late interrupt of kernel code comes in where interrupts are
/// enabled again. The exit from an idle state runs with interrupts disabled, which is no thread's fault.
pub fn keeper(found: Found, reason: &Reason, stack: &[String]) -> Keeper {
    match reason {
        Reason::Steal => return Keeper::from_kind(CauseKind::Steal),
        Reason::Handler(name) => return Keeper { handler: Some(name.clone()), ..Keeper::from_kind(CauseKind::Irq) },
        Reason::PerhapsSteal | Reason::Unknown => {}
    }
    let frames = match interrupted(stack) {
        _ if found == Found::User => return Keeper::from_kind(CauseKind::Unknown),
        Interrupted::User => return Keeper::from_kind(CauseKind::Unknown),
        Interrupted::Kernel(frames) => frames,
    };
    if found == Found::Idle && is_idle_state(frames) {
        return Keeper::from_kind(CauseKind::IdleExit);
    }
    if *reason == Reason::PerhapsSteal {
        return Keeper { handler: Some(PERHAPS_STOLEN.to_owned()), ..Keeper::from_kind(CauseKind::Unknown) };
    }
    Keeper {
        function: frames.first().cloned(),
        caller: frames.get(1).cloned(),
        ..Keeper::from_kind(CauseKind::IrqsOff)
    }
}

/// Returns the frames below those of the interrupt; none if it interrupted user code.
pub fn interrupted_stack(stack: &[String]) -> &[String] {
    match interrupted(stack) {
        Interrupted::Kernel(frames) => frames,
        Interrupted::User => &[],
    }
}

/// Returns whether the idle loop was in an idle state, or entering or leaving one.
fn is_idle_state(frames: &[String]) -> bool {
    let is_state = |frame: &String| {
        let function = frame.split(['+', ' ']).next().unwrap_or_default();
        // The idle loop calls this to switch to a thread.
        function != "schedule_idle" && ["idle", "halt", "mwait"].iter().any(|part| function.contains(part))
    };
    let called = frames.iter().take_while(|frame| !frame.starts_with("schedule_idle"));
    let reaches_loop = called.clone().count() == frames.len();
    reaches_loop && called.take(3).any(is_state)
}

/// Returns the causes of the delay, largest first; they add up to it. With an account of the CPU, each instant has its
/// own cause.
pub fn tick_causes(tick: &LateTick) -> Vec<Cause> {
    let late_ns = tick.late_ns();
    if let Some(occupancy) = &tick.occupancy {
        let stack = tick.stack.clone();
        let LateTick { due_ns, came_ns, .. } = *tick;
        let occupancy = occupancy.clone();
        let causes =
            timer_causes(&TimerEvidence { due_ns, irq_ns: came_ns, thread_ns: came_ns, tid: 0, occupancy, stack });
        return correct_account(tick, causes);
    }
    let keeper = tick.keeper();
    let max_steal_ns = tick.steal_ns.saturating_add(tick.perhaps_stolen_ns).min(late_ns);
    // Neither user code nor an idle state is to blame for the rest.
    let is_user = keeper.kind == CauseKind::Unknown && keeper.handler.is_none();
    let is_unattributed = is_user || tick.found == Found::User || keeper.kind == CauseKind::IdleExit;
    let steal_ns = if is_unattributed { max_steal_ns } else { tick.steal_ns.min(late_ns) };
    let handlers_ns = tick.handlers_ns.min(late_ns - max_steal_ns);
    let rest_ns = late_ns - max_steal_ns - handlers_ns;
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
            (handlers("handlers"), Cause { stack, ..Cause::new(CauseKind::IrqsOff, tick.thread.clone(), rest_ns) })
        }
        Keeper { handler: Some(_), .. } => {
            (handlers("handlers"), cause(CauseKind::Unknown, "beside what may be stolen", rest_ns))
        }
        _ => (handlers("handlers"), cause(CauseKind::Unknown, "user code ran: the machine or its hypervisor", rest_ns)),
    };
    let perhaps = cause(CauseKind::Unknown, PERHAPS_STOLEN, max_steal_ns - steal_ns);
    let mut causes = vec![cause(CauseKind::Steal, "hypervisor", steal_ns), perhaps, handlers, rest];
    causes.retain(|cause| cause.ns > 0);
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
    causes
}

/// Corrects the causes by the late tick itself: the account misses an interrupt that comes in while the account is
/// written. The tick then proves that the thread on the CPU had interrupts disabled.
fn correct_account(tick: &LateTick, causes: Vec<Cause>) -> Vec<Cause> {
    let is_known = causes.iter().any(|cause| cause.kind == CauseKind::IrqsOff);
    if is_known || tick.keeper().kind != CauseKind::IrqsOff {
        return causes;
    }
    let is_thread = |cause: &&Cause| matches!(cause.kind, CauseKind::Thread | CauseKind::Work);
    // Of several threads, the one missing from the account is unknown.
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
        causes.push(Cause { stack, cgroup, ..Cause::new(CauseKind::IrqsOff, tick.thread.clone(), ns) });
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

    fn classify(found: Found, frames: &str) -> (CauseKind, Option<String>, Option<String>) {
        let keeper = keeper(found, &Reason::Unknown, &stack(frames));
        (keeper.kind, keeper.function, keeper.caller)
    }

    #[test]
    fn blames_function_that_enabled_interrupts() {
        let held = "_raw_spin_unlock_irqrestore serial8250_console_write console_unlock";
        let names = |function: &str, caller: &str| (Some(function.to_owned()), Some(caller.to_owned()));
        let (kind, function, caller) = classify(Found::Kernel, held);
        assert_eq!(
            (kind, (function, caller)),
            (CauseKind::IrqsOff, names("_raw_spin_unlock_irqrestore", "serial8250_console_write"))
        );
        // The idle loop also runs the scheduler and softirqs.
        let switch = "finish_task_switch __schedule schedule_idle do_idle cpu_startup_entry";
        assert_eq!(classify(Found::Idle, switch).0, CauseKind::IrqsOff);
        let softirq = "_raw_spin_unlock_irqrestore net_rx_action handle_softirqs irq_exit_rcu do_idle";
        assert_eq!(classify(Found::Idle, softirq).0, CauseKind::IrqsOff);
    }

    #[test]
    fn idle_state_is_not_blamed_on_code() {
        for frames in ["pv_native_safe_halt default_idle do_idle", "cpuidle_enter_state cpuidle_enter do_idle"] {
            assert_eq!(classify(Found::Idle, frames), (CauseKind::IdleExit, None, None), "{frames}");
        }
    }

    #[test]
    fn late_tick_corrects_incomplete_account() {
        let tick = LateTick {
            found: Found::Kernel,
            came_ns: 1_000,
            stack: stack("bpf_local_irq_restore a b"),
            thread: ActorName::thread("dd", 7),
            ..LateTick::default()
        };
        let cause = |kind, who: &str, ns| Cause::new(kind, who.parse::<ActorName>().expect("any text"), ns);
        let (thread, irq, unknown) = (CauseKind::Thread, CauseKind::Irq, CauseKind::Unknown);
        let missed = vec![cause(thread, "dd:7", 800), cause(unknown, "not recorded", 150), cause(irq, "eth0", 50)];
        let actual: Vec<_> =
            correct_account(&tick, missed.clone()).iter().map(|cause| (cause.kind, cause.ns)).collect();
        assert_eq!(actual, [(CauseKind::IrqsOff, 950), (irq, 50)]);
        // Another thread on the CPU may account for the unrecorded time as well.
        let two = vec![cause(thread, "sh:8", 800), cause(unknown, "not recorded", 150), cause(thread, "dd:7", 50)];
        let actual: Vec<_> = correct_account(&tick, two)
            .into_iter()
            .map(|cause| (cause.kind, cause.who.to_string(), cause.ns))
            .collect();
        let expected = [(thread, "sh:8", 800), (unknown, "not recorded", 150), (CauseKind::IrqsOff, "dd:7", 50)];
        assert_eq!(actual, expected.map(|(kind, who, ns)| (kind, who.to_owned(), ns)));
        // It may be steal time.
        let perhaps = vec![cause(unknown, PERHAPS_STOLEN, 800), cause(irq, "eth0", 50)];
        assert_eq!(correct_account(&tick, perhaps.clone()), perhaps);
        // Nothing is proven if user code was interrupted, and nothing changes if the account names it already.
        let in_user = LateTick { found: Found::User, ..tick.clone() };
        assert_eq!(correct_account(&in_user, missed.clone()), missed);
        let mut seen = missed;
        seen.push(cause(CauseKind::IrqsOff, "dd:7", 10));
        assert_eq!(correct_account(&tick, seen.clone()), seen);
    }

    #[test]
    fn user_code_cannot_disable_interrupts() {
        assert_eq!(classify(Found::User, "anything").0, CauseKind::Unknown);
        assert_eq!(classify(Found::Kernel, "").0, CauseKind::Unknown);
        let late =
            LateTick { found: Found::User, came_ns: 900, steal_ns: 800, reason: Reason::Steal, ..LateTick::default() };
        let kinds: Vec<_> = tick_causes(&late).iter().map(|cause| (cause.kind, cause.ns)).collect();
        assert_eq!(kinds, [(CauseKind::Steal, 800), (CauseKind::Unknown, 100)]);
    }

    /// Returns the account of a vCPU that was descheduled in user code; it includes the late interrupt's delay if
    /// `late_ns` is not 0.
    fn account_of_user_code(stolen_ns: u64, late_ns: u64) -> Occupancy {
        let taken = Taken { steal_ns: stolen_ns, ..Taken::default() };
        let interval = |occupant, span: std::ops::Range<u64>| Interval {
            start_ns: span.start,
            end_ns: span.end,
            occupant,
            ..Interval::default()
        };
        let thread = Occupant::Thread { tid: 7, name: "dd".to_owned(), cgroup: None };
        let interrupt = Occupant::Irq { name: "local_timer".to_owned() };
        let intervals = vec![
            Interval { taken, ..interval(thread, 0..1_000) },
            Interval { late_ns, stack: stack(""), ..interval(interrupt, 1_000..1_001) },
        ];
        Occupancy { intervals, ..Occupancy::default() }
    }

    proptest! {
        #[test]
        fn steal_time_is_never_irqs_off(reported_ns in 0u64..1500, late_ns in 0u64..1000, with_account: bool) {
            // Some hypervisors report only a part of the steal time, and some none.
            for reason in [Reason::Steal, Reason::Unknown] {
                let account = with_account.then(|| account_of_user_code(reported_ns.min(1_000), late_ns));
                let tick = LateTick {
                    found: Found::User,
                    reason,
                    came_ns: 1_000,
                    steal_ns: reported_ns,
                    stack: stack(""),
                    thread: ActorName::thread("dd", 7),
                    occupancy: account,
                    ..LateTick::default()
                };
                prop_assert_ne!(tick.keeper().kind, CauseKind::IrqsOff);
                let causes = tick_causes(&tick);
                prop_assert!(causes.iter().all(|cause| cause.kind != CauseKind::IrqsOff), "{:?}", causes);
                prop_assert_eq!(causes.iter().map(|cause| cause.ns).sum::<u64>(), 1_000);
            }
            // In kernel code too, if the hypervisor reports steal time.
            let tick = LateTick { reason: Reason::Steal, came_ns: 1_000, steal_ns: reported_ns, stack: stack("a b"), ..LateTick::default() };
            prop_assert_eq!(tick.keeper().kind, CauseKind::Steal);
            prop_assert!(tick_causes(&tick).iter().all(|cause| cause.kind != CauseKind::IrqsOff));
        }
    }

    #[test]
    fn possible_steal_time_is_unknown() {
        let tick = |found, frames: &str| LateTick {
            found,
            reason: Reason::PerhapsSteal,
            came_ns: 1_000,
            steal_ns: 300,
            perhaps_stolen_ns: 650,
            stack: stack(frames),
            thread: ActorName::thread("dd", 7),
            ..LateTick::default()
        };
        let causes_of = |tick: &LateTick| -> Vec<(CauseKind, String, u64)> {
            tick_causes(tick).into_iter().map(|cause| (cause.kind, cause.who.to_string(), cause.ns)).collect()
        };
        let steal = |ns| (CauseKind::Steal, "hypervisor".to_owned(), ns);
        let unknown = |who: &str, ns| (CauseKind::Unknown, who.to_owned(), ns);
        let held = tick(Found::Kernel, "unlock write");
        assert_eq!(held.keeper().kind, CauseKind::Unknown);
        let beside = unknown("beside what may be stolen", 50);
        assert_eq!(causes_of(&held), [unknown(PERHAPS_STOLEN, 650), steal(300), beside]);
        // A section longer than all possible steal time is proven.
        let longer = LateTick { came_ns: 2_000, reason: Reason::Unknown, ..held };
        let section = (CauseKind::IrqsOff, "dd:7".to_owned(), 1_050);
        assert_eq!(causes_of(&longer), [section, unknown(PERHAPS_STOLEN, 650), steal(300)]);
        // Neither user code nor an idle state keeps interrupts off.
        let idle = causes_of(&tick(Found::Idle, "pv_native_safe_halt default_idle do_idle"));
        assert_eq!(idle, [steal(950), (CauseKind::IdleExit, "CPU 0".to_owned(), 50)]);
        assert_eq!(causes_of(&tick(Found::User, ""))[0], steal(950));
    }

    #[test]
    fn omits_labels_without_values() {
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
        fn causes_add_up_to_delay(late_ns in 0u64..1000, took in [0u64..1500, 0..1500, 0..1500], reason in 0..4, found in 0..3) {
            let [steal_ns, perhaps_stolen_ns, handlers_ns] = took;
            let handler = Reason::Handler("h".to_owned());
            let reason = [Reason::Unknown, Reason::Steal, Reason::PerhapsSteal, handler][reason as usize].clone();
            let found = [Found::Kernel, Found::Idle, Found::User][found as usize];
            let tick = LateTick { found, reason, stack: stack("a b"), came_ns: late_ns, steal_ns, perhaps_stolen_ns, handlers_ns, ..LateTick::default() };
            prop_assert_eq!(tick_causes(&tick).iter().map(|cause| cause.ns).sum::<u64>(), late_ns);
        }
    }
}
