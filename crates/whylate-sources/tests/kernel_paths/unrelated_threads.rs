// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes to the disk beside unrelated threads on the CPUs that take its interrupts.

use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::Result;
use rustix::process::setpriority_process;
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{cpus, report_round, rounds, tid};
use crate::support::machine::cpus::pin_to;

pub const NAME: &str = "innocent";
/// Writes per wait of the other kinds.
const WRITES: usize = 34;

pub fn play() -> Result<()> {
    let (one, other) = cpus()?;
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
    let ended = AtomicBool::new(false);
    let over = &ended;
    thread::scope(|scope| {
        for cpu in [one, other] {
            let spin = move || -> Result<()> {
                pin_to(cpu)?;
                // On Linux this affects only the calling thread, which gives way.
                setpriority_process(None, 19)?;
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                Ok(())
            };
            thread::Builder::new().name(NAME.to_owned()).spawn_scoped(scope, spin)?;
        }
        let write = || -> Result<()> {
            for number in 0..rounds() * WRITES {
                file.write_all_at(&[number as u8; 4096], 0)?;
                let began_ns = monotonic_ns();
                file.sync_data()?;
                report_round("innocent", tid(), began_ns, monotonic_ns(), &[]);
            }
            Ok(())
        };
        let written = thread::Builder::new().name("client".to_owned()).spawn_scoped(scope, write)?;
        let outcome = written.join().expect("writing does not panic");
        over.store(true, Ordering::Relaxed);
        outcome
    })
}
