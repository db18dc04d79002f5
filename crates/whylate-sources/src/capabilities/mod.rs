// SPDX-License-Identifier: MIT OR Apache-2.0
//! What this kernel can do, what this process may do, and which backend each source would use.
//!
//! Everything is looked at without changing anything, and nothing here fails: what cannot be found out is
//! [`State::Unknown`] and says why.

mod attempt;
mod bpf;
mod machine;
mod needs;
mod privileges;

use std::fs;
use std::io;

pub use bpf::{Bpf, Btf};
pub use machine::{ClockSource, CpuList, Cpus, Kernel};
pub(crate) use needs::KernelFacts;
pub use needs::{BetterBackend, Readiness};
pub(crate) use privileges::has;
pub use privileges::{Privilege, Privileges, Sysctl};

use whylate_model::sources::CARDS;

use crate::cpus::Choice;
use crate::heartbeat::{self, Heartbeats};
use crate::{sources, tracefs};

/// Whether something is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// This process cannot find out.
    Unknown,
}

/// Whether something is there, and more about it in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Whether it is there.
    pub state: State,
    /// `Yes`: more about it, possibly empty. `No`: what to do to get it. `Unknown`: why, and what to do to find out.
    pub detail: String,
}

impl Fact {
    /// It is there.
    pub fn yes(detail: impl Into<String>) -> Self {
        Self { state: State::Yes, detail: detail.into() }
    }

    /// It is not there; `detail` says what to do.
    pub fn no(detail: impl Into<String>) -> Self {
        Self { state: State::No, detail: detail.into() }
    }

    /// Nobody knows; `detail` says why.
    pub fn unknown(detail: impl Into<String>) -> Self {
        Self { state: State::Unknown, detail: detail.into() }
    }

    /// True when it is there for sure.
    pub fn is_yes(&self) -> bool {
        self.state == State::Yes
    }
}

/// All that `whylate doctor` reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Release, architecture, preemption.
    pub kernel: Kernel,
    /// Type information of the running kernel.
    pub btf: Btf,
    /// The kernel's tracing files.
    pub tracefs: Tracefs,
    /// BPF programs, maps and kernel functions that whylate uses.
    pub bpf: Bpf,
    /// What this process may do.
    pub privileges: Privileges,
    /// Kernel lockdown; `Yes` means that it is in force.
    pub lockdown: Fact,
    /// Kernel settings that matter.
    pub sysctls: Vec<Sysctl>,
    /// What time stamps are made of.
    pub clock_source: ClockSource,
    /// The CPUs.
    pub cpus: Cpus,
    /// A hypervisor under this kernel.
    pub hypervisor: Fact,
    /// Which backend each source would use.
    pub sources: Vec<Readiness>,
    /// How `--why` would tell who had a CPU.
    pub causes: Readiness,
    /// Whether known delays can be made.
    pub injections: Vec<Readiness>,
}

/// The kernel's tracing files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracefs {
    /// `Yes` when it is mounted and readable.
    pub fact: Fact,
    /// Where it is mounted, readable or not.
    pub path: Option<String>,
    /// The tracers that the kernel has; `None` when they cannot be read.
    pub tracers: Option<Vec<String>>,
}

/// Whether there can be a timer of its own on each CPU, tried on the first one that is measured.
fn probe_heartbeat(measured: &[u32]) -> Fact {
    match Heartbeats::start(measured.get(..1).unwrap_or_default(), heartbeat::PERIOD_NS) {
        Ok(_) => Fact::yes(""),
        // Whoever lacks the privilege cannot find out more.
        Err(error) => Fact::unknown(format!("{error} (run as root, or with CAP_PERFMON and CAP_SYSLOG)")),
    }
}

/// Looks at everything. Takes some 20 ms, and 100 ms more beside real-time threads.
pub fn probe() -> Capabilities {
    let privileges = privileges::probe();
    let facts = KernelFacts::of(&privileges);
    let bpf = bpf::probe(&privileges, facts.names());
    let clock_source = machine::probe_clock_source();
    let mut all = sources();
    all.sort_by_key(|source| CARDS.iter().position(|card| card.name == source.info().card.name));
    let sources = all.iter().map(|source| needs::readiness(source.as_ref(), &facts)).collect();
    let choice = Choice::here(&[]).ok();
    let measured = choice.as_ref().map_or(&[][..], |choice| &choice.measured);
    let causes = needs::causes(&probe_heartbeat(measured), &facts);
    let injections = needs::injections(&bpf);
    Capabilities {
        kernel: machine::probe_kernel(),
        lockdown: privileges::probe_lockdown(facts.names().map(bpf::KernelNames::have_lockdown)),
        sysctls: privileges::probe_sysctls(),
        cpus: machine::probe_cpus(choice.as_ref()),
        hypervisor: machine::probe_hypervisor(),
        btf: facts.btf().clone(),
        tracefs: facts.tracefs().clone(),
        bpf,
        privileges,
        clock_source,
        sources,
        causes,
        injections,
    }
}

fn probe_tracefs() -> Tracefs {
    let found = match tracefs::find() {
        Ok(found) => found,
        Err(error) => return Tracefs { fact: Fact::no(error.to_string()), path: None, tracers: None },
    };
    let path = found.to_string_lossy().into_owned();
    let (fact, tracers) = match fs::read_dir(found.join("events")) {
        Ok(_) => {
            let tracers = read_line(&format!("{path}/available_tracers")).ok();
            (Fact::yes(""), tracers.map(|line| words(&line)))
        }
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            (Fact::no("is mounted, but this user may not read it (run as root)"), None)
        }
        Err(error) => (Fact::unknown(format!("is mounted, but its events cannot be read: {error}")), None),
    };
    Tracefs { fact, path: Some(path), tracers }
}

/// The text of a file of the kernel without the newline at its end, or why there is none.
fn read_line(path: &str) -> Result<String, String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).trim().to_owned()),
        Err(error) => Err(match error.kind() {
            io::ErrorKind::NotFound => format!("{path} is absent"),
            // EACCES is about the file's mode, which root overrides; EPERM is said by lockdown and its like.
            io::ErrorKind::PermissionDenied if error.raw_os_error() == Some(libc::EPERM) => {
                format!("{path} is closed by lockdown or another security policy")
            }
            io::ErrorKind::PermissionDenied => format!("{path} is not readable for this user (run as root)"),
            _ => format!("cannot read {path}: {error}"),
        }),
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_ends_well_for_whoever_runs_this_test() {
        let found = probe();
        assert_eq!(found.sources.len(), CARDS.len());
        for (_, _, fact) in found.bpf.each() {
            assert!(fact.is_yes() || !fact.detail.is_empty(), "a bare no or unknown helps nobody: {fact:?}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        assert_eq!(read_line("/no/such/file"), Err("/no/such/file is absent".to_owned()));
    }
}
