// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names threads for which a program waited on a CPU: with their priorities, and in one row if they have one name.

use std::collections::{BTreeMap, BTreeSet};

use whylate_model::path::PathSegment;
use whylate_model::{ActorName, CauseKind};

/// Priority of most threads.
const NORMAL: &str = "nice 0";

/// Strips the TIDs of threads that ran while others waited for their CPU, where several have one name: a program's threads
/// are one row.
pub(super) fn with_names_alone(path: Vec<PathSegment>) -> Vec<PathSegment> {
    let mut threads: BTreeMap<ActorName, BTreeSet<u32>> = BTreeMap::new();
    for segment in path.iter().filter(|segment| segment.kind == CauseKind::Thread) {
        threads.entry(segment.who.by_name()).or_default().extend(segment.who.tid());
    }
    let is_of_many = |who: &ActorName| threads.get(&who.by_name()).is_some_and(|tids| tids.len() > 1);
    let stripped = |segment: PathSegment| match segment.kind == CauseKind::Thread && is_of_many(&segment.who) {
        true => PathSegment { who: segment.who.by_name(), ..segment },
        false => segment,
    };
    path.into_iter().map(stripped).collect()
}

/// Adds the priorities of the waiting thread and of the running one to run-queue waits, if they differ.
pub(super) fn with_priorities(
    path: &[PathSegment],
    priority: &mut dyn FnMut(u32) -> Option<String>,
) -> Vec<PathSegment> {
    let mut known: BTreeMap<u32, Option<String>> = BTreeMap::new();
    let mut of = |thread: &ActorName| {
        let tid = thread.tid()?;
        known.entry(tid).or_insert_with(|| priority(tid)).clone()
    };
    let mut segments = path.to_vec();
    for segment in segments.iter_mut().filter(|segment| segment.kind == CauseKind::Thread) {
        let Some(of_who) = of(&segment.who) else { continue };
        // Waits of several threads are merged.
        let Some((ready, of_ready)) = segment.ready.as_ref().and_then(|ready| Some((ready, of(ready)?))) else {
            if of_who != NORMAL {
                segment.who = segment.who.clone().within("", &format!(" ({of_who})"));
            }
            continue;
        };
        if of_ready != of_who {
            let priorities = format!(" ({of_who}; {}: {of_ready})", ready.comm().unwrap_or_default());
            segment.who = segment.who.clone().within("", &priorities);
        }
    }
    segments
}
