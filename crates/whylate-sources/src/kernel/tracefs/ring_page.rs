// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parser of pages of `per_cpu/cpuN/trace_pipe_raw`: events as the kernel's ring buffer holds them
//! (include/linux/ring_buffer.h).

/// Length of a page's header: its timestamp, and the length of its data.
const HEADER: usize = 16;
/// Mask of the data length in the second word of the header; above it are flags.
const LENGTH: u64 = 0x000f_ffff;
/// Events were lost before this page; if the flag below is set too, their number follows the last record.
const MISSED: u64 = 1 << 31;
const MISSED_STORED: u64 = 1 << 30;

/// Types of records; all others are the length of their data in words of four bytes.
const LARGE: u32 = 0;
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
/// Number of bits of the time delta in a record's first word.
const DELTA_BITS: u32 = 27;

/// An event, with its timestamp by the buffer's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Timestamp in nanoseconds.
    pub time_ns: u64,
    /// Data from the common header on, as the event's `format` describes it.
    pub data: &'a [u8],
}

/// Iterator over the records of a page, in order.
#[derive(Clone, Debug)]
pub struct Page<'a> {
    rest: &'a [u8],
    time_ns: u64,
    /// Number of events lost before this page; 1 if the number is unknown.
    pub missed: u64,
}

impl<'a> Page<'a> {
    /// Reads the header. `None` if the page is truncated.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let time_ns = u64_at(bytes, 0)?;
        let state = u64_at(bytes, 8)?;
        let end = HEADER.checked_add((state & LENGTH) as usize)?;
        let rest = bytes.get(HEADER..end)?;
        let missed = match (state & MISSED != 0, state & MISSED_STORED != 0) {
            (false, _) => 0,
            (true, true) => u64_at(bytes, end).unwrap_or(1),
            (true, false) => 1,
        };
        Some(Page { rest, time_ns, missed })
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Page<'a> {
    type Item = Record<'a>;

    /// Ends at the first invalid record.
    fn next(&mut self) -> Option<Record<'a>> {
        loop {
            let word = u32_of(self.take(4)?)?;
            let (kind, delta) = (word & 31, u64::from(word >> 5));
            match kind {
                // Nothing follows a padding without a time.
                PADDING if delta == 0 => return None,
                PADDING => {
                    let length = u32_of(self.take(4)?)? as usize;
                    self.take(length.checked_sub(4)?)?;
                    self.time_ns = self.time_ns.wrapping_add(delta);
                }
                TIME_EXTEND => {
                    let high = u64::from(u32_of(self.take(4)?)?);
                    self.time_ns = self.time_ns.wrapping_add(high << DELTA_BITS | delta);
                }
                TIME_STAMP => {
                    let high = u64::from(u32_of(self.take(4)?)?);
                    // The highest five bits do not fit, and are taken from the previous timestamp.
                    let low_bits = (1 << 59) - 1;
                    self.time_ns = (self.time_ns & !low_bits) | ((high << DELTA_BITS | delta) & low_bits);
                }
                LARGE => {
                    let length = u32_of(self.take(4)?)? as usize;
                    let data = self.take(length.checked_sub(4)?)?;
                    self.time_ns = self.time_ns.wrapping_add(delta);
                    return Some(Record { time_ns: self.time_ns, data });
                }
                words => {
                    let data = self.take(words as usize * 4)?;
                    self.time_ns = self.time_ns.wrapping_add(delta);
                    return Some(Record { time_ns: self.time_ns, data });
                }
            }
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

fn u32_of(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(time_ns: u64, state: u64, words: &[u32]) -> Vec<u8> {
        let mut bytes = time_ns.to_ne_bytes().to_vec();
        bytes.extend((state | (words.len() * 4) as u64).to_ne_bytes());
        words.iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        bytes
    }

    fn word(kind: u32, delta: u32) -> u32 {
        delta << 5 | kind
    }

    #[test]
    fn parses_records() {
        let words = [
            word(2, 10),
            1,
            2,
            word(TIME_EXTEND, 5),
            3,
            word(LARGE, 1),
            12,
            7,
            8,
            word(PADDING, 2),
            8,
            0,
            word(TIME_STAMP, 9),
            1,
            word(1, 4),
            6,
            word(PADDING, 0),
            0,
            0,
        ];
        let bytes = page(1_000, 0, &words);
        let records: Vec<_> =
            Page::new(&bytes).expect("a page").map(|record| (record.time_ns, record.data.to_vec())).collect();
        let data = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        let extended = 1_010 + (3 << 27) + 5;
        assert_eq!(records, [(1_010, data(&[1, 2])), (extended + 1, data(&[7, 8])), ((1 << 27) + 9 + 4, data(&[6]))]);
    }

    #[test]
    fn reports_lost_events() {
        assert_eq!(Page::new(&page(0, 0, &[])).expect("a page").missed, 0);
        assert_eq!(Page::new(&page(0, MISSED, &[])).expect("a page").missed, 1);
        let mut stored = page(0, MISSED | MISSED_STORED, &[]);
        stored.extend(77_u64.to_ne_bytes());
        assert_eq!(Page::new(&stored).expect("a page").missed, 77);
    }

    proptest::proptest! {
        #[test]
        fn never_panics_on_any_page(
            words in proptest::collection::vec((0..32_u32, proptest::num::u32::ANY, 0..20_u32), 0..60), flags in 0..4_u64, cut in 0..8_usize
        ) {
            // Of each record its type, and a word that could be a length.
            let words: Vec<u32> = words.into_iter().flat_map(|(kind, delta, length)| [word(kind, delta & 0xff), length]).collect();
            let mut bytes = page(5, flags << 30, &words);
            bytes.truncate(bytes.len() - cut);
            if let Some(page) = Page::new(&bytes) {
                // Each record takes at least four bytes.
                proptest::prop_assert!(page.count() <= bytes.len() / 4);
            } else {
                proptest::prop_assert!(cut > 0);
            }
        }
    }
}
