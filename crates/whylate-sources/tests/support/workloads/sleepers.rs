// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process with threads that sleep in known functions.
#![allow(unsafe_code)]

#[path = "sleepers/alternating_stacks.rs"]
pub mod alternating_stacks;
#[path = "sleepers/lock_holders.rs"]
pub mod lock_holders;
#[path = "sleepers/migrated.rs"]
mod migrated;
#[path = "sleepers/system_calls.rs"]
pub mod system_calls;
#[path = "sleepers/wakers.rs"]
pub mod wakers;

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use whylate_model::WaitClass;

/// Function of user space, a kernel function below it, and the class of the wait there.
pub const PLACES: [(&str, &str, WaitClass); 8] = [
    ("sleep_in_futex", "futex_wait", WaitClass::Lock),
    ("sleep_in_nanosleep", "nanosleep", WaitClass::Timer),
    ("sleep_in_pipe", "pipe_read", WaitClass::Pipe),
    ("sleep_in_epoll", "epoll_wait", WaitClass::Idle),
    ("sleep_in_poll", "do_sys_poll", WaitClass::Idle),
    ("sleep_in_flock", "lock_inode_wait", WaitClass::Lock),
    ("sleep_in_condition", "futex_wait", WaitClass::Idle),
    ("sleep_in_mutex", "pipe_write", WaitClass::Lock),
];

/// Characters that break lines, JSON, XML and terminals, in the 15 bytes of a thread name.
pub const EVIL_NAME: &str = "a;\"b' \x1b<script>";

const WHAT: &str = "WHYLATE_SLEEPERS";
const COUNT: &str = "WHYLATE_SLEEPERS_COUNT";
const FILE: &str = "WHYLATE_SLEEPERS_FILE";
const READY: &str = "all asleep";

/// Returns the name of the threads in a function of [`PLACES`].
pub fn name(place: usize) -> String {
    format!("at {place}")
}

/// The process, killed on drop.
pub struct Sleepers(Child, Option<tempfile::NamedTempFile>);

impl Sleepers {
    /// Starts the process, and waits until its threads sleep.
    pub fn start(what: &str, of_each: u64) -> Result<Self> {
        Self::start_with(what, of_each, None)
    }

