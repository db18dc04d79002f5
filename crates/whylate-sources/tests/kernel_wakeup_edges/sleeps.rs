// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that alternately wait, in eight ways, and nap, with some microseconds on the CPU between two waits. The
//! kernel counts the waits of each thread, and none may be missing; its trace of wakings shows who ended each of them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::io::{read, write};
use whylate_model::path::history::{Blocked, SwitchIn, SwitchOut, Waker};
use whylate_sources::Edges;
use whylate_sources::kernel::clock::monotonic_ns;

use super::{APART_US, attach, field, is_same, recorded, stays_of, tid};
use crate::support::machine::lock::lock_machine;
use crate::support::oracles::chance::by_chance;
use crate::support::oracles::trace::{Trace, TraceLine};
use crate::support::{amount, file_on_disk, is_emulated};

/// How long a thread naps between two waits.
const NAP: Duration = Duration::from_millis(1);
/// After this long, each CPU has switched.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// How long the waker works before it ends a wait: long enough for the other thread to wait by then.
fn work_time() -> Duration {
    Duration::from_millis(if is_emulated() { 30 } else { 3 })
}
/// Maximum share of waits that end by another waker than the intended one: others take locks, or send signals.
const MAX_OTHER_WAKERS: f64 = 0.02;
/// Maximum share of wakeups for which the kernel's trace differs: a CPU may be stolen between the two.
const MAX_UNTRACED: f64 = 0.001;

/// Waits of a thread in a span of time.
#[derive(Debug)]
struct Waited {
    tid: u32,
    from_ns: u64,
    to_ns: u64,
    /// Voluntary switch-outs, by the kernel's count.
    waits: usize,
    /// TID of the intended waker.
    other: Option<u32>,
}

/// Returns the voluntary switch-outs of this thread so far.
fn waits_so_far() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    Ok(count.context("the kernel counts switches")?.trim().parse()?)
}

fn naps_between(rounds: usize, mut wait: impl FnMut() -> Result<()>) -> Result<Waited> {
    // The first call reads memory that may not be there yet.
    waits_so_far()?;
    let (before, from_ns) = (waits_so_far()?, monotonic_ns());
    for _ in 0..rounds {
        wait()?;
        thread::sleep(NAP);
    }
    let to_ns = monotonic_ns();
    Ok(Waited { tid: tid(), from_ns, to_ns, waits: waits_so_far()? - before, other: None })
}

/// Like [`naps_between`], with a thread that works for a while before it ends each wait.
fn naps_beside(
    rounds: usize,
    mut wait: impl FnMut() -> Result<()>,
    mut end: impl FnMut() -> Result<()> + Send + 'static,
) -> Result<Waited> {
    // Number of waits that the thread has started or starts next: its waker ends none of them earlier.
    let started = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&started);
    let other = thread::spawn(move || -> Result<u32> {
        for round in 0..rounds {
            while seen.load(Ordering::Acquire) <= round {
                std::hint::spin_loop();
            }
            let until = Instant::now() + work_time();
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            end()?;
        }
        Ok(tid())
    });
    let waited = naps_between(rounds, || {
        started.fetch_add(1, Ordering::Release);
        wait()
    });
    // The other thread ends, whatever has failed here.
    started.store(usize::MAX, Ordering::Release);
    let waited = waited?;
    Ok(Waited { other: Some(other.join().expect("it does not panic")?), ..waited })
}

/// Rounds of which the rings keep all events.
const ROUNDS: u64 = 60;

/// Checks that each wait of the thread is there, and that almost all of those in this system call ended as `is_right`
/// says, or unseen. `WHYLATE_ROUNDS` sets the number of waits.
fn ensure_waits_reported(
    what: &str,
    syscall: i64,
    naps: impl Fn(usize) -> Result<Waited>,
    is_right: impl Fn(Waker, &Waited) -> bool,
) -> Result<()> {
    let mut edges = attach()?;
    // Each CPU's timeline starts with its first switch.
    thread::sleep(SETTLE_TIME);
    let rounds = std::env::var("WHYLATE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    for _ in 0..rounds.div_ceil(ROUNDS) {
        ensure_rounds_reported(&mut edges, what, syscall, &naps, &is_right)?;
    }
    Ok(())
}

