// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups the segments of a path by the waits that enclose them.

use super::PathSegment;

/// A piece of a path at some depth.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// A segment within no further wait.
    Own(&'a PathSegment),
    /// A wait and all segments within it.
    Wait {
        /// A segment with the waiter and what it waited in; one of a nested wait if the wait has no segment of its own.
        outer: &'a PathSegment,
        /// All segments of the wait, at least one.
        within: &'a [PathSegment],
    },
}

/// Returns the pieces of a path, or of the inside of one of its waits, at this depth, in order.
pub fn pieces(path: &[PathSegment], depth: u32) -> impl Iterator<Item = Piece<'_>> {
    let mut left = path;
    std::iter::from_fn(move || {
        let first = left.first()?;
        if first.depth <= depth {
            left = &left[1..];
            return Some(Piece::Own(first));
        }
        let is_outer = |segment: &&PathSegment| segment.depth == depth + 1;
        let run = left.iter().position(|segment| segment.depth <= depth).unwrap_or(left.len());
        let outer = left[..run].iter().find(is_outer).unwrap_or(first);
        // If two waits are adjacent, their own segments separate them.
        let is_other = |segment: &PathSegment| is_outer(&segment) && !segment.is_of_same_wait(outer);
        let end = left[..run].iter().position(is_other).unwrap_or(run);
        let (within, rest) = left.split_at(end);
        left = rest;
        Some(Piece::Wait { outer, within })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ActorName;

    #[test]
    fn wait_piece_ends_where_next_begins() {
        let part = |depth, waiter: &str| PathSegment { depth, waiter: Some(waiter.into()), ..PathSegment::default() };
        let path = [
            part(2, "server"),
            part(1, "client"),
            part(2, "server"),
            part(1, "other"),
            part(2, "helper"),
            part(0, ""),
            part(2, "server"),
        ];
        let of = |piece: Piece<'_>| match piece {
            Piece::Own(segment) => (segment.waiter.clone().unwrap_or_default(), 0),
            Piece::Wait { outer, within } => (outer.waiter.clone().unwrap_or_default(), within.len()),
        };
        let grouped: Vec<_> = pieces(&path, 0).map(of).collect();
        let expected = [("client", 3), ("other", 2), ("", 0), ("server", 1)];
        assert_eq!(grouped, expected.map(|(waiter, parts)| (ActorName::from(waiter), parts)));
    }
}
