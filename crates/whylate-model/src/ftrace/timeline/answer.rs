// SPDX-License-Identifier: MIT OR Apache-2.0
//! Explains a command, and the waits of a thread, from a trace.

use std::cmp::Reverse;

use super::{ImportError, Life, Trace};
use crate::name::Interner;
use crate::path::ThreadRecords;
use crate::path::command::{Explained, explain};
use crate::path::history::{Blocked, Name, RunSlice, SwitchIn, SwitchOut};
use crate::path::{Names, Path, PathBuilder, Query, walk};
use crate::{ActorName, Cgroup};

/// Name that perf gives to a thread that is about to execute the command.
const PERF_EXEC: &str = "perf-exec";

/// Selects the thread to explain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted<'a> {
    /// The thread that the trace seems to be about.
    Any,
    /// The thread with this TID.
    Pid(u32),
    /// A thread of this name.
    Comm(&'a str),
}

/// Why a thread was selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyThis {
    /// The thread was requested; the field is the number of other matching threads.
    Named(usize),
    /// The thread is the first that executed a program.
    FirstExec,
    /// The thread ran longest.
    RanLongest,
}

/// End of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The thread exits.
    Exit,
    /// The trace ends first; this thread of the command was the last one on a CPU.
    StillThere(String),
}

/// The path of a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    /// Label of the command's first thread.
    pub name: String,
    /// Why this thread was selected.
    pub why: WhyThis,
    /// Start of the path.
    pub from_ns: u64,
    /// Whether the path starts with the creation of the thread; otherwise, with the trace.
    pub is_born: bool,
    /// End of the path.
    pub to_ns: u64,
    /// End of the path.
    pub end: End,
    /// The elapsed time, explained.
    pub explained: Explained,
}

/// A wait of a thread.
#[derive(Clone, Debug, PartialEq)]
pub struct LateWait {
    /// Time of the switch-out.
    pub from_ns: u64,
    /// Time of the switch-in.
    pub to_ns: u64,
    /// The path of the wait.
    pub path: Path,
}

impl Trace {
    /// Returns the path of a command, from its creation to its exit.
    ///
    /// # Errors
    /// Fails if there is no such thread.
    pub fn command(&mut self, wanted: Wanted<'_>) -> Result<Command, ImportError> {
        let (chosen, why) = self.choose(wanted)?;
        let (first, last) = self.lives.first_and_last(chosen);
        self.lives.mark(&mut self.past, first);
        let (life, first_life) = (&self.lives.all[last], &self.lives.all[first]);
        let last = || self.past.cpus.iter().flatten().filter(|slice| slice.is_member).max_by_key(|slice| slice.end_ns);
        let (tid, to_ns, end) = match (life.died_ns, last()) {
            (Some(died_ns), _) => (life.tid, died_ns, End::Exit),
            (None, Some(last)) => (last.holder.tid().unwrap_or(life.tid), last.end_ns, End::StillThere(last.called())),
            (None, None) => return Err(ImportError::NoSuchThread(format!("{}, with a CPU", called(life)))),
        };
        let from_ns = first_life.born_ns.unwrap_or(self.begin_ns);
        let asked = Query { tid, from_ns, to_ns, is_wait: false, is_command: true };
        let names = &mut TraceNames { handlers: &self.handlers };
        let explained = explain(&mut self.past.backwards(), asked, &(), names, &ThreadRecords::default());
        Ok(Command { name: called(life), why, from_ns, is_born: first_life.born_ns.is_some(), to_ns, end, explained })
    }