    /// Like [`Sleepers::start`], with a file into which threads write what they have measured.
    pub fn start_with(what: &str, of_each: u64, file: Option<tempfile::NamedTempFile>) -> Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(["--exact", "sleepers_process", "--nocapture", "--test-threads=1"])
            .env(WHAT, what)
            .env(COUNT, of_each.to_string())
            .env(FILE, file.as_ref().map_or(Path::new(""), |file| file.path()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut sleepers = Sleepers(child, file);
        let output = BufReader::new(sleepers.0.stdout.take().context("it has no output")?);
        for line in output.lines() {
            if line?.contains(READY) {
                return Ok(sleepers);
            }
        }
        bail!("the process with the sleeping threads has ended")
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns the file that its threads write.
    pub fn file(&self) -> Option<&File> {
        self.1.as_ref().map(tempfile::NamedTempFile::as_file)
    }

    pub fn thread(&self, name: &str) -> Result<u32> {
        let is_it = |tid: &&String| {
            let comm = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", self.pid()));
            comm.is_ok_and(|comm| comm.trim_end() == name)
        };
        Ok(self.threads()?.iter().find(is_it).with_context(|| format!("no thread is named {name}"))?.parse()?)
    }

    pub fn threads(&self) -> Result<BTreeSet<String>> {
        fs::read_dir(format!("/proc/{}/task", self.pid()))?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sleeps forever as the environment asks, or returns at once if it does not.
pub fn run_if_asked() -> Result<()> {
    let Ok(what) = std::env::var(WHAT) else { return Ok(()) };
    let of_each: u64 = std::env::var(COUNT)?.parse()?;
    match what.as_str() {
        "all" => {
            let functions = functions()?;
            for (place, function) in functions.into_iter().enumerate() {
                for _ in 0..of_each {
                    spawn(name(place), function)?;
                }
            }
            wait_until_asleep(of_each as usize * PLACES.len() + 1)?;
        }
        // Without threads in uninterruptible sleep, which no debugger can stop.
        "stoppable" => {
            for (place, function) in interruptible()?.into_iter().enumerate() {
                for _ in 0..of_each {
                    spawn(name(place), function)?;
                }
            }
            wait_until_asleep(of_each as usize * (PLACES.len() - 1))?;
        }
        "calls" => {
            for (name, call) in system_calls::calls()? {
                spawn(name.to_owned(), call)?;
            }
            wait_until_asleep(system_calls::CALLS.len())?;
        }
        "evil" => {
            spawn(EVIL_NAME.to_owned(), sleep_in_nanosleep)?;
            wait_until_asleep(1)?;
        }
        "deep" => {
            spawn("deep".to_owned(), || descend(200))?;
            wait_until_asleep(1)?;
        }
        "regular" => {
            for (place, function) in functions()?.into_iter().enumerate() {
                spawn(name(place), function)?;
            }
            spawn("regular".to_owned(), sleep_regularly)?;
            wait_until_asleep(PLACES.len() + 1)?;
        }
        "alternating" => {
            spawn("alternating".to_owned(), sleep_alternately)?;
            wait_until_asleep(1)?;
        }
        "shaped" => wait_until_asleep(alternating_stacks::start()?)?,
        "exec" => {
            // A thread other than the leader, which execve ends; it starts once the file is written.
            spawn("replacer".to_owned(), || {
                let path = std::env::var(FILE).unwrap_or_default();
                while fs::metadata(&path).map_or(0, |about| about.len()) == 0 {
                    thread::sleep(Duration::from_millis(10));
                }
                let error = Command::new("sleep").arg("1000").exec();
                eprintln!("no other program: {error}");
            })?;
            wait_until_asleep(1)?;
        }
        "flushing" => lock_holders::flush()?,
        "moved asleep" => migrated::start(of_each)?,
        "held" => lock_holders::start(Path::new(&std::env::var(FILE)?))?,
        "woken" => {
            wakers::start()?;
            wait_until_asleep(4)?;
        }
        "crowded" => {
            // Threads that never sleep, and one that does, all on the last CPU.
            sched_setaffinity(None, &last_of(&sched_getaffinity(None)?)?)?;
            for _ in 0..of_each {
                spawn("spins".to_owned(), || {
                    loop {
                        std::hint::spin_loop();
                    }
                })?;
            }
            spawn("sleeps".to_owned(), || {
                loop {
                    thread::sleep(Duration::from_millis(20));
                }
            })?;
        }
        "churn" => {
            for _ in 0..of_each {
                spawn("steady".to_owned(), sleep_in_nanosleep)?;
            }
            wait_until_asleep(of_each as usize)?;
            thread::spawn(|| {
                loop {
                    // Creates threads as fast as this machine can, a few at a time.
                    let some: Vec<_> = (0..8).map(|_| thread::spawn(thread::yield_now)).collect();
                    some.into_iter().for_each(|one| drop(one.join()));
                }
            });
        }
        _ => bail!("no such place"),
    }
    println!("{READY}");
    loop {
        thread::park();
    }
}

pub fn last_of(cpus: &CpuSet) -> Result<CpuSet> {
    let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| cpus.is_set(cpu)).context("there is no CPU")?;
    let mut only = CpuSet::new();
    only.set(last);
    Ok(only)
}

/// Sleeps for 7 ms in one function and for 3 ms in another of each 10 ms, by absolute times so that they do not drift.
fn sleep_regularly() {
    let mut due = Instant::now();
    loop {
        due += Duration::from_millis(7);
        sleep_for_long(due);
        due += Duration::from_millis(3);
        sleep_shortly(due);
    }
}

/// Sleeps in two system calls from one instruction, so that the frames of user space are equal.
fn sleep_alternately() {
    let mut turn = 0_u64;
    loop {
        turn += 1;
        let is_first = black_box(turn).is_multiple_of(2);
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let (call, time) = if is_first { (libc::SYS_poll, 2) } else { (libc::SYS_ppoll, &raw mut time as u64) };
        // SAFETY: there are no descriptors, and the time outlives the call, which writes down what is left of it.
        unsafe { libc::syscall(call, 0_u64, 0_u64, time, 0_u64, 0_u64) };
    }
}

#[inline(never)]
fn sleep_for_long(due: Instant) {
    thread::sleep(due.saturating_duration_since(Instant::now()));
    black_box(1);
}

#[inline(never)]
fn sleep_shortly(due: Instant) {
    thread::sleep(due.saturating_duration_since(Instant::now()));
    black_box(2);
}

fn spawn(name: String, function: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new().name(name).stack_size(128 << 10).spawn(function)?;
    Ok(())
}

/// Waits until `threads` threads of this process, besides the harness's, sleep.
fn wait_until_asleep(threads: usize) -> Result<()> {
    for _ in 0..6_000 {
        let mut asleep = 0;
        for entry in fs::read_dir("/proc/self/task")? {
            let stat = fs::read_to_string(entry?.path().join("stat")).unwrap_or_default();
            let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).chars().next();
            asleep += usize::from(matches!(state, Some('S' | 'D')));
        }
        // The harness's thread that waits for this one sleeps too.
        if asleep > threads {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("not all threads block")
}

/// A pipe without a writer, an epoll without events, and a locked file, for as long as the process lives.
static PIPE: AtomicU64 = AtomicU64::new(0);
static EPOLL: AtomicU64 = AtomicU64::new(0);
static LOCKED: AtomicU64 = AtomicU64::new(0);
/// A pipe with a mutex that a thread holds.
static HELD_PIPE: AtomicU64 = AtomicU64::new(0);

fn functions() -> Result<Vec<fn()>> {
    let mut functions = interruptible()?;
    hold_a_pipe()?;
    functions.push(sleep_in_mutex);
    Ok(functions)
}

fn interruptible() -> Result<Vec<fn()>> {
    let mut ends = [0; 2];
    // SAFETY: an array of two for the two ends.
    ensure!(unsafe { libc::pipe(ends.as_mut_ptr()) } == 0, "no pipe");
    PIPE.store(ends[0] as u64, Ordering::Relaxed);
    // SAFETY: no memory is involved.
    let epoll = unsafe { libc::epoll_create1(0) };
    ensure!(epoll >= 0, "no epoll");
    EPOLL.store(epoll as u64, Ordering::Relaxed);
    let file = tempfile::NamedTempFile::new()?;
    let (holder, waiter) = (File::open(file.path())?, File::open(file.path())?);
    // SAFETY: the descriptor is open.
    ensure!(unsafe { libc::flock(holder.as_raw_fd(), libc::LOCK_EX) } == 0, "no lock");
    LOCKED.store(waiter.as_raw_fd() as u64, Ordering::Relaxed);
    std::mem::forget((holder, waiter));
    Ok(vec![
        sleep_in_futex,
        sleep_in_nanosleep,
        sleep_in_pipe,
        sleep_in_epoll,
        sleep_in_poll,
        sleep_in_flock,
        sleep_in_condition,
    ])
}

#[inline(never)]
fn sleep_in_futex() {
    let word = 0_u32;
    // SAFETY: the word outlives the call, and no other thread knows it.
    unsafe { libc::syscall(libc::SYS_futex, &raw const word, libc::FUTEX_WAIT, 0, std::ptr::null::<c_void>()) };
    black_box(word);
}

#[inline(never)]
fn sleep_in_nanosleep() {
    let time = libc::timespec { tv_sec: 100_000, tv_nsec: 0 };
    // SAFETY: the time outlives the call.
    let outcome = unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
    black_box(outcome);
}

#[inline(never)]
fn sleep_in_pipe() {
    let mut byte = 0_u8;
    // SAFETY: one byte has room there.
    let outcome = unsafe { libc::read(PIPE.load(Ordering::Relaxed) as i32, (&raw mut byte).cast(), 1) };
    black_box(outcome);
}

#[inline(never)]
fn sleep_in_epoll() {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: one event has room there.
    let outcome = unsafe { libc::epoll_wait(EPOLL.load(Ordering::Relaxed) as i32, &raw mut event, 1, -1) };
    black_box(outcome);
}

#[inline(never)]
fn sleep_in_poll() {
    // SAFETY: there are no descriptors to read.
    let outcome = unsafe { libc::poll(std::ptr::null_mut(), 0, -1) };
    black_box(outcome);
}

#[inline(never)]
fn sleep_in_flock() {
    // SAFETY: no memory is involved.
    let outcome = unsafe { libc::flock(LOCKED.load(Ordering::Relaxed) as i32, libc::LOCK_EX) };
    black_box(outcome);
}

#[inline(never)]
fn sleep_in_condition() {
    let mut mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    let mut condition = libc::PTHREAD_COND_INITIALIZER;
    // SAFETY: both outlive the calls, and stay where they are.
    let outcome = unsafe {
        libc::pthread_mutex_lock(&raw mut mutex);
        libc::pthread_cond_wait(&raw mut condition, &raw mut mutex)
    };
    black_box(outcome);
}

/// A writer holds the pipe's mutex while a source page is missing; waiters for the mutex are uninterruptible.
#[inline(never)]
fn sleep_in_mutex() {
    let byte = 0_u8;
    // SAFETY: one byte is there.
    let outcome = unsafe { libc::write(HELD_PIPE.load(Ordering::Relaxed) as i32, (&raw const byte).cast(), 1) };
    black_box(outcome);
}

/// Has a thread hold a pipe's mutex while the process lives: it writes from a page that is never filled.
fn hold_a_pipe() -> Result<()> {
    let mut ends = [0; 2];
    // SAFETY: an array of two for the two ends.
    ensure!(unsafe { libc::pipe(ends.as_mut_ptr()) } == 0, "no pipe");
    HELD_PIPE.store(ends[1] as u64, Ordering::Relaxed);
    let (pipe, page) = (ends[1], lock_holders::missing_page()?);
    lock_holders::waits_in("holder", "handle_userfault", move || {
        // SAFETY: the page is mapped; nothing else uses it.
        let outcome = unsafe { libc::write(pipe, page as *const c_void, 1) };
        black_box(outcome);
    })
}

/// Sleeps below `frames` frames.
#[inline(never)]
fn descend(frames: u32) {
    if black_box(frames) == 0 {
        sleep_in_nanosleep();
    } else {
        descend(frames - 1);
    }
    black_box(frames);
}
