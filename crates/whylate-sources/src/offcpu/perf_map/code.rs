// SPDX-License-Identifier: MIT OR Apache-2.0
//! Named ranges of code. Lines of a perf map may overlap: the last line for an address is valid.

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use whylate_model::name::bounded;

/// The names of one process's compiled code.
#[derive(Clone, Debug, Default)]
pub(in crate::offcpu) struct CompiledCode {
    /// The lines that were read last, until they are merged into the older ones.
    recent: Arc<Ranges>,
    older: Arc<Ranges>,
}

/// Recent lines are merged into older ones when they take more than a quarter of their memory, and more than 64 KiB.
const MERGE_PART: usize = 4;
const MERGE_BYTES: usize = 64 << 10;

impl CompiledCode {
    /// The name of the function at an address.
    pub(in crate::offcpu) fn name_at(&self, address: u64) -> Option<String> {
        let name = self.recent.name_at(address).or_else(|| self.older.name_at(address));
        name.map(|name| String::from_utf8_lossy(name).into_owned())
    }

    /// Adds lines, which override the lines before them.
    pub(super) fn add(&mut self, lines: &[u8]) {
        let mut new = Lines::default();
        new.add_ranges(&self.recent);
        new.add_text(lines);
        self.recent = Arc::new(new.finish());
        if self.recent.bytes() > MERGE_BYTES.max(self.older.bytes() / MERGE_PART) {
            let mut all = Lines::default();
            all.add_ranges(&self.older);
            all.add_ranges(&self.recent);
            (self.older, self.recent) = (Arc::new(all.finish()), Arc::default());
        }
    }

    /// Returns the memory that the names take.
    pub(super) fn bytes(&self) -> usize {
        self.recent.bytes() + self.older.bytes()
    }

    /// Drops the older lines, or all of them if there are no recent ones.
    pub(super) fn drop_older(&mut self) {
        self.older = std::mem::take(&mut self.recent);
    }
}

/// Ranges that do not overlap, by address.
#[derive(Debug, Default)]
struct Ranges {
    all: Box<[Range]>,
    /// Each name after its length in two bytes.
    names: Box<[u8]>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    length: u32,
    /// The offset of its name.
    name: u32,
}

impl Ranges {
    fn name_at(&self, address: u64) -> Option<&[u8]> {
        let after = self.all.partition_point(|range| range.start <= address);
        let range = self.all[..after].last().filter(|range| address - range.start < u64::from(range.length))?;
        Some(self.name_of(range))
    }

    fn name_of(&self, range: &Range) -> &[u8] {
        let named = self.names.get(range.name as usize..).and_then(<[u8]>::split_first_chunk);
        named.and_then(|(length, rest)| rest.get(..usize::from(u16::from_le_bytes(*length)))).unwrap_or_default()
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.all) + self.names.len()
    }
}

/// Lines in order, of which later ones override earlier ones.
#[derive(Default)]
struct Lines {
    all: Vec<Range>,
    names: Vec<u8>,
    /// Offsets of names by hash: a compiler lists a function each time it compiles it.
    known: HashMap<u64, u32>,
    hasher: RandomState,
}

impl Lines {
    fn add_ranges(&mut self, ranges: &Ranges) {
        let mut last = None;
        for range in &ranges.all {
            // Pieces of a function are adjacent.
            let name = match last {
                Some((of, name)) if of == range.name => name,
                _ => self.name(ranges.name_of(range)),
            };
            last = Some((range.name, name));
            self.all.push(Range { name, ..*range });
        }
    }

    fn add_text(&mut self, text: &[u8]) {
        for line in text.split(|&byte| byte == b'\n') {
            let Some((start, length, name)) = parse(line) else { continue };
            let length = length.min(u64::MAX - start).min(u32::MAX.into()) as u32;
            // An empty range contains no address.
            if length > 0 {
                // Invalid UTF-8 takes more bytes when it is shown.
                let text = String::from_utf8_lossy(&name[..name.len().min(2 * whylate_model::name::MAX_BYTES)]);
                let name = self.name(bounded(&text).as_bytes());
                self.all.push(Range { start, length, name });
            }
        }
    }

