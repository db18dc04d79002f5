// SPDX-License-Identifier: MIT OR Apache-2.0
//! History of recent ticks for `top`, bounded in bytes: summaries and late events stay unpacked, snapshots are
//! compressed with zstd.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read as _};
use std::ops::Range;

use whylate_model::overview::SourceSummary;
use whylate_model::recording::{Account, Clock, Gap, Kept, Line};
use whylate_model::{Card, LateEvent, Merger, Snapshot};

/// Zstd compression level. Lines are a few kilobytes: a higher level costs more CPU time than the bytes it saves.
const LEVEL: i32 = 1;
/// Maximum size of an unpacked snapshot in bytes, as of a recording's line.
const MAX_SNAPSHOT: u64 = 64 << 20;
/// Estimated heap bytes of a late event per byte of its JSON.
const EXPANSION: usize = 4;
/// Allocator overhead per allocation, in bytes.
const ALLOCATION_OVERHEAD: usize = 16;
/// Heap fragmentation: 1/`FRAGMENTATION` of the bytes kept for hours (measured with `make bench-top`).
const FRAGMENTATION: usize = 16;
/// Bytes of the compression buffers that are kept for the next snapshot.
const MAX_BUFFER: usize = 1 << 20;
/// Maximum number of gaps kept per tick.
const MAX_GAPS: usize = 100;
/// Block lengths in ticks, the longest first. Blocks are merged once, so that a new tick does not merge an hour anew.
const BLOCKS: [u64; 2] = [256, 16];

