// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders `timerlat` in rtla's layout, so that scripts for rtla keep working.

pub mod analysis;
pub mod hist;
pub mod late;
pub mod percentiles;
pub mod top;
pub mod total;
pub mod trace;
pub mod verdict;

/// Unit of the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Whole microseconds.
    #[default]
    Microseconds,
    Nanoseconds,
}

impl Unit {
    /// Returns the unit in nanoseconds.
    pub fn ns(self) -> u64 {
        match self {
            Unit::Microseconds => 1_000,
            Unit::Nanoseconds => 1,
        }
    }

    fn short(self) -> &'static str {
        match self {
            Unit::Microseconds => "us",
            Unit::Nanoseconds => "ns",
        }
    }
}

/// Renders a thread's name and TID without control characters.
pub fn printable_task(thread: &str) -> String {
    whylate_model::units::printable(thread)
}

/// Renders the time since the start, with days.
fn stamp(duration_ns: u64) -> String {
    let seconds = duration_ns / 1_000_000_000;
    format!("{:3} {:02}:{:02}:{:02}", seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_days_and_a_time() {
        assert_eq!(stamp(0), "  0 00:00:00");
        assert_eq!(stamp((2 * 86_400 + 3_723) * 1_000_000_000 + 999), "  2 01:02:03");
    }
}
