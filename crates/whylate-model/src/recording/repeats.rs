// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fast path for the stacks of snapshots, most of which repeat: threads that sleep where they slept a second ago.
//!
//! A day's recording consists almost entirely of such stacks. Their text is compared with that of earlier stacks, and
//! only the numbers are parsed; any formatting that differs from that of [`crate::Snapshot`] is left to serde. The rest
//! of a snapshot is parsed by [`super::quick`].

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use memchr::memchr;
use memchr::memmem::{self, Finder};

use super::Line;
use super::credible::is_credible_stack;
use super::quick::{Cursor, SeriesPool, parse, source_of};
use crate::sources::named;
use crate::{Histogram, Snapshot, Stack};

/// Maximum number of cached stacks, and maximum size of their text; the cache is then cleared.
const MAX_STACKS: usize = 10_000;
const MAX_TEXT_BYTES: usize = 64 << 20;
/// Search range around a stack's index in the previous snapshot, as some stacks may be gone.
const SEARCH_RANGE: usize = 8;
/// Maximum length of a cached stack, far above that of the deepest stack; serde parses snapshots with longer ones.
const MAX_STACK_BYTES: usize = 1 << 20;

const STACKS: &[u8] = b"],\"stacks\":[";
const SAMPLES: &[u8] = b",\"samples\":";
const WEIGHT: &[u8] = b",\"weight_ns\":";
const WAITS: &[u8] = b",\"waits\":";
const AGE: &[u8] = b",\"age\":";
/// Stands in for all stacks in the text left to serde.
const PLACEHOLDER: &[u8] = b"{\"labels\":{},\"samples\":0,\"weight_ns\":0}";

static BEGIN_STACKS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(STACKS));
static BEGIN_FIGURES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(SAMPLES));

/// A cached stack.
#[derive(Debug)]
pub struct CachedStack {
    /// Unique number, counted from 0.
    pub number: usize,
    /// The stack without its figures.
    pub stack: Stack,
    /// Whether the caller needs the stack's age.
    has_age: bool,
    /// Text before the figures.
    head: Arc<[u8]>,
    /// Text after the figures, and the offset of the age in it.
    tail: Vec<u8>,
    age_at: usize,
}

/// Cached stacks of one source.
#[derive(Default)]
struct SourceStacks {
    /// Stacks by the text before the figures.
    by_head: HashMap<Arc<[u8]>, Vec<Arc<CachedStack>>>,
    /// The stacks of the last snapshot, in order.
    last: Vec<Arc<CachedStack>>,
}

/// Figures of a cached stack in one snapshot.
#[derive(Clone, Debug)]
pub struct Repeated {
    /// The stack.
    pub place: Arc<CachedStack>,
    /// Samples, as in [`Stack`].
    pub samples: u64,
    /// Weight in nanoseconds, as in [`Stack`].
    pub weight_ns: u64,
    /// Waits, as in [`Stack`].
    pub waits: u64,
}

/// A snapshot with its stacks as references to cached ones.
#[derive(Debug)]
pub struct Repeating {
    /// The snapshot; its `stacks` are only those with a needed age.
    pub snapshot: Box<Snapshot>,
    /// All stacks, in order.
    pub stacks: Vec<Repeated>,
}

/// Cache of stacks by their text.
pub struct Repeats {
    asks_for_age: fn(&str, &Stack) -> bool,
    by_source: HashMap<String, SourceStacks>,
    pool: SeriesPool,
    known: usize,
    bytes: usize,
    next: usize,
}

impl Repeats {
    /// Creates an empty cache. `asks_for_age(source, stack)` returns whether a stack's age is needed.
    pub fn new(asks_for_age: fn(&str, &Stack) -> bool) -> Self {
        Repeats { asks_for_age, by_source: HashMap::new(), pool: SeriesPool::default(), known: 0, bytes: 0, next: 0 }
    }

    /// Parses any line as [`Line::parse`] does, but may omit `lost` reasons with a count of 0.
    ///
    /// # Errors
    /// Fails as [`Line::parse`] does.
    pub fn parse(&mut self, line: &[u8]) -> Result<Line, serde_json::Error> {
        parse(line, &mut self.pool)
    }

