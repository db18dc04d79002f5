// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data of the page's script: by slot of time, everything that adds up over a selected span, and the late events.
//!
//! Names are escaped here already: the script inserts them into the page as text.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::tz::TimeZone;
use serde::Serialize;
use whylate_model::culprits::{By, Culprit};
use whylate_model::overview::SourceSummary;
use whylate_model::sources::{Merging, PRESENT, SHARED, lost_events};
use whylate_model::{ActorName, CauseKind, Histogram, Labels, Series, Snapshot};

use super::Report;
use super::event::{self, facts, main_cause};
use super::flame::{self, Graph};
use super::listed::ListedEvent;
use super::markup::name;
use super::rows::Sum as _;
use super::series::{Column, GROUPS, added_up, in_order};
use super::tables::DAY_NS;
use super::timeline::Axis;
use crate::render::text::why::{actor, culprit as in_words, how};

/// Version of the format.
const SCHEMA: u32 = 1;
/// Culprits with data by slot: this many of the worst in total, and of each slot. The delay by others is added up.
const CULPRITS: usize = 300;
const CULPRITS_OF_SLOT: usize = 5;
/// Maximum number of series of a source by slot, and of their histogram buckets.
pub const SERIES: usize = 60;
const MAX_BUCKETS: usize = 200_000;
/// Maximum size of late events, in bytes of JSON. Beyond it, the shortest are omitted.
const MAX_LATE_BYTES: usize = 2 << 20;
/// Maximum number of changes of the time zone's offset: there are two a year, and a recording may start in 1970, before
/// its machine's clock was set.
const MAX_CHANGES: usize = 1_000;
/// Maximum size of uncompressed data.
const MAX_PLAIN_BYTES: usize = 2 << 20;

/// Buckets by the name of the distribution.
type Distributions = BTreeMap<String, Vec<u64>>;
/// Slot, number of events, total and maximum delay in nanoseconds.
type SlotDelay = (u32, u64, u64, u64);
/// Nanoseconds by slot.
type SlotNs = Vec<(u32, u64)>;

#[derive(Serialize)]
struct Data<'a> {
    schema: u32,
    /// Times are nanoseconds since this time: those since 1970 exceed the integers of JavaScript.
    base_ns: String,
    /// Offsets of the recorder's time zone: start in nanoseconds since `base_ns`, and seconds ahead of UTC.
    offsets: Vec<(u64, i32)>,
    /// Whether timestamps need a date.
    has_dates: bool,
    command: &'a str,
    /// Start and end of each slot, their positions in the pictures, and the span for replay.
    slots: Vec<(u64, u64, u64, u64, String, String)>,
    lost: Vec<BTreeMap<String, u64>>,
    sources: Vec<SourceData>,
    culprits: Vec<CulpritData>,
    /// Delay by other culprits by slot, and their number.
    others: Vec<(u32, u64)>,
    others_count: usize,
    late: Vec<LateData>,
    names: Vec<String>,
    graphs: Vec<GraphData>,
}

