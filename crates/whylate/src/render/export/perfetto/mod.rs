// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes a Perfetto trace: late events as slices of their phases and paths, and tracks of their culprits.
//!
//! A culprit has a slice if a path says when it caused its part of the delay, or if it caused all of it. Other causes
//! are sums without a position in time: each is an instant at the start of the wait. A flow leads from a culprit to its
//! victim.

mod packets;
mod proto;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io;

use whylate_model::path::PathSegment;
use whylate_model::recording::{Clock, Gap, Header, Kept, Line};
use whylate_model::sources::named;
use whylate_model::units::{format_ns, printable};
use whylate_model::{ActorName, Cause, CauseKind, LateEvent, Snapshot};

use super::Export;
use crate::files::PendingFile;
use packets::{Packets, Thread, hash};
use proto::{Annotation, Callstack, TrackEvent};

/// Root track of culprits without a known process.
const CULPRITS: &str = "culprits";
/// Root track of gaps in the recording.
const RECORDING: &str = "recording";
/// Maximum number of stacks per snapshot.
const STACKS: usize = 10;
/// Maximum number of threads remembered with their processes.
const THREADS: usize = 100_000;

/// A trace that is being written.
pub struct Trace {
    packets: Packets,
    header: Header,
    flows: u64,
    /// Threads by their name in causes.
    threads: HashMap<ActorName, KnownThread>,
    is_header_written: bool,
}

#[derive(Clone)]
struct KnownThread {
    pid: i32,
    tid: i64,
    name: String,
    process: String,
}

/// A culprit's part of a wait.
struct CulpritSpan<'a> {
    kind: CauseKind,
    who: &'a ActorName,
    from_ns: u64,
    to_ns: u64,
}

