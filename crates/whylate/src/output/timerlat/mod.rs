// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `timerlat` shows, in rtla's layout: scripts that read rtla's go on working.

pub mod analysis;
pub mod hist;
pub mod late;
pub mod percentiles;
pub mod top;
pub mod total;
pub mod trace;

/// What figures are shown in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Whole microseconds.
    #[default]
    Microseconds,
    Nanoseconds,
}

impl Unit {
    /// Its length in nanoseconds.
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

/// A thread's name and id, as a terminal may show them.
pub fn printable_task(thread: &str) -> String {
    whylate_model::units::printable(thread)
}

/// Days and the time since the beginning.
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
