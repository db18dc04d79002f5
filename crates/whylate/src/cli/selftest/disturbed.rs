// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks `timerlat` and `irqsoff` by disturbing a CPU for a known time.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use whylate_model::blame::Evidence;
use whylate_model::selftest::{Check, Unit};
use whylate_model::sources::{IRQSOFF, TIMERLAT};
use whylate_model::{Cause, CauseKind, LateEvent};
use whylate_sources::inject::disturbance::{self, Kind, Plan, Policy};
use whylate_sources::irqsoff::IrqsoffOptions;
use whylate_sources::kernel::cpus;
use whylate_sources::timerlat::TimerlatOptions;
use whylate_sources::{AttachError, Attached, Session, Source as _};

use super::Setup;

pub(super) const IRQS_OFF: &str = "interrupts off";
pub(super) const SOFTIRQ: &str = "a softirq";
pub(super) const HOG: &str = "a FIFO:98 thread";
/// Number of disturbances of each kind.
pub(super) const TIMES: u64 = 20;
/// Period of the timers.
const PERIOD_NS: u64 = 1_000_000;
/// The function that ends an injected window with interrupts off.
const ENABLES: &str = "bpf_local_irq_restore";
/// The thread that disables interrupts, as named in causes.
const DISTURBS: &str = "whylate-irqsoff";
/// Delay before the last late events are read.
const SETTLE: Duration = Duration::from_millis(100);

pub(super) fn timer_and_irqs_off(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    timer(setup, IRQS_OFF, Kind::IrqsOff, DISTURBS, |cause| {
        cause.kind == CauseKind::IrqsOff && cause.who.comm() == Some(DISTURBS)
    })
}

pub(super) fn timer_and_softirq(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    timer(setup, SOFTIRQ, Kind::Softirq, "softirq hrtimer", |cause| {
        cause.kind == CauseKind::Softirq && cause.who == "hrtimer"
    })
}

pub(super) fn timer_and_hog(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    timer(setup, HOG, Kind::Hog(Policy::Fifo(98)), "whylate-hog", |cause| {
        cause.kind == CauseKind::Thread && cause.who.comm() == Some("whylate-hog")
    })
}

/// Checks `timerlat`: the activation delayed most is due within a period of the disturbance's start, and waits until
/// its end.
fn timer(
    setup: &Setup<'_>,
    injected: &str,
    kind: Kind,
    cause: &str,
    is_true: impl Fn(&Cause) -> bool,
) -> Result<Vec<Check>, AttachError> {
    let mut source = TimerlatOptions {
        backend: Some("bpf".to_owned()),
        cpus: vec![setup.cpu],
        period_ns: PERIOD_NS,
        explain_over_ns: Some(setup.length_ns / 2),
        keep_evidence: true,
        ..TimerlatOptions::default()
    }
    .start(&Session::of_one())?;
    let seen = while_disturbed(&mut *source, setup, kind)?;
    let is_within = |event: &LateEvent, length_ns: u64, stolen_ns: u64| {
        // Steal time may be before, within or after a disturbance.
        let longest_ns = length_ns + setup.apart_ns + stolen_ns;
        (length_ns.saturating_sub(PERIOD_NS + setup.apart_ns)..=longest_ns).contains(&event.latency_ns)
    };
    let check = Check::new(TIMERLAT.name, source.backend, injected, "waits of injected length");
    Ok(vec![seen.judge(check, is_within, cause, |event, is_known| first_of(event, is_known).is_some_and(&is_true))])
}

/// Checks `irqsoff`: sections with interrupts off are reported within bounds, with the function that ended them.
pub(super) fn windows(setup: &Setup<'_>) -> Result<Vec<Check>, AttachError> {
    let mut source = IrqsoffOptions {
        backend: Some("ticks".to_owned()),
        cpus: vec![setup.cpu],
        period_ns: Some(PERIOD_NS),
        late_over_ns: Some(setup.length_ns / 2),
        keep_evidence: true,
        ..IrqsoffOptions::default()
    }
    .attach(&Session::of_one())?;
    let seen = while_disturbed(&mut *source, setup, Kind::IrqsOff)?;
    let is_within = |event: &LateEvent, length_ns: u64, _| {
        let bounds = event.latency_ns..=event.at_most_ns.unwrap_or(event.latency_ns);
        bounds.end() - bounds.start() <= PERIOD_NS + setup.apart_ns && bounds.contains(&length_ns)
    };
    let is_right = |event: &LateEvent, _| event.labels.get("function").is_some_and(|function| function == ENABLES);
    let check = Check::new(IRQSOFF.name, source.backend, IRQS_OFF, "sections within bounds");
    Ok(vec![seen.judge(check, is_within, ENABLES, is_right)])
}

/// Returns the largest cause, without steal time if the kernel has counted it (`is_known`).
fn first_of(event: &LateEvent, is_known: bool) -> Option<&Cause> {
    event.causes.iter().find(|cause| !(is_known && is_stolen(cause)))
}

fn is_stolen(cause: &Cause) -> bool {
    cause.kind == CauseKind::Steal
}

/// Returns the steal time that a source reports within a late event.
fn stolen_ns(event: &LateEvent) -> u64 {
    event.causes.iter().filter(|cause| is_stolen(cause)).map(|cause| cause.ns).sum()
}

struct Observed {
    /// Spans of the disturbances (CLOCK_MONOTONIC, nanoseconds).
    made: Vec<Range<u64>>,
    events: Vec<LateEvent>,
    /// Upper bound of the CPU's steal time during the disturbances, as counted in /proc/stat.
    stolen_ns: u64,
}

