// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints a view that is refreshed: over the previous one on a terminal, below it elsewhere.

use std::io::{self, Write};

/// Moves the cursor to the upper left corner.
const HOME: &str = "\x1b[H";
/// Clears the rest of a previous, longer line.
const REST_OF_LINE: &str = "\x1b[K";
const REST_OF_SCREEN: &str = "\x1b[J";
const EVERYTHING: &str = "\x1b[2J";

/// A terminal, or a file.
#[derive(Debug)]
pub struct Screen {
    /// Returns rows and columns of the terminal; `None` for a file.
    size: fn() -> Option<(usize, usize)>,
    is_first: bool,
}

/// Returns rows and columns of standard output. Only a terminal has a size, and it may change.
fn size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_row > 1 && size.ws_col > 0).then(|| (size.ws_row.into(), size.ws_col.into()))
}

impl Screen {
    /// Creates the screen for standard output.
    pub fn new() -> Self {
        Screen { size, is_first: true }
    }

    /// Prints a view. On a terminal, it replaces the previous one in one write, without flicker.
    pub fn show(&mut self, out: &mut dyn Write, view: &str) -> io::Result<()> {
        let Some((rows, columns)) = (self.size)() else {
            return out.write_all(view.as_bytes());
        };
        let mut text = String::from(if self.is_first { EVERYTHING } else { "" });
        self.is_first = false;
        text.push_str(HOME);
        // The last line is the cursor's.
        for line in view.lines().take(rows - 1) {
            text.extend(line.chars().take(columns));
            text.push_str(REST_OF_LINE);
            text.push('\n');
        }
        text.push_str(REST_OF_SCREEN);
        out.write_all(text.as_bytes())
    }

    /// Keeps the current view, as other output follows it. The next view clears the screen.
    pub fn keep(&mut self) {
        self.is_first = true;
    }

    /// Clears the view for the final output.
    pub fn leave(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if (self.size)().is_some() && !self.is_first {
            write!(out, "{HOME}{REST_OF_SCREEN}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(mut screen: Screen, views: &[&str]) -> String {
        let mut out = Vec::new();
        for view in views {
            screen.show(&mut out, view).expect("a vector takes everything");
        }
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_file_gets_no_escape_codes() {
        assert_eq!(shown(Screen { size: || None, is_first: true }, &["a\nb\n", "c\n"]), "a\nb\nc\n");
    }

    #[test]
    fn kept_view_is_not_cleared_at_end() {
        let end = |is_kept: bool| {
            let (mut screen, mut out) = (Screen { size: || Some((3, 4)), is_first: true }, Vec::new());
            screen.show(&mut out, "a\n").expect("a vector takes everything");
            if is_kept {
                screen.keep();
            }
            let shown = out.len();
            screen.leave(&mut out).expect("a vector takes everything");
            String::from_utf8(out.split_off(shown)).expect("text")
        };
        assert_eq!((end(true), end(false)), (String::new(), format!("{HOME}{REST_OF_SCREEN}")));
    }

    #[test]
    fn terminal_is_cleared_once_then_overwritten() {
        let text = shown(Screen { size: || Some((3, 4)), is_first: true }, &["abcdef\nb\nc\n", "d\n"]);
        assert_eq!(text, "\x1b[2J\x1b[Habcd\x1b[K\nb\x1b[K\n\x1b[J\x1b[Hd\x1b[K\n\x1b[J");
    }
}