    /// Recycles a snapshot that is no longer used.
    pub fn use_again(&mut self, snapshot: Snapshot) {
        self.pool.add(snapshot);
    }

    /// Parses the line of a snapshot with stacks; `None` for any other line, and for one that serde has to parse.
    pub fn read(&mut self, line: &[u8]) -> Option<Repeating> {
        // A quotation mark within a string is escaped, so a match is the name of a field.
        let begin = BEGIN_STACKS.find(line)? + STACKS.len();
        // A recording from anywhere may have any number of source names.
        let source = named(source_of(line)?)?.name;
        let (mut stacks, mut aged) = (Vec::new(), Vec::new());
        let (mut at, mut expected) = (begin, 0);
        loop {
            let text = &line[at..];
            let hit = match self.lookup(source, text, &mut expected) {
                Some(hit) => hit,
                None => {
                    self.learn(source, text)?;
                    self.lookup(source, text, &mut expected)?
                }
            };
            let (repeated, age, length) = hit;
            if repeated.place.has_age {
                let age = age.map_or(Ok(Histogram::default()), serde_json::from_slice).ok()?;
                let Repeated { samples, weight_ns, waits, .. } = repeated;
                aged.push(Stack { samples, weight_ns, waits, age, ..repeated.place.stack.clone() });
            }
            stacks.push(repeated);
            at += length;
            match line.get(at)? {
                b',' => at += 1,
                b']' => break,
                _ => return None,
            }
        }
        let rest = [&line[..begin], PLACEHOLDER, &line[at..]].concat();
        let Ok(Line::Snapshot(mut snapshot)) = self.parse(&rest) else { return None };
        // Then the match was a field of another object.
        if snapshot.stacks != [Stack::default()] || snapshot.source != source {
            return None;
        }
        snapshot.stacks = aged;
        if let Some(of) = self.by_source.get_mut(source) {
            of.last.clear();
            of.last.extend(stacks.iter().map(|of: &Repeated| Arc::clone(&of.place)));
        }
        Some(Repeating { snapshot, stacks })
    }

    /// Looks up the cached stack that `text` starts with; returns its figures, the text of its age, and the length of
    /// its text. Most stacks keep their order from the previous snapshot: `expected` is the index of this one there.
    fn lookup<'a>(
        &self,
        source: &str,
        text: &'a [u8],
        expected: &mut usize,
    ) -> Option<(Repeated, Option<&'a [u8]>, usize)> {
        let cached = self.by_source.get(source)?;
        let of_place = |place: &Arc<CachedStack>| {
            let figures = text.strip_prefix(&*place.head)?;
            let Figures { samples, weight_ns, waits, age, length } = place.figures_in(figures)?;
            let repeated = Repeated { place: Arc::clone(place), samples, weight_ns, waits };
            Some((repeated, age, place.head.len() + length))
        };
        for at in *expected..*expected + SEARCH_RANGE {
            if let Some(known) = cached.last.get(at).and_then(of_place) {
                *expected = at + 1;
                return Some(known);
            }
        }
        cached.by_head.get(&text[..BEGIN_FIGURES.find(text)?])?.iter().find_map(of_place)
    }

    /// Caches the stack that `text` starts with; `None` if it is too long or its formatting differs.
    fn learn(&mut self, source: &str, text: &[u8]) -> Option<()> {
        let stack: Stack = serde_json::Deserializer::from_slice(text).into_iter().next()?.ok()?;
        if !is_credible_stack(&stack) {
            return None;
        }
        let age = Histogram::default();
        let place = Stack { samples: 0, weight_ns: 0, waits: 0, age, waits_for: None, object: None, ..stack };
        let [without, with_age] = [Histogram::default(), Histogram::from_iter([1])]
            .map(|age| serde_json::to_vec(&Stack { age, ..place.clone() }));
        let (without, with_age) = (without.ok()?, with_age.ok()?);
        let head = memmem::find(&without, SAMPLES)?;
        let mut figures = Cursor(&without[head..]);
        figures.number_after(SAMPLES)?;
        figures.number_after(WEIGHT)?;
        let behind = without.len() - figures.0.len();
        let place = CachedStack {
            number: self.next,
            has_age: (self.asks_for_age)(source, &place),
            head: without[..head].into(),
            tail: without[behind..].to_vec(),
            age_at: memmem::find(&with_age, AGE)? - behind,
            stack: place,
        };
        // Text that is formatted differently would never be found.
        if !text.starts_with(&without[..head]) || place.figures_in(&text[head..]).is_none() {
            return None;
        }
        if without.len() > MAX_STACK_BYTES {
            return None;
        }
        if self.known >= MAX_STACKS || self.bytes >= MAX_TEXT_BYTES {
            self.by_source.clear();
            (self.known, self.bytes) = (0, 0);
        }
        (self.known, self.next) = (self.known + 1, self.next + 1);
        self.bytes += without.len();
        let of_source = self.by_source.entry(source.to_owned()).or_default();
        of_source.by_head.entry(Arc::clone(&place.head)).or_default().push(Arc::new(place));
        Some(())
    }
}

