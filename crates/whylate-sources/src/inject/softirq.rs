// SPDX-License-Identifier: MIT OR Apache-2.0
//! A long softirq: the callback of a `bpf_timer`, which the kernel runs in softirq context.

use std::time::Duration;

use anyhow::{Context, anyhow};
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use super::maker::{Made, Maker, Stop};
use super::threads::Urgent;
use super::{call, read_shared};
use crate::AttachError;
use crate::kernel::attach::{errno_of, kernel_has_function, open_object, require_btf, silence_libbpf};
use crate::kernel::clock::monotonic_ns;

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/inject/softirq.skel.rs"));
}

/// Delay of the timer: enough for the thread that starts it to sleep again, so that the softirq interrupts whatever
/// else the CPU does.
const LEAD_NS: u64 = 200_000;
/// Poll period for the end of a late callback.
const POLL_NS: u64 = 1_000_000;
/// Time limit of a late callback. On a CPU that is full of real-time threads softirqs may wait for long.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Softirq {
    skel: skel::SoftirqSkel<'static>,
    length_ns: u64,
    started: u64,
    /// Real-time priority: on a busy CPU a normal thread would start the timer late.
    _urgent: Urgent,
}

impl Softirq {
    /// Loads the programs and creates the timer.
    pub(super) fn new(cpu: u32, length_ns: u64) -> Result<Self, AttachError> {
        silence_libbpf();
        require_btf()?;
        if !kernel_has_function("bpf_timer_start")? {
            let lacking = "this kernel has no timers for BPF (needs bpf_timer, Linux 5.15 or later)";
            return Err(AttachError::Unsupported(lacking.to_owned()));
        }
        let mut open =
            skel::SoftirqSkelBuilder::default().open(open_object()).context("cannot open the BPF programs")?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF programs have no settings")?;
        settings.length_ns = length_ns;
        settings.cpu_to_disturb = cpu;
        settings.lead_ns = LEAD_NS;
        let mut skel = open.load().map_err(refusal)?;
        if call(&mut skel.progs.prepare_timer)? != 0 {
            return Err(anyhow!("the kernel has no memory for a timer: try again later").into());
        }
        Ok(Self { skel, length_ns, started: 0, _urgent: Urgent::new() })
    }

    fn account(&self) -> anyhow::Result<&skel::types::bss> {
        self.skel.maps.bss_data.as_deref().context("the BPF programs have no account")
    }
}

/// Maps errors: a PREEMPT_RT kernel's verifier allows no timers in such a program (process_timer_func(),
/// kernel/bpf/verifier.c).
fn refusal(error: libbpf_rs::Error) -> AttachError {
    match errno_of(&error) {
        Some(libc::EOPNOTSUPP) => {
            AttachError::Unsupported("this kernel lets no BPF program have a timer (it is PREEMPT_RT)".to_owned())
        }
        _ => error.into(),
    }
}

impl Maker for Softirq {
    fn make(&mut self, stop: Stop<'_>) -> Result<Made, AttachError> {
        let called_ns = monotonic_ns();
        if call(&mut self.skel.progs.start_timer)? != 0 {
            return Err(anyhow!("the kernel does not start the timer: try again").into());
        }
        self.started += 1;
        // A stop request ends this wait and cuts the callback short; the next loop waits for its end.
        stop.sleep_until(called_ns + LEAD_NS + self.length_ns);
        let deadline_ns = called_ns + LEAD_NS + self.length_ns + TIMEOUT.as_nanos() as u64;
        while read_shared(&self.account()?.ended) < self.started {
            if monotonic_ns() > deadline_ns {
                return Err(anyhow!("the timer is {} s late: is CPU time left there?", TIMEOUT.as_secs()).into());
            }
            std::thread::sleep(Duration::from_nanos(POLL_NS));
        }
        let made = read_shared(&self.account()?.made);
        Ok(Made { start_ns: made.start_ns, end_ns: made.end_ns, cpu: made.cpu, on_cpu_ns: None })
    }

    fn lead_ns(&self) -> u64 {
        LEAD_NS
    }

    fn cut(&self) -> Result<Option<MapHandle>, AttachError> {
        Ok(Some(MapHandle::try_from(&self.skel.maps.bss_stopping)?))
    }
}
