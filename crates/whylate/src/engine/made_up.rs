// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that the engine and the general outputs take a source and a sink that they do not name.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use jiff::tz::TimeZone;
use tempfile::TempDir;
use whylate_model::culprits::By;
use whylate_model::overview::Gatherer;
use whylate_model::recording::Line;
use whylate_model::sources::Judged;
use whylate_model::totals::Totals;
use whylate_model::{ActorName, Card, Cause, CauseKind, LateEvent, Merger, Series, Snapshot};
use whylate_sources::kernel::clock;
use whylate_sources::{AttachError, Attached, BackendInfo, CommonOptions, Measuring, Session, Source, SourceInfo};

use super::live::{Live, Pace};
use super::replay::Replay;
use super::sources::{Attaching, Wish, attach_each};
use super::ticks::{Sink, Tick, drive};
use super::watch::Watch;
use crate::cli::record;
use crate::render::export::Destination;
use crate::render::json::JsonLines;
use crate::render::metrics::{Form, Own, Pages};
use crate::render::text::overview::{self, Screen};
use crate::render::text::{Output as _, text_of};
use crate::store::Recorder;
use crate::store::play::Recording;
use crate::store::{Span, about};

const MS: u64 = 1_000_000;

/// What a directory in `whylate-sources/src` and a card would be.
static NAPS: Card = Card::new(
    "naps",
    Judged {
        of: "nap, until awake",
        row: "nap: until awake",
        late: ["long nap", "long naps"],
        late_from_ns: 5 * MS,
        next: "whylate naps --why {from}",
    },
    |snapshot| snapshot.total("latency"),
);

static INFO: SourceInfo =
    SourceInfo { card: &NAPS, backends: &[BackendInfo { name: "pillow", needs: &[], limitations: "" }] };

#[derive(Default)]
struct NapsOptions {
    explain_over_ns: Option<u64>,
}

impl Source for NapsOptions {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn ask(&mut self, asked: CommonOptions) {
        self.explain_over_ns = asked.explain_over_ns;
    }

    fn attach(&self, session: &Session) -> Result<Measuring, AttachError> {
        let over_ns = self.explain_over_ns.unwrap_or(u64::MAX);
        let attached = Box::new(AttachedNaps { host: session.host().to_owned(), over_ns, began_ns: clock::unix_ns() });
        Ok(Measuring { backend: "pillow", fallback_reason: None, attached })
    }
}

/// Has naps of 1 ms and 7 ms in each span, and a late event each time that it is asked.
struct AttachedNaps {
    host: String,
    over_ns: u64,
    began_ns: u64,
}

impl Attached for AttachedNaps {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        let mut snapshot = Snapshot::new(NAPS.name, "pillow", &self.host, self.began_ns);
        self.began_ns = clock::unix_ns();
        snapshot.duration_ns = self.began_ns.saturating_sub(snapshot.start_unix_ns);
        snapshot.ended_ns = clock::monotonic_ns();
        let histograms = [("latency".to_owned(), [MS, 7 * MS].into_iter().collect())].into();
        snapshot.series.push(Series {
            labels: [("bed".to_owned(), "upper".to_owned())].into(),
            histograms,
            ..Series::default()
        });
        Ok(snapshot)
    }

    fn drain_late(&mut self, _wait: Duration, each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        let nap = |latency_ns| LateEvent {
            subject: "bed 1".to_owned(),
            at_unix_ns: clock::unix_ns(),
            at_ns: clock::monotonic_ns(),
            latency_ns,
            causes: vec![Cause::new(CauseKind::Thread, ActorName::thread("cat", 7), latency_ns)],
            ..LateEvent::default()
        };
        [7 * MS, MS].into_iter().filter(|&ns| ns >= self.over_ns).for_each(|ns| each(nap(ns)));
        Ok(())
    }
}

/// Keeps what it receives: a sink is this, and a line that passes it to [`drive`].
#[derive(Default)]
struct Journal {
    late: Vec<(&'static str, u64)>,
    snapshots: Vec<Snapshot>,
    polls: usize,
    /// Number of ticks after which it has enough.
    enough: Option<usize>,
}

impl Sink for Journal {
    fn late(&mut self, card: &'static Card, event: LateEvent) -> anyhow::Result<Option<LateEvent>> {
        self.late.push((card.name, event.latency_ns));
        Ok(Some(event))
    }