fn ensure_rounds_reported(
    edges: &mut Edges,
    what: &str,
    syscall: i64,
    naps: &impl Fn(usize) -> Result<Waited>,
    is_right: &impl Fn(Waker, &Waited) -> bool,
) -> Result<()> {
    let rounds = amount(ROUNDS) as usize;
    let trace = Trace::record(&["sched/sched_waking"])?;
    let waited = naps(rounds)?;
    // Where a kernel hides switches out of idle, a switch-in is known by the next event on its CPU: without the sleep,
    // the last nap would have no end if this thread goes on.
    thread::sleep(SETTLE_TIME);
    let stays = stays_of(&recorded(edges)?, waited.tid);
    let wakings = trace.finish_lines()?;
    let within = waited.from_ns..waited.to_ns;
    let waits = stays.windows(2).filter_map(|pair| match pair[0].exit {
        SwitchOut::Blocked(Blocked { syscall, .. }) if within.contains(&pair[0].end_ns) => {
            Some((syscall, pair[1].entry))
        }
        _ => None,
    });
    let waits: Vec<(Option<u16>, SwitchIn)> = waits.collect();
    let of = |wanted: i64| waits.iter().filter(move |(number, _)| number.map(i64::from) == Some(wanted));
    let (naps, meant) = (of(libc::SYS_clock_nanosleep).count(), of(syscall).count());
    let otherwise = |by: &dyn Fn(Waker) -> bool, wanted: i64| {
        let is_wrong = |(_, entry): &&(Option<u16>, SwitchIn)| match entry {
            SwitchIn::Woken { by: waker, .. } => !by(*waker),
            entry => *entry != SwitchIn::Unseen,
        };
        of(wanted).filter(is_wrong).inspect(|(_, entry)| println!("{what}: {entry:?}")).count()
    };
    let wrong = otherwise(&|by| is_right(by, &waited), syscall);
    let wrong_naps = otherwise(&|by| matches!(by, Waker::Timer(_)), libc::SYS_clock_nanosleep);
    let unseen = waits.iter().filter(|(_, entry)| *entry == SwitchIn::Unseen).count();
    let wakings: Vec<&TraceLine> = wakings.iter().filter(|line| field(line, "pid=") == Some(waited.tid)).collect();
    let untraced = waits.iter().filter(|(_, entry)| !is_traced(*entry, &wakings));
    let untraced = untraced.inspect(|(_, entry)| println!("{what}: {entry:?}, but {:?}", nearest(*entry, &wakings)));
    let untraced = untraced.count();
    println!(
        "{what}: {} waits of {}: {naps} naps ({wrong_naps} wrong), {meant} in {what} ({wrong} wrong), {unseen} unseen, \
         {untraced} not as in the kernel's trace",
        waits.len(),
        waited.waits
    );
    // Events that come while a program of the account is interrupted or preempted, as on an emulated CPU, are missing,
    // and counted.
    let nested = edges.take_lost().into_iter().find(|(reason, _)| *reason == "occupancy_nested");
    let nested = nested.map_or(0, |(_, count)| count as usize);
    let most = if is_emulated() { waits.len() / 2 } else { by_chance(waits.len(), MAX_UNTRACED) };
    ensure!(untraced <= most, "{what}: {untraced} wakeups are not in the trace");
    let missing = waited.waits.abs_diff(waits.len());
    ensure!(missing <= nested, "{what}: the kernel has counted {} waits, not {}", waited.waits, waits.len());
    // The time of a nap may be over before its thread can sleep: often on an emulated CPU, and if a CPU is stolen.
    let over_early = if is_emulated() { rounds / 4 } else { 2 };
    ensure!(naps + nested + over_early >= rounds, "{what}: {naps} naps of {rounds}");
    ensure!((meant + nested) * 2 >= rounds, "{what}: {meant} waits in {rounds} rounds");
    let tolerated = |waits: usize| if is_emulated() { waits / 2 } else { by_chance(waits, MAX_OTHER_WAKERS) };
    ensure!(wrong <= tolerated(meant), "{what}: {wrong} of {meant} were ended otherwise");
    ensure!(wrong_naps <= tolerated(naps), "{what}: {wrong_naps} of {naps} naps were ended otherwise");
    Ok(())
}

