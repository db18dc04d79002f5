// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions shared by all sources that load BPF programs.
#![allow(unsafe_code)]

use std::io::Read as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use libbpf_rs::libbpf_sys::{
    BPF_TRACE_ITER, bpf_iter_create, bpf_iter_link_info, bpf_link_create, bpf_link_create_opts, bpf_obj_get_info_by_fd,
    bpf_object__btf, bpf_prog_info, bpf_program__fd, bpf_program__unload, btf__fd, btf__set_fd,
};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{AsRawLibbpf as _, OpenObject, Program, ProgramMut, RingBuffer};
use whylate_model::{Probe, Snapshot};

use crate::kernel::error::AttachError;
use crate::kernel::proc;

/// BTF of the running kernel; without it no program can be relocated.
pub const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Allocates memory for a skeleton with static lifetime. The skeleton closes its BPF object when it is dropped; these
/// few bytes are never freed.
pub fn open_object() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// Loads a BPF object, and closes the descriptor of its types, which is needed only for loading.
///
/// # Errors
/// Fails if the kernel refuses a map or a program.
pub fn load<O: OpenSkel<'static>>(open: O) -> libbpf_rs::Result<O::Output> {
    let skeleton = open.load()?;
    // SAFETY: the object is loaded, and has a pointer to its types, or none.
    let types = unsafe { bpf_object__btf(skeleton.object().as_libbpf_object().as_ptr()) };
    if !types.is_null() {
        // SAFETY: the object owns the types while it lives.
        let fd = unsafe { btf__fd(types) };
        if fd >= 0 {
            // SAFETY: as above; nothing else knows the descriptor, which is closed once.
            unsafe { btf__set_fd(types, -1) };
            // SAFETY: as above.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    Ok(skeleton)
}

/// A BPF object that is being loaded on a thread of its own.
pub(crate) struct Loading<S>(JoinHandle<Result<Moved<S>, AttachError>>);

/// A loaded object on its way to another thread.
struct Moved<S>(S);

// SAFETY: libbpf-rs declares its object `Send`. The maps and programs of a skeleton are pointers into that object, which moves
// with them, and nothing of it belongs to a thread.
unsafe impl<S: Skel<'static>> Send for Moved<S> {}

impl<S: Skel<'static> + 'static> Loading<S> {
    /// Starts `load` on a thread.
    pub(crate) fn begin(load: impl FnOnce() -> Result<S, AttachError> + Send + 'static) -> std::io::Result<Self> {
        silence_libbpf();
        let thread = std::thread::Builder::new().name("whylate-loads".to_owned());
        thread.spawn(move || load().map(Moved)).map(Loading)
    }

    /// Waits for the loaded object.
    ///
    /// # Errors
    /// Returns the error of `load`.
    pub(crate) fn wait(self) -> Result<S, AttachError> {
        let loaded = self.0.join().map_err(|_| anyhow!("the thread that loads BPF programs has failed"))?;
        loaded.map(|Moved(skeleton)| skeleton)
    }
}

/// Keeps libbpf from writing to standard error: its errors are returned. With `WHYLATE_LIBBPF_LOG` in the environment
/// it writes, including the verifier's log.
pub fn silence_libbpf() {
    if std::env::var_os("WHYLATE_LIBBPF_LOG").is_none() {
        libbpf_rs::set_print(None);
    }
}

/// Fails early, with the reason, if no source with BPF programs can work.
///
/// # Errors
/// Fails if the kernel has no BTF.
pub fn require_btf() -> Result<(), AttachError> {
    if Path::new(KERNEL_BTF).exists() {
        Ok(())
    } else {
        Err(AttachError::Unsupported("this kernel has no BTF (needs CONFIG_DEBUG_INFO_BTF=y)".to_owned()))
    }
}

/// Tests whether the kernel's BTF has a function of this name.
///
/// # Errors
/// Fails if BTF cannot be read.
pub fn kernel_has_function(name: &str) -> Result<bool, AttachError> {
    let types = libbpf_rs::Btf::from_vmlinux()?;
    Ok(types.type_by_name::<libbpf_rs::btf::types::Func<'_>>(name).is_some())
}

impl From<libbpf_rs::Error> for AttachError {
    fn from(error: libbpf_rs::Error) -> Self {
        // The verifier rejects programs with EACCES or EINVAL, and a missing privilege is EPERM; libbpf-rs has one kind
        // for the first and the last.
        let errno = errno_of(&error);
        match errno {
            Some(libc::EPERM) if may_load_programs() => {
                AttachError::Unsupported("the kernel refuses this kind of BPF program (is it locked down?)".to_owned())
            }
            Some(libc::EPERM) => AttachError::NotPermitted,
            // From libbpf, which has error numbers below 0.
            Some(errno @ ..=-1) => {
                AttachError::Failed(std::io::Error::from_raw_os_error(errno.saturating_neg()).into())
            }
            // No such tracepoint or function, or no way to attach there.
            Some(libc::ESRCH | libc::EOPNOTSUPP | 524) => {
                AttachError::Unsupported(format!("this kernel lacks a hook that it needs ({error})"))
            }
            _ => AttachError::Failed(error.into()),
        }
    }
}

/// Statistics of programs since they were loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgramStatistics {
    /// Run time, if the kernel counts it.
    pub probe: Probe,
    /// Number of runs skipped because the program was running on the same CPU already. The kernel always counts these.
    pub recursion_misses: u64,
}

impl std::ops::AddAssign for ProgramStatistics {
    fn add_assign(&mut self, other: Self) {
        self.probe.run_ns += other.probe.run_ns;
        self.probe.runs += other.probe.runs;
        self.recursion_misses += other.recursion_misses;
    }
}

/// Reports the activity of a source's programs since the last report.
#[derive(Debug, Default)]
pub struct Meter {
    reported: ProgramStatistics,
}

impl Meter {
    /// Adds the difference to the last report to a snapshot.
    pub fn report(&mut self, now: ProgramStatistics, snapshot: &mut Snapshot) {
        snapshot.probe.run_ns += now.probe.run_ns.saturating_sub(self.reported.probe.run_ns);
        snapshot.probe.runs += now.probe.runs.saturating_sub(self.reported.probe.runs);
        // A program that interrupts itself, e.g. in an NMI, is not run.
        let nested = now.recursion_misses.saturating_sub(self.reported.recursion_misses);
        *snapshot.lost.entry("nested".to_owned()).or_default() += nested;
        self.reported = now;
    }
}

/// Waits until every BPF program that runs now has ended.
pub fn wait_for_programs() {
    if !wait_for_grace_period() {
        // A program takes microseconds, unless a hypervisor preempts the vCPU.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for an RCU grace period: BPF programs run in read-side critical sections. Returns `false` if the kernel
/// refuses, as with `nohz_full`.
pub fn wait_for_grace_period() -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) == 0 }
}

