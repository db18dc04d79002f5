// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress line on a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::terminal::columns_of;

/// Moves the cursor to the start of the line and clears it.
const CLEAR_LINE: &str = "\r\x1b[K";
/// Minimum interval between updates during a calculation.
const PACE: Duration = Duration::from_millis(200);

/// Line on standard error that is rewritten, and cleared on drop.
#[derive(Debug)]
pub struct Progress {
    label: String,
    /// Text after the progress, such as how to end.
    hint: &'static str,
    is_terminal: bool,
    /// Whether the line has text now.
    has_text: AtomicBool,
}

impl Progress {
    /// Creates the line; `label` describes the activity of the command.
    pub fn new(label: impl Into<String>) -> Self {
        let is_terminal = io::stderr().is_terminal();
        Progress { label: label.into(), hint: "", is_terminal, has_text: AtomicBool::new(false) }
    }

    /// Also says how to end the command.
    pub fn until_interrupted(mut self) -> Self {
        self.hint = " Hit Ctrl-C to end.";
        self
    }

    /// Shows the progress.
    pub fn show(&self, text: &str) {
        if self.is_terminal {
            self.has_text.store(true, Ordering::Relaxed);
            let columns = columns_of(&io::stderr()).unwrap_or(usize::MAX);
            // A failed write of progress does not matter.
            let _ = write!(io::stderr(), "{CLEAR_LINE}{}", in_room(&self.label, text, self.hint, columns));
        }
    }

    /// Removes the line.
    pub fn clear(&self) {
        if self.has_text.swap(false, Ordering::Relaxed) {
            let _ = write!(io::stderr(), "{CLEAR_LINE}");
        }
    }

    /// Returns a callback for a walk backward through a span: given the time reached, it shows the percentage done, and
    /// returns whether to continue.
    pub fn back<'a>(
        &'a self,
        from_ns: u64,
        to_ns: u64,
        goes_on: &'a mut (dyn FnMut() -> bool + Send),
    ) -> impl FnMut(u64) -> bool + Send + 'a {
        let mut shown = Instant::now();
        move |reached_ns| {
            if shown.elapsed() < PACE {
                return true;
            }
            shown = Instant::now();
            self.show(&format!("explaining, {}%", percent_back(from_ns, to_ns, reached_ns)));
            goes_on()
        }
    }
}

/// Returns one line, as a second one could not be rewritten. If it is too long, the hint is left out, then the end.
fn in_room(label: &str, text: &str, hint: &str, columns: usize) -> String {
    let line = format!("{label}: {text} ...");
    let fits = |line: &str| line.chars().count() < columns;
    match format!("{line}{hint}") {
        whole if fits(&whole) => whole,
        _ if fits(&line) => line,
        _ => line.chars().take(columns.saturating_sub(1)).collect(),
    }
}

/// Returns the percentage of a span between the time reached and its end.
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
    fn line_fits_a_terminal() {
        let at = |columns| in_room("Recording", "1 s", " Hit Ctrl-C to end.", columns);
        let line = "Recording: 1 s ...";
        assert_eq!([at(38), at(37), at(19)], [&format!("{line} Hit Ctrl-C to end."), line, line]);
        assert_eq!([at(10), at(0)], ["Recording", ""]);
    }

    #[test]
    fn percentage_is_clamped() {
        let shares = [300, 200, 150, 100, 50].map(|reached_ns| percent_back(100, 200, reached_ns));
        assert_eq!(shares, [0, 0, 50, 100, 100]);
        assert_eq!(percent_back(100, 100, 100), 0);
    }
}
