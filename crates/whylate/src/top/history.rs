// SPDX-License-Identifier: MIT OR Apache-2.0
//! History of recent ticks for `top`, bounded in bytes: summaries and late events stay unpacked, snapshots are
//! compressed with zstd.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _};
use std::ops::Range;

use whylate_model::look::Found;
use whylate_model::recording::{Account, Clock, Gap, Line};
use whylate_model::{Card, LateEvent, Merger, Snapshot};

/// Zstd compression level. Lines are a few kilobytes: a higher level costs more CPU time than the bytes it saves.
const LEVEL: i32 = 1;
/// Maximum size of an unpacked snapshot in bytes, as of a recording's line.
const LONGEST: u64 = 64 << 20;
/// Estimated heap bytes of a late event per byte of its JSON.
const EXPANSION: usize = 4;
/// Allocator overhead per allocation, in bytes.
const ALLOCATED: usize = 16;
/// Heap fragmentation: 1/`HOLES` of the bytes kept for hours (measured with `make bench-top`).
const HOLES: usize = 16;
/// Bytes of the compression buffers that are kept for the next snapshot.
const MOST_PACKING: usize = 1 << 20;
/// Maximum number of gaps kept per tick.
const GAPS: usize = 100;
/// Block lengths in ticks, the longest first. Blocks are merged once, so that a new tick does not merge an hour anew.
const BLOCKS: [u64; 2] = [256, 16];