impl Trace {
    /// Starts a trace.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn begin(out: PendingFile, header: &Header) -> io::Result<Self> {
        // Flow IDs differ between recordings, so that their traces can be merged.
        let flows = hash(&["flows", &header.host, &header.boot_id, &header.start_unix_ns.to_string()]) << 24;
        let header = header.clone();
        Ok(Trace { packets: Packets::new(out), header, flows, threads: HashMap::new(), is_header_written: false })
    }

    /// Writes the header once, before anything that has a timestamp.
    fn write_header(&mut self) -> io::Result<()> {
        if self.is_header_written {
            return Ok(());
        }
        self.is_header_written = true;
        let Header { host, kernel, start_unix_ns, .. } = self.header.clone();
        if !self.packets.has_clock() {
            // Without a clock reading, timestamps are wall-clock times.
            let (at_unix_ns, monotonic_ns, boottime_ns) = (start_unix_ns, start_unix_ns, start_unix_ns);
            self.packets.clock(&Clock { at_unix_ns, monotonic_ns, boottime_ns })?;
        }
        let sources: Vec<String> = self.header.sources.iter().map(|of| of.source.clone()).collect();
        let debug_annotations = vec![
            Annotation::text("host", &host),
            Annotation::text("kernel", &kernel),
            Annotation::number("cpus", self.header.cpus.into()),
            Annotation::texts("sources", &sources),
            Annotation::text("whylate", &self.header.whylate),
        ];
        let track_uuid = self.packets.root(RECORDING)?;
        let name = printable(&format!("whylate on {host}"));
        let event = TrackEvent { track_uuid, name, debug_annotations, ..TrackEvent::default() };
        self.packets.instant(self.packets.boot_ns(start_unix_ns), event)
    }

    fn snapshot(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        let from_ns = self.packets.boot_ns(snapshot.start_unix_ns);
        let to_ns = from_ns.saturating_add(snapshot.duration_ns);
        let root = self.packets.root(&snapshot.source)?;
        self.figures(root, snapshot, from_ns)?;
        self.lost(root, &snapshot.lost, to_ns)?;
        self.stacks(root, snapshot, from_ns)?;
        // Sorted by start time, overlapping slices need the fewest tracks.
        let mut late: Vec<&LateEvent> = snapshot.late.iter().collect();
        late.sort_by_key(|event| event.at_unix_ns.saturating_sub(event.latency_ns));
        late.into_iter().try_for_each(|event| self.late(root, &snapshot.source, event))
    }

    fn lost(&mut self, track_uuid: u64, lost: &BTreeMap<String, u64>, at_ns: u64) -> io::Result<()> {
        let lost: Vec<(&String, &u64)> = lost.iter().filter(|(_, count)| **count > 0).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let all = lost.iter().fold(0_u64, |all, (_, count)| all.saturating_add(**count));
        let name = format!("{all} events lost");
        let debug_annotations = lost.into_iter().map(|(why, count)| Annotation::number(&printable(why), *count));
        let debug_annotations = debug_annotations.collect();
        self.packets.instant(at_ns, TrackEvent { track_uuid, name, debug_annotations, ..TrackEvent::default() })
    }

    /// Writes the headline figures to counters: each value holds until the next one.
    fn figures(&mut self, root: u64, snapshot: &Snapshot, at_ns: u64) -> io::Result<()> {
        let Some(card) = named(&snapshot.source) else { return Ok(()) };
        let figures = (card.figures)(snapshot);
        let a_second = figures.count() as f64 * 1e9 / snapshot.duration_ns.max(1) as f64;
        let source = card.name;
        let track = self.packets.counter(root, &format!("{source}: events per second"), false)?;
        self.packets.measure(at_ns, track, a_second)?;
        for (name, value) in [("p99", figures.quantile_ns(0.99)), ("max", figures.max_ns())] {
            let track = self.packets.counter(root, &format!("{source}: {name}"), true)?;
            self.packets.count(at_ns, track, i64::try_from(value).unwrap_or(i64::MAX))?;
        }
        Ok(())
    }

    /// Writes the heaviest stacks as an instant: they have a weight, but no position within the snapshot.
    fn stacks(&mut self, root: u64, snapshot: &Snapshot, at_ns: u64) -> io::Result<()> {
        let mut stacks: Vec<_> = snapshot.stacks.iter().collect();
        stacks.sort_by_key(|stack| Reverse(stack.weight_ns));
        stacks.truncate(STACKS);
        if stacks.is_empty() {
            return Ok(());
        }
        let annotations = stacks.into_iter().map(|stack| {
            let labels = stack.labels.iter().map(|(name, value)| Annotation::text(name, value));
            let weight = [Annotation::number("weight_ns", stack.weight_ns)];
            let frames = [("kernel", &stack.kernel), ("user", &stack.user)];
            let frames = frames.into_iter().filter(|(_, frames)| !frames.is_empty());
            let frames = frames.map(|(name, frames)| Annotation::texts(name, frames));
            Annotation::map("", labels.chain(weight).chain(frames).collect())
        });
        let debug_annotations = vec![Annotation::list("stacks", annotations.collect())];
        let name = "heaviest stacks".to_owned();
        let event = TrackEvent { track_uuid: root, name, debug_annotations, ..TrackEvent::default() };
        self.packets.instant(at_ns, event)
    }

    fn late(&mut self, root: u64, source: &str, event: &LateEvent) -> io::Result<()> {
        let victim = self.victim(event);
        let to_ns = self.packets.boot_ns(event.at_unix_ns);
        let from_ns = to_ns.saturating_sub(event.latency_ns);
        let (parent, track) = match &victim {
            Some(thread) => (self.thread(thread)?, format!("late ({source})")),
            None => (root, event.subject.clone()),
        };
        // With a path, a flow leads to each of its segments, otherwise to the whole wait.
        let mut flows = Vec::new();
        if event.path.is_empty() {
            for cause in &event.causes {
                flows.extend(self.culprit_of_cause(event, cause, from_ns, to_ns)?);
            }
        }
        let flows_of_path = self.culprits_of_path(event, from_ns)?;
        let track_uuid = self.packets.overlap_track(parent, &track, from_ns, to_ns)?;
        let whole = TrackEvent {
            track_uuid,
            categories: vec![printable(source)],
            name: printable(&event.subject),
            terminating_flow_ids: flows,
            debug_annotations: about(event),
            callstack: Callstack::from_innermost_first(if event.inside.is_empty() {
                &event.stack
            } else {
                &event.inside
            }),
            ..TrackEvent::default()
        };
        self.packets.begin(from_ns, whole)?;
        let mut at_ns = from_ns;
        for (name, ns) in &event.phases {
            let end_ns = at_ns.saturating_add(*ns).min(to_ns);
            let phase = TrackEvent { track_uuid, name: printable(name), ..TrackEvent::default() };
            self.packets.slice(at_ns, end_ns, phase)?;
            at_ns = end_ns;
        }
        // Phases and paths both divide the whole wait. Their slices would not nest, so each needs a track.
        let path_track = match event.phases.is_empty() || event.path.is_empty() {
            true => track_uuid,
            false => self.packets.overlap_track(parent, &format!("{track}: path"), from_ns, to_ns)?,
        };
        let mut at_ns = from_ns;
        for (segment, flow) in event.path.iter().zip(flows_of_path) {
            let end_ns = at_ns.saturating_add(segment.ns).min(to_ns);
            if segment.ns > 0 {
                let name = printable(&format!("{} {}", segment.kind.name(), segment.who));
                let (terminating_flow_ids, debug_annotations) = (flow.into_iter().collect(), about_segment(segment));
                let part = TrackEvent {
                    track_uuid: path_track,
                    name,
                    terminating_flow_ids,
                    debug_annotations,
                    ..Default::default()
                };
                self.packets.slice(at_ns, end_ns, part)?;
            }
            at_ns = end_ns;
        }
        self.packets.finish(to_ns, track_uuid)
    }

    /// Writes a cause's culprit and returns the ID of the flow from it to the event.
    fn culprit_of_cause(
        &mut self,
        event: &LateEvent,
        cause: &Cause,
        from_ns: u64,
        to_ns: u64,
    ) -> io::Result<Option<u64>> {
        let is_all = cause.ns >= event.latency_ns;
        let to_ns = if is_all { to_ns } else { from_ns };
        let about = vec![
            Annotation::number("ns", cause.ns),
            Annotation::number("of_ns", event.latency_ns),
            Annotation::texts("stack", &cause.stack),
        ];
        let part = CulpritSpan { kind: cause.kind, who: &cause.who, from_ns, to_ns };
        self.culprit(&part, &event.subject, about)
    }

    /// Writes the culprits of a path and returns the IDs of the flows from them to the segments.
    fn culprits_of_path(&mut self, event: &LateEvent, from_ns: u64) -> io::Result<Vec<Option<u64>>> {
        let mut at_ns = from_ns;
        let mut flows = Vec::with_capacity(event.path.len());
        for segment in &event.path {
            let end_ns = at_ns.saturating_add(segment.ns);
            let part = CulpritSpan { kind: segment.kind, who: &segment.who, from_ns: at_ns, to_ns: end_ns };
            let is_own = segment.ns == 0 || segment.who == event.subject;
            flows.push(if is_own { None } else { self.culprit(&part, &event.subject, Vec::new())? });
            at_ns = end_ns;
        }
        Ok(flows)
    }

    /// Writes a slice or instant to the culprit's own track and returns its flow ID. `None` if the culprit is unknown.
    fn culprit(&mut self, part: &CulpritSpan<'_>, victim: &str, about: Vec<Annotation>) -> io::Result<Option<u64>> {
        if part.kind == CauseKind::Unknown || *part.who == ActorName::default() {
            return Ok(None);
        }
        let track_uuid = match self.threads.get(part.who).cloned() {
            Some(thread) => {
                let parent = self.thread(&thread)?;
                self.packets.overlap_track(parent, "made others late", part.from_ns, part.to_ns)?
            }
            None => {
                let root = self.packets.root(CULPRITS)?;
                self.packets.overlap_track(root, &part.who.to_string(), part.from_ns, part.to_ns)?
            }
        };
        self.flows = self.flows.wrapping_add(1);
        let name = printable(&format!("{}: {victim} waits", part.kind.name()));
        let debug_annotations = about;
        let event =
            TrackEvent { track_uuid, name, flow_ids: vec![self.flows], debug_annotations, ..Default::default() };
        match part.from_ns == part.to_ns {
            true => self.packets.instant(part.from_ns, event)?,
            false => self.packets.slice(part.from_ns, part.to_ns, event)?,
        }
        Ok(Some(self.flows))
    }

    fn thread(&mut self, thread: &KnownThread) -> io::Result<u64> {
        let KnownThread { pid, tid, name, process } = thread;
        self.packets.thread(Thread { pid: *pid, tid: *tid, name, process })
    }

    /// Returns the victim if it is a thread, and remembers its process. Causes only have a thread's name and TID.
    fn victim(&mut self, event: &LateEvent) -> Option<KnownThread> {
        let label = |name: &str| event.labels.get(name).map_or("", String::as_str);
        let (pid, tid) = (label("pid").parse().ok()?, label("tid").parse().ok()?);
        let (name, process) = (label("thread").to_owned(), label("process").to_owned());
        let key = Some(ActorName::thread(name.as_str(), tid)).filter(|key| *key == event.subject)?;
        let is_full = self.threads.len() >= THREADS && !self.threads.contains_key(&key);
        let known = || KnownThread { pid, tid: tid.into(), name, process };
        (!is_full).then(|| self.threads.entry(key).or_insert_with(known).clone())
    }

    fn gap(&mut self, gap: &Gap) -> io::Result<()> {
        let from_ns = self.packets.boot_ns(gap.start_unix_ns);
        let to_ns = from_ns.saturating_add(gap.duration_ns);
        let root = self.packets.root(RECORDING)?;
        let track_uuid = self.packets.overlap_track(root, "gaps", from_ns, to_ns)?;
        let name = printable(&gap.reason);
        let debug_annotations = vec![Annotation::number("count", gap.count)];
        let event = TrackEvent { track_uuid, name, debug_annotations, ..TrackEvent::default() };
        match gap.duration_ns {
            0 => self.packets.instant(from_ns, event),
            _ => self.packets.slice(from_ns, to_ns, event),
        }
    }

    fn kept(&mut self, kept: &Kept) -> io::Result<()> {
        let at_ns = self.packets.boot_ns(kept.at_unix_ns);
        let track_uuid = self.packets.root(RECORDING)?;
        let debug_annotations = vec![Annotation::text("detail", &printable(&kept.detail))];
        let name = format!("kept: {}", printable(&kept.reason));
        self.packets.instant(at_ns, TrackEvent { track_uuid, name, debug_annotations, ..TrackEvent::default() })
    }
}

