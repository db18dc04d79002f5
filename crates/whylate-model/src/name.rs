// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bound on names that others choose: functions, threads, cgroups, files.
//!
//! A symbol table or a perf map can hold a name of any length, and each copy of a name is written, compressed and aligned.
//! Every name passes through [`bounded`] where it enters.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// The most bytes that a name has.
pub const MAX_BYTES: usize = 4 << 10;

/// The end of a name that was cut.
pub const CUT: &str = "[cut]";

/// The name, cut to [`MAX_BYTES`] with [`CUT`] at its end where it is longer.
pub fn bounded(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_BYTES {
        return Cow::Borrowed(name);
    }
    Cow::Owned(format!("{}{CUT}", start_of(name, MAX_BYTES - CUT.len())))
}

/// [`bounded`] for an owned name.
pub fn into_bounded(name: String) -> String {
    cut(name, MAX_BYTES)
}

/// The name, cut to `max_bytes` with [`CUT`] at its end where it is longer.
pub fn cut(mut name: String, max_bytes: usize) -> String {
    if name.len() > max_bytes {
        name.truncate(start_of(&name, max_bytes.saturating_sub(CUT.len())).len());
        name.push_str(CUT);
        name.shrink_to_fit();
    }
    name
}

/// The whole characters at the start of a text that take at most `max_bytes`.
fn start_of(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Formatted text that stops at [`MAX_BYTES`]: further writes fail, and what is formatted ends there.
#[derive(Debug, Default)]
pub struct BoundedText {
    text: String,
    is_cut: bool,
}

impl BoundedText {
    /// The text, with [`CUT`] at its end where some of it was not.
    pub fn finish(self) -> String {
        let BoundedText { mut text, is_cut } = self;
        if is_cut {
            text.push_str(CUT);
        }
        text
    }

    /// The bytes that were written so far.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Whether nothing was written so far.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// The last byte that was written.
    pub fn last(&self) -> Option<u8> {
        self.text.as_bytes().last().copied()
    }

    /// Drops the text beyond a length, which ends a character.
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
    fn a_name_of_exactly_the_bound_is_whole() {
        let longest = "f".repeat(MAX_BYTES);
        assert_eq!(bounded(&longest), longest);
        let cut = bounded(&format!("{longest}f")).into_owned();
        assert_eq!((cut.len(), cut.ends_with("fff[cut]")), (MAX_BYTES, true));
    }

    proptest! {
        #[test]
        fn a_name_is_cut_between_characters(start in "[a-z]{0,8}", c in any::<char>(), times in 0..9_000_usize) {
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
