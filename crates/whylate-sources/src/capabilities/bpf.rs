// SPDX-License-Identifier: MIT OR Apache-2.0
//! BPF features of this kernel: found by trying them, and by names in BTF.

use std::ffi::CString;
use std::fs;

use libbpf_rs::btf::BtfKind;
use libbpf_rs::{AsRawLibbpf as _, ErrorKind, MapType, ProgramType, libbpf_sys};

use super::attempt::{Attempt, load_program, make_map};
use super::{Fact, Privileges};
use crate::kernel::need::MapKind;

const BTF_PATH: &str = "/sys/kernel/btf/vmlinux";
const NO_BTF: &str = "boot a kernel with CONFIG_DEBUG_INFO_BTF=y";
/// The kernel's BTF has a `typedef … btf_trace_x` for each tracepoint `x`.
const TRACEPOINT_PREFIX: &str = "btf_trace_";

/// BTF of the running kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Btf {
    /// Whether BTF exists and is readable.
    pub fact: Fact,
    /// Path of the file.
    pub path: &'static str,
    /// Size of the file.
    pub size_bytes: Option<u64>,
}

/// BPF programs, maps and kernel functions that whylate uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bpf {
    /// Programs at tracepoints, with BTF.
    pub tp_btf: Fact,
    /// Programs at the entry of kernel functions.
    pub fentry: Fact,
    /// Raw tracepoint programs, which need no BTF.
    pub raw_tracepoint_programs: Fact,
    /// Programs run from user space.
    pub syscall_programs: Fact,
    /// Array maps.
    pub array_maps: Fact,
    /// Ring buffers.
    pub ring_buffer_maps: Fact,
    /// Stack trace maps.
    pub stack_trace_maps: Fact,
    /// Work items in BPF.
    pub bpf_wq: Fact,
    /// Timers in BPF.
    pub bpf_timer: Fact,
    /// Disabling interrupts in BPF.
    pub bpf_local_irq_save: Fact,
    /// Disabling preemption in BPF.
    pub bpf_preempt_disable: Fact,
    /// Iterator over all threads.
    pub task_iterator: Fact,
}

impl Bpf {
    /// Returns each fact with its key and display name.
    pub fn each(&self) -> [(&'static str, &'static str, &Fact); 12] {
        [
            ("tp_btf", "tp_btf programs", &self.tp_btf),
            ("fentry", "fentry programs", &self.fentry),
            ("raw_tracepoint_programs", "raw tracepoint programs", &self.raw_tracepoint_programs),
            ("syscall_programs", "syscall programs", &self.syscall_programs),
            ("array_maps", "array maps", &self.array_maps),
            ("ring_buffer_maps", "ring buffer maps", &self.ring_buffer_maps),
            ("stack_trace_maps", "stack trace maps", &self.stack_trace_maps),
            ("bpf_wq", "bpf_wq", &self.bpf_wq),
            ("bpf_timer", "bpf_timer", &self.bpf_timer),
            ("bpf_local_irq_save", "bpf_local_irq_save", &self.bpf_local_irq_save),
            ("bpf_preempt_disable", "bpf_preempt_disable", &self.bpf_preempt_disable),
            ("task_iterator", "task iterator", &self.task_iterator),
        ]
    }
}

