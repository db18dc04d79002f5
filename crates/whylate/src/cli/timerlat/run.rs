// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures or replays, from the first activation to the last output.

use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::{Context as _, anyhow};
use whylate_model::sources::TIMERLAT;
use whylate_sources::Session;
use whylate_sources::kernel::cpu_choice::Choice;
use whylate_sources::timerlat::idle::{self, Shallow};
use whylate_sources::timerlat::placement;

use super::figures::Figures;
use super::{Arguments, Common, Plan, live};
use crate::cli::{Origin, UsageError, record};
use crate::engine::feed::print_limitations;
use crate::engine::replay::Replay;
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::store::{Played, Recorder, about};

/// Name of the histogram of the return to user space.
const USER: &str = "user";

/// Measures until the duration is over, a threshold is hit, or Ctrl-C. Returns the exit status.
///
/// # Errors
/// Fails if the kernel or the caller's privileges do not allow it, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    let plan = arguments.plan();
    if plan.common.bpf_action.is_some() {
        let error = anyhow!("--bpf-action is not supported: run a command with --on-threshold shell,command=COMMAND");
        return Err(UsageError(error).into());
    }
    if let Origin::Recording(recording) = origin {
        record::refuse(plan.common.output.as_deref())?;
        return replay(&plan, recording.play()?);
    }
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let options = plan.options();
    let store = plan.common.output.as_deref().map(record::file).transpose()?;
    if let Some(name) = plan.common.cgroup.as_deref().filter(|name| !name.is_empty()) {
        placement::join_cgroup(name)?;
    }
    // Reads the allowed CPUs after joining the cgroup with its cpuset, and before this thread's affinity is changed.
    let session = Session::of_one();
    let choice = session.cpus(&options.cpus).context("cannot attach timerlat")?;
    // Restored on drop.
    let _surroundings = Surroundings::arrange(plan.common, &choice)?;
    let source = options.start(&session).context("cannot attach timerlat")?;
    if let Some(cgroup) = &plan.common.cgroup {
        placement::move_to_cgroup(cgroup, source.kernel_threads())?;
    }
    print_limitations(&TIMERLAT, &source, true);
    if plan.common.debug {
        let end = if source.sees_own_code() { "runs" } else { "is switched in" };
        say!("whylate: backend {}, a thread's latency ends when it {end}, {options:?}", source.backend);
    }
    let mut recorder = None;
    if let Some(store) = store {
        let explained_ns = options.explain_over_ns.or(options.explain_worst.map(|_| 0));
        let header = about::of_one(TIMERLAT.name, source.backend, explained_ns);
        recorder = Some(Recorder::start(store, header)?);
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let status = live::measure(&plan, source, watch, recorder, &mut out)?;
    out.flush()?;
    Ok(status)
}

/// Prints a recording. Thresholds do not stop a replay.
fn replay(plan: &Plan<'_>, played: Played) -> anyhow::Result<u8> {
    let common = plan.common;
    let late_from_ns = played.late_from_ns(TIMERLAT.name)?;
    if late_from_ns.is_none() && (common.why.is_some() || common.worst.is_some()) {
        say!("whylate: {} was recorded without late events of {}", played.name(), TIMERLAT.name);
    }
    let out = &mut io::BufWriter::new(io::stdout().lock());
    let figures = Figures::new(plan);
    figures.begin(out)?;
    let mut replay = Replay::of_source(played, &TIMERLAT, None, common.duration);
    let mut replayed = Replayed { common, figures, has_any: false, out };
    drive(&mut replay, &mut replayed)?;
    let status = replayed.figures.status();
    if replayed.has_any {
        replayed.figures.finish(replayed.out, false)?;
        replayed.figures.write_verdict(replayed.out, None)?;
    }
    replayed.out.flush()?;
    replay.finish().map(|()| status)
}

/// Figures of a recording so far.
struct Replayed<'a> {
    common: &'a Common,
    figures: Figures<'a>,
    /// Whether there was a tick. It is printed when the next one has come, as the last one is printed otherwise.
    has_any: bool,
    out: &'a mut dyn Write,
}

impl Sink for Replayed<'_> {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        let common = self.common;
        if self.has_any && self.figures.refreshes() {
            self.figures.refresh(self.out)?;
        }
        self.has_any = true;
        for mut snapshot in tick.into_snapshots() {
            for event in std::mem::take(&mut snapshot.late) {
                self.figures.late(self.out, event)?;
            }
            if let Some(cpus) = &common.cpus {
                snapshot.series.retain(|series| {
                    let cpu = series.labels.get("cpu").and_then(|cpu| cpu.parse().ok());
                    cpu.is_none_or(|cpu| cpus.0.contains(&cpu))
                });
            }
            self.figures.has_user |= snapshot.series.iter().any(|series| series.histograms.contains_key(USER));
            self.figures.add(snapshot);
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Settings of the machine that are changed during the measurement.
struct Surroundings {
    _latency: Option<File>,
    _idle: Option<Shallow>,
}

impl Surroundings {
    fn arrange(common: &Common, choice: &Choice) -> anyhow::Result<Self> {
        match &common.house_keeping {
            Some(cpus) => placement::keep_to(&cpus.0)?,
            // Like rtla, whylate's own threads keep off the measured CPUs.
            None => {
                // If this fails, they share the CPUs.
                let _ = choice.others.is_empty() || placement::keep_to(&choice.others).is_ok();
            }
        }
        let latency = common.dma_latency.map(idle::bound_exit_latency).transpose()?;
        let idle = common.deepest_idle_state.map(|state| Shallow::new(&choice.measured, state)).transpose()?;
        Ok(Surroundings { _latency: latency, _idle: idle })
    }
}
