// SPDX-License-Identifier: MIT OR Apache-2.0
//! Preemption off, by `bpf_preempt_disable` on the calling thread.

use anyhow::Context;
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use super::disturbance::{Made, Maker, Stop};
use super::threads::Urgent;
use super::{call, read_shared};
use crate::AttachError;
use crate::attach::{kernel_has_function, open_object, require_btf, silence_libbpf};

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/preempt_off.skel.rs"));
}

pub(super) struct PreemptOff {
    skel: skel::PreemptOffSkel<'static>,
    /// On a busy CPU a normal thread would begin late.
    _urgent: Urgent,
}

impl PreemptOff {
    /// Loads the program.
    pub(super) fn new(cpu: u32, length_ns: u64) -> Result<Self, AttachError> {
        silence_libbpf();
        require_btf()?;
        if !kernel_has_function("bpf_preempt_disable")? {
            let lacking =
                "this kernel cannot turn preemption off for BPF (needs bpf_preempt_disable, Linux 6.10 or later)";
            return Err(AttachError::Unsupported(lacking.to_owned()));
        }
        let mut open =
            skel::PreemptOffSkelBuilder::default().open(open_object()).context("cannot open the BPF program")?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF program has no settings")?;
        settings.length_ns = length_ns;
        settings.cpu_to_disturb = cpu;
        Ok(Self { skel: open.load()?, _urgent: Urgent::new() })
    }
}

impl Maker for PreemptOff {
    fn make(&mut self, _stop: Stop<'_>) -> Result<Made, AttachError> {
        call(&mut self.skel.progs.keep_preemption_off)?;
        let shared = self.skel.maps.bss_data.as_deref().context("the BPF program has no account")?;
        let made = read_shared(&shared.made);
        Ok(Made { start_ns: made.start_ns, end_ns: made.end_ns, cpu: made.cpu, on_cpu_ns: None })
    }

    fn cut(&self) -> Result<Option<MapHandle>, AttachError> {
        Ok(Some(MapHandle::try_from(&self.skel.maps.bss_stopping)?))
    }
}
