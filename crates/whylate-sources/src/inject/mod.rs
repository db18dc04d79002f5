// SPDX-License-Identifier: MIT OR Apache-2.0
//! Known delays on demand: the ground truth that sources are tested against.

pub mod disturbance;
pub mod file_load;
mod hog;
mod limit;
mod loop_device;
mod maker;
mod off;
pub mod requests;
mod reserve;
mod softirq;
pub mod sqpoll;
pub(crate) mod threads;
pub mod work;

use libbpf_rs::{ProgramInput, ProgramMut};

use crate::AttachError;
use crate::kernel::clock::unix_ns_of;

/// A timestamp on both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamp {
    /// `CLOCK_MONOTONIC`, the clock of BPF and of the `mono` trace clock.
    pub monotonic_ns: u64,
    /// Wall clock, since 1970.
    pub unix_ns: u64,
}

impl Timestamp {
    fn at(monotonic_ns: u64) -> Self {
        Self { monotonic_ns, unix_ns: unix_ns_of(monotonic_ns) }
    }
}

/// Runs a `SEC("syscall")` program on the calling thread. Returns its return value.
fn call(program: &mut ProgramMut<'_>) -> Result<u32, AttachError> {
    Ok(program.test_run(ProgramInput::default())?.return_value)
}

/// Copies memory that BPF programs may be changing. Each integer is consistent; together they may not be.
#[allow(unsafe_code)]
fn read_shared<T: Copy>(shared: &T) -> T {
    // SAFETY: a reference is valid for reads. The skeletons' types are made of integers, which have no invalid values.
    unsafe { std::ptr::read_volatile(shared) }
}
