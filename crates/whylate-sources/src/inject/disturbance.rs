// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known disturbances of one CPU: number, length and interval are given, and each is measured from inside.
//!
//! A thread on that CPU makes them one after another. The caller's thread stays on the other CPUs, so that it sees a
//! signal and cuts the current one short even if nothing else can run on the disturbed CPU.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use whylate_model::units::format_ns;

pub use super::maker::Policy;

use super::maker::{Made, Maker, Stop};
use super::threads::{self, Away};
use super::{Timestamp, hog, off, softirq};
use crate::AttachError;

/// Minimum length of a disturbance in nanoseconds; shorter ones have no effect.
pub const MIN_LENGTH_NS: u64 = 1_000;
/// Maximum length of a disturbance in nanoseconds. The kernel's own limits start at some seconds.
pub const MAX_LENGTH_NS: u64 = 50_000_000;
/// Maximum number of disturbances of one run.
pub const MAX_TIMES: u64 = 10_000;
/// Maximum total length of all disturbances of a run.
const MAX_TOTAL_NS: u64 = 60_000_000_000;
/// Maximum interval between two starts.
const MAX_EVERY_NS: u64 = 3_600_000_000_000;
/// Maximum real-time priority; 99 is that of kernel threads that must not wait.
pub const MAX_PRIORITY: u8 = 98;
/// Poll period of a stop request.
const POLL: Duration = Duration::from_millis(5);
/// Name of an abstract socket used as a lock: needs no file, ends with the process, and only one process of a network
/// namespace can bind it.
const LOCK_NAME: &[u8] = b"whylate-inject";

/// Kind of a disturbance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Interrupts are off.
    IrqsOff,
    /// Preemption is off, with interrupts on.
    PreemptOff,
    /// A softirq (`HRTIMER`) runs.
    Softirq,
    /// A thread keeps the CPU busy.
    Hog(Policy),
}

impl Kind {
    /// Returns the name of the thread on the CPU, at most 15 bytes.
    pub fn thread(self) -> &'static str {
        match self {
            Self::IrqsOff => "whylate-irqsoff",
            Self::PreemptOff => "whylate-preempt",
            Self::Softirq => "whylate-softirq",
            Self::Hog(_) => "whylate-hog",
        }
    }
}

/// Disturbances to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Kind of the disturbances.
    pub kind: Kind,
    /// Length of each, in nanoseconds.
    pub length_ns: u64,
    /// Number of disturbances.
    pub times: u64,
    /// Minimum interval from one start to the next, in nanoseconds.
    pub every_ns: u64,
    /// The CPU to disturb; `None` is the current one.
    pub cpu: Option<u32>,
}

impl Plan {
    /// Checks the limits.
    ///
    /// # Errors
    /// Fails if the plan is empty, or would overload the machine.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.length_ns < MIN_LENGTH_NS || self.length_ns > MAX_LENGTH_NS {
            return Err(anyhow!(
                "a disturbance may take {} to {}, and this is {}",
                format_ns(MIN_LENGTH_NS),
                format_ns(MAX_LENGTH_NS),
                format_ns(self.length_ns)
            ));
        }
        if self.times == 0 || self.times > MAX_TIMES {
            return Err(anyhow!("ask for 1 to {MAX_TIMES} disturbances"));
        }
        if self.every_ns < 2 * self.length_ns {
            return Err(anyhow!(
                "disturbances may take half of the CPU's time at most: make one every {} or more, or shorter ones",
                format_ns(2 * self.length_ns)
            ));
        }
        if self.every_ns > MAX_EVERY_NS {
            return Err(anyhow!("the interval may be {} hour at most", MAX_EVERY_NS / 3_600_000_000_000));
        }
        let total_ns = self.times * self.length_ns;
        if total_ns > MAX_TOTAL_NS {
            return Err(anyhow!(
                "that would disturb the CPU for {:.2} s, and {} s is the limit: ask for fewer or shorter disturbances",
                total_ns as f64 / 1e9,
                MAX_TOTAL_NS / 1_000_000_000
            ));
        }
        if matches!(self.kind, Kind::Hog(Policy::Fifo(priority)) if priority == 0 || priority > MAX_PRIORITY) {
            return Err(anyhow!("a real-time priority is 1 to {MAX_PRIORITY}"));
        }
        Ok(())
    }
}

/// A disturbance, as measured from inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disturbance {
    /// Start of the disturbance.
    pub start: Timestamp,
    /// Length by `CLOCK_MONOTONIC`: as planned or a little more, or less if it was cut short.
    pub length_ns: u64,
    /// The disturbed CPU.
    pub cpu: u32,
    /// On-CPU time of a hog's thread within the disturbance; the rest went to other threads or to a hypervisor.
    pub on_cpu_ns: Option<u64>,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The disturbed CPU.
    pub cpu: u32,
    /// Each disturbance, in order.
    pub made: Vec<Disturbance>,
    /// Whether all were made and none was cut short.
    pub complete: bool,
}

