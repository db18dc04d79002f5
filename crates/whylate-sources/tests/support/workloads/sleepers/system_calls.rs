// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that sleep in system calls, each with the expected class of its wait.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_void};
use std::hint::black_box;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{IntoRawFd as _, RawFd};
use std::ptr::{null, null_mut};

use anyhow::{Result, ensure};
use io_uring::{IoUring, opcode, types};
use whylate_model::WaitClass;

/// Thread name, and the class of its wait.
pub const CALLS: [(&str, WaitClass); 21] = [
    ("read pipe", WaitClass::Pipe),
    ("write pipe", WaitClass::Pipe),
    ("read terminal", WaitClass::Idle),
    ("write terminal", WaitClass::Terminal),
    ("read eventfd", WaitClass::Idle),
    ("read timerfd", WaitClass::Idle),
    ("read inotify", WaitClass::Idle),
    ("mq_receive", WaitClass::MessageQueue),
    ("msgrcv", WaitClass::MessageQueue),
    ("semop", WaitClass::Lock),
    ("futex", WaitClass::Lock),
    ("recvfrom", WaitClass::Network),
    ("accept", WaitClass::Idle),
    ("clock_nanosleep", WaitClass::Timer),
    ("pause", WaitClass::Idle),
    ("sigtimedwait", WaitClass::Idle),
    ("pselect", WaitClass::Idle),
    ("ppoll", WaitClass::Idle),
    ("epoll_pwait", WaitClass::Idle),
    // A request that completes once its pipe is ready.
    ("io_uring_enter", WaitClass::Idle),
    ("vfork", WaitClass::Stopped),
];

/// The blocking call of a thread.
type Call = Box<dyn FnOnce() + Send>;

/// Returns each thread's name and its call. Queues and semaphores live in this process's own IPC namespace.
pub fn calls() -> Result<Vec<(&'static str, Call)>> {
    // SAFETY: no memory is involved.
    done(unsafe { libc::unshare(libc::CLONE_NEWIPC) })?;
    let (pipe, full, polled) = (pipe()?, pipe()?, pipe()?);
    let (terminal, full_terminal) = (terminal()?, terminal()?);
    // SAFETY: no memory is involved, but for a name without end and no attributes.
    let (event, timer, notes, queue, messages, semaphores, events) = unsafe {
        (
            done(libc::eventfd(0, 0))?,
            done(libc::timerfd_create(libc::CLOCK_MONOTONIC, 0))?,
            done(libc::inotify_init())?,
            done(libc::mq_open(c"/whylate-calls".as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600, null::<c_void>()))?,
            done(libc::msgget(libc::IPC_PRIVATE, 0o600))?,
            done(libc::semget(libc::IPC_PRIVATE, 1, 0o600))?,
            done(libc::epoll_create1(0))?,
        )
    };
    let socket = UdpSocket::bind("127.0.0.1:0")?.into_raw_fd();
    let listener = TcpListener::bind("127.0.0.1:0")?.into_raw_fd();
    let mut ring = IoUring::new(4)?;
    let poll = opcode::PollAdd::new(types::Fd(polled[0]), libc::POLLIN as u32).build();
    // SAFETY: the request refers to no memory.
    unsafe { ring.submission().push(&poll) }?;
    Ok(vec![
        ("read pipe", reads(pipe[0])),
        ("write pipe", writes(full[1])),
        ("read terminal", reads(terminal)),
        ("write terminal", writes(full_terminal)),
        ("read eventfd", reads(event)),
        ("read timerfd", reads(timer)),
        ("read inotify", reads(notes)),
        ("mq_receive", calls_with(libc::SYS_mq_timedreceive, [i64::from(queue), 0, 1 << 16, 0, 0])),
        ("msgrcv", calls_with(libc::SYS_msgrcv, [i64::from(messages), 0, 0, 0, 0])),
        ("semop", Box::new(move || takes_semaphore(semaphores))),
        ("futex", Box::new(sleeps_in_futex)),
        ("recvfrom", Box::new(move || receives(socket))),
        ("accept", calls_with(libc::SYS_accept4, [i64::from(listener), 0, 0, 0, 0])),
        ("clock_nanosleep", Box::new(naps)),
        ("pause", Box::new(pauses)),
        ("sigtimedwait", Box::new(waits_for_signal)),
        ("pselect", calls_with(libc::SYS_pselect6, [0; 5])),
        ("ppoll", calls_with(libc::SYS_ppoll, [0; 5])),
        ("epoll_pwait", Box::new(move || waits_for_events(events))),
        ("io_uring_enter", Box::new(move || drop(black_box(ring.submit_and_wait(1))))),
        ("vfork", Box::new(makes_a_child)),
    ])
}