#[derive(Serialize)]
struct SourceData {
    name: &'static str,
    of: &'static str,
    from: u64,
    late_of: Option<(&'static str, u64)>,
    held_up: Option<(&'static str, u64)>,
    share: Option<(&'static str, f64, &'static str, &'static str)>,
    /// Whether there was nothing to measure at the start.
    is_nothing: bool,
    slots: Vec<Option<SourceSlotData>>,
    columns: Vec<[String; 3]>,
    merging: BTreeMap<String, &'static str>,
    series: Vec<SeriesData>,
    /// Whether no series is missing.
    has_all: bool,
    /// Whether the buckets of series are coarser, so that percentiles have larger bounds.
    is_coarse: bool,
    /// Value of all series by which the source is judged, if series are missing.
    judged: Vec<SeriesData>,
    /// The remark on the whole span, and whether it means late.
    remark: Option<(String, bool)>,
    grouped: Option<Grouped>,
    shares: &'static [&'static str],
}

/// The label by which series are added up, and its values in display order.
#[derive(Serialize)]
struct Grouped {
    label: &'static str,
    columns: Vec<[String; 3]>,
    order: Vec<String>,
}

/// A source in a slot. Histograms are the maximum, then pairs of a bucket's upper bound and count.
#[derive(Serialize)]
struct SourceSlotData {
    d: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    f: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    e: Vec<u64>,
    #[serde(skip_serializing_if = "is_zero")]
    late: u64,
    /// Lower bounds of the late values in `f` and `e`.
    #[serde(skip_serializing_if = "is_zero")]
    f_late: u64,
    #[serde(skip_serializing_if = "is_zero")]
    e_late: u64,
    #[serde(skip_serializing_if = "is_zero")]
    late_max: u64,
    #[serde(skip_serializing_if = "is_zero")]
    held: u64,
    #[serde(skip_serializing_if = "is_zero")]
    held_max: u64,
    #[serde(skip_serializing_if = "is_zero")]
    late_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unexplained: Option<(u64, u64)>,
    has: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    lost: BTreeMap<String, u64>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[derive(Serialize)]
struct SeriesData {
    labels: Labels,
    /// Distributions and values by slot.
    slots: Vec<(u32, Distributions, BTreeMap<String, f64>)>,
}

#[derive(Serialize)]
struct CulpritData {
    /// Rank among culprits with equal delay.
    rank: usize,
    word: &'static str,
    who: String,
    name: String,
    cgroup: Option<String>,
    /// Delays by source: slot, number of events, total and maximum delay in nanoseconds.
    by: Vec<(String, Vec<SlotDelay>)>,
}

#[derive(Serialize)]
struct LateData {
    slot: u32,
    source: usize,
    at: i64,
    ns: u64,
    who: String,
    cpu: u32,
    main: String,
    in_order: bool,
    parts: Vec<(u64, &'static str, String)>,
    /// Index of the culprit or -1, kind, name, and nanoseconds.
    causes: Vec<(i64, &'static str, String, u64)>,
    facts: Vec<(String, String)>,
    /// Owner of the stack, and indexes of its frames.
    stacks: Vec<(String, Vec<u32>)>,
}

#[derive(Serialize)]
struct GraphData {
    source: usize,
    title: String,
    /// Names of frames with their colors.
    frames: Vec<(String, &'static str)>,
    /// Indexes of frames, whether the row is idle by design, and nanoseconds by slot.
    rows: Vec<(Vec<u32>, u8, SlotNs)>,
}

/// Indexes of names, which repeat often.
#[derive(Default)]
struct NameTable {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
}

impl NameTable {
    fn index(&mut self, of: &str) -> u32 {
        let of = name(of);
        let next = self.names.len() as u32;
        *self.numbers.entry(of).or_insert_with_key(|of| {
            self.names.push(of.clone());
            next
        })
    }
}

fn safe(labels: &Labels) -> Labels {
    labels.iter().map(|(label, value)| (name(label), name(value))).collect()
}

fn lost(source: &str, counts: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    lost_events(source, counts).map(|(reason, count)| (name(reason), count)).collect()
}

fn buckets(of: &Histogram) -> Vec<u64> {
    if of.is_empty() {
        return Vec::new();
    }
    std::iter::once(of.max_ns()).chain(of.iter().flat_map(|(range, count)| [*range.end(), count])).collect()
}

/// Returns the script element with the data: JSON, compressed if it is large.
///
/// # Errors
/// Fails if memory is exhausted.
pub fn block(report: &Report, command: &str) -> io::Result<String> {
    let json = escaped(&serde_json::to_string(&data(report, command))?);
    if json.len() <= MAX_PLAIN_BYTES {
        return Ok(format!("<script type=\"application/json\" id=\"data\">{json}</script>\n"));
    }
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(json.as_bytes())?;
    Ok(format!("<script type=\"application/gzip\" id=\"packed\">{}</script>\n", STANDARD.encode(packed.finish()?)))
}

/// Escapes what would end the script, start a comment, or be a line terminator in JavaScript.
fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            c => out.push(c),
        }
    }
    out
}

/// Formats a timestamp for `replay`, to the nanosecond.
fn stamp(unix_ns: u64) -> String {
    jiff::Timestamp::from_nanosecond(unix_ns.into()).map_or_else(|_| String::new(), |at| format!("{at:.9}"))
}

fn data<'a>(report: &Report, command: &'a str) -> Data<'a> {
    let axis = Axis::for_report(report);
    let base_ns = report.slots.iter().map(|slot| slot.start_unix_ns).min().unwrap_or(0);
    let mut names = NameTable::default();
    let slots = report.slots.iter().enumerate().map(|(index, slot)| {
        let (from_ns, to_ns) = report.slots.span_unix_ns(index, index);
        let relative = |ns: u64| ns.saturating_sub(base_ns);
        let (x, end) = (axis.x(slot.start_unix_ns), axis.x(slot.end_unix_ns));
        (relative(slot.start_unix_ns), relative(slot.end_unix_ns), x, end, stamp(from_ns), stamp(to_ns))
    });
    let selected = selected_culprits(report);
    let keys: Vec<ActorName> = selected.iter().map(|culprit| key(report, culprit)).collect();
    let whos: Vec<Who<'_>> = selected.iter().zip(&keys).map(|(culprit, name)| (culprit.kind, name)).collect();
    let listed: HashSet<Who<'_>> = whos.iter().copied().collect();
    let mut others: BTreeMap<u32, u64> = BTreeMap::new();
    for (_, slot, ns) in report.culprits.by_slot().filter(|(who, ..)| who.is_none_or(|who| !listed.contains(&who))) {
        others.entry(slot).or_default().add(&ns);
    }
    let mut names_in_order: Vec<Who<'_>> = listed.iter().copied().collect();
    names_in_order.sort_unstable();
    let culprits: Vec<CulpritData> = selected
        .iter()
        .zip(&whos)
        .map(|(culprit, of)| culprit_data(report, culprit, of.1, names_in_order.binary_search(of).unwrap_or(0)))
        .collect();
    let late = late_data(report, &whos, base_ns, &mut names);
    Data {
        schema: SCHEMA,
        base_ns: base_ns.to_string(),
        offsets: offsets(&report.zone, base_ns, report.slots.iter().map(|slot| slot.end_unix_ns).max().unwrap_or(0)),
        has_dates: report.look.duration_ns >= DAY_NS,
        command,
        slots: slots.collect(),
        lost: report.slots.iter().map(|slot| lost(SHARED, &slot.lost)).collect(),
        sources: (0..report.cards.len()).map(|index| source(report, index)).collect(),
        others: others.into_iter().collect(),
        others_count: report.look.culprits.len().saturating_sub(culprits.len()),
        culprits,
        late,
        names: names.names,
        graphs: (0..report.cards.len()).flat_map(|index| graphs(report, index)).collect(),
    }
}

/// Returns the offsets of a time zone: start in nanoseconds since `from_ns`, and seconds ahead of UTC.
fn offsets(zone: &TimeZone, from_ns: u64, to_ns: u64) -> Vec<(u64, i32)> {
    let at = |ns: u64| jiff::Timestamp::from_nanosecond(ns.into());
    let (Ok(first), Ok(last)) = (at(from_ns), at(to_ns)) else { return vec![(0, 0)] };
    let changes = zone.following(first).take_while(|change| change.timestamp() <= last).take(MAX_CHANGES);
    let later = changes.filter_map(|change| {
        let at_ns = u64::try_from(change.timestamp().as_nanosecond()).ok()?;
        Some((at_ns.saturating_sub(from_ns), change.offset().seconds()))
    });
    [(0, zone.to_offset(first).seconds())].into_iter().chain(later).collect()
}

/// Kind and name of a culprit.
type Who<'a> = (CauseKind, &'a ActorName);

