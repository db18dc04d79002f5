// SPDX-License-Identifier: MIT OR Apache-2.0
//! The source while it samples, and snapshots of what it has gathered.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use whylate_model::thread::number;
use whylate_model::wait::{Classes, InFlight, Seen, State, classify};
use whylate_model::{Labels, LateEvent, Series, Snapshot, Stack};

use super::holders::{self, Holders};
use super::named::Named;
use super::names::{Frames, TORN, UNREAD, UNREADABLE, UNWOUND_PARTLY};
use super::pace::Pace;
use super::patience::Worker;
use super::places::Place;
use super::sampler::{Gathered, Met, Sampler};
use super::skel::types::{place_key, thread_now, user_end};
use super::{INFO, OffcpuOptions, TRACE, state, submitted, tracers};
use crate::attach::{self, Meter, PlainData};
use crate::clock;
use crate::pid_namespace;
use crate::session::Session;
use crate::source::{AttachError, Attached};

/// The source `offcpu`, sampling on a thread of its own. Its programs go with it.
pub struct AttachedOffcpu {
    sampler: Worker<anyhow::Result<Gathered>>,
    named: Named,
    host: String,
    meter: Meter,
    met: Met,
    /// Where it is not told by a budget.
    rate_hz: Option<u32>,
    backend: &'static str,
    /// What is not as good here as it could be.
    weaker: Option<String>,
}

impl AttachedOffcpu {
    pub(super) fn new(options: &OffcpuOptions, session: &Session, backend: &'static str) -> Result<Self, AttachError> {
        let pace = Pace::new(options, clock::monotonic_ns());
        // Registers are read as x86-64 has them (`unwind_user()`).
        let lacks_user_frames = options.user_stacks && !cfg!(target_arch = "x86_64");
        let no_frames =
            lacks_user_frames.then_some("user frames are read on x86-64 only: stacks have kernel frames only");
        let no_holders = if options.holders { holders::told_here()?.weaker() } else { None };
        let weaker: Vec<&str> = no_frames.into_iter().chain(no_holders).collect();
        let options_there = options.clone();
        let sampler = Worker::start(
            move || Sampler::new(&options_there, backend == TRACE),
            move |sampler, asked| if backend == TRACE { sampler.trace(asked) } else { sampler.run(asked, pace) },
        )?;
        Ok(AttachedOffcpu {
            sampler,
            named: Named::new(options.lines, session.symbols(), options.classes.clone()),
            host: session.host().to_owned(),
            meter: Meter::default(),
            met: Met::default(),
            rate_hz: options.budget_ppm.is_none().then_some(options.rate_hz),
            backend,
            weaker: (!weaker.is_empty()).then(|| weaker.join("; ")),
        })
    }

    /// What the last walk of the last snapshot has met.
    pub fn met(&self) -> Met {
        self.met
    }

    /// They, and how many threads wait for one that was not met.
    fn stacks(&mut self, gathered: &Gathered) -> (Vec<Stack>, u64) {
        let mut stacks = self.named.stacks(gathered);
        let mut holders = Holders::of(&gathered.holders, self.named.kernel());
        let mut ages: HashMap<usize, Vec<u64>> = HashMap::new();
        let mut unmet = 0;
        for (place, thread) in &gathered.threads {
            ages.entry(*place).or_default().push(told_age_ns(gathered.ended_ns.saturating_sub(thread.since_ns)));
            // Where threads are told apart, it is the only one that is here now.
            stacks[*place].waits_for = holders.chain_of(thread.tid);
            unmet += u64::from(holders.is_holder_unmet(thread.tid));
        }
        for (place, ages) in ages {
            stacks[place].age = ages.into_iter().collect();
        }
        stacks.iter_mut().for_each(tracers::tell);
        stacks.sort_by_key(|stack| std::cmp::Reverse(stack.weight_ns));
        (stacks, unmet)
    }
}

/// From a second on, an age is told in whole milliseconds: in a recording of idle threads, digits that mean nothing to anybody
/// would be a sixth of all bytes.
fn told_age_ns(age_ns: u64) -> u64 {
    if age_ns < 1_000_000_000 { age_ns } else { age_ns - age_ns % 1_000_000 }
}

