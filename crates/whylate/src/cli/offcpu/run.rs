// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures or replays, from the first sample to the output.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use whylate_model::snapshot::RecordedFrom;
use whylate_model::sources::OFFCPU;
use whylate_model::{Card, LateEvent, Merger, Snapshot, Stack};
use whylate_sources::offcpu::{Choice, Often, RATES_HZ, TRACE};

use super::{Arguments, Sub, diff};
use crate::cli::import::stacks;
use crate::cli::runner::announce;
use crate::cli::{FAILURE, Origin, SUCCESS, UsageError, record};
use crate::engine::feed::Feed;
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::replay::Replay;
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::files;
use crate::render::extension::{Extension, chosen, report_written};
use crate::render::json::JsonLines;
use crate::render::text::fit::{Fit, terminal_columns};
use crate::render::text::offcpu::chains::Chains;
use crate::render::text::offcpu::file::{self, Form};
use crate::render::text::offcpu::{blocked, flat, threads, tree, value};
use crate::render::text::waits::Waits;
use crate::render::text::{Output as _, footer, text_of};
use crate::store::late_buffer::LateBuffer;
use crate::store::play::Recording;
use crate::store::{Recorder, about};

fn what_is_done(arguments: &Arguments, backend: &str) -> String {
    match arguments.budget {
        _ if backend == TRACE => "Tracing every context switch".to_owned(),
        Some(ppm) => format!(
            "Sampling where threads wait, as often as {}% of a CPU allows, and at least once a second",
            f64::from(ppm) / 1e4
        ),
        None => format!("Sampling where threads wait, {} times a second", arguments.frequency),
    }
}

/// Prints a note if even the lowest sampling rate exceeded the budget, as there are too many threads.
fn warn_if_over_budget(snapshot: &Snapshot, ppm: u32) {
    let walk_ns = value(snapshot, "walk_cpu_ns");
    let lowest = walk_ns * f64::from(*RATES_HZ.start());
    if lowest > f64::from(ppm) * 1e3 {
        say!(
            "whylate: sampling {} threads once a second took {:.3}% of a CPU, more than the budget of {}%",
            value(snapshot, "threads"),
            lowest / 1e7,
            f64::from(ppm) / 1e4
        );
    }
}

/// Sums of late events for the output.
struct Gathering {
    waits: Option<Waits>,
    chains: Option<Chains>,
    only_worst: bool,
    /// Whether anything was late so far.
    is_late: bool,
}

impl Gathering {
    fn new(arguments: &Arguments, draws_chains: bool) -> Self {
        let over_ns = arguments.explain().why;
        Gathering {
            waits: over_ns.map(|over_ns| Waits::new(over_ns, arguments.rank.into())),
            chains: over_ns.filter(|_| draws_chains).map(|over_ns| Chains::new(over_ns, arguments.root())),
            only_worst: arguments.explain.worst.is_some(),
            is_late: false,
        }
    }

    fn add(&mut self, event: &LateEvent) {
        if let Some(waits) = &mut self.waits {
            waits.add(event);
        }
        if let Some(chains) = &mut self.chains {
            chains.count(event);
            // The worst waits are known at the end.
            if !self.only_worst {
                chains.add(event);
            }
        }
    }
}

