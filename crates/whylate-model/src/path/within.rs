// SPDX-License-Identifier: MIT OR Apache-2.0
//! In whose waits each part of a path lies.

use super::PathSegment;

/// Of each segment of a path in order of time, the waits that it lies within, the outermost first: each by the nearest
/// segment that is directly a part of it, which knows who waited and where. `None` for a wait that has no such segment,
/// because all of it went into a wait within it.
pub fn within(path: &[PathSegment]) -> Vec<Vec<Option<&PathSegment>>> {
    // Whoever is woken goes on: what follows within the same wait tells of it first.
    let mut around = vec![Vec::new(); path.len()];
    let mut open = Vec::new();
    for (place, segment) in path.iter().enumerate().rev() {
        enter(&mut open, segment);
        around[place].clone_from(&open);
    }
    open.clear();
    for (around, segment) in around.iter_mut().zip(path) {
        enter(&mut open, segment);
        around.iter_mut().zip(&open).for_each(|(after, before)| *after = after.or(*before));
    }
    around
}

/// Leaves the waits that the segment is not within, and goes to its own.
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
            |(place, &depth): (usize, &u32)| PathSegment { who: place.to_string(), depth, ..Default::default() };
        let path: Vec<PathSegment> = depths.iter().enumerate().map(named).collect();
        let told = |waits: Vec<Option<&PathSegment>>| {
            waits.into_iter().map(|wait| wait.map_or("?", |wait| &wait.who).to_owned()).collect::<String>()
        };
        within(&path).into_iter().map(told).collect()
    }

    #[test]
    fn a_wait_is_known_by_what_follows_within_it_or_else_by_what_came_before() {
        // The second was waited for already when the first fell asleep.
        assert_eq!(waits(&[2, 1, 0]), ["10", "1", ""]);
        assert_eq!(waits(&[1, 2, 3, 2, 1]), ["0", "41", "432", "43", "4"]);
        assert_eq!(waits(&[1, 2, 0, 2, 1]), ["0", "01", "", "43", "4"]);
        // Nothing of what lies between is its own.
        assert_eq!(waits(&[3, 1, 0, 2]), ["1?0", "1", "", "?3"]);
        assert!(waits(&[]).is_empty());
    }
}
