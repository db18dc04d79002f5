// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate serve`: counters for Prometheus, and profiles and reports on request.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use whylate_model::recording::{Header, Line};
use whylate_model::sources::{CARDS, SHARED, named};
use whylate_model::totals::Totals;
use whylate_model::{Card, LateEvent};
use whylate_sources::kernel::clock;
use whylate_sources::kernel::memory::release_freed;
use whylate_sources::kernel::passed_sockets::notify_ready;

use crate::cli::arguments::OwnCpus;
use crate::cli::record::{Kept, Triggers, every, reason, reduce_capabilities};
use crate::cli::values::{duration_ns, source};
use crate::cli::{Origin, UsageError};
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::replay::Replay;
use crate::engine::sources::{Sources, Wish};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::{Ended, Watch};
use crate::render::metrics::{Own, Pages};
use crate::serve::cost::Cost;
use crate::serve::listener::{Address, Listener};
use crate::serve::{Offers, Published, Server};
use crate::store::Recorder;
use crate::store::play::Recording;

/// Export latencies and their culprits to Prometheus
///
/// Counters are at /metrics, as text and as protobuf with native histograms. /debug/pprof/offcpu?seconds=N makes a
/// profile of where threads wait, and /debug/report?seconds=N makes a report. The metrics have names of processes and
/// cgroups. Only this machine can connect unless --listen says otherwise.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # metrics at http://127.0.0.1:9797/metrics, every 10 s
    whylate serve
    # for a Prometheus on another machine
    whylate serve --listen 10.0.0.7:9797
    # also record, and keep seven days, for whylate replay
    whylate serve --record /var/log/whylate/ --keep 7d --max-size 2G
    # a file of the last 15 minutes when a latency reaches 100 ms
    whylate serve --record flights/ --ring 15m --on-late 100ms
    # the metrics of a recording, at its original speed
    whylate replay web1.whylate serve")]
pub struct Arguments {
    /// Address to listen on, with its port, or unix:PATH; repeat it for more addresses [default: 127.0.0.1:9797, or the sockets that systemd passes]
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<Address>,
    /// Make no profiles and no reports: /debug/ is not found
    #[arg(long)]
    no_debug: bool,
    /// Only these sources, e.g. wq,offcpu
    #[arg(long, value_name = "SOURCES", value_delimiter = ',', value_parser = source)]
    sources: Vec<String>,
    #[command(flatten)]
    own: OwnCpus,
    /// Explain every latency of THRESHOLD or more [default: each source's own limit, as in the overview]
    #[arg(long, value_name = "THRESHOLD", value_parser = duration_ns)]
    why: Option<u64>,
    /// Interval at which the metrics change, from 100ms to 1h
    #[arg(long, value_name = "INTERVAL", value_parser = every, default_value = "10s")]
    every: u64,
    /// End after this time (e.g. 10m, 1h)
    #[arg(short, long, value_name = "DURATION", value_parser = duration_ns)]
    duration: Option<u64>,
    /// Also record, to this file (.whylate) or directory
    #[arg(long, value_name = "FILE|DIR/")]
    record: Option<PathBuf>,
    #[command(flatten)]
    kept: Kept,
}

/// Minimum time between two returns of freed memory to the system: bursts of late events take tens of megabytes.
const RELEASE_EVERY: Duration = Duration::from_secs(10);

/// Address without `--listen`.
const DEFAULT: &str = "127.0.0.1:9797";

/// Serves until a signal or the end of the duration.
///
/// # Errors
/// Fails if no source can attach, or an address cannot be listened on.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<()> {
    if arguments.record.is_some() && !origin.is_live() {
        return Err(UsageError(anyhow!("a replay cannot be recorded again: omit --record")).into());
    }
    if arguments.kept.needs_recording() && arguments.record.is_none() {
        let what = "--ring, --keep and --max-size are for a recording: add --record DIR/";
        return Err(UsageError(anyhow!(what)).into());
    }
    if let Some(path) = &arguments.record {
        arguments.kept.check(Some(path), "--record")?;
    }
    let listeners = arguments.listeners()?;
    let names: Vec<String> = listeners.iter().map(Listener::name).collect();
    match origin {
        Origin::Live => live(arguments, listeners, &names),
        Origin::Recording(recording) => replay(arguments, recording, listeners, &names),
    }
}

impl Arguments {
    fn listeners(&self) -> anyhow::Result<Vec<Listener>> {
        let passed = Listener::passed()?;
        let mut addresses = self.listen.clone();
        if addresses.is_empty() && passed.is_empty() {
            addresses.push(DEFAULT.parse().map_err(|error: String| anyhow!(error))?);
        }
        if let Some(address) = addresses.iter().find(|address| address.is_exposed()) {
            say!(
                "whylate: other machines can read names of processes and cgroups at {address}: keep it within a trusted network"
            );
        }
        let bound = addresses.iter().map(Listener::bind).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(passed.into_iter().chain(bound).collect())
    }
}

