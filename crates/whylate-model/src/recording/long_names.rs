// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bounds the length of names in lines of a recording: older versions wrote names of any length, and a recording may
//! come from anywhere.

use std::borrow::Cow;

use memchr::{memchr, memchr_iter, memchr2};

use crate::name::{CUT, MAX_BYTES};

/// Returns the line with each string cut that is longer than a name may be.
pub(super) fn bounded(line: &[u8]) -> Cow<'_, [u8]> {
    if !may_have_long(line) {
        return Cow::Borrowed(line);
    }
    let (mut cut, mut copied, mut at): (Vec<u8>, usize, usize) = (Vec::new(), 0, 0);
    while let Some(begin) = memchr(b'"', &line[at..]).map(|quote| at + quote + 1) {
        // A line with an unterminated string is invalid.
        let Some(end) = end_of(line, begin) else { break };
        if end - begin > MAX_BYTES {
            cut.extend_from_slice(&line[copied..whole_to(line, begin, begin + MAX_BYTES - CUT.len())]);
            cut.extend_from_slice(CUT.as_bytes());
            copied = end;
        }
        at = end + 1;
    }
    if copied == 0 {
        return Cow::Borrowed(line);
    }
    cut.extend_from_slice(&line[copied..]);
    Cow::Owned(cut)
}

/// Returns whether a chunk of half the maximum length has no delimiting quotation mark, as within a long string.
fn may_have_long(line: &[u8]) -> bool {
    line.chunks_exact(MAX_BYTES / 2).any(|part| {
        let is_escaped = |quote: usize| quote == 0 || part[quote - 1] == b'\\';
        memchr_iter(b'"', part).all(is_escaped)
    })
}

/// Returns the position of the string's closing quotation mark.
fn end_of(line: &[u8], begin: usize) -> Option<usize> {
    let mut at = begin;
    loop {
        at += memchr2(b'"', b'\\', line.get(at..)?)?;
        if line[at] == b'"' {
            return Some(at);
        }
        at += 2;
    }
}

/// Returns the end of the last whole character before `limit`.
fn whole_to(line: &[u8], begin: usize, limit: usize) -> usize {
    let mut at = begin;
    loop {
        let length = match line[at] {
            // A surrogate pair.
            b'\\' if line[at + 1] == b'u' => match line.get(at + 2..at + 4) {
                Some([b'd' | b'D', b'8' | b'9' | b'a'..=b'b' | b'A'..=b'B']) => 12,
                _ => 6,
            },
            b'\\' => 2,
            0xf0.. => 4,
            0xe0.. => 3,
            0xc0.. => 2,
            _ => 1,
        };
        if at + length > limit {
            return at;
        }
        at += length;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    proptest! {
        #[test]
        fn cuts_only_long_strings(
            parts in prop::collection::vec((any::<char>(), 0..6_000_usize), 1..6), is_ascii: bool,
        ) {
            let texts: Vec<String> = parts.iter().map(|(c, times)| c.to_string().repeat(*times)).collect();
            let mut line = serde_json::to_string(&texts).expect("text");
            if is_ascii {
                let escape = |c: char| match c {
                    c if c.is_ascii() => c.to_string(),
                    c => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
                };
                line = line.chars().map(escape).collect();
            }
            let read: Vec<String> = serde_json::from_slice(&bounded(line.as_bytes())).expect("it is still a line");
            prop_assert_eq!(read.len(), texts.len());
            for (read, text) in read.iter().zip(&texts) {
                prop_assert!(read.len() <= MAX_BYTES);
                match read.strip_suffix(CUT) {
                    Some(start) if read != text => prop_assert!(text.starts_with(start)),
                    _ => prop_assert_eq!(read, text),
                }
            }
            let again = bounded(line.as_bytes()).into_owned();
            prop_assert_eq!(bounded(&again), again.as_slice());
        }

        #[test]
        fn arbitrary_bytes_stay_parsable(parts in prop::collection::vec((any::<u8>(), 0..3_000_usize), 0..8)) {
            let bytes: Vec<u8> = parts.iter().flat_map(|(byte, times)| std::iter::repeat_n(*byte, *times)).collect();
            for line in [bytes.clone(), [b"[\"", &bytes[..], b"\\ud83d\"]"].concat()] {
                let is_read = serde_json::from_slice::<Value>(&line).is_ok();
                prop_assert!(!is_read || serde_json::from_slice::<Value>(&bounded(&line)).is_ok());
            }
        }
    }
}