/// One snapshot of every source.
#[derive(Debug)]
pub struct Tick {
    /// Sequence number from 0; evicted ticks count.
    pub number: u64,
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    pub summaries: Vec<SourceSummary<'static>>,
    pub late: Vec<(&'static Card, LateEvent)>,
    /// Losses that no single source accounts for.
    pub lost: BTreeMap<String, u64>,
    /// Gaps before the tick's end, and its clock readings, as recorded.
    gaps: Vec<Gap>,
    /// Why the recording was written, as recorded.
    kept: Vec<Kept>,
    clock: Option<Clock>,
    packed: Vec<(&'static Card, Box<[u8]>)>,
    /// Sources with stacks that name processes.
    with_programs: Vec<&'static Card>,
    bytes: usize,
}

impl Tick {
    /// Returns whether the source recorded stacks of processes.
    pub fn has_programs(&self, card: &Card) -> bool {
        self.with_programs.iter().any(|of| of.name == card.name)
    }

    /// Returns the source's summary.
    pub fn summary(&self, card: &Card) -> Option<&SourceSummary<'static>> {
        self.summaries.iter().find(|found| found.card.name == card.name)
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
        let others = others.chain(self.kept.iter().cloned().map(Line::Kept));
        others.chain(snapshots).chain((!self.lost.is_empty()).then_some(Line::Account(account))).collect()
    }

    /// Returns whether time or data before the tick's end is missing.
    pub fn has_gap(&self) -> bool {
        !self.gaps.is_empty()
    }
}

/// Reused compressor and buffers. Allocating them per snapshot would fragment the heap between the packed snapshots.
struct Packer {
    compressor: zstd::bulk::Compressor<'static>,
    text: Vec<u8>,
    packed: Vec<u8>,
}

thread_local! {
    static PACKER: RefCell<Option<Packer>> = const { RefCell::new(None) };
}

fn pack(snapshot: &Snapshot) -> io::Result<Box<[u8]>> {
    PACKER.with_borrow_mut(|packer| {
        let Packer { compressor, text, packed } = match packer {
            Some(packer) => packer,
            None => {
                let compressor = zstd::bulk::Compressor::new(LEVEL)?;
                packer.insert(Packer { compressor, text: Vec::new(), packed: Vec::new() })
            }
        };
        text.clear();
        packed.clear();
        serde_json::to_writer(&mut *text, snapshot)?;
        packed.reserve(zstd::zstd_safe::compress_bound(text.len()));
        compressor.compress_to_buffer(text, packed)?;
        let kept = packed.as_slice().into();
        text.shrink_to(MAX_BUFFER);
        packed.shrink_to(MAX_BUFFER);
        Ok(kept)
    })
}

fn unpack(packed: &[u8]) -> Option<Snapshot> {
    let mut text = Vec::new();
    zstd::Decoder::new(packed).ok()?.take(MAX_SNAPSHOT).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Blocks take at most 1/`BLOCKS_SHARE` of the history's bytes.
const BLOCKS_SHARE: usize = 8;

/// Merged snapshots by source name, block length, and block number; `None` if the source has none in the block.
type Blocks = BTreeMap<(&'static str, u64, u64), Option<Box<[u8]>>>;

fn bytes_of(blocks: &Blocks) -> usize {
    let bytes = blocks.values().flatten().map(|packed| packed.len()).sum::<usize>();
    bytes + blocks.len() * (ALLOCATION_OVERHEAD + size_of::<(&str, u64, u64)>())
}

/// Ticks in time order. The oldest ones are evicted.
#[derive(Debug)]
pub struct History {
    ticks: VecDeque<Tick>,
    /// Cache of merged blocks with ticks still in the history.
    blocks: RefCell<Blocks>,
    bytes: usize,
    max_bytes: usize,
    next: u64,
}

impl History {
    /// Creates an empty history of at most `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        History { ticks: VecDeque::new(), blocks: RefCell::default(), bytes: 0, max_bytes, next: 0 }
    }

    /// Appends a tick and evicts the oldest ones beyond the byte limit.
    ///
    /// # Errors
    /// Fails if compressing or serializing a snapshot fails.
    pub fn add(&mut self, lines: Vec<Line>) -> io::Result<()> {
        let mut tick = Tick {
            number: self.next,
            start_unix_ns: u64::MAX,
            end_unix_ns: 0,
            summaries: Vec::new(),
            late: Vec::new(),
            lost: BTreeMap::new(),
            gaps: Vec::new(),
            kept: Vec::new(),
            clock: None,
            packed: Vec::new(),
            with_programs: Vec::new(),
            bytes: size_of::<Tick>(),
        };
        for line in lines {
            match line {
                Line::Snapshot(snapshot) => tick.take(*snapshot)?,
                Line::Account(account) => {
                    for (reason, count) in account.lost {
                        let lost = tick.lost.entry(reason).or_default();
                        *lost = lost.saturating_add(count);
                    }
                }
                Line::Gap(gap) => {
                    tick.bytes += size_of::<Gap>() + gap.reason.len();
                    // A gap without a duration counts dropped data: it is also a loss. Other gaps are spans of time.
                    if gap.duration_ns == 0 && gap.count > 0 {
                        let lost = tick.lost.entry(gap.reason.clone()).or_default();
                        *lost = lost.saturating_add(gap.count);
                    }
                    if tick.gaps.len() < MAX_GAPS {
                        tick.gaps.push(gap);
                    }
                }
                Line::Kept(kept) if tick.kept.len() < MAX_GAPS => {
                    tick.bytes += size_of::<Kept>() + kept.reason.len() + kept.detail.len();
                    tick.kept.push(kept);
                }
                Line::Clock(clock) => tick.clock = Some(clock),
                _ => {}
            }
        }
        tick.bytes += tick.lost.keys().map(|reason| reason.len() + size_of::<(String, u64)>()).sum::<usize>();
        if tick.summaries.is_empty() {
            return Ok(());
        }
        tick.summaries.shrink_to_fit();
        tick.late.shrink_to_fit();
        tick.packed.shrink_to_fit();
        self.next += 1;
        self.bytes += tick.bytes;
        self.ticks.push_back(tick);
        // The newest tick is always kept, whatever its size.
        let of_blocks = bytes_of(self.blocks.get_mut());
        let with_fragmentation = |bytes: usize| bytes + bytes / FRAGMENTATION;
        while with_fragmentation(self.bytes + of_blocks) > self.max_bytes && self.ticks.len() > 1 {
            self.bytes -= self.ticks.pop_front().map_or(0, |oldest| oldest.bytes);
        }
        let forgotten = self.forgotten();
        self.blocks.get_mut().retain(|&(_, length, number), _| number * length >= forgotten);
        Ok(())
    }

    /// Removes all ticks.
    pub fn clear(&mut self) {
        self.ticks.clear();
        self.blocks.get_mut().clear();
        self.bytes = 0;
    }

    /// Returns the number of evicted ticks.
    pub fn forgotten(&self) -> u64 {
        self.next - self.ticks.len() as u64
    }

    /// Returns the tick with that sequence number, unless it was evicted.
    pub fn get(&self, number: u64) -> Option<&Tick> {
        self.ticks.get(self.index(number)?)
    }

    fn index(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.forgotten())?).ok().filter(|&index| index < self.ticks.len())
    }

