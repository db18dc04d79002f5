// SPDX-License-Identifier: MIT OR Apache-2.0
//! Explains a command's elapsed time: its critical path, and the longest waits on it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::build::{Names, PathBuilder, PathSegment};
use super::working::Working;
use super::{Actor, CpuTimeline, Finding, Limits, Query, ThreadRecords, walk};
use crate::reclaim::{Reclaim, ReclaimCounter};
use crate::work::Work;

/// Maximum number of waits listed one by one.
const MAX_LONGEST: usize = 5;

/// A command's elapsed time, explained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Explained {
    /// Elapsed time in nanoseconds.
    pub elapsed_ns: u64,
    /// Critical path, in order of time: the segments add up to the elapsed time.
    pub path: Vec<PathSegment>,
    /// Equal parts are summed, because there were too many to keep their order.
    pub is_folded: bool,
    /// Longest waits of the command's threads for other actors, longest first.
    pub longest: Vec<LongWait>,
    /// Functions in which the command's threads worked on the path, if threads were sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// Time on the path in which the command's threads reclaimed memory, by reason. It is part of the path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reclaim: Vec<Reclaim>,
}

/// What `--json` prints about a command that was run, or that a trace has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CommandReport {
    /// The command.
    pub command: String,
    /// Of a trace: whether it has the creation of the command's thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_born: Option<bool>,
    /// Of a trace: whether it has the creation and the exit of the command's thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_whole: Option<bool>,
    /// The elapsed time.
    #[serde(flatten)]
    pub explained: Explained,
    /// Lost events, by reason.
    pub lost: BTreeMap<String, u64>,
    /// What is not known, and why: of a trace, which kinds of events it lacks; of a command, what could not be measured.
    #[serde(default, rename = "weaker", skip_serializing_if = "Option::is_none")]
    pub limitations: Option<Vec<String>>,
}

/// One wait on the path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LongWait {
    /// Start of the wait, since the start of the command.
    pub after_ns: u64,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Path of the wait.
    pub path: Vec<PathSegment>,
}

/// A wait that is being walked back.
struct OpenWait {
    found: PathBuilder,
    ns: u64,
    from_ns: u64,
}

/// Explains the elapsed time of a command from its start to its end, with what else its threads did.
pub fn explain(
    past: &mut dyn CpuTimeline,
    asked: Query,
    limits: &dyn Limits,
    names: &mut dyn Names,
    records: &ThreadRecords,
) -> Explained {
    let (mut found, mut work) = (PathBuilder::default(), Working::new(&records.samples));
    let mut reclaim = ReclaimCounter::new(&records.reclaim);
    let mut longest: Vec<OpenWait> = Vec::new();
    let mut open: Option<OpenWait> = None;
    // The command's thread that is followed.
    let mut followed = asked.tid;
    let mut keep = |wait: Option<OpenWait>| {
        let Some(wait) = wait else { return };
        longest.push(wait);
        longest.sort_by_key(|wait| Reverse(wait.ns));
        longest.truncate(MAX_LONGEST);
    };
    walk(past, &[asked], limits, &mut |_, finding| {
        found.add(finding);
        if let Finding::Segment(segment) = finding
            && segment.ready.is_none()
            && !matches!(segment.who, Actor::Thread { is_member: false, .. })
        {
            work.add(0, &segment);
        }
        match finding {
            Finding::WakeupEdge(hop) if hop.within.is_none() => {
                followed = hop.tid;
                keep(open.replace(OpenWait { found: PathBuilder::default(), ns: 0, from_ns: 0 }));
            }
            Finding::Segment(segment) if segment.hop.is_none() => {
                keep(open.take());
                // Interrupts and stolen time came into the thread that goes on after them.
                let on_cpu = if let Actor::Thread { tid, .. } = segment.who { tid } else { followed };
                followed = segment.ready.unwrap_or(on_cpu);
                reclaim.add(followed, segment.from_ns..segment.to_ns, segment.ready.is_none());
            }
            Finding::Segment(segment) => {
                reclaim.add(followed, segment.from_ns..segment.to_ns, false);
                if let Some(open) = &mut open {
                    open.ns += segment.to_ns - segment.from_ns;
                    open.from_ns = segment.from_ns;
                }
            }
            _ => {}
        }
        if let Some(open) = &mut open {
            open.found.add(finding);
        }
    });
    keep(open);
    let longest = longest.into_iter().map(|wait| LongWait {
        after_ns: wait.from_ns.saturating_sub(asked.from_ns),
        ns: wait.ns,
        path: wait.found.finish(names).segments,
    });
    let longest = longest.collect();
    let path = found.finish(names);
    Explained {
        elapsed_ns: asked.to_ns.saturating_sub(asked.from_ns),
        path: path.segments,
        is_folded: path.is_folded,
        longest,
        work: work.finish(),
        reclaim: reclaim.finish(),
    }
}
