// SPDX-License-Identifier: MIT OR Apache-2.0
//! Perf events used only for their interrupts: their samples are not read.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys::{
    PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_SW_CPU_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE,
    perf_event_attr,
};

/// `_IO('$', 0)` and `_IO('$', 1)` of include/uapi/linux/perf_event.h.
pub(crate) const PERF_EVENT_IOC_ENABLE: libc::Ioctl = 0x2400;
pub(crate) const PERF_EVENT_IOC_DISABLE: libc::Ioctl = 0x2401;
/// `_IOW('$', 4, __u64)`.
const PERF_EVENT_IOC_PERIOD: libc::Ioctl = 0x4008_2404;
/// `_IOR('$', 7, __u64 *)`; the size is that of a pointer.
const PERF_EVENT_IOC_ID: libc::Ioctl = 0x8000_2407 | ((size_of::<*const u64>() as libc::Ioctl) << 16);
/// `_IOW('$', 8, __u32)`.
const PERF_EVENT_IOC_SET_BPF: libc::Ioctl = 0x4004_2408;

/// Starts a timer of a thread or of a CPU (-1: of any), which runs until the descriptor is closed.
pub(crate) fn start_timer(tid: libc::pid_t, cpu: libc::c_int, period_ns: u64) -> io::Result<OwnedFd> {
    open(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK.into(), tid, cpu, period_ns)
}

/// Interrupts the CPU's kernel code after each `period` cycles (on x86 by an NMI), until the descriptor is closed.
pub(crate) fn count_kernel_cycles(cpu: u32, period: u64) -> io::Result<OwnedFd> {
    open(PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES.into(), EVERY_THREAD, cpu as libc::c_int, period)
}

/// Selects all threads of a CPU.
pub(crate) const EVERY_THREAD: libc::pid_t = -1;

fn open(kind: u32, config: u64, tid: libc::pid_t, cpu: libc::c_int, period: u64) -> io::Result<OwnedFd> {
    let mut attributes = perf_event_attr {
        type_: kind,
        size: size_of::<perf_event_attr>() as u32,
        config,
        ..perf_event_attr::default()
    };
    attributes.__bindgen_anon_1.sample_period = period;
    if kind == PERF_TYPE_HARDWARE {
        attributes.set_exclude_user(1);
        attributes.set_exclude_guest(1);
    }
    let no_group = -1;
    // SAFETY: the attributes are valid for the call, which only reads them.
    let event = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw const attributes, tid, cpu, no_group, PERF_FLAG_FD_CLOEXEC)
    };
    if event < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(event as i32) })
}

/// Returns the ID of an event, by which a program identifies it in every namespace.
pub(crate) fn id(event: &OwnedFd) -> io::Result<u64> {
    let mut id = 0_u64;
    // SAFETY: the request writes one 64-bit number to a valid pointer; the descriptor is that of a perf event.
    match unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_ID, &raw mut id) } {
        0 => Ok(id),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the count of an event; for a timer, the nanoseconds for which it has been enabled.
pub(crate) fn count(event: &OwnedFd) -> io::Result<u64> {
    let mut count = [0; size_of::<u64>()];
    match rustix::io::read(event, &mut count)? {
        read if read == count.len() => Ok(u64::from_ne_bytes(count)),
        // The event could not be scheduled on its CPU.
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Disables or enables an event: [`PERF_EVENT_IOC_DISABLE`], [`PERF_EVENT_IOC_ENABLE`].
pub(crate) fn request(event: &OwnedFd, request: libc::Ioctl) -> io::Result<()> {
    // SAFETY: these requests take no memory, and the descriptor is that of a perf event.
    match unsafe { libc::ioctl(event.as_raw_fd(), request, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Changes the period of a timer.
pub(crate) fn set_period(event: &OwnedFd, period_ns: u64) -> io::Result<()> {
    // SAFETY: the request reads one 64-bit number from a valid pointer; the descriptor is that of a perf event.
    match unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_PERIOD, &raw const period_ns) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs a program at each interrupt of the event, until the event is closed.
pub(crate) fn run_at(event: &OwnedFd, program: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes a number, and both descriptors are open.
    match unsafe { libc::ioctl(event.as_raw_fd(), PERF_EVENT_IOC_SET_BPF, program.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