    fn name(&mut self, name: &[u8]) -> u32 {
        let hash = self.hasher.hash_one(name);
        if let Some(&at) = self.known.get(&hash) {
            let known = self.names.get(at as usize + 2..).unwrap_or_default();
            let length = self.names.get(at as usize..).and_then(<[u8]>::first_chunk);
            if length == Some(&(name.len() as u16).to_le_bytes()) && known.starts_with(name) {
                return at;
            }
        }
        let at = self.names.len() as u32;
        self.names.extend((name.len() as u16).to_le_bytes());
        self.names.extend(name);
        self.known.insert(hash, at);
        at
    }

    /// Cuts each line to the addresses that no later line covers.
    fn finish(self) -> Ranges {
        let mut by_start: Vec<u32> = (0..self.all.len() as u32).collect();
        by_start.sort_by_key(|&index| self.all[index as usize].start);
        let end_of = |index: u32| self.all[index as usize].start + u64::from(self.all[index as usize].length);
        let mut next = by_start.into_iter().peekable();
        // Lines that cover `at`, the last one on top.
        let mut open: BinaryHeap<u32> = BinaryHeap::new();
        let mut pieces: Vec<Range> = Vec::new();
        let mut at = 0;
        loop {
            while open.peek().is_some_and(|&index| end_of(index) <= at) {
                open.pop();
            }
            let next_start = next.peek().map(|&index| self.all[index as usize].start);
            let until = match open.peek() {
                Some(&index) => {
                    let until = end_of(index).min(next_start.unwrap_or(u64::MAX));
                    push(&mut pieces, at..until, self.all[index as usize].name);
                    until
                }
                None => match next_start {
                    Some(start) => start,
                    None => break,
                },
            };
            at = until;
            while let Some(index) = next.next_if(|&index| self.all[index as usize].start <= at) {
                open.push(index);
            }
        }
        Ranges { all: pieces.into(), names: self.names.into() }.compact()
    }
}

fn push(pieces: &mut Vec<Range>, range: std::ops::Range<u64>, name: u32) {
    let length = (range.end - range.start).min(u32::MAX.into()) as u32;
    if length == 0 {
        return;
    }
    if let Some(last) = pieces.last_mut()
        && last.name == name
        && last.start + u64::from(last.length) == range.start
        && let Some(sum) = last.length.checked_add(length)
    {
        last.length = sum;
        return;
    }
    pieces.push(Range { start: range.start, length, name });
}

impl Ranges {
    /// Drops unused names if they take a quarter of the memory.
    fn compact(self) -> Self {
        let mut used: HashMap<u32, u32> = HashMap::new();
        used.extend(self.all.iter().map(|range| (range.name, 0)));
        let bytes: usize = used.keys().map(|&name| 2 + self.name_of(&Range { start: 0, length: 0, name }).len()).sum();
        if bytes * 4 >= self.names.len() * 3 {
            return self;
        }
        let mut names = Vec::with_capacity(bytes);
        let mut all = self.all.clone();
        used.clear();
        for range in &mut all {
            range.name = *used.entry(range.name).or_insert_with(|| {
                let (at, name) = (names.len() as u32, self.name_of(range));
                names.extend((name.len() as u16).to_le_bytes());
                names.extend(name);
                at
            });
        }
        Ranges { all, names: names.into() }
    }
}

/// Parses start, length and name.
fn parse(line: &[u8]) -> Option<(u64, u64, &[u8])> {
    let mut words = line.splitn(3, |&byte| byte == b' ');
    let mut number = || {
        let word = std::str::from_utf8(words.next()?).ok()?;
        u64::from_str_radix(word.strip_prefix("0x").unwrap_or(word), 16).ok()
    };
    let (start, length) = (number()?, number()?);
    let name = words.next()?;
    Some((start, length, name.strip_suffix(b"\r").unwrap_or(name)))
}

