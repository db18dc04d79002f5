// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ways to wait for another thread.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Result, ensure};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{FlockOperation, flock};
use whylate_sources::kernel::clock::monotonic_ns;

use crate::peers::{self, BURNT_NS, burn, cpus, report_round, rounds, skip, tid, until_asleep};
use crate::support::machine::cpus::pin_to;

/// A way that the machine lacks is skipped with a message.
pub const WAYS: [&str; 15] = [
    "mutex",
    "pi_mutex",
    "flock",
    "pipe",
    "socketpair",
    "tcp",
    "eventfd",
    "epoll",
    "signal",
    "semaphore",
    "wait4",
    "vfork",
    "userfaultfd",
    "io_uring",
    "io-wq",
];

pub fn play() -> Result<()> {
    let lock = Mutex::new(());
    let held = || lock.lock().unwrap_or_else(PoisonError::into_inner);
    peers::play(
        "mutex",
        || {
            drop(held());
            Ok(())
        },
        |work| {
            let _held = held();
            work();
            Ok(())
        },
    )?;

    let named = tempfile::NamedTempFile::new()?;
    let [one, other] = [File::open(named.path())?, File::open(named.path())?];
    let lock = |file: &File| -> Result<()> { Ok(flock(file, FlockOperation::LockExclusive)?) };
    let unlock = |file: &File| -> Result<()> { Ok(flock(file, FlockOperation::Unlock)?) };
    peers::play(
        "flock",
        || lock(&one).and_then(|()| unlock(&one)),
        |work| {
            lock(&other)?;
            work();
            unlock(&other)
        },
    )?;

    let (read, write) = io::pipe()?;
    by_byte("pipe", read, write)?;
    let (read, write) = UnixStream::pair()?;
    by_byte("socketpair", read, write)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let read = TcpStream::connect(listener.local_addr()?)?;
    let (write, _) = listener.accept()?;
    write.set_nodelay(true)?;
    by_byte("tcp", read, write)?;

    let event: File = eventfd(0, EventfdFlags::CLOEXEC)?.into();
    peers::play(
        "eventfd",
        || Ok((&event).read_exact(&mut [0; 8])?),
        |work| {
            work();
            Ok((&event).write_all(&1_u64.to_ne_bytes())?)
        },
    )?;

    let (read, write) = io::pipe()?;
    let readable = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&readable, &read, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    peers::play(
        "epoll",
        || {
            epoll::wait(&readable, spare_capacity(&mut Vec::with_capacity(1)), None)?;
            Ok((&read).read_exact(&mut [0])?)
        },
        |work| {
            work();
            Ok((&write).write_all(&[0])?)
        },
    )?;

    pi_mutex()?;
    signal()?;
    semaphore()?;
    children("wait4", 0)?;
    children("vfork", libc::CLONE_VFORK)?;
    page_faults()?;
    ring("io_uring", squeue::Flags::empty())?;
    // A worker thread of the ring reads.
    ring("io-wq", squeue::Flags::ASYNC)
}

struct PiMutex(*mut libc::pthread_mutex_t);

// SAFETY: a mutex is made for several threads.
unsafe impl Sync for PiMutex {}

impl PiMutex {
    fn lock(&self) -> Result<()> {
        // SAFETY: the mutex is made, and outlives all threads that use it.
        ensure!(unsafe { libc::pthread_mutex_lock(self.0) } == 0, "the mutex cannot be locked");
        Ok(())
    }

    fn unlock(&self) -> Result<()> {
        // SAFETY: as above; the calling thread has locked it.
        ensure!(unsafe { libc::pthread_mutex_unlock(self.0) } == 0, "the mutex cannot be unlocked");
        Ok(())
    }
}

/// A mutex with priority inheritance.
fn pi_mutex() -> Result<()> {
    // SAFETY: integers alone.
    let mutex = PiMutex(Box::leak(Box::new(unsafe { std::mem::zeroed() })));
    // SAFETY: as above.
    let mut attributes: libc::pthread_mutexattr_t = unsafe { std::mem::zeroed() };
    // SAFETY: both structures are live, and the calls fill them.
    let is_made = unsafe {
        libc::pthread_mutexattr_init(&raw mut attributes) == 0
            && libc::pthread_mutexattr_setprotocol(&raw mut attributes, libc::PTHREAD_PRIO_INHERIT) == 0
            && libc::pthread_mutex_init(mutex.0, &raw const attributes) == 0
    };
    ensure!(is_made, "no mutex with priority inheritance can be made");
    let mutex = &mutex;
    peers::play(
        "pi_mutex",
        || mutex.lock().and_then(|()| mutex.unlock()),
        |work| {
            mutex.lock()?;
            work();
            mutex.unlock()
        },
    )
}

/// The client waits for a blocked signal.
fn signal() -> Result<()> {
    let client = AtomicI32::new(0);
    // SAFETY: integers alone.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is live, and the calls change it.
    unsafe {
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGUSR1);
    }
    let wait = || {
        client.store(tid() as i32, Ordering::SeqCst);
        // SAFETY: the set is live; the old mask and the signal's details are not asked for.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            ensure!(libc::sigwaitinfo(&raw const set, std::ptr::null_mut()) == libc::SIGUSR1, "another signal came");
        }
        Ok(())
    };
    peers::play("signal", wait, |work| {
        work();
        let (process, thread) = (std::process::id() as i32, client.load(Ordering::SeqCst));
        // SAFETY: it has the signal blocked while it waits.
        ensure!(unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) } == 0, "no signal is sent");
        Ok(())
    })
}

