// SPDX-License-Identifier: MIT OR Apache-2.0
//! One line on a terminal that says how far a command is.

use std::cell::Cell;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Back to the line's start, and clear it.
const CLEAR_LINE: &str = "\r\x1b[K";
/// How often the line of a calculation changes.
const PACE: Duration = Duration::from_millis(200);

/// The line, which is written again and again on standard error, until it is dropped.
#[derive(Debug)]
pub struct Progress {
    label: String,
    is_terminal: bool,
    /// Whether the line has text now.
    has_text: Cell<bool>,
}

impl Progress {
    /// What the command does, in words.
    pub fn new(label: impl Into<String>) -> Self {
        Progress { label: label.into(), is_terminal: io::stderr().is_terminal(), has_text: Cell::new(false) }
    }

    /// Writes how far it is.
    pub fn show(&self, text: &str) {
        if self.is_terminal {
            self.has_text.set(true);
            // A failed write of progress matters to nobody.
            let _ = write!(io::stderr(), "{CLEAR_LINE}{}: {text} ...", self.label);
        }
    }

    /// Removes the line.
    pub fn clear(&self) {
        if self.has_text.take() {
            let _ = write!(io::stderr(), "{CLEAR_LINE}");
        }
    }

    /// For a way back through a span: shows the share that was gone when it is called with the time that was reached, and
    /// returns what `goes_on` does.
    pub fn back<'a>(
        &'a self,
        from_ns: u64,
        to_ns: u64,
        goes_on: &'a mut dyn FnMut() -> bool,
    ) -> impl FnMut(u64) -> bool + 'a {
        let mut shown = Instant::now();
        move |reached_ns| {
            if shown.elapsed() < PACE {
                return true;
            }
            shown = Instant::now();
            self.show(&format!("explaining, {} %", percent_back(from_ns, to_ns, reached_ns)));
            goes_on()
        }
    }
}

/// How much of a span lies between its end and the time that was reached.
fn percent_back(from_ns: u64, to_ns: u64, reached_ns: u64) -> u128 {
    let (gone_ns, whole_ns) = (to_ns.saturating_sub(reached_ns), to_ns.saturating_sub(from_ns).max(1));
    u128::from(gone_ns.min(whole_ns)) * 100 / u128::from(whole_ns)
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_that_was_gone_back_is_between_none_and_all() {
        let shares = [300, 200, 150, 100, 50].map(|reached_ns| percent_back(100, 200, reached_ns));
        assert_eq!(shares, [0, 0, 50, 100, 100]);
        assert_eq!(percent_back(100, 100, 100), 0);
    }
}