/// Message from the thread on the disturbed CPU to the caller's thread.
enum Message {
    Ready { cpu: u32, others: Vec<u32>, cut: Option<MapHandle>, lock: UnixDatagram },
    Made(Made),
}

/// Makes the disturbances, and passes each to `each` when it is over. `stop`, or an error from `each`, ends the run at
/// once.
///
/// The calling thread is kept away from the disturbed CPU until this returns.
///
/// # Errors
/// Fails if the plan is invalid, the kernel or the caller's privileges do not allow it, or `each` fails.
pub fn run(
    plan: &Plan,
    stop: &AtomicBool,
    each: &mut dyn FnMut(&Disturbance) -> anyhow::Result<()>,
) -> Result<Report, AttachError> {
    plan.check()?;
    let here = threads::current_cpu()?;
    let failed = AtomicBool::new(false);
    let stop = Stop { asked: stop, failed: &failed };
    let (messages, received) = mpsc::channel();
    let (go, may_go) = mpsc::channel();
    let mut go = Some(go);
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(plan.kind.thread().to_owned());
        let thread = thread
            .spawn_scoped(scope, move || run_there(plan, here, stop, &messages, &may_go))
            .context("cannot start a thread")?;
        let mut made: Vec<Disturbance> = Vec::new();
        let (mut disturbed, mut cutter, mut failure) = (here, None, None);
        let (mut away, mut alone) = (None, None);
        loop {
            match received.recv_timeout(POLL) {
                Ok(Message::Ready { cpu, others, cut, lock }) => {
                    (disturbed, cutter, alone) = (cpu, cut, Some(lock));
                    match Away::to(&others) {
                        Ok(guard) => {
                            away = Some(guard);
                            // The thread receives it, or has failed.
                            let _ = go.take().map(|go| go.send(()));
                        }
                        Err(error) => {
                            go = None;
                            failure = Some(anyhow!(error).context(format!("cannot move away from CPU {cpu}")));
                        }
                    }
                }
                Ok(Message::Made(one)) => {
                    let one = Disturbance {
                        start: Timestamp::at(one.start_ns),
                        length_ns: one.end_ns - one.start_ns,
                        cpu: one.cpu,
                        on_cpu_ns: one.on_cpu_ns,
                    };
                    made.push(one);
                    // After a failure, disturbances are no longer reported.
                    failure = failure.or_else(|| each(&one).err());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            failed.fetch_or(failure.is_some(), Ordering::Relaxed);
            if stop.is_set() {
                thread.thread().unpark();
                if let Some(cut) = cutter.take() {
                    // If it fails, the disturbance ends by itself soon.
                    let _ = cut.update(&0_u32.to_ne_bytes(), &1_u32.to_ne_bytes(), MapFlags::ANY);
                }
            }
        }
        drop((away, alone));
        thread.join().map_err(|_| anyhow!("the thread that disturbs the CPU failed"))??;
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        let in_full = made.iter().filter(|one| one.length_ns >= plan.length_ns).count() as u64;
        Ok(Report { cpu: disturbed, made, complete: in_full == plan.times })
    })
}

fn run_there(
    plan: &Plan,
    here: u32,
    stop: Stop<'_>,
    messages: &Sender<Message>,
    may_go: &Receiver<()>,
) -> Result<(), AttachError> {
    let (cpu, others) = threads::move_to(plan.cpu.unwrap_or(here))?;
    if others.is_empty() {
        let reason = "all CPUs must not stall at once, and there is only one to use here: run it where there are two";
        return Err(AttachError::Unsupported(reason.to_owned()));
    }
    let mut maker: Box<dyn Maker> = match plan.kind {
        Kind::IrqsOff => Box::new(off::Off::new(off::What::Interrupts, cpu, plan.length_ns)?),
        Kind::PreemptOff => Box::new(off::Off::new(off::What::Preemption, cpu, plan.length_ns)?),
        Kind::Softirq => Box::new(softirq::Softirq::new(cpu, plan.length_ns)?),
        Kind::Hog(policy) => Box::new(hog::Hog::new(policy, plan.length_ns)?),
    };
    // Missing privileges or kernel features do not depend on other processes: report them first.
    let lock = acquire_lock()?;
    // The caller's thread receives until this one has ended.
    let _ = messages.send(Message::Ready { cpu, others, cut: maker.cut()?, lock });
    // On the disturbed CPU the caller's thread could not stop anything.
    if may_go.recv().is_err() {
        return Ok(());
    }
    let mut due_ns: u64 = 0;
    for _ in 0..plan.times {
        if !stop.sleep_until(due_ns.saturating_sub(maker.lead_ns())) {
            break;
        }
        let made = maker.make(stop)?;
        if made.cpu != cpu {
            return Err(
                anyhow!("the kernel ran it on CPU {} instead of CPU {cpu}: choose another CPU", made.cpu).into()
            );
        }
        if made.start_ns == 0 {
            break;
        }
        // If the machine made it longer than planned, leave as much time to other threads.
        due_ns = (made.start_ns + plan.every_ns).max(made.end_ns + plan.length_ns);
        // Sending the message takes CPU time. Wait, so that it does not prolong the disturbance.
        stop.sleep_until((made.end_ns + plan.length_ns / 2).min(due_ns.saturating_sub(maker.lead_ns())));
        let _ = messages.send(Message::Made(made));
    }
    Ok(())
}