/// include/uapi/linux/membarrier.h
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// Consumes all records of the ring buffer, waiting at most `wait` for the first one.
///
/// # Errors
/// Fails if the kernel refuses; a signal only ends the wait.
pub fn poll(ring: &RingBuffer<'_>, wait: Duration) -> anyhow::Result<()> {
    // The kernel notifies of records a while after it has written them: on PREEMPT_RT by a thread (irq_work), which
    // others may preempt. The records can be read anyway.
    if !wait.is_zero() {
        match ring.poll(wait) {
            Ok(()) => {}
            Err(error) if error.kind() == libbpf_rs::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("cannot read late events"),
        }
    }
    ring.consume().context("cannot read late events")
}

/// Returns the output of an iterator program for one process.
///
/// # Errors
/// Fails if the process has exited, or the kernel refuses.
pub fn iterate_over_process(program: BorrowedFd<'_>, pid: u32) -> std::io::Result<Vec<u8>> {
    // SAFETY: the union and the structures are made of integers and of nullable pointers, so zero is a value of them.
    let mut about: bpf_iter_link_info = unsafe { std::mem::zeroed() };
    about.task.pid = pid;
    // SAFETY: as above.
    let mut options: bpf_link_create_opts = unsafe { std::mem::zeroed() };
    options.sz = size_of::<bpf_link_create_opts>() as _;
    options.iter_info = &raw mut about;
    options.iter_info_len = size_of::<bpf_iter_link_info>() as u32;
    // SAFETY: `options` and what it points to live until the call returns, which only reads them.
    let link = owned(unsafe { bpf_link_create(program.as_raw_fd(), 0, BPF_TRACE_ITER, &raw const options) })?;
    // SAFETY: the call takes numbers.
    let iterator = owned(unsafe { bpf_iter_create(link.as_raw_fd()) })?;
    let mut bytes = Vec::new();
    std::fs::File::from(iterator).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Converts the result of a libbpf call, a new descriptor or a negative error.
fn owned(fd: i32) -> std::io::Result<OwnedFd> {
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the descriptor has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Closes the descriptor of a program that a program array holds. The kernel counts its runs with those of the program that
/// calls it.
pub(crate) fn close(program: &ProgramMut<'_>) {
    // SAFETY: the object owns the program while it lives; libbpf marks the descriptor as closed.
    unsafe { bpf_program__unload(program.as_libbpf_object().as_ptr()) };
}

/// Returns whether a program has a descriptor: one that was not loaded, or is closed, has none.
pub(crate) fn is_open(program: &Program<'_>) -> bool {
    // SAFETY: the object owns the program while it lives.
    unsafe { bpf_program__fd(program.as_libbpf_object().as_ptr()) >= 0 }
}

/// Sums the statistics of `programs`; a program without an answer of the kernel counts as zero.
pub fn statistics<Fd: AsFd>(programs: impl IntoIterator<Item = Fd>) -> ProgramStatistics {
    let mut sum = ProgramStatistics::default();
    for program in programs {
        let mut info = bpf_prog_info::default();
        let mut length = size_of::<bpf_prog_info>() as u32;
        // SAFETY: `info` and `length` are valid for the call, which writes at most `length` bytes; all-zero input asks
        // for nothing that would be written elsewhere.
        let failed =
            unsafe { bpf_obj_get_info_by_fd(program.as_fd().as_raw_fd(), (&raw mut info).cast(), &raw mut length) };
        if failed == 0 {
            sum.probe.run_ns += info.run_time_ns;
            sum.probe.runs += info.run_cnt;
            sum.recursion_misses += info.recursion_misses;
        }
    }
    sum
}

/// A record of a BPF program: made of integers and arrays of integers, so that any bytes are a valid value of it.
/// # Safety
/// The type has no padding that matters, no pointers, and no values that are not valid.
pub unsafe trait PlainData: Copy + Default {}

/// Reads the record at the start of `bytes`; `None` if they are too few.
pub fn read_plain<T: PlainData>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: there are enough bytes, any bytes are a valid `T`, and the read does not need alignment.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// Truncates a thread name as the kernel does, to 15 bytes.
pub(crate) fn kept_name(name: &str) -> [i8; 16] {
    let mut kept = [0; 16];
    for (to, from) in kept.iter_mut().take(15).zip(name.bytes()) {
        *to = from as i8;
    }
    kept
}

/// Returns the text of a character array, up to its first zero byte.
pub fn text(characters: &[i8]) -> String {
    let length = characters.iter().position(|&character| character == 0).unwrap_or(characters.len());
    // SAFETY: both types have one byte and no invalid values, and the slice is within `characters`.
    let bytes = unsafe { std::slice::from_raw_parts(characters.as_ptr().cast::<u8>(), length) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the kernel's error number. libbpf-rs shows it only in the text of its innermost error.
pub(crate) fn errno_of(error: &libbpf_rs::Error) -> Option<i32> {
    let text = format!("{error:#}");
    let (_, number) = text.rsplit_once("(os error ")?;
    number.split(')').next()?.parse().ok()
}

/// Tests for CAP_SYS_ADMIN, or CAP_BPF and CAP_PERFMON: what tracing programs need (5.8).
pub(crate) fn may_load_programs() -> bool {
    let status = proc::text("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(capabilities) = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()) else {
        return false;
    };
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    const CAP_PERFMON_AND_BPF: u64 = 1 << 38 | 1 << 39;
    capabilities & CAP_SYS_ADMIN != 0 || capabilities & CAP_PERFMON_AND_BPF == CAP_PERFMON_AND_BPF
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_errno_of_kernel() {
        for errno in [libc::EPERM, libc::EACCES, libc::EINVAL] {
            assert_eq!(errno_of(&libbpf_rs::Error::from_raw_os_error(errno)), Some(errno));
        }
    }

    #[test]
    fn describes_negative_errno() {
        let error = AttachError::from(libbpf_rs::Error::from(std::io::Error::from_raw_os_error(-libc::ENOMEM)));
        assert!(format!("{error:?}").contains("Cannot allocate memory"), "{error:?}");
    }

    #[test]
    fn verifier_rejection_is_not_a_privilege_error() {
        let error = AttachError::from(libbpf_rs::Error::from_raw_os_error(libc::EACCES));
        assert!(matches!(error, AttachError::Failed(_)), "{error:?}");
    }
}