impl Export for Trace {
    fn line(&mut self, line: &Line) -> anyhow::Result<()> {
        if let Line::Clock(clock) = line {
            return Ok(self.packets.clock(clock)?);
        }
        if matches!(line, Line::Snapshot(_) | Line::Gap(_) | Line::Kept(_) | Line::Account(_)) {
            self.write_header()?;
        }
        match line {
            Line::Snapshot(snapshot) => self.snapshot(snapshot)?,
            Line::Gap(gap) => self.gap(gap)?,
            Line::Kept(kept) => self.kept(kept)?,
            Line::Account(account) => {
                let root = self.packets.root(RECORDING)?;
                self.lost(root, &account.lost, self.packets.boot_ns(account.at_unix_ns))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        Ok(self.packets.end()?)
    }
}

/// Returns the annotations of a late event.
fn about(event: &LateEvent) -> Vec<Annotation> {
    let mut about = vec![
        Annotation::text("late", &format_ns(event.latency_ns)),
        Annotation::number("latency_ns", event.latency_ns),
    ];
    about.extend(event.at_most_ns.map(|ns| Annotation::number("at_most_ns", ns)));
    about.push(Annotation::number("cpu", event.cpu.into()));
    let labels: Vec<_> = event.labels.iter().map(|(name, value)| Annotation::text(name, value)).collect();
    about.push(Annotation::map("labels", labels));
    let causes = event.causes.iter().map(|cause| {
        let mut entries = vec![
            Annotation::text("kind", cause.kind.name()),
            Annotation::text("who", &cause.who.to_string()),
            Annotation::number("ns", cause.ns),
        ];
        entries.extend(cause.cgroup.as_ref().map(|cgroup| Annotation::text("cgroup", &cgroup.path)));
        entries.push(Annotation::texts("stack", &cause.stack));
        Annotation::map("", entries)
    });
    about.push(Annotation::list("causes", causes.collect()));
    about.push(Annotation::texts("stack", &event.stack));
    about.push(Annotation::texts("inside", &event.inside));
    about.retain(|one| {
        one.uint_value.is_some() || one.string_value.is_some() || !one.entries.is_empty() || !one.values.is_empty()
    });
    about
}

fn about_segment(segment: &PathSegment) -> Vec<Annotation> {
    let text = |name: &'static str, value: Option<String>| value.map(|value| Annotation::text(name, &value));
    let named = |name: &Option<ActorName>| name.as_ref().map(ActorName::to_string);
    let mut about = vec![Annotation::number("depth", segment.depth.into())];
    let annotations =
        [("for", named(&segment.ready)), ("waiter", named(&segment.waiter)), ("via", segment.via.clone())];
    about.extend(annotations.into_iter().filter_map(|(name, value)| text(name, value)));
    if !segment.stack.is_empty() {
        about.push(Annotation::texts("stack", &segment.stack));
    }
    about
}
