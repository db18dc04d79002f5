// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that wait and nap by turns, in eight ways: between two waits each has the CPU for some microseconds. The kernel
//! counts the waits of each thread, and none may be missing here.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::io::{read, write};
use whylate_model::path::history::{Blocked, Entry, Exit, Waker};
use whylate_sources::clock::monotonic_ns;

use super::{attach, recorded, stays_of, tid};
use crate::kernel::chance::by_chance;
use crate::kernel::turn::turn_to_measure;
use crate::kernel::{amount, file_on_disk, is_emulated};

/// How long a thread naps between two waits.
const NAP: Duration = Duration::from_millis(1);
/// After this long, each CPU has been switched.
const SETTLED: Duration = Duration::from_millis(100);
/// How long the other one works before it ends a wait.
const WORK: Duration = Duration::from_millis(3);
/// Of the waits, at most so many may have another ender than was meant: who else takes a lock, or sends a signal.
const OTHERWISE: f64 = 0.02;

/// What a thread did between two moments.
#[derive(Debug)]
struct Did {
    tid: u32,
    from_ns: u64,
    to_ns: u64,
    /// How often it has left its CPU to wait, by the kernel's count.
    waits: usize,
    /// Who was to end the waits between its naps.
    other: Option<u32>,
}

/// How often this thread has left its CPU to wait.
fn waits_so_far() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    Ok(count.context("the kernel counts switches")?.trim().parse()?)
}

fn naps_between(rounds: usize, mut wait: impl FnMut() -> Result<()>) -> Result<Did> {
    let (before, from_ns) = (waits_so_far()?, monotonic_ns());
    for _ in 0..rounds {
        wait()?;
        thread::sleep(NAP);
    }
    let to_ns = monotonic_ns();
    Ok(Did { tid: tid(), from_ns, to_ns, waits: waits_so_far()? - before, other: None })
}

/// The same beside a thread that works for a while before it ends each wait.
fn naps_beside(
    rounds: usize,
    wait: impl FnMut() -> Result<()>,
    mut end: impl FnMut() -> Result<()> + Send + 'static,
) -> Result<Did> {
    let other = thread::spawn(move || -> Result<u32> {
        for _ in 0..rounds {
            let until = Instant::now() + WORK;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            end()?;
        }
        Ok(tid())
    });
    let did = naps_between(rounds, wait)?;
    Ok(Did { other: Some(other.join().expect("it does not panic")?), ..did })
}

/// Each wait of the thread is there, and of those in this system call nearly all were ended as they were, or that is not seen.
fn ensure_told(
    what: &str,
    syscall: i64,
    naps: impl FnOnce(usize) -> Result<Did>,
    is_right: impl Fn(Waker, &Did) -> bool,
) -> Result<()> {
    let mut edges = attach()?;
    // Each CPU is known from its first switch on.
    thread::sleep(SETTLED);
    let rounds = amount(60) as usize;
    let did = naps(rounds)?;
    let stays = stays_of(&recorded(&edges)?, did.tid);
    let within = did.from_ns..did.to_ns;
    let waits = stays.windows(2).filter_map(|pair| match pair[0].exit {
        Exit::Blocked(Blocked { syscall, .. }) if within.contains(&pair[0].end_ns) => Some((syscall, pair[1].entry)),
        _ => None,
    });
    let waits: Vec<(Option<u16>, Entry)> = waits.collect();
    let of = |wanted: i64| waits.iter().filter(move |(number, _)| number.map(i64::from) == Some(wanted));
    let (naps, meant) = (of(libc::SYS_clock_nanosleep).count(), of(syscall).count());
    let otherwise = |by: &dyn Fn(Waker) -> bool, wanted: i64| {
        let is_wrong = |(_, entry): &&(Option<u16>, Entry)| match entry {
            Entry::Woken { by: waker, .. } => !by(*waker),
            entry => *entry != Entry::Unseen,
        };
        of(wanted).filter(is_wrong).inspect(|(_, entry)| println!("{what}: {entry:?}")).count()
    };
    let wrong = otherwise(&|by| is_right(by, &did), syscall);
    let wrong_naps = otherwise(&|by| matches!(by, Waker::Timer(_)), libc::SYS_clock_nanosleep);
    let unseen = waits.iter().filter(|(_, entry)| *entry == Entry::Unseen).count();
    println!(
        "{what}: {} waits of {}: {naps} naps ({wrong_naps} wrong), {meant} in {what} ({wrong} wrong), {unseen} unseen",
        waits.len(),
        did.waits
    );
    // Where a program of the account is interrupted or preempted at its work, as in an emulated CPU, what comes meanwhile is
    // missing, and counted.
    let nested = edges.take_lost().into_iter().find(|(reason, _)| *reason == "occupancy_nested");
    let nested = nested.map_or(0, |(_, count)| count as usize);
    let missing = did.waits.abs_diff(waits.len());
    ensure!(missing <= nested, "{what}: the kernel has counted {} waits, not {}", did.waits, waits.len());
    ensure!(naps + nested >= rounds, "{what}: {naps} naps of {rounds}");
    ensure!((meant + nested) * 2 >= rounds, "{what}: {meant} waits in {rounds} rounds");
    let tolerated = |waits: usize| if is_emulated() { waits / 2 } else { by_chance(waits, OTHERWISE) };
    ensure!(wrong <= tolerated(meant), "{what}: {wrong} of {meant} were ended otherwise");
    ensure!(wrong_naps <= tolerated(naps), "{what}: {wrong_naps} of {naps} naps were ended otherwise");
    Ok(())
}

