// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the waits that each part of a path lies within.

use super::PathSegment;

/// Returns, for each segment of a path in order of time, the waits that enclose it, outermost first. Each wait is
/// represented by the nearest segment that is directly a part of it, which has the waiter and what it waited in; `None`
/// if all of the wait is in nested waits.
pub fn within(path: &[PathSegment]) -> Vec<Vec<Option<&PathSegment>>> {
    // The wakee continues after a wait, so the segment that follows within the same wait takes precedence.
    let mut around = vec![Vec::new(); path.len()];
    let mut open = Vec::new();
    for (index, segment) in path.iter().enumerate().rev() {
        enter(&mut open, segment);
        around[index].clone_from(&open);
    }
    open.clear();
    for (around, segment) in around.iter_mut().zip(path) {
        enter(&mut open, segment);
        around.iter_mut().zip(&open).for_each(|(after, before)| *after = after.or(*before));
    }
    around
}

/// Closes the waits that do not enclose the segment, and makes it the representative of its own wait.
fn enter<'a>(open: &mut Vec<Option<&'a PathSegment>>, segment: &'a PathSegment) {
    open.resize(segment.depth as usize, None);
    if let Some(own) = open.last_mut() {
        *own = Some(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(depths: &[u32]) -> Vec<String> {
        let named =
            |(index, &depth): (usize, &u32)| PathSegment { who: index.to_string().into(), depth, ..Default::default() };
        let path: Vec<PathSegment> = depths.iter().enumerate().map(named).collect();
        let labels = |waits: Vec<Option<&PathSegment>>| {
            waits.into_iter().map(|wait| wait.map_or("?".to_owned(), |wait| wait.who.to_string())).collect::<String>()
        };
        within(&path).into_iter().map(labels).collect()
    }

    #[test]
    fn wait_is_represented_by_next_or_else_previous_segment() {
        // The second wait had started already when the first thread blocked.
        assert_eq!(waits(&[2, 1, 0]), ["10", "1", ""]);
        assert_eq!(waits(&[1, 2, 3, 2, 1]), ["0", "41", "432", "43", "4"]);
        assert_eq!(waits(&[1, 2, 0, 2, 1]), ["0", "01", "", "43", "4"]);
        // No segment between them is directly a part of the wait.
        assert_eq!(waits(&[3, 1, 0, 2]), ["1?0", "1", "", "?3"]);
        assert!(waits(&[]).is_empty());
    }
}