/// Returns the name under which a culprit's delays are kept by slot: in each tick, a single thread of a name has its TID.
fn key(report: &Report, culprit: &Culprit) -> ActorName {
    if report.rank_by == By::Name { culprit.who.by_name() } else { culprit.who.clone() }
}

/// Selects the culprits that have data by slot: the worst in total, and the worst of each slot.
fn selected_culprits(report: &Report) -> Vec<&Culprit> {
    let mut by_slot: BTreeMap<u32, HashMap<Who<'_>, u64>> = BTreeMap::new();
    for (who, slot, ns) in report.culprits.by_slot() {
        if let Some(who) = who {
            by_slot.entry(slot).or_default().entry(who).or_default().add(&ns);
        }
    }
    let mut worst: HashSet<Who<'_>> = HashSet::new();
    for of_slot in by_slot.into_values() {
        let mut order: Vec<(Who<'_>, u64)> = of_slot.into_iter().collect();
        order.sort_unstable_by_key(|&(who, ns)| (std::cmp::Reverse(ns), who));
        worst.extend(order.into_iter().take(CULPRITS_OF_SLOT).map(|(who, _)| who));
    }
    let ranked = report.look.culprits.iter().enumerate();
    let is_worst = |culprit: &Culprit| worst.contains(&(culprit.kind, &key(report, culprit)));
    ranked.filter(|(rank, culprit)| *rank < CULPRITS || is_worst(culprit)).map(|(_, of)| of).collect()
}

fn source(report: &Report, index: usize) -> SourceData {
    let card = report.cards[index];
    let measured = report.header.sources.iter().find(|of| of.source == card.name);
    let slots = report.slots.iter().map(|slot| {
        let of = slot.sources[index].as_ref()?;
        let unexplained = of.found.unexplained();
        let (f_late, e_late) = of.found.late_parts();
        Some(SourceSlotData {
            d: of.found.duration_ns,
            f: buckets(of.found.adding()),
            e: buckets(of.found.at_end()),
            late: of.late,
            f_late,
            e_late,
            late_max: of.late_max_ns,
            held: of.held_up,
            held_max: of.held_up_max_ns,
            late_ns: of.late_ns,
            unexplained: (!unexplained.is_none()).then_some((unexplained.events, unexplained.total_ns)),
            has: of.found.has_series(),
            lost: lost(card.name, of.found.lost()),
        })
    });
    let empty = Snapshot::new(card.name, "", "", 0);
    let whole = report.whole[index].as_ref().unwrap_or(&empty);
    // What is known at the end of a slot may be gone at the end of all.
    let of_slots = report.merged.iter().flat_map(|of| &of[index]).flat_map(|of| &of.series);
    let merging = whole.series.iter().chain(of_slots).flat_map(|series| series.values.keys());
    let merging: BTreeMap<String, &'static str> =
        merging.map(|value| (value.clone(), rule((card.merging)(value)))).collect();
    let by_slots = SeriesBySlot::for_source(report, index);
    let (series, is_coarse) = by_slots.first(whole);
    let has_all = series.len() == whole.series.len();
    let judged = card.judged_share.filter(|_| !has_all).map(|of| by_slots.judged(whole, of.value)).unwrap_or_default();
    let found = report.found.iter().find(|found| found.card.name == card.name);
    let remark = found.map(SourceSummary::remark).filter(|remark| !remark.text.is_empty());
    let grouped = added_up(card, whole).map(|(label, by_label)| {
        let values =
            in_order(&by_label).into_iter().take(GROUPS).map(|of| of.labels.get(label).map_or("", String::as_str));
        let columns = Column::all(card, [&by_label]).iter().map(Column::for_script).collect();
        Grouped { label, columns, order: values.map(name).collect() }
    });
    SourceData {
        has_all,
        is_coarse,
        judged,
        remark: remark.map(|of| (of.text.clone(), of.is_late)),
        grouped,
        shares: card.shares,
        name: card.name,
        of: card.judged.of,
        from: card.judged.late_from_ns,
        late_of: card.events.map(|judged| (judged.of, judged.late_from_ns)),
        held_up: card.held_up.map(|judged| (judged.of, judged.late_from_ns)),
        share: card.judged_share.map(|of| (of.value, of.late_from, of.of, of.late)),
        is_nothing: measured.is_some_and(|of| of.nothing.is_some()),
        slots: slots.collect(),
        columns: Column::all(card, report.snapshots(index)).iter().map(Column::for_script).collect(),
        merging,
        series,
    }
}

/// Returns how the script merges a value over slots.
fn rule(merging: Merging) -> &'static str {
    match merging {
        Merging::Sum => "sum",
        Merging::Max => "max",
        Merging::Latest => "latest",
        Merging::LastKnown => "known",
        Merging::OverSpan => "span",
        Merging::OverPresence => "presence",
        Merging::Derived(_) => "derived",
    }
}