fn by_other(by: Waker, did: &Did) -> bool {
    did.other.is_some_and(|other| by == Waker::Thread(other))
}

#[test]
fn no_wait_of_a_thread_that_naps_between_them_is_missing() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let at_pipe = |rounds| {
        let (mut from, mut to) = std::io::pipe()?;
        naps_beside(rounds, || Ok(from.read_exact(&mut [0])?), move || Ok(to.write_all(&[0])?))
    };
    ensure_told("pipe", libc::SYS_read, at_pipe, by_other)?;
    let at_socket = |rounds| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        let (mut server, _) = listener.accept()?;
        client.set_nodelay(true)?;
        naps_beside(rounds, move || Ok(server.read_exact(&mut [0])?), move || Ok(client.write_all(&[0])?))
    };
    ensure_told("socket", libc::SYS_recvfrom, at_socket, by_other)?;
    let at_futex = |rounds| {
        let turns = Arc::new((Mutex::new(0), Condvar::new()));
        let ended = Arc::clone(&turns);
        let wait = || {
            let taken = turns.1.wait_while(turns.0.lock().expect("no holder panics"), |turns| *turns == 0);
            *taken.expect("no holder panics") -= 1;
            Ok(())
        };
        naps_beside(rounds, wait, move || {
            *ended.0.lock().expect("no holder panics") += 1;
            ended.1.notify_one();
            Ok(())
        })
    };
    ensure_told("futex", libc::SYS_futex, at_futex, by_other)?;
    let at_epoll = |rounds| {
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE)?);
        let ended = Arc::clone(&event);
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&all, &*event, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let wait = || {
            let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            epoll::wait(&all, &mut events, None)?;
            read(&*event, &mut [0; 8])?;
            Ok(())
        };
        naps_beside(rounds, wait, move || {
            write(&*ended, &1_u64.to_ne_bytes())?;
            Ok(())
        })
    };
    ensure_told("epoll", libc::SYS_epoll_pwait, at_epoll, by_other)
}

#[test]
fn no_wait_for_the_kernel_is_missing_between_naps() -> Result<()> {
    let (Some(_turn), Some(file)) = (turn_to_measure(), file_on_disk()?) else { return Ok(()) };
    let for_timer = |rounds| {
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let (from, _to) = std::io::pipe()?;
        naps_between(rounds, || {
            poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&timeout))?;
            Ok(())
        })
    };
    ensure_told("timer", libc::SYS_ppoll, for_timer, |by, _| matches!(by, Waker::Timer(_)))?;
    let for_disk = |rounds| {
        naps_between(rounds, || {
            file.write_all_at(&[1; 64 << 10], 0)?;
            Ok(file.sync_data()?)
        })
    };
    // Of the file system's journal too.
    let by_disk = |by, _: &Did| matches!(by, Waker::Disk(_) | Waker::Thread(_) | Waker::Irq | Waker::Softirq);
    ensure_told("disk", libc::SYS_fdatasync, for_disk, by_disk)?;
    // Each CPU has a work item do it.
    let for_items = |rounds| {
        let mut refreshed = File::open("/proc/sys/vm/stat_refresh")?;
        naps_between(rounds, || {
            std::io::Seek::rewind(&mut refreshed)?;
            let _ = refreshed.read(&mut [0; 1])?;
            Ok(())
        })
    };
    ensure_told(
        "work items",
        libc::SYS_read,
        for_items,
        |by, did| matches!(by, Waker::Thread(worker) if worker != did.tid),
    )
}

#[test]
#[allow(unsafe_code)]
fn no_wait_for_a_signal_is_missing_between_naps() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    // One that is queued, however many come.
    let signal = libc::SIGRTMIN();
    let at_signals = |rounds| {
        // SAFETY: `set` is a set of signals that is written before it is read. Of this thread alone is the signal blocked, and to
        // this thread alone, which is there until the other one has ended, is it sent.
        let set = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        let (process, receiver) = (std::process::id(), tid());
        let wait = || {
            let most = libc::timespec { tv_sec: 5, tv_nsec: 0 };
            // SAFETY: as above.
            let received = unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const most) };
            ensure!(received == signal, "{received} came");
            Ok(())
        };
        naps_beside(rounds, wait, move || {
            // SAFETY: it passes numbers alone.
            let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, receiver, signal) };
            ensure!(sent == 0, "the signal was not sent: {}", std::io::Error::last_os_error());
            Ok(())
        })
    };
    ensure_told("signal", libc::SYS_rt_sigtimedwait, at_signals, by_other)
}
