// SPDX-License-Identifier: MIT OR Apache-2.0
//! A past that is long: whoever goes back through it says how far that is, and may stop.

use super::history::{Past, Slice};

/// After so many slices it is asked whether to go on.
const STEP: u32 = 4_096;

/// A past, with a function that is called now and then with the time that was reached. Where that is false, nothing is
/// known of earlier times.
pub struct Watched<'a, P> {
    /// The past itself.
    pub past: P,
    goes_on: &'a mut dyn FnMut(u64) -> bool,
    slices: u32,
    is_over: bool,
}

impl<'a, P: Past> Watched<'a, P> {
    /// Of one that has not been gone back through.
    pub fn new(past: P, goes_on: &'a mut dyn FnMut(u64) -> bool) -> Self {
        Watched { past, goes_on, slices: 0, is_over: false }
    }
}

impl<P: Past> Past for Watched<'_, P> {
    fn cpus(&self) -> usize {
        self.past.cpus()
    }

    fn previous(&mut self, cpu: usize) -> Option<Slice> {
        if self.is_over {
            return None;
        }
        let slice = self.past.previous(cpu)?;
        self.slices += 1;
        if self.slices == STEP {
            self.slices = 0;
            self.is_over = !(self.goes_on)(slice.start_ns);
        }
        Some(slice)
    }
}

#[cfg(test)]
mod tests {
    use super::super::history::{Holder, Recorded};
    use super::*;

    #[test]
    fn a_past_that_is_stopped_has_no_earlier_times() {
        let slice = |at| Slice { start_ns: at, end_ns: at + 1, holder: Holder::Idle, ..Slice::default() };
        let slices = 10 * u64::from(STEP);
        let past = Recorded { cpus: vec![(0..slices).map(slice).collect()] };
        for (most, expected) in [(3, 3 * u64::from(STEP)), (usize::MAX, slices)] {
            let mut reached = Vec::new();
            let mut goes_on = |at_ns| {
                reached.push(at_ns);
                reached.len() < most
            };
            let mut watched = Watched::new(past.backwards(), &mut goes_on);
            let all: Vec<Slice> = std::iter::from_fn(|| watched.previous(0)).collect();
            assert_eq!(all.len() as u64, expected);
            assert!(reached.is_sorted_by(|one, other| one > other) && reached.len() == most.min(10), "{reached:?}");
        }
    }
}
