// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fast path for parsing snapshots: takes a third of serde's time, and skips `lost` reasons with a count of 0, of which
//! each snapshot has about twenty.
//!
//! Parses only text formatted exactly as [`crate::Snapshot`] writes it; serde parses the other fields, and any other
//! formatting.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use memchr::memchr;
use memchr::memmem::{self, Finder, FinderRev};

use super::Line;
use crate::histogram::{GROUPING_POWER, Histogram};
use crate::snapshot::{Series, Snapshot};
use crate::sources::named;

const SERIES: &[u8] = b",\"series\":[";
/// Stands in for all series in the text left to serde.
const PLACEHOLDER: &[u8] = b"{\"labels\":{}}";
const LOST: &[u8] = b",\"lost\":{";
/// The field after `lost` in a snapshot.
const AFTER_LOST: &[u8] = b"},\"probe\":{";

static FIRST_SERIES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(SERIES));
static LAST_LOST: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new(LOST));

/// Maximum number of recycled series lists per source, and maximum length of a recycled list.
const MAX_LISTS: usize = 32;
const MAX_SERIES: usize = 1 << 12;

/// Series of snapshots no longer used, by source. Later snapshots are parsed into their memory: they have the same
/// names and nearly the same buckets.
#[derive(Debug, Default)]
pub(super) struct SeriesPool {
    by_source: HashMap<&'static str, Vec<Vec<Series>>>,
}

impl SeriesPool {
    pub(super) fn add(&mut self, snapshot: Snapshot) {
        // A recording from anywhere may have any number of source names.
        let Some(card) = named(&snapshot.source).filter(|_| snapshot.series.capacity() <= MAX_SERIES) else { return };
        let lists = self.by_source.entry(card.name).or_default();
        if lists.len() < MAX_LISTS {
            lists.push(snapshot.series);
        }
    }

    fn take(&mut self, source: &str) -> Vec<Series> {
        self.by_source.get_mut(source).and_then(Vec::pop).unwrap_or_default()
    }
}

/// Parses a line as [`Line::parse`] does, except for `lost` reasons with a count of 0.
///
/// # Errors
/// Fails as [`Line::parse`] does.
pub(super) fn parse(line: &[u8], pool: &mut SeriesPool) -> Result<Line, serde_json::Error> {
    parse_fast(line, pool).map_or_else(|| Line::parse(line), Ok)
}

fn parse_fast(line: &[u8], pool: &mut SeriesPool) -> Option<Line> {
    // A quotation mark within a string is escaped, so a match is the name of a field.
    let begins = FIRST_SERIES.find(line)? + SERIES.len();
    // Only the line's own object is open: this is the snapshot's field, and serde refuses a duplicate.
    if line[1..begins].contains(&b'{') {
        return None;
    }
    let mut text = Cursor(&line[begins..]);
    let mut series = pool.take(source_of(line)?);
    text.series(&mut series)?;
    let mut rest = Vec::with_capacity(begins + PLACEHOLDER.len() + text.0.len());
    rest.extend_from_slice(&line[..begins]);
    if !series.is_empty() {
        rest.extend_from_slice(PLACEHOLDER);
    }
    copy_without_zeros(text.0, &mut rest)?;
    let Ok(Line::Snapshot(mut snapshot)) = Line::parse(&rest) else { return None };
    snapshot.series = series;
    Some(Line::Snapshot(snapshot))
}

/// Returns the source of a snapshot, which precedes its series.
pub(super) fn source_of(line: &[u8]) -> Option<&str> {
    const SOURCE: &[u8] = b",\"source\":\"";
    let begin = memmem::find(line, SOURCE)? + SOURCE.len();
    let length = memchr(b'"', &line[begin..])?;
    std::str::from_utf8(&line[begin..begin + length]).ok()
}

/// Appends the fields after the series, without `lost` reasons of count 0; `None` if the formatting differs.
fn copy_without_zeros(text: &[u8], into: &mut Vec<u8>) -> Option<()> {
    let begins = LAST_LOST.rfind(text)? + LOST.len();
    into.extend_from_slice(&text[..begins]);
    let mut rest = Cursor(&text[begins..]);
    let (mut before, mut is_first) = (None, true);
    while !rest.0.starts_with(b"}") {
        if before.is_some() {
            rest.skip(b",")?;
        }
        let member = rest.0;
        let name = rest.name()?;
        let count = rest.number_after(b":")?;
        // The names are sorted and unique.
        if before.replace(name).is_some_and(|before| before >= name) {
            return None;
        }
        if count > 0 {
            into.extend_from_slice(if is_first { b"" } else { b"," });
            into.extend_from_slice(&member[..member.len() - rest.0.len()]);
            is_first = false;
        }
    }
    if !rest.0.starts_with(AFTER_LOST) {
        return None;
    }
    into.extend_from_slice(rest.0);
    Some(())
}

