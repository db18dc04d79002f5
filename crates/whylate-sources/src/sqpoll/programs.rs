// SPDX-License-Identifier: MIT OR Apache-2.0
//! The BPF programs, and the three ways in which they distinguish work from spinning.

use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Btf, Link, btf};

use super::samples::Samples;
use super::skel::types::{bss, sq_lost};
use super::skel::{OpenSqpollSkel, SqpollSkel, SqpollSkelBuilder};
use super::{SqpollOptions, never_sleeps};
use crate::cpu_account::{Account, Step, StepGuard, Timers, Wakeups};
use crate::kernel::attach::{self, ProgramStatistics};
use crate::kernel::cgroups;
use crate::kernel::cpus;
use crate::kernel::mapped::MappedArray;
use crate::kernel::pid_namespace;
use crate::kernel::records::Records;
use crate::kernel::symbols::code_of;
use crate::source::AttachError;
use crate::source::session::Session;

/// Function that submits requests.
const SUBMIT: &str = "io_submit_sqes";
/// Functions that run completions: from 6.9 on, and before.
const COMPLETIONS: [&str; 2] = ["io_handle_tw_list", "tctx_task_work"];
/// Function that polls a device.
const POLL: &str = "io_do_iopoll";
/// Function in which rounds end since 6.9.
const ROUND: &str = "tctx_task_work_run";

/// Way in which work is distinguished from spinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Tracepoints at the end of each round and at each request (6.9).
    Rounds,
    /// Entry and exit of the functions that do work.
    Functions,
    /// Samples of the threads' stacks.
    Samples,
}

/// Attached programs; they run until dropped.
pub(super) struct Programs {
    _links: Vec<Link>,
    /// Programs that the account calls.
    _called: Vec<StepGuard>,
    /// The iterator over all threads.
    pub threads: Link,
    /// Records of waits; present if causes are requested.
    records: Option<Records>,
    pub account: Option<Account>,
    pub lost: MappedArray,
    pub way: Way,
    samples: Option<Samples>,
    pub skeleton: SqpollSkel<'static>,
}

impl Programs {
    pub(super) fn attach(options: &SqpollOptions, session: &Session) -> Result<Self, AttachError> {
        let kernel = Btf::from_vmlinux()?;
        if options.precise {
            let reason = match never_sleeps::find() {
                // Attaching would never end, and could not be interrupted, if one of those spun without sleeping.
                _ if pid_namespace::own().is_some() => {
                    "the kernel waits for every submission thread before it attaches them, and threads outside this PID namespace are not visible".to_owned()
                }
                Some(tid) => format!(
                    "submission thread {tid} spins without sleeping, and the kernel waits for it before it attaches them"
                ),
                None => match Self::attach_way(options, session, Way::Functions, &kernel) {
                    Err(AttachError::Unsupported(reason)) => reason,
                    attached => return attached,
                },
            };
            return Err(AttachError::Unsupported(format!(
                "--precise needs programs at the entry and exit of the kernel's functions: {reason}; leave it out"
            )));
        }
        let has_rounds = has_function(&kernel, ROUND) && has_tracepoint(&kernel, "io_uring_submit_req");
        let way = if has_rounds && !options.sampled { Way::Rounds } else { Way::Samples };
        Self::attach_way(options, session, way, &kernel)
    }

    fn attach_way(options: &SqpollOptions, session: &Session, way: Way, kernel: &Btf<'_>) -> Result<Self, AttachError> {
        let mut account = options
            .explain_over_ns
            .map(|_| Account::load(session.account(), Timers::Heartbeats, Wakeups::OfWorkers))
            .transpose()?;
        let mut open = SqpollSkelBuilder::default().open(attach::open_object())?;
        let settings = open.maps.rodata_data.as_mut().context("the BPF object has no settings")?;
        settings.explain_over_ns = options.explain_over_ns.unwrap_or(0);
        settings.own_namespace = pid_namespace::as_setting();
        settings.has_cgroups_of_v1 = cgroups::are_of_v1();
        settings.is_called_by_account = account.is_some();
        if way == Way::Samples {
            settings.by_samples = true;
            for (which, code) in code_of_work(kernel)?.into_iter().enumerate() {
                (settings.work_begins_at[which], settings.work_ends_at[which]) = (code.start, code.end);
            }
        }
        select_programs(&mut open, way, kernel)?;
        if let Some(account) = &account {
            account.share_with(open.open_object_mut())?;
            open.maps.runnable_waits.set_max_entries(account.late_bytes())?;
        } else {
            open.maps.account_by_cpu.set_max_entries(cpus::highest_possible().context("cannot list the CPUs")? + 1)?;
        }
        let skeleton = attach::load(open)?;
        if let Some(account) = &mut account {
            account.watch_unexplained(skeleton.maps.bss.as_fd(), offset_of!(bss, unexplained_events))?;
        }
        let lost = MappedArray::inside(
            skeleton.maps.bss.as_fd(),
            offset_of!(bss, lost_by_reason),
            sq_lost::SQ_LOST_REASONS.0 as usize,
            size_of::<u64>(),
        )
        .context("cannot map the counts of lost events")?;
        let records = options.explain_over_ns.map(|_| Records::new(&skeleton.maps.runnable_waits)).transpose()?;
        let (mut links, mut called) = (Vec::new(), Vec::new());
        let mut marks: Vec<_> = skeleton
            .object()
            .progs_mut()
            .filter(|program| {
                let section = program.section().to_string_lossy();
                program.autoload() && !section.starts_with("iter/") && !section.ends_with("perf_event")
            })
            .collect();
        // Exit programs first, so that no work is seen that does not end.
        marks.sort_by_key(|program| !program.name().to_string_lossy().ends_with("_exit"));
        for program in marks {
            match (step_of(&program), &account) {
                (Some(step), Some(account)) => called.push(account.call(step, &program)?),
                _ => links.push(program.attach()?),
            }
        }
        account.iter_mut().try_for_each(Account::attach)?;
        let threads = skeleton.progs.look_at_threads.attach()?;
        let samples = match way {
            Way::Samples => Some(Samples::start(&skeleton, session.cpus(&[])?)?),
            _ => None,
        };
        Ok(Programs { _links: links, _called: called, threads, records, account, lost, way, samples, skeleton })
    }

