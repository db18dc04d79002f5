// SPDX-License-Identifier: MIT OR Apache-2.0
//! All contact with the kernel: BPF programs, tracefs, `/proc`. All `unsafe` code of whylate is in this crate.
//!
//! Sources yield plain data of `whylate-model` and never print.

pub mod block;
pub mod capabilities;

mod cpu_account;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod inject;
pub mod irqsoff;
pub mod kernel;
#[cfg(test)]
mod lost_reasons;
mod objects;
pub mod offcpu;
pub mod own_cost;
pub mod paths;
mod runnable;
pub mod source;
pub mod sqpoll;
#[cfg(test)]
mod thread_names;
pub mod timerlat;
pub mod wq;

pub use cpu_account::{Edges, History, Stream};
pub use source::session::Session;
pub use source::{
    AttachError, Attached, BackendInfo, BackendUse, CommonOptions, MapKind, Measuring, Need, Source, SourceInfo,
    Threads,
};

use whylate_model::sources::CARDS;

use block::BlockOptions;
use capabilities::{Capabilities, SourceBackends};
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

/// Probes the features of this kernel, and which backend each source would use, in the order of their cards.
pub fn probe() -> Capabilities {
    let mut all = sources();
    all.sort_by_key(|source| CARDS.iter().position(|card| card.name == source.info().card.name));
    let backends =
        all.map(|source| SourceBackends { name: source.info().card.name, backends: source.automatic_backends() });
    capabilities::probe(&backends)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use whylate_model::sources::{IRQSOFF, TIMERLAT};

    use super::*;

    #[test]
    fn each_card_has_a_source_and_timers_come_first_and_last() {
        let names = sources().map(|source| source.info().card.name);
        assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), CARDS.iter().map(|card| card.name).collect());
        assert_eq!((names.first(), names.last()), (Some(&IRQSOFF.name), Some(&TIMERLAT.name)));
    }

    #[test]
    fn probes_each_source_in_order_of_cards() {
        let names: Vec<String> = probe().sources.into_iter().map(|source| source.name).collect();
        assert_eq!(names, CARDS.map(|card| card.name));
    }
}