fn by_byte(kind: &str, mut read: impl Read + Send, mut write: impl Write + Send) -> Result<()> {
    peers::play(
        kind,
        || Ok(read.read_exact(&mut [0])?),
        |work| {
            work();
            Ok(write.write_all(&[0])?)
        },
    )
}

struct Semaphore(*mut libc::sem_t);

// SAFETY: a semaphore is made for several threads.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    fn wait(&self) -> Result<()> {
        // SAFETY: the semaphore is made, and outlives all threads that use it.
        ensure!(unsafe { libc::sem_wait(self.0) } == 0, "{}", io::Error::last_os_error());
        Ok(())
    }

    fn post(&self) -> Result<()> {
        // SAFETY: as above.
        ensure!(unsafe { libc::sem_post(self.0) } == 0, "{}", io::Error::last_os_error());
        Ok(())
    }
}

fn semaphore() -> Result<()> {
    // SAFETY: integers alone.
    let semaphore = Semaphore(Box::leak(Box::new(unsafe { std::mem::zeroed() })));
    // SAFETY: the memory lives for ever.
    ensure!(unsafe { libc::sem_init(semaphore.0, 0, 0) } == 0, "{}", io::Error::last_os_error());
    let semaphore = &semaphore;
    peers::play(
        "semaphore",
        || semaphore.wait(),
        |work| {
            work();
            semaphore.post()
        },
    )
}

/// The server is a process. With `CLONE_VFORK` the client is suspended until the child exits or calls execve.
fn children(kind: &str, flags: i32) -> Result<()> {
    let (here, there) = cpus()?;
    let kind = kind.to_owned();
    let client = move || -> Result<()> {
        pin_to(here)?;
        let parent = (std::process::id(), tid());
        for _ in 0..rounds() {
            let began_ns = monotonic_ns();
            // SAFETY: without memory of both, the call is fork(2). The child computes, and ends.
            let child = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) } as i32;
            if child == 0 {
                // SAFETY: a name that ends with a zero.
                unsafe { libc::prctl(libc::PR_SET_NAME, c"server".as_ptr()) };
                let is_there = pin_to(there).is_ok();
                until_asleep(parent.0, parent.1);
                burn(BURNT_NS);
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(i32::from(!is_there)) };
            }
            let mut status = 0;
            // SAFETY: integers alone.
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            // SAFETY: both are live.
            let ended = unsafe { libc::wait4(child, &raw mut status, 0, &raw mut usage) };
            let ended_ns = monotonic_ns();
            ensure!(child > 0 && ended == child && status == 0, "the child {child} ends with {status}");
            let ns = |time: libc::timeval| time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1_000;
            let all_ns = ns(usage.ru_utime) + ns(usage.ru_stime);
            report_round(&kind, tid(), began_ns, ended_ns, &[child as u64, BURNT_NS, all_ns]);
        }
        Ok(())
    };
    let client = thread::Builder::new().name("client".to_owned()).spawn(client)?;
    client.join().expect("waiting does not panic")
}

/// include/uapi/linux/userfaultfd.h
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
const UFFD_API: u64 = 0xaa;
const REGISTER_MISSING: u64 = 1;
const PAGE: usize = 4096;

fn page_faults() -> Result<()> {
    // SAFETY: a descriptor or an error.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
    if descriptor < 0 {
        skip(&format!("no userfaultfd: {}", io::Error::last_os_error()));
        return Ok(());
    }
    // SAFETY: the descriptor is new, and owned here.
    let faults = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let order = |request: u64, numbers: &mut [u64; 4]| -> Result<()> {
        // SAFETY: each of these requests reads and writes four numbers at most.
        let outcome = unsafe { libc::ioctl(faults.as_raw_fd(), request as _, numbers.as_mut_ptr()) };
        ensure!(outcome == 0, "{request:#x}: {}", io::Error::last_os_error());
        Ok(())
    };
    let (access, map) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, which lives for ever.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, map, -1, 0) };
    ensure!(page != libc::MAP_FAILED, "{}", io::Error::last_os_error());
    let address = page as u64;
    order(UFFDIO_API, &mut [UFFD_API, 0, 0, 0])?;
    order(UFFDIO_REGISTER, &mut [address, PAGE as u64, REGISTER_MISSING, 0])?;
    let touch = || {
        // SAFETY: the page is mapped; reading waits until it is there, and then it is taken away again.
        unsafe {
            (address as *const u8).read_volatile();
            libc::madvise(address as *mut libc::c_void, PAGE, libc::MADV_DONTNEED);
        }
        Ok(())
    };
    let mut events = File::from(faults.try_clone()?);
    peers::play("userfaultfd", touch, |work| {
        work();
        events.read_exact(&mut [0; 32])?;
        order(UFFDIO_ZEROPAGE, &mut [address, PAGE as u64, 0, 0])
    })
}

fn ring(kind: &str, flags: squeue::Flags) -> Result<()> {
    let (read, mut write) = io::pipe()?;
    let mut ring = match IoUring::new(4) {
        Ok(ring) => ring,
        Err(error) => {
            skip(&format!("no io_uring: {error}"));
            return Ok(());
        }
    };
    let wait = || {
        let mut byte = [0_u8];
        let entry = opcode::Read::new(types::Fd(read.as_raw_fd()), byte.as_mut_ptr(), 1).build().flags(flags);
        // SAFETY: the byte lives until the request is done.
        unsafe { ring.submission().push(&entry)? };
        ring.submit_and_wait(1)?;
        let done = ring.completion().next().map(|entry| entry.result());
        ensure!(done == Some(1), "{done:?} bytes");
        Ok(())
    };
    peers::play(kind, wait, |work| {
        work();
        Ok(write.write_all(&[0])?)
    })
}