    /// Returns the sequence number of the newest tick.
    pub fn newest(&self) -> Option<u64> {
        self.ticks.back().map(|tick| tick.number)
    }

    /// Returns the sequence numbers of the ticks in the `window_ns` that end with tick `newest`.
    pub fn window(&self, newest: u64, window_ns: u64) -> Range<u64> {
        let Some(index) = self.index(newest) else { return 0..0 };
        let from_ns = self.ticks[index].end_unix_ns.saturating_sub(window_ns);
        let (mut inside, mut begins_ns) = (0, u64::MAX);
        for tick in self.ticks.range(..=index).rev() {
            // Tick lengths vary: a tick counts if its middle is inside. Ticks before a backward step of the clock
            // are excluded.
            let middle_ns = tick.start_unix_ns / 2 + tick.end_unix_ns / 2;
            if inside > 0 && (middle_ns < from_ns || tick.start_unix_ns > begins_ns) {
                break;
            }
            begins_ns = tick.start_unix_ns;
            inside += 1;
        }
        newest + 1 - inside..newest + 1
    }

    /// Iterates over the ticks of the window that were not evicted.
    pub fn within(&self, window: &Range<u64>) -> impl DoubleEndedIterator<Item = &Tick> + ExactSizeIterator {
        let index = |number: u64| {
            let index = usize::try_from(number.saturating_sub(self.forgotten())).unwrap_or(usize::MAX);
            index.min(self.ticks.len())
        };
        self.ticks.range(index(window.start)..index(window.end).max(index(window.start)))
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
                Some(index) => (blocks[index], self.block(at / blocks[index], card, &blocks[index..])),
                None => (1, self.get(at).and_then(|tick| tick.snapshot(card))),
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
        if bytes_of(&known) <= self.max_bytes / BLOCKS_SHARE
            && let Ok(packed) = snapshot.as_ref().map(pack).transpose()
        {
            known.insert(key, packed);
        }
        drop(known);
        snapshot
    }
}