impl Observed {
    /// Passes if 19 of 20 disturbances are reported with the right length. Also counts those with the right cause.
    fn judge(
        &self,
        check: Check,
        is_within: impl Fn(&LateEvent, u64, u64) -> bool,
        cause: &str,
        is_right: impl Fn(&LateEvent, bool) -> bool,
    ) -> Check {
        let (mut within, mut right, mut left_ns) = (0_u64, 0, self.stolen_ns);
        for made in &self.made {
            let Some((event, _)) = event_of(&self.events, made) else { continue };
            // A source's steal time counts only as far as the kernel has counted steal time.
            let reported_ns = stolen_ns(event);
            let stolen_ns = reported_ns.min(left_ns);
            left_ns -= stolen_ns;
            within += u64::from(is_within(event, made.end - made.start, stolen_ns));
            right += u64::from(is_right(event, stolen_ns == reported_ns));
        }
        let disturbances = self.made.len() as u64;
        check.compare(Unit::Count, disturbances as f64, within as f64, disturbances as f64 / 20.0).blames(
            cause,
            right,
            disturbances,
        )
    }
}

fn while_disturbed(source: &mut dyn Attached, setup: &Setup<'_>, kind: Kind) -> Result<Observed, AttachError> {
    // Not a multiple of the period, so that disturbances start at varying phases of it.
    let every_ns = 3 * setup.length_ns + 137_000;
    let plan = Plan { kind, length_ns: setup.length_ns, times: TIMES, every_ns, cpu: Some(setup.cpu) };
    let stolen = || cpus::stolen_ns(setup.cpu).context("cannot read the steal time");
    let (mut events, stolen_before_ns) = (Vec::new(), stolen()?);
    let report = thread::scope(|scope| {
        let disturbing = scope.spawn(|| disturbance::run(&plan, setup.stop, &mut |_| Ok(())));
        let mut drained = Ok(());
        while !disturbing.is_finished() && drained.is_ok() {
            drained = source.drain_late(Duration::from_millis(50), &mut |event| events.push(event));
        }
        let report = disturbing.join().map_err(|_| anyhow!("the thread that disturbs the CPU failed"))?;
        drained.context("cannot read late events")?;
        report
    })?;
    if !report.complete {
        return Err(anyhow!("not every disturbance was made").into());
    }
    thread::sleep(SETTLE);
    source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
    let span = |made: &disturbance::Disturbance| {
        made.start.monotonic_ns..made.start.monotonic_ns.saturating_add(made.length_ns)
    };
    let stolen_ns = stolen()?.saturating_sub(stolen_before_ns) + cpus::stolen_tick_ns();
    Ok(Observed { made: report.made.iter().map(span).collect(), events, stolen_ns })
}

/// Returns the event that a disturbance delayed most, and the span of its wait.
fn event_of<'a>(events: &'a [LateEvent], made: &Range<u64>) -> Option<(&'a LateEvent, Range<u64>)> {
    let common_ns = |waited: &Range<u64>| made.end.min(waited.end).saturating_sub(made.start.max(waited.start));
    let with_spans = events.iter().filter_map(|event| Some((event, waited(event)?)));
    with_spans.filter(|(_, waited)| common_ns(waited) > 0).max_by_key(|(_, waited)| common_ns(waited))
}

fn waited(event: &LateEvent) -> Option<Range<u64>> {
    match event.evidence.as_deref()? {
        Evidence::Timer(timer) => Some(timer.due_ns..timer.thread_ns),
        Evidence::Tick(tick) => Some(tick.due_ns..tick.came_ns),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::blame::TimerEvidence;
    use whylate_model::selftest::Verdict;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Judges 20 disturbances of 10 ms, each reported with another 10 ms of steal time.
    fn judged(stolen_ns: u64) -> Check {
        let made: Vec<Range<u64>> = (0..20).map(|number| number * 100 * MS..(number * 100 + 10) * MS).collect();
        let events = made.iter().map(|made| {
            let (due_ns, thread_ns) = (made.start, made.end + 10 * MS);
            let causes = vec![
                Cause::new(CauseKind::Steal, "hypervisor", 10 * MS),
                Cause::new(CauseKind::Thread, "whylate-hog:7", 10 * MS),
            ];
            let evidence =
                Some(Box::new(Evidence::Timer(TimerEvidence { due_ns, thread_ns, ..TimerEvidence::default() })));
            LateEvent { latency_ns: thread_ns - due_ns, causes, evidence, ..LateEvent::default() }
        });
        let seen = Observed { events: events.collect(), made, stolen_ns };
        let is_within = |event: &LateEvent, length_ns: u64, stolen_ns: u64| event.latency_ns <= length_ns + stolen_ns;
        let is_true = |cause: &Cause| cause.kind == CauseKind::Thread;
        seen.judge(Check::new("made", "", "", ""), is_within, "whylate-hog", |event, is_known| {
            first_of(event, is_known).is_some_and(is_true)
        })
    }

    #[test]
    fn reported_steal_is_limited_by_kernel_steal_time() {
        assert_eq!((judged(200 * MS).verdict, judged(200 * MS).measured), (Verdict::Pass, 20.0));
        // The kernel has counted half of the reported steal time; then none of it.
        assert_eq!((judged(100 * MS).verdict, judged(100 * MS).measured), (Verdict::Fail, 10.0));
        let made_up = judged(0);
        assert_eq!((made_up.verdict, made_up.measured), (Verdict::Fail, 0.0));
        assert_eq!(made_up.found.map(|found| found.right), Some(0));
    }
}