    /// Returns the waits of a thread that took at least `over_ns`, longest first, at most `worst`.
    pub fn late_waits(&self, tid: u32, over_ns: u64, worst: usize) -> Vec<LateWait> {
        let mut own: Vec<&RunSlice> =
            self.past.cpus.iter().flatten().filter(|slice| slice.holder.tid() == Some(tid)).collect();
        own.sort_by_key(|slice| slice.start_ns);
        let waits = own.windows(2).filter_map(|two| {
            let (before, after) = (two[0], two[1]);
            let is_wait = matches!(before.exit, SwitchOut::Blocked(_)) && after.entry != SwitchIn::GoesOn;
            is_wait.then_some(Query {
                tid,
                from_ns: before.end_ns,
                to_ns: after.start_ns,
                is_wait: false,
                is_command: false,
            })
        });
        let length = |asked: &Query| asked.to_ns.saturating_sub(asked.from_ns);
        let mut waits: Vec<Query> = waits.filter(|asked| length(asked) >= over_ns).collect();
        waits.sort_by_key(|asked| Reverse(length(asked)));
        waits.truncate(worst);
        let late_wait = |(asked, path): (&Query, Path)| LateWait { from_ns: asked.from_ns, to_ns: asked.to_ns, path };
        waits.iter().zip(self.paths(&waits)).map(late_wait).collect()
    }

    fn paths(&self, asked: &[Query]) -> Vec<Path> {
        let mut found: Vec<PathBuilder> = asked.iter().map(|_| PathBuilder::default()).collect();
        walk(&mut self.past.backwards(), asked, &(), &mut |index, finding| found[index].add(finding));
        found.into_iter().map(|found| found.finish(&mut TraceNames { handlers: &self.handlers })).collect()
    }

    fn choose(&self, wanted: Wanted<'_>) -> Result<(usize, WhyThis), ImportError> {
        let threads = || self.lives.all.iter().enumerate().filter(|(_, life)| life.tid != 0);
        let longest = |candidates: Vec<(usize, &Life)>| {
            let why = WhyThis::Named(candidates.len().saturating_sub(1));
            let span = |life: &Life| life.died_ns.unwrap_or(self.end_ns).saturating_sub(life.first_ns);
            let key = |(index, life): &(usize, &Life)| (life.exec_ns.is_some(), span(life), Reverse(*index));
            candidates.into_iter().max_by_key(key).map(|(index, _)| (index, why))
        };
        let (chosen, named) = match wanted {
            Wanted::Pid(pid) => (longest(threads().filter(|(_, life)| life.tid == pid).collect()), pid.to_string()),
            Wanted::Comm(comm) => {
                let name = Name::new(comm);
                (longest(threads().filter(|(_, life)| life.names.contains(&name)).collect()), format!("called {comm}"))
            }
            Wanted::Any => {
                let first_exec = threads().filter_map(|(index, life)| Some((life.exec_ns?, index))).min();
                let of_perf = || threads().find(|(_, life)| life.names.contains(&Name::new(PERF_EXEC)));
                let first = first_exec.map(|(_, index)| index).or_else(|| of_perf().map(|(index, _)| index));
                let ran = || threads().max_by_key(|(index, life)| (life.ran_ns, Reverse(*index)));
                let chosen = first.map(|index| (index, WhyThis::FirstExec));
                (chosen.or_else(|| ran().map(|(index, _)| (index, WhyThis::RanLongest))), "that ran".to_owned())
            }
        };
        chosen.ok_or(ImportError::NoSuchThread(named))
    }
}

fn called(life: &Life) -> String {
    ActorName::thread(life.name().text(), life.tid).to_string()
}

/// Resolves names from a trace, which has none of devices.
struct TraceNames<'a> {
    handlers: &'a Interner,
}

impl Names for TraceNames<'_> {
    fn handler(&mut self, number: u64) -> String {
        u32::try_from(number).map_or_else(|_| String::new(), |number| self.handlers.get(number).to_owned())
    }

    fn device(&mut self, device: u32) -> String {
        format!("{}:{}", device >> 20, device & 0xf_ffff)
    }

    fn thread(&mut self, _tid: u32) -> Option<Name> {
        None
    }

    fn limit(&mut self, _number: u32) -> ActorName {
        ActorName::default()
    }

    fn quota(&mut self, _cgroup: u64) -> String {
        String::new()
    }

    fn cgroup(&mut self, _number: u64) -> Option<Cgroup> {
        None
    }

    fn waits_in(&mut self, _tid: u32, _woken_ns: u64, blocked: &Blocked) -> (Option<String>, Vec<String>) {
        (blocked.is_uninterruptible.then(|| "uninterruptible sleep".to_owned()), Vec::new())
    }
}