/// The function's name without what the compiler adds to the names of parts and copies of functions.
pub(super) fn plain(name: &str) -> &str {
    const ADDED: [&str; 6] = [".isra.", ".constprop.", ".part.", ".cold", ".llvm.", ".lto_priv."];
    // An address that was in two pieces of code has both names.
    if !name.contains('.') || name.contains(" or ") {
        return name;
    }
    let end = ADDED.iter().filter_map(|added| name.find(added)).filter(|&at| at > 0).min();
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

/// Whose place it is.
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
    place: &Place,
    [kernel, user]: [Vec<String>; 2],
    process: Option<&(u32, String)>,
    cgroup: Option<String>,
    classes: &Classes,
) -> Stack {
    let (key, sum) = (&place.key, place.sum);
    let state = state::of(key.state);
    let syscall = crate::syscalls::name(key.syscall);
    let seen = Seen {
        state,
        in_iowait: key.in_iowait != 0,
        is_kernel: key.is_kernel != 0,
        syscall: syscall.as_deref(),
        kernel: &kernel,
        user: &user,
        in_flight: process.map_or(InFlight::Unknown, |(pid, _)| submitted::in_flight(*pid, &kernel)),
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

impl Attached for AttachedOffcpu {
    fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.named.kernel().list_code();
        let gathered = self.sampler.ask()??;
        let start = clock::unix_ns_of(gathered.began_ns);
        let mut snapshot = Snapshot::new(INFO.card.name, self.backend, &self.host, start);
        snapshot.duration_ns = gathered.ended_ns - gathered.began_ns;
        snapshot.pid_namespace = pid_namespace::own();
        snapshot.ended_ns = gathered.ended_ns;
        let unmet;
        (snapshot.stacks, unmet) = self.stacks(&gathered);
        let unread: u64 = gathered.memory.values().map(|process| process.take_unread()).sum();
        for &(reason, count) in &gathered.lost {
            *snapshot.lost.entry(reason.to_owned()).or_default() += count;
        }
        *snapshot.lost.entry("unread_files".to_owned()).or_default() += unread;
        snapshot.lost.insert("holders_unmet".to_owned(), unmet);
        self.meter.report(gathered.statistics, &mut snapshot);
        self.met = gathered.met;
        let rate_hz = match self.rate_hz {
            _ if self.backend == TRACE => 0.0,
            Some(rate_hz) => f64::from(rate_hz),
            None => (gathered.walks as f64 * 1e10 / snapshot.duration_ns.max(1) as f64).round() / 10.0,
        };
        let values = [
            ("walks", gathered.walks as f64),
            ("rate_hz", rate_hz),
            ("threads", gathered.met.threads as f64),
            ("threads_changed", gathered.met.changed as f64),
            ("walk_ns", gathered.met.took_ns as f64),
            ("walk_cpu_ns", gathered.met.cpu_ns as f64),
        ];
        snapshot.series =
            vec![Series { values: values.map(|(name, value)| (name.to_owned(), value)).into(), ..Series::default() }];
        if let Some(disks) = gathered.disks {
            snapshot.series[0].values.insert("busy_disks".to_owned(), disks.len() as f64);
            snapshot.series.extend(disks);
        }
        Ok(snapshot)
    }

    fn weaker(&self) -> Option<&str> {
        self.weaker.as_deref()
    }

    fn drain_late(&mut self, wait: Duration, _each: &mut dyn FnMut(LateEvent)) -> anyhow::Result<()> {
        // It has none.
        thread::sleep(wait);
        Ok(())
    }
}

#[allow(unsafe_code)]
mod plain {
    use super::super::skel::types::{place_key, process_value, stack_value, wait_key};
    use super::{PlainData, thread_now};

    // SAFETY: integers and arrays of them.
    unsafe impl PlainData for thread_now {}
    // SAFETY: the same.
    unsafe impl PlainData for place_key {}
    // SAFETY: the same.
    unsafe impl PlainData for wait_key {}
    // SAFETY: the same.
    unsafe impl PlainData for process_value {}
    // SAFETY: the same.
    unsafe impl PlainData for stack_value {}
    // SAFETY: an integer.
    unsafe impl PlainData for u32 {}
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn copies_of_functions_have_the_name_of_the_function() {
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
