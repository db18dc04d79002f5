// SPDX-License-Identifier: MIT OR Apache-2.0
//! Features of this kernel, privileges of this process, and the backend that each source would use.
//!
//! Probing changes nothing, and never fails: what cannot be determined is [`State::Unknown`] with a reason.

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
pub use needs::{BetterBackend, Readiness, SourceBackends};
pub use privileges::{Privilege, Privileges, Sysctl};

use crate::kernel::cpu_choice::Choice;
use crate::kernel::heartbeat::{self, Heartbeats};
use crate::kernel::tracefs;

/// Whether a feature exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The feature exists.
    Yes,
    /// The feature does not exist.
    No,
    /// This process cannot determine whether the feature exists.
    Unknown,
}

/// Whether a feature exists, with details as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Whether the feature exists.
    pub state: State,
    /// `Yes`: details, possibly empty. `No`: how to get it. `Unknown`: why, and how to find out.
    pub detail: String,
}

impl Fact {
    /// Creates the fact that the feature exists.
    pub fn yes(detail: impl Into<String>) -> Self {
        Self { state: State::Yes, detail: detail.into() }
    }

    /// Creates the fact that the feature does not exist; `detail` says how to get it.
    pub fn no(detail: impl Into<String>) -> Self {
        Self { state: State::No, detail: detail.into() }
    }

    /// Creates the fact that it is unknown whether the feature exists; `detail` says why.
    pub fn unknown(detail: impl Into<String>) -> Self {
        Self { state: State::Unknown, detail: detail.into() }
    }

    /// Tests whether the feature surely exists.
    pub fn is_yes(&self) -> bool {
        self.state == State::Yes
    }
}

/// Everything that `whylate doctor` reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Release, architecture, preemption.
    pub kernel: Kernel,
    /// BTF of the running kernel.
    pub btf: Btf,
    /// State of tracefs.
    pub tracefs: Tracefs,
    /// BPF programs, maps and kernel functions that whylate uses.
    pub bpf: Bpf,
    /// Privileges of this process.
    pub privileges: Privileges,
    /// Kernel lockdown; `Yes` means that it is in effect.
    pub lockdown: Fact,
    /// Relevant kernel settings.
    pub sysctls: Vec<Sysctl>,
    /// Clock source of timestamps.
    pub clock_source: ClockSource,
    /// Sets of CPUs.
    pub cpus: Cpus,
    /// Hypervisor under this kernel.
    pub hypervisor: Fact,
    /// The backend that each source would use.
    pub sources: Vec<Readiness>,
    /// Backend with which `--why` would find occupants of CPUs.
    pub causes: Readiness,
    /// Whether known delays can be injected.
    pub injections: Vec<Readiness>,
}

/// State of tracefs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracefs {
    /// `Yes` if tracefs is mounted and readable.
    pub fact: Fact,
    /// Mount point, readable or not.
    pub path: Option<String>,
    /// Tracers of the kernel; `None` if they cannot be read.
    pub tracers: Option<Vec<String>>,
}

/// Tries whether each CPU can have a heartbeat timer, on the first measured CPU.
fn probe_heartbeat(measured: &[u32]) -> Fact {
    match Heartbeats::start(measured.get(..1).unwrap_or_default(), heartbeat::PERIOD_NS) {
        Ok(_) => Fact::yes(""),
        // Without the privilege, nothing more can be determined.
        Err(error) => Fact::unknown(format!("{error} (run as root, or with CAP_PERFMON and CAP_SYSLOG)")),
    }
}

/// Probes all features, and which backend each of these sources would use. Takes some 20 ms, and 100 ms more if there are
/// real-time threads.
pub fn probe(sources: &[SourceBackends]) -> Capabilities {
    let privileges = privileges::probe();
    let facts = KernelFacts::new(&privileges);
    let bpf = bpf::probe(&privileges, facts.names());
    let clock_source = machine::probe_clock_source();
    let sources = sources.iter().map(|source| needs::readiness(source, &facts)).collect();
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

/// Returns the text of a kernel file without the trailing newline, or why it cannot be read.
fn read_line(path: &str) -> Result<String, String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).trim().to_owned()),
        Err(error) => Err(match error.kind() {
            io::ErrorKind::NotFound => format!("{path} is absent"),
            // EACCES is about the file's mode, which root overrides; EPERM comes from lockdown and other policies.
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
    fn probe_works_for_any_user() {
        let found = probe(&[]);
        for (_, _, fact) in found.bpf.each() {
            assert!(fact.is_yes() || !fact.detail.is_empty(), "a bare no or unknown has no reason: {fact:?}");
        }
    }

    #[test]
    fn names_missing_file() {
        assert_eq!(read_line("/no/such/file"), Err("/no/such/file is absent".to_owned()));
    }
}