/// The series of a source by slot.
struct SeriesBySlot<'a>(Vec<HashMap<&'a Labels, &'a Series>>);

impl<'a> SeriesBySlot<'a> {
    fn for_source(report: &'a Report, index: usize) -> Self {
        let of_slot = |of: &'a Vec<Option<Snapshot>>| {
            of[index].iter().flat_map(|of| &of.series).map(|series| (&series.labels, series)).collect()
        };
        SeriesBySlot(report.merged.iter().map(of_slot).collect())
    }

    /// Returns the data of a series, with its histograms as `buckets` returns them.
    fn series(&self, of: &Series, buckets: impl Fn(&Histogram) -> Vec<u64>) -> SeriesData {
        let of_slots = self.0.iter().zip(0..).filter_map(|(by_labels, slot)| Some((slot, by_labels.get(&of.labels)?)));
        let slots = of_slots.map(|(slot, series)| {
            let histograms = series.histograms.iter().map(|(name, of)| (name.clone(), buckets(of))).collect();
            (slot, histograms, series.values.clone())
        });
        SeriesData { labels: safe(&of.labels), slots: slots.collect() }
    }

    /// Returns the first series in display order, and whether their buckets are coarser, as there would be too many.
    fn first(&self, whole: &Snapshot) -> (Vec<SeriesData>, bool) {
        let all = |buckets: fn(&Histogram) -> Vec<u64>| -> Vec<SeriesData> {
            in_order(whole).into_iter().take(SERIES).map(|of| self.series(of, buckets)).collect()
        };
        let exact = all(buckets);
        if exact.iter().map(SeriesData::size).sum::<usize>() <= MAX_BUCKETS {
            return (exact, false);
        }
        let mut left = MAX_BUCKETS;
        let mut coarse = all(|of| buckets(&of.coarse()));
        coarse.retain(|of| {
            let fits = of.size() <= left;
            left -= if fits { of.size() } else { 0 };
            fits
        });
        (coarse, true)
    }

    /// Returns the value by which a source is judged of all its series, or nothing if there are too many.
    fn judged(&self, whole: &Snapshot, value: &str) -> Vec<SeriesData> {
        let judged = whole.series.iter().filter(|series| series.values.contains_key(value));
        let mut series_data: Vec<SeriesData> = Vec::new();
        let mut left = MAX_BUCKETS;
        for series in judged {
            let mut of = self.series(series, |_| Vec::new());
            for (_, distributions, values) in &mut of.slots {
                distributions.clear();
                values.retain(|name, _| name == value || name == PRESENT);
            }
            of.labels.clear();
            match left.checked_sub(of.size()) {
                Some(rest) => left = rest,
                None => return Vec::new(),
            }
            series_data.push(of);
        }
        series_data
    }
}

