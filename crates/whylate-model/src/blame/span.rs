// SPDX-License-Identifier: MIT OR Apache-2.0
//! Spans of time on CLOCK_MONOTONIC.

/// A span of time; empty where `to_ns` is not after `from_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub from_ns: u64,
    pub to_ns: u64,
}

impl Span {
    pub fn ns(self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// Clips the span to `outer`; returns an empty span inside `outer` if they do not overlap.
    pub fn within(self, outer: Span) -> Span {
        let clip = |ns: u64| ns.clamp(outer.from_ns, outer.to_ns.max(outer.from_ns));
        let from_ns = clip(self.from_ns);
        Span { from_ns, to_ns: clip(self.to_ns).max(from_ns) }
    }
}