    /// Polls for late events, for at most `wait` until the first one.
    pub(super) fn poll(&self, wait: std::time::Duration) -> anyhow::Result<()> {
        self.records.as_ref().map_or(Ok(()), |records| records.poll(wait))
    }

    pub(super) fn take_record(&self) -> Option<Box<[u8]>> {
        self.records.as_ref()?.next()
    }

    /// Returns the number of threads that could not be sampled since the last call.
    pub(super) fn unsampled(&self) -> u64 {
        self.samples.as_ref().map_or(0, Samples::take_failed)
    }

    pub(super) fn statistics(&self) -> ProgramStatistics {
        let mut statistics = attach::statistics(self.skeleton.object().progs().filter(attach::is_open));
        self.account.iter().for_each(|account| statistics += account.statistics());
        statistics
    }
}

/// Returns the step at which the account calls the program, if there is an account.
fn step_of(program: &libbpf_rs::ProgramMut<'_>) -> Option<Step> {
    match program.name().to_str()? {
        "on_sched_switch" => Some(Step::SqpollSwitch),
        "on_sched_waking" => Some(Step::SqpollWaking),
        _ => None,
    }
}

/// Selects the programs of one way, as far as the kernel has their attach points.
fn select_programs(open: &mut OpenSqpollSkel<'_>, way: Way, kernel: &Btf<'_>) -> Result<(), AttachError> {
    let programs = &mut open.progs;
    let newer = has_tracepoint(kernel, "io_uring_submit_req");
    programs.on_io_uring_submit_req.set_autoload(way != Way::Functions && newer);
    programs.on_io_uring_submit_sqe.set_autoload(way == Way::Samples && !newer);
    programs.on_io_uring_task_work_run.set_autoload(way == Way::Rounds);
    programs.on_sample.set_autoload(way == Way::Samples);
    if way != Way::Functions {
        return Ok(());
    }
    if !has_function(kernel, SUBMIT) {
        return Err(AttachError::Unsupported(format!("this kernel has no function {SUBMIT}")));
    }
    let [newer, older] = COMPLETIONS.map(|function| has_function(kernel, function));
    let polls = has_function(kernel, POLL);
    programs.on_io_submit_sqes.set_autoload(true);
    programs.on_io_submit_sqes_exit.set_autoload(true);
    programs.on_io_do_iopoll.set_autoload(polls);
    programs.on_io_do_iopoll_exit.set_autoload(polls);
    programs.on_io_handle_tw_list.set_autoload(newer);
    programs.on_io_handle_tw_list_exit.set_autoload(newer);
    programs.on_tctx_task_work.set_autoload(older && !newer);
    programs.on_tctx_task_work_exit.set_autoload(older && !newer);
    Ok(())
}

/// Returns the address ranges of the functions that do work.
fn code_of_work(kernel: &Btf<'_>) -> Result<Vec<Range<u64>>, AttachError> {
    let completions = COMPLETIONS.into_iter().find(|function| has_function(kernel, function));
    let functions = [Some(SUBMIT), completions, Some(POLL).filter(|function| has_function(kernel, function))];
    let code = code_of(functions.map(Option::unwrap_or_default));
    let hidden = functions.iter().zip(&code).find_map(|(function, code)| function.filter(|_| code.is_none()));
    match hidden {
        Some(function) => Err(AttachError::Unsupported(format!(
            "before Linux 6.9, measuring work needs the address of {function}, which /proc/kallsyms does not show"
        ))),
        None => Ok(code.into_iter().flatten().collect()),
    }
}

fn has_function(kernel: &Btf<'_>, name: &str) -> bool {
    kernel.type_by_name::<btf::types::Func<'_>>(name).is_some()
}

fn has_tracepoint(kernel: &Btf<'_>, name: &str) -> bool {
    kernel.type_by_name::<btf::types::Typedef<'_>>(&format!("btf_trace_{name}")).is_some()
}