/// Names in the kernel's BTF, with their type IDs.
pub(super) enum KernelNames {
    Kernel(libbpf_rs::Btf<'static>),
    #[cfg(test)]
    Listed(std::collections::HashMap<String, u32>),
}

impl KernelNames {
    /// Creates a list of these functions and typedefs.
    #[cfg(test)]
    pub(super) fn new<'a>(
        functions: impl IntoIterator<Item = (&'a str, u32)>,
        typedefs: impl IntoIterator<Item = (&'a str, u32)>,
    ) -> Self {
        let all = functions.into_iter().chain(typedefs);
        KernelNames::Listed(all.map(|(name, id)| (name.to_owned(), id)).collect())
    }

    fn function(&self, name: &str) -> Option<u32> {
        self.id(name, BtfKind::Func)
    }

    /// Looks up a tracepoint. `name` is without the group: tracepoint names are unique in a kernel.
    fn tracepoint(&self, name: &str) -> Option<u32> {
        self.id(&format!("{TRACEPOINT_PREFIX}{name}"), BtfKind::Typedef)
    }

    /// Looks up a name by kind too: a structure may have the name of a function (`bpf_iter_task`, 6.7).
    #[allow(unsafe_code)]
    fn id(&self, name: &str, kind: BtfKind) -> Option<u32> {
        match self {
            KernelNames::Kernel(types) => {
                let name = CString::new(name).ok()?;
                // SAFETY: both pointers are valid for the call, which keeps neither.
                let id = unsafe {
                    libbpf_sys::btf__find_by_name_kind(types.as_libbpf_object().as_ptr(), name.as_ptr(), kind as u32)
                };
                u32::try_from(id).ok()
            }
            #[cfg(test)]
            KernelNames::Listed(names) => names.get(name).copied(),
        }
    }

    pub(super) fn have_function(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    pub(super) fn have_tracepoint(&self, name: &str) -> bool {
        self.tracepoint(name).is_some()
    }

    /// Tests whether the kernel is built with CONFIG_SECURITY_LOCKDOWN_LSM.
    pub(super) fn have_lockdown(&self) -> bool {
        self.have_function("lockdown_is_locked_down")
    }
}

/// Reads the kernel's BTF; the names are `None` if there is none.
pub(super) fn probe_btf() -> (Btf, Option<KernelNames>) {
    // Opened first: libbpf's own error does not distinguish an absent file from an unreadable one.
    let size_bytes = fs::File::open(BTF_PATH).and_then(|file| file.metadata()).map(|metadata| metadata.len());
    let (fact, names) = match &size_bytes {
        Ok(_) => match quietly(read_names) {
            Ok(names) => (Fact::yes(""), Some(names)),
            Err(error) => (Fact::unknown(format!("cannot read {BTF_PATH}: {error}")), None),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            (Fact::no(format!("{BTF_PATH} is absent ({NO_BTF})")), None)
        }
        Err(error) => (Fact::unknown(format!("cannot read {BTF_PATH}: {error}")), None),
    };
    (Btf { fact, path: BTF_PATH, size_bytes: size_bytes.ok() }, names)
}

fn read_names() -> libbpf_rs::Result<KernelNames> {
    Ok(KernelNames::Kernel(libbpf_rs::Btf::from_path(BTF_PATH)?))
}

/// Tries a map type. Returns its display name and the result.
pub(super) fn probe_map(kind: MapKind, refusal: &Fact) -> (&'static str, Fact) {
    let (name, kind, remedy) = match kind {
        MapKind::Array => ("array maps", MapType::Array, "boot a kernel with CONFIG_BPF_SYSCALL=y"),
        MapKind::RingBuf => ("ring buffer maps", MapType::RingBuf, "boot kernel 5.8 or later"),
        MapKind::StackTrace => ("stack trace maps", MapType::StackTrace, "boot a kernel with CONFIG_PERF_EVENTS=y"),
    };
    (name, quietly(|| judge(make_map(kind), refusal, remedy)))
}

pub(super) fn probe(privileges: &Privileges, names: Option<&KernelNames>) -> Bpf {
    let refusal = &privileges.refusal();
    let program = |kind, remedy| judge(load_program(kind, Attempt::Plain), refusal, remedy);
    let map = |kind| probe_map(kind, refusal).1;
    let kernel_functions = |wanted: &[&str], remedy| look_up(names, wanted, remedy);
    quietly(|| Bpf {
        tp_btf: tp_btf(refusal, names),
        fentry: fentry(refusal, names),
        raw_tracepoint_programs: program(ProgramType::RawTracepoint, "boot a kernel with CONFIG_BPF_EVENTS=y"),
        syscall_programs: judge(
            load_program(ProgramType::Syscall, Attempt::Sleepable),
            refusal,
            "boot kernel 5.14 or later",
        ),
        array_maps: map(MapKind::Array),
        ring_buffer_maps: map(MapKind::RingBuf),
        stack_trace_maps: map(MapKind::StackTrace),
        bpf_wq: kernel_functions(
            &["bpf_wq_init", "bpf_wq_set_callback_impl", "bpf_wq_start"],
            "boot kernel 6.10 or later",
        ),
        // A helper, not a kfunc, but its function is in BTF like any other.
        bpf_timer: kernel_functions(&["bpf_timer_init", "bpf_timer_start"], "boot kernel 5.15 or later"),
        bpf_local_irq_save: kernel_functions(&["bpf_local_irq_save"], "boot kernel 6.14 or later"),
        bpf_preempt_disable: kernel_functions(&["bpf_preempt_disable"], "boot kernel 6.10 or later"),
        task_iterator: kernel_functions(&["bpf_iter_task"], "boot kernel 5.8 or later"),
    })
}

/// Loads, without attaching, a program at a tracepoint that every kernel has.
pub(super) fn tp_btf(refusal: &Fact, names: Option<&KernelNames>) -> Fact {
    let remedy = "boot kernel 5.5 or later with CONFIG_BPF_EVENTS=y, CONFIG_BPF_JIT=y and CONFIG_DEBUG_INFO_BTF=y";
    let Some(names) = names else { return no_btf() };
    match names.tracepoint("sched_switch") {
        Some(id) => {
            let attempt = Attempt::At { type_id: id, attach_type: libbpf_sys::BPF_TRACE_RAW_TP };
            judge(load_program(ProgramType::Tracing, attempt), refusal, remedy)
        }
        None => Fact::no(remedy),
    }
}

/// Loads, without attaching, a program at a function that every kernel has. libbpf's own probe does the same with a
/// type that is no function: it takes a missing privilege for a missing feature, and says nothing about `tp_btf`, which
/// may be permitted.
pub(super) fn fentry(refusal: &Fact, names: Option<&KernelNames>) -> Fact {
    let Some(names) = names else { return no_btf() };
    // They are attached through ftrace's direct calls, which not every configuration and architecture has.
    let remedy = "boot a kernel with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS=y; on arm64, 6.4 or later";
    match names.function("vfs_read") {
        Some(id) if names.have_function("register_ftrace_direct") => {
            let attempt = Attempt::At { type_id: id, attach_type: libbpf_sys::BPF_TRACE_FENTRY };
            judge(load_program(ProgramType::Tracing, attempt), refusal, remedy)
        }
        // Not every compiler emits its name.
        Some(_) => Fact::unknown(format!("BTF does not list register_ftrace_direct, so this is unknown ({remedy})")),
        None => Fact::no(remedy),
    }
}

fn judge(attempt: libbpf_rs::Result<()>, refusal: &Fact, remedy: &str) -> Fact {
    let Err(error) = attempt else { return Fact::yes("") };
    match error.kind() {
        ErrorKind::PermissionDenied => refusal.clone(),
        ErrorKind::Unsupported => Fact::no("boot a kernel with CONFIG_BPF_SYSCALL=y"),
        // An unknown type, an unknown flag, or a longer argument than the kernel knows.
        ErrorKind::InvalidInput | ErrorKind::TooBig => Fact::no(remedy),
        _ => Fact::unknown(format!("trying it failed: {error}")),
    }
}

fn look_up(names: Option<&KernelNames>, wanted: &[&str], remedy: &str) -> Fact {
    let Some(names) = names else { return no_btf() };
    match wanted.iter().find(|name| !names.have_function(name)) {
        None => Fact::yes(""),
        Some(name) => Fact::no(format!("the kernel has no {name} ({remedy})")),
    }
}

fn no_btf() -> Fact {
    Fact::unknown(format!("no type information to look it up in ({NO_BTF})"))
}

/// Runs a closure without libbpf's messages on standard error.
pub(super) fn quietly<T>(run: impl FnOnce() -> T) -> T {
    let before = libbpf_rs::set_print(None);
    let result = run();
    libbpf_rs::set_print(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::State;

    fn names(functions: &[&str], typedefs: &[&str]) -> KernelNames {
        KernelNames::new(functions.iter().map(|&name| (name, 1)), typedefs.iter().map(|&name| (name, 2)))
    }

    #[test]
    fn distinguishes_refusal_from_missing_feature() {
        let refusal = Fact::unknown("not permitted");
        let failed = |errno| judge(Err(libbpf_rs::Error::from_raw_os_error(errno)), &refusal, "boot another");
        assert_eq!(judge(Ok(()), &refusal, "boot another"), Fact::yes(""));
        assert_eq!(failed(libc::EINVAL), Fact::no("boot another"));
        assert_eq!(failed(libc::EPERM), refusal);
        assert!(failed(libc::ENOSYS).detail.contains("CONFIG_BPF_SYSCALL"));
        assert_eq!(failed(libc::ENOMEM).state, State::Unknown);
    }

    #[test]
    fn looks_up_functions_by_whole_name() {
        let names = names(&["bpf_wq_init"], &["btf_trace_irq_disable", "u64"]);
        assert!(look_up(Some(&names), &["bpf_wq_init"], "").is_yes());
        let missing = look_up(Some(&names), &["bpf_wq_init", "bpf_wq"], "boot kernel 6.10 or later");
        assert_eq!(missing, Fact::no("the kernel has no bpf_wq (boot kernel 6.10 or later)"));
        assert_eq!(look_up(None, &["bpf_wq_init"], "").state, State::Unknown);
        assert!(names.have_tracepoint("irq_disable"));
        assert!(!names.have_tracepoint("u64"));
    }

    /// Since 6.7, some kernels have a structure of that name.
    #[test]
    fn structure_does_not_hide_function_of_same_name() {
        let Ok(names) = quietly(read_names) else {
            println!("skipped: no type information of this kernel");
            return;
        };
        assert!(names.have_function("bpf_iter_task") && !names.have_function("task_struct"));
    }

    #[test]
    fn no_fentry_without_direct_calls() {
        let refusal = Fact::unknown("not permitted");
        assert!(fentry(&refusal, Some(&names(&["vfs_read"], &[]))).detail.contains("DIRECT_CALLS"));
        assert_eq!(fentry(&refusal, None).state, State::Unknown);
        assert_eq!(tp_btf(&refusal, Some(&names(&[], &[]))).state, State::No);
    }
}