impl SeriesData {
    /// Returns the approximate number of values.
    fn size(&self) -> usize {
        self.slots.iter().map(|(_, of, values)| 1 + values.len() + of.values().map(Vec::len).sum::<usize>()).sum()
    }
}

fn culprit_data(report: &Report, culprit: &Culprit, key: &ActorName, rank: usize) -> CulpritData {
    let by = report.culprits.delays_by(culprit.kind, key).into_iter().map(|(source, delays)| {
        let delays = delays.iter().map(|(slot, of)| (*slot, of.events, of.total_ns, of.worst_ns));
        (source.to_owned(), delays.collect())
    });
    CulpritData {
        rank,
        word: how(culprit.kind, &culprit.who),
        who: name(&actor(&culprit.who)),
        name: name(&in_words(culprit.kind, &culprit.who)),
        cgroup: culprit.cgroup.as_ref().filter(|of| of.path != "/").map(|of| name(&of.path)),
        by: by.collect(),
    }
}

fn late_data(report: &Report, culprits: &[Who<'_>], base_ns: u64, names: &mut NameTable) -> Vec<LateData> {
    let known: HashMap<Who<'_>, i64> = culprits.iter().copied().zip(0..).collect();
    let mut order: Vec<&ListedEvent> = report.late.iter().collect();
    order.sort_by_key(|late| std::cmp::Reverse(late.event.latency_ns));
    let (mut left, mut events) = (MAX_LATE_BYTES, Vec::new());
    for late in order {
        let event = &late.event;
        let causes = event.causes.iter().map(|cause| {
            let ranked = report.rank_by.name_of(cause, event);
            let index = known.get(&(cause.kind, &*ranked)).or_else(|| known.get(&(cause.kind, &cause.who)));
            let index = index.copied().unwrap_or(-1);
            (index, how(cause.kind, &cause.who), name(&actor(&cause.who)), cause.ns)
        });
        let stacks = event::stacks(event).into_iter();
        let stacks =
            stacks.map(|stack| (name(&stack.owner), stack.frames.iter().map(|frame| names.index(frame)).collect()));
        let of = LateData {
            slot: late.slot,
            source: report.cards.iter().position(|card| card.name == late.card.name).unwrap_or(0),
            at: event.at_unix_ns as i64 - base_ns as i64,
            ns: event.latency_ns,
            who: name(&event.subject),
            cpu: event.cpu,
            main: main_cause(event),
            in_order: event::is_in_order(event),
            parts: event::parts(event)
                .into_iter()
                .map(|part| (part.ns, part.kind, super::markup::short_sentence(&part.text)))
                .collect(),
            causes: causes.collect(),
            facts: facts(event).into_iter().map(|(what, value)| (name(&what), name(&value))).collect(),
            stacks: stacks.collect(),
        };
        // Approximate size of the JSON.
        let texts = of.parts.iter().map(|part| part.2.len() + 24).sum::<usize>()
            + of.causes.iter().map(|cause| cause.2.len() + 32).sum::<usize>()
            + of.facts.iter().map(|fact| fact.0.len() + fact.1.len() + 8).sum::<usize>()
            + of.stacks.iter().map(|stack| stack.0.len() + 5 * stack.1.len()).sum::<usize>();
        let size = 150 + of.who.len() + of.main.len() + texts;
        if size > left {
            break;
        }
        left -= size;
        events.push(of);
    }
    events
}

fn graphs(report: &Report, index: usize) -> Vec<GraphData> {
    flame::graphs(report, index).iter().map(|graph| graph_data(index, graph)).collect()
}

fn graph_data(source: usize, graph: &Graph) -> GraphData {
    let mut numbers: HashMap<(String, &'static str), u32> = HashMap::new();
    let mut frames = Vec::new();
    let rows = graph.rows.iter().map(|row| {
        let of_row = row.frames.iter().map(|frame| {
            let key = (name(&frame.name), flame::class(frame.kind));
            let next = frames.len() as u32;
            *numbers.entry(key).or_insert_with_key(|key| {
                frames.push(key.clone());
                next
            })
        });
        (of_row.collect(), u8::from(row.is_idle), row.slots.clone())
    });
    let rows = rows.collect();
    GraphData { source, title: graph.title.clone(), frames, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_script_end_and_comments() {
        let json = serde_json::to_string("</script><!--<script>\u{2028}&").expect("a string");
        let text = escaped(&json);
        assert!(!text.contains(['<', '>', '&', '\u{2028}']), "{text}");
        assert_eq!(serde_json::from_str::<String>(&text).expect("the same"), "</script><!--<script>\u{2028}&");
    }

    #[test]
    fn offsets_follow_daylight_saving() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("that of Berlin");
        let at = |text: &str| {
            let at: jiff::Timestamp = text.parse().expect("a time");
            u64::try_from(at.as_nanosecond()).expect("after 1970")
        };
        let (from_ns, to_ns) = (at("2026-10-24T22:00:00Z"), at("2026-10-25T22:00:00Z"));
        assert_eq!(offsets(&zone, from_ns, to_ns), [(0, 7200), (3 * 3_600_000_000_000, 3600)]);
        assert_eq!(offsets(&zone, to_ns, to_ns), [(0, 3600)]);
        assert_eq!(offsets(&TimeZone::UTC, from_ns, to_ns), [(0, 0)]);
    }

    #[test]
    fn buckets_start_with_maximum() {
        let of: Histogram = [5, 5, 100].into_iter().collect();
        assert_eq!(buckets(&of), [100, 5, 2, 103, 1]);
        assert!(buckets(&Histogram::default()).is_empty());
    }
}