/// Unparsed rest of a text.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn skip(&mut self, begins: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(begins)?;
        Some(())
    }

    /// Parses a name and an unsigned number as serde formats it.
    pub(super) fn number_after(&mut self, name: &[u8]) -> Option<u64> {
        self.skip(name)?;
        let mut number = 0_u64;
        let mut digits = 0;
        while let Some(digit) = self.0.get(digits).filter(|byte| byte.is_ascii_digit()) {
            number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            digits += 1;
        }
        let has_zero_before = digits > 1 && self.0[0] == b'0';
        self.0 = &self.0[digits..];
        (digits > 0 && !has_zero_before).then_some(number)
    }

    /// Parses a quoted string without escapes.
    fn name(&mut self) -> Option<&'a str> {
        self.skip(b"\"")?;
        let (name, rest) = self.0.split_at(memchr(b'"', self.0)?);
        self.0 = &rest[1..];
        let is_plain = name.iter().all(|&byte| byte >= b' ' && byte != b'\\');
        std::str::from_utf8(name).ok().filter(|_| is_plain)
    }

    /// Parses an object into a map, reusing entries with matching names.
    fn map<T: Default>(
        &mut self,
        map: &mut BTreeMap<String, T>,
        mut value: impl FnMut(&mut Cursor<'a>, &mut T) -> Option<()>,
    ) -> Option<()> {
        self.skip(b"{")?;
        let (mut known, mut is_first) = (map.iter_mut(), true);
        let mut new: Vec<(String, T)> = Vec::new();
        let mut read = 0;
        while self.skip(b"}").is_none() {
            if !is_first {
                self.skip(b",")?;
            }
            is_first = false;
            let name = self.name()?;
            self.skip(b":")?;
            // The names are sorted.
            match known.next().filter(|(known, _)| new.is_empty() && *known == name) {
                Some((_, into)) => {
                    value(self, into)?;
                    read += 1;
                }
                None => {
                    let mut of = T::default();
                    value(self, &mut of)?;
                    new.push((name.to_owned(), of));
                }
            }
        }
        if read < map.len() {
            let mut at = 0;
            map.retain(|_, _| {
                at += 1;
                at <= read
            });
        }
        map.extend(new);
        Some(())
    }

    /// Parses all series up to the closing bracket, replacing those in `all`.
    fn series(&mut self, all: &mut Vec<Series>) -> Option<()> {
        let (mut number, mut buckets) = (0, Vec::new());
        while !self.0.starts_with(b"]") {
            if number > 0 {
                self.skip(b",")?;
            }
            if number == all.len() {
                all.push(Series::default());
            }
            let Series { labels, histograms, steps, values } = &mut all[number];
            number += 1;
            steps.clear();
            self.skip(b"{\"labels\":")?;
            self.map(labels, |text, label| {
                let read = text.name()?;
                if label != read {
                    read.clone_into(label);
                }
                Some(())
            })?;
            match self.skip(b",\"histograms\":") {
                Some(()) => self.map(histograms, |text, of| text.histogram(of, &mut buckets))?,
                None => histograms.clear(),
            }
            values.clear();
            if self.skip(b",\"values\":").is_some() {
                // No value contains a brace.
                let (of_values, rest) = self.0.split_at(memchr(b'}', self.0)? + 1);
                *values = serde_json::from_slice(of_values).ok()?;
                self.0 = rest;
            }
            self.skip(b"}")?;
        }
        all.truncate(number);
        Some(())
    }

    /// Parses a histogram; `buckets` is a reusable buffer.
    fn histogram(&mut self, into: &mut Histogram, buckets: &mut Vec<(u64, u64)>) -> Option<()> {
        self.number_after(b"{\"count\":")?;
        let min_ns = self.number_after(b",\"min_ns\":")?;
        for name in ["mean", "p50", "p90", "p99", "p999"] {
            self.skip(b",\"")?;
            self.skip(name.as_bytes())?;
            self.number_after(b"_ns\":")?;
        }
        let max_ns = self.number_after(b",\"max_ns\":")?;
        let power = match self.skip(b",\"grouping_power\":") {
            Some(()) => self.number_after(b"")?.try_into().ok()?,
            None => GROUPING_POWER,
        };
        let sum_ns = self.number_after(b",\"sum_ns\":")?;
        self.skip(b",\"buckets\":[")?;
        buckets.clear();
        while self.skip(b"]}").is_none() {
            if !buckets.is_empty() {
                self.skip(b",")?;
            }
            let bound = self.number_after(b"[")?;
            buckets.push((bound, self.number_after(b",")?));
            self.skip(b"]")?;
        }
        into.set_from_printed(power, buckets, sum_ns, min_ns, max_ns);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Steps;

    fn name() -> impl Strategy<Value = String> {
        let plain = prop::sample::select(vec!["a", "b", "c", "\u{6f22}", ""]);
        let other = prop::sample::select(vec!["\"", "\\", "\":0,\"b", ",\"lost\":{", "],\"", "\u{1b}"]);
        prop_oneof![60 => plain, 1 => other].prop_map(str::to_owned)
    }

    fn histogram() -> impl Strategy<Value = Histogram> {
        (prop::collection::vec(0u64..1 << 45, 0..5), any::<bool>()).prop_map(|(values, is_fine)| {
            let usual: Histogram = values.iter().copied().collect();
            let fine = values.iter().fold(Histogram::default(), |mut all, &ns| {
                let bucket = crate::histogram::fine_bucket_of(ns) as u32;
                all.merge(&Histogram::from_fine_buckets([(bucket, 1)], ns, ns, ns).expect("a bucket"));
                all
            });
            if is_fine { fine } else { usual }
        })
    }

    fn series() -> impl Strategy<Value = Series> {
        let labels = prop::collection::btree_map(name(), name(), 0..3);
        let histograms = prop::collection::btree_map(name(), histogram(), 0..3);
        let values = prop::collection::btree_map(name(), 0.0..9.0, 0..3);
        (labels, histograms, values, 0..30).prop_map(|(labels, histograms, values, steps)| Series {
            labels,
            histograms,
            steps: if steps == 0 { [("a".to_owned(), Steps::default())].into() } else { BTreeMap::new() },
            values,
        })
    }

    fn snapshot() -> impl Strategy<Value = Snapshot> {
        let lost = prop::collection::btree_map(name(), 0u64..12, 0..6);
        (prop::collection::vec(series(), 0..4), lost, name()).prop_map(|(series, lost, host)| {
            let snapshot = Snapshot::new("wq", "made", &host, 1_000_000_000);
            Snapshot { series, lost, ..snapshot }
        })
    }

    fn text(snapshot: &Snapshot) -> Vec<u8> {
        serde_json::to_vec(snapshot).expect("a snapshot serialises")
    }

    fn without_lost_zeros(mut line: Line) -> Line {
        if let Line::Snapshot(snapshot) = &mut line {
            snapshot.lost.retain(|_, count| *count > 0);
        }
        line
    }

    fn parse_with_serde(text: &[u8]) -> Option<Line> {
        Line::parse(text).ok().map(without_lost_zeros)
    }

    proptest! {
        #[test]
        fn fast_path_parses_like_serde(snapshots in prop::collection::vec(snapshot(), 1..5)) {
            let mut pool = SeriesPool::default();
            for snapshot in snapshots {
                let text = text(&snapshot);
                let read = without_lost_zeros(parse(&text, &mut pool).expect("it is one"));
                prop_assert_eq!(Some(read.clone()), parse_with_serde(&text));
                if let Line::Snapshot(snapshot) = read {
                    pool.add(*snapshot);
                }
            }
        }

        #[test]
        fn damaged_line_parses_like_serde_or_fails(
            (before, snapshot) in (snapshot(), snapshot()), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut pool = SeriesPool::default();
            pool.add(before);
            let mut text = text(&snapshot);
            let at = at.index(text.len());
            text[at] = byte;
            if let Some(read) = parse_fast(&text, &mut pool) {
                prop_assert_eq!(Some(read), parse_with_serde(&text));
            }
        }
    }

    #[test]
    fn fast_path_parses_own_format() {
        let mut snapshot = Snapshot::new("wq", "made", "web1", 1_000_000_000);
        let lost = [("a", 0), ("b", 10), ("c", 0), ("d", 3), ("e", 0)];
        snapshot.lost = lost.map(|(why, count)| (why.to_owned(), count)).into();
        let histograms = [("latency".to_owned(), [1, 70_000].into_iter().collect())];
        let values = [("queued".to_owned(), 3.0)];
        snapshot.series.push(Series { histograms: histograms.into(), values: values.into(), ..Series::default() });
        let read = parse_fast(&text(&snapshot), &mut SeriesPool::default());
        snapshot.lost.retain(|_, count| *count > 0);
        assert_eq!(read, Some(Line::Snapshot(Box::new(snapshot))));
    }

    #[test]
    fn lost_counts_match_serde() {
        let own = String::from_utf8(text(&Snapshot::new("wq", "made", "web1", 1_000_000_000))).expect("it is text");
        for (lost, is_read) in [
            ("{\"a\":1,\"b\":0}", true),
            ("{\"torn\":5,\"torn\":0}", true),
            ("{\"b\":5,\"a\":0}", true),
            ("{\"a\":1,}", false),
            ("{,\"a\":1}", false),
            ("{\"a\":01}", false),
        ] {
            let line = own.replacen("\"lost\":{}", &format!("\"lost\":{lost}"), 1);
            let read = parse(line.as_bytes(), &mut SeriesPool::default()).ok().map(without_lost_zeros);
            assert_eq!((&read, read.is_some()), (&parse_with_serde(line.as_bytes()), is_read), "{lost}");
        }
    }

    #[test]
    fn recycled_memory_leaves_no_stale_data() {
        let series_of = |labels: &[(&str, &str)], histograms: &[(&str, &[u64])], values: &[(&str, f64)]| Series {
            labels: labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            histograms: histograms
                .iter()
                .map(|(name, values)| ((*name).to_owned(), values.iter().copied().collect()))
                .collect(),
            values: values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            ..Series::default()
        };
        let fine = Histogram::from_fine_buckets([(700, 3), (900, 1)], 9_000, 1_000, 4_000).expect("buckets");
        let mut with_more =
            series_of(&[("a", "x"), ("b", "y")], &[("irq", &[1]), ("thread", &[7, 9, 70_000])], &[("v", 1.0)]);
        with_more.histograms.insert("latency".to_owned(), fine);
        let mut with_steps = series_of(&[("a", "z")], &[("irq", &[5])], &[]);
        with_steps.steps.insert("irq".to_owned(), Steps::default());
        let rows = [
            vec![with_more.clone(), with_steps, series_of(&[], &[], &[("v", 2.0)])],
            vec![series_of(&[("b", "y")], &[("thread", &[3])], &[])],
            vec![series_of(&[], &[], &[]), with_more.clone()],
            vec![series_of(
                &[("0", "n"), ("a", "x")],
                &[("a", &[2]), ("latency", &[]), ("thread", &[3, 900])],
                &[("w", 0.5)],
            )],
            vec![],
            vec![with_more],
        ];
        for before in &rows {
            for after in &rows {
                let snapshot = |series: &[Series]| {
                    let series = series.to_vec();
                    Snapshot { series, ..Snapshot::new("wq", "made", "web1", 1_000_000_000) }
                };
                let mut pool = SeriesPool::default();
                pool.add(snapshot(before));
                let has_steps = after.iter().any(|series| !series.steps.is_empty());
                let read = parse_fast(&text(&snapshot(after)), &mut pool);
                let expected = (!has_steps).then(|| Line::Snapshot(Box::new(snapshot(after))));
                assert_eq!(read, expected, "after {before:?}");
            }
        }
    }

    #[test]
    fn nested_series_field_is_not_the_snapshots() {
        for series in [Vec::new(), vec![Series::default()]] {
            let own = text(&Snapshot { series, ..Snapshot::new("wq", "made", "web1", 1_000_000_000) });
            let own = String::from_utf8(own).expect("it is text");
            for inside in ["[]", "[{\"labels\":{}}]", "[{\"labels\":{\"a\":\"b\"}}]"] {
                let nested = own.replacen("{", &format!("{{\"schema\":1,\"x\":{{\"y\":1,\"series\":{inside}}},"), 1);
                let nested = nested.replacen(",\"schema\":1", "", 1);
                assert!(parse_with_serde(nested.as_bytes()).is_some());
                assert_eq!(
                    parse(nested.as_bytes(), &mut SeriesPool::default()).ok(),
                    parse_with_serde(nested.as_bytes()),
                    "{nested}"
                );
            }
        }
        let account = br#"{"line":"account","at":"2026-11-26T10:00:00Z","lost":{"torn":0}}"#;
        assert_eq!(parse(account, &mut SeriesPool::default()).ok(), Line::parse(account).ok());
    }
}