/// Checks that no other process disturbs a CPU now.
///
/// # Errors
/// Fails if another process does, or if this cannot be determined.
pub fn is_alone() -> anyhow::Result<()> {
    acquire_lock().map(drop)
}

/// Acquires the lock: two processes that disturb CPUs could stall all of them. Held while the socket lives.
fn acquire_lock() -> anyhow::Result<UnixDatagram> {
    let name = SocketAddr::from_abstract_name(LOCK_NAME)?;
    UnixDatagram::bind_addr(&name).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => anyhow!("another whylate inject disturbs a CPU already: wait for it, or stop it"),
        _ => anyhow!(error).context("cannot find out whether another whylate inject disturbs a CPU"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS_NS: u64 = 1_000_000;

    fn plan(length_ns: u64, times: u64, every_ns: u64) -> Plan {
        Plan { kind: Kind::IrqsOff, length_ns, times, every_ns, cpu: None }
    }

    fn hog(policy: Policy) -> Plan {
        Plan { kind: Kind::Hog(policy), ..plan(10 * MS_NS, 5, 200 * MS_NS) }
    }

    #[test]
    fn accepts_valid_plans() {
        for plan in [
            plan(10 * MS_NS, 5, 200 * MS_NS),
            plan(MAX_LENGTH_NS, 1_200, 2 * MAX_LENGTH_NS),
            plan(MIN_LENGTH_NS, MAX_TIMES, 2 * MIN_LENGTH_NS),
            plan(6 * MS_NS, MAX_TIMES, MAX_EVERY_NS),
            hog(Policy::Fifo(1)),
            hog(Policy::Fifo(MAX_PRIORITY)),
            hog(Policy::Normal),
        ] {
            assert!(plan.check().is_ok(), "{plan:?}");
        }
    }

    #[test]
    fn rejects_plans_out_of_limits() {
        for plan in [
            plan(0, 1, MS_NS),
            plan(MIN_LENGTH_NS - 1, 1, MS_NS),
            plan(MAX_LENGTH_NS + 1, 1, 1_000 * MS_NS),
            plan(u64::MAX, u64::MAX, u64::MAX),
            plan(MS_NS, 0, 200 * MS_NS),
            plan(MS_NS, MAX_TIMES + 1, 200 * MS_NS),
            plan(10 * MS_NS, 5, 20 * MS_NS - 1),
            plan(10 * MS_NS, 5, MAX_EVERY_NS + 1),
            plan(MAX_LENGTH_NS, 1_201, 200 * MS_NS),
            hog(Policy::Fifo(0)),
            hog(Policy::Fifo(MAX_PRIORITY + 1)),
        ] {
            assert!(plan.check().is_err(), "{plan:?}");
        }
    }

    #[test]
    fn rejection_names_remedy() {
        let said = |plan: Plan| plan.check().map_err(|error| error.to_string());
        let half =
            "disturbances may take half of the CPU's time at most: make one every 20.0ms or more, or shorter ones";
        assert_eq!(said(plan(10 * MS_NS, 5, 15 * MS_NS)), Err(half.to_owned()));
        let long = "a disturbance may take 1.00us to 50.0ms, and this is 51.0ms";
        assert_eq!(said(plan(51 * MS_NS, 5, 200 * MS_NS)), Err(long.to_owned()));
    }

    #[test]
    fn thread_names_fit_comm() {
        for kind in [Kind::IrqsOff, Kind::PreemptOff, Kind::Softirq, Kind::Hog(Policy::Normal)] {
            assert!(kind.thread().len() <= 15, "{}", kind.thread());
        }
    }

    #[test]
    fn invalid_plan_does_not_reach_kernel() {
        let outcome = run(&plan(MS_NS, 0, 2 * MS_NS), &AtomicBool::new(false), &mut |_| Ok(()));
        let received = outcome.map_err(|error| error.to_string());
        assert_eq!(received, Err("ask for 1 to 10000 disturbances".to_owned()));
    }
}