/// Figures at the end of a stack's text.
struct Figures<'a> {
    samples: u64,
    weight_ns: u64,
    waits: u64,
    age: Option<&'a [u8]>,
    /// Length of the text from the figures on.
    length: usize,
}

impl CachedStack {
    /// Parses the figures at the start of `text`, if the text after them is that of this stack.
    fn figures_in<'a>(&self, text: &'a [u8]) -> Option<Figures<'a>> {
        let mut rest = Cursor(text);
        let (samples, weight_ns) = (rest.number_after(SAMPLES)?, rest.number_after(WEIGHT)?);
        let waits = if rest.0.starts_with(WAITS) { rest.number_after(WAITS)? } else { 0 };
        rest.skip(&self.tail[..self.age_at])?;
        let mut age = None;
        if rest.skip(AGE).is_some() {
            // A histogram contains no object.
            let (of_age, behind) = rest.0.split_at(memchr(b'}', rest.0)? + 1);
            (age, rest.0) = (Some(of_age), behind);
        }
        rest.skip(&self.tail[self.age_at..])?;
        Some(Figures { samples, weight_ns, waits, age, length: text.len() - rest.0.len() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wait::{Wait, WaitClass};
    use crate::{Series, Waker, WokenBy};

    fn name() -> impl Strategy<Value = String> {
        prop::sample::select(vec![
            "a",
            "\"",
            "\\",
            "\\\",\"samples\":1",
            "],\"stacks\":[",
            "}",
            "\u{1b}[31m",
            "\u{6f22}",
        ])
        .prop_map(str::to_owned)
    }

    fn stack() -> impl Strategy<Value = Stack> {
        let figures = (0_u64..4, 0_u64..u64::MAX, 0_u64..2, prop::collection::vec(1_u64..1 << 40, 0..3));
        let place = (name(), name(), prop::collection::vec(name(), 0..3), any::<[bool; 3]>());
        (figures, place).prop_map(
            |((samples, weight_ns, waits, ages), (label, state, frames, [waits_is, waker, user]))| Stack {
                labels: [("process".to_owned(), label)].into(),
                state,
                samples,
                weight_ns,
                waits,
                wait: waits_is.then(|| Wait { class: WaitClass::Lock, rule: "a futex".to_owned() }),
                age: ages.into_iter().collect(),
                user: if user { frames.clone() } else { Vec::new() },
                kernel: frames,
                waker: waker.then(|| Waker { by: WokenBy::Interrupt, ..Waker::default() }),
                waits_for: None,
                object: None,
            },
        )
    }

    fn line(stacks: Vec<Stack>) -> (Snapshot, Vec<u8>) {
        let mut snapshot = Snapshot::new("offcpu", "sample", "a host", 1_000_000_000);
        snapshot.series.push(Series::default());
        let snapshot = Snapshot { stacks, ..snapshot };
        let text = serde_json::to_vec(&Line::Snapshot(Box::new(snapshot.clone()))).expect("a line serialises");
        (snapshot, text)
    }

    /// Returns the snapshot with all its stacks.
    fn whole(read: Repeating) -> Snapshot {
        let mut aged = read.snapshot.stacks.into_iter();
        let stacks = read.stacks.iter().map(|of| {
            let Repeated { samples, weight_ns, waits, .. } = *of;
            let age = aged.next().map(|stack| stack.age).unwrap_or_default();
            Stack { samples, weight_ns, waits, age, ..of.place.stack.clone() }
        });
        let stacks = stacks.collect();
        Snapshot { stacks, ..*read.snapshot }
    }

    proptest! {
        #[test]
        fn repeated_stacks_parse_like_new_ones(snapshots in prop::collection::vec(prop::collection::vec(stack(), 1..6), 1..5)) {
            let mut repeats = Repeats::new(|_, _| true);
            for stacks in snapshots {
                let (snapshot, text) = line(stacks);
                let read = repeats.read(&text);
                prop_assert_eq!(read.map(whole), Some(snapshot));
            }
        }

        #[test]
        fn damaged_line_parses_like_serde_or_fails(
            stacks in prop::collection::vec(stack(), 1..4), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let mut repeats = Repeats::new(|_, _| true);
            let (_, mut text) = line(stacks);
            repeats.read(&text);
            let at = at.index(text.len());
            text[at] = byte;
            if let Some(read) = repeats.read(&text) {
                match Line::parse(&text) {
                    Ok(Line::Snapshot(snapshot)) => prop_assert_eq!(whole(read), *snapshot),
                    other => prop_assert!(false, "{other:?}"),
                }
            }
        }
    }

    #[test]
    fn parses_ages_only_if_needed() {
        let stack = |state: &str| Stack { state: state.to_owned(), age: [7].into_iter().collect(), ..Stack::default() };
        let mut repeats = Repeats::new(|source, stack| source == "offcpu" && stack.state == "D");
        let (_, text) = line(vec![stack("S"), stack("D"), stack("S")]);
        for _ in 0..2 {
            let read = repeats.read(&text).expect("as it is written");
            let places: Vec<usize> = read.stacks.iter().map(|of| of.place.number).collect();
            assert_eq!((places, read.snapshot.stacks), (vec![0, 1, 0], vec![stack("D")]));
        }
    }

    #[test]
    fn cache_size_is_bounded() {
        let mut repeats = Repeats::new(|_, _| false);
        let named = |name: String| line(vec![Stack { samples: 1, kernel: vec![name], ..Stack::default() }]).1;
        assert!(repeats.read(&named("f".repeat(MAX_STACK_BYTES))).is_none());
        for number in 0..200 {
            assert!(repeats.read(&named(format!("{number}{}", "f".repeat(700_000)))).is_some());
            assert!(repeats.bytes < MAX_TEXT_BYTES + MAX_STACK_BYTES, "{number}");
        }
        assert!(repeats.known < 100, "it has restarted");
    }

    #[test]
    fn leaves_other_formatting_to_serde() {
        let mut repeats = Repeats::new(|_, _| false);
        let (_, text) = line(vec![Stack { samples: 1, ..Stack::default() }]);
        let text = String::from_utf8(text).expect("JSON is text");
        assert!(repeats.read(text.as_bytes()).is_some());
        for (from, to) in [
            ("\"samples\":1", "\"samples\": 1"),
            ("\"samples\":1", "\"samples\":01"),
            ("\"samples\":1", "\"samples\":99999999999999999999"),
            ("\"stacks\":[{", "\"stacks\":[ {"),
            ("\"stacks\":[{", "\"stacks\":[{\"new\":1,"),
            ("}],\"lost\"", "},],\"lost\""),
        ] {
            assert!(text.contains(from), "{text}");
            assert!(repeats.read(text.replace(from, to).as_bytes()).is_none(), "{from} {to}");
        }
        let nested =
            text.replace("],\"stacks\":[", "],\"new\":{\"a\":[],\"stacks\":[").replace("}],\"lost\"", "}]},\"lost\"");
        assert!(Line::parse(nested.as_bytes()).is_ok() && repeats.read(nested.as_bytes()).is_none(), "{nested}");
        let (_, without) = line(Vec::new());
        assert!(repeats.read(&without).is_none());
    }
}
