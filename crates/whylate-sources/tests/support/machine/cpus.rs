// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPUs of a test: one for the measuring thread, and one that is disturbed.

use std::sync::OnceLock;

use anyhow::Result;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPU of the tool and the observers, and the disturbed one.
#[derive(Clone, Copy)]
pub struct TestCpus {
    pub tool: u32,
    pub disturbed: u32,
}

impl TestCpus {
    /// Returns `None`, and prints why, on a machine with a single CPU.
    pub fn find() -> Option<TestCpus> {
        // Read once, as the measuring thread is pinned from then on and the test may run again.
        static USABLE: OnceLock<CpuSet> = OnceLock::new();
        let usable = USABLE.get_or_init(|| sched_getaffinity(None).expect("the affinity is readable"));
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(|cpu| cpu as u32);
        match (cpus.next(), cpus.next_back()) {
            (Some(tool), Some(disturbed)) => Some(TestCpus { tool, disturbed }),
            _ => {
                println!("skipped: this needs two CPUs");
                None
            }
        }
    }
}

pub fn pin_to(cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}
