// SPDX-License-Identifier: MIT OR Apache-2.0
//! Disturbances of known cause and length, and a background load.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Result, ensure};
use whylate_model::{Cause, CauseKind};
use whylate_sources::AttachError;
use whylate_sources::inject::disturbance::{self, Kind};

use crate::support::machine::cpus::pin_to;

/// Disturbs a CPU; returns the span of each disturbance on CLOCK_MONOTONIC.
pub fn disturb(kind: Kind, cpu: u32, length_ns: u64, times: u64, every_ns: u64) -> Result<Vec<Range<u64>>> {
    let plan = disturbance::Plan { kind, length_ns, times, every_ns, cpu: Some(cpu) };
    let report = disturbance::run(&plan, &AtomicBool::new(false), &mut |_| Ok(()))?;
    ensure!(report.complete, "not every disturbance was made");
    let spans = report.made.iter().map(|made| made.start.monotonic_ns..made.start.monotonic_ns + made.length_ns);
    Ok(spans.collect())
}

/// Kernels before 6.14 cannot disable interrupts on demand.
pub fn is_unsupported(error: &anyhow::Error) -> bool {
    let unsupported = matches!(error.downcast_ref(), Some(AttachError::Unsupported(_)));
    if unsupported {
        println!("skipped: {error:#}");
    }
    unsupported
}

/// Runs `act` with a busy thread on the disturbed CPU, nice enough not to be the main cause of waits.
pub fn while_loaded<T>(cpu: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = thread::Builder::new().name("test-load".to_owned()).spawn_scoped(scope, || {
            pin_to(cpu)?;
            rustix::process::setpriority_process(None, 10)?;
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            anyhow::Ok(())
        })?;
        let outcome = act();
        over.store(true, Ordering::Relaxed);
        load.join().expect("spinning does not panic")?;
        outcome
    })
}

/// Returns whether the cause has that kind and an actor with a name that starts with `who`.
pub fn is(cause: &Cause, kind: CauseKind, who: &str) -> bool {
    cause.kind == kind && cause.who.to_string().starts_with(who)
}