fn live(arguments: &Arguments, listeners: Vec<Listener>, names: &[String]) -> anyhow::Result<()> {
    let watch = Watch::of_signals().context("cannot watch for Ctrl-C")?;
    let mut triggers = arguments.kept.triggers()?;
    let wish = Wish {
        only: arguments.sources.clone(),
        why_ns: arguments.why,
        surely_from_ns: arguments.kept.on_late,
        in_detail: true,
        // A recording has as much detail as one of `whylate record`.
        is_sparing: arguments.record.is_none(),
        cpus: arguments.own.asked(),
        explain_ppm: arguments.own.explain_ppm(),
    };
    let Some(sources) = Sources::attach(&watch, &wish, "measure")? else { return Ok(()) };
    let measuring = |card: &Card| sources.looking.iter().find(|feed| feed.card.name == card.name);
    let backend = |card: &Card| measuring(card).map(|feed| feed.source.backend.to_owned());
    let wanted = CARDS.iter().filter(|card| wish.takes(card));
    let attached = wanted.map(|card| (card.name, backend(card))).collect();
    let interval = Duration::from_nanos(arguments.every);
    let pace = Pace {
        interval: Some(interval),
        duration: arguments.duration.map(Duration::from_nanos),
        poll: Some(NOW_AND_THEN),
        ..Pace::default()
    };
    let (mut live, header) = Live::begin(sources, &wish, watch, pace)?;
    let recorder = match &arguments.record {
        Some(path) => {
            let (store, _) = arguments.kept.store(Some(path), &header.host)?;
            Some(Recorder::start(store, Header { every_ns: Some(arguments.every), ..header })?)
        }
        None => None,
    };
    triggers.begin();
    // The socket is removed at the end.
    let has_files = recorder.is_some() || arguments.listen.iter().any(|address| matches!(address, Address::Unix(_)));
    let reduced = reduce_capabilities(has_files);
    let mut exporter = Exporter::new(clock::unix_ns(), attached, arguments.why, interval);
    (exporter.recorder, exporter.triggers) = (recorder, Some(triggers));
    exporter.publish(false)?;
    let offers = Offers { can_keep: arguments.kept.has_ring(), has_debug: !arguments.no_debug };
    let server = Server::start(listeners, Arc::clone(&exporter.published), offers)?;
    notify_ready();
    say!("whylate: serving at {} (Ctrl-C ends it)", names.join(", "));
    let driven = drive(&mut live, &mut exporter);
    // Detaching restores settings.
    drop((server, reduced, live));
    exporter.recorder.take().map_or(Ok(()), Recorder::end).and(driven)
}

fn replay(
    arguments: &Arguments,
    recording: &Recording,
    listeners: Vec<Listener>,
    names: &[String],
) -> anyhow::Result<()> {
    let watch = Watch::of_signals().context("cannot watch for Ctrl-C")?;
    let mut replay = Replay::new(recording.play()?);
    for source in &arguments.sources {
        replay.played().late_from_ns(source)?;
    }
    let header = replay.header();
    let measured = header.sources.iter().map(|of| (&of.source, Some(of.backend.clone())));
    let attached = measured.chain(header.unmeasured.iter().map(|of| (&of.source, None)));
    let wanted = attached.filter(|(source, _)| arguments.sources.is_empty() || arguments.sources.contains(source));
    let attached = wanted.filter_map(|(source, backend)| Some((named(source)?.name, backend)));
    let interval = Duration::from_nanos(arguments.every);
    let mut exporter = Exporter::new(header.start_unix_ns, attached.collect(), arguments.why, interval);
    let end = arguments.duration.and_then(|ns| Instant::now().checked_add(Duration::from_nanos(ns)));
    exporter.replayed = Some(Replayed { watch, speed: recording.speed.unwrap_or(1.0), end, is_over: false });
    exporter.publish(false)?;
    let offers = Offers { can_keep: false, has_debug: !arguments.no_debug };
    let server = Server::start(listeners, Arc::clone(&exporter.published), offers)?;
    say!("whylate: serving at {} (Ctrl-C ends it)", names.join(", "));
    drive(&mut replay, &mut exporter)?;
    replay.finish()?;
    // The last metrics stay.
    say!("whylate: the recording has ended; its last metrics are still served");
    if let Some(Replayed { watch, is_over: false, .. }) = exporter.replayed.take() {
        watch.until(end)?;
    }
    drop(server);
    Ok(())
}

