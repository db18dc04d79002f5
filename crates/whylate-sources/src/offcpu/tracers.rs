// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tracer of a traced thread, such as a debugger.

use whylate_model::wait::State;
use whylate_model::{ActorName, Stack};

use crate::kernel::pid_namespace;
use crate::paths::tracer_of;

/// Appends the tracer to the wait of a traced thread, if the stack has a TID.
pub(super) fn append_tracer(stack: &mut Stack) {
    let is_traced = stack.state == State::Traced.name();
    let Some(wait) = stack.wait.as_mut().filter(|_| is_traced && pid_namespace::has_proc()) else { return };
    let tid = stack.labels.get("tid").and_then(|tid| tid.parse().ok());
    if let Some((tracer, name)) = tid.and_then(tracer_of) {
        wait.rule = format!("{}: {}", wait.rule, ActorName::thread(name.text(), tracer));
    }
}