/// Returns whether the kernel's trace has the wakeup that ended a wait: at that time, on that CPU, by that waker.
fn is_traced(entry: SwitchIn, wakings: &[&TraceLine]) -> bool {
    let SwitchIn::Woken { at_ns, by, cpu } = entry else { return true };
    let apart_us = if is_emulated() { 20 * APART_US } else { APART_US };
    let mut near = wakings.iter().filter(|line| (at_ns / 1_000).abs_diff(line.at_us) <= apart_us && line.cpu == cpu);
    near.any(|line| is_same(line, by))
}

/// Returns the waking in the kernel's trace that is nearest in time.
fn nearest<'a>(entry: SwitchIn, wakings: &[&'a TraceLine]) -> Option<&'a TraceLine> {
    let SwitchIn::Woken { at_ns, .. } = entry else { return None };
    wakings.iter().copied().min_by_key(|line| (at_ns / 1_000).abs_diff(line.at_us))
}

fn by_other(by: Waker, waited: &Waited) -> bool {
    waited.other.is_some_and(|other| by == Waker::Thread(other))
}

#[test]
fn no_wait_for_a_thread_is_missing_between_naps() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let at_pipe = |rounds| {
        let (mut from, mut to) = std::io::pipe()?;
        naps_beside(rounds, || Ok(from.read_exact(&mut [0])?), move || Ok(to.write_all(&[0])?))
    };
    ensure_waits_reported("pipe", libc::SYS_read, at_pipe, by_other)?;
    let at_socket = |rounds| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        let (mut server, _) = listener.accept()?;
        client.set_nodelay(true)?;
        naps_beside(rounds, move || Ok(server.read_exact(&mut [0])?), move || Ok(client.write_all(&[0])?))
    };
    ensure_waits_reported("socket", libc::SYS_recvfrom, at_socket, by_other)?;
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
    ensure_waits_reported("futex", libc::SYS_futex, at_futex, by_other)?;
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
    ensure_waits_reported("epoll", libc::SYS_epoll_pwait, at_epoll, by_other)
}

#[test]
fn no_wait_for_the_kernel_is_missing_between_naps() -> Result<()> {
    let (Some(_lock), Some(file)) = (lock_machine(), file_on_disk()?) else { return Ok(()) };
    let for_timer = |rounds| {
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let (from, _to) = std::io::pipe()?;
        naps_between(rounds, || {
            poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&timeout))?;
            Ok(())
        })
    };
    ensure_waits_reported("timer", libc::SYS_ppoll, for_timer, |by, _| matches!(by, Waker::Timer(_)))?;
    let for_disk = |rounds| {
        naps_between(rounds, || {
            file.write_all_at(&[1; 64 << 10], 0)?;
            Ok(file.sync_data()?)
        })
    };
    // Includes the file system's journal.
    let by_disk = |by, _: &Waited| matches!(by, Waker::Disk(_) | Waker::Thread(_) | Waker::Irq | Waker::Softirq);
    ensure_waits_reported("disk", libc::SYS_fdatasync, for_disk, by_disk)?;
    // A work item on each CPU does it.
    let for_items = |rounds| {
        let mut refreshed = File::open("/proc/sys/vm/stat_refresh")?;
        naps_between(rounds, || {
            std::io::Seek::rewind(&mut refreshed)?;
            let _ = refreshed.read(&mut [0; 1])?;
            Ok(())
        })
    };
    ensure_waits_reported(
        "work items",
        libc::SYS_read,
        for_items,
        |by, waited| matches!(by, Waker::Thread(worker) if worker != waited.tid),
    )
}

#[test]
#[allow(unsafe_code)]
fn no_wait_for_a_signal_is_missing_between_naps() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    // A real-time signal, which is queued instead of merged.
    let signal = libc::SIGRTMIN();
    let at_signals = |rounds| {
        // SAFETY: `set` is a set of signals that is written before it is read. The signal is blocked in, and sent to,
        // this thread only, which outlives the sender.
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
            // SAFETY: it passes integers only.
            let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, receiver, signal) };
            ensure!(sent == 0, "the signal was not sent: {}", std::io::Error::last_os_error());
            Ok(())
        })
    };
    ensure_waits_reported("signal", libc::SYS_rt_sigtimedwait, at_signals, by_other)
}