/// Samples until interrupted or the duration is over, or reads a recording; prints or writes the result. Returns the exit
/// status.
///
/// # Errors
/// Fails if the source cannot attach, the recording cannot be read, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    if let Some(Sub::Import(arguments)) = &arguments.command {
        return stacks::run(arguments).map(|()| SUCCESS);
    }
    if let Some([before, after]) = arguments.diff.as_deref() {
        return diff::run(before, after, arguments.output.as_deref()).map(|()| SUCCESS);
    }
    let explain = arguments.explain();
    arguments.rank.needs(explain.thresholds(None))?;
    let record_to = arguments.output.as_deref().filter(|path| record::is_recording(path));
    let forms = if explain.why.is_some() { &file::EXPLAINED[..] } else { &file::FORMS };
    let forms: Vec<(Extension, Option<Form>)> = forms.iter().map(|&(of, form)| (of, Some(form))).collect();
    let forms = [&forms[..], &[(Extension::Recording, None)]].concat();
    let form = match arguments.output.as_deref() {
        Some(path) => chosen(path, &forms)?.map(|form| (path, form)),
        None => None,
    };
    let draws_chains = explain.why.is_some() && matches!(form, Some((_, Form::Svg | Form::Folded)));
    if draws_chains && (arguments.wakers || arguments.lines) {
        let what = "--wakers and --lines have no effect on chains of explained waits: drop them, or drop --why";
        return Err(UsageError(anyhow::anyhow!(what)).into());
    }
    let mut gathering = Gathering::new(arguments, draws_chains);
    let snapshot = match origin {
        Origin::Recording(recording) => {
            record::refuse(record_to)?;
            Some(recorded(arguments, recording, &mut gathering)?)
        }
        Origin::Live => live(arguments, &mut gathering, record_to, form.is_some())?,
    };
    let Some(snapshot) = snapshot else { return Ok(SUCCESS) };
    let is_late = gathering.is_late || arguments.explain.judges_late_snapshot(&OFFCPU, &snapshot);
    let has_none = snapshot.stacks.is_empty() && snapshot.late.is_empty();
    show(arguments, snapshot, gathering, form)?;
    if has_none && arguments.blocked.is_none() {
        say!("whylate: no matching thread was off its CPU (see names and cgroups with ps -eo pid,comm,cgroup)");
        return Ok(FAILURE);
    }
    Ok(arguments.explain.status(is_late))
}

/// Measures this machine. Returns `None` if the output is closed and no file is written.
fn live(
    arguments: &Arguments,
    gathering: &mut Gathering,
    record_to: Option<&Path>,
    has_file: bool,
) -> anyhow::Result<Option<Snapshot>> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let mut options = arguments.options()?;
    if arguments.wakers {
        if matches!(options.backend.as_deref(), None | Some("auto")) {
            say!("whylate: offcpu uses the {TRACE} backend, because only a traced wakeup shows the waker");
        }
    } else if options.backend.as_deref() == Some("auto") {
        let often = options.budget_ppm.map_or(Often::RateHz(options.rate_hz), Often::BudgetPpm);
        let choice = Choice::look(often).context("cannot find out which backend is cheaper")?;
        say!("whylate: offcpu uses {choice}");
        options.backend = (choice.backend() == TRACE).then(|| TRACE.to_owned());
    }
    let store = record_to.map(record::file).transpose()?;
    let feed = Feed::attach(&options, arguments.verbosity.verbose)?;
    let (backend, notes) = (feed.source.backend, feed.precision_notes());
    let header = about::of_one(OFFCPU.name, backend, arguments.explain().why);
    let recorder = store.map(|store| Recorder::start(store, header)).transpose()?;
    if arguments.blocked.is_none() && !arguments.json {
        announce(&what_is_done(arguments, backend), arguments.duration().is_some());
    }
    // Which threads are blocked now takes no time to measure.
    let duration_ns = arguments.blocked.map_or(arguments.duration(), |_| Some(0));
    let pace = Pace {
        duration: duration_ns.map(Duration::from_nanos),
        poll: arguments.explain().why.map(|_| NOW_AND_THEN),
        outlives_output: has_file || recorder.is_some() || arguments.blocked.is_some(),
        ..Pace::default()
    };
    let mut live = Live::of_one(feed, watch, pace);
    live.record(recorder);
    let mut sums = Sums { is_live: true, ..Sums::new(arguments, gathering) };
    drive(&mut live, &mut sums)?;
    live.finish()?;
    let snapshot = sums.finish().map(|snapshot| Snapshot { notes, ..snapshot });
    if let (Some(snapshot), Some(ppm)) = (&snapshot, arguments.budget.filter(|_| backend != TRACE)) {
        warn_if_over_budget(snapshot, ppm);
    }
    Ok(snapshot)
}

/// Merges the snapshots of a recording.
fn recorded(arguments: &Arguments, recording: &Recording, gathering: &mut Gathering) -> anyhow::Result<Snapshot> {
    let played = recording.play()?;
    let recorded_ns = played.late_from_ns(OFFCPU.name)?;
    if recorded_ns.is_none() && arguments.explain().why.is_some() {
        say!("whylate: {} was recorded without late events of {}", played.name(), OFFCPU.name);
    }
    let mut replay = Replay::of_source(played, &OFFCPU, None, arguments.duration());
    let mut sums = Sums::new(arguments, gathering);
    drive(&mut replay, &mut sums)?;
    replay.finish()?;
    let mut snapshot = sums.finish().context("nothing was measured")?;
    if let (Some(recorded_ns), Some(asked_ns)) = (recorded_ns, arguments.explain().why) {
        OFFCPU.limit_unexplained(&mut snapshot, RecordedFrom { recorded_ns, asked_ns });
    }
    Ok(snapshot)
}