impl Tick {
    fn take(&mut self, mut snapshot: Snapshot) -> io::Result<()> {
        let Some(card) = whylate_model::sources::named(&snapshot.source) else { return Ok(()) };
        let late = std::mem::take(&mut snapshot.late);
        self.start_unix_ns = self.start_unix_ns.min(snapshot.start_unix_ns);
        self.end_unix_ns = self.end_unix_ns.max(snapshot.start_unix_ns.saturating_add(snapshot.duration_ns));
        let packed = pack(&snapshot)?;
        self.bytes += packed.len() + size_of::<(&Card, Box<[u8]>)>() + ALLOCATION_OVERHEAD;
        self.packed.push((card, packed));
        if snapshot.stacks.iter().any(|stack| stack.labels.contains_key("process")) {
            self.with_programs.push(card);
        }
        let found = SourceSummary::of_part(card, &mut snapshot);
        self.bytes += found.heap_bytes();
        self.summaries.push(found);
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

    fn tick(second: u64, late: usize) -> Vec<Line> {
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
    fn window_ends_with_given_tick() {
        let mut history = History::new(1 << 20);
        (0..20).for_each(|second| history.add(tick(second, 1)).expect("memory"));
        assert_eq!(history.window(9, 5 * SECOND_NS), 5..10);
        assert_eq!((history.window(2, 60 * SECOND_NS), history.window(99, 1)), (0..3, 0..0));
        assert_eq!(history.window(7, 0), 7..8);
        let merged = history.merged(&(5..10), &WQ).expect("a snapshot");
        assert_eq!((merged.duration_ns, merged.total("latency").count()), (5 * SECOND_NS, 10));
        let lines = history.get(3).expect("it is there").lines();
        assert!(matches!(&lines[..], [Line::Snapshot(snapshot)] if snapshot.late.len() == 1), "{lines:?}");
    }

    #[test]
    fn block_merge_includes_every_tick_once() {
        let mut history = History::new(1 << 20);
        (0..700).for_each(|second| history.add(tick(second, 0)).expect("memory"));
        let one_by_one = |window: &Range<u64>| history.merge(window.clone(), &WQ, &[]);
        for window in [0..700, 0..1, 1..700, 5..21, 16..32, 15..33, 255..513, 300..300, 690..900] {
            let window = window.start..window.end.min(700);
            for _ in 0..2 {
                assert_eq!(history.merged(&window, &WQ), one_by_one(&window), "{window:?}");
            }
        }
        assert!(!history.blocks.borrow().is_empty());
        // Evicted ticks are in no block.
        let mut small = History::new(100_000);
        for second in 0..2_000 {
            small.add(tick(second, 3)).expect("memory");
            let merged = small.merged(&(0..second + 1), &WQ).expect("a snapshot");
            assert_eq!(merged.duration_ns, small.ticks.len() as u64 * SECOND_NS);
        }
        assert!(small.blocks.borrow().len() <= small.ticks.len() / 16);
    }

    #[test]
    fn window_excludes_ticks_before_backward_clock_step() {
        let mut history = History::new(1 << 20);
        let seconds = [1_000, 1_001, 1_002, 500, 501];
        seconds.into_iter().for_each(|second| history.add(tick(second, 0)).expect("memory"));
        assert_eq!(history.window(4, 60 * SECOND_NS), 3..5);
    }

    #[test]
    fn keeps_gaps_and_counts_dropped_data_as_lost() {
        let mut history = History::new(1 << 20);
        let gap = |duration_ns, reason: &str| {
            Line::Gap(Gap { start_unix_ns: 0, duration_ns, reason: reason.to_owned(), count: 7 })
        };
        let gaps = [gap(SECOND_NS, "suspended"), gap(0, "late_events")];
        history.add(gaps.into_iter().chain(tick(1, 0)).collect()).expect("memory");
        let tick = history.get(0).expect("it is there");
        assert_eq!((tick.has_gap(), &tick.lost), (true, &[("late_events".to_owned(), 7)].into()));
        assert_eq!(tick.lines().iter().filter(|line| matches!(line, Line::Gap(_))).count(), 2);
    }

    #[test]
    fn evicts_oldest_ticks_beyond_byte_limit() {
        let mut history = History::new(100_000);
        for second in 0..2_000 {
            history.add(tick(second, 3)).expect("memory");
            assert!(history.bytes <= 100_000);
        }
        assert!(history.forgotten() > 1_000 && history.newest() == Some(1_999));
        assert!(history.get(0).is_none() && history.get(1_999).is_some());
        assert_eq!(history.ticks.len() as u64 + history.forgotten(), 2_000);
        // A tick above the byte limit is still shown.
        history.add(tick(2_000, 5_000)).expect("memory");
        assert_eq!(history.ticks.len(), 1);
    }
}
