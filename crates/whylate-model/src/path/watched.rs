// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wraps a long timeline to report progress of a walk, and to stop it.

use super::history::{CpuTimeline, RunSlice};

/// Number of slices between two calls of the callback.
const STEP: u32 = 4_096;

/// A timeline with a callback that is called every `STEP` slices with the time that was reached. If it returns false,
/// the timeline ends there.
pub struct Watched<'a, P> {
    /// The wrapped timeline.
    pub past: P,
    goes_on: &'a mut (dyn FnMut(u64) -> bool + Send),
    slices: u32,
    is_over: bool,
}

impl<'a, P: CpuTimeline> Watched<'a, P> {
    /// Wraps a timeline that has not been read yet.
    pub fn new(past: P, goes_on: &'a mut (dyn FnMut(u64) -> bool + Send)) -> Self {
        Watched { past, goes_on, slices: 0, is_over: false }
    }
}

impl<P: CpuTimeline> CpuTimeline for Watched<'_, P> {
    fn cpus(&self) -> usize {
        self.past.cpus()
    }

    fn previous(&mut self, cpu: usize) -> Option<RunSlice> {
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
    fn stopped_timeline_ends_there() {
        let slice = |at| RunSlice { start_ns: at, end_ns: at + 1, holder: Holder::Idle, ..RunSlice::default() };
        let slices = 10 * u64::from(STEP);
        let past = Recorded { cpus: vec![(0..slices).map(slice).collect()] };
        for (most, expected) in [(3, 3 * u64::from(STEP)), (usize::MAX, slices)] {
            let mut reached = Vec::new();
            let mut goes_on = |at_ns| {
                reached.push(at_ns);
                reached.len() < most
            };
            let mut watched = Watched::new(past.backwards(), &mut goes_on);
            let all: Vec<RunSlice> = std::iter::from_fn(|| watched.previous(0)).collect();
            assert_eq!(all.len() as u64, expected);
            assert!(reached.is_sorted_by(|one, other| one > other) && reached.len() == most.min(10), "{reached:?}");
        }
    }
}
