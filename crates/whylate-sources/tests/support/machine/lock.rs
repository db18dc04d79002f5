// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs one kernel test at a time on the whole machine, or several that do not measure it, and none where the machine
//! cannot run them.

#[path = "hooks.rs"]
pub mod hooks;

use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use whylate_sources::inject::work::{MAX_AT_ONCE, Plan, run};
use whylate_sources::kernel::tracefs;
use whylate_sources::wq::WqOptions;
use whylate_sources::{AttachError, Session, Source};

static MACHINE: RwLock<()> = RwLock::new(());

/// Excludes other kernel tests, in this process and in others, while it lives: all of them, or only those that do not
/// share the machine.
pub struct MachineLock {
    _machine: File,
    _process: Guard,
}

#[allow(dead_code)]
enum Guard {
    Exclusive(RwLockWriteGuard<'static, ()>),
    Shared(RwLockReadGuard<'static, ()>),
}

/// Plans `items` work items that return at once.
pub fn plan(items: u64) -> Plan {
    Plan { items, at_once: MAX_AT_ONCE, delay: Duration::ZERO, busy_ns: 0, cpu: None, load: false }
}

/// Locks the machine. Returns `None`, and prints why, if it cannot inject work items.
pub fn lock_machine_to_inject() -> Option<MachineLock> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    let has_hooks = || hooks::can_measure_work() && hooks::can_call(&["bpf_wq_init", "bpf_wq_start"]);
    lock_if(exclusive, &OUTCOME, || run(&plan(1), &AtomicBool::new(false)).map(|_| ()), has_hooks)
}

/// Like [`lock_machine_to_inject`], for tests that inject nothing, or only where that is possible.
pub fn lock_machine() -> Option<MachineLock> {
    lock_to_measure(exclusive)
}

/// Like [`lock_machine`], for tests that neither depend on how busy the machine is nor keep it busy: they run
/// concurrently with one another, if the test program has several threads (`scripts/check-runner`).
pub fn share_machine() -> Option<MachineLock> {
    lock_to_measure(shared)
}

fn lock_to_measure(lock: fn() -> Result<MachineLock, String>) -> Option<MachineLock> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    lock_if(lock, &OUTCOME, || WqOptions::default().attach(&Session::of_one()).map(|_| ()), hooks::can_measure_work)
}

/// `try_once` runs in the first test of a process: neither the kernel nor the privileges change after that.
fn lock_if(
    lock: fn() -> Result<MachineLock, String>,
    outcome: &OnceLock<Result<(), String>>,
    try_once: impl FnOnce() -> Result<(), AttachError>,
    has_hooks: impl Fn() -> bool,
) -> Option<MachineLock> {
    let locked = lock().and_then(|locked| {
        outcome.get_or_init(|| is_possible(try_once(), has_hooks)).clone()?;
        Ok(locked)
    });
    locked.map_err(|reason| println!("skipped: {reason}")).ok()
}

fn exclusive() -> Result<MachineLock, String> {
    let process = Guard::Exclusive(MACHINE.write().unwrap_or_else(PoisonError::into_inner));
    Ok(MachineLock { _machine: flocked(FlockOperation::LockExclusive)?, _process: process })
}

fn shared() -> Result<MachineLock, String> {
    let process = Guard::Shared(MACHINE.read().unwrap_or_else(PoisonError::into_inner));
    Ok(MachineLock { _machine: flocked(FlockOperation::LockShared)?, _process: process })
}

/// Locks tracefs's own directory, which all processes share, so that no file remains.
fn flocked(operation: FlockOperation) -> Result<File, String> {
    let tracefs = tracefs::find().map_err(|error| format!("tracefs: {error}"))?;
    let machine = File::open(tracefs.join("instances")).map_err(|error| format!("tracefs: {error}"))?;
    flock(&machine, operation).map_err(|error| format!("cannot wait for other tests: {error}"))?;
    Ok(machine)
}

fn is_possible(outcome: Result<(), AttachError>, has_hooks: impl Fn() -> bool) -> Result<(), String> {
    match outcome {
        Err(error @ (AttachError::NotPermitted | AttachError::Unsupported(_))) => {
            // A skipped test would hide a fault of the code under test.
            assert!(!has_hooks(), "this kernel has all hooks, and whylate says: {error}");
            Err(error.to_string())
        }
        // Any other error is for the test to find.
        _ => Ok(()),
    }
}
