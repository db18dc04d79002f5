// SPDX-License-Identifier: MIT OR Apache-2.0
//! The BPF programs: when timers expired and threads ran, and what occupied the CPU until then.

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::Context as _;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};

use super::TimerlatOptions;
use super::activation::Activation;
use super::ran::Ran;
use super::skel::types::{activation, bss};
use super::skel::{TimerlatSkel, TimerlatSkelBuilder};
use crate::cpu_account::{Account, Step, StepGuard, TRACER_FUNCTION, Timers, WAKEUP_FUNCTION, Wakeups};
use crate::kernel::attach::{self, ProgramStatistics};
use crate::kernel::cpus;
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::kernel::symbols::address_of;
use crate::source::AttachError;
use crate::source::session::Session;

/// The attached programs, detached on drop.
pub(super) struct Programs {
    _links: Vec<Link>,
    _called: Option<StepGuard>,
    /// Timestamps where the thread runs; without it, thread latency ends at the switch-in.
    ran: Option<Ran>,
    /// Late events, if causes are wanted.
    records: Option<Records>,
    pub account: Option<Account>,
    pub map: Arc<MappedArray>,
    skeleton: TimerlatSkel<'static>,
}

impl Programs {
    /// Attaches for threads of the kernel's tracer, or of this process.
    pub(super) fn attach(options: &TimerlatOptions, session: &Session, of_tracer: bool) -> Result<Self, AttachError> {
        let timers = if of_tracer { Timers::TracersToo } else { Timers::OwnThreadsToo };
        let mut account =
            options.explains().then(|| Account::load(session.account(), timers, Wakeups::OfWorkers)).transpose()?;
        let mut open = TimerlatSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.own_namespace = pid_namespace::as_setting();
        settings.of_tracer = of_tracer;
        settings.timer_function = match of_tracer {
            true => address_of(TRACER_FUNCTION).context("cannot distinguish the tracer's timers from others")?,
            // Without it, timers are matched by expiry only.
            false => address_of(WAKEUP_FUNCTION).unwrap_or(0),
        };
        settings.with_events = options.explains();
        settings.with_stacks = options.stacks;
        settings.is_called_by_account = account.is_some();
        let entries = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        open.maps.activation_by_cpu.set_max_entries(entries)?;
        if let Some(account) = &account {
            account.share_with(open.open_object_mut())?;
            open.maps.late_activations.set_max_entries(account.late_bytes())?;
        }
        let skeleton = attach::load(open)?;
        if let Some(account) = &mut account {
            account.watch_unexplained(skeleton.maps.bss.as_fd(), offset_of!(bss, unexplained_events))?;
        }
        let map = MappedArray::new(skeleton.maps.activation_by_cpu.as_fd(), entries as usize, size_of::<activation>())
            .context("cannot map the activations")?;
        let records = options.explains().then(|| Records::new(&skeleton.maps.late_activations)).transpose()?;
        // Causes cover the time until the switch-in, so the latency ends there too.
        let sees_ran = !of_tracer && !options.explains();
        let ran = sees_ran.then(|| Ran::attach(skeleton.maps.activation_by_cpu.as_fd(), entries)).transpose();
        let mut links = vec![skeleton.progs.on_hrtimer_expire_entry.attach()?];
        let mut called = None;
        if let Some(account) = &mut account {
            called = Some(account.call(Step::TimerlatSwitch, &skeleton.progs.on_sched_switch)?);
            account.attach()?;
        } else {
            links.push(skeleton.progs.on_sched_switch.attach()?);
        }
        // If fexit is refused, latencies lack at most a microsecond.
        let ran = ran.unwrap_or_default();
        Ok(Programs { _links: links, _called: called, ran, records, account, map: Arc::new(map), skeleton })
    }

    pub(super) fn activation(&self, cpu: u32) -> Activation<'_> {
        Activation::on_cpu(&self.map, cpu)
    }

    /// Reads late events, and waits at most `wait` for the first one.
    pub(super) fn poll(&self, wait: std::time::Duration) -> anyhow::Result<()> {
        self.records.as_ref().map_or(Ok(()), |records| records.poll(wait))
    }

    pub(super) fn take_record(&self) -> Option<Box<[u8]>> {
        self.records.as_ref()?.next()
    }

    /// Returns whether thread latency ends when the thread runs, not already at the switch-in.
    pub(super) fn sees_ran(&self) -> bool {
        self.ran.is_some()
    }

    pub(super) fn statistics(&self) -> ProgramStatistics {
        let mut statistics = attach::statistics(self.skeleton.object().progs().filter(attach::is_open));
        statistics += attach::statistics(self.ran.iter().map(Ran::program));
        self.account.iter().for_each(|account| statistics += account.statistics());
        statistics
    }
}