/// One snapshot of every source.
#[derive(Debug)]
pub struct Moment {
    /// Sequence number from 0; evicted ticks count.
    pub number: u64,
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    pub found: Vec<Found<'static>>,
    pub late: Vec<(&'static Card, LateEvent)>,
    /// Losses that no single source accounts for.
    pub lost: BTreeMap<String, u64>,
    /// Gaps before the tick's end, and its clock readings, as recorded.
    gaps: Vec<Gap>,
    clock: Option<Clock>,
    packed: Vec<(&'static Card, Box<[u8]>)>,
    /// Sources whose stacks name processes.
    of_programs: Vec<&'static Card>,
    bytes: usize,
}

impl Moment {
    /// Returns whether the source recorded stacks of processes.
    pub fn has_programs(&self, card: &Card) -> bool {
        self.of_programs.iter().any(|of| of.name == card.name)
    }

    /// Returns the source's summary.
    pub fn of(&self, card: &Card) -> Option<&Found<'static>> {
        self.found.iter().find(|found| found.card.name == card.name)
    }

    /// Iterates over the source's late events.
    pub fn late_of(&self, card: &Card) -> impl Iterator<Item = &LateEvent> {
        self.late.iter().filter(move |(of, _)| of.name == card.name).map(|(_, event)| event)
    }

    /// Unpacks the source's snapshot, without its late events.
    pub fn snapshot(&self, card: &Card) -> Option<Snapshot> {
        let (_, packed) = self.packed.iter().find(|(of, _)| of.name == card.name)?;
        unpack(packed)
    }

    /// Returns the tick as lines of a recording.
    pub fn lines(&self) -> Vec<Line> {
        let snapshots = self.packed.iter().filter_map(|(card, _)| {
            let late = self.late_of(card).cloned().collect();
            Some(Line::Snapshot(Box::new(Snapshot { late, ..self.snapshot(card)? })))
        });
        let account = Account { at_unix_ns: self.end_unix_ns, lost: self.lost.clone() };
        let others = self.gaps.iter().cloned().map(Line::Gap).chain(self.clock.map(Line::Clock));
        others.chain(snapshots).chain((!self.lost.is_empty()).then_some(Line::Account(account))).collect()
    }

    /// Returns whether time or data before the tick's end is missing.
    pub fn has_gap(&self) -> bool {
        !self.gaps.is_empty()
    }
}

/// Reused compressor and buffers. Allocating them per snapshot would fragment the heap between the packed snapshots.
struct Packing {
    compressor: zstd::bulk::Compressor<'static>,
    text: Vec<u8>,
    packed: Vec<u8>,
}

thread_local! {
    static PACKING: RefCell<Option<Packing>> = const { RefCell::new(None) };
}

fn pack(snapshot: &Snapshot) -> io::Result<Box<[u8]>> {
    PACKING.with_borrow_mut(|packing| {
        let Packing { compressor, text, packed } = match packing {
            Some(packing) => packing,
            None => {
                let compressor = zstd::bulk::Compressor::new(LEVEL)?;
                packing.insert(Packing { compressor, text: Vec::new(), packed: Vec::new() })
            }
        };
        text.clear();
        packed.clear();
        serde_json::to_writer(&mut *text, snapshot)?;
        packed.reserve(zstd::zstd_safe::compress_bound(text.len()));
        compressor.compress_to_buffer(text, packed)?;
        let kept = packed.as_slice().into();
        text.shrink_to(MOST_PACKING);
        packed.shrink_to(MOST_PACKING);
        Ok(kept)
    })
}

fn unpack(packed: &[u8]) -> Option<Snapshot> {
    let mut text = Vec::new();
    zstd::Decoder::new(packed).ok()?.take(LONGEST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Blocks take at most 1/`MOST_BLOCKS` of the history's bytes.
const MOST_BLOCKS: usize = 8;

/// Merged snapshots by source name, block length, and block number; `None` if the source has none in the block.
type Blocks = BTreeMap<(&'static str, u64, u64), Option<Box<[u8]>>>;

fn bytes_of(blocks: &Blocks) -> usize {
    let bytes = blocks.values().flatten().map(|packed| packed.len()).sum::<usize>();
    bytes + blocks.len() * (ALLOCATED + size_of::<(&str, u64, u64)>())
}

/// Ticks in time order. The oldest ones are evicted.
#[derive(Debug)]
pub struct History {
    moments: VecDeque<Moment>,
    /// Cache of merged blocks whose ticks are still in the history.
    blocks: RefCell<Blocks>,
    bytes: usize,
    most_bytes: usize,
    next: u64,
}

impl History {
    /// Creates an empty history of at most `most_bytes`.
    pub fn of(most_bytes: usize) -> Self {
        History { moments: VecDeque::new(), blocks: RefCell::default(), bytes: 0, most_bytes, next: 0 }
    }

    /// Appends a tick and evicts the oldest ones beyond the byte limit.
    ///
    /// # Errors
    /// If compressing or serializing a snapshot fails.
    pub fn add(&mut self, lines: Vec<Line>) -> io::Result<()> {
        let mut moment = Moment {
            number: self.next,
            start_unix_ns: u64::MAX,
            end_unix_ns: 0,
            found: Vec::new(),
            late: Vec::new(),
            lost: BTreeMap::new(),
            gaps: Vec::new(),
            clock: None,
            packed: Vec::new(),
            of_programs: Vec::new(),
            bytes: size_of::<Moment>(),
        };
        for line in lines {
            match line {
                Line::Snapshot(snapshot) => moment.take(*snapshot)?,
                Line::Account(account) => {
                    for (reason, count) in account.lost {
                        let lost = moment.lost.entry(reason).or_default();
                        *lost = lost.saturating_add(count);
                    }
                }
                Line::Gap(gap) => {
                    moment.bytes += size_of::<Gap>() + gap.reason.len();
                    // A gap without a duration counts dropped data: it is also a loss. Other gaps are spans of time.
                    if gap.duration_ns == 0 && gap.count > 0 {
                        let lost = moment.lost.entry(gap.reason.clone()).or_default();
                        *lost = lost.saturating_add(gap.count);
                    }
                    if moment.gaps.len() < GAPS {
                        moment.gaps.push(gap);
                    }
                }
                Line::Clock(clock) => moment.clock = Some(clock),
                _ => {}
            }
        }
        moment.bytes += moment.lost.keys().map(|reason| reason.len() + size_of::<(String, u64)>()).sum::<usize>();
        if moment.found.is_empty() {
            return Ok(());
        }
        moment.found.shrink_to_fit();
        moment.late.shrink_to_fit();
        moment.packed.shrink_to_fit();
        self.next += 1;
        self.bytes += moment.bytes;
        self.moments.push_back(moment);
        // The newest tick is always kept, whatever its size.
        let of_blocks = bytes_of(self.blocks.get_mut());
        let with_holes = |bytes: usize| bytes + bytes / HOLES;
        while with_holes(self.bytes + of_blocks) > self.most_bytes && self.moments.len() > 1 {
            self.bytes -= self.moments.pop_front().map_or(0, |oldest| oldest.bytes);
        }
        let forgotten = self.forgotten();
        self.blocks.get_mut().retain(|&(_, length, number), _| number * length >= forgotten);
        Ok(())
    }

    /// Removes all ticks.
    pub fn clear(&mut self) {
        self.moments.clear();
        self.blocks.get_mut().clear();
        self.bytes = 0;
    }

    /// Returns the number of evicted ticks.
    pub fn forgotten(&self) -> u64 {
        self.next - self.moments.len() as u64
    }

    /// Returns the tick with that sequence number, unless it was evicted.
    pub fn get(&self, number: u64) -> Option<&Moment> {
        self.moments.get(self.place(number)?)
    }

    fn place(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.forgotten())?).ok().filter(|&place| place < self.moments.len())
    }

    /// Returns the sequence number of the newest tick.
    pub fn newest(&self) -> Option<u64> {
        self.moments.back().map(|moment| moment.number)
    }

    /// Returns the sequence numbers of the ticks in the `window_ns` that end with tick `newest`.
    pub fn window(&self, newest: u64, window_ns: u64) -> Range<u64> {
        let Some(place) = self.place(newest) else { return 0..0 };
        let from_ns = self.moments[place].end_unix_ns.saturating_sub(window_ns);
        let (mut inside, mut begins_ns) = (0, u64::MAX);
        for moment in self.moments.range(..=place).rev() {
            // Tick lengths vary: a tick counts if its middle is inside. Ticks before a backward step of the clock
            // are excluded.
            let middle_ns = moment.start_unix_ns / 2 + moment.end_unix_ns / 2;
            if inside > 0 && (middle_ns < from_ns || moment.start_unix_ns > begins_ns) {
                break;
            }
            begins_ns = moment.start_unix_ns;
            inside += 1;
        }
        newest + 1 - inside..newest + 1
    }

    /// Iterates over the ticks of the window that were not evicted.
    pub fn within(&self, window: &Range<u64>) -> impl DoubleEndedIterator<Item = &Moment> + ExactSizeIterator {
        let place = |number: u64| {
            let place = usize::try_from(number.saturating_sub(self.forgotten())).unwrap_or(usize::MAX);
            place.min(self.moments.len())
        };
        self.moments.range(place(window.start)..place(window.end).max(place(window.start)))
    }

    /// Merges the source's snapshots in the window into one, without late events.
    pub fn merged(&self, window: &Range<u64>, card: &Card) -> Option<Snapshot> {
        self.merge(window.start.max(self.forgotten())..window.end.min(self.next), card, &BLOCKS)
    }

    /// Merges ticks that are all in the history, by cached blocks of these lengths.
    fn merge(&self, window: Range<u64>, card: &Card, blocks: &[u64]) -> Option<Snapshot> {
        let mut merger = Merger::default();
        let mut at = window.start;
        while at < window.end {
            let fits = |length: u64| at.is_multiple_of(length) && window.end - at >= length;
            let (length, snapshot) = match blocks.iter().position(|&length| fits(length)) {
                Some(place) => (blocks[place], self.block(at / blocks[place], card, &blocks[place..])),
                None => (1, self.get(at).and_then(|moment| moment.snapshot(card))),
            };
            snapshot.into_iter().for_each(|snapshot| merger.add(snapshot));
            at += length;
        }
        merger.take()
    }

    /// Returns the block of length `blocks[0]` from the cache, or merges it from shorter blocks and caches it.
    fn block(&self, number: u64, card: &Card, blocks: &[u64]) -> Option<Snapshot> {
        let (&length, shorter) = blocks.split_first()?;
        let key = (card.name, length, number);
        if let Some(packed) = self.blocks.borrow().get(&key) {
            return packed.as_deref().and_then(unpack);
        }
        let snapshot = self.merge(number * length..(number + 1) * length, card, shorter);
        // If compression fails or the cache is full, the block is merged again next time.
        let mut known = self.blocks.borrow_mut();
        if bytes_of(&known) <= self.most_bytes / MOST_BLOCKS
            && let Ok(packed) = snapshot.as_ref().map(pack).transpose()
        {
            known.insert(key, packed);
        }
        drop(known);
        snapshot
    }
}

impl Moment {
    fn take(&mut self, mut snapshot: Snapshot) -> io::Result<()> {
        let Some(card) = whylate_model::sources::named(&snapshot.source) else { return Ok(()) };
        let late = std::mem::take(&mut snapshot.late);
        self.start_unix_ns = self.start_unix_ns.min(snapshot.start_unix_ns);
        self.end_unix_ns = self.end_unix_ns.max(snapshot.start_unix_ns.saturating_add(snapshot.duration_ns));
        let packed = pack(&snapshot)?;
        self.bytes += packed.len() + size_of::<(&Card, Box<[u8]>)>() + ALLOCATED;
        self.packed.push((card, packed));
        if snapshot.stacks.iter().any(|stack| stack.labels.contains_key("process")) {
            self.of_programs.push(card);
        }
        let found = Found::of_part(card, &mut snapshot);
        self.bytes += found.heap_bytes();
        self.found.push(found);
        for event in late {
            self.bytes += serde_json::to_vec(&event)?.len() * EXPANSION + size_of::<LateEvent>();
            self.late.push((card, event));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::sources::WQ;
    use whylate_model::{Cause, CauseKind, Series};

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn moment(second: u64, late: usize) -> Vec<Line> {
        let mut snapshot = Snapshot::new(WQ.name, "made", "web1", second * SECOND_NS);
        snapshot.duration_ns = SECOND_NS;
        snapshot.series.push(Series {
            labels: [("handler".to_owned(), "vmstat_update".to_owned())].into(),
            histograms: [("latency".to_owned(), [1_000, 2_000].into_iter().collect())].into(),
            ..Series::default()
        });
        let causes = vec![Cause::new(CauseKind::Work, "hog", 20_000_000)];
        snapshot.late = vec![LateEvent { latency_ns: 20_000_000, causes, ..LateEvent::default() }; late];
        vec![Line::Snapshot(Box::new(snapshot))]
    }

    #[test]
    fn a_window_is_what_ends_with_a_moment() {
        let mut history = History::of(1 << 20);
        (0..20).for_each(|second| history.add(moment(second, 1)).expect("memory"));
        assert_eq!(history.window(9, 5 * SECOND_NS), 5..10);
        assert_eq!((history.window(2, 60 * SECOND_NS), history.window(99, 1)), (0..3, 0..0));
        assert_eq!(history.window(7, 0), 7..8);
        let merged = history.merged(&(5..10), &WQ).expect("a snapshot");
        assert_eq!((merged.duration_ns, merged.total("latency").count()), (5 * SECOND_NS, 10));
        let lines = history.get(3).expect("it is there").lines();
        assert!(matches!(&lines[..], [Line::Snapshot(snapshot)] if snapshot.late.len() == 1), "{lines:?}");
    }

    #[test]
    fn a_span_that_is_merged_by_blocks_has_every_moment_once() {
        let mut history = History::of(1 << 20);
        (0..700).for_each(|second| history.add(moment(second, 0)).expect("memory"));
        let one_by_one = |window: &Range<u64>| history.merge(window.clone(), &WQ, &[]);
        for window in [0..700, 0..1, 1..700, 5..21, 16..32, 15..33, 255..513, 300..300, 690..900] {
            let window = window.start..window.end.min(700);
            for _ in 0..2 {
                assert_eq!(history.merged(&window, &WQ), one_by_one(&window), "{window:?}");
            }
        }
        assert!(!history.blocks.borrow().is_empty());
        // Evicted ticks are in no block.
        let mut small = History::of(100_000);
        for second in 0..2_000 {
            small.add(moment(second, 3)).expect("memory");
            let merged = small.merged(&(0..second + 1), &WQ).expect("a snapshot");
            assert_eq!(merged.duration_ns, small.moments.len() as u64 * SECOND_NS);
        }
        assert!(small.blocks.borrow().len() <= small.moments.len() / 16);
    }

    #[test]
    fn what_was_before_the_clock_was_set_back_is_not_of_this_time() {
        let mut history = History::of(1 << 20);
        let seconds = [1_000, 1_001, 1_002, 500, 501];
        seconds.into_iter().for_each(|second| history.add(moment(second, 0)).expect("memory"));
        assert_eq!(history.window(4, 60 * SECOND_NS), 3..5);
    }

    #[test]
    fn what_is_missing_is_kept_and_what_was_too_much_is_lost() {
        let mut history = History::of(1 << 20);
        let gap = |duration_ns, reason: &str| {
            Line::Gap(Gap { start_unix_ns: 0, duration_ns, reason: reason.to_owned(), count: 7 })
        };
        let gaps = [gap(SECOND_NS, "suspended"), gap(0, "late_events")];
        history.add(gaps.into_iter().chain(moment(1, 0)).collect()).expect("memory");
        let moment = history.get(0).expect("it is there");
        assert_eq!((moment.has_gap(), &moment.lost), (true, &[("late_events".to_owned(), 7)].into()));
        assert_eq!(moment.lines().iter().filter(|line| matches!(line, Line::Gap(_))).count(), 2);
    }

    #[test]
    fn the_oldest_are_forgotten_where_there_is_no_room() {
        let mut history = History::of(100_000);
        for second in 0..2_000 {
            history.add(moment(second, 3)).expect("memory");
            assert!(history.bytes <= 100_000);
        }
        assert!(history.forgotten() > 1_000 && history.newest() == Some(1_999));
        assert!(history.get(0).is_none() && history.get(1_999).is_some());
        assert_eq!(history.moments.len() as u64 + history.forgotten(), 2_000);
        // A tick above the byte limit is still shown.
        history.add(moment(2_000, 5_000)).expect("memory");
        assert_eq!(history.moments.len(), 1);
    }
}