/// Checks the names at some addresses against a search of the lines, for a perf map that is read in two parts.
///
/// # Panics
/// Panics if a name is not that of the last line for its address.
#[cfg(any(test, feature = "fuzzing"))]
pub(in crate::offcpu) fn check(text: &[u8]) {
    let whole_lines = text.iter().take(text.len() / 2).rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let (first, second) = text.split_at(whole_lines);
    let mut code = CompiledCode::default();
    code.add(first);
    code.add(second);
    let lines: Vec<_> = text.split(|&byte| byte == b'\n').filter_map(parse).collect();
    for (start, length, _) in lines.iter().take(40) {
        let last = start.saturating_add(length.saturating_sub(1));
        for address in [start.saturating_sub(1), *start, start.saturating_add(length / 2), last, last.saturating_add(1)]
        {
            let covers = |(start, length, _): &&(u64, u64, &[u8])| {
                let length = (*length).min(u64::MAX - start).min(u32::MAX.into());
                address.checked_sub(*start).is_some_and(|within| within < length)
            };
            let valid = lines.iter().rev().find(covers).map(|(.., name)| String::from_utf8_lossy(name).into_owned());
            let valid = valid.map(|name| bounded(&name).into_owned());
            let named = code.name_at(address);
            assert_eq!(named, valid, "{address:#x}");
        }
    }
    for ranges in [&code.recent, &code.older] {
        assert!(ranges.all.windows(2).all(|two| two[0].start + u64::from(two[0].length) <= two[1].start));
        assert!(ranges.all.iter().all(|range| range.length > 0));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn code_of(text: &str) -> CompiledCode {
        let mut code = CompiledCode::default();
        code.add(text.as_bytes());
        code
    }

    #[test]
    fn parses_start_length_and_name() {
        let code =
            code_of("7f00 20 later name\n0x1000 10 LazyCompile:~f file.js:1\nnonsense\n0x2000 0 nothing\n5 g a\n");
        let named = [0xfff, 0x1000, 0x100f, 0x1010, 0x2000, 0x7f1f].map(|address| code.name_at(address));
        let [f, later] = ["LazyCompile:~f file.js:1", "later name"].map(|name| Some(name.to_owned()));
        assert_eq!(named, [None, f.clone(), f, None, None, later]);
    }

    #[test]
    fn last_line_for_address_wins() {
        let mut code = code_of("1000 80 old\n1000 40 new\n2000 100 long\n2010 10 stale\n2000 100 newest\n");
        let name = |code: &CompiledCode, address| code.name_at(address).unwrap_or_default();
        let named = [0x1000, 0x103f, 0x1040, 0x107f, 0x2010, 0x20ff].map(|address| name(&code, address));
        assert_eq!(named, ["new", "new", "old", "old", "newest", "newest"]);
        // An appended line cuts a range in two.
        code.add(b"2080 8 inner\n");
        let named = [0x207f, 0x2080, 0x2087, 0x2088].map(|address| name(&code, address));
        assert_eq!(named, ["newest", "inner", "inner", "newest"]);
    }

    #[test]
    fn truncates_long_names() {
        let code = code_of(&format!("1000 10 {}\n", "A".repeat(1 << 20)));
        let name = code.name_at(0x1000).expect("it is there");
        assert_eq!((name.len(), name.ends_with("A[cut]")), (whylate_model::name::MAX_BYTES, true));
        assert!(code.bytes() < 5_000);
    }

    #[test]
    fn stores_many_lines_compactly() {
        let mut code = CompiledCode::default();
        code.add("0 0 a\n".repeat(100_000).as_bytes());
        code.add("0 1 a\n".repeat(100_000).as_bytes());
        assert!(code.bytes() < 100, "{} bytes", code.bytes());
        // Lines as `node --perf-basic-prof` writes them, of 84 bytes.
        let line = |at: u64| {
            format!(
                "{:x} 1a0 LazyCompile:*handleRequest{} /srv/app/node_modules/server/lib/handler.js:17\n",
                at * 4,
                at % 4_000
            )
        };
        for part in 0..10_u64 {
            let lines: String = (part * 10_000..(part + 1) * 10_000).map(line).collect();
            code.add(lines.as_bytes());
        }
        assert!(code.bytes() < 100_000 * 20, "{} bytes", code.bytes());
        for at in [0, 17, 99_999] {
            assert!(code.name_at(at * 4).is_some_and(|name| name.contains(&format!("handleRequest{} ", at % 4_000))));
        }
    }

    #[test]
    fn drops_older_lines_first() {
        let mut code = code_of(&(0..10_000).map(|at| format!("{:x} 10 f{at}\n", at * 16)).collect::<String>());
        code.add(b"0 10 new\n");
        code.drop_older();
        assert_eq!((code.name_at(0), code.name_at(0x20)), (Some("new".to_owned()), None));
        code.drop_older();
        assert_eq!(code.name_at(0), None);
    }

    proptest! {
        #[test]
        fn matches_linear_search(
            lines in prop::collection::vec((0_u64..64, 0_u64..24, 0_u8..9), 0..40), rest in ".*",
        ) {
            let text: String = lines.iter().map(|(start, length, name)| format!("{start:x} {length:x} f{name}\n")).collect();
            check((text + &rest).as_bytes());
        }
    }
}
