// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts a process with very many threads, which sleep in four functions. It is the test program itself.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

const THREADS: &str = "WHYLATE_CROWD";
const READY: &str = "all asleep";
const REFUSED: &str = "refused: ";

/// The functions in which the threads sleep, an equal number in each.
pub const PLACES: [&str; 4] = ["crowd_north", "crowd_east", "crowd_south", "crowd_west"];

/// Names that break lines, XML, JSON and terminals.
const NAMES: [&std::ffi::CStr; 4] = [c"plain", c"a;\"b' \x1b<script>", c"&amp; ]]> -- _", c"{\"x\": [\\"];

/// The minimum that glibc accepts.
const STACK_BYTES: usize = 16 << 10;

static ASLEEP: AtomicU32 = AtomicU32::new(0);

/// The process, killed on drop.
pub struct Crowd(Child);

impl Crowd {
    /// Starts the process, and waits until its threads sleep. The inner error is why the machine refuses that number.
    pub fn start(threads: u32) -> Result<Result<Self, String>> {
        let child = Command::new(std::env::current_exe()?)
            .args(["--exact", "crowd_process", "--nocapture", "--test-threads=1"])
            .env(THREADS, threads.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut crowd = Crowd(child);
        for line in BufReader::new(crowd.0.stdout.take().context("it has no output")?).lines() {
            let line = line?;
            if let Some((_, reason)) = line.split_once(REFUSED) {
                return Ok(Err(reason.to_owned()));
            }
            if line.contains(READY) {
                return Ok(Ok(crowd));
            }
        }
        bail!("the process with the crowd has ended")
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns its number of threads (proc_pid_status(5)).
    pub fn threads(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("Threads:")).context("it has no threads")?;
        Ok(line.trim().parse()?)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sleeps forever as the environment asks, or returns at once if it does not.
pub fn run_if_asked() -> Result<()> {
    let Ok(threads) = std::env::var(THREADS) else { return Ok(()) };
    let threads: u32 = threads.parse()?;
    for number in 0..threads {
        if let Err(error) = start_thread(number as usize) {
            println!(
                "{REFUSED}thread {number} of {threads}: {error} (kernel.threads-max, kernel.pid_max, vm.max_map_count, ulimit -u)"
            );
            return Ok(());
        }
    }
    while ASLEEP.load(Ordering::SeqCst) < threads {
        thread::sleep(Duration::from_millis(1));
    }
    // Time for the last thread to block after it has counted itself.
    thread::sleep(Duration::from_millis(200));
    println!("{READY}");
    loop {
        thread::park();
    }
}

/// Starts a thread without the memory of a Rust thread: one mapping each, so that there is room for very many.
fn start_thread(number: usize) -> std::io::Result<()> {
    let checked = |error| if error == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(error)) };
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: the call fills the structure.
    checked(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
    let attributes = attributes.as_mut_ptr();
    let mut thread = 0;
    // SAFETY: the calls change and read the attributes, which are initialized; the thread's handle is not used.
    unsafe {
        checked(libc::pthread_attr_setstacksize(attributes, STACK_BYTES))?;
        checked(libc::pthread_attr_setguardsize(attributes, 0))?;
        checked(libc::pthread_attr_setdetachstate(attributes, libc::PTHREAD_CREATE_DETACHED))?;
        checked(libc::pthread_create(&raw mut thread, attributes, sleep_at, number as *mut c_void))
    }
}

extern "C" fn sleep_at(number: *mut c_void) -> *mut c_void {
    let place = number as usize % PLACES.len();
    // SAFETY: the name ends with a zero and is static.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAMES[place].as_ptr()) };
    match place {
        0 => crowd_north(),
        1 => crowd_east(),
        2 => crowd_south(),
        _ => crowd_west(),
    }
    std::ptr::null_mut()
}

#[inline(always)]
fn sleep() {
    ASLEEP.fetch_add(1, Ordering::SeqCst);
    loop {
        // SAFETY: no memory is involved.
        unsafe { libc::pause() };
    }
}

macro_rules! place {
    ($name:ident, $number:literal) => {
        #[inline(never)]
        fn $name() {
            sleep();
            black_box($number);
        }
    };
}

place!(crowd_north, 0);
place!(crowd_east, 1);
place!(crowd_south, 2);
place!(crowd_west, 3);
