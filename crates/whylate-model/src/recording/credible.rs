// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sanity limits on snapshots: a recording may come from anywhere and may be malicious.

use crate::holders::MAX_LINKS;
use crate::import::DEEPEST;
use crate::object::Object;
use crate::path::DEEPEST as DEEPEST_PATH;
use crate::{LateEvent, Snapshot, Stack};

/// Returns whether stacks and paths are within the depth that whylate writes: renderers recurse as deep as the input
/// says.
pub(super) fn is_credible(snapshot: &Snapshot) -> bool {
    let mut parts = snapshot.programs.held_up.iter().flat_map(|program| &program.parts);
    snapshot.late.iter().all(is_credible_event)
        && snapshot.stacks.iter().all(is_credible_stack)
        && parts.all(|part| {
            part.object.as_ref().is_none_or(Object::is_credible) && part.causes.iter().all(|of| is_stack(&of.stack))
        })
}

pub(super) fn is_credible_stack(stack: &Stack) -> bool {
    let of_waker = stack.waker.iter().flat_map(|waker| [&waker.kernel, &waker.user]);
    [&stack.kernel, &stack.user].into_iter().chain(of_waker).all(|frames| is_stack(frames))
        && stack.waits_for.as_ref().is_none_or(|chain| chain.links.len() <= MAX_LINKS)
        && stack.object.as_ref().is_none_or(Object::is_credible)
}

fn is_credible_event(event: &LateEvent) -> bool {
    [&event.stack, &event.inside].into_iter().all(|frames| is_stack(frames))
        && event.causes.iter().all(|cause| is_stack(&cause.stack))
        && event.path.iter().all(|segment| {
            segment.depth as usize <= DEEPEST_PATH
                && is_stack(&segment.stack)
                && segment.object.as_ref().is_none_or(|object| object.is_credible())
        })
}

fn is_stack(frames: &[String]) -> bool {
    frames.len() <= DEEPEST
}
