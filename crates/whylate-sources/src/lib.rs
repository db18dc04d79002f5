// SPDX-License-Identifier: MIT OR Apache-2.0
//! All contact with the kernel: BPF programs, tracefs, `/proc`. All `unsafe` code of whylate is in this crate.
//!
//! Sources yield plain data of `whylate-model` and never print.

pub mod attach;
pub mod block;
pub mod capabilities;

pub mod cgroups;
pub mod clock;
pub mod cpus;
pub mod credentials;
mod demangle;
mod distribution;
mod elements;
mod first_thread;
mod floors;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod heartbeat;
pub mod inject;
pub mod irqsoff;
mod loaded_code;
mod lock;
#[cfg(test)]
mod lost_reasons;
pub mod mapped;
pub mod memory;
mod occupancy;
pub mod offcpu;
pub mod paths;
mod percpu;
mod perf_event;
pub mod pid_namespace;
mod priority;
pub mod realtime;
mod records;
pub mod restore;
mod runnable;
mod session;
pub mod source;
pub mod sqpoll;
pub mod symbols;
mod syscalls;
pub mod timerlat;
pub mod tracefs;
mod whole_map;
pub mod wq;

pub use occupancy::{Edges, History, Stream};
pub use session::Session;
pub use source::{
    Asked, AttachError, Attached, BackendInfo, MapKind, Measuring, Need, Source, SourceInfo, Takes, Threads,
};

use block::BlockOptions;
use irqsoff::IrqsoffOptions;
use offcpu::OffcpuOptions;
use sqpoll::SqpollOptions;
use timerlat::TimerlatOptions;
use wq::WqOptions;

/// Returns every source as the overview uses it, in attach order. The first has heartbeat timers on each CPU, which the
/// shared account uses. Measured threads come last, after the disturbance of attaching.
pub fn sources() -> [Box<dyn Source>; 6] {
    let backend = |name: &str| Some(name.to_owned());
    [
        Box::new(IrqsoffOptions::default()),
        Box::new(WqOptions { phases: true, ..WqOptions::default() }),
        Box::new(OffcpuOptions { backend: backend(offcpu::SAMPLE), ..OffcpuOptions::default() }),
        Box::new(SqpollOptions::default()),
        Box::new(BlockOptions::default()),
        // The kernel's tracer is a single one, which may be in use; programs measure the same.
        Box::new(TimerlatOptions { backend: backend(timerlat::BPF), is_frugal: true, ..TimerlatOptions::default() }),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use whylate_model::sources::{CARDS, IRQSOFF, TIMERLAT};

    use super::*;

    #[test]
    fn each_card_has_a_source_and_timers_come_first_and_last() {
        let names = sources().map(|source| source.info().card.name);
        assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), CARDS.iter().map(|card| card.name).collect());
        assert_eq!((names.first(), names.last()), (Some(&IRQSOFF.name), Some(&TIMERLAT.name)));
    }
}
