// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress line on a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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
            // A failed write of progress does not matter.
            let _ = write!(io::stderr(), "{CLEAR_LINE}{}: {text} ...{}", self.label, self.hint);
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
            self.show(&format!("explaining, {} %", percent_back(from_ns, to_ns, reached_ns)));
            goes_on()
        }
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
    fn percentage_is_clamped() {
        let shares = [300, 200, 150, 100, 50].map(|reached_ns| percent_back(100, 200, reached_ns));
        assert_eq!(shares, [0, 0, 50, 100, 100]);
        assert_eq!(percent_back(100, 100, 100), 0);
    }
}
