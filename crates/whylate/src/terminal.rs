// SPDX-License-Identifier: MIT OR Apache-2.0
//! Returns the widths of terminals, and breaks text to fit them.

use std::os::fd::AsFd;

/// Returns the width of a terminal; `None` if the file is not a terminal, or the terminal has no size.
pub fn columns_of(terminal: &impl AsFd) -> Option<usize> {
    rustix::termios::tcgetwinsize(terminal).ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

/// Breaks a text at spaces into lines of at most this width; a longer word has a line of its own.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut width = 0;
    for word in text.split(' ') {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > columns {
            lines.push(String::new());
            width = 0;
        }
        let Some(line) = lines.last_mut() else { break };
        if width > 0 {
            line.push(' ');
            width += 1;
        }
        line.push_str(word);
        width += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_at_spaces() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("a unbreakable b", 5), ["a", "unbreakable", "b"]);
        assert_eq!(wrapped("", 5), [""]);
        assert_eq!(wrapped("one two", usize::MAX), ["one two"]);
    }
}
