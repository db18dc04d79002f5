// SPDX-License-Identifier: MIT OR Apache-2.0
//! The measured threads: those of this process, or the tracer's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::latest::{Activated, MAX_KEPT};
use super::tally::TakenCounts;
use super::threads::{Measured, StopState, ThreadConfig};
use super::tracer::Tracer;
use super::{BPF, POLLED_EVERY, TRACER, TimerlatOptions};
use crate::AttachError;
use crate::kernel::clock;
use crate::kernel::mapped::MappedArray;

/// Time that threads run before their activations count, unless ten periods pass sooner.
const SETTLING: Duration = Duration::from_millis(50);

/// Lead time for all threads to see the start of counting.
const START_LEAD: Duration = Duration::from_micros(50);

/// The running workload, stopped on drop.
pub(super) enum Workload {
    /// Threads of this process.
    Own { measured: Vec<Measured>, stopped: Arc<StopState> },
    /// The kernel's tracer.
    Tracer(Box<Tracer>),
}

impl Workload {
    /// Starts threads on these CPUs. Their activations do not count yet.
    pub(super) fn start(
        options: &TimerlatOptions,
        cpus: &[u32],
        map: &Arc<MappedArray>,
        stopped: &Arc<StopState>,
    ) -> Result<Self, AttachError> {
        let now_ns = clock::monotonic_ns();
        let start = |(index, &cpu)| {
            Measured::start(ThreadConfig {
                cpu,
                period_ns: options.period_ns,
                due_with_ns: options.aligned_ns.map(|apart_ns| now_ns + index * apart_ns),
                policy: options.policy,
                map: Arc::clone(map),
                width: options.steps,
                counted_every_ns: POLLED_EVERY.as_nanos() as u64,
                stop: options.stop,
                stopped: Arc::clone(stopped),
                recorded: options.record.as_ref().map_or(0, |_| MAX_KEPT),
            })
        };
        let measured = (0..).zip(cpus).map(start).collect::<Result<_, AttachError>>()?;
        Ok(Workload::Own { measured, stopped: Arc::clone(stopped) })
    }

    /// Returns when threads that have just started have warmed up.
    pub(super) fn settles_at(period_ns: u64) -> Instant {
        Instant::now() + SETTLING.min(Duration::from_nanos(period_ns.saturating_mul(10)))
    }

    /// Waits until the threads have warmed up.
    pub(super) fn settle(&self, settles_at: Instant) -> anyhow::Result<()> {
        std::thread::sleep(settles_at.saturating_duration_since(Instant::now()));
        match self {
            Workload::Own { .. } => Ok(()),
            Workload::Tracer(tracer) => tracer.set_policy(),
        }
    }

    pub(super) fn backend(&self) -> &'static str {
        match self {
            Workload::Own { .. } => BPF,
            Workload::Tracer(_) => TRACER,
        }
    }

    pub(super) fn cpus(&self) -> Vec<u32> {
        match self {
            Workload::Own { measured, .. } => measured.iter().map(|measured| measured.cpu).collect(),
            Workload::Tracer(tracer) => tracer.cpus(),
        }
    }

    pub(super) fn has_user(&self) -> bool {
        match self {
            Workload::Own { .. } => true,
            Workload::Tracer(tracer) => tracer.has_user,
        }
    }

    /// Returns the latest activations due since `from_ns`, by due time; those of the tracer are in its own trace.
    pub(super) fn latest(&self, from_ns: u64) -> Vec<Activated> {
        let Workload::Own { measured, .. } = self else { return Vec::new() };
        let to_unix_ns = clock::unix_ns().saturating_sub(clock::monotonic_ns());
        let of_cpu = measured.iter().map(|measured| measured.counter.latest.since(from_ns, measured.cpu, to_unix_ns));
        let mut latest: Vec<Activated> = of_cpu.flatten().collect();
        latest.sort_by_key(|activated| (activated.due_unix_ns, activated.cpu));
        latest
    }

    /// Collects activations due until `until_ns`.
    pub(super) fn collect(&mut self, until_ns: u64) -> anyhow::Result<()> {
        match self {
            Workload::Own { measured, stopped } => {
                let from_ns = stopped.began_ns();
                measured.iter_mut().for_each(|measured| measured.counter.count(from_ns, until_ns));
                Ok(())
            }
            Workload::Tracer(tracer) => tracer.collect(until_ns),
        }
    }

    /// Returns the number of activations due until then that have not arrived, with the periods after them, per CPU.
    pub(super) fn overdue(&self, until_ns: u64) -> Vec<(u32, u64)> {
        match self {
            Workload::Own { measured, stopped } => {
                let from_ns = stopped.began_ns();
                // Activations in flight at a stop never arrive.
                let is_over = stopped.by().is_some();
                let of_cpu =
                    |measured: &Measured| if is_over { 0 } else { measured.counter.overdue(from_ns, until_ns) };
                measured.iter().map(|measured| (measured.cpu, of_cpu(measured))).collect()
            }
            Workload::Tracer(tracer) => tracer.overdue(until_ns),
        }
    }

    /// Takes the counts since the last call, per CPU.
    pub(super) fn take(&mut self) -> Vec<(u32, TakenCounts)> {
        match self {
            Workload::Own { measured, .. } => {
                measured.iter_mut().map(|measured| (measured.cpu, measured.counter.take())).collect()
            }
            Workload::Tracer(tracer) => tracer.take(),
        }
    }

    pub(super) fn stopped_by(&self) -> Option<u32> {
        match self {
            Workload::Own { stopped, .. } => stopped.by(),
            Workload::Tracer(tracer) => tracer.stopped_by(),
        }
    }

    /// Returns whether an activation counts: threads continue until they notice a stop.
    pub(super) fn counts(&self, cpu: u32, due_ns: u64, thread_ns: u64) -> bool {
        match self {
            Workload::Own { stopped, .. } => thread_ns <= stopped.until_ns(),
            Workload::Tracer(tracer) => tracer.counts(cpu, due_ns),
        }
    }

    /// Makes activations count. Returns the time since when they do, by their due time.
    pub(super) fn resume(&mut self, stopped: &StopState) -> anyhow::Result<u64> {
        if let Workload::Tracer(tracer) = self {
            let from_ns = tracer.resume()?;
            stopped.resume(from_ns);
            return Ok(from_ns);
        }
        loop {
            // Every thread must see this before `from_ns`.
            let from_ns = clock::monotonic_ns() + START_LEAD.as_nanos() as u64;
            stopped.resume(from_ns);
            if clock::monotonic_ns() < from_ns {
                return Ok(from_ns);
            }
        }
    }
}
