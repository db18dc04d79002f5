// SPDX-License-Identifier: MIT OR Apache-2.0
//! Disables interrupts or preemption by `bpf_local_irq_save` or `bpf_preempt_disable` on the calling thread.

use anyhow::Context;
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use super::maker::{Made, Maker, Stop};
use super::threads::Urgent;
use super::{call, read_shared};
use crate::AttachError;
use crate::kernel::attach::{kernel_has_function, open_object, require_btf, silence_libbpf};

#[allow(clippy::all, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs, unsafe_code, dead_code)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/inject/off.skel.rs"));
}

/// Interrupts or preemption.
#[derive(Clone, Copy)]
pub(super) enum What {
    Interrupts,
    Preemption,
}

pub(super) struct Off {
    skel: skel::OffSkel<'static>,
    what: What,
    /// Real-time priority: on a busy CPU a normal thread would start late.
    _urgent: Urgent,
}

impl Off {
    /// Loads the program.
    pub(super) fn new(what: What, cpu: u32, length_ns: u64) -> Result<Self, AttachError> {
        silence_libbpf();
        require_btf()?;
        let (name, needs, version) = match what {
            What::Interrupts => ("interrupts", "bpf_local_irq_save", "6.14"),
            What::Preemption => ("preemption", "bpf_preempt_disable", "6.10"),
        };
        if !kernel_has_function(needs)? {
            return Err(AttachError::Unsupported(format!(
                "this kernel cannot turn {name} off for BPF (needs {needs}, Linux {version} or later)"
            )));
        }
        let mut open = skel::OffSkelBuilder::default().open(open_object()).context("cannot open the BPF program")?;
        let settings = open.maps.rodata_data.as_deref_mut().context("the BPF program has no settings")?;
        settings.length_ns = length_ns;
        settings.cpu_to_disturb = cpu;
        let programs = &mut open.progs;
        match what {
            What::Interrupts => programs.keep_interrupts_off.set_autoload(true),
            What::Preemption => programs.keep_preemption_off.set_autoload(true),
        }
        Ok(Self { skel: open.load()?, what, _urgent: Urgent::new() })
    }
}

impl Maker for Off {
    fn make(&mut self, _stop: Stop<'_>) -> Result<Made, AttachError> {
        let programs = &mut self.skel.progs;
        call(match self.what {
            What::Interrupts => &mut programs.keep_interrupts_off,
            What::Preemption => &mut programs.keep_preemption_off,
        })?;
        let shared = self.skel.maps.bss_data.as_deref().context("the BPF program has no account")?;
        let made = read_shared(&shared.made);
        Ok(Made { start_ns: made.start_ns, end_ns: made.end_ns, cpu: made.cpu, on_cpu_ns: None })
    }

    fn cut(&self) -> Result<Option<MapHandle>, AttachError> {
        Ok(Some(MapHandle::try_from(&self.skel.maps.bss_stopping)?))
    }
}
