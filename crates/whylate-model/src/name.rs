// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bound on the length of external names: functions, threads, cgroups, files.
//!
//! A symbol table or a perf map may contain names of any length, and each copy of a name is written, compressed and
//! aligned. Every name passes through [`bounded`] on input.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write};

/// Maximum length of a name in bytes.
pub const MAX_BYTES: usize = 4 << 10;

/// Suffix of a name that was cut.
pub const CUT: &str = "[cut]";

/// Returns the name, cut to [`MAX_BYTES`] with the suffix [`CUT`] if it is longer.
pub fn bounded(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_BYTES {
        return Cow::Borrowed(name);
    }
    Cow::Owned(format!("{}{CUT}", start_of(name, MAX_BYTES - CUT.len())))
}

/// Cuts an owned name like [`bounded`].
pub fn into_bounded(name: String) -> String {
    cut(name, MAX_BYTES)
}

/// Returns the name, cut to `max_bytes` with the suffix [`CUT`] if it is longer.
pub fn cut(mut name: String, max_bytes: usize) -> String {
    if name.len() > max_bytes {
        name.truncate(start_of(&name, max_bytes.saturating_sub(CUT.len())).len());
        name.push_str(CUT);
        name.shrink_to_fit();
    }
    name
}

/// Returns the longest prefix of whole characters that has at most `max_bytes`.
fn start_of(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Maximum number of interned names, far above the number of functions that a kernel traces.
const MAX_INTERNED: usize = 64 << 10;

/// Numbers of names.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    numbers: HashMap<Box<str>, u32>,
    names: Vec<Box<str>>,
}

impl Interner {
    pub fn number(&mut self, name: &str) -> u32 {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        // One name stands for all names beyond the limit.
        let name = if self.names.len() < MAX_INTERNED { name } else { "(others)" };
        let next = self.names.len() as u32;
        let number = *self.numbers.entry(name.into()).or_insert(next);
        if number == next {
            self.names.push(name.into());
        }
        number
    }

    pub fn get(&self, number: u32) -> &str {
        self.names.get(number as usize).map_or("", |name| name)
    }
}

/// Formatter that stops at [`MAX_BYTES`]: further writes fail, which ends the formatting.
#[derive(Debug, Default)]
pub struct BoundedText {
    text: String,
    is_cut: bool,
}

impl BoundedText {
    /// Returns the text, with the suffix [`CUT`] if some of it was dropped.
    pub fn finish(self) -> String {
        let BoundedText { mut text, is_cut } = self;
        if is_cut {
            text.push_str(CUT);
        }
        text
    }

    /// Returns the number of bytes written so far.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Returns whether nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Returns the last byte written.
    pub fn last(&self) -> Option<u8> {
        self.text.as_bytes().last().copied()
    }

    /// Truncates the text to a length, which must be at a character boundary.
    pub fn truncate(&mut self, bytes: usize) {
        self.text.truncate(bytes);
    }
}

impl Write for BoundedText {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let room = MAX_BYTES - CUT.len() - self.text.len();
        if self.is_cut || more.len() > room {
            if !self.is_cut {
                self.text.push_str(start_of(more, room));
            }
            self.is_cut = true;
            return Err(fmt::Error);
        }
        self.text.push_str(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keeps_name_of_maximum_length() {
        let longest = "f".repeat(MAX_BYTES);
        assert_eq!(bounded(&longest), longest);
        let cut = bounded(&format!("{longest}f")).into_owned();
        assert_eq!((cut.len(), cut.ends_with("fff[cut]")), (MAX_BYTES, true));
    }

    proptest! {
        #[test]
        fn cuts_names_between_characters(start in "[a-z]{0,8}", c in any::<char>(), times in 0..9_000_usize) {
            let name = start + &c.to_string().repeat(times);
            let cut = bounded(&name);
            prop_assert!(cut.len() <= MAX_BYTES);
            prop_assert_eq!(cut.as_ref() == name, name.len() <= MAX_BYTES);
            prop_assert_eq!(&into_bounded(name.clone()), &cut);
            prop_assert_eq!(bounded(&cut), cut.as_ref(), "a second cut changes nothing");
            let mut text = BoundedText::default();
            let written = name.chars().try_for_each(|c| text.write_char(c));
            let finished = text.finish();
            prop_assert!(finished.len() <= MAX_BYTES);
            prop_assert_eq!(written.is_ok(), finished == name);
        }
    }
}
