// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages on standard error.

use std::io::{self, Write as _};

use whylate_model::units::printable;

use crate::terminal::{columns_of, wrapped};

/// Prints a line to standard error, like `eprintln!`, but ignores write errors (a full disk, a closed pipe) instead of
/// panicking. Escapes characters that are not printable, and breaks the line at spaces to fit a terminal.
macro_rules! say {
    ($($words:tt)*) => { crate::say::line(&format!($($words)*)) };
}

/// Prints a message to standard error.
pub fn line(message: &str) {
    let mut err = io::stderr().lock();
    let columns = columns_of(&err).unwrap_or(usize::MAX);
    for line in broken(&printable(message), columns) {
        let _ = writeln!(err, "{line}");
    }
}

/// Breaks a message at spaces. Its lines have the indent of the first one.
fn broken(message: &str, columns: usize) -> Vec<String> {
    let text = message.trim_start_matches(' ');
    let indent = &message[..message.len() - text.len()];
    wrapped(text, columns.saturating_sub(indent.len())).iter().map(|line| format!("{indent}{line}")).collect()
}

/// Quotes a word for a shell.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_words_for_shell() {
        for (word, expected) in [("-d", "-d"), ("a b", "'a b'"), ("", "''"), ("it's", r"'it'\''s'"), ("$(x)", "'$(x)'")]
        {
            assert_eq!(quoted(word), expected);
        }
    }

    #[test]
    fn messages_are_broken_at_spaces_and_keep_their_indent() {
        assert_eq!(broken("  tip: a similar value", 14), ["  tip: a", "  similar", "  value"]);
        for message in ["  <FILE>...", "one  two ", ""] {
            assert_eq!(broken(message, usize::MAX), [message]);
        }
    }
}