/// Snapshots so far, merged into one.
struct Sums<'a> {
    arguments: &'a Arguments,
    gathering: &'a mut Gathering,
    merger: Merger,
    kept: LateBuffer,
    /// Whether the source has filtered by its options what comes.
    is_live: bool,
}

impl<'a> Sums<'a> {
    fn new(arguments: &'a Arguments, gathering: &'a mut Gathering) -> Self {
        let kept = LateBuffer::new(arguments.keep());
        Sums { arguments, gathering, merger: Merger::default(), kept, is_live: false }
    }

    /// Returns the merged snapshot with the late events that are kept. `None` if there was no snapshot.
    fn finish(mut self) -> Option<Snapshot> {
        let mut snapshot = self.merger.take()?;
        self.kept.move_into(&mut snapshot);
        Some(snapshot)
    }
}

impl Sink for Sums<'_> {
    fn late(&mut self, _card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        let is_asked = self.arguments.explain().why.is_some_and(|over_ns| event.latency_ns >= over_ns);
        if self.is_live || is_asked && self.arguments.is_of(&event.labels) {
            self.gathering.is_late |= self.arguments.explain.judges_late(&OFFCPU, &event);
            self.gathering.add(&event);
            self.kept.add(event);
        }
        Ok(None)
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        tick.report_problems();
        let Sums { arguments, is_live, .. } = *self;
        for mut snapshot in tick.into_snapshots() {
            let is_asked = |stack: &Stack| arguments.is_of(&stack.labels) && arguments.is_in_state(stack);
            snapshot.stacks.retain(|stack| is_live || is_asked(stack));
            self.merger.add(snapshot);
        }
        Ok(ControlFlow::Continue(()))
    }
}

fn show(
    arguments: &Arguments,
    mut snapshot: Snapshot,
    gathering: Gathering,
    form: Option<(&Path, Form)>,
) -> anyhow::Result<()> {
    let Gathering { mut waits, mut chains, .. } = gathering;
    if let Some((path, form)) = form {
        let cannot = || format!("cannot write {}", path.display());
        let written = files::write(path, |out| match &mut chains {
            Some(chains) => {
                if arguments.explain.worst.is_some() {
                    snapshot.late.iter().for_each(|event| chains.add(event));
                }
                chains.write(out, form, &snapshot)
            }
            None => file::write(out, form, &snapshot, arguments.root(), arguments.hide_idle),
        });
        if let Some(waits) = waits.as_mut().filter(|_| !arguments.json) {
            let mut out = Fit::stdout(true);
            waits.write(&mut out, &snapshot)?;
            footer::write(&mut out, &snapshot, arguments.verbosity.verbose)?;
            out.flush()?;
        } else if let Some(gaps) = chains.as_ref().and_then(|chains| chains.gaps(&snapshot)) {
            say!("whylate: {gaps}");
        }
        written.with_context(cannot)?;
        report_written(path);
        return Ok(());
    }
    let mut out = Fit::stdout(!arguments.json);
    if arguments.json {
        if let Some(least_ns) = arguments.blocked {
            snapshot.stacks.retain(|stack| threads::is_blocked(stack, least_ns));
        }
        JsonLines.snapshot(&mut out, snapshot)?;
    } else {
        let columns = terminal_columns();
        // What --why asks for comes before the tree, which may have hundreds of lines.
        if let Some(waits) = &mut waits {
            let text = text_of(|out| waits.write(out, &snapshot));
            writeln!(out, "{}", text.trim_start_matches('\n'))?;
        }
        match arguments.blocked {
            Some(least_ns) => {
                let choice = blocked::Shown {
                    hide_idle: arguments.hide_idle,
                    least_ns,
                    is_selected: arguments.selects_threads(),
                    is_verbose: arguments.verbosity.verbose,
                };
                blocked::write(&mut out, &snapshot, &choice, columns)?
            }
            None if arguments.flat => flat::table(&snapshot, arguments.hide_idle, None).write(&mut out, columns)?,
            None => tree::write(&mut out, &snapshot, arguments.root(), arguments.hide_idle, columns)?,
        }
        footer::write(&mut out, &snapshot, arguments.verbosity.verbose)?;
    }
    out.flush()?;
    Ok(())
}
