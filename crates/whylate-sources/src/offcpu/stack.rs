// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks as snapshots have them: labels, frames, and the class of the wait.

use std::collections::HashMap;

use whylate_model::thread::number;
use whylate_model::wait::{Classes, InFlight, State, WaitEvidence, classify};
use whylate_model::{Labels, Stack};

use super::code_files::Frames;
use super::names::{TORN, UNREAD, UNREADABLE, UNWOUND_PARTLY};
use super::places::PlaceDelta;
use super::skel::types::{place_key, user_end};
use super::state;
use crate::kernel::attach;
use crate::kernel::in_flight::in_flight;

/// Strips the suffixes that compilers add to the names of parts and clones of functions.
pub(super) fn plain(name: &str) -> &str {
    const CLONE_SUFFIXES: [&str; 6] = [".isra.", ".constprop.", ".part.", ".cold", ".llvm.", ".lto_priv."];
    // An address that belonged to two functions over time has both names.
    if !name.contains('.') || name.contains(" or ") {
        return name;
    }
    let end = CLONE_SUFFIXES.iter().filter_map(|suffix| name.find(suffix)).filter(|&at| at > 0).min();
    &name[..end.unwrap_or(name.len())]
}

pub(super) fn user_frames(
    key: &place_key,
    addresses: &[u64],
    names: &HashMap<(u32, u64, bool), Frames>,
) -> Vec<String> {
    let mut user: Vec<String> = addresses
        .iter()
        .enumerate()
        .flat_map(|(depth, &address)| {
            let frames = names.get(&(key.process, address, depth == 0));
            frames.cloned().unwrap_or_else(|| vec![format!("{address:#x}")])
        })
        .collect();
    match user_end(key.user_end.into()) {
        user_end::USER_PARTLY => user.push(UNWOUND_PARTLY.to_owned()),
        user_end::USER_TORN => user.push(TORN.to_owned()),
        user_end::USER_UNREAD => user.push(UNREAD.to_owned()),
        user_end::USER_UNREADABLE => user.push(UNREADABLE.to_owned()),
        _ => {}
    }
    user
}

/// Labels of the thread and process of a stack.
pub(super) fn labels_of(key: &place_key, process: Option<&(u32, String)>) -> Labels {
    let mut labels: Labels = [("thread".to_owned(), attach::text(&key.comm))].into();
    if let Some((pid, name)) = process {
        labels.insert("process".to_owned(), name.clone());
        labels.insert("pid".to_owned(), number(*pid));
    }
    if key.tid != 0 {
        labels.insert("tid".to_owned(), number(key.tid));
    }
    if key.is_kernel != 0 {
        labels.insert("kernel".to_owned(), "yes".to_owned());
    }
    labels
}

pub(super) fn stack_of(
    place: &PlaceDelta,
    [kernel, user]: [Vec<String>; 2],
    process: Option<&(u32, String)>,
    cgroup: Option<String>,
    classes: &Classes,
) -> Stack {
    let (key, sum) = (&place.key, place.sum);
    let state = state::from_number(key.state);
    let syscall = crate::kernel::syscalls::name(key.syscall);
    let seen = WaitEvidence {
        state,
        in_iowait: key.in_iowait != 0,
        is_kernel: key.is_kernel != 0,
        syscall: syscall.as_deref(),
        kernel: &kernel,
        user: &user,
        in_flight: process.map_or(InFlight::Unknown, |(pid, _)| in_flight(*pid, &kernel)),
    };
    let wait = classify(&seen, classes);
    let mut labels = labels_of(key, process);
    labels.extend(syscall.map(|call| ("syscall".to_owned(), call)));
    labels.extend(cgroup.map(|path| ("cgroup".to_owned(), path)));
    Stack {
        labels,
        state: state.letter().to_string(),
        samples: sum.samples,
        weight_ns: sum.ns,
        waits: sum.waits,
        wait: (state != State::Other || !kernel.is_empty()).then_some(wait),
        kernel,
        user,
        ..Stack::default()
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn strips_clone_suffixes() {
        for (name, shown) in [
            ("sigsuspend.isra.0", "sigsuspend"),
            ("poll_schedule_timeout.constprop.0.isra.1", "poll_schedule_timeout"),
            ("futex_wait", "futex_wait"),
            ("0xffffffff81000000", "0xffffffff81000000"),
        ] {
            assert_eq!(plain(name), shown);
        }
    }
}
