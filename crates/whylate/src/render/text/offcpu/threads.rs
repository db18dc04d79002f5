// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which stacks are of blocked threads, and which of these are idle by design.

use whylate_model::object::Object;
use whylate_model::{Stack, WaitClass};

/// Returns whether a stack has a thread that has been off CPU for at least `least_ns`.
pub fn is_blocked(stack: &Stack, least_ns: u64) -> bool {
    let is_on_cpu = stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::OnCpu);
    !is_on_cpu && !stack.age.is_empty() && stack.age.max_ns() >= least_ns
}

/// State letter of uninterruptible sleep.
pub const UNINTERRUPTIBLE: &str = "D";

/// Returns whether a thread is idle by design: it has nothing to do, sleeps on a timer, or waits for events. A thread that
/// waits for a stopped process is not.
pub fn is_idle(stack: &Stack) -> bool {
    let class = stack.wait.as_ref().map(|wait| wait.class);
    matches!(class, Some(WaitClass::Idle | WaitClass::Timer))
        && stack.state != UNINTERRUPTIBLE
        && stack.waits_for.is_none()
        && !stack.object.as_ref().is_some_and(Object::has_stopped_peer)
}