fn done(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn pipe() -> Result<[RawFd; 2]> {
    let mut ends = [0; 2];
    // SAFETY: an array of two for the two ends.
    done(unsafe { libc::pipe(ends.as_mut_ptr()) })?;
    Ok(ends)
}

/// Opens a pseudoterminal with an other end that is never read or written.
fn terminal() -> Result<RawFd> {
    let (mut controller, mut terminal) = (0, 0);
    // SAFETY: two numbers have room there; there is no name, and there are no settings.
    let result = unsafe { libc::openpty(&raw mut controller, &raw mut terminal, null_mut(), null_mut(), null_mut()) };
    done(result)?;
    ensure!(controller != terminal, "two ends");
    Ok(terminal)
}

fn calls_with(number: c_long, [one, two, three, four, five]: [i64; 5]) -> Call {
    Box::new(move || {
        // SAFETY: nothing ever comes that would be written to the addresses, which are null.
        let outcome = unsafe { libc::syscall(number, one, two, three, four, five, 0_i64) };
        black_box(outcome);
    })
}

fn reads(from: RawFd) -> Call {
    Box::new(move || {
        let mut bytes = [0_u8; 512];
        // SAFETY: the buffer has room for `len` bytes.
        let outcome = unsafe { libc::read(from, bytes.as_mut_ptr().cast(), bytes.len()) };
        black_box((outcome, bytes));
    })
}

/// Writes until the pipe or terminal is full, and then blocks.
fn writes(to: RawFd) -> Call {
    Box::new(move || {
        let bytes = [b'x'; 4096];
        // SAFETY: the buffer has `len` bytes.
        while unsafe { libc::write(to, bytes.as_ptr().cast(), bytes.len()) } > 0 {}
    })
}

fn takes_semaphore(semaphores: c_int) {
    let mut operation = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
    // SAFETY: one operation is there.
    let outcome = unsafe { libc::semop(semaphores, &raw mut operation, 1) };
    black_box(outcome);
}

fn sleeps_in_futex() {
    let word = 0_u32;
    // SAFETY: the word outlives the call, and no other thread knows it.
    unsafe { libc::syscall(libc::SYS_futex, &raw const word, libc::FUTEX_WAIT, 0, null::<c_void>()) };
    black_box(word);
}

fn receives(socket: RawFd) {
    let mut bytes = [0_u8; 512];
    // SAFETY: the buffer has room for `len` bytes; the sender's address is not asked for.
    let outcome = unsafe { libc::recvfrom(socket, bytes.as_mut_ptr().cast(), bytes.len(), 0, null_mut(), null_mut()) };
    black_box((outcome, bytes));
}

fn naps() {
    let time = libc::timespec { tv_sec: 100_000, tv_nsec: 0 };
    // SAFETY: the time outlives the call.
    let outcome = unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const time, null_mut()) };
    black_box(outcome);
}

fn pauses() {
    // SAFETY: no memory is involved.
    let outcome = unsafe { libc::pause() };
    black_box(outcome);
}

fn waits_for_signal() {
    // SAFETY: a set of signals is plain data, which the first call fills.
    let outcome = unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        libc::sigaddset(&raw mut signals, libc::SIGUSR2);
        libc::sigtimedwait(&raw const signals, null_mut(), null())
    };
    black_box(outcome);
}

fn waits_for_events(events: RawFd) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: one event has room there; the set of signals stays as it is.
    let outcome = unsafe { libc::epoll_pwait(events, &raw mut event, 1, -1, null()) };
    black_box(outcome);
}

/// Blocks in vfork(2): the child neither calls execve nor ends before its parent does.
fn makes_a_child() {
    let flags = (libc::CLONE_VFORK | libc::SIGCHLD) as c_long;
    // SAFETY: the child has memory of its own, and calls nothing but the kernel.
    unsafe {
        if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
}