    fn poll(&mut self) -> anyhow::Result<ControlFlow<()>> {
        self.polls += 1;
        // The second time, it does not wait for the tick any longer.
        Ok(if self.polls == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        self.snapshots.extend(tick.into_snapshots());
        let has_enough = self.enough.is_some_and(|enough| self.snapshots.len() >= enough);
        Ok(if has_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

/// Measures for some ticks into a recording and a sink. Returns what the sink received.
fn measured(recording: &std::path::Path) -> Journal {
    let (_peer, socket) = UnixStream::pair().expect("a pair");
    let watch = Watch::of_socket(socket);
    let wish = Wish::default();
    let mut attached = Vec::new();
    let sources = attach_each([Box::new(NapsOptions::default()) as Box<dyn Source>], &watch, &wish, &mut |progress| {
        if let Attaching::Begins(card) = progress {
            attached.push(card.name);
        }
    });
    let sources = sources.expect("it attaches").expect("it is not interrupted");
    assert_eq!((attached, sources.unmeasured.len()), (vec!["naps"], 0));
    // The sink ends the wait for the first tick, and the run.
    let pace =
        Pace { interval: Some(Duration::from_millis(50)), poll: Some(Duration::from_millis(5)), ..Pace::default() };
    let (mut live, header) = Live::begin(sources, &wish, watch, pace).expect("it begins");
    assert_eq!((header.sources[0].source.as_str(), header.sources[0].late_from_ns), ("naps", Some(5 * MS)));
    live.record(Some(Recorder::start(record::file(recording).expect("a file"), header).expect("a recorder")));
    let mut journal = Journal { enough: Some(3), ..Journal::default() };
    drive(&mut live, &mut journal).expect("it measures");
    live.finish().expect("it is recorded");
    journal
}

fn json(snapshots: &[Snapshot]) -> String {
    text_of(|out| snapshots.iter().try_for_each(|snapshot| JsonLines.snapshot(out, snapshot.clone())))
}

#[test]
fn made_up_source_and_sink_pass_through_engine_recording_and_outputs() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("naps.whylate");
    let live = measured(&path);
    assert_eq!(live.snapshots.len(), 3);
    assert!(live.late.len() >= live.snapshots.len() && live.late.iter().all(|late| *late == ("naps", 7 * MS)));

    // The replay is the same, through the same loop and sink.
    let played = || Recording { path: path.clone(), span: Span::default(), speed: None, command: None }.play();
    let mut replay = Replay::of_source(played().expect("a recording"), &NAPS, None, None);
    let mut replayed = Journal::default();
    drive(&mut replay, &mut replayed).expect("it is read");
    replay.finish().expect("it has snapshots");
    assert_eq!(replayed.late, live.late);
    assert_eq!(json(&replayed.snapshots), json(&live.snapshots));
    let mut brief = Journal { enough: Some(2), ..Journal::default() };
    drive(&mut Replay::of_source(played().expect("a recording"), &NAPS, None, None), &mut brief).expect("it is read");
    assert_eq!(brief.snapshots.len(), 2);

    // What is general about all sources takes it by its card; words on the screen need its line in `CARDS`.
    let (mut merger, mut gatherer) = (Merger::default(), Gatherer::for_cards(vec![&NAPS], By::default()));
    let mut totals = Totals::new(0, vec![&NAPS], None);
    for snapshot in &live.snapshots {
        merger.add_copy(snapshot);
        totals.begin_span();
        totals.snapshot(&NAPS, snapshot);
        for event in &snapshot.late {
            gatherer.add(&NAPS, event.clone());
            totals.late(&NAPS, event);
        }
        totals.end_span(snapshot.duration_ns);
    }
    let merged = merger.take().expect("a snapshot");
    assert_eq!(merged.total("latency").count(), 2 * live.snapshots.len() as u64);
    let overview = gatherer.finish(&[(&NAPS, merged)], Vec::new());
    let zone = TimeZone::UTC;
    let shown = Screen { columns: Some(100), is_verbose: true, zone, replay: None };
    let text = text_of(|out| overview::write(out, &overview, &shown));
    for part in ["naps", "thread cat:7", "bed 1"] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    let pages = Pages::encode(&totals, &Own::default()).expect("it is encoded");
    let metrics = String::from_utf8_lossy(pages.in_form(Form::Text)).into_owned();
    for part in ["source=\"naps\"", "cat"] {
        assert!(metrics.contains(part), "{part} is missing in:\n{metrics}");
    }
    let tables = directory.path().join("tables");
    let mut export = Destination::for_recording(&path).expect("a place").csv(&tables).expect("tables");
    export.line(&Line::Header(about::this_machine())).expect("it is written");
    for snapshot in live.snapshots {
        export.line(&Line::Snapshot(Box::new(snapshot))).expect("it is written");
    }
    export.end().expect("it is written");
    let rows = fs::read_to_string(tables.join("causes.csv")).expect("a table");
    assert_eq!(rows.matches("cat:7").count(), live.late.len(), "{rows}");
}
