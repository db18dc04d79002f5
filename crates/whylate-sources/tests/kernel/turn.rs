// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs one kernel test at a time on the whole machine, and none where the machine cannot run them.

#[path = "hooks.rs"]
pub mod hooks;

use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use whylate_sources::inject::work::{MAX_AT_ONCE, Plan, run};
use whylate_sources::kernel::tracefs;
use whylate_sources::wq::WqOptions;
use whylate_sources::{AttachError, Session, Source};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Excludes all other kernel tests, in this process and in others, while it lives.
pub struct Turn {
    _machine: File,
    _process: MutexGuard<'static, ()>,
}

/// Plans `items` work items that return at once.
pub fn plan(items: u64) -> Plan {
    Plan { items, at_once: MAX_AT_ONCE, delay: Duration::ZERO, busy_ns: 0, cpu: None, load: false }
}

/// Waits for this test's turn. Returns `None`, and prints why, if the machine cannot inject work items.
pub fn turn() -> Option<Turn> {
    let has_hooks = || hooks::can_measure_work() && hooks::can_call(&["bpf_wq_init", "bpf_wq_start"]);
    turn_if(|| run(&plan(1), &AtomicBool::new(false)).map(|_| ()), has_hooks)
}

/// Like [`turn`], for tests that inject nothing, or only where that is possible.
pub fn turn_to_measure() -> Option<Turn> {
    turn_if(|| WqOptions::default().attach(&Session::of_one()).map(|_| ()), hooks::can_measure_work)
}

fn turn_if(possible: impl FnOnce() -> Result<(), AttachError>, has_hooks: impl Fn() -> bool) -> Option<Turn> {
    match wait_for_turn(possible, has_hooks) {
        Ok(turn) => Some(turn),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

fn wait_for_turn(
    possible: impl FnOnce() -> Result<(), AttachError>,
    has_hooks: impl Fn() -> bool,
) -> Result<Turn, String> {
    let process = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let tracefs = tracefs::find().map_err(|error| format!("tracefs: {error}"))?;
    // The directory itself is the lock that all processes share, so no file remains.
    let machine = File::open(tracefs.join("instances")).map_err(|error| format!("tracefs: {error}"))?;
    flock(&machine, FlockOperation::LockExclusive).map_err(|error| format!("cannot wait for other tests: {error}"))?;
    match possible() {
        Err(error @ (AttachError::NotPermitted | AttachError::Unsupported(_))) => {
            // A skipped test would hide a fault of the code under test.
            assert!(!has_hooks(), "this kernel has all hooks, and whylate says: {error}");
            Err(error.to_string())
        }
        // Any other error is for the test to find.
        _ => Ok(Turn { _machine: machine, _process: process }),
    }
}