/// Adds ticks up, and publishes the sums.
struct Exporter {
    totals: Totals,
    published: Arc<Published>,
    /// Each source that was requested, and its backend if it measures.
    attached: Vec<(&'static str, Option<String>)>,
    interval: Duration,
    started_seconds: f64,
    cost: Cost,
    recorder: Option<Recorder>,
    triggers: Option<Triggers>,
    replayed: Option<Replayed>,
    /// Time at which freed memory was last returned to the system.
    released: Instant,
}

/// How a recording is replayed.
struct Replayed {
    watch: Watch,
    speed: f64,
    /// When the duration ends, if one is given.
    end: Option<Instant>,
    /// Whether a signal or the duration has ended it.
    is_over: bool,
}

impl Exporter {
    fn new(
        started_unix_ns: u64,
        attached: Vec<(&'static str, Option<String>)>,
        late_from_ns: Option<u64>,
        interval: Duration,
    ) -> Self {
        let measured = attached.iter().filter(|(_, backend)| backend.is_some());
        let cards = measured.filter_map(|(name, _)| named(name)).collect();
        Exporter {
            totals: Totals::new(started_unix_ns, cards, late_from_ns),
            published: Arc::default(),
            attached,
            interval,
            started_seconds: clock::unix_ns() as f64 / 1e9,
            cost: Cost::default(),
            recorder: None,
            triggers: None,
            replayed: None,
            released: Instant::now(),
        }
    }

    /// Publishes the sums after an interval, or the zeros before the first one.
    fn publish(&mut self, is_ready: bool) -> anyhow::Result<()> {
        let own = Own {
            sources: self.attached.clone(),
            started_seconds: self.started_seconds,
            refused: self.published.refused(),
            // Otherwise an old recording would look as if whylate measured nothing.
            replayed_unix_ns: self.replayed.is_some().then(clock::unix_ns),
            ..self.cost.now()
        };
        // A recording may have gaps, and ends.
        let interval = self.replayed.is_none().then_some(self.interval);
        self.published.publish(Pages::encode(&self.totals, &own)?, is_ready, interval);
        Ok(())
    }

    /// Returns whether the metrics have this source: a recording may have more.
    fn has(&self, card: &Card) -> bool {
        self.attached.iter().any(|(name, _)| *name == card.name)
    }

    fn add(&mut self, line: &Line) {
        match line {
            Line::Snapshot(snapshot) => {
                if let Some(card) = named(&snapshot.source).filter(|card| self.has(card)) {
                    self.totals.snapshot(card, snapshot);
                }
            }
            Line::Account(account) => self.totals.lost(SHARED, &account.lost),
            _ => {}
        }
    }
}

impl Sink for Exporter {
    fn late(&mut self, card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        if self.has(card) {
            self.totals.late(card, &event);
        }
        // Nothing but a recording needs it any more.
        Ok(self.recorder.is_some().then_some(event))
    }

    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        if self.published.has_ended() {
            bail!("the server has failed");
        }
        let fired = self.triggers.as_mut().map(Triggers::fired).unwrap_or_default();
        let request = self.published.take_request_to_keep().then(|| reason("request", String::new()));
        if let Some(recorder) = &self.recorder {
            fired.into_iter().chain(request).for_each(|reason| recorder.request_file(reason));
        }
        Ok(ControlFlow::Continue(()))
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        let span_ns =
            tick.lines.iter().filter_map(Line::span_unix_ns).map(|(first_ns, last_ns)| last_ns - first_ns).max();
        self.totals.begin_span();
        tick.lines.iter().for_each(|line| self.add(line));
        self.totals.end_span(span_ns.unwrap_or(0));
        tick.report_problems();
        for source in &tick.failed {
            self.attached.iter_mut().filter(|(name, _)| name == source).for_each(|(_, backend)| *backend = None);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.tick(tick.lines);
            recorder.take_problem().into_iter().for_each(|problem| say!("whylate: {problem}"));
        }
        self.publish(true)?;
        if self.released.elapsed() >= RELEASE_EVERY {
            release_freed();
            self.released = Instant::now();
        }
        if let Some(Replayed { watch, speed, end, is_over }) = &mut self.replayed {
            let pause = Duration::from_secs_f64((span_ns.unwrap_or(0) as f64 / 1e9 / *speed).min(3_600.0));
            let until = Instant::now() + pause;
            let ended = watch.until(Some(end.map_or(until, |end| until.min(end))))?;
            *is_over = ended != Ended::Time || end.is_some_and(|end| Instant::now() >= end);
            if *is_over {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}
